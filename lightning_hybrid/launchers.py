"""Lightning's process launcher, told that a rank may hold only a part of the module."""

from __future__ import annotations

from typing import Any

from lightning.pytorch.strategies.launchers.multiprocessing import _MultiProcessingLauncher
from typing_extensions import override

__all__ = ["HybridMultiProcessingLauncher"]


class HybridMultiProcessingLauncher(_MultiProcessingLauncher):
    """Starts ranks by fork or spawn and hands the whole module's weights back to the main process."""

    @override
    def _collect_rank_zero_results(self, trainer: Any, results: Any) -> Any:
        # the base class asks the module, which holds this rank's part only; the strategy gathers all parts
        whole = self._strategy.lightning_module_state_dict()
        module = trainer.lightning_module
        module.__dict__["state_dict"] = lambda *args, **kwargs: whole
        try:
            return super()._collect_rank_zero_results(trainer, results)
        finally:
            del module.__dict__["state_dict"]

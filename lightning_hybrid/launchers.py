"""Lightning's process launcher, told that a rank may hold only a part of the module."""

from __future__ import annotations

import gc
import io
from typing import Any

import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies.launchers.multiprocessing import _MultiProcessingLauncher
from typing_extensions import override

__all__ = ["HybridMultiProcessingLauncher"]


class HybridMultiProcessingLauncher(_MultiProcessingLauncher):
    """Starts ranks by fork or spawn and hands back what a script's own processes would be left with.

    That is the whole module's weights and, beyond what Lightning's launcher returns, the progress of ``fit`` (such as
    ``trainer.global_step``) and the callbacks' states (such as ``best_model_score``).
    """

    _states: dict[str, Any]

    @override
    def _wrapping_function(self, *args: Any, **kwargs: Any) -> None:
        if self._start_method == "fork":
            gc.freeze()  # garbage of the notebook, such as process groups, may own threads this process lacks
        super()._wrapping_function(*args, **kwargs)

    @override
    def _collect_rank_zero_results(self, trainer: Any, results: Any) -> Any:
        callbacks = {callback.state_key: callback.state_dict() for callback in trainer.callbacks}  # on all ranks
        self._states = {"callbacks": callbacks, "progress": trainer.fit_loop.state_dict()}
        # the base class asks the module, which holds this rank's part only; the strategy gathers all parts
        strategy: Any = self._strategy
        whole = strategy.whole_state()
        module = trainer.lightning_module
        module.__dict__["state_dict"] = lambda *args, **kwargs: whole
        try:
            return super()._collect_rank_zero_results(trainer, results)
        finally:
            del module.__dict__["state_dict"]

    @override
    def get_extra_results(self, trainer: Any) -> dict[str, Any]:
        buffer = io.BytesIO()  # as Lightning does: tensors in a queue would need shared memory
        torch.save(self._states, buffer)
        return {**super().get_extra_results(trainer), "states": buffer.getvalue()}

    @override
    def update_main_process_results(self, trainer: Any, extra: dict[str, Any]) -> None:
        super().update_main_process_results(trainer, extra)
        states = torch.load(io.BytesIO(extra["states"]), weights_only=False)  # of our own child
        trainer.fit_loop.load_state_dict(states["progress"])
        for callback in trainer.callbacks:
            if state := states["callbacks"].get(callback.state_key):
                if isinstance(callback, ModelCheckpoint):
                    callback.dirpath = state["dirpath"]  # resolved by the ranks
                callback.load_state_dict(state)

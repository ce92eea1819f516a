"""Lightning's process launchers, told that a rank may hold only a part of the module and that jobs are restarted."""

from __future__ import annotations

import gc
import io
from typing import Any

import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies.launchers.launcher import _Launcher
from lightning.pytorch.strategies.launchers.multiprocessing import _MultiProcessingLauncher
from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher
from typing_extensions import override

from lightning_hybrid.restart import prepare_for_restarts

__all__ = ["HybridMultiProcessingLauncher", "make_launcher"]


def make_launcher(strategy: Any) -> _Launcher:
    """Return what starts a strategy's ranks, as its settings and the cluster say."""
    environment, start_method = strategy.cluster_environment, strategy.settings.start_method
    if environment.creates_processes_externally:
        return _InThisProcess()
    if start_method == "popen":
        return _ScriptLauncher(environment, strategy.num_processes, strategy.num_nodes)
    return HybridMultiProcessingLauncher(strategy, start_method=start_method)


class _Restartable(_Launcher):
    """Before anything is run, see :mod:`lightning_hybrid.restart`."""

    @override
    def launch(self, function: Any, *args: Any, trainer: Any = None, **kwargs: Any) -> Any:
        if trainer is not None:
            prepare_for_restarts(trainer)
        return super().launch(function, *args, trainer=trainer, **kwargs)  # type: ignore[safe-super]


class _Here(_Launcher):
    """Runs a function; the processes are there."""

    is_interactive_compatible = True

    @override
    def launch(self, function: Any, *args: Any, trainer: Any = None, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    @override
    def kill(self, signum: Any) -> None:
        """Nothing was started here."""


class _InThisProcess(_Restartable, _Here):
    """Under ``torchrun`` and SLURM, and in the processes that Lightning has started."""


class _ScriptLauncher(_Restartable, _SubprocessScriptLauncher):
    """Starts the script again for each rank."""


class HybridMultiProcessingLauncher(_Restartable, _MultiProcessingLauncher):
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

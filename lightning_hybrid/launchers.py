"""Lightning's process launchers, told that a rank may hold a part of the module only, and that jobs may fail."""

from __future__ import annotations

import gc
import os
import subprocess
import tempfile
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from lightning.fabric.utilities.distributed import _set_num_threads_if_needed
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies.launchers.launcher import _Launcher
from lightning.pytorch.strategies.launchers.multiprocessing import _MultiProcessingLauncher
from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning_utilities.core.rank_zero import rank_zero_warn
from typing_extensions import override

from lightning_hybrid.choosing.tuning import tune
from lightning_hybrid.failures.failing import failing_together, kill_all, run_together, watch_children
from lightning_hybrid.failures.last_rows import wandb_runs_ended
from lightning_hybrid.failures.restart import prepare_for_restarts
from lightning_hybrid.machine.rank_variables import check_rank_variables

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
    """Before anything is run, see :mod:`lightning_hybrid.failures.restart`."""

    @override
    def launch(self, function: Any, *args: Any, trainer: Any = None, **kwargs: Any) -> Any:
        if trainer is not None:
            strategy = trainer.strategy
            check_rank_variables(
                strategy.cluster_environment, num_devices=strategy.num_processes, num_nodes=strategy.num_nodes
            )
            prepare_for_restarts(trainer)
            self._tune(function, args, trainer)
            function = self._guarded(function, trainer)
        return super().launch(function, *args, trainer=trainer, **kwargs)  # type: ignore[safe-super]

    def _tune(self, function: Any, args: tuple[Any, ...], trainer: Any) -> None:
        """See :mod:`lightning_hybrid.choosing.tuning`. Not where the ranks run already."""
        if isinstance(self, _InThisProcess):
            return

        def start(strategy: Any) -> None:
            strategy.cluster_environment._main_port = -1  # a free one for each trial
            os.environ.pop("MASTER_PORT", None)
            launcher = HybridMultiProcessingLauncher(strategy, start_method="fork")
            launcher.launch(function, *args[:4], None, None, trainer=trainer)

        tune(start, trainer.strategy, trainer, args)

    def _guarded(self, function: Any, trainer: Any) -> Any:
        """What is run instead of ``function``, see :mod:`lightning_hybrid.failures.failing`."""
        return partial(run_together, trainer, function)


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


class _Scripts(_SubprocessScriptLauncher):
    """Starts the script again for each rank, and looks after these processes by itself.

    Lightning's observer kills all of them, this one too, within five seconds after one has failed, and says nothing.
    """

    @override
    def launch(self, function: Any, *args: Any, trainer: Any = None, **kwargs: Any) -> Any:
        self.cluster_environment.validate_settings(num_devices=self.num_processes, num_nodes=self.num_nodes)
        self._call_children_scripts()
        watch_children(self.procs, trainer)
        _set_num_threads_if_needed(num_processes=self.num_processes)
        return function(*args, **kwargs)

    def kill_all(self) -> None:
        """End the processes that were started here, at once."""
        kill_all(self.procs)


class _ScriptLauncher(_Restartable, _Scripts):
    """Starts the script again for each rank."""

    procs: list[subprocess.Popen[Any]]


class _Results:
    """What a process hands back, which travels in a file: the parent reads its pipe, which holds 64 KB, at the end."""

    def __init__(self, results: Any) -> None:
        self._results = results

    def __reduce__(self) -> Any:
        descriptor, path = tempfile.mkstemp(prefix="lightning_hybrid_results_")
        with os.fdopen(descriptor, "wb") as file:
            torch.save(self._results, file)  # by pickle alone, tensors would need shared memory
        return _read_and_remove, (path,)


def _read_and_remove(path: str) -> Any:
    try:
        return torch.load(path, weights_only=False)  # of our own child
    finally:
        os.remove(path)


class _ReturnQueue:
    """Takes results of any size without anybody reading."""

    def __init__(self, queue: Any) -> None:
        self._queue = queue

    def put(self, results: Any) -> None:
        self._queue.put(_Results(results))


class HybridMultiProcessingLauncher(_Restartable, _MultiProcessingLauncher):
    """Starts ranks by fork or spawn and hands back what a script's own processes would be left with.

    That is the whole module's weights and, beyond what Lightning's launcher returns, the progress of ``fit`` (such as
    ``trainer.global_step``) and the callbacks' states (such as ``best_model_score``).
    """

    _states: dict[str, Any]

    @override
    def _guarded(self, function: Any, trainer: Any) -> Any:
        return function  # this process is no rank

    @override
    def _wrapping_function(
        self, process_idx: int, trainer: Any, function: Any, args: Any, kwargs: Any, queue: Any, states: Any = None
    ) -> None:
        if self._start_method == "fork":
            gc.freeze()  # garbage of the notebook, such as process groups, may own threads this process lacks
        try:
            with wandb_runs_ended(trainer), failing_together(self._strategy, trainer):
                results = _ReturnQueue(queue)
                super()._wrapping_function(process_idx, trainer, function, args, kwargs, results, states)  # type: ignore[arg-type]
        except SystemExit as error:  # with 0, sys.exit() in a hook, the parent would wait for results for ever
            raise SystemExit(error.code or 1) from error

    @override
    def _collect_rank_zero_results(self, trainer: Any, results: Any) -> Any:
        callbacks = {callback.state_key: callback.state_dict() for callback in trainer.callbacks}  # on all ranks
        # the base class asks the module, which holds this rank's part only; the strategy gathers all parts
        strategy: Any = self._strategy
        whole = strategy.whole_state()
        self._states = {"callbacks": callbacks, "progress": trainer.fit_loop.state_dict(), "keys": list(whole)}
        module = trainer.lightning_module
        module.__dict__["state_dict"] = lambda *args, **kwargs: whole
        try:
            return super()._collect_rank_zero_results(trainer, results)
        finally:
            del module.__dict__["state_dict"]

    @override
    def _recover_results_in_main_process(self, worker_output: Any, trainer: Any) -> None:
        module = trainer.lightning_module
        if worker_output.weights_path is not None and is_overridden("configure_model", module):
            with suppress(Exception):  # it may need a device mesh, or a device, that is not there; see what follows
                module.configure_model()
        super()._recover_results_in_main_process(worker_output, trainer)

    @override
    def get_extra_results(self, trainer: Any) -> dict[str, Any]:
        return {**super().get_extra_results(trainer), "states": self._states}

    @override
    def update_main_process_results(self, trainer: Any, extra: dict[str, Any]) -> None:
        super().update_main_process_results(trainer, extra)
        states = extra["states"]
        trainer.fit_loop.load_state_dict(states["progress"])
        module = trainer.lightning_module
        there = {key for key, value in module.state_dict().items() if not getattr(value, "is_meta", False)}
        if lost := sorted(set(states["keys"]) - there):
            rank_zero_warn(
                f"{type(module).__name__} was built in the processes that were started (configure_model), and has no"
                f" {lost[0]} (and {len(lost) - 1} others) here. To use what was trained, call"
                f" {type(module).__name__}.load_from_checkpoint(trainer.checkpoint_callback.best_model_path)."
            )
        for callback in trainer.callbacks:
            if state := states["callbacks"].get(callback.state_key):
                if isinstance(callback, ModelCheckpoint):
                    callback.dirpath = state["dirpath"]  # resolved by the ranks
                callback.load_state_dict(state)

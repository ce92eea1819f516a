"""``tune=N``: the planner's best N degrees run a few steps each, and the fastest are taken.

[Note: what a trial leaves]
Nothing: it is a process forked from the script's before any rank is started, which starts ranks of its own by fork.
Model, data, random states and loggers are its copies. It has no loggers and no callbacks but
:class:`~lightning_hybrid.callbacks.ConfigArchive`, whose entries (out of memory, too) are what later runs learn from.
"""

from __future__ import annotations

import itertools
import logging
import multiprocessing
import os
import signal
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Any

import lightning as L
from lightning.pytorch.trainer.states import TrainerFn
from lightning_utilities.core.rank_zero import rank_zero_info
from typing_extensions import override

from lightning_hybrid.choosing.plan import PlanChoice, planned_choices
from lightning_hybrid.planner.setup import describe

__all__ = ["Trial", "fastest", "tune"]

logger = logging.getLogger(__name__)

#: Optimizer steps of a trial, and of them those before the clock starts.
STEPS, WARMUP = 8, 3
#: Seconds after which a trial is given up.
PATIENCE = 900.0


@dataclass(frozen=True)
class Trial:
    """One trial's outcome."""

    plan: PlanChoice
    seconds: float | None
    """Of an optimizer step; ``None`` if it failed."""
    problem: str = ""

    @property
    def score(self) -> float:
        """Seconds by samples: a data rank's batch is the same in all trials."""
        assert self.seconds is not None
        return self.seconds / self.plan.layout.data_parallel_size


def fastest(trials: Sequence[Trial]) -> Trial | None:
    """Return the trial with the most samples per second; ``None`` if all failed."""
    return min((trial for trial in trials if trial.seconds is not None), key=lambda trial: trial.score, default=None)


def tune(launch: Callable[[Any], Any], strategy: Any, trainer: Any, arguments: Sequence[Any]) -> None:
    """Try plans, if the user asked for it and gave no degrees, and note the fastest in ``strategy.choice.tuned``.

    Args:
        launch: Starts ranks by fork that fit what the trainer is set to.
        strategy: The strategy, in the script's process, no rank of which runs.
        trainer: Its Trainer, about to fit.
        arguments: What ``fit`` was given.
    """
    num_devices = strategy.num_nodes * strategy.num_processes
    wanted, choice = strategy.settings.tune, strategy.choice
    if not wanted or not choice.is_open or trainer.state.fn != TrainerFn.FITTING or num_devices == 1:
        return
    if strategy.num_nodes > 1:
        logger.warning("tune=%d has no effect on several nodes: trials are started on one.", wanted)
        return
    try:
        with _data_in_sight(trainer, strategy.lightning_module, arguments):
            plans = planned_choices(strategy, strategy.lightning_module, num_devices, wanted)
    except Exception as error:  # the run itself chooses by the simple rule, and says why
        logger.warning("tune=%d has no effect: there are no plans to try (%s).", wanted, error)
        return
    trials = []
    for plan in plans:
        trials.append(trial := _try(launch, strategy, trainer, plan))
        took = f"{trial.seconds:.4g} s a step" if trial.seconds is not None else trial.problem
        rank_zero_info(f"lightning_hybrid: tried {describe(plan.layout)}: {took}")
    choice.tuned_failures = {trial.plan.layout for trial in trials if trial.seconds is None}
    best = fastest(trials)
    if best is not None:
        line = f"degrees: {describe(best.plan.layout)}, the fastest of {len(trials)} plans tried for {STEPS} steps each"
        choice.tuned = replace(best.plan, lines=(line, *best.plan.lines[1:2]), source="trials of plans")


@contextmanager
def _data_in_sight(trainer: Any, module: Any, arguments: Sequence[Any]) -> Iterator[None]:
    """Within the ``with`` block what was given to ``fit`` is where the Trainer will have it, which the module knows."""
    loader, datamodule = (next(iter(arguments[place : place + 1]), None) for place in (1, 3))
    if isinstance(loader, L.LightningDataModule):
        loader, datamodule = None, loader
    with ExitStack() as stack:
        for owner, name, value in (
            (trainer.fit_loop._data_source, "instance", loader),
            (trainer, "datamodule", datamodule or getattr(trainer, "datamodule", None)),
            (module, "_trainer", trainer),
        ):
            stack.callback(setattr, owner, name, getattr(owner, name, None))
            setattr(owner, name, value)
        yield


def _try(launch: Callable[[Any], Any], strategy: Any, trainer: Any, plan: PlanChoice) -> Trial:
    receiver, sender = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(target=_run, args=(launch, strategy, trainer, plan, sender))
    process.start()
    sender.close()
    found: Any = "it ended without a word"
    with suppress(EOFError):
        found = receiver.recv() if receiver.poll(PATIENCE) else f"no end after {PATIENCE:g} s"
    process.join(30)
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid or 0, signal.SIGKILL)  # whatever is left of its ranks
    process.join()
    return Trial(plan, found) if isinstance(found, float) else Trial(plan, None, str(found))


def _run(launch: Callable[[Any], Any], strategy: Any, trainer: Any, plan: PlanChoice, sender: Connection) -> None:
    """In a process of its own: fit a few steps with a plan's degrees."""
    os.setpgrp()
    logging.disable(logging.INFO)
    choice = strategy.choice
    choice.take_plan(plan)
    choice.settings = replace(choice.settings, archive=None, tune=0, verify=False, start_method="fork")
    strategy.settings = choice.settings
    trainer.loggers = []
    trainer.callbacks = [c for c in trainer.callbacks if type(c).__name__ == "ConfigArchive"] + [_Timer(sender)]
    trainer.limit_val_batches, trainer.num_sanity_val_steps = 0, 0
    trainer.fit_loop.epoch_loop.max_steps, trainer.fit_loop.max_epochs = STEPS, -1
    try:
        launch(strategy)
    except BaseException as error:
        text = str(error)
        memory = any(words in text for words in ("OutOfMemoryError", "out of memory", "MemoryError", "allocate memory"))
        sender.send("ran out of memory" if memory else f"failed: {text.strip().splitlines()[-1] if text else error!r}")
    finally:
        os._exit(0)  # nothing of the script's own may run at this process's end


class _Timer(L.Callback):
    """Sends the median time of the steps after warm-up, from global rank 0."""

    def __init__(self, sender: Connection) -> None:
        self._sender, self._ends = sender, [0.0]

    @override
    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        if trainer.global_step >= len(self._ends):
            self._ends.append(time.perf_counter())

    @override
    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        ends = self._ends[WARMUP:]
        if trainer.is_global_zero and len(ends) > 1:
            self._sender.send(statistics.median(b - a for a, b in itertools.pairwise(ends)))

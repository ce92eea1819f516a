"""SIGTERM ends a run between two batches, on all ranks at once; so does SLURM's signal before it requeues a job.

Before each batch Lightning's ranks learn from rank 0 whether it has got the signal. But Lightning's handler has a
collective too, wherever the signal comes: ranks that wait for each other in a step do not come to it, and one that is
signalled alone leaves the others behind. Here the handler only notes the signal. A launcher passes it on to rank 0.
Replicas that exchange now and then do so after each exchange, and in between before a batch on which they have agreed
through the watch (:mod:`lightning_hybrid.failures.meeting`); a rank that is not watched hears of it after the exchange.
Its handler of SLURM's signal saves a checkpoint wherever the signal comes, which is a collective too: the same is done
here, at the boundary.
"""

from __future__ import annotations

import logging
import signal
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import SIGTERMException

__all__ = ["stop_together"]

logger = logging.getLogger(__name__)


def stop_together(trainer: Any) -> None:
    """Have the Trainer's handler of SIGTERM note it, and the ranks agree on it before each training batch.

    Then all of them raise ``SIGTERMException``, so callbacks may save in ``on_exception``. Validation within a fit is
    finished first. Where nothing is trained, the signal ends this rank at once. One rank alone stops as ever.
    """
    if trainer.world_size == 1:
        return
    asked: list[int] = []
    requeue: list[int] = []
    connector = trainer._signal_connector

    def note(signum: int, _: Any) -> None:
        logger.warning("Received SIGTERM on rank %d; all ranks stop together, between two batches.", dist.get_rank())
        launcher = trainer.strategy.launcher
        if launcher is not None and not asked:
            launcher.kill(signum)
        asked.append(signum)
        if trainer.state.fn != TrainerFn.FITTING:
            raise SIGTERMException(128 + signal.SIGTERM)  # a SystemExit: its code must not be that of success

    def note_requeue(signum: int, _: Any) -> None:
        logger.info("Received signal %d on rank %d; all ranks save before the next batch.", signum, dist.get_rank())
        requeue.append(signum)

    def agree() -> None:
        replicas, watch = trainer.strategy.replicas, trainer.strategy.watch
        meeting = None if replicas is None or watch is None else watch.meeting
        if replicas is not None and not replicas.is_between_windows:  # a batch has no exchange over the world then
            if meeting is None:
                return
            if asked or requeue:
                meeting.ask()
            if not meeting.is_due():
                return
        signals = torch.tensor([max(asked, default=0), max(requeue, default=0)], device=trainer.strategy.root_device)
        dist.all_reduce(signals, dist.ReduceOp.MAX)  # any rank's: the node that is taken away may not be the first
        stops, requeues = signals.tolist()
        if meeting is not None:
            meeting.talked()
        if requeues:
            requeue.clear()
            type(connector)._slurm_sigusr_handler_fn(connector, requeues, None)  # saves, and tells SLURM
        if stops:
            connector.received_sigterm = True
            raise SIGTERMException(128 + signal.SIGTERM)  # a SystemExit: its code must not be that of success

    connector._sigterm_notifier_fn, connector._slurm_sigusr_handler_fn = note, note_requeue
    trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = agree

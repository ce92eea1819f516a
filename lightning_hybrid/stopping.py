"""SIGTERM ends a run between two batches, on all ranks at once.

Before each batch Lightning's ranks learn from rank 0 whether it has got the signal. But Lightning's handler has a
collective too, wherever the signal comes: ranks that wait for each other in a step do not come to it, and one that is
signalled alone leaves the others behind. Here the handler only notes the signal. A launcher passes it on to rank 0.
Replicas that exchange now and then agree after each exchange only.
"""

from __future__ import annotations

import logging
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

    def note(signum: int, _: Any) -> None:
        logger.info("Received SIGTERM on rank %d; all ranks stop before the next batch.", dist.get_rank())
        launcher = trainer.strategy.launcher
        if launcher is not None and not asked:
            launcher.kill(signum)
        asked.append(signum)
        if trainer.state.fn != TrainerFn.FITTING:
            raise SIGTERMException

    def agree() -> None:
        replicas = trainer.strategy.replicas
        if replicas is not None and not replicas.is_between_windows:
            return  # a batch has no exchange over the world then
        stops = torch.tensor([int(bool(asked))], device=trainer.strategy.root_device)
        dist.all_reduce(stops)  # any rank's: the node that is taken away may be another one than the first
        if stops.item():
            trainer._signal_connector.received_sigterm = True
            raise SIGTERMException

    trainer._signal_connector._sigterm_notifier_fn = note
    trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = agree

"""A rank that leaves its epoch before the others: Lightning takes any ``StopIteration`` for the epoch's end.

Where all ranks do so at the same batch, training goes on as in one process. Where one does alone, the others wait for
it, and only it knows why. So it tells the watch, which says so if nobody gets on any more.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from lightning.pytorch.loops.fetchers import _DataFetcher, _DataLoaderIterDataFetcher
from torch.utils.data._utils.fetch import _MapDatasetFetcher

from lightning_hybrid.errors import ConfigurationError
from lightning_hybrid.failures.whereabouts import frames_of_traceback

__all__ = ["unexpected_end", "watched_advance"]


def unexpected_end(fetcher: Any) -> tuple[type[BaseException], ...]:
    """Return what must not leave a step: ``StopIteration``, unless the step reads the loader by itself."""
    return () if isinstance(fetcher, _DataLoaderIterDataFetcher) else (StopIteration,)


def watched_advance(loop: Any, watch: Any) -> Callable[[Any], None]:
    """Return an epoch loop's ``advance`` that tells ``watch`` why this rank ends its epoch early.

    Raises:
        RuntimeError: if a sample raises ``StopIteration``, which no loader with samples by number means.
    """
    told: list[bool] = []

    def advance(fetcher: Any) -> None:
        try:
            type(loop).advance(loop, fetcher)
            if told:  # the others have come along
                told.clear()
                watch.hint(None)
            if loop.trainer.should_stop:
                told.append(True)
                watch.hint(ConfigurationError(_ended("trainer.should_stop is set")))
        except StopIteration as error:
            if _is_of_a_sample(error):
                raise RuntimeError(
                    "The dataset raised StopIteration for a sample, which would end the epoch on this rank alone. Catch"
                    " it in __getitem__, as by next(iterator, None)."
                ) from error
            if unexpected_end(fetcher):
                told.append(True)
                watch.hint(ConfigurationError(_reason(error, fetcher)))
            raise

    return advance


def _is_of_a_sample(error: StopIteration) -> bool:
    frames = frames_of_traceback(error)
    in_worker = any(frame.f_globals.get("__name__") == "torch._utils" for frame in frames)
    return in_worker or any(isinstance(frame.f_locals.get("self"), _MapDatasetFetcher) for frame in frames)


def _reason(error: StopIteration, fetcher: Any) -> str:
    frames = frames_of_traceback(error)
    last = frames[-1]
    if any(isinstance(frame.f_locals.get("self"), _DataFetcher) for frame in frames):
        why = f"its loader has given {fetcher.fetched} of the {fetcher.length} batches that its length says"
    elif last.f_globals.get("__name__") == "lightning.pytorch.loops.training_epoch_loop":
        why = f"on_train_batch_start returned -1 before its batch {fetcher.fetched - 1}"
    else:
        why = f"StopIteration was raised in {last.f_code.co_name} ({Path(last.f_code.co_filename).name})"
    return _ended(why)


def _ended(why: str) -> str:
    return (
        f"This rank has ended its epoch, and others have not: {why}. Ranks must end an epoch at the same batch: give"
        " all the same number of batches (limit_train_batches, or a data set that is split evenly), and decide alike,"
        " as by trainer.strategy.reduce_boolean_decision(stop, all=False)."
    )

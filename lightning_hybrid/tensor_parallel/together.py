"""Trying a split block on all tensor ranks so that all of them end alike, though it may fail on some.

A rank that fails in the middle of a block leaves its peers waiting in the block's next exchange. So while something is
tried, the ranks first agree before each exchange that all have come so far; one that has failed says so in its place.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
import torch.distributed as dist

__all__ = ["FailedElsewhere", "agree_first", "together"]

Result = TypeVar("Result")


class FailedElsewhere(Exception):
    """What was tried failed on another rank; the message is that rank's."""


_trying: list[str] = []
"""The device type of what is being tried, while something is."""


def agree_first(group: dist.ProcessGroup) -> None:
    """Before an exchange: if this is a trial, make sure that no rank of the group has failed.

    Raises:
        FailedElsewhere: if one has.
    """
    if _trying and not _all_well(True, group):
        raise FailedElsewhere


def together(function: Callable[[], Result], group: dist.ProcessGroup, device_type: str) -> Result:
    """Return what ``function`` returns on this rank. A collective.

    Raises:
        Exception: what it raised here.
        FailedElsewhere: if it raised on another rank only; says what.
    """
    failure: Exception | None = None
    result: Result | None = None
    _trying.append(device_type)
    try:
        result = function()
        well = _all_well(True, group)
    except FailedElsewhere:
        well = False
    except Exception as error:
        failure, well = error, False
        _all_well(False, group)
    finally:
        _trying.pop()
    if well:
        return result  # type: ignore[return-value]  # what the function returned, which may be None
    said: list[str | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(said, failure and f"{type(failure).__name__}: {failure}", group=group)
    raise failure or FailedElsewhere(next(text for text in said if text is not None))


def _all_well(here: bool, group: dist.ProcessGroup) -> bool:
    flag = torch.tensor(int(here), device=_trying[-1])
    dist.all_reduce(flag, dist.ReduceOp.MIN, group=group)
    return bool(flag.item())

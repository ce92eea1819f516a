"""``torch.distributed`` as a pipelined step sees it: its world is the data axis.

A step of the user's may talk to other ranks (``torch.distributed.all_reduce(x)``, ``torch.distributed.nn.all_gather``).
With ``ddp`` the default group is the data axis. In a pipeline the stages are elsewhere in the step, so over the default
group ranks would wait for each other for ever. While a step runs, what is called by its name in ``torch.distributed``
and given no group goes over the data axis, whose ranks do the same thing; ranks and sizes are told accordingly.
Functions that were imported by name cannot be led elsewhere: they are refused.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from lightning_hybrid.errors import UnsupportedError

__all__ = ["StepWorld"]

_ASK = ("get_rank", "get_world_size")
_TALK = tuple(
    name
    for name in c10d.__all__
    if not name.startswith(("get_", "new_", "destroy_", "reduce_op"))
    and inspect.isfunction(getattr(c10d, name))
    and "group" in inspect.signature(getattr(c10d, name)).parameters
    and hasattr(dist, name)
)


class StepWorld:
    """Leads what a step says to the default group to the ranks of another one."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        """``group``: the data axis."""
        self._group = group
        self._led_here = {name: self._led(getattr(c10d, name), name in _TALK) for name in (*_ASK, *_TALK)}
        self.talks = False
        """Whether a step has talked to other ranks."""

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Within the ``with`` block the default group is this one, for what is called by ``torch.distributed.NAME``."""
        before = {name: getattr(dist, name) for name in self._led_here}, c10d._get_default_group
        vars(dist).update(self._led_here)
        c10d._get_default_group = _refusing
        try:
            yield
        finally:
            vars(dist).update(before[0])
            c10d._get_default_group = before[1]

    def _led(self, function: Callable[..., Any], is_talk: bool) -> Callable[..., Any]:
        signature = inspect.signature(function)

        @functools.wraps(function)
        def led(*args: Any, **kwargs: Any) -> Any:
            given = signature.bind(*args, **kwargs)
            if given.arguments.get("group") in (None, dist.group.WORLD):
                given.arguments["group"] = self._group
                for end in ("src", "dst"):  # ranks of the step's world
                    if given.arguments.get(end) is not None:
                        given.arguments[end] = dist.get_global_rank(self._group, given.arguments[end])
                self.talks |= is_talk and dist.get_world_size(self._group) > 1
            return function(*given.args, **given.kwargs)

        return led


_default_group = c10d._get_default_group


def _refusing() -> Any:
    caller: Any = sys._getframe(1)
    if caller.f_code.co_name == "_group_or_default_group":
        caller = caller.f_back
    name, given = caller.f_code.co_name, caller.f_locals
    if (name in _TALK and given.get("group") is None) or name == "_new_group_with_tag":
        raise UnsupportedError(
            f"{name} inside of a step needs all ranks, but with a pipeline only the last stage runs a step to its end."
            f" Call it by its full name (torch.distributed.{name}(x), not imported by name), which then goes over the"
            " data axis; use self.all_gather; do it in a hook, such as on_train_batch_end; or use"
            " pipeline_parallel_size=1."
        )
    return _default_group()

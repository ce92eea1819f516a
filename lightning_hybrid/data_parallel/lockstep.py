"""Data ranks that use different parameters of a sharded model: all of them make the same collectives, in one order.

[Note: units that a rank passes over]
Each unit of ``fully_shard`` is gathered at its call, and its gradients are reduced once its backward is through. A rank
whose batch takes another way (a block left out, an expert without tokens, an output that no loss uses) would make other
collectives than its peers, which then wait, or take one block's weights for another's. So there is one order of units,
the same on all data ranks. At the call of a unit a rank first gathers, and lets go, those before it in that order that
it has not called; in the backward it first reduces zeros for those behind. That takes no message, and costs nothing
where all ranks use all units. Within a unit, parameters without a gradient count as zeros.

The order is learnt in the first step, and in the first one without gradients: there ranks tell each other before each
gather which unit they call next.

One tiny sum per reduction then says which parameters no rank has used: their gradients are ``None``, as in one process.
Only ranks that lack a gradient wait for it. Scalars, which ``fully_shard`` does not take, are averaged beside it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils._pytree import tree_leaves

from lightning_hybrid.errors import UnsupportedError
from lightning_hybrid.measuring.unprofiled import unprofiled

__all__ = ["Lockstep"]


class Lockstep:
    """Keeps the units of one sharded root in step over the data axis; see the note above. Changes them in place."""

    def __init__(
        self,
        root: nn.Module,
        units: Iterable[nn.Module],
        group: dist.ProcessGroup,
        *,
        scalars: Sequence[nn.Parameter] = (),
        is_pipelined: bool,
        reshard: bool,
    ):
        """Hook into ``root`` and its ``units``, all of them sharded.

        Args:
            root: Runs a step inside of its call.
            units: In an order that is the same on all ranks of ``group``.
            group: The data axis, replicas included.
            scalars: Parameters that all ranks of ``group`` hold whole.
            is_pipelined: Whether all backwards of a step only accumulate, and gradients are reduced by the caller.
            reshard: Whether units are freed after their forward. With a pipeline, each forward then is of one stage,
                all of whose units must be called.
        """
        self._group, self._is_pipelined = group, is_pipelined
        self._scalars = [parameter for parameter in scalars if parameter.requires_grad]
        self._lengths: dict[int, int] = {}
        self._states = [fully_shard.state(unit) for unit in units]  # type: ignore[attr-defined]
        numbers = [] if reshard else [*range(len(self._states))]
        self._orders = {True: numbers, False: numbers} if is_pipelined else {}
        self._refuses = is_pipelined and reshard
        self._order: list[int] | None = None
        self._seen: list[int] = []
        self._is_inside, self._next = False, 0
        self._pending: list[int] = []
        self._open: int | None = None
        self._late: set[int] = set()
        self._reduced: set[int] = set()
        self._used: set[int] = set()
        self._born: list[Any] = []
        self._exchange: Any = None
        for i, state in enumerate(self._states):
            for part in state._fsdp_param_groups:
                part.pre_forward = functools.partial(self._before_forward, i, part.pre_forward)
                part.pre_backward = functools.partial(self._before_backward, i, part.pre_backward)
        root_state = fully_shard.state(root)  # type: ignore[attr-defined]
        self._parts = [part for state in (root_state, *self._states) for part in state._fsdp_param_groups]
        for part in self._parts:
            part.post_backward = functools.partial(self._reduce, part, part.post_backward)
        for state in (root_state, *self._states):
            state._root_post_backward_final_callback = functools.partial(
                self._finish, state._root_post_backward_final_callback
            )
        root.register_forward_pre_hook(lambda *_: self._enter())
        root.register_forward_hook(lambda *_: self._leave())

    # ---- forward: gathers ------------------------------------------------------------------------------------------

    def _enter(self) -> None:
        self._is_inside, self._next, self._open = True, 0, None
        self._order = self._orders.get(torch.is_grad_enabled())
        self._pending = list(self._order or ())
        self._seen = []
        self._late.clear()

    def _leave(self) -> None:
        """At the end of a step's code; what it did not call is gathered too."""
        if self._order is None:
            while (asked := self._ask(None)) is not None:
                self._call_emptily(asked)
            self._order = merged_orders(self._gather(self._seen), len(self._states))
            self._orders[torch.is_grad_enabled()] = self._order
            self._pending = list(self._order)
        else:
            for i in self._order[self._next :]:
                self._call_emptily(i)
        self._is_inside = False
        if self._refuses and self._seen:
            self._refuse_other_ways(len(self._seen))

    def _refuse_other_ways(self, number: int) -> None:
        """A stage's forward must call as many units as its first one did."""
        if (known := self._lengths.setdefault(self._seen[0], number)) != number:
            raise UnsupportedError(
                f"A pipeline stage called {number} blocks for one micro-batch and {known} for another, but with"
                " reshard_after_forward=True all data ranks gather a block's weights at its call. Leave"
                " reshard_after_forward out, or have every step call all blocks."
            )

    def _before_forward(self, i: int, original: Callable[..., Any], module: Any, args: Any, kwargs: Any) -> Any:
        if self._is_inside and torch._C._current_graph_task_id() == -1:  # not a recomputation
            self._seen.append(i)
            if self._order is None:
                while (asked := self._ask(i)) != i:
                    self._call_emptily(asked)
            elif i in self._order[self._next :]:
                at = self._order.index(i, self._next)
                for missing in self._order[self._next : at]:
                    self._call_emptily(missing)
                self._next = at + 1
            if not any(isinstance(x, torch.Tensor) and x.requires_grad for x in tree_leaves((args, kwargs))):
                self._late.add(i)
        return original(module, args, kwargs)

    def _ask(self, i: int | None) -> Any:
        """Say which unit this rank calls next; return the one that all gather now. ``None``: no more."""
        return min((wish for wish in self._gather(i) if wish is not None), default=None)

    def _gather(self, value: Any) -> list[Any]:
        values: list[Any] = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(values, value, group=self._group)
        return values

    def _call_emptily(self, i: int) -> None:
        for part in self._states[i]._fsdp_param_groups:
            if not (self._is_pipelined and part.is_unsharded):
                part.pre_forward.args[1](None, (), {})
                part.post_forward(None, None, None)

    # ---- backward: gathers and reductions ----------------------------------------------------------------------------

    def _before_backward(self, i: int, original: Callable[..., Any], *args: Any) -> None:
        if not self._is_pipelined and i in self._pending and i != self._open:
            self._close()
            while (last := self._pending.pop()) != i:
                self._differentiate_emptily(last)
            self._open = i if i in self._late else None
        original(*args)

    def _close(self) -> None:
        """A unit whose arguments need no gradient does not see the end of its backward: it is when the next begins."""
        if self._open is not None:
            for part in self._states[self._open]._fsdp_param_groups:
                part.post_backward()
            self._open = None

    def _differentiate_emptily(self, i: int) -> None:
        for part in self._states[i]._fsdp_param_groups:
            part.pre_backward.args[1](True)
            self._reduced.discard(id(part))
            part.post_backward()

    def _finish(self, original: Callable[[], None]) -> None:
        """At the end of a backward, before the root's own gradients are reduced."""
        if not self._is_pipelined:
            self._close()
            while self._pending and not any(self._is_trained(i) for i in self._pending):
                self._pending.pop()  # frozen, and nothing before them needs a gradient
            while self._pending:
                self._differentiate_emptily(self._pending.pop())
            self._pending = list(self._order or ())
        original()
        if self._parts and self._parts[0].reduce_grads:
            self._settle()
            _average(self._scalars, self._group)

    def _is_trained(self, i: int) -> bool:
        parts = self._states[i]._fsdp_param_groups
        return any(p.sharded_param.requires_grad for part in parts for p in part.fsdp_params)

    @torch.no_grad()
    def _reduce(self, part: Any, original: Callable[..., None], *unused: Any) -> None:
        """Before a unit's gradients are reduced: zeros where this rank has none, all in one dtype."""
        trained = [p for p in part.fsdp_params if p.sharded_param.requires_grad and hasattr(p, "_unsharded_param")]
        if part.reduce_grads and trained:
            found = {id(p): _gradient(p) for p in trained}
            dtypes = {p.unsharded_accumulated_grad.dtype for p in trained if p.unsharded_accumulated_grad is not None}
            is_first = id(part) not in self._reduced
            self._reduced.add(id(part))
            self._used |= {key for key, gradient in found.items() if gradient is not None}
            for p in trained if is_first or any(g is not None for g in found.values()) else ():
                gradient, dtype = found[id(p)], next(iter(dtypes), None)
                if gradient is None:
                    if p.sharded_param.grad is None:
                        self._born.append(p)
                    p.unsharded_accumulated_grad = torch.zeros_like(p._unsharded_param, dtype=dtype)
                elif dtype is not None and gradient.dtype != dtype:  # its first one in an accumulation
                    p.unsharded_accumulated_grad, p._unsharded_param.grad = gradient.to(dtype), None
        original(*unused)

    @torch.no_grad()
    def _settle(self) -> None:
        """Take zeros away that stand where no data rank has a gradient."""
        everything = [p for part in self._parts for p in part.fsdp_params]
        device = self._parts[0].device
        mine = torch.tensor(
            [id(p) in self._used for p in everything], dtype=torch.uint8, pin_memory=device.type != "cpu"
        )
        shared = mine.to(device, non_blocking=True)  # to look at it, or to copy it at once, would be to wait
        # hardly anybody waits for it in this step; the mark tells whose communication it is
        with torch.profiler.record_function("FSDP::unused_parameters"), unprofiled(self._group):
            work = dist.all_reduce(shared, dist.ReduceOp.MAX, group=self._group, async_op=True)
        lacking = [p for p in self._born if id(p) not in self._used]
        if lacking:
            work.wait()
            somewhere = {id(p) for p, used in zip(everything, shared.tolist(), strict=True) if used}
            for p in lacking:
                if id(p) not in somewhere:
                    p.sharded_param.grad = None
        self._exchange = work, mine, shared
        self._used.clear()
        self._reduced.clear()
        self._born = []


def _gradient(param: Any) -> Any:
    accumulated = param.unsharded_accumulated_grad
    return param._unsharded_param.grad if accumulated is None else accumulated


@torch.no_grad()
def _average(scalars: Sequence[nn.Parameter], group: dist.ProcessGroup) -> None:
    """Average the gradients of scalars; ``None`` where no rank has one. What was averaged before stays as it is.

    Those that are frozen now take part: the list must be the same on all ranks.
    """
    if not scalars:
        return
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in scalars]
    dtype = torch.promote_types(torch.float32, functools.reduce(torch.promote_types, (g.dtype for g in gradients)))
    has = torch.tensor([p.grad is not None for p in scalars], dtype=dtype, device=gradients[0].device)
    shared = torch.cat([torch.stack([g.to(dtype) for g in gradients]), has])
    dist.all_reduce(shared, group=group)
    means, counts = shared.chunk(2)
    lacking = [p.grad is None for p in scalars]
    used = counts.tolist() if any(lacking) else [1.0] * len(scalars)  # to look at it would be to wait
    for parameter, mean, count in zip(scalars, means / group.size(), used, strict=True):
        parameter.grad = mean.to(parameter.dtype) if count else None


def merged_orders(orders: Iterable[list[int]], num_units: int) -> list[int]:
    """One order of all units, in which every rank's own is contained if that is possible.

    What no rank says anything about is as the units are numbered.
    """
    before: dict[tuple[int, int], set[tuple[int, int]]] = {}  # a unit's n-th call -> the calls that come before it
    for order in orders:
        calls = [(i, order[:at].count(i)) for at, i in enumerate(order)]
        for earlier, call in zip([None, *calls], calls, strict=False):
            before.setdefault(call, set()).update([] if earlier is None else [earlier])
    for i in range(num_units):
        before.setdefault((i, 0), {(i - 1, 0)} if i else set())
    merged: list[tuple[int, int]] = []
    while before:
        free = [call for call, earlier in before.items() if not earlier.difference(merged)] or list(before)
        merged.append(min(free))
        del before[merged[-1]]
    return [i for i, _ in merged]

"""Times one block of a model on this device, and what a stage does before its first block, for a prediction."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from lightning_hybrid.pipeline.hollow import plain
from lightning_hybrid.pipeline.predict import Times
from lightning_hybrid.pipeline.probe import StepFacts
from lightning_hybrid.pipeline.stage import Cut, StageRun
from lightning_hybrid.pipeline.torch_schedules import backward_of_inputs, backward_of_weights

__all__ = ["time_block", "time_transfer"]

#: The least of so many is taken: whatever else a machine does makes a time longer, never shorter.
_REPEATS = 5


class _Reached(BaseException):
    """Leaves the step at a block, with its arguments. A ``BaseException``: user code must not swallow it."""


def time_block(
    cut: Cut,
    facts: StepFacts,
    step: Callable[[], Any],
    device: torch.device,
    *,
    precision: Callable[[], AbstractContextManager[Any]] = nullcontext,
    prepare: Callable[[nn.Module], None] = lambda block: None,
    splits: bool = True,
) -> tuple[Times, int]:
    """Time a copy of the most expensive block, with random weights, alone on the device; the step itself up to it.

    The model and its random states are as before afterwards; what the user's code before the blocks counts is not.

    Args:
        cut: of the whole module, probed.
        facts: of the step.
        step: runs it on a micro-batch.
        device: where the block shall run.
        precision: what a step runs in (autocast).
        prepare: does to the copy what will be done to blocks (activation checkpointing).
        splits: whether the backward is timed in two halves too.

    Returns:
        The times, scaled from the block's share of the operations to all of them, and the bytes that travel to it.
    """
    index = max(range(1, len(facts.blocks)), key=lambda i: facts.flops[i])
    first, args, kwargs = _reach(cut, facts, step, 1)
    last, *_ = _reach(cut, facts, step, len(facts.blocks) - 1)
    if index > 1:
        _, args, kwargs = _reach(cut, facts, step, index)
    leaves = tree_leaves((args, kwargs))
    travelling = [leaves[i] for i in facts.arguments[index]]
    block = _random_copy(cut.module.get_submodule(facts.blocks[index]), cut.module, device)
    prepare(block)
    with torch.enable_grad(), torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), precision():
        seconds = _time_actions(block, args, kwargs, travelling, device, splits)
    scale = (sum(facts.flops) + sum(facts.flops_outside)) / facts.flops[index]
    forward, backward, inputs, weights = (scale * t for t in seconds)
    times = Times(
        forward=forward,
        backward=backward,
        backward_input=inputs,
        backward_weight=weights,
        prologue=first,
        prologue_per_block=max(0.0, last - first) / max(1, len(facts.blocks) - 2),
    )
    return times, sum(t.numel() * t.element_size() for t in travelling)


def _reach(
    cut: Cut, facts: StepFacts, step: Callable[[], Any], index: int
) -> tuple[float, tuple[Any, ...], dict[str, Any]]:
    """Run the step on holes up to a block. Return the seconds that took, and the block's arguments."""
    found: list[Any] = []

    def note(block: nn.Module, args: Any, kwargs: Any) -> None:
        found[:] = [args, kwargs]
        raise _Reached

    def copies(local: list[Tensor]) -> list[Tensor]:
        return [tensor.clone() for tensor in plain(local)]

    def once() -> None:
        run = StageRun(first=index, last=index + 1, facts=facts, receive=copies)
        try:
            cut.run(run, step)
        except _Reached:
            return

    hook = cut.module.get_submodule(facts.blocks[index]).register_forward_pre_hook(note, with_kwargs=True)
    try:
        seconds = _least(once, torch.device("cpu"))
    finally:
        hook.remove()
    return seconds, found[0], found[1]


def _random_copy(block: nn.Module, root: nn.Module, device: torch.device) -> nn.Module:
    """Return a copy with small random weights on the device; the original may have none yet."""
    replaced: dict[int, Any] = {id(root): root}
    for parameter in block.parameters():
        values = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
        if values.is_floating_point():
            values.fill_(0.01)
        replaced[id(parameter)] = nn.Parameter(values, requires_grad=parameter.requires_grad)
    for buffer in block.buffers():
        values = torch.zeros_like(buffer, device=device)
        replaced[id(buffer)] = values if buffer.is_meta else values.copy_(buffer)
    twin = copy.deepcopy(block, replaced)
    twin.__class__ = type(block).__base__ or type(block)  # the class without the cut's interception
    return twin


def _time_actions(
    block: nn.Module, args: Any, kwargs: Any, travelling: list[Tensor], device: torch.device, splits: bool
) -> tuple[float, float, float, float]:
    """Return the seconds of the forward, the backward, and its two halves."""
    rows = [_one_round(block, args, kwargs, travelling, device, splits) for _ in range(_REPEATS + 1)]
    least = [min(column) for column in zip(*rows[1:], strict=True)]  # the first one warms up
    return least[0], least[1], least[2], least[3]


def _one_round(
    block: nn.Module, args: Any, kwargs: Any, travelling: list[Tensor], device: torch.device, splits: bool
) -> tuple[float, float, float, float]:
    leaves = {id(t): torch.randn_like(t, device=device).requires_grad_() for t in travelling if t.is_floating_point()}
    inputs, weights = list(leaves.values()), list(block.parameters())

    def run() -> list[Tensor]:
        given: Any = tree_map_only(
            Tensor, lambda t: leaves[id(t)].clone() if id(t) in leaves else t.detach().to(device), (args, kwargs)
        )
        return [t for t in tree_leaves(block(*given[0], **given[1])) if isinstance(t, Tensor) and t.requires_grad]

    outputs, forward = _timed(run, device)
    gradients = [torch.ones_like(output) for output in outputs]
    _, backward = _timed(lambda: torch.autograd.backward(outputs, gradients), device)
    if not splits:
        return forward, backward, backward, 0.0
    roots = run()
    (_, rest), of_inputs = _timed(lambda: backward_of_inputs(roots, gradients, inputs, weights), device)
    _, of_weights = _timed(lambda: backward_of_weights(weights, rest), device)
    block.zero_grad()
    return forward, backward, of_inputs, of_weights


def _timed(function: Callable[[], Any], device: torch.device) -> tuple[Any, float]:
    def now() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    start = now()
    result = function()
    return result, now() - start


def _least(function: Callable[[], Any], device: torch.device) -> float:
    function()
    return min(_timed(function, device)[1] for _ in range(_REPEATS))


def time_transfer(num_bytes: int, group: dist.ProcessGroup, device: torch.device) -> float:
    """Return the seconds that so many bytes take from one rank of a pipeline to its neighbour; 0 on other ranks.

    A collective over the group's first two ranks.
    """
    rank = dist.get_rank(group)
    if rank > 1:
        return 0.0
    peer = dist.get_global_rank(group, 1 - rank)
    data = torch.zeros(max(1, num_bytes), dtype=torch.uint8, device=device)

    def there_and_back() -> None:
        for sends in (rank == 0, rank == 1):
            (dist.send if sends else dist.recv)(data, peer, group=group)

    return _least(there_and_back, device) / 2

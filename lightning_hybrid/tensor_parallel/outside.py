"""Does a plan for layers outside of the blocks leave the step what it is? The step is run both ways before training.

A head given the style ``colwise`` hands this rank's logits to the loss, whose shapes fit: nothing fails. Styles whose
inputs and outputs are whole are right wherever they stand; for any other the first batch's loss and gradients are
compared, with blocks as they are (of those that are alike one runs, and the others hand on its output).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from lightning_hybrid.errors import ConfigurationError
from lightning_hybrid.tensor_parallel.apply import apply_tensor_parallel
from lightning_hybrid.tensor_parallel.check import TOLERANCE, agree, full, relative_error
from lightning_hybrid.tensor_parallel.joined_late import joined
from lightning_hybrid.tensor_parallel.plan import PlanEntry, TensorParallelPlan
from lightning_hybrid.tensor_parallel.styles import joined_rows
from lightning_hybrid.tensor_parallel.together import FailedElsewhere, together

__all__ = ["check_outside"]

logger = logging.getLogger(__name__)

#: Styles that take whole tensors and give whole tensors.
_EXACT = ("whole", "embedding_rowwise", "embedding_colwise", "colwise_gather_output", "rowwise_split_input")
#: Of the loss of 16-bit parameters; it is known better than their gradients.
_SHORT_LOSS = 2e-2

Observed = tuple[Tensor, dict[str, Tensor]]


def check_outside(
    module: nn.Module,
    mesh: DeviceMesh,
    plan: TensorParallelPlan,
    blocks: Sequence[str],
    alike: Mapping[str, Sequence[str]],
    step: Callable[[], Any],
) -> None:
    """Compare the step whole with the step in which the layers outside of the blocks are split. A collective.

    Args:
        module: the module the plan was built for; left as it is.
        mesh: the 1-D tensor axis.
        plan: what to check.
        blocks: FQNs.
        alike: blocks that compute the same, by the first of them.
        step: runs the user's step on the first batch and returns its output.

    Raises:
        ConfigurationError: if it fails or differs; names the layers, and says what to do.
    """
    outside = [e for e in plan.split if not any(f"{e.name}.".startswith(f"{name}.") for name in blocks)]
    risky = [e for e in outside if e.style not in _EXACT]
    if not risky:
        return
    with _shortened(module, alike):
        try:
            loss, gradients = _observe(module, step)
        except Exception as error:  # it needs what hooks make later
            names = ", ".join(entry.name for entry in risky)
            logger.warning("The tensor plan of %s was not checked: the step fails by itself (%s).", names, str(error))
            return
        if not loss.numel():  # nothing that could be compared: a step that returns nothing
            return
        with _as_before(module):
            apply_tensor_parallel(module, mesh, replace(plan, entries=tuple(outside), regions={}))
            try:
                found = together(lambda: _observe(module, step), mesh.get_group(), mesh.device_type)
            except Exception as error:
                said = str(error) if isinstance(error, FailedElsewhere) else f"{type(error).__name__}: {error}"
                raise ConfigurationError(_wrong(risky, f"fails ({said.partition(chr(10))[0]})")) from error
            orders = joined_rows(module)
    tolerance = max(TOLERANCE.get(parameter.dtype, 1e-3) for parameter in module.parameters())
    differs = agree(relative_error(found[0], loss), mesh) > min(tolerance, _SHORT_LOSS)
    what = f"gives {found[0].tolist()} instead of {loss.tolist()}" if differs else ""
    floor = 1e-3 * max((float(g.norm()) for g in gradients.values()), default=0.0) or 1e-3
    for name, truth in gradients.items():
        right = truth.index_select(orders[name].dim, orders[name].order.to(truth.device)) if name in orders else truth
        error_ = agree(relative_error(full(found[1].get(name), right), right, floor), mesh)
        what = what or (f"has another gradient of {name} (by {error_:.2g})" if not error_ <= tolerance else "")
    if what:
        raise ConfigurationError(_wrong(risky, what))


def _wrong(risky: list[PlanEntry], what: str) -> str:
    named = ", ".join(f"{entry.name}: {entry.style_name}" for entry in risky[:4])
    return (
        f"Outside of the blocks the tensor parallel plan splits {named}; the step then {what}. A layer with the style"
        ' "colwise" leaves its output split, for a "rowwise" layer to take; a head whose output is needed whole is'
        ' "colwise_gather_output". Correct tp_plan, or leave these layers out of it.'
    )


def _observe(module: nn.Module, step: Callable[[], Any]) -> Observed:
    """The step's loss as a vector of one (nothing: empty) and the gradients of parameters."""
    training = [part for part in module.modules() if part.training]
    buffers = [(buffer, buffer.clone()) for buffer in module.buffers()]
    module.eval()
    try:
        with torch.enable_grad(), torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            output = joined(step())
            loss = output.get("loss") if isinstance(output, Mapping) else output
            if not isinstance(loss, Tensor) or loss.numel() != 1:
                return torch.zeros(0), {}
            if loss.requires_grad:
                loss.backward()
        gradients = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
        return loss.detach().float().reshape(1), gradients
    finally:
        for parameter in module.parameters():
            parameter.grad = None
        for buffer, before in buffers:
            buffer.copy_(before)
        for part in training:
            part.training = True


@contextmanager
def _shortened(module: nn.Module, alike: Mapping[str, Sequence[str]]) -> Iterator[None]:
    """Of blocks that compute the same, the first one called runs; the others return what it returned."""
    shortened: list[nn.Module] = []
    for names in alike.values():
        if len(names) > 1:
            memory: list[Any] = []
            for block in map(module.get_submodule, names):
                block.__dict__["forward"] = _once(type(block).forward, block, memory)
                shortened.append(block)
    try:
        yield
    finally:
        for block in shortened:
            del block.__dict__["forward"]


def _once(forward: Callable[..., Any], block: nn.Module, memory: list[Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        runs = not memory or memory[0] is block
        if runs:
            memory[:] = [block, forward(block, *args, **kwargs)]
        return memory[1]

    return call


@contextmanager
def _as_before(module: nn.Module) -> Iterator[None]:
    """Afterwards every module is of the class it was, and has the attributes, parameters and hooks it had."""
    before = [
        (part, part.__class__, {k: (v, dict(v) if isinstance(v, dict) else None) for k, v in vars(part).items()})
        for part in module.modules()
    ]
    try:
        yield
    finally:
        for part, cls, attributes in before:
            part.__class__ = cls
            part.__dict__.clear()
            for key, (value, content) in attributes.items():
                if content is not None:
                    value.clear()
                    value.update(content)
                part.__dict__[key] = value

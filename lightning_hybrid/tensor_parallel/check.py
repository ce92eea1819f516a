"""Does a plan compute what the whole model computes? One block of each kind is run both ways before training.

Shapes that fit prove nothing: a fused query-key-value projection cut contiguously gives fitting shapes and wrong
values, and a norm over each head gives right values and gradients that are each rank's part only. So values *and*
gradients are compared, on copies with random weights (at initialisation many projections are zero, and hide
everything behind them) and random hidden states.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_leaves, tree_map

from lightning_hybrid.errors import ConfigurationError
from lightning_hybrid.tensor_parallel.apply import apply_tensor_parallel
from lightning_hybrid.tensor_parallel.beside import copied, run_with_beside
from lightning_hybrid.tensor_parallel.draws import draws_of, wrong_draws
from lightning_hybrid.tensor_parallel.kinds import kind_of
from lightning_hybrid.tensor_parallel.plan import TensorParallelPlan, layers_joined
from lightning_hybrid.tensor_parallel.random_inputs import float_dtype, random_call, random_weights
from lightning_hybrid.tensor_parallel.sequence import call_whole
from lightning_hybrid.tensor_parallel.styles import joined_rows
from lightning_hybrid.tensor_parallel.together import FailedElsewhere, together
from lightning_hybrid.training.snapshots import as_it_is

__all__ = [
    "TOLERANCE",
    "BlockCheck",
    "WholeBlock",
    "agree",
    "check_block",
    "check_plan",
    "full",
    "record_calls",
    "relative_error",
    "too_large",
    "try_block",
]

logger = logging.getLogger(__name__)

#: Largest relative error that rounding explains; wrong splits are off by about 1.
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.1}
#: Share of the largest gradient of a block below which another one counts as zero: rounding grows with the block.
_ZERO = 1e-3
#: What is larger stands for infinity: masks that are added to scores.
_MASKED = 1e30
#: Bytes in fp32 of the largest block that is run: every rank of a host holds about five times as much meanwhile.
_LARGEST = 2**30

#: In words: what can be seen of a call beside its output.
_BESIDE = "what it keeps in attributes or buffers, or shows to hooks,"

Call = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True, kw_only=True)
class BlockCheck:
    """How far a split block is from the whole one; the same on every rank of the tensor axis."""

    output: float
    """Relative error of the outputs."""
    beside: float = 0.0
    """Relative error of what else can be seen of a call (:mod:`beside`)."""
    inputs: float
    """Relative error of the gradients of the inputs."""
    gradients: Mapping[str, float]
    """Relative error of each parameter's gradient, by name in the block."""
    partial: frozenset[str] = field(default_factory=frozenset)
    """Parameters on every rank whose gradients are right only when summed over ranks."""
    tolerance: float
    draws: str = ""
    """What random numbers it draws in the wrong place, in words."""

    @property
    def wrong(self) -> list[str]:
        """What differs, in words; empty if all agree."""
        named = {"its output": self.output, _BESIDE: self.beside, "the gradient of its input": self.inputs}
        named |= {f"the gradient of {name}": error for name, error in self.gradients.items()}
        return [f"{name} (by {error:.2g})" for name, error in named.items() if not error <= self.tolerance]


def check_plan(
    module: nn.Module,
    mesh: DeviceMesh,
    plan: TensorParallelPlan,
    calls: Mapping[str, Call],
    *,
    is_compiled: bool = False,
) -> TensorParallelPlan:
    """Run one block of each kind whole and split; return the plan, mended where measurement says how.

    To be called *before* :func:`apply_tensor_parallel`, on every rank of the tensor axis; ``module`` is left as it is.
    A parameter whose gradients turn out to be each rank's part only gets the style ``replicated_with_grad_allreduce``.

    Args:
        module: the module the plan was built for, whole.
        mesh: the 1-D tensor axis.
        plan: what to check.
        calls: by FQN of a block, arguments it is called with. Tensors that require a gradient are replaced by random
            ones of their shape, all others (masks, positions, rotary tables) are used as they are.
        is_compiled: whether blocks will be compiled.

    Raises:
        ConfigurationError: if a split block fails, differs, or draws random numbers (dropout) in the wrong place; the
            message says in what, and what to do.
    """
    for name, call in calls.items() if mesh.size() > 1 else ():
        part = plan.within(name)
        if not part.split:
            continue
        block = module.get_submodule(name)
        if reason := too_large(block):
            logger.warning("The tensor parallel plan of %s was not checked: %s.", name, reason)
            continue
        try:
            whole = WholeBlock.of(block, call)
            found = _check_one(whole, mesh, part, is_compiled)
            if found.partial:
                plan = _sum_gradients(plan, name, found.partial)
                found = _check_one(whole, mesh, plan.within(name), is_compiled)
        except DoesNotRun as error:
            logger.warning("The tensor parallel plan of %s was not checked: %s.", name, error)
            continue
        except Exception as error:
            raise ConfigurationError(_fails(name, part, error)) from error
        if found.wrong:
            raise ConfigurationError(_differs(name, part, found))
        if found.draws:
            raise ConfigurationError(f"In the block {name!r} {found.draws}. {_DRAW_REMEDY}")
    return plan


def try_block(
    whole: WholeBlock, mesh: DeviceMesh, part: TensorParallelPlan, *, is_compiled: bool
) -> tuple[TensorParallelPlan, str]:
    """Run a block split by ``part``; return the plan, mended as in :func:`check_plan`, and what is wrong.

    The same on every rank of the tensor axis; empty if nothing is wrong.
    """
    try:
        found = _check_one(whole, mesh, part, is_compiled)
        if found.partial:
            part = _sum_gradients(part, "", found.partial)
            found = _check_one(whole, mesh, part, is_compiled)
    except Exception as error:
        return part, f"fails when split ({_said(error).partition(chr(10))[0][:120]})"
    return part, f"differs when split: {found.wrong[0]}" if found.wrong else found.draws


def too_large(block: nn.Module) -> str | None:
    """Return why a block is not run for a check, if it would exhaust a host whose ranks all do so."""
    size = 4 * sum(parameter.numel() for parameter in block.parameters())
    return f"a block of {size / 2**30:.1f} GB is too large to be run whole for a check" if size > _LARGEST else None


class DoesNotRun(Exception):
    """A block needs more than the arguments it was called with."""


class _AllSeen(BaseException):
    """Leaves the step when every kind of block was called. A ``BaseException``: user code must not swallow it."""


def record_calls(module: nn.Module, blocks: Sequence[str], step: Callable[[], Any]) -> dict[str, Call]:
    """Return the arguments of the first call of one block of each kind, for :func:`check_plan`.

    Runs ``step`` up to there: the first block of each kind for real, its like not at all (they hand on that block's
    output). Parameters, buffers and random states are as before afterwards; a counter in user code is not.
    """
    kinds: dict[Any, list[str]] = {}
    for name in blocks:
        kinds.setdefault(kind_of(module.get_submodule(name)), []).append(name)
    calls: dict[str, Call] = {}
    handed: dict[nn.Module, Call] = {}

    def remember(block: nn.Module, args: Any, kwargs: Any) -> None:
        handed[block] = tree_map(as_it_is, (args, kwargs))

    def record(names: list[str], block: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        calls[next(name for name in names if module.get_submodule(name) is block)] = handed[block]
        if len(calls) == len(kinds):
            raise _AllSeen
        for name in names:
            module.get_submodule(name).__dict__["forward"] = lambda *args, **kwargs: output
            hooks.pop(name).remove()

    hooks = {
        name: module.get_submodule(name).register_forward_hook(functools.partial(record, names), with_kwargs=True)
        for names in kinds.values()
        for name in names
    }
    remembering = [module.get_submodule(name).register_forward_pre_hook(remember, with_kwargs=True) for name in blocks]
    buffers = [(buffer, buffer.clone()) for buffer in module.buffers()]
    try:
        with torch.enable_grad(), torch.random.fork_rng(), contextlib.suppress(_AllSeen):
            step()
    finally:
        for hook in (*hooks.values(), *remembering):
            hook.remove()
        for name in blocks:
            module.get_submodule(name).__dict__.pop("forward", None)
        for buffer, before in buffers:
            buffer.copy_(before)
    return calls


@dataclass(frozen=True, kw_only=True)
class WholeBlock:
    """One block with random weights, that draws nothing, and what it computes: what every split of it must compute."""

    fresh: nn.Module
    """As it was before it ran."""
    ran: nn.Module
    """A copy that ran; it holds the gradients of the parameters."""
    call: Call
    outputs: Tensor
    beside: Tensor
    """What else can be seen, as one vector."""
    inputs: Tensor
    """Gradients of the inputs, as one vector."""

    @classmethod
    def of(cls, block: nn.Module, call: Call) -> WholeBlock:
        """Run a copy of ``block``, in fp32 where it can (else in its own dtype).

        Raises:
            DoesNotRun: if the block fails on these arguments.
        """
        own = float_dtype(block)
        for dtype in dict.fromkeys((torch.float32, own)):
            fresh = _without_draws(random_weights(copied(block).to(dtype)), call, dtype)
            ran = copied(fresh)
            try:
                outputs, beside, inputs = _run(ran, *random_call(call, dtype))
            except Exception as error:  # flash attention knows no fp32
                reason = error
                continue
            return cls(fresh=fresh, ran=ran, call=call, outputs=outputs, beside=beside, inputs=inputs)
        raise DoesNotRun(f"the block did not run alone ({reason})")

    @property
    def dtype(self) -> torch.dtype:
        """Of the parameters and of the random inputs."""
        return float_dtype(self.fresh)

    def arguments(self) -> Any:
        """Random arguments, the same at every call."""
        return random_call(self.call, self.dtype)


def check_block(whole: WholeBlock, split: nn.Module, mesh: DeviceMesh) -> BlockCheck:
    """Compare a split copy of ``whole.fresh``, which is used up: gradients are left behind."""
    found, dtype = together(lambda: _run(split, *whole.arguments()), mesh.get_group(), mesh.device_type), whole.dtype
    tolerance = TOLERANCE.get(dtype, 1e-3)
    gradients, partial = {}, set()
    shares, orders = dict(split.named_parameters()), joined_rows(split)
    norms = [float(parameter.grad.norm()) for parameter in whole.ran.parameters() if parameter.grad is not None]
    floor = _ZERO * max(norms, default=0.0) or _ZERO
    for name, parameter in whole.ran.named_parameters():
        share, truth = shares[name].grad, parameter.grad
        if truth is None:
            continue
        truth = truth.index_select(orders[name].dim, orders[name].order.to(truth.device)) if name in orders else truth
        error = agree(relative_error(full(share, truth), truth, floor), mesh)
        if not error <= tolerance and not isinstance(share, DTensor) and share is not None:
            total = share.clone()
            dist.all_reduce(total, group=mesh.get_group())
            if agree(relative_error(total, truth, floor), mesh) <= tolerance:
                partial.add(name)
        gradients[name] = error
    return BlockCheck(
        output=agree(relative_error(found[0], whole.outputs), mesh),
        beside=agree(relative_error(found[1], whole.beside), mesh),
        inputs=agree(relative_error(found[2], whole.inputs), mesh),
        gradients=gradients,
        partial=frozenset(partial),
        tolerance=tolerance,
    )


def _check_one(whole: WholeBlock, mesh: DeviceMesh, part: TensorParallelPlan, is_compiled: bool) -> BlockCheck:
    split = copied(whole.fresh)
    apply_tensor_parallel(split, mesh, part)
    found = check_block(whole, split, mesh)
    if found.wrong:
        return found
    problem = wrong_draws(copied(whole.fresh), split, whole.arguments(), mesh, is_compiled=is_compiled)
    return replace(found, draws=problem or "")


def _without_draws(block: nn.Module, call: Call, dtype: torch.dtype) -> nn.Module:
    """In the mode it trains in if it draws no random numbers there; else in ``eval`` mode but for batch norms.

    Their statistics are over all tokens, and other code may mix tokens only in training, too.
    """
    averaging = [part for part in block.modules() if isinstance(part, _BatchNorm) and part.training]
    trains = any(part.training for part in block.modules())
    try:
        with torch.random.fork_rng():
            draws = not trains or bool(draws_of(copied(block), *random_call(call, dtype)))
    except Exception:  # it is run again, where failures are told
        draws = True
    if draws:
        block.eval()
        for part in averaging:
            part.train()
    return block


def _run(block: nn.Module, args: Any, kwargs: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Outputs, what else is seen, and gradients of inputs, each as a vector; those of parameters are in the block."""
    inputs = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor) and x.requires_grad]
    for x in inputs:
        x.grad = None
    device = inputs[0].device.type if inputs else "cpu"
    with torch.enable_grad(), torch.autocast(device, enabled=False):
        results, beside = run_with_beside(block, lambda: call_whole(block, args, kwargs))
        outputs = [x for x in (*results, *beside) if x.requires_grad]
        generator = torch.Generator().manual_seed(2)
        torch.autograd.backward(outputs, [torch.randn(x.shape, generator=generator).to(x) for x in outputs])
    # Also what needs no gradient: a bias of zeros for this rank's heads only would travel on to the next block.
    return _vector(results), _vector(beside), _vector([x.grad for x in inputs if x.grad is not None])


def _vector(tensors: list[Tensor]) -> Tensor:
    return torch.cat([x.detach().float().flatten() for x in tensors]) if tensors else torch.zeros(1)


def full(share: Tensor | None, like: Tensor) -> Tensor:
    """Return the whole of a share; zeros for none."""
    if share is None:
        return torch.zeros_like(like)
    return share.full_tensor() if isinstance(share, DTensor) else share


def relative_error(value: Tensor, truth: Tensor, floor: float = 1e-2) -> float:
    """Relative error; against ``floor`` where the truth is zero but for rounding, as a key bias's gradient is."""
    if value.shape != truth.shape:
        return float("inf")
    value, truth = (torch.nan_to_num(x.detach().float()) for x in (value, truth))
    masked = (value.abs() > _MASKED) & (truth.abs() > _MASKED)  # they would drown everything else
    value, truth = value.masked_fill(masked, 0.0), truth.masked_fill(masked, 0.0)
    return float((value - truth).norm() / truth.norm().clamp(min=floor))


def agree(error: float, mesh: DeviceMesh) -> float:
    """The largest error of any rank, so that all ranks say the same."""
    largest = torch.tensor(error, device=mesh.device_type)
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=mesh.get_group())
    return largest.item()


def _sum_gradients(plan: TensorParallelPlan, block: str, partial: frozenset[str]) -> TensorParallelPlan:
    """Give the owners of partial gradients, in this block and its like, the style that sums them."""
    wanted = {layers_joined(f"{block}.{name.rpartition('.')[0]}".strip(".")) for name in partial}
    note = "sees only this rank's share, so its gradient is summed"
    entries = tuple(
        replace(entry, style="replicated_with_grad_allreduce", source="measured", note=note)
        if layers_joined(entry.name) in wanted and not entry.is_split
        else entry
        for entry in plan.entries
    )
    return replace(plan, entries=entries)


def _split_layers(name: str, part: TensorParallelPlan) -> str:
    return ", ".join(f"{name}.{entry.name}: {entry.style_name}" for entry in part.split)


def _said(error: Exception) -> str:
    return str(error) if isinstance(error, FailedElsewhere) else f"{type(error).__name__}: {error}"


_REMEDY = (
    "Usual causes: head sizes computed from the model's width (x.shape[-1] // num_heads; use view(..., -1, head_dim)"
    " instead), or one linear for query, key and value (or for gate and up), which cannot be cut contiguously. Keep"
    ' these layers "whole" in tp_plan, leave the block out of tp_plan (then a way is found by trying), change the'
    " block, or use tensor_parallel_size=1."
)


_DRAW_REMEDY = 'Keep the layers around it "whole" in tp_plan, set that dropout to 0, or use tensor_parallel_size=1.'


def _fails(name: str, part: TensorParallelPlan, error: Exception) -> str:
    return (
        f"The block {name!r} fails when it is split over {part.tensor_parallel_size} ranks"
        f" ({_said(error)}). Split are {_split_layers(name, part)}. {_REMEDY}"
    )


def _differs(name: str, part: TensorParallelPlan, found: BlockCheck) -> str:
    wrong = found.wrong
    more = f" and {len(wrong) - 4} more" if len(wrong) > 4 else ""
    return (
        f"The block {name!r} computes something else when it is split over {part.tensor_parallel_size} ranks: different"
        f" are {', '.join(wrong[:4])}{more}. Split are {_split_layers(name, part)}. {_REMEDY}"
    )

"""One run of a step in which every module with parameters is a hole: learns what a stage must know to be cut out.

[Note: what the probe learns from labels]
Every value that comes out of a hole is *labelled* with its maker and with the *segment* in which it was made: segment
0 is the code before the first block, segment i the code after block i - 1. A dispatch mode hands labels on from the
inputs of every operation to its outputs, whether or not autograd looks (``no_grad``, ``detach``, integers). Masks,
position ids and rotary tables get no label; every stage computes them itself. A block's labelled arguments travel to
the stage that begins with it, so from there on they count as values of that block's segment. A value may be made from

* values of its own segment, and parameters used directly (these are then held by that segment's stage too),
* arguments of the block before it (an encoder's output that all blocks get; a residual added outside of the blocks),

and from nothing else: any other value would have to skip a stage, which is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only
from torchmetrics import Metric

from lightning_hybrid.errors import PipelineError
from lightning_hybrid.pipeline.holes import Hole, KeptBytes
from lightning_hybrid.pipeline.hollow import memory_of, refuse_leaked, takes_only_the_shape

__all__ = ["Labels", "Probe", "StepFacts", "written_tensors"]

_ABSENT = object()
_REMEDY = "Pass it to the blocks as an argument, or use pipeline_parallel_size=1."


class _Label(NamedTuple):
    """Where a value came from."""

    segment: int | None
    """``None`` for parameters, which every segment may use."""
    maker: str
    is_argument: bool = False
    """Whether it came into its segment as an argument of the block before it."""
    lingers: bool = False
    """Whether it was kept in an attribute of the module that made it."""


class Labels(TorchDispatchMode):
    """While active, labels follow values through all operations. Views share their labels, as they share memory."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.segment = 0
        """Where the step is now."""
        self._drawn: dict[int, int] = {}
        """The memory of what is made from random numbers, and the first segment in which they were drawn."""
        self._of: dict[int, set[_Label]] = {}
        self._handles: dict[int, Any] = {}  # while there is one, an address is not used again

    def of(self, values: Iterable[Any]) -> set[_Label]:
        """Return the labels of all tensors among ``values``."""
        return set().union(*(self._of.get(memory_of(v)[0], ()) for v in values if isinstance(v, Tensor)))

    def add(self, tensor: Tensor, labels: Iterable[_Label]) -> None:
        """Label a tensor's memory."""
        address, storage = memory_of(tensor)
        self._of.setdefault(address, set()).update(labels)
        if address not in self._handles:  # a weak one: large models have no room for all values of a step
            self._handles[address] = storage if isinstance(storage, Tensor) else StorageWeakRef(storage)

    def drawn_in(self, values: Iterable[Any]) -> int | None:
        """Return the first segment in which random numbers were drawn that tensors among ``values`` are made from."""
        segments = [self._drawn.get(memory_of(value)[0]) for value in values if isinstance(value, Tensor)]
        return min((segment for segment in segments if segment is not None), default=None)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        inputs = tree_leaves((args, kwargs))
        labels, drawn = self.of(inputs), self.drawn_in(inputs)
        if takes_only_the_shape(func.__name__):
            labels, drawn = set(), None
        if torch.Tag.nondeterministic_seeded in getattr(func, "tags", ()):
            drawn = self.segment if drawn is None else drawn
        if labels or drawn is not None:
            for tensor in tree_leaves((output, written_tensors(func, args, kwargs))):
                if isinstance(tensor, Tensor):
                    self.add(tensor, labels)
                    if drawn is not None:
                        self._drawn[memory_of(tensor)[0]] = drawn
        return output


class Reads(TorchFunctionMode):
    """While active, says which tensors Python reads numbers out of: what becomes of these, no label can follow."""

    _NAMES = frozenset(("item", "tolist", "numpy", "__array__", "__bool__", "__int__", "__float__", "__index__"))

    def __init__(self, note: Callable[[Tensor], None]) -> None:
        super().__init__()
        self._note = note

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in self._NAMES and args and isinstance(args[0], Tensor):
            self._note(args[0])
        return func(*args, **(kwargs or {}))


def written_tensors(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """Return the arguments that an operation changes in place (tensors, or lists of them)."""
    schema = getattr(func, "_schema", None)
    if schema is None or not schema.is_mutable:
        return []
    given = {**{a.name: value for a, value in zip(schema.arguments, args, strict=False)}, **kwargs}
    return [given.get(a.name) for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]


class _Made(torch.autograd.Function):
    """Makes a tensor require a gradient without being a leaf, which user code could not change in place."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, tensor: Tensor) -> Tensor:
        ctx.mark_dirty(tensor)
        return tensor

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None]:
        return None, None


@dataclass(frozen=True, kw_only=True)
class StepFacts:
    """What a probe learnt about one kind of step."""

    blocks: tuple[str, ...]
    """FQNs of the blocks in the order of their calls."""
    arguments: tuple[tuple[int, ...], ...]
    """For each block the positions of the arguments that travel to it, among its flattened ``(args, kwargs)``."""
    differentiable: tuple[tuple[bool, ...], ...]
    """For each block which of these arguments require a gradient (others were detached, or are integers)."""
    num_values: tuple[int, ...]
    """For each block the number of leaves of its flattened ``(args, kwargs)``."""
    uses: tuple[frozenset[str], ...]
    """For each segment (one more than blocks) the names of the parameters that it uses, blocks' own apart."""
    reuses: tuple[bool, ...]
    """For each block whether the code after it computes with the block's arguments (beside handing them on)."""
    redraws: bool = False
    """Whether what the step returns or logs is made, past the blocks, from random numbers drawn before the last one."""
    lingers: bool = False
    """Whether what the step returns or logs is made from what the last block keeps in its attributes."""
    flops: tuple[float, ...]
    """For each block the floating point operations of one forward on the probe's micro-batch."""
    flops_outside: tuple[float, ...]
    """The same for each segment."""
    kept: tuple[int | None, ...] = ()
    """For each block the bytes that autograd keeps of one forward on it; ``None`` where they cannot be counted."""
    kept_arguments: tuple[int, ...] = ()
    """For each block the bytes of its arguments that require a gradient."""
    kept_outside: tuple[int | None, ...] = ()
    """For each segment what autograd keeps of the code there."""

    def check_structure(self, index: int, leaves: list[Any]) -> None:
        """Refuse flattened arguments of a block that are not like the probe's: what travels is known by position.

        Others may be ``None`` in one batch and a tensor in the next (masks are), unless a gradient would be lost.
        """
        travelling = self.arguments[index]
        found = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        stray = [i for i in found if leaves[i].requires_grad and i not in travelling]
        if len(leaves) != self.num_values[index] or stray or not set(travelling) <= set(found):
            raise PipelineError(
                f"The block {self.blocks[index]} got other arguments than in the first batch: {len(leaves)} values with"
                f" tensors at {found}, instead of {self.num_values[index]} of which those at {list(travelling)} are"
                " made from weights (perhaps an optional argument is None only in some batches). Pass the same"
                " arguments in every batch, or use pipeline_parallel_size=1."
            )


@dataclass(kw_only=True)
class Probe:
    """Collects the facts while the step runs. Feed it every intercepted call, then the step's output."""

    parameter_names: dict[Tensor, str]
    """The names of all parameters, and of what stands for those that are not there."""
    trains: bool = True
    """Whether the step needs gradients."""
    labels: Labels = field(default_factory=Labels)
    """To be active while the step runs."""
    reads: Reads = field(init=False)
    """To be active while the step runs."""
    saved: KeptBytes = field(default_factory=KeptBytes)
    """To be active while the step runs."""
    order: list[str] = field(default_factory=list)
    _arguments: list[tuple[int, ...]] = field(default_factory=list)
    _differentiable: list[tuple[bool, ...]] = field(default_factory=list)
    _num_values: list[int] = field(default_factory=list)
    _uses: list[set[str]] = field(default_factory=lambda: [set()])
    _flops: list[float] = field(default_factory=list)
    _flops_outside: list[float] = field(default_factory=lambda: [0.0])
    _kept: list[int | None] = field(default_factory=list)
    _kept_arguments: list[int] = field(default_factory=list)
    _kept_outside: list[int | None] = field(default_factory=list)
    _kept_by_parts: list[int | None] = field(default_factory=list)
    _carried: dict[int, Tensor] = field(default_factory=dict)
    _reuses: list[bool] = field(default_factory=list)
    _undo: list[tuple[dict[str, Any], str, Any]] = field(default_factory=list)
    _lingers: bool = False
    _reads: list[tuple[int, _Label]] = field(default_factory=list)
    _logged: list[tuple[str, list[Any]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.reads = Reads(self._read)
        for parameter, name in self.parameter_names.items():
            self.labels.add(parameter, [_Label(None, name)])
        self.saved.ignore(self.parameter_names)

    @property
    def _segment(self) -> int:
        return len(self.order)

    def block(self, name: str, part: nn.Module, hole: Hole, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Note a block's call and return a differentiable output."""
        if name in self.order:
            raise PipelineError(
                f"The block {name} is called more than once in one step, so the step cannot be cut into stages."
                " Call the model once for each batch (join the inputs), or use pipeline_parallel_size=1."
            )
        if self.trains and not torch.is_grad_enabled():
            raise PipelineError(
                f"The block {name} is called under torch.no_grad(), which hides what needs a gradient. Call"
                " torch.utils.checkpoint with use_reentrant=False (the reentrant kind does so), freeze parameters with"
                " requires_grad_(False), or use pipeline_parallel_size=1."
            )
        leaves = tree_leaves((args, kwargs))
        self._check(name, leaves)
        positions = [
            i for i, x in enumerate(leaves) if isinstance(x, Tensor) and (x.requires_grad or self.labels.of([x]))
        ]
        self._arguments.append(tuple(positions))
        self._differentiable.append(tuple(leaves[i].requires_grad for i in positions))
        self._num_values.append(len(leaves))
        self._reuses.append(False)
        self.order.append(name)
        self.labels.segment = self._segment
        self._uses.append(set())
        self._flops_outside.append(0.0)
        self._carried = {id(leaves[i]): leaves[i] for i in positions}
        for leaf in self._carried.values():
            self._carry(leaf)
        self._end_segment()
        self._kept_arguments.append(sum(x.nbytes for x in leaves if isinstance(x, Tensor) and x.requires_grad))
        with _disable_current_modes():
            self._flops.append(float(hole.flops(args, kwargs)))
            self._kept.append(hole.kept(args, kwargs))
        return self._fresh(name, part, hole, args, kwargs)

    def outside(
        self,
        name: str,
        part: nn.Module,
        parameters: Iterable[str],
        hole: Hole,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Note a call of a module outside of the blocks, which has these parameters; return a differentiable output."""
        self._check(name, tree_leaves((args, kwargs)))
        self._uses[self._segment].update(parameters)
        with _disable_current_modes():
            self._flops_outside[self._segment] += float(hole.flops(args, kwargs))
            self._kept_by_parts.append(hole.kept(args, kwargs))
        return self._fresh(name, part, hole, args, kwargs)

    def _end_segment(self) -> None:
        """Settle what the code since the last block keeps: its own, and that of modules outside of the blocks."""
        parts = self._kept_by_parts
        self._kept_outside.append(None if None in parts else self.saved.total + sum(part or 0 for part in parts))
        self.saved.total, self._kept_by_parts = 0, []

    def log(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        """Stand for ``self.log``: the value must be right on the last stage, where logging happens."""
        states = [getattr(value, state) for state in value._defaults] if isinstance(value, Metric) else value
        self._logged.append((f'self.log("{name}")', tree_leaves(states)))

    def _read(self, tensor: Tensor) -> None:
        """Note that Python reads numbers out of a tensor."""
        self._reads += [(self._segment, label) for label in self.labels.of([tensor])]

    def finish(self, output: Any) -> StepFacts:
        """Note the step's output and return the facts."""
        refuse_leaked(tree_leaves(output))
        self._end_segment()
        results = [("the step's output", tree_leaves(output)), *self._logged]
        for name, leaves in results:
            self._check(name, leaves)
        for segment, label in self._reads:
            if label.segment is None:  # a parameter: every stage holds it and reads the same
                for uses in self._uses:
                    uses.add(label.maker)
            elif segment < self._segment or label.segment != self._segment:
                raise PipelineError(
                    f"The step reads a value of {label.maker} out of its tensor (.item(), bool(), tolist(), ...),"
                    " which only one pipeline stage has, while others would go on with another number. Compute with the"
                    " tensor, or use pipeline_parallel_size=1."
                )
        drawn = self.labels.drawn_in(leaf for _, leaves in results for leaf in leaves)
        return StepFacts(
            blocks=tuple(self.order),
            arguments=tuple(self._arguments),
            differentiable=tuple(self._differentiable),
            num_values=tuple(self._num_values),
            uses=tuple(frozenset(names) for names in self._uses),
            reuses=tuple(self._reuses),
            lingers=self._lingers,
            redraws=drawn is not None and drawn < self._segment,
            flops=tuple(self._flops),
            flops_outside=tuple(self._flops_outside),
            kept=tuple(self._kept),
            kept_arguments=tuple(self._kept_arguments),
            kept_outside=tuple(self._kept_outside),
        )

    def _fresh(self, name: str, part: nn.Module, hole: Hole, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the hole's output in memory of its own, with a label of its own."""

        with _disable_current_modes():
            output = tree_map_only(Tensor, lambda t: self._labelled(t, _Label(self._segment, name)), hole(args, kwargs))
            for path, key, tensor in hole.left_behind(args, kwargs):
                place = part.get_submodule(path).__dict__
                self._undo.append((place, key, place.get(key, _ABSENT)))
                place[key] = self._labelled(tensor, _Label(self._segment, name, lingers=True))
            return output

    def _labelled(self, tensor: Tensor, label: _Label) -> Tensor:
        made = tensor.detach().clone()
        if made.is_floating_point() or made.is_complex():
            with torch.enable_grad():
                made = _Made.apply(torch.zeros((), requires_grad=True), made)  # type: ignore[no-untyped-call]
        self.labels.add(made, [label])
        return made

    def undo(self) -> None:
        """Give modules the attributes back that they had."""
        for place, key, value in reversed(self._undo):
            if value is _ABSENT:
                del place[key]
            else:
                place[key] = value
        self._undo.clear()

    def _carry(self, tensor: Tensor) -> None:
        """From now on the user's variable holds what the block got. Views made before do not follow it."""
        if isinstance(tensor, nn.Parameter):
            return
        makers = {label.maker for label in self.labels.of([tensor])}
        with _disable_current_modes():
            tensor.data = tensor.detach().clone()
        self.labels.add(tensor, (_Label(self._segment, maker, is_argument=True) for maker in makers))

    def _check(self, name: str, leaves: Iterable[Any]) -> None:
        """Refuse values of other segments, and note the parameters and block arguments that values were made from."""
        labels = self.labels.of(leaf for leaf in leaves if id(leaf) not in self._carried)
        for segment, maker, is_argument, lingers in sorted(labels, key=lambda label: (label.segment or 0, label.maker)):
            self._lingers |= lingers
            if segment is None:
                self._uses[self._segment].add(maker)
            elif segment != self._segment:
                kept = " (kept in an attribute)" if lingers else ""
                raise PipelineError(
                    f"{name} uses a value of {maker}{kept} that does not come through the arguments of the block"
                    f" before it, so it would have to skip a pipeline stage. {_REMEDY}"
                )
            elif is_argument:
                self._reuses[-1] = True

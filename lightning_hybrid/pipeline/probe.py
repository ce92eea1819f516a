"""One run of a step in which every module with parameters is a hole: learns what a stage must know to be cut out.

[Note: what the probe learns from autograd]
Each hole's output requires grad, so autograd marks exactly what depends on parameters: hidden states, an encoder's
output, a learned bias. Masks, position ids and rotary tables are not marked; every stage computes them itself. Each
output is tagged with the *segment* in which it was made: segment 0 is the code before the first block, segment i the
code after block i - 1. A block's argument may depend on

* values made in its own segment, and parameters used directly (these are then held by that segment's stage too),
* arguments of the block before it (an encoder's output that all blocks get; a residual added outside of the blocks),

and on nothing else: any other value would have to skip a stage, which is refused by name.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from lightning_hybrid.errors import PipelineError
from lightning_hybrid.pipeline.holes import Hole

__all__ = ["Probe", "StepFacts"]

_REMEDY = "Pass it to the blocks as an argument, or use pipeline_parallel_size=1."


@dataclass(frozen=True, kw_only=True)
class StepFacts:
    """What a probe learnt about one kind of step."""

    blocks: tuple[str, ...]
    """FQNs of the blocks in the order of their calls."""
    arguments: tuple[tuple[int, ...], ...]
    """For each block the positions of its differentiable arguments among its flattened ``(args, kwargs)``."""
    uses: tuple[frozenset[str], ...]
    """For each segment (one more than blocks) the names of the parameters that it uses, blocks' own apart."""
    reuses: tuple[bool, ...]
    """For each block whether the code after it computes with the block's arguments (beside handing them on)."""
    flops: tuple[float, ...]
    """For each block the floating point operations of one forward on the probe's micro-batch."""
    flops_outside: tuple[float, ...]
    """The same for each segment."""


@dataclass(kw_only=True)
class Probe:
    """Collects the facts while the step runs. Feed it every intercepted call, then the step's output."""

    parameter_names: dict[int, str]
    """``id(parameter) -> name`` of all parameters that are there."""
    order: list[str] = field(default_factory=list)
    _arguments: list[tuple[int, ...]] = field(default_factory=list)
    _uses: list[set[str]] = field(default_factory=lambda: [set()])
    _flops: list[float] = field(default_factory=list)
    _flops_outside: list[float] = field(default_factory=lambda: [0.0])
    _made: dict[int, tuple[Tensor, int, str]] = field(default_factory=dict)
    _carried: dict[int, Any] = field(default_factory=dict)
    _carried_edges: set[Any] = field(default_factory=set)
    _reuses: list[bool] = field(default_factory=list)

    @property
    def _segment(self) -> int:
        return len(self.order)

    def block(self, name: str, hole: Hole, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Note a block's call and return a differentiable output."""
        if name in self.order:
            raise PipelineError(
                f"The block {name} is called more than once in one step, so the step cannot be cut into stages."
                " Call the model once for each batch (join the inputs), or use pipeline_parallel_size=1."
            )
        if not torch.is_grad_enabled():
            raise PipelineError(
                f"The block {name} is called under torch.no_grad(), which hides what depends on parameters."
                " Freeze parameters with requires_grad_(False) instead, or use pipeline_parallel_size=1."
            )
        leaves = tree_leaves((args, kwargs))
        self._check(name, leaves)
        positions = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.requires_grad]
        self._arguments.append(tuple(positions))
        self._carried = {id(leaves[i]): leaves[i] for i in positions}
        self._carried_edges = {(leaves[i].grad_fn, leaves[i].output_nr) for i in positions if leaves[i].grad_fn}
        self._reuses.append(False)
        self._flops.append(float(hole.flops(args, kwargs)))
        self.order.append(name)
        self._uses.append(set())
        self._flops_outside.append(0.0)
        return self._fresh(name, hole(args, kwargs))

    def outside(
        self, name: str, parameters: Iterable[str], hole: Hole, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Note a call of a module outside of the blocks, which has these parameters; return a differentiable output."""
        self._check(name, tree_leaves((args, kwargs)))
        self._uses[self._segment].update(parameters)
        self._flops_outside[self._segment] += float(hole.flops(args, kwargs))
        return self._fresh(name, hole(args, kwargs))

    def finish(self, output: Any) -> StepFacts:
        """Note the step's output and return the facts."""
        self._check("the step's output", tree_leaves(output))
        return StepFacts(
            blocks=tuple(self.order),
            arguments=tuple(self._arguments),
            uses=tuple(frozenset(names) for names in self._uses),
            reuses=tuple(self._reuses),
            flops=tuple(self._flops),
            flops_outside=tuple(self._flops_outside),
        )

    def _fresh(self, name: str, output: Any) -> Any:
        def fresh(tensor: Tensor) -> Tensor:
            if not tensor.is_floating_point():
                return tensor
            made = tensor.detach().clone().requires_grad_()
            self._made[id(made)] = (made, self._segment, name)
            with torch.enable_grad():
                return made.clone()  # not a leaf: user code may change it in place

        return tree_map_only(Tensor, fresh, output)

    def _check(self, name: str, leaves: Iterable[Any]) -> None:
        for leaf in leaves:
            if not isinstance(leaf, Tensor) or not leaf.requires_grad or id(leaf) in self._carried:
                continue
            for source in self._sources(leaf):
                if id(source) in self._made:
                    _, segment, maker = self._made[id(source)]
                    if segment != self._segment:
                        raise PipelineError(
                            f"{name} uses an output of {maker} that does not come through the arguments of the block"
                            f" before it, so it would have to skip a pipeline stage. {_REMEDY}"
                        )
                elif id(source) in self.parameter_names:
                    self._uses[self._segment].add(self.parameter_names[id(source)])

    def _sources(self, tensor: Tensor) -> list[Tensor]:
        """All leaf tensors that ``tensor`` depends on, other than through arguments of the block before."""
        if tensor.grad_fn is None:
            return [tensor]
        leaves: list[Tensor] = []
        seen: set[Any] = set()
        stack: list[Any] = [(tensor.grad_fn, tensor.output_nr)]
        while stack:
            edge = stack.pop()
            if edge in self._carried_edges:
                self._reuses[-1] = True
                continue
            node, _ = edge
            if node is None or node in seen:
                continue
            seen.add(node)
            if hasattr(node, "variable"):
                leaves.append(node.variable)
            stack.extend(node.next_functions)
        return leaves

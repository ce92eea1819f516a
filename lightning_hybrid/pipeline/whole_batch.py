"""The code after the last block, run once on the whole batch.

[Note: a loss of the whole batch]
For losses that couple samples (:mod:`~.contract`) the last stage leaves each micro-batch's step right after the last
block, with what that returned. When all are there, they are joined along their samples, and the step runs once more on
the whole batch, with holes up to and including the last block, in whose place the joined values come. Loss, logging
and outputs are then exactly one process's. The backward gives the gradient of the joined values, and its rows are where
the backwards of the micro-batches start. So all forwards come before the first backward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lightning_hybrid.errors import PipelineError
from lightning_hybrid.pipeline.probe import StepFacts
from lightning_hybrid.pipeline.stage import Cut, StageRun

__all__ = ["WholeBatch"]


@dataclass(kw_only=True)
class WholeBatch:
    """One step's run of the whole batch behind the last block."""

    cut: Cut
    facts: StepFacts
    parts: Sequence[list[Tensor]]
    """For each micro-batch what its run captured."""
    _run: StageRun = field(init=False)
    _loss: Tensor | None = None
    _dims: list[int | None] = field(default_factory=list)
    _gradients: list[list[Tensor]] = field(default_factory=list)

    def __post_init__(self) -> None:
        last = len(self.facts.blocks) - 1
        self._run = StageRun(
            first=last,
            last=last + 1,
            facts=self.facts,
            keep=self.cut.placeholders,
            joins=True,
            receive=self._join,
        )

    def forward(self, step: Callable[[], Any]) -> Any:
        """Run the user's step on the whole batch and return its output."""
        return self.cut.run(self._run, step)

    def backward(self, loss: Tensor) -> None:
        """Start from ``loss``, as soon as the first gradient is asked for."""
        self._loss = loss

    def gradients_of(self, microbatch: int) -> list[Tensor]:
        """Return the gradients of what a micro-batch's run captured."""
        if not self._gradients:
            assert self._loss is not None
            if self._loss.requires_grad:
                with self.cut.resume(self._run):
                    torch.autograd.backward([self._loss])
            whole = self._run.gradients or [None] * len(self._dims)
            self._gradients = [self._rows(gradient, i) for i, gradient in enumerate(whole)]
            self._loss = None
            self._run.forget()
        return [rows[microbatch] for rows in self._gradients]

    def _rows(self, gradient: Tensor | None, index: int) -> list[Tensor]:
        """Deal a joined tensor's gradient out to the micro-batches; what they share goes to the first."""
        tensors, dim = [part[index] for part in self.parts], self._dims[index]
        if gradient is None:
            return [torch.zeros_like(tensor) for tensor in tensors]
        if dim is None:
            return [gradient, *(torch.zeros_like(tensor) for tensor in tensors[1:])]
        return list(gradient.split([tensor.shape[dim] for tensor in tensors], dim))

    def _join(self, local: list[Tensor]) -> list[Tensor]:
        if any(len(part) != len(local) for part in self.parts):
            raise PipelineError(self._problem(f"returns {len(local)} tensors", "returned another number"))
        joined = []
        for index, like in enumerate(local):
            tensors = [part[index].detach() for part in self.parts]
            dim = self._sample_dim(tensors, like)
            self._dims.append(dim)
            joined.append(tensors[0].clone() if dim is None else torch.cat(tensors, dim))
        return joined

    def _sample_dim(self, tensors: list[Tensor], like: Tensor) -> int | None:
        """Along which dimension micro-batches are joined to the shape of ``like``; ``None``: they share one value."""
        first = tensors[0]
        if all(tensor.shape == like.shape for tensor in tensors):
            if any(not torch.equal(tensor, first) for tensor in tensors):
                what = f"gives a tensor of shape {tuple(like.shape)}, which has no row per sample,"
                raise PipelineError(self._problem(what, "gave others"))
            return None
        dims = [d for d, (a, b) in enumerate(zip(like.shape, first.shape, strict=False)) if a != b]
        shapes = [tuple(tensor.shape) for tensor in tensors]
        sizes = sum(tensor.shape[dims[0]] for tensor in tensors) if len(dims) == 1 else -1
        if like.dim() != first.dim() or len(dims) != 1 or sizes != like.shape[dims[0]]:
            raise PipelineError(self._problem(f"gives the shape {tuple(like.shape)}", f"gave {shapes}"))
        return dims[0]

    def _problem(self, whole: str, parts: str) -> str:
        return (
            f"whole_batch_loss=True joins what the last block {self.facts.blocks[-1]} gives for each micro-batch, but"
            f" on the whole batch it {whole}, and micro-batches {parts}. Have it return tensors with a row per sample,"
            " the same for every batch size, or use pipeline_parallel_size=1."
        )

"""Outer weights: what all replicas had at their last exchange, and the SGD that moves them.

DiLoCo (Douillard et al. 2023, arXiv 2311.08105, algorithm 1): after ``H`` inner steps the outer gradient is
``outer - mean(inner)``, the mean over replicas; an SGD with Nesterov momentum takes one step of the outer weights along
it, and all replicas go on from there. torch's SGD is used, so its formula: ``m = momentum * m + g`` (``m = g`` at
first), ``outer -= lr * (g + momentum * m)``. With ``lr=1`` and no momentum outer weights become the replicas' mean.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

__all__ = ["OuterWeights"]


class OuterWeights:
    """This rank's shares of the outer weights and of their momentum, by parameter name; fp32 at least."""

    def __init__(self, lr: float, momentum: float, device: torch.device | None) -> None:
        """``device``: where they lie; ``None``: with the weights."""
        self._device = device
        self._weights: dict[str, nn.Parameter] = {}
        self._empty = nn.Parameter(torch.empty(0))  # SGD wants at least one
        self.optimizer = torch.optim.SGD([self._empty], lr=lr, momentum=momentum, nesterov=momentum > 0)

    def __contains__(self, name: str) -> bool:
        return name in self._weights

    def __getitem__(self, name: str) -> Tensor:
        return self._weights[name].detach()

    @property
    def num_bytes(self) -> int:
        """What the weights and their momentum take, or will take after the first step."""
        copies = 2 if self.optimizer.defaults["momentum"] else 1
        return copies * sum(weight.nbytes for weight in self._weights.values())

    @torch.no_grad()
    def set(self, name: str, value: Tensor) -> None:
        """Put ``value``, this rank's share of a parameter, in the outer weight's place; its momentum stays."""
        if name in self._weights:
            self._weights[name].copy_(value)
            return
        dtype = torch.float32 if value.element_size() < 4 else value.dtype
        copy = value.detach().to(self._device or value.device, dtype, copy=True)
        self._weights[name] = nn.Parameter(copy)
        self.optimizer.param_groups[0]["params"].append(self._weights[name])

    def momentum(self, name: str) -> Tensor | None:
        """Return the momentum of a parameter's share; ``None`` before the first step."""
        buffer: Tensor | None = self.optimizer.state[self._weights[name]].get("momentum_buffer")
        return buffer

    def set_momentum(self, name: str, value: Tensor) -> None:
        """Take a momentum that was saved."""
        weight = self._weights[name]
        self.optimizer.state[weight]["momentum_buffer"] = value.to(weight.device, weight.dtype)

    @torch.no_grad()
    def difference(self, name: str, value: Tensor) -> Tensor:
        """Return ``outer - value``, this replica's part of the outer gradient."""
        weight = self._weights[name]
        return weight - value.to(weight.device, weight.dtype)

    @torch.no_grad()
    def shift(self, name: str, difference: Tensor) -> None:
        """Make the replicas' mean the outer weight, from the mean of their differences; the momentum rests."""
        self._weights[name].sub_(difference.to(self._weights[name].device))

    @torch.no_grad()
    def step(self, gradients: Mapping[str, Tensor]) -> None:
        """Move the outer weights that have a gradient."""
        for name, gradient in gradients.items():
            weight = self._weights[name]
            weight.grad = gradient.to(weight.device, weight.dtype)
        self.optimizer.step()
        self.optimizer.zero_grad()

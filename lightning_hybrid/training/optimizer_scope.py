"""What an optimizer's update of one element depends on, found by trying its own class on small parameters.

A rank holds shards of parameters and only some of them. An optimizer whose update of a part is not the part of its
update (Muon, Adafactor, LAMB), or that looks at all parameters at once (LBFGS), would compute something else there.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_hybrid.errors import UnsupportedError
from lightning_hybrid.layout import Layout

__all__ = ["refuse_wide_optimizers", "step_alone"]

_REMEDY = (
    "Use an optimizer that works by element (SGD, Adam, AdamW, RMSprop, ...), also as a second one for these parameters"
)


def step_alone(
    optimizer: Optimizer, group: dict[str, Any], parameters: list[nn.Parameter], num_steps: int = 1
) -> dict[nn.Parameter, dict[str, Any]]:
    """Let the optimizer's class step with the settings of ``group`` on other parameters, which have gradients.

    The optimizer itself is not touched, and no hook runs. Returns the state that the parameters get.
    """
    cls: Any = type(optimizer)
    twin = cls.__new__(cls)
    hooks: dict[str, Any] = {n: OrderedDict() for n in vars(optimizer) if n.startswith("_optimizer_") and "hooks" in n}
    alone = {"param_groups": [{**group, "params": parameters}], "state": defaultdict(dict)}
    twin.__dict__ = {**vars(optimizer), **hooks, **alone}
    twin.__dict__.pop("step", None)  # what a scheduler put around it
    with torch.random.fork_rng(devices=[]):
        for _ in range(num_steps):
            cls.step(twin)
    state: dict[nn.Parameter, dict[str, Any]] = twin.state
    return state


def refuse_wide_optimizers(optimizer: Optimizer, layout: Layout) -> None:
    """Refuse an optimizer that sees more than one element at a time where this layout hides the rest from it.

    Raises:
        UnsupportedError: with the optimizer's name and the way out. The same on all ranks.
    """
    name = type(optimizer).__name__
    if layout.world_size > 1 and isinstance(optimizer, torch.optim.LBFGS):
        raise UnsupportedError(
            "LBFGS takes products over all parameters at once, and looks at the loss to see how far to step, but each"
            " rank holds a part of them or has a loss of its own. Use SGD, AdamW or another optimizer that works by"
            f" element, or one device (now: {layout})."
        )
    for group in optimizer.param_groups:
        if layout.pipeline_parallel_size > 1 and _update_differs(optimizer, group, by="parameter"):
            raise UnsupportedError(
                f"{name} looks at several parameters at once, but each pipeline stage holds some of them. {_REMEDY}, or"
                f" pipeline_parallel_size=1 (now: {layout})."
            )
        if any(isinstance(p, DTensor) for p in group["params"]) and _update_differs(optimizer, group, by="rows"):
            raise UnsupportedError(
                f"{name} updates a matrix as a whole, but ranks hold shards of its parameters. {_REMEDY}, or keep"
                " matrices whole: replicate_size equal to data_parallel_size without another degree, or a pipeline with"
                f" data_parallel_size=1 and tensor_parallel_size=1 (now: {layout})."
            )


def _update_differs(optimizer: Optimizer, group: dict[str, Any], *, by: str) -> bool:
    """Whether a matrix is updated otherwise when the optimizer sees its rows, or another parameter, apart."""
    generator = torch.Generator().manual_seed(0)
    values, gradients = torch.randn(2, 2, 4, 6, generator=generator)
    settings = {**group, "lr": torch.full_like(group["lr"], 0.1) if isinstance(group.get("lr"), Tensor) else 0.1}
    settings = settings if "lr" in group else group

    def update(parts: list[tuple[Tensor, Tensor]]) -> Tensor:
        parameters = [nn.Parameter(value.clone()) for value, _ in parts]
        for parameter, (_, gradient) in zip(parameters, parts, strict=True):
            parameter.grad = gradient.clone()
        step_alone(optimizer, settings, parameters, num_steps=2)
        return torch.cat([parameter.detach() for parameter in parameters])

    first, second = zip(values, gradients, strict=True)
    try:
        if by == "parameter":
            together, apart = update([first, second]), torch.cat([update([first]), update([second])])
        else:
            together, apart = update([first]), torch.cat([update([(first[0][r], first[1][r])]) for r in _HALVES])
    except Exception:  # it needs more than parameters (a closure, its own set-up): nothing is known
        return False
    return not torch.allclose(together, apart, rtol=1e-4, atol=1e-6)


_HALVES = (slice(0, 2), slice(2, 4))

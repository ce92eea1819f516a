"""Is a run equal to one process? Records losses, gradients and updates of both, and compares them by parameter name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard
from torch.utils.data import DataLoader, DistributedSampler

from lightning_hybrid import Hybrid3DStrategy
from lightning_hybrid.tensor_parallel.styles import joined_rows

ONE_PROCESS: dict[str, Any] = {}
QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


@dataclass(kw_only=True)
class Trace:
    """What one rank saw."""

    losses: list[float] = field(default_factory=list)
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    before: dict[str, Tensor] = field(default_factory=dict)
    after: dict[str, Tensor] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    global_step: int = 0

    @property
    def updates(self) -> dict[str, Tensor]:
        return {name: self.after[name] - self.before[name] for name in self.before}


class Recorder(L.Callback):
    """Fills a trace; every tensor is assembled from its shards."""

    def __init__(self) -> None:
        self.trace = Trace()

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.trace.before = by_name(pl_module, dict(pl_module.named_parameters()))

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        gradients = {name: p.grad for name, p in pl_module.named_parameters() if p.grad is not None}
        self.trace.gradients.append(by_name(pl_module, gradients))

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.trace.losses.append(float(outputs["loss"]))

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.trace.after = by_name(pl_module, dict(pl_module.named_parameters()))
        self.trace.metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
        self.trace.global_step = trainer.global_step


def by_name(module: Any, tensors: dict[str, Any]) -> dict[str, Tensor]:
    """Whole tensors, with the rows in one process's order."""
    found, rows = full({name: tensor.detach() for name, tensor in tensors.items()}), joined_rows(module)
    for name in rows.keys() & found.keys():
        found[name] = rows[name].sorted(found[name])
    return found


def full(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Copies of whole tensors; shards of a kind are exchanged at once, which is quicker than one by one."""
    whole: dict[str, Any] = {}
    kinds: dict[Any, list[str]] = {}
    for name, tensor in tensors.items():
        whole[name] = tensor if isinstance(tensor, DTensor) else tensor.clone()
        if isinstance(tensor, DTensor):
            sharded = [axis for axis, placement in enumerate(tensor.placements) if not placement.is_replicate()]
            if len(sharded) == 1 and type(tensor.placements[sharded[0]]) is Shard:
                kinds.setdefault((tensor.device_mesh, sharded[0], tensor.dtype), []).append(name)
            else:
                whole[name] = tensor.full_tensor().clone()
    for (mesh, axis, _), names in kinds.items():
        parts: list[Any] = [None] * mesh.size(axis)
        mine = [tensors[name].to_local() for name in names]
        flat = torch.cat([part.reshape(-1) for part in mine])
        dist.all_gather_object(parts, (flat, [part.shape for part in mine]), group=mesh.get_group(axis))
        split = [flat.split([shape.numel() for shape in shapes]) for flat, shapes in parts]
        for index, name in enumerate(names):
            shards = [values[index].view(shapes[index]) for values, (_, shapes) in zip(split, parts, strict=True)]
            whole[name] = torch.cat(shards, dim=tensors[name].placements[axis].dim)
    return whole


def trace(
    rank: int,
    make_module: Callable[[], L.LightningModule],
    rows: Any,
    degrees: dict[str, Any],
    *,
    batch_size: int = 8,
    num_devices: int | None = None,
    collate: Any = None,
    sabotage: Callable[[], Any] | None = None,
    **options: Any,
) -> Trace:
    """Train on ``rows`` in their order and record. ``batch_size`` is the global one; ``degrees`` empty: one process."""
    if sabotage is not None:
        sabotage()
    L.seed_everything(0, verbose=False)
    degrees = dict(degrees)
    data = degrees.get("data_parallel_size", 1)
    if num_devices is None:
        num_devices = data * degrees.get("tensor_parallel_size", 1) * degrees.get("pipeline_parallel_size", 1)
    if degrees:
        degrees = {"data_parallel_size": 1, "tensor_parallel_size": 1, "pipeline_parallel_size": 1, **degrees}
    strategy: Any = Hybrid3DStrategy(archive=None, **degrees) if degrees else "auto"
    recorder = Recorder()
    callbacks = [recorder, *options.pop("callbacks", [])]
    trainer = L.Trainer(
        devices=num_devices,
        strategy=strategy,
        callbacks=callbacks,
        use_distributed_sampler=False,
        **{**QUIET, "max_epochs": 1, **options},
    )
    data_rank = trainer.strategy.coordinate.data if degrees else 0
    sampler = DistributedSampler(rows, num_replicas=data, rank=data_rank, shuffle=False)
    loader = DataLoader(rows, batch_size=batch_size // data, sampler=sampler, collate_fn=collate)
    trainer.fit(make_module(), loader)
    return recorder.trace


def merged(traces: list[Trace]) -> Trace:
    """Join what the ranks of one run saw; where several hold a parameter, they must agree on it."""
    whole = Trace(metrics=traces[0].metrics, global_step=traces[0].global_step)
    whole.losses = [sum(step) / len(traces) for step in zip(*(t.losses for t in traces), strict=True)]
    whole.gradients = [union([t.gradients[i] for t in traces]) for i in range(len(traces[0].gradients))]
    whole.before, whole.after = union([t.before for t in traces]), union([t.after for t in traces])
    return whole


def union(parts: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    whole: dict[str, Tensor] = {}
    for part in parts:
        for name, tensor in part.items():
            if name in whole:
                assert torch.equal(whole[name], tensor), f"ranks disagree on {name}"
            whole[name] = tensor
    return whole


def worst_error(
    expected: dict[str, Tensor], found: dict[str, Tensor], rounding: dict[str, Tensor] | None = None
) -> tuple[float, str]:
    """Largest relative L2 error of a parameter, and its name.

    A tensor that is zero but for rounding (a key bias's gradient) is compared with the norm of all of them. An update
    cannot be known better than its parameter is represented: ``rounding`` holds the parameters, whose last digit is
    taken off the error.
    """
    assert found.keys() == expected.keys(), f"names differ: {sorted(found.keys() ^ expected.keys())}"
    total = torch.stack([tensor.double().norm() for tensor in expected.values()]).norm()
    errors = {}
    for name, tensor in expected.items():
        norm = tensor.double().norm()
        scale = norm if norm > 1e-6 * total else total
        difference = (found[name].double() - tensor.double()).norm()
        if rounding is not None:
            difference = (difference - torch.finfo(torch.float32).eps * rounding[name].norm()).clamp(min=0)
        errors[name] = float(difference / scale)
    name = max(errors, key=lambda key: errors[key])
    return errors[name], name


def assert_equal(expected: Trace, traces: list[Trace], *, tolerance: float = 1e-5) -> None:
    """Losses of all steps, gradients of the first update, and the sum of all updates agree."""
    found = merged(traces)
    assert found.global_step == expected.global_step
    assert len(found.losses) == len(expected.losses)
    for step, (loss, right) in enumerate(zip(found.losses, expected.losses, strict=True)):
        assert abs(loss - right) <= tolerance * max(1.0, abs(right)), f"loss of step {step}: {loss} instead of {right}"
    error, name = worst_error(expected.gradients[0], found.gradients[0])
    assert error <= tolerance, f"gradient of {name} is off by {error:.1e}"
    error, name = worst_error(expected.updates, found.updates, expected.before)
    assert error <= 5 * tolerance, f"update of {name} is off by {error:.1e}"


@contextmanager
def must_differ() -> Iterator[None]:
    """Around the comparison of a deliberately wrong run: it must fail."""
    try:
        yield
    except AssertionError:
        return
    raise AssertionError("a deliberately wrong run was taken for right")

"""A sampled step on real ranks: a rank that comes late shows on the others, in seconds, under the right axis."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from lightning_hybrid.callbacks import StepBreakdown
from lightning_hybrid.measuring.recorder import RecordedStep
from lightning_hybrid.measuring.sampling import StepSample, _unix_to_perf_counter
from lightning_hybrid.metrics.breakdown import Span, overlap
from lightning_hybrid.metrics.collectives import Event, _without_overlap
from lightning_hybrid.tensor_parallel.collectives import enter_split, leave_partial
from tests.distributed.test_callbacks import SleepingBlock, Words, build_trainer, loader

LATE = 0.3


class Late(nn.Module):
    """Sleeps in the forward pass when told to."""

    seconds = 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(self.seconds)
        return x


class OwnExchanges(nn.Module):
    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.up, self.down, self.group = nn.Linear(8, 8), nn.Linear(8, 8, bias=False), group

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return leave_partial(self.down(torch.relu(self.up(enter_split(x, self.group)))), self.group)


def own_tensor_parallel(mesh: DeviceMesh) -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), Late(), OwnExchanges(mesh["tensor"].get_group()))


def dtensor_parallel(mesh: DeviceMesh) -> nn.Module:
    plan = {"2": ColwiseParallel(), "3": RowwiseParallel()}
    return parallelize_module(
        nn.Sequential(nn.Linear(8, 8), Late(), nn.Linear(8, 8), nn.Linear(8, 8)), mesh["tensor"], plan
    )


def sharded(mesh: DeviceMesh) -> nn.Module:
    model = nn.Sequential(Late(), nn.Linear(8, 8))
    fully_shard(model[1], mesh=mesh["data_shard"])
    return model


def both(mesh: DeviceMesh) -> nn.Module:
    model = nn.Sequential(nn.Linear(8, 8), Late(), OwnExchanges(mesh["tensor"].get_group()))
    fully_shard(model[2], mesh=mesh["data_shard"])
    return model


def sample(rank: int, build: Callable[[DeviceMesh], nn.Module], shape: tuple[int, int]) -> dict[str, float]:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("data_shard", "tensor"))
    model = build(mesh)
    axes = [name for name, size in zip(("data_shard", "tensor"), shape, strict=True) if size > 1]

    def step(late: float = 0.0) -> None:
        next(m for m in model if isinstance(m, Late)).seconds = late if rank == 0 else 0.0
        model(torch.ones(2, 8)).sum().backward()

    step()
    sampler = StepSample(torch.device("cpu"), axes)
    dist.barrier()
    start = time.perf_counter()
    assert sampler.start()
    assert not StepSample(torch.device("cpu"), axes).start()  # one at a time
    step(LATE)
    spans = sampler.stop()
    end = time.perf_counter()
    assert all(start <= span.start <= span.end <= end for span in spans)
    dist.barrier()
    dist.destroy_process_group()
    seconds: dict[str, float] = {}
    for part, left, right in spans:
        seconds[part] = seconds.get(part, 0.0) + right - left
    return seconds


@pytest.mark.parametrize(
    ("build", "shape", "late"),
    [
        (own_tensor_parallel, (1, 2), {"communication_tensor"}),
        (dtensor_parallel, (1, 2), {"communication_tensor"}),
        (sharded, (2, 1), {"communication_data_shard"}),
        (both, (2, 2), {"communication_tensor", "communication_data_shard"}),
    ],
)
def test_a_late_rank_is_exposed_communication_of_the_others(
    run_ranks: Any, build: Any, shape: tuple[int, int], late: set[str]
) -> None:
    results = run_ranks(shape[0] * shape[1], sample, build, shape)
    for seconds in results:
        assert set(seconds) == late  # nothing unknown, no other axis
    first, second = (sum(seconds.values()) for seconds in results[:2])
    assert second > 0.9 * LATE  # waited for rank 0 ...
    assert first < second - LATE / 2  # ... which slept in the forward pass, not in a collective


# ---- the marks of every step beside the profile of the same step ----------------------------------------------------


class Both(StepBreakdown):
    """Keeps, for each profiled step, seconds by kind of mark and what the profiler saw inside of them."""

    def __init__(self) -> None:
        super().__init__(every_n_steps=1, num_warmup_steps=0, profile_every=1)
        self.seen: list[dict[str, tuple[float, float]]] = []

    def _measure(self, trainer: L.Trainer, step: RecordedStep, exposed: list[Span] | None) -> None:
        assert exposed is not None
        found = {}
        for name, kinds, looked in (
            ("exchanges", ("REDUCE", "SYNC"), exposed),
            ("computing in waits", ("WAIT_F", "WAIT_B"), OPERATORS),
        ):
            windows = [Span(name, m.start, m.end) for run in step.runs for m in run if m.kind in kinds]
            found[name] = sum(w.end - w.start for w in windows), sum(overlap(looked, windows).values())
        self.seen.append(found)
        super()._measure(trainer, step, exposed)


OPERATORS: list[Span] = []


def keep_operators(sample: StepSample, finished: Any) -> list[Event]:
    """Read a profile as ever, and keep when operators ran on the thread of the model."""
    events = READ(sample, finished)
    thread = next(event.thread for event in events if event.name == "hybrid3d::sample")
    shift = _unix_to_perf_counter()
    own = [e for e in events if e.name.startswith("aten::") and e.thread == thread]
    OPERATORS[:] = _without_overlap(Span("compute", e.start + shift, e.end + shift) for e in own)
    return events


READ = StepSample._read


def marks_and_profile(rank: int, folder: Path) -> list[dict[str, tuple[float, float]]]:
    """2 data ranks x 2 stages; the second data rank's blocks take 4 x 3 x 25 ms longer."""
    StepSample._read = keep_operators  # type: ignore[method-assign]  # this process is the test's own
    callback = Both()
    trainer = build_trainer((2, 1, 2), folder, [callback], max_steps=6, num_microbatches=4, gradient_clip_val=1.0)
    trainer.fit(Words([SleepingBlock(16, 0.025 * (rank % 2)) for _ in range(2)]), loader(12))
    return callback.seen


def test_marks_and_profile_agree(run_ranks: Any, tmp_path: Path) -> None:
    """Where ranks wait, both see the same within 10 %, in the step that the machine disturbed least.

    The profile sees no more in any: what marks have beside it are copies around an exchange, and delays. In the waits
    of a pipeline nothing is computed.
    """
    for rank, steps in enumerate(run_ranks(4, marks_and_profile, tmp_path, timeout=120)):
        assert len(steps) == 5
        exchanges = [step["exchanges"] for step in steps]
        assert all(by_profile <= 1.01 * by_marks for by_marks, by_profile in exchanges)
        if rank % 2 == 0:  # waits for the late data rank
            assert min(by_marks for by_marks, _ in exchanges) > 0.25
            assert max(by_profile / by_marks for by_marks, by_profile in exchanges) > 0.9
        waits = [step["computing in waits"] for step in steps]
        assert min(computing / wait for wait, computing in waits) < 0.1

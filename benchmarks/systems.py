"""The work of :mod:`benchmarks.work` on one system: ``python -m benchmarks.systems NAME [RANKS]`` prints a JSON line.

``torch-pp`` and ``deepspeed-*`` do not start their processes themselves:
``torchrun --nproc_per_node 2 -m benchmarks.systems torch-pp``. Peers are those of ``../shared/peers/peer_steps.py``.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader

from benchmarks.work import (
    BATCH_SIZE,
    GPT,
    NUM_BLOCKS,
    NUM_MICROBATCHES,
    NUM_STEPS,
    NUM_WARMUP,
    LitGPT,
    Step,
    loss_of,
    optimizer_of,
    rows,
)
from lightning_hybrid import Hybrid3DStrategy
from lightning_hybrid.callbacks import StepBreakdown


class Times:
    """Clock and processor time of each step of this process."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.busy: list[float] = []

    def start(self) -> None:
        self._start = time.perf_counter(), time.process_time()

    def stop(self) -> None:
        self.seconds.append(time.perf_counter() - self._start[0])
        self.busy.append(time.process_time() - self._start[1])


def report(times: Times, loss: float | None, *, prints: bool) -> None:
    """Print medians of the steps after warm-up in ms: by the clock, and of processor time, all ranks added up.

    A collective over all ranks.
    """
    busy = statistics.median(times.busy[NUM_WARMUP:])
    everyone = [busy]
    if dist.is_initialized():
        everyone = [0.0] * dist.get_world_size()
        dist.all_gather_object(everyone, busy)
    if prints:
        step = statistics.median(times.seconds[NUM_WARMUP:])
        print(json.dumps({"step_ms": 1e3 * step, "processor_ms": 1e3 * sum(everyone), "loss": loss}), flush=True)


def time_steps(step: Step) -> tuple[Times, float | None]:
    times, loss = Times(), None
    for batch in rows().split(BATCH_SIZE):
        times.start()
        loss = step(batch)
        times.stop()
    return times, loss


# ---- ours ----------------------------------------------------------------------------------------------------------


class StepTimer(L.Callback):
    """Times whole batches, hooks included."""

    def __init__(self) -> None:
        self.times = Times()

    def on_train_batch_start(self, *_: Any) -> None:
        self.times.start()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *_: Any) -> None:
        self.loss = float(outputs["loss"])
        self.times.stop()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        report(self.times, self.loss, prints=trainer.is_global_zero)


class Parts(StepBreakdown):
    """Keeps every measurement and prints their mean as a line of JSON."""

    def __init__(self) -> None:
        super().__init__(every_n_steps=8, profile_every=1, advice=False)
        self.kept: list[dict[str, float]] = []

    def publish(self, trainer: Any, values: Any) -> None:
        super().publish(trainer, values)
        self.kept.append(dict(values))

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        super().on_train_end(trainer, pl_module)
        if trainer.is_global_zero:
            later = self.kept[1:]  # the first one has seen a single step
            mean = {key: statistics.fmean(values[key] for values in later) for key in later[0] if key[:5] == "step/"}
            print(json.dumps({"parts": mean}), flush=True)


def fit(strategy: Any, num_devices: int, module: L.LightningModule, batch_size: int) -> None:
    parts = [Parts()] if os.environ.get("WORK_PARTS") else []
    trainer = L.Trainer(
        accelerator="cpu",
        devices=num_devices,
        strategy=strategy,
        max_steps=NUM_STEPS,
        callbacks=[StepTimer(), *parts],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(rows(), batch_size=batch_size))  # type: ignore[arg-type]


def one_process() -> None:
    L.seed_everything(0, verbose=False)
    fit("auto", 1, LitGPT(), BATCH_SIZE)


TP_PLAN = {
    **dict.fromkeys(("blocks.*.query", "blocks.*.key", "blocks.*.value", "blocks.*.up"), "colwise"),
    **dict.fromkeys(("blocks.*.output", "blocks.*.down"), "rowwise"),
    "head.1": "colwise_gather_output",
}


def hybrid(axis: str, **options: Any) -> None:
    """Ours, with all ranks along one axis."""
    L.seed_everything(0, verbose=False)
    sizes = {f"{name}_parallel_size": NUM_RANKS if name == axis else 1 for name in ("data", "tensor", "pipeline")}
    strategy = Hybrid3DStrategy(archive=None, start_method="fork", **sizes, **options)
    fit(strategy, NUM_RANKS, LitGPT(), BATCH_SIZE // sizes["data_parallel_size"])


def replicas() -> None:
    hybrid("data", replicate_size=NUM_RANKS)


# ---- peers ---------------------------------------------------------------------------------------------------------


class TorchStage(nn.Module):
    """Half of the blocks, with the embedding or the head."""

    def __init__(self, gpt: GPT, rank: int, num_ranks: int) -> None:
        super().__init__()
        share = NUM_BLOCKS // num_ranks
        own = gpt.blocks[rank * share : (rank + 1) * share]
        parts = [gpt.embed] * (rank == 0) + list(own) + [gpt.head] * (rank == num_ranks - 1)
        self.parts = nn.Sequential(*parts)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.parts(x)
        return out


def torch_pipeline() -> None:
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    dist.init_process_group("gloo")
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    L.seed_everything(0, verbose=False)
    module = TorchStage(GPT(), rank, num_ranks)
    stage = PipelineStage(module, rank, num_ranks, torch.device("cpu"))
    schedule = Schedule1F1B(stage, NUM_MICROBATCHES, loss_fn=loss_of)
    optimizer = optimizer_of(module.parameters())

    def step(batch: Tensor) -> float | None:
        losses: list[Tensor] = []
        inputs = [batch[:, :-1].contiguous()] if rank == 0 else []
        schedule.step(*inputs, target=batch[:, 1:].contiguous(), losses=losses)
        optimizer.step()
        optimizer.zero_grad()
        return float(torch.stack(losses).mean()) if losses else None

    report(*time_steps(step), prints=rank == num_ranks - 1)
    dist.destroy_process_group()


def deepspeed(kind: str) -> None:
    """DeepSpeed's pipeline ("pp"), or its sharding of optimizer states ("zero1") and of everything ("zero3")."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed as ds
    from deepspeed.pipe import PipelineModule

    ds.init_distributed(dist_backend="gloo")
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    L.seed_everything(0, verbose=False)
    gpt = GPT()
    config: dict[str, Any] = {
        "train_batch_size": BATCH_SIZE,
        "steps_per_print": 10**6,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
    }
    if kind == "pp":
        module: Any = PipelineModule([gpt.embed, *gpt.blocks, gpt.head], num_stages=num_ranks, loss_fn=loss_of)
        size = BATCH_SIZE // NUM_MICROBATCHES
        config |= {"train_micro_batch_size_per_gpu": size, "gradient_accumulation_steps": NUM_MICROBATCHES}
    else:
        module, stage = gpt, {"stage": int(kind.removeprefix("zero"))}
        config |= {"train_micro_batch_size_per_gpu": BATCH_SIZE // num_ranks, "zero_optimization": stage}
    engine, *_ = ds.initialize(model=module, model_parameters=list(module.parameters()), config=config)

    def pipelined(batch: Tensor) -> float:
        pieces = batch.split(BATCH_SIZE // NUM_MICROBATCHES)
        return float(engine.train_batch((piece[:, :-1].contiguous(), piece[:, 1:].contiguous()) for piece in pieces))

    def sharded(batch: Tensor) -> float:
        own = batch.chunk(num_ranks)[rank]
        loss = loss_of(engine(own[:, :-1]), own[:, 1:])
        engine.backward(loss)
        engine.step()
        return float(loss)

    report(*time_steps(pipelined if kind == "pp" else sharded), prints=rank == 0)


def lightning(kind: str) -> None:
    """Lightning's own strategies; the script starts its second process itself."""
    from lightning.pytorch.strategies import ModelParallelStrategy
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    class Parallel(LitGPT):
        def configure_model(self) -> None:
            mesh: Any = self.device_mesh
            for block in self.model.blocks:
                if kind == "tp":
                    column, row = ("query", "key", "value", "up"), ("output", "down")
                    styles = {n: ColwiseParallel() for n in column} | {n: RowwiseParallel() for n in row}
                    parallelize_module(block, mesh["tensor_parallel"], styles)
                else:
                    fully_shard(block, mesh=mesh["data_parallel"])
            if kind == "fsdp2":
                fully_shard(self.model, mesh=mesh["data_parallel"])

    L.seed_everything(0, verbose=False)
    if kind == "ddp":
        fit("ddp", NUM_RANKS, LitGPT(), BATCH_SIZE // NUM_RANKS)
    else:
        sizes = (1, NUM_RANKS) if kind == "tp" else (NUM_RANKS, 1)
        fit(ModelParallelStrategy(*sizes), NUM_RANKS, Parallel(), BATCH_SIZE // sizes[0])


#: ``hybrid3d:pipeline`` is 1F1B, the schedule of the peers.
SCHEDULES = ("Eager1F1B", "Interleaved1F1B", "ZBVZeroBubble", "auto")
pipeline = partial(hybrid, "pipeline", num_microbatches=NUM_MICROBATCHES)
SYSTEMS: dict[str, Callable[[], None]] = {
    "one-process": one_process,
    "torch-pp": torch_pipeline,
    **{f"deepspeed-{kind}": partial(deepspeed, kind) for kind in ("pp", "zero1", "zero3")},
    **{f"lightning-{kind}": partial(lightning, kind) for kind in ("ddp", "fsdp2", "tp")},
    "hybrid3d:one": partial(hybrid, "data"),
    "hybrid3d:data": replicas,
    "hybrid3d:sharded": partial(hybrid, "data"),
    "hybrid3d:tensor": partial(hybrid, "tensor", tp_plan=TP_PLAN, loss_parallel=True),
    "hybrid3d:pipeline": partial(pipeline, schedule="1F1B"),
    **{f"hybrid3d:{schedule}": partial(pipeline, schedule=schedule) for schedule in SCHEDULES},
}
#: Systems whose processes torchrun starts.
BY_TORCHRUN = ("torch-pp", "deepspeed-pp", "deepspeed-zero1", "deepspeed-zero3")
#: Systems of one process.
ALONE = ("one-process", "hybrid3d:one")
NUM_RANKS = 2

if __name__ == "__main__":
    torch.set_num_threads(1)
    NUM_RANKS = 1 if sys.argv[1] in ALONE else int(sys.argv[2]) if len(sys.argv) > 2 else 2
    SYSTEMS[sys.argv[1]]()

"""The work of :mod:`benchmarks.work` on each system: ``python -m benchmarks.systems NAME`` prints one JSON line.

Several processes: ``torchrun --nproc_per_node 2 -m benchmarks.systems torch-pp``. ``deepspeed-pp`` needs deepspeed.
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


def report(seconds: list[float], loss: float | None) -> None:
    """Print the median of the steps after warm-up, in milliseconds, and the last loss."""
    print(json.dumps({"step_ms": 1e3 * statistics.median(seconds[NUM_WARMUP:]), "loss": loss}), flush=True)


def time_steps(step: Step) -> tuple[list[float], float | None]:
    seconds, loss = [], None
    for batch in rows().split(BATCH_SIZE):
        start = time.perf_counter()
        loss = step(batch)
        seconds.append(time.perf_counter() - start)
    return seconds, loss


# ---- ours ----------------------------------------------------------------------------------------------------------


class StepTimer(L.Callback):
    """Times whole batches, hooks included."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def on_train_batch_start(self, *_: Any) -> None:
        self._start = time.perf_counter()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *_: Any) -> None:
        self.loss = float(outputs["loss"])
        self.seconds.append(time.perf_counter() - self._start)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        if trainer.is_global_zero:
            report(self.seconds, self.loss)


def fit(strategy: Any, num_devices: int, module: L.LightningModule, batch_size: int) -> None:
    trainer = L.Trainer(
        accelerator="cpu",
        devices=num_devices,
        strategy=strategy,
        max_steps=NUM_STEPS,
        callbacks=[StepTimer()],
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


def hybrid(**options: Any) -> None:
    L.seed_everything(0, verbose=False)
    data = options.get("data_parallel_size", 1)
    degrees = {"data_parallel_size": 1, "tensor_parallel_size": 1, "pipeline_parallel_size": 1, **options}
    fit(Hybrid3DStrategy(archive=None, start_method="fork", **degrees), 2, LitGPT(), BATCH_SIZE // data)


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

    seconds, loss = time_steps(step)
    if rank == num_ranks - 1:
        report(seconds, loss)
    dist.barrier()
    dist.destroy_process_group()


def deepspeed_pipeline() -> None:
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed
    from deepspeed.pipe import PipelineModule

    deepspeed.init_distributed(dist_backend="gloo")
    L.seed_everything(0, verbose=False)
    gpt = GPT()
    module = PipelineModule([gpt.embed, *gpt.blocks, gpt.head], num_stages=dist.get_world_size(), loss_fn=loss_of)
    config = {
        "train_batch_size": BATCH_SIZE,
        "train_micro_batch_size_per_gpu": BATCH_SIZE // NUM_MICROBATCHES,
        "gradient_accumulation_steps": NUM_MICROBATCHES,
        "steps_per_print": 10**6,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
    }
    engine, *_ = deepspeed.initialize(model=module, model_parameters=list(module.parameters()), config=config)

    def step(batch: Tensor) -> float:
        pieces = batch.split(BATCH_SIZE // NUM_MICROBATCHES)
        return float(engine.train_batch((piece[:, :-1].contiguous(), piece[:, 1:].contiguous()) for piece in pieces))

    seconds, loss = time_steps(step)
    if dist.get_rank() == 0:
        report(seconds, loss)


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
        fit("ddp", 2, LitGPT(), BATCH_SIZE // 2)
    else:
        sizes = (1, 2) if kind == "tp" else (2, 1)
        fit(ModelParallelStrategy(*sizes), 2, Parallel(), BATCH_SIZE // sizes[0])


def pipeline(schedule: str) -> None:
    hybrid(pipeline_parallel_size=2, num_microbatches=NUM_MICROBATCHES, schedule=schedule)


SYSTEMS: dict[str, Callable[[], None]] = {
    "one-process": one_process,
    "torch-pp": torch_pipeline,
    "deepspeed-pp": deepspeed_pipeline,
    **{
        f"hybrid3d:{n}": partial(pipeline, n) for n in ("1F1B", "Eager1F1B", "Interleaved1F1B", "ZBVZeroBubble", "auto")
    },
    **{f"lightning-{kind}": partial(lightning, kind) for kind in ("ddp", "fsdp2", "tp")},
    "hybrid3d:data": partial(hybrid, data_parallel_size=2, replicate_size=2),
    "hybrid3d:sharded": partial(hybrid, data_parallel_size=2),
    "hybrid3d:tensor": partial(hybrid, tensor_parallel_size=2, tp_plan=TP_PLAN, loss_parallel=True),
}

if __name__ == "__main__":
    torch.set_num_threads(1)
    SYSTEMS[sys.argv[1]]()

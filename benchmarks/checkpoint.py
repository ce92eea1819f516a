"""Saving and loading directories: time and peak memory beside plain DCP on the same tensors, and the stall of "async".

``python -m benchmarks.checkpoint [--layout dp2] [--blocks 8] [--rounds 5]`` trains one step of a model of linears with
AdamW, so that all states exist, and then saves and loads in turn:

- ``plain``: ``torch.distributed.checkpoint.save`` and ``load`` of the very parameters and moments (DTensors or whole),
  and nothing else: no loops, no schedules, no names of groups, no marker, no rename;
- ``ours``: ``trainer.save_checkpoint``, and what a Trainer does to load it;
- ``async``: ``trainer.save_checkpoint`` with ``save_distributed_checkpoint="async"``, until it returns; and ``wait``,
  how long the next optimizer step, after a forward and backward of the whole batch, waits for its states to be copied.

Times are the slowest rank's, those of the processor the sum of all ranks' (of ``async`` without the thread that
writes), and medians of the rounds. Memory is the most that a rank's resident memory rises above what it was just
before, of the rank and round where it rises most. When loading, both make the optimizer's states anew, as a run that
begins does.
"""

from __future__ import annotations

import argparse
import gc
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from lightning.pytorch.trainer.states import TrainerStatus
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader

from benchmarks.checkpoint_matrix import LAYOUTS
from lightning_hybrid import Hybrid3DStrategy
from lightning_hybrid.sharding import backward_of

__all__ = ["measure"]

WIDTH, BATCH = 1024, 64
DEGREES = {**LAYOUTS, "dp2": {**LAYOUTS["1x1x1"], "data_parallel_size": 2}}


#: Seconds, seconds of the processor, and megabytes.
Cost = tuple[float, float, float]


class Block(nn.Module):
    """Two linears of four times the width."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(self.up(x).relu())
        return out


class LitBlocks(L.LightningModule):
    """12 bytes of weights and moments for each of its 8.4 million parameters a block."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(num_blocks))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        for block in self.blocks:
            batch = block(batch)
        return batch.square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def measure(rank: int, layout: str, num_blocks: int, rounds: int, folder: Path) -> dict[str, list[Cost]]:
    """Return what each kind of call costs, for each round."""
    warnings.simplefilter("ignore")
    degrees = DEGREES[layout]
    sizes = (degrees[f"{axis}_parallel_size"] for axis in ("data", "tensor", "pipeline"))
    num_ranks = int(torch.tensor(list(sizes)).prod())
    strategy = Hybrid3DStrategy(**degrees, archive=None, save_distributed_checkpoint=True)
    quiet = {f"enable_{part}": False for part in ("progress_bar", "model_summary", "checkpointing")}
    trainer = L.Trainer(accelerator="cpu", devices=num_ranks, strategy=strategy, max_steps=1, logger=False, **quiet)  # type: ignore[arg-type]
    module = LitBlocks(num_blocks)
    trainer.fit(module, DataLoader(torch.randn(BATCH * num_ranks, WIDTH), batch_size=BATCH))
    (optimizer,) = trainer.optimizers
    names = {id(p): name for name, p in module.named_parameters()}

    def state() -> dict[str, Any]:
        moments = {names[id(p)]: values for p, values in optimizer.state.items()}
        return {"state_dict": module.state_dict(), "optimizer": moments}

    def load_plain() -> None:
        found = {"state_dict": module.state_dict(), "optimizer": tree_map(torch.empty_like, state()["optimizer"])}
        dcp.load(found, checkpoint_id=folder / "plain")  # type: ignore[attr-defined]

    def load() -> None:
        optimizer.state.clear()  # as when a run begins
        checkpoint = strategy.load_checkpoint(folder / "ours", weights_only=True)
        strategy.load_model_state_dict(checkpoint)
        strategy.load_optimizer_state_dict(checkpoint)

    def step() -> None:
        with strategy._step_randomness():
            loss = strategy._inside("training_step", batch, 0)
        with backward_of(strategy._root, loss):
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    def save_async() -> None:
        object.__setattr__(strategy.settings, "save_distributed_checkpoint", "async")
        trainer.state.status = TrainerStatus.RUNNING  # as within fit; after it a save is waited for
        trainer.save_checkpoint(folder / "async")
        trainer.state.status = TrainerStatus.FINISHED
        object.__setattr__(strategy.settings, "save_distributed_checkpoint", True)

    calls: dict[str, Callable[[], Any]] = {
        "save plain": lambda: dcp.save(state(), checkpoint_id=folder / "plain"),  # type: ignore[attr-defined]
        "save ours": lambda: trainer.save_checkpoint(folder / "ours"),
        "save async": save_async,
        "load plain": load_plain,
        "load ours": load,
    }
    waits, copies = [], strategy._background._copies
    wait = copies._wait
    copies._wait = lambda: waits.append(_time_and_memory(wait))  # type: ignore[method-assign]
    batch = torch.randn(BATCH, WIDTH)
    found: dict[str, list[Cost]] = {name: [] for name in (*calls, "wait async", "step")}
    for number in range(rounds + 1):
        for name, call in list(calls.items())[:: -1 if number % 2 else 1]:  # who is first finds an emptier page cache
            if rank == 0 and name.startswith("save"):
                shutil.rmtree(folder / name.removeprefix("save "), ignore_errors=True)
            dist.barrier()
            own_thread = time.thread_time()
            result = _time_and_memory(call)
            if name == "save async":  # the other thread has begun to copy
                result = (result[0], time.thread_time() - own_thread, result[2])
                step()
            dist.barrier()
            strategy._background.wait()
            if number:  # the first round warms up
                found[name].append(result)
        if number:
            found["wait async"].append(waits.pop() if waits else (0.0, 0.0, 0.0))
            found["step"].append(_time_and_memory(step))
        waits.clear()
    return found


def _time_and_memory(call: Callable[[], Any]) -> Cost:
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # begins the peak anew
    before, begin, worked = _resident("VmRSS"), time.perf_counter(), time.process_time()
    call()
    return time.perf_counter() - begin, time.process_time() - worked, _resident("VmHWM") - before


def _resident(kind: str) -> float:
    """Megabytes of resident memory: now (``VmRSS``) or at the most (``VmHWM``)."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines[kind].split()[0]) / 1e3


def main() -> None:
    """Measure, and print a table."""
    from tests.ranks import run_ranks

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layout", default="dp2", choices=DEGREES)
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", default=None, help="where to write; by default the system's temporary folder")
    options = parser.parse_args()
    degrees = DEGREES[options.layout]
    num_ranks = int(torch.tensor([degrees[f"{axis}_parallel_size"] for axis in ("data", "tensor", "pipeline")]).prod())
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        ranks = run_ranks(
            num_ranks, measure, options.layout, options.blocks, options.rounds, Path(folder), timeout=3600
        )
    medians = {}
    for name in ranks[0]:
        seconds, work, memory = (
            [function(rank[name][i][j] for rank in ranks) for i in range(options.rounds)]
            for j, function in enumerate((max, sum, max))
        )
        medians[name] = statistics.median(seconds), statistics.median(work)
        each = " ".join(f"{found:.3f}" for found in seconds)
        print(
            f"{name}: {medians[name][0]:.3f} s (rounds: {each}), processor {medians[name][1]:.3f} s in all,"
            f" {max(memory):.0f} MB more"
        )
    for kind in ("save", "load"):
        ratios = (a / b for a, b in zip(medians[f"{kind} ours"], medians[f"{kind} plain"], strict=True))
        print("{}: ours / plain = {:.2f}, of the processor {:.2f}".format(kind, *ratios))
    stall = [
        sum(max(rank[name][i][0] for rank in ranks) for name in ("save async", "wait async"))
        for i in range(options.rounds)
    ]
    each = " ".join(f"{found:.3f}" for found in stall)
    ratio = statistics.median(stall) / medians["save ours"][0]
    print(f"stall of async, the step's wait included: {statistics.median(stall):.3f} s (rounds: {each})")
    work = medians["save async"][1] / medians["save ours"][1]
    print(f"stall of async / save ours = {ratio:.3f}, of the processor {work:.3f}")


if __name__ == "__main__":
    main()

"""Checkpoints saved at each layout and loaded at each other: are the next steps those of the uninterrupted run?

``python -m benchmarks.checkpoint_matrix`` trains a small language model for three steps at each of :data:`LAYOUTS`,
saves a directory, and goes on from it for three steps at each of them. Losses, parameters, both moments of AdamW, its
step counts, the groups' settings and the schedule are compared with one plain process that was not interrupted. The
model has what checkpoints get wrong: five blocks (no number of stages divides them), a vocabulary of 17 (no number of
shards does), query, key and value in one linear, tied weights, groups with settings of their own, a buffer.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_hybrid import Hybrid3DStrategy
from lightning_hybrid.checkpoint.directory import read_directory
from lightning_hybrid.checkpoint.tensors import Stored

__all__ = ["LAYOUTS", "LitTiedLM", "Saving", "assert_same", "read", "train", "world_size"]

VOCABULARY, WIDTH, LENGTH, GLOBAL_BATCH, STEPS = 17, 16, 6, 8, 3


def _degrees(data: int, tensor: int, pipeline: int, **more: Any) -> dict[str, Any]:
    sizes = {"data_parallel_size": data, "tensor_parallel_size": tensor, "pipeline_parallel_size": pipeline}
    return {**sizes, **more}


LAYOUTS: dict[str, dict[str, Any]] = {
    "1x1x1": _degrees(1, 1, 1),
    "dp4": _degrees(4, 1, 1),
    "tp2xpp2": _degrees(1, 2, 2),
    "pp4": _degrees(1, 1, 4),
    "dp2xpp2": _degrees(2, 1, 2),
    "dp2xtp2": _degrees(2, 2, 1),
    "hsdp2x2": _degrees(4, 1, 1, replicate_size=2),
    "2x2x2": _degrees(2, 2, 2),
    "interleaved": _degrees(1, 1, 2, schedule="Interleaved1F1B"),
}
PLAIN = "plain"
"""A Trainer without this library."""


class Attention(nn.Module):
    """With one linear for query, key and value."""

    def __init__(self) -> None:
        super().__init__()
        self.n_head, self.n_embd = 4, WIDTH
        self.c_attn, self.c_proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = (
            part.view(batch, length, self.n_head, self.n_embd // self.n_head).transpose(1, 2)
            for part in self.c_attn(x).split(self.n_embd, dim=2)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        out: Tensor = self.c_proj(y.contiguous().view(x.shape))
        return out


class Block(nn.Module):
    """Attention and a feed-forward network."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm_1(x))
        out: Tensor = x + self.down(F.gelu(self.up(self.norm_2(x))))
        return out


class LitTiedLM(L.LightningModule):
    """In double precision: AdamW divides small differences by small gradients."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.losses: list[float] = []
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(5))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("scale", torch.tensor(1.5))
        self.double()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x = self.embedding(batch[0][:, :-1]) * self.scale
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), batch[0][:, 1:].flatten())

    def configure_optimizers(self) -> Any:
        plain = [p for p in self.parameters() if p.ndim < 2]
        decayed = [p for p in self.parameters() if p.ndim >= 2]
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0, "lr": 0.01}]
        optimizer = torch.optim.AdamW(groups, lr=0.02)
        warmup = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 8))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": warmup, "interval": "step"}}


class _Losses(L.Callback):
    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))


def world_size(name: str) -> int:
    """Number of processes of a layout."""
    sizes = LAYOUTS.get(name, {})
    product = 1
    for axis in ("data", "tensor", "pipeline"):
        product *= sizes.get(f"{axis}_parallel_size", 1)
    return product


def train(
    rank: int, name: str, folder: Path, first: int, last: int, start: Path | None, out: str, **options: Any
) -> list[float]:
    """Train epochs ``first`` (counted from 0) to ``last`` (excluded) of three steps, from ``start`` on, as one rank.

    After each epoch there is a checkpoint ``<out>-<number of epochs so far>.ckpt``: a directory, or a plain file of a
    plain process. Returns the loss of each step, of this rank's part of the batch.
    """
    degrees = LAYOUTS.get(name, {})
    strategy: Any = "auto"
    if name != PLAIN:
        plan = {"embedding": "embedding_rowwise", "head": "colwise_gather_output"}  # blocks are tried out
        options = {"save_distributed_checkpoint": True, "archive": None, **options}
        strategy = Hybrid3DStrategy(**degrees, tp_plan=plan if degrees["tensor_parallel_size"] > 1 else None, **options)
    record = _Losses()
    quiet = {
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
    }
    trainer = L.Trainer(
        accelerator="cpu",
        devices=world_size(name),
        strategy=strategy,
        max_epochs=last,
        callbacks=[record, Saving(folder, out)],
        use_distributed_sampler=False,
        default_root_dir=folder,
        **quiet,  # type: ignore[arg-type]
    )
    data = strategy.coordinate.data if degrees else 0
    tokens = torch.randint(VOCABULARY, (STEPS * GLOBAL_BATCH, LENGTH), generator=torch.Generator().manual_seed(1))
    mine = tokens[data :: degrees.get("data_parallel_size", 1)]
    batch_size = GLOBAL_BATCH // degrees.get("data_parallel_size", 1)
    trainer.fit(LitTiedLM(), DataLoader(TensorDataset(mine), batch_size=batch_size), ckpt_path=start)
    assert len(record.losses) == STEPS * (last - first), f"{len(record.losses)} steps"
    return record.losses


class Saving(L.Callback):
    """Saves at the end of each epoch: see :func:`train`."""

    def __init__(self, folder: Path, out: str) -> None:
        self._folder, self._out = folder, out

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        trainer.save_checkpoint(self._folder / f"{self._out}-{trainer.current_epoch + 1}.ckpt")


def read(path: Path) -> dict[str, Any]:
    """Return a checkpoint of either form, all of it in memory."""
    if path.is_file():
        checkpoint: dict[str, Any] = torch.load(path, weights_only=True)
        return checkpoint
    return {key: _in_memory(value) for key, value in read_directory(path, weights_only=True).items()}


def _in_memory(value: Any) -> Any:
    if isinstance(value, Stored):
        return value.whole()
    if isinstance(value, dict):
        return {key: _in_memory(item) for key, item in value.items()}
    return [_in_memory(item) for item in value] if isinstance(value, list) else value


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Weights, both moments, step counts, groups, schedules and progress are the same."""
    close: dict[str, float] = {"rtol": 1e-9, "atol": 1e-12}
    weights_close = {**close, "atol": 1e-10}  # a key's bias has gradients of rounding alone, of which AdamW makes steps
    assert list(found["state_dict"]) == list(expected["state_dict"])
    torch.testing.assert_close(dict(found["state_dict"]), dict(expected["state_dict"]), **weights_close)
    (one,), (other,) = found["optimizer_states"], expected["optimizer_states"]
    torch.testing.assert_close(one["state"], other["state"], **close)
    for group, right in zip(one["param_groups"], other["param_groups"], strict=True):
        assert {**group, "foreach": None} == {**right, "foreach": None}
    assert found["lr_schedulers"] == expected["lr_schedulers"]
    assert (found["epoch"], found["global_step"]) == (expected["epoch"], expected["global_step"])


def assert_same_losses(ranks: Sequence[Sequence[float]], expected: Sequence[float]) -> None:
    """The mean over ranks of the losses is that of one process."""
    for step, right in enumerate(expected):
        mean = sum(losses[step] for losses in ranks) / len(ranks)
        assert abs(mean - right) <= 1e-9 * right, f"loss of step {step}: {mean} instead of {right}"


def main() -> None:
    """Run the matrix and print it."""
    from tests.ranks import run_ranks

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layouts", nargs="+", default=list(LAYOUTS), choices=LAYOUTS)
    names = parser.parse_args().layouts
    begin, failures = time.monotonic(), 0
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        losses = run_ranks(1, train, PLAIN, folder, 0, 2, None, PLAIN)[0]
        expected = [read(folder / f"{PLAIN}-{epochs}.ckpt") for epochs in (1, 2)]
        for saved in names:
            ranks = run_ranks(world_size(saved), train, saved, folder, 0, 1, None, saved, timeout=300)
            assert_same_losses(ranks, losses[:STEPS])
            assert_same(read(folder / f"{saved}-1.ckpt"), expected[0])
            row = []
            for loaded in names:
                path = folder / f"{saved}-1.ckpt"
                try:
                    ranks = run_ranks(world_size(loaded), train, loaded, folder, 1, 2, path, "next", timeout=300)
                    assert_same_losses(ranks, losses[STEPS:])
                    assert_same(read(folder / "next-2.ckpt"), expected[1])
                    row.append("equal")
                except Exception as error:
                    print(f"{saved} -> {loaded}: {error}", flush=True)
                    row.append("WRONG")
                    failures += 1
            print(f"saved at {saved}, loaded at", *map("{}: {}".format, names, row), flush=True)
    print(f"{len(names) ** 2 - failures} of {len(names) ** 2} equal, {time.monotonic() - begin:.0f} s")
    raise SystemExit(bool(failures))


if __name__ == "__main__":
    main()

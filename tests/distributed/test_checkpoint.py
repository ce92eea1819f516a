"""Checkpoints in real Trainer runs: saved at any degrees, resumed at any others and in one plain process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_hybrid import Hybrid3DStrategy
from lightning_hybrid.layout import Layout

VOCABULARY, WIDTH, LENGTH, GLOBAL_BATCH = 17, 16, 6, 8
PLAN = {
    "embedding": "embedding_rowwise",
    "blocks.*.up": "colwise",
    "blocks.*.down": "rowwise",
    "head": "colwise_gather_output",
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        mixed = x.cumsum(1) / torch.arange(1, x.shape[1] + 1, device=x.device, dtype=x.dtype).view(1, -1, 1)
        out: Tensor = x + self.down(F.gelu(self.up(self.norm(mixed))))
        return out


class LitLM(L.LightningModule):
    """A small language model: five blocks, AdamW with a group without decay, a warm-up by step."""

    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        self.save_hyperparameters()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(5))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.register_buffer("scale", torch.tensor(1.5))
        if tied:
            self.head.weight = self.embedding.weight
        self.double()  # AdamW divides small differences by small gradients

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) * self.scale
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits

    def loss(self, batch: list[Tensor]) -> Tensor:
        (tokens,) = batch
        return F.cross_entropy(self(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.loss(batch)

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def configure_optimizers(self) -> Any:
        plain = [p for name, p in self.named_parameters() if "norm" in name or name.endswith("bias")]
        decayed = [p for p in self.parameters() if all(p is not other for other in plain)]
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=0.02)
        warmup = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 8))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": warmup, "interval": "step"}}


class Own(LitLM):
    """Splits and shards itself, as for Lightning's ModelParallelStrategy, along the flattened data axis."""

    def configure_model(self) -> None:
        mesh: Any = self.device_mesh
        if isinstance(self.head.weight, DTensor):
            return
        for block in self.blocks:
            if mesh["tensor_parallel"].size() > 1:
                styles = {"up": ColwiseParallel(), "down": RowwiseParallel()}
                parallelize_module(block, mesh["tensor_parallel"], styles)
            fully_shard(block, mesh=mesh["data_parallel"])
        fully_shard(self, mesh=mesh["data_parallel"])


def loader(num_batches: int, rank: int, layout: Layout, seed: int = 1) -> DataLoader[Any]:
    """The data rank's part of each global batch (Lightning's own training sampler shuffles)."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(VOCABULARY, (num_batches * GLOBAL_BATCH, LENGTH), generator=generator)
    mine = tokens[layout.coordinate(rank).data :: layout.data_parallel_size]
    return DataLoader(TensorDataset(mine), batch_size=GLOBAL_BATCH // layout.data_parallel_size)


def layout(data: int, tensor: int, pipeline: int, replicas: int = 1) -> Layout:
    return Layout(
        data_parallel_size=data,
        tensor_parallel_size=tensor,
        pipeline_parallel_size=pipeline,
        replicate_size=replicas,
    )


LAYOUTS = {
    "plain": layout(1, 1, 1),  # a Trainer without this library
    "alone": layout(1, 1, 1),
    "ddp2": layout(2, 1, 1),  # Lightning's own strategy
    "dp2": layout(2, 1, 1),
    "tp2": layout(1, 2, 1),
    "pp2": layout(1, 1, 2),
    "pp4": layout(1, 1, 4),
    "hsdp2x2": layout(4, 1, 1, 2),
    "dp2-pp2": layout(2, 1, 2),
    "tp2-pp2": layout(1, 2, 2),
    "dp2-tp2": layout(2, 2, 1),
    "dp2-tp2-pp2": layout(2, 2, 2),
}


PLAIN = ("plain", "ddp2")


def build_trainer(
    name: str, folder: Path, schedule: str = "1F1B", shards_itself: bool = False, form: Any = False, **options: Any
) -> L.Trainer:
    degrees = LAYOUTS[name]
    strategy: Any = "ddp" if name == "ddp2" else "auto"
    if name not in PLAIN:
        plan = PLAN if degrees.tensor_parallel_size > 1 and not shards_itself else None
        more = {"schedule": schedule, "archive": None, "save_distributed_checkpoint": form}
        strategy = Hybrid3DStrategy(**vars(degrees), tp_plan=plan, **more)
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    fixed = {"accelerator": "cpu", "use_distributed_sampler": False, **quiet}
    options = {"enable_checkpointing": False, **fixed, **options}
    options = {"devices": degrees.world_size, "strategy": strategy, "default_root_dir": folder, **options}
    return L.Trainer(**options)


def train(
    rank: int, name: str, folder: Path, epochs: int, start: Path | None, out: str, kind: type[LitLM], options: Any
) -> None:
    """Train to the end of epoch ``epochs`` (three steps each) and save."""
    tied = options.pop("tied", False)
    options = {**options, "shards_itself": kind is Own, "max_epochs": epochs, "limit_val_batches": 0}
    trainer = build_trainer(name, folder, **options)
    trainer.fit(kind(tied=tied), loader(3, rank, LAYOUTS[name]), ckpt_path=start)
    trainer.save_checkpoint(folder / out)


@pytest.fixture
def run(run_ranks: Callable[..., Any], tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """Train at some degrees and return the checkpoint."""

    def run(
        name: str, epochs: int, start: str | None = None, kind: type[LitLM] = LitLM, **options: Any
    ) -> dict[str, Any]:
        out = f"{name}-{epochs}.ckpt"
        path = tmp_path / start if start else None
        run_ranks(LAYOUTS[name].world_size, train, name, tmp_path, epochs, path, out, kind, options, timeout=120)
        checkpoint: dict[str, Any] = torch.load(tmp_path / out, weights_only=True)
        return checkpoint

    return run


def assert_same_training(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Weights, moments, step counts, hyper-parameters, schedulers and progress."""
    assert found.keys() == expected.keys()
    assert list(found["state_dict"]) == list(expected["state_dict"])
    close: dict[str, float] = {"rtol": 1e-9, "atol": 1e-12}
    torch.testing.assert_close(found["state_dict"], expected["state_dict"], **close)
    for one, other in zip(found["optimizer_states"], expected["optimizer_states"], strict=True):
        torch.testing.assert_close(one["state"], other["state"], **close)
        for group, right in zip(one["param_groups"], other["param_groups"], strict=True):
            assert {**group, "foreach": None} == {**right, "foreach": None}
    assert found["lr_schedulers"] == expected["lr_schedulers"]
    assert (found["epoch"], found["global_step"]) == (expected["epoch"], expected["global_step"])


@pytest.mark.parametrize(
    ("name", "tied"),
    [(name, name == "dp2-tp2-pp2") for name in LAYOUTS if name not in PLAIN] + [("pp2", True)],
)
def test_a_checkpoint_is_the_one_of_one_process(
    name: str, tied: bool, run: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    expected = run("plain", 1, tied=tied)
    found = run(name, 1, tied=tied)
    assert_same_training(found, expected)
    module = LitLM.load_from_checkpoint(tmp_path / f"{name}-1.ckpt")
    assert module.hparams["tied"] is tied
    saved = found["state_dict"]
    assert all(torch.equal(value, saved[key]) for key, value in module.state_dict().items())
    assert (saved["head.weight"].data_ptr() == saved["embedding.weight"].data_ptr()) is tied


def test_a_model_that_shards_itself(run: Callable[..., dict[str, Any]]) -> None:
    expected = run("plain", 2)
    run("dp2-tp2", 1, kind=Own)
    assert_same_training(run("pp2", 2, start="dp2-tp2-1.ckpt"), expected)


CHAIN = ("ddp2", "pp4", "dp2-pp2", "ddp2", "tp2-pp2", "plain")


def test_degrees_may_change_at_every_resume(run: Callable[..., dict[str, Any]]) -> None:
    expected = run("plain", 6)
    start, final = None, {}
    for epoch, name in enumerate(CHAIN, 1):
        final = run(name, epoch, start=start)
        start = f"{name}-{epoch}.ckpt"
    assert_same_training(final, expected)


def test_forgotten_moments_are_noticed(run: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    expected = run("plain", 2)
    run("pp2", 1)
    monkeypatch.setattr(Hybrid3DStrategy, "load_optimizer_state_dict", lambda *_: None)
    found = run("pp2", 2, start="pp2-1.ckpt")
    with pytest.raises(AssertionError):
        assert_same_training(found, expected)


def train_and_keep_best(rank: int, name: str, folder: Path) -> list[Any]:
    """Six epochs of one step; the two best by validation loss are kept. Then test and go on from what was kept."""
    keep = ModelCheckpoint(folder / name, "{epoch}-{val_loss:.4f}", monitor="val_loss", save_top_k=2, save_last=True)
    trainer = build_trainer(name, folder, max_epochs=6, callbacks=[keep], enable_checkpointing=True)
    degrees = LAYOUTS[name]
    trainer.fit(LitLM(), loader(1, rank, degrees), loader(2, rank, degrees, seed=2))
    best = trainer.validate(LitLM(), loader(2, rank, degrees, seed=2), ckpt_path="best")
    last = trainer.validate(LitLM(), loader(2, rank, degrees, seed=2), ckpt_path=folder / name / "last.ckpt")
    return [sorted(path.name for path in (folder / name).iterdir()), Path(keep.best_model_path).name, best, last]


@pytest.mark.parametrize("name", ["pp2", "dp2-tp2"])
def test_model_checkpoint_keeps_the_best(name: str, run_ranks: Callable[..., Any], tmp_path: Path) -> None:
    ((files, best_name, best, last),) = run_ranks(1, train_and_keep_best, "plain", tmp_path)
    assert len(files) == 3
    for found in run_ranks(LAYOUTS[name].world_size, train_and_keep_best, name, tmp_path, timeout=120):
        assert found[:2] == [files, best_name]
        assert found[2][0]["val_loss"] == pytest.approx(best[0]["val_loss"], rel=1e-6)  # logged in fp32
        assert found[3][0]["val_loss"] == pytest.approx(last[0]["val_loss"], rel=1e-6)  # logged in fp32


class Editing(LitLM):
    """Edits checkpoints, as users do when they freeze, rename or warm-start."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["state_dict"] = {f"old.{key}": value for key, value in checkpoint["state_dict"].items()}
        del checkpoint["state_dict"]["old.scale"]

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        state = {key.removeprefix("old."): value for key, value in checkpoint["state_dict"].items()}
        checkpoint["state_dict"] = {**state, "scale": torch.tensor(2.5), "head.weight": state["head.weight"] * 2}


def test_hooks_may_edit_a_checkpoint(run_ranks: Callable[..., Any], tmp_path: Path) -> None:
    def edit(rank: int) -> None:
        trainer = build_trainer("tp2-pp2", tmp_path, max_epochs=1, limit_val_batches=0)
        trainer.fit(Editing(), loader(1, rank, LAYOUTS["tp2-pp2"]))
        trainer.save_checkpoint(tmp_path / "first.ckpt")
        trainer = build_trainer("tp2-pp2", tmp_path)
        trainer.validate(Editing(), loader(1, rank, LAYOUTS["tp2-pp2"]), ckpt_path=tmp_path / "first.ckpt")
        trainer.save_checkpoint(tmp_path / "second.ckpt", weights_only=True)

    run_ranks(4, edit)
    first = torch.load(tmp_path / "first.ckpt", weights_only=True)["state_dict"]
    second = torch.load(tmp_path / "second.ckpt", weights_only=True)["state_dict"]
    assert list(first) == [f"old.{key}" for key in LitLM().state_dict() if key != "scale"]
    assert list(first) == list(second)
    assert torch.equal(second["old.head.weight"], 2 * first["old.head.weight"])
    assert all(torch.equal(second[key], first[key]) for key in first if key != "old.head.weight")

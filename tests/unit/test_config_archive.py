"""What ConfigArchive writes, and when, in one process under Lightning's own strategy."""

from __future__ import annotations

import gc
import json
import logging
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.loggers import WandbLogger
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch.utils.data import DataLoader, Dataset

from lightning_hybrid.archive import Archive, Batch, Entry, fingerprint_module
from lightning_hybrid.callbacks import ConfigArchive, ScalingEfficiency
from lightning_hybrid.callbacks.run_entry import judge, latest_values
from lightning_hybrid.errors import ArchiveError, CheckpointError, NonFiniteError, PipelineError
from lightning_hybrid.layout import Layout, resolve_layout

LENGTH, BATCH_SIZE = 6, 4


class Tiny(L.LightningModule):
    """Predicts the next of a few tokens; raises ``error`` at the given batch."""

    def __init__(self, error: BaseException | None = None, at: int = 5) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(16, 8)
        self.head = torch.nn.Linear(8, 16)
        self.error, self.at = error, at
        self.seen: list[float] = []

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        if self.error is not None and batch_idx == self.at:
            raise self.error
        logits = self.head(self.embed(batch[:, :-1]))
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        self.seen.append(loss.item())
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        warmup = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=50)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": warmup, "interval": "step"}}

    def train_dataloader(self) -> Any:
        return DataLoader(torch.arange(100 * BATCH_SIZE * LENGTH).reshape(-1, LENGTH) % 16, batch_size=BATCH_SIZE)


def trainer_with(
    tmp_path: Path, *callbacks: L.Callback, steps: int = 10, logger: Any = False, **options: Any
) -> L.Trainer:
    return L.Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=steps,
        callbacks=list(callbacks),
        logger=logger,
        default_root_dir=tmp_path,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )


def only_entry(folder: Path) -> Entry:
    assert [name for name in os.listdir(folder) if not name.endswith(".json")] == []
    (entry,) = Archive(folder).list()
    return entry


def test_entry_of_a_run(tmp_path: Path) -> None:
    L.seed_everything(11)
    module, archive = Tiny(), ConfigArchive(tmp_path / "archive")
    trainer_with(tmp_path, archive, accumulate_grad_batches=2).fit(module)
    entry = only_entry(tmp_path / "archive")
    assert entry == archive.entry
    assert archive.path == str(tmp_path / "archive" / f"{entry.id}.json")
    assert entry.model == fingerprint_module(Tiny())
    assert (entry.degrees, entry.hardware.device, entry.hardware.num_devices) == (Layout(), "cpu", 1)
    assert (entry.batch.size_per_data_rank, entry.batch.accumulate_grad_batches, entry.batch.global_size) == (4, 2, 8)
    assert entry.batch.tokens_per_sample == LENGTH
    assert (entry.training.optimizer, entry.training.learning_rate, entry.training.seed) == ("AdamW", 0.01, 11)
    assert entry.parent is None
    result = entry.result
    assert (result.status, result.num_steps) == ("ok", 10)
    assert result.first_loss == pytest.approx(module.seen[0])
    assert result.last_loss == pytest.approx(module.seen[-1])
    assert result.step_time is not None
    assert result.samples_per_second == pytest.approx(8 / result.step_time)
    assert result.tokens_per_second == pytest.approx(8 * LENGTH / result.step_time)


def test_losses_are_the_steps_own_however_many_batches_are_accumulated_later(tmp_path: Path) -> None:
    module, more = Tiny(), GradientAccumulationScheduler({0: 1, 1: 3})
    trainer_with(tmp_path, ConfigArchive(tmp_path), more, limit_train_batches=6, steps=8).fit(module)
    result = only_entry(tmp_path).result
    assert [result.first_loss, result.last_loss] == pytest.approx([module.seen[0], module.seen[-1]])


def test_entry_before_and_while_training(tmp_path: Path) -> None:
    """The file is there before the first step, is renewed at intervals, and holds the other callbacks' last values."""
    seen: list[tuple[int, Entry]] = []

    class Watch(L.Callback):
        def look(self, trainer: L.Trainer) -> None:
            seen.append((trainer.global_step, only_entry(tmp_path / "archive")))

        def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
            self.look(trainer)

        def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
            self.look(trainer)

    scaling = ScalingEfficiency(1.0, every_n_steps=5)
    trainer_with(tmp_path, ConfigArchive(tmp_path / "archive", every_n_steps=6), Watch(), scaling, steps=13).fit(Tiny())
    assert {entry.result.status for _, entry in seen} == {"running"}
    assert len({entry.id for _, entry in seen}) == 1
    assert seen[0][1].training.optimizer is None
    assert seen[1][1].training.optimizer == "AdamW"
    steps = {step: entry.result.num_steps for step, entry in seen[1:]}
    assert [steps[n] for n in (1, 3, 4, 5, 6, 11, 12, 13)] == [0, 0, 4, 4, 6, 6, 12, 12]  # 4: warm-up is 2, then 2 more
    assert seen[-1][1].result.samples_per_second
    last = only_entry(tmp_path / "archive").result
    assert last.num_steps == 13
    assert last.scaling == {key: value for key, value in scaling.latest.items() if key.startswith("scaling/")}
    assert last.scaling["scaling/num_devices"] == 1


def test_second_run_in_the_same_folder_is_a_second_entry(tmp_path: Path) -> None:
    archive = ConfigArchive(tmp_path)
    module = Tiny()
    trainer_with(tmp_path, archive).fit(module)
    trainer_with(tmp_path, archive).fit(module)  # also with the same callback
    trainer_with(tmp_path, ConfigArchive(tmp_path)).fit(Tiny())
    entries = Archive(tmp_path).list()
    assert len({entry.id for entry in entries}) == 3
    assert {entry.result.status for entry in entries} == {"ok"}
    assert len({entry.model for entry in entries}) == 1


def test_another_batch_with_the_same_rate_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for accumulate, advice in ((1, 0), (1, 0), (4, 1)):
        caplog.clear()
        archive = ConfigArchive(tmp_path, every_n_steps=2)
        trainer_with(tmp_path, archive, accumulate_grad_batches=accumulate).fit(Tiny())
        assert caplog.text.count("Advice: The global batch is 16 samples where entry") == advice
        assert caplog.text.count("Advice") == advice
    assert "had 4, and the learning rate still begins at 0.01" in caplog.text


def test_another_module_has_another_fingerprint(tmp_path: Path) -> None:
    archive, other = ConfigArchive(tmp_path), Tiny()
    other.head = torch.nn.Linear(8, 16, bias=False)
    for module in (Tiny(), other):
        trainer_with(tmp_path, archive).fit(module)
    assert len({entry.model.hash for entry in Archive(tmp_path).list()}) == 2


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (ValueError("no such token\nsecond line"), "error", "rank 0: ValueError: no such token\nsecond line"),
        (
            torch.OutOfMemoryError("CUDA out of memory. Tried"),
            "oom",
            "rank 0: OutOfMemoryError: CUDA out of memory. Tried",
        ),
        (SIGTERMException(), "interrupted", "rank 0: SIGTERMException"),
        (
            RuntimeError("gloo: Connection closed by peer"),  # and no other rank says why
            "interrupted",
            "another rank was killed or lost; rank 0: RuntimeError: gloo: Connection closed by peer",
        ),
    ],
)
def test_failure_is_recorded(tmp_path: Path, error: BaseException, status: str, message: str) -> None:
    with pytest.raises(type(error)):
        trainer_with(tmp_path, ConfigArchive(tmp_path)).fit(Tiny(error, at=5))
    result = only_entry(tmp_path).result
    assert (result.status, result.message, result.num_steps) == (status, message, 5)
    assert result.samples_per_second is not None  # step 4 was measured
    assert result.is_good == (status == "interrupted")


def test_keyboard_interrupt_keeps_what_was_measured(tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        trainer_with(tmp_path, ConfigArchive(tmp_path)).fit(Tiny(KeyboardInterrupt()))
    assert only_entry(tmp_path).result.status == "interrupted"


def test_failure_during_setup_is_recorded(tmp_path: Path) -> None:
    class Broken(Tiny):
        def configure_optimizers(self) -> Any:
            raise RuntimeError("CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate")

    with pytest.raises(RuntimeError):
        trainer_with(tmp_path, ConfigArchive(tmp_path)).fit(Broken())
    assert (only_entry(tmp_path).result.status, only_entry(tmp_path).result.num_steps) == ("oom", 0)


def test_first_cause_stands(tmp_path: Path) -> None:
    """Rank 3 ran out of memory and said so; what rank 0 then sees is a lost connection."""
    trainer, module = trainer_with(tmp_path), Tiny()
    archive = ConfigArchive(tmp_path)
    trainer.callbacks = [archive]
    archive.setup(trainer, module, "fit")
    assert archive.entry is not None
    other = ConfigArchive(tmp_path)
    other.entry = archive.entry
    rank_three = SimpleNamespace(is_global_zero=False, global_rank=3, global_step=0, strategy=None)
    rank_two = SimpleNamespace(is_global_zero=False, global_rank=2, global_step=0, strategy=None)
    archive.entry = replace(archive.entry, batch=Batch(global_size=8))  # what only rank 0 knows
    archive._write(trainer)
    for rank, error in ((rank_two, RuntimeError("Connection closed by peer")), (rank_three, MemoryError())):
        report(other, rank, error)
    assert only_entry(tmp_path).batch.global_size == 8
    assert only_entry(tmp_path).result.message == "rank 3: MemoryError"  # out of memory explains the lost connection
    report(archive, trainer, RuntimeError("Connection closed by peer"))
    result = only_entry(tmp_path).result
    assert (result.status, result.message) == ("oom", "rank 3: MemoryError")


def report(archive: ConfigArchive, trainer: Any, error: BaseException) -> None:
    """Call the hook without a step recorder, which a stand-in for a Trainer does not have."""
    recorder = SimpleNamespace(finish=lambda: None, num_steps=0)
    archive.recorder = lambda trainer: recorder  # type: ignore[assignment,method-assign,return-value]
    archive.on_exception(trainer, Tiny(), error)


def test_causes_are_looked_through() -> None:
    def chained() -> BaseException:
        try:
            try:
                raise torch.OutOfMemoryError("CUDA out of memory")
            except RuntimeError as cause:
                raise PipelineError("in stage 1's forward of micro-batch 0") from cause
        except PipelineError as error:
            return error

    assert judge(chained()) == ("oom", "PipelineError: in stage 1's forward of micro-batch 0")
    assert judge(RuntimeError("[enforce] DefaultCPUAllocator: can't allocate memory: you tried"))[0] == "oom"
    assert judge(ValueError("ran out of memory cards"))[0] == "error"  # only errors of the runtime speak of memory
    loop = ValueError("a")
    loop.__cause__ = loop
    assert judge(loop) == ("error", "ValueError: a")


class Unreadable(Dataset[int]):
    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> int:
        return {}[index]


def test_only_what_degrees_may_be_to_blame_for_is_put_down_to_them() -> None:
    def of(function: Callable[[], Any]) -> str:
        try:
            function()
        except Exception as error:
            return judge(error)[0]
        finally:
            gc.collect()  # a loader's workers end with the last frame that knows it
        return "nothing"

    def own() -> None:
        raise KeyError("a typo")

    assert of(own) == of(lambda: Path("/no/such/file").read_bytes()) == "error"
    for num_workers in (0, 1):
        assert of(lambda: next(iter(DataLoader(Unreadable(), num_workers=num_workers)))) == "error"  # noqa: B023
    assert of(lambda: torch.ones(2, 3) @ torch.ones(2, 3)) == "failed"
    assert of(lambda: torch.nn.functional.cross_entropy(torch.ones(2, 3), torch.ones(4).long())) == "failed"
    assert of(lambda: resolve_layout(4, tensor_parallel_size=3)) == "failed"
    for error in (NonFiniteError("a loss"), CheckpointError("a full disk")):
        assert judge(error)[0] == "error"


def test_messages_hold_no_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "0123456789abcdef")
    with pytest.raises(ValueError, match="0123"):
        trainer_with(tmp_path, ConfigArchive(tmp_path)).fit(Tiny(ValueError("bad key 0123456789abcdef")))
    (name,) = os.listdir(tmp_path)
    text = (tmp_path / name).read_text()
    assert "0123456789abcdef" not in text
    assert "bad key ***" in text


def test_unwritable_archive_costs_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("in the way")
    archive = ConfigArchive(tmp_path / "file" / "archive", every_n_steps=2)
    trainer = trainer_with(tmp_path, archive)
    with caplog.at_level(logging.WARNING, logger="lightning_hybrid"):
        trainer.fit(Tiny())
    assert trainer.global_step == 10
    (record,) = [record for record in caplog.records if "archive" in record.getMessage()]
    assert "training goes on" in record.getMessage()
    assert "give the archive a folder that this user may write" in record.getMessage()


def test_unknown_protocol_is_refused_at_once() -> None:
    with pytest.raises(ArchiveError, match="cannot open the archive"):
        ConfigArchive("nosuchprotocol://x")


def test_no_entry_of_fast_dev_run_or_of_validation(tmp_path: Path) -> None:
    trainer_with(tmp_path, ConfigArchive(tmp_path), fast_dev_run=True).fit(Tiny())
    assert os.listdir(tmp_path) == []

    class Validated(Tiny):
        def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
            pass

        val_dataloader = Tiny.train_dataloader

    trainer_with(tmp_path, ConfigArchive(tmp_path)).validate(Validated(), verbose=False)
    assert os.listdir(tmp_path) == []


def test_latest_values_are_taken_from_measuring_callbacks_only() -> None:
    scaling = ScalingEfficiency()
    scaling.latest = {
        "scaling/efficiency": 0.5,
        "step_share/compute": 0.7,
        "bubble/ideal": 0.2,
        "throughput/step_s": 1.0,
    }
    foreign = SimpleNamespace(latest={"bubble/ideal": 9.0})
    trainer: Any = SimpleNamespace(callbacks=[scaling, foreign])
    assert latest_values(trainer) == {
        "scaling": {"scaling/efficiency": 0.5},
        "breakdown": {"step_share/compute": 0.7},
        "bubble": {"bubble/ideal": 0.2},
    }


def test_wandb_gets_the_entry_as_an_artifact(tmp_path: Path, run_ranks: Callable[..., list[Any]]) -> None:
    run_ranks(1, run_with_wandb, tmp_path)  # in a process of its own, as W&B leaves a service behind


def run_with_wandb(rank: int, tmp_path: Path) -> None:
    import wandb

    for name in ("CONFIG", "CACHE", "DATA", "ARTIFACT"):
        os.environ[f"WANDB_{name}_DIR"] = str(tmp_path / "wandb-own")
    logged: list[Any] = []
    log_artifact = wandb.Run.log_artifact
    wandb.Run.log_artifact = lambda run, artifact: (logged.append(artifact), log_artifact(run, artifact))[1]
    logger = WandbLogger(save_dir=tmp_path, offline=True)
    trainer_with(tmp_path, ConfigArchive(tmp_path / "archive"), logger=logger).fit(Tiny())
    entry = only_entry(tmp_path / "archive")
    assert logger.experiment.config["archive_entry"] == entry.id
    assert logger.experiment.summary["archive_entry"] == entry.id
    (artifact,) = logged
    assert (artifact.type, list(artifact.manifest.entries)) == ("archive-entry", [f"{entry.id}.json"])
    document = Path(artifact.manifest.entries[f"{entry.id}.json"].local_path).read_text()
    assert json.loads(document)["result"]["status"] == "ok"
    assert Entry.from_json(document) == entry
    wandb.finish()

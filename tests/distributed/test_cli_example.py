"""The LightningCLI project of ``examples/cli``: one line of YAML changed, the same numbers in its logs."""

from __future__ import annotations

import csv
import os
from pathlib import Path

import pytest

from examples.cli import data
from examples.cli.main import main
from tests.distributed.equality import must_differ
from tests.ranks import run_ranks
from tests.wandb_file import read_run

FOLDER = Path(data.__file__).parent
STAGES = "{class_path: lightning_hybrid.Hybrid3DStrategy, init_args: {pipeline_parallel_size: 2}}"
SHORT = ["--trainer.max_epochs=3", "--trainer.enable_progress_bar=false", "--trainer.log_every_n_steps=2"]
SMALL = ["--model.width=8", "--data.batch_size=8", "--data.num_samples=85", "--data.num_held_out=20"]


def run(rank: int, folder: Path, strategy: str, more: list[str]) -> list[dict[str, float]]:
    """Fit with the project's YAML, in which one line is changed. Returns the rows of the CSV log."""
    folder.mkdir(exist_ok=True)
    os.chdir(folder)
    os.environ |= {"WANDB_CACHE_DIR": str(folder), "WANDB_DATA_DIR": str(folder), "WANDB_SILENT": "true"}
    text = (FOLDER / "trainer.yaml").read_text()
    lines = [f"  strategy: {strategy}" if line.startswith("  strategy: ") else line for line in text.splitlines()]
    assert sum(one != other for one, other in zip(lines, text.splitlines(), strict=True)) == 1
    Path(f"trainer-{rank}.yaml").write_text("\n".join(lines))
    configs = [f"--config=trainer-{rank}.yaml", f"--config={FOLDER / 'digits.yaml'}"]
    cli = main(["fit", *configs, *SHORT, *SMALL, *more])
    if rank > 0:
        return []
    cli.trainer.loggers[1].experiment.finish()
    with open("runs/digits/csv/version_0/metrics.csv") as file:
        return [{key: float(value) for key, value in row.items() if value} for row in csv.DictReader(file)]


def check(rows: list[dict[str, float]], expected: list[dict[str, float]]) -> None:
    assert len(rows) == len(expected)
    for row, right in zip(rows, expected, strict=True):
        assert row == pytest.approx(right, rel=1e-5, abs=1e-6)


def check_wandb(folder: Path, rows: list[dict[str, float]]) -> None:
    """There is one W&B run, with every value of the CSV log at the same step, and the hyperparameters."""
    (found,) = folder.glob("runs/digits/wandb/offline-run-*")
    run = read_run(next(found.glob("*.wandb")))
    logged = {(row["trainer/global_step"], key): value for row in run["history"] for key, value in row.items()}
    for row in rows:
        for key, value in row.items():
            if key not in ("step", "epoch"):
                assert logged[(row["step"], key)] == pytest.approx(value, rel=1e-5), key
    assert run["config"]["width"] == 8


def test_one_line_of_yaml(tmp_path: Path) -> None:
    expected = run_ranks(2, run, tmp_path / "ddp", "ddp", [], timeout=120)[0]
    names = {"train_loss_step", "train_loss_epoch", "val_loss", "val_accuracy", "lr-AdamW"}
    assert names <= {key for row in expected for key in row}
    check_wandb(tmp_path / "ddp", expected)
    for name, strategy, devices in [("hybrid3d", "hybrid3d", 2), ("stages", STAGES, 4)]:
        more = [f"--trainer.devices={devices}"]
        rows = run_ranks(devices, run, tmp_path / name, strategy, more, timeout=120)[0]
        check(rows, expected)
        check_wandb(tmp_path / name, rows)
    other = run_ranks(2, run, tmp_path / "other", "ddp", ["--data.seed=1"], timeout=120)[0]
    with must_differ():  # augmented otherwise
        check(other, expected)

"""A shortened demo, as a user runs it: twice, from the command line, on eight CPU processes."""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest

from examples.gpt.data import PythonTopics
from examples.gpt.module import LitGPT
from lightning_hybrid import Hybrid3DStrategy
from lightning_hybrid.archive import Archive, Entry
from tests.ranks import run_ranks

ROOT = Path(__file__).parents[2]
NUM_STEPS = 8


@dataclass(frozen=True, kw_only=True)
class Demo:
    """What two runs in one folder printed and left."""

    folder: Path
    outputs: tuple[str, str]

    @property
    def entries(self) -> list[Entry]:
        """Archive entries, oldest first: one device, first run, second run."""
        return Archive(self.folder / "archive").list()


def run_demo(folder: Path) -> str:
    command = [sys.executable, "-m", "examples.gpt.train", "--steps", str(NUM_STEPS), "--folder", str(folder)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "COLUMNS": "160"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Demo:
    folder = tmp_path_factory.mktemp("demo")
    return Demo(folder=folder, outputs=(run_demo(folder), run_demo(folder)))


def test_it_says_which_rank_holds_what(demo: Demo) -> None:
    assert "data 2 x tensor 2 x pipeline 2" in demo.outputs[0]
    for rank in range(8):
        assert re.search(rf"^ *{rank} .*its share of stage [01]$", demo.outputs[0], re.MULTILINE), demo.outputs[0]


def test_it_says_what_the_stages_are(demo: Demo) -> None:
    found = re.findall(r"^ *(\d) .*model\.blocks\.\S+.* +([\d,]+) +([\d.]+)%$", demo.outputs[0], re.MULTILINE)
    assert [stage for stage, _, _ in found] == ["0", "1"], demo.outputs[0]
    assert sum(float(share) for _, _, share in found) == pytest.approx(100.0, abs=0.11)


def test_the_held_out_loss_falls(demo: Demo) -> None:
    for output in demo.outputs:
        found = re.search(r"Held-out loss: ([\d.]+) nats per byte before, ([\d.]+) after 8 steps", output)
        assert found, output
        assert float(found[2]) < float(found[1]) - 0.3


def test_one_table_has_all_numbers(demo: Demo) -> None:
    rows = (
        "step time",
        "compute",
        "exposed communication: tensor",
        "exposed communication: data",
        "exposed communication: pipeline",
        "bubble ratio",
        "throughput",
        "scaling efficiency",
    )
    for row in rows:
        found = re.search(rf"{re.escape(row)}.*?(\d[\d.,]*)", demo.outputs[0])
        assert found, row
        assert float(found[1].replace(",", "")) > 0, found[0]
    assert re.search(r"bubble ratio .* ideal: \d", demo.outputs[0])
    assert "strong: " in demo.outputs[0]


def test_it_leaves_an_archive_entry_a_picture_and_a_wandb_run(demo: Demo) -> None:
    single, first, second = demo.entries
    assert single.hardware.num_devices == 1
    for entry, output in zip((first, second), demo.outputs, strict=True):
        assert entry.result.status == "ok"
        assert (entry.hardware.num_devices, entry.degrees.shape) == (8, (2, 1, 2, 2))
        assert entry.result.num_steps == NUM_STEPS
        assert f"{entry.id}.json" in output
    assert (demo.folder / "timeline.png").read_bytes().startswith(b"\x89PNG")
    assert str(demo.folder / "timeline.png") in demo.outputs[0]
    runs = list(demo.folder.glob("wandb/offline-run-*/*.wandb"))
    assert len(runs) == 2
    assert all(str(run.parent) in "".join(demo.outputs) for run in runs)


def test_the_second_run_starts_from_the_first(demo: Demo) -> None:
    _, first, second = demo.entries
    assert "starting from archive entry" not in demo.outputs[0]
    assert f"starting from archive entry {first.id}: the same model" in demo.outputs[1]
    assert (first.parent, second.parent) == (None, first.id)


def test_one_device_is_measured_once(demo: Demo) -> None:
    assert re.search(
        r"First 30 steps on one device, to compare with ...\nOne device: [\d.]+ samples/s", demo.outputs[0]
    )
    assert "One device" not in demo.outputs[1]


def readme_code(number: int) -> str:
    return (ROOT / "README.md").read_text().split("```python\n")[number].split("```")[0]


def test_the_script_of_the_readme_runs_as_it_stands(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(readme_code(1))
    command = [sys.executable, "script.py"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "200"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "data 1 x tensor 1 x pipeline 2" in done.stdout + done.stderr
    assert "`max_epochs=5` reached" in done.stdout + done.stderr


def test_the_second_example_of_the_readme_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code = readme_code(2)
    module = functools.partial(LitGPT, num_blocks=2, width=16, num_heads=2, context_length=8)
    data = functools.partial(PythonTopics, batch_size=8, context_length=8)
    quiet = {"max_steps": 2, "accelerator": "cpu", "logger": False, "enable_checkpointing": False}
    trainer = functools.partial(L.Trainer, **quiet, enable_model_summary=False)
    monkeypatch.chdir(tmp_path)

    def run(rank: int) -> Any:
        lightning = SimpleNamespace(Trainer=trainer)
        scope: dict[str, Any] = {
            "L": lightning,
            "Hybrid3DStrategy": Hybrid3DStrategy,
            "YourModule": module,
            "YourData": data,
        }
        exec(code, scope)
        return scope["trainer"].global_step

    assert run_ranks(8, run, timeout=120) == [2] * 8
    assert "model.blocks.*.attention.{q, k, v}" in capsys.readouterr().out  # split without a plan

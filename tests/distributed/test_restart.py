"""Jobs that are killed and started again: no step is lost, all ranks end, and ``torchrun`` brings back what is left."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.utilities.exceptions import SIGTERMException

import lightning_hybrid.checkpoint.directory
import lightning_hybrid.checkpoint.whole
from benchmarks.kills import (
    LAYOUTS,
    Batches,
    Figures,
    Killed,
    kill_and_restart,
    run_job,
    uninterrupted,
    worst_deviation,
)
from lightning_hybrid import Hybrid3DStrategy
from tests.distributed.equality import QUIET
from tests.distributed.restart_module import RestartModule
from tests.ranks import free_port, run_ranks

ROOT = Path(__file__).parents[2]


def deviation(figures: Figures) -> float:
    last = max(step for losses in figures.losses for step in losses)
    return worst_deviation(run_ranks(1, uninterrupted, last)[0], figures)


def test_kills_lose_nothing(tmp_path: Path) -> None:
    layouts = [name for name, (degrees, _) in LAYOUTS.items() if torch.tensor(degrees).prod() <= 2]
    figures = kill_and_restart(tmp_path, 4, layouts=layouts, seed=1)
    assert not figures.missing
    assert deviation(figures) < 1e-5
    assert figures.in_save >= 1
    assert len({start.layout for start in figures.starts}) > 2


def forget_the_optimizer() -> None:
    Hybrid3DStrategy.load_optimizer_state_dict = lambda *_: None  # type: ignore[method-assign]


def test_a_forgotten_optimizer_is_seen(tmp_path: Path) -> None:
    figures = Figures()
    for start in (
        Killed(number=0, layout="pp2", form="file", every=2, max_steps=100, victim=1, after_steps=4.5),
        Killed(number=1, layout="1x1x1", form="file", every=2, max_steps=8),
    ):
        run_job(tmp_path, start, figures, forget_the_optimizer)
    assert not figures.missing
    assert deviation(figures) > 1e-4


def write_slowly_in_place() -> None:
    """No writing aside, and what is there is taken for whole."""
    to_disk, whole, directory = os.fsync, lightning_hybrid.checkpoint.whole, lightning_hybrid.checkpoint.directory

    def slowly(descriptor: Any) -> None:
        time.sleep(0.2)
        to_disk(descriptor)

    def in_place(path: Any, *, is_folder: bool) -> str:
        whole.remove(path)
        os.makedirs(path)
        return str(path)

    os.fsync = slowly
    whole.why_not_whole = lambda path: None
    directory.begin_aside, directory.put_in_place = in_place, lambda aside, path: None


def test_a_half_written_checkpoint_taken_for_whole_is_seen(tmp_path: Path) -> None:
    killed = Killed(number=0, layout="1x1x1", form="directory", every=2, max_steps=100, victim=0, in_save=(3, 0.1))
    run_job(tmp_path, killed, Figures(), write_slowly_in_place)
    again = Killed(number=1, layout="1x1x1", form="directory", every=2, max_steps=8)
    with pytest.raises(AssertionError, match=r"A start that nobody killed failed(?s:.*)meta.pt"):
        run_job(tmp_path, again, Figures(), write_slowly_in_place)


# ---- torchrun -------------------------------------------------------------------------------------------------------


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """The script of docs/restart.md, with a small module and shorter times."""
    text = (ROOT / "docs/restart.md").read_text()
    code = re.findall(r"```python\n# train.py\n(.*?)```", text, re.S)[0]
    folder = f'"{tmp_path}/checkpoints"'
    for old, new in (
        ("10_000", "100_000"),
        ("=100,", "=2,"),
        ('"checkpoints"', folder),
        ("YourModule", "RestartModule"),
    ):
        assert old in code
        code = code.replace(old, new)
    path = tmp_path / "train.py"
    path.write_text(f"from tests.distributed.restart_module import RestartModule\n{code}")
    return path


def agent(script: Path, port: int, name: str) -> subprocess.Popen[str]:
    """The command of docs/restart.md for several nodes, on this machine and more impatient."""
    text = (ROOT / "docs/restart.md").read_text()
    variable, command = re.findall(r"^(TORCH_\w+=1) torchrun (--nnodes.*) train.py$", text, re.M)[0]
    for old, new in {"=2:4": "=1:2", "=8": "=1", "node0:29500": f"127.0.0.1:{port}"}.items():
        assert old in command
        command = command.replace(old, new)
    impatient = "--local-addr=127.0.0.1"
    impatient += " --rdzv-conf=is_host=false,last_call_timeout=4,keep_alive_interval=1,keep_alive_max_attempt=2"
    with open(script.parent / name, "w") as output:
        return subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", *command.split(), *impatient.split(), str(script)],
            cwd=ROOT,
            env={
                **os.environ,
                **dict([variable.split("=")]),
                "PYTHONPATH": str(ROOT),
                "GLOO_SOCKET_IFNAME": "lo",
                "OMP_NUM_THREADS": "1",
            },
            stdout=output,
            stderr=subprocess.STDOUT,
            text=True,
        )


def wait_until(condition: Callable[[], Any], seconds: float, explain: Callable[[], str]) -> Any:
    end = time.monotonic() + seconds
    while not (result := condition()):
        assert time.monotonic() < end, explain()
        time.sleep(0.1)
    return result


def test_torchrun_goes_on_with_the_node_that_is_left(script: Path) -> None:
    port, outputs = free_port(), [script.parent / "a", script.parent / "b"]

    def said(pattern: str, *which: int) -> list[str]:
        return [found for i in which or (0, 1) for found in re.findall(pattern, outputs[i].read_text(), re.M)]

    def everything() -> str:
        return "".join(path.read_text()[-6000:] for path in outputs)

    store = torch.distributed.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)  # the meeting point
    agents = [agent(script, port, path.name) for path in outputs]
    try:
        wait_until(lambda: said(r"^STEP 5 ", 0) and said(r"^STEP 5 ", 1), 90, everything)
        os.kill(agents[1].pid, signal.SIGKILL)
        os.kill(int(said(r"PID (\d+)", 1)[-1]), signal.SIGKILL)  # a lost node loses both
        again = wait_until(lambda: said(r"AT (\d+) WITH data 1 x tensor 1 x pipeline 1", 0), 90, everything)
        wait_until(lambda: said(r"^STEP 9 ", 0), 60, everything)
    finally:
        pids = [agent_.pid for agent_ in agents] + [int(pid) for pid in said(r"PID (\d+)")]
        for pid in pids:
            if Path(f"/proc/{pid}").exists():
                os.kill(pid, signal.SIGKILL)
        for agent_ in agents:
            agent_.wait()
        del store
    assert said(r"AT 0 WITH data (\d)", 0, 1) == ["2", "2"]
    assert int(again[0]) >= 4, "it began anew"


# ---- SIGTERM --------------------------------------------------------------------------------------------------------


def end_at_sigterm(rank: int, terminated: int) -> str:
    """One rank gets SIGTERM in its third step, and nobody else."""

    class Terminated(L.Callback):
        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            if trainer.global_step == 2 and rank == terminated:
                os.kill(os.getpid(), signal.SIGTERM)

    strategy = Hybrid3DStrategy(2, 1, 1, archive=None)
    trainer = L.Trainer(devices=2, strategy=strategy, max_steps=6, callbacks=[Terminated()], **QUIET)
    try:
        trainer.fit(RestartModule(), Batches(rank, 2))
    except SIGTERMException:
        return f"ended at step {trainer.global_step}"
    return "not ended"


def test_sigterm_for_one_rank_ends_all() -> None:
    """Not the first one, which tests/distributed/test_stopping.py has."""
    assert run_ranks(2, end_at_sigterm, 1, timeout=30) == ["ended at step 3", "ended at step 3"]

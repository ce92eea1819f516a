"""What fails on whichever rank: how long until all have ended, and is the cause said? ``python -m benchmarks.chaos``.

A tiny GPT trains; at a random step something goes wrong on a random rank of a random layout. Then all ranks must have
ended within 30 s, one of them at least with an exit code that is not zero; the cause must be said once on what would be
the launcher's stderr, with the right rank; no process may be left; the newest checkpoint and the archive's entry must
be whole, and the entry must say what happened.
"""

from __future__ import annotations

import argparse
import collections
import os
import random
import signal
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers.logger import DummyLogger
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from benchmarks.chaos_kinds import KINDS, Kind, fail
from examples.gpt.module import LitGPT
from lightning_hybrid import Hybrid3DStrategy
from lightning_hybrid.archive import Archive
from lightning_hybrid.callbacks import ConfigArchive
from lightning_hybrid.checkpoint.whole import latest_checkpoint
from lightning_hybrid.pipeline.channels import Channels

__all__ = ["KINDS", "LAYOUTS", "Kind", "Outcome", "inject"]

LAYOUTS: dict[str, tuple[int, int, int]] = {
    "dp2": (2, 1, 1),
    "tp2": (1, 2, 1),
    "pp2": (1, 1, 2),
    "dp2xpp2": (2, 1, 2),
    "tp2xpp2": (1, 2, 2),
    "dp2xtp2xpp2": (2, 2, 2),
}


class Rows(Dataset[Tensor]):
    def __init__(self, strike: Callable[[str], None]) -> None:
        self._strike = strike

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Tensor:
        self._strike("worker" if torch.utils.data.get_worker_info() is not None else "dataset")
        return torch.randint(0, 256, (13,), generator=torch.Generator().manual_seed(index))


class Unlucky(LitGPT):
    """Something happens in it."""

    strike: Callable[[str], None]

    def setup(self, stage: str) -> None:
        self.strike("setup")

    def configure_model(self) -> None:
        self.strike("configure_model")

    def configure_optimizers(self) -> Any:
        self.strike("configure_optimizers")
        model: Any = self.model
        for block in model.blocks:
            block.register_forward_hook(self._in_block)
        return torch.optim.AdamW(self.parameters(), 1e-3)

    def _in_block(self, block: Any, args: Any, output: Any) -> None:
        self.strike("forward")
        if isinstance(output, Tensor) and output.requires_grad:
            output.register_hook(lambda grad: self.strike("backward"))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.strike("training_step")
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.strike("validation_step")
        return super().validation_step(batch, batch_idx)

    def on_fit_start(self) -> None:
        self.strike("on_fit_start")

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.strike("on_train_batch_start")

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.strike("on_before_optimizer_step")

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.strike("on_train_batch_end")

    def on_validation_epoch_end(self) -> None:
        self.strike("on_validation_epoch_end")

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.strike("on_save_checkpoint")


class UnluckyLogger(DummyLogger):
    def __init__(self, strike: Callable[[str], None]) -> None:
        super().__init__()
        self._strike = strike

    def log_metrics(self, *args: Any, **kwargs: Any) -> None:
        self._strike("logger")


@dataclass(kw_only=True)
class Outcome:
    """What came of one failure."""

    kind: str
    layout: str
    victim: int
    seconds: float = 0.0
    """From the failure to the end of the last process."""
    faults: list[str] = field(default_factory=list)
    """What is not as it should be."""
    output: str = ""


def rank_of_chaos(rank: int, folder: Path, name: str, degrees: tuple[int, int, int], victim: int, at_step: int) -> None:
    """Be one rank, as a script is: what is not caught is printed, and the exit code is 1."""
    kind = KINDS[name]
    signal.signal(signal.SIGINT, signal.default_int_handler)
    code = 0
    try:
        _fit(rank, folder, kind, degrees, victim, at_step)
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException as error:
        code = 1
        sys.excepthook(type(error), error, error.__traceback__)
    sys.stderr.flush()
    os._exit(code)


def _fit(rank: int, folder: Path, kind: Kind, degrees: tuple[int, int, int], victim: int, at_step: int) -> None:
    L.seed_everything(0, verbose=False)
    state = {"struck": False}
    trainer: Any = None

    def strike(where: str) -> None:
        early = where in ("setup", "configure_model", "configure_optimizers", "on_fit_start")
        in_worker = torch.utils.data.get_worker_info() is not None
        ready = early or in_worker or (trainer is not None and trainer.global_step >= at_step)
        if where in ("dataset", "worker", "forward", "training_step") and not in_worker:
            ready = ready and trainer.training
        once = state["struck"] and kind.act is not fail  # an exception comes again: some are tried, and told later
        if where != kind.where or rank != victim or once or not ready:
            return
        if state["struck"]:
            kind.act()
        state["struck"] = True
        (folder / "struck").write_text(str(time.monotonic()))
        kind.act()

    if kind.where == "send" and rank == victim:
        original = Channels.send

        def send(self: Any, *args: Any, **kwargs: Any) -> None:
            strike("send")
            original(self, *args, **kwargs)

        Channels.send = send  # type: ignore[method-assign]
    strategy = Hybrid3DStrategy(
        *degrees,
        archive=None,
        num_microbatches=4 if degrees[2] > 1 else "auto",
        timeout=timedelta(seconds=kind.timeout),
    )
    keep = ModelCheckpoint(folder / "checkpoints", "{step}", every_n_train_steps=1, save_last=True)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=degrees[0] * degrees[1] * degrees[2],
        strategy=strategy,
        max_steps=8,
        limit_val_batches=1,
        val_check_interval=2,
        num_sanity_val_steps=0,
        log_every_n_steps=1,
        callbacks=[keep, ConfigArchive(folder / "archive", every_n_steps=1)],
        logger=UnluckyLogger(strike),
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = Unlucky(num_blocks=4, width=16, num_heads=4, context_length=12)
    module.strike = strike
    rows = Rows(strike)
    workers = 1 if kind.where == "worker" else 0
    trainer.fit(
        module, DataLoader(rows, batch_size=8, num_workers=workers), DataLoader(Rows(lambda _: None), batch_size=8)
    )


def inject(name: str, layout: str, victim: int, at_step: int, folder: Path, more: float = 0.0) -> Outcome:
    """Start the job, let it fail, and look at what is left. ``more``: seconds that a busy machine may take longer."""
    from tests.ranks import fork_rank, free_port, processes_of, rank_environment

    kind, degrees = KINDS[name], LAYOUTS[layout]
    number = degrees[0] * degrees[1] * degrees[2]
    outcome = Outcome(kind=name, layout=layout, victim=victim)
    port, gate = free_port(), os.pipe()
    ranks = []
    folder.mkdir(parents=True)
    (folder / "outputs").mkdir()
    for rank in range(number):
        arguments = (folder, name, degrees, victim, at_step)
        environment = rank_environment(rank, number, port)
        ranks.append(fork_rank(rank, folder / "outputs", environment, gate, rank_of_chaos, arguments))
    try:
        _wait(ranks, folder, kind, outcome, more)
        left = processes_of([rank.pid for rank in ranks])
        end = time.monotonic() + 8  # torch's workers look for their parent every 5 s
        while left and time.monotonic() < end:
            time.sleep(0.1)
            left = processes_of([rank.pid for rank in ranks])
        outcome.faults += [f"left running: {left}"] if left else []
    finally:
        for rank in ranks:
            rank.kill()
            rank.pipe.close()
        for descriptor in gate:
            os.close(descriptor)
    outcome.output = "".join(f"--- rank {rank.rank}\n{rank.read_output()}" for rank in ranks)
    _judge(outcome, kind, folder, [rank.status for rank in ranks])
    return outcome


def _wait(ranks: list[Any], folder: Path, kind: Kind, outcome: Outcome, more: float) -> None:
    start, struck = time.monotonic(), None
    while running := [rank for rank in ranks if not _ended(rank)]:
        time.sleep(0.005)
        if struck is None and (folder / "struck").exists():
            struck = float((folder / "struck").read_text() or time.monotonic())
        now = time.monotonic()
        if now - (struck or start) > (kind.limit + more if struck else 240):
            for rank in running:
                rank.dump_stacks()
            time.sleep(1)
            stacks = "".join(f"rank {rank.rank}: {rank.read_stacks()}\n" for rank in running)
            outcome.faults.append(f"ranks {[rank.rank for rank in running]} still run\n{stacks}")
            return
    if not (folder / "struck").exists():
        outcome.faults.append("nothing has happened")
    outcome.seconds = time.monotonic() - (struck or start)


def _ended(rank: Any) -> bool:
    """Whether the process has ended, without ending what it had started."""
    if rank.status is None and os.waitid(os.P_PID, rank.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
        return True
    return rank.status is not None


def _judge(outcome: Outcome, kind: Kind, folder: Path, statuses: list[int | None]) -> None:
    faults, output = outcome.faults, outcome.output
    if not any(statuses):
        faults.append("all exit codes are 0")
    causes = [line for line in output.splitlines() if "First cause:" in line or _is_error_line(line, kind)]
    if not any(kind.said in line for line in causes):
        faults.append("the cause is not said")
    named = [line for line in output.splitlines() if f"ank {outcome.victim} (" in line]
    if kind.same and not named:
        faults.append("the rank is not named")
    noise = [line for line in output.splitlines() if line.startswith("RuntimeError") and "peer" in line]
    if noise and kind.same:
        faults.append(f"said as if it were a cause: {noise[0]}")
    if output.count("Traceback (most recent call last)") > 1 + output.count("During handling") and kind.same:
        others = output.count("Original Traceback") + output.count("direct cause")
        if output.count("Traceback (most recent call last)") > 1 + others and not _printed_by_one(output):
            faults.append("tracebacks of several ranks")
    _judge_folder(outcome, kind, folder)


def _printed_by_one(output: str) -> bool:
    parts = output.split("--- rank ")[1:]
    return sum("Traceback (most recent call last)" in part for part in parts) <= 1


def _is_error_line(line: str, kind: Kind) -> bool:
    return kind.said in line and not line.startswith("  ")


def _judge_folder(outcome: Outcome, kind: Kind, folder: Path) -> None:
    faults = outcome.faults
    if (newest := latest_checkpoint(folder / "checkpoints")) is not None:
        try:
            torch.load(newest, weights_only=True)
        except Exception as error:
            faults.append(f"the newest checkpoint is not whole: {error}")
    paths = list((folder / "archive").rglob("*.json")) if (folder / "archive").exists() else []
    if not paths:
        if kind.where not in ("setup",):
            faults.append("no archive entry")
        return
    try:
        entry = Archive(folder / "archive").get(paths[0].stem)
    except Exception:
        faults.append(f"the archive's entry is not whole: {traceback.format_exc()}")
        return
    if entry.result.status not in kind.status.split(" or "):
        faults.append(f"the entry's status is {entry.result.status}, not {kind.status}: {entry.result.message}")
    elif kind.same and f"rank {outcome.victim}" not in (entry.result.message or ""):
        faults.append(f"the entry does not name the rank: {entry.result.message}")


def main() -> None:
    """Run, and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--number", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kind", help="only those whose name contains this")
    parser.add_argument("--layout", choices=LAYOUTS)
    parser.add_argument("--verbose", action="store_true")
    arguments = parser.parse_args()
    choose, outcomes = random.Random(arguments.seed), []
    names = [name for name in KINDS if not arguments.kind or arguments.kind in name]
    with tempfile.TemporaryDirectory(prefix="chaos-") as folder:
        for number in range(arguments.number):
            name = names[number % len(names)]
            usable = [key for key in LAYOUTS if "pp" in key or name != "exception in our code"]
            layout = arguments.layout or choose.choice(usable)
            degrees = LAYOUTS[layout]
            victim = 0 if KINDS[name].ranks == "first" else choose.randrange(degrees[0] * degrees[1] * degrees[2])
            outcome = inject(name, layout, victim, choose.randrange(1, 5), Path(folder) / str(number))
            outcomes.append(outcome)
            print(
                f"{number:3} {name:40} {layout:12} rank {victim} {outcome.seconds:6.2f} s", *outcome.faults, flush=True
            )
            if arguments.verbose or outcome.faults:
                print(outcome.output, flush=True)
    report(outcomes)


def report(outcomes: list[Outcome]) -> None:
    """Print the figures."""
    by_kind: dict[str, list[Outcome]] = collections.defaultdict(list)
    for outcome in outcomes:
        by_kind[outcome.kind].append(outcome)
    for name, found in by_kind.items():
        seconds = [outcome.seconds for outcome in found]
        bad = sum(bool(outcome.faults) for outcome in found)
        print(f"{name:40} {len(found):3} median {statistics.median(seconds):6.2f} most {max(seconds):6.2f} bad {bad}")
    seconds = [outcome.seconds for outcome in outcomes]
    bad = [outcome for outcome in outcomes if outcome.faults]
    print(f"{len(outcomes)} failures of {len(by_kind)} kinds over {len({o.layout for o in outcomes})} layouts")
    print(f"seconds to the end: median {statistics.median(seconds):.2f}, most {max(seconds):.2f}; bad: {len(bad)}")


if __name__ == "__main__":
    main()

"""Is anything lost when ranks are killed? ``python -m benchmarks.kills --kills 50``.

A tiny GPT trains with AdamW. Again and again a random rank gets SIGKILL at a random moment, every other time while a
checkpoint is being saved; the job is started again at a random other layout and resumes with ``ckpt_path="last"``.
Checkpoints are made every 2 or 3 steps, as plain files, as directories, and as directories that are written while
training goes on. In the end every step must have been done, and the loss of each, however often it was repeated, must
be that of a run that nobody killed.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import random
import signal
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from examples.gpt.module import LitGPT
from lightning_hybrid import Hybrid3DStrategy

__all__ = ["LAYOUTS", "Figures", "Killed", "kill_and_restart", "run_job", "uninterrupted", "worst_deviation"]

#: Name -> degrees (data, tensor, pipeline) and further arguments of the strategy.
LAYOUTS: dict[str, tuple[tuple[int, int, int], dict[str, Any]]] = {
    "1x1x1": ((1, 1, 1), {}),
    "dp2": ((2, 1, 1), {}),
    "tp2": ((1, 2, 1), {}),
    "pp2": ((1, 1, 2), {}),
    "interleaved": ((1, 1, 2), {"schedule": "Interleaved1F1B", "stages_per_rank": 2}),
    "dp2xpp2": ((2, 1, 2), {}),
    "tp2xpp2": ((1, 2, 2), {}),
    "dp4": ((4, 1, 1), {}),
    "HSDP": ((4, 1, 1), {"replicate_size": 2}),
}
FORMS: dict[str, Any] = {"file": False, "directory": True, "async": "async"}
GLOBAL_BATCH, LENGTH, BATCHES_PER_EPOCH = 8, 12, 10
#: Seconds in which all ranks must have ended after one was killed.
LIMIT = 30.0


class Batches:
    """This data rank's rows ``(GLOBAL_BATCH / data ranks, LENGTH + 1)`` of every batch; the state is where it stands.

    A batch depends on its place in the epoch alone, so that any number of data ranks reads the same samples.
    """

    def __init__(self, data_rank: int, data_size: int) -> None:
        self._rows, self._next = slice(data_rank, None, data_size), 0

    def __len__(self) -> int:
        return BATCHES_PER_EPOCH

    def __iter__(self) -> Iterator[Tensor]:
        while self._next < BATCHES_PER_EPOCH:
            generator = torch.Generator().manual_seed(self._next)
            self._next += 1
            yield torch.randint(0, 256, (GLOBAL_BATCH, LENGTH + 1), generator=generator)[self._rows]
        self._next = 0

    def state_dict(self) -> dict[str, int]:
        return {"next": self._next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._next = state["next"]


class _Diary(L.Callback):
    """Writes a line for each event of this rank; what was written stays, however the rank ends."""

    def __init__(self, path: Path) -> None:
        self._file = open(path, "a", buffering=1)  # noqa: SIM115  (until the process ends)

    def write(self, **event: Any) -> None:
        self._file.write(json.dumps({**event, "at": time.monotonic()}) + "\n")

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.write(event="start", step=trainer.global_step)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.write(event="step", step=trainer.global_step, loss=float(outputs["loss"]))


class _Strategy(Hybrid3DStrategy):
    """Notes when saves begin and end; the rank that is to die may do so in one of them."""

    diary: _Diary
    die_in_save: tuple[int, float] | None = None
    """In which save, and how many seconds after its beginning."""

    def save_checkpoint(self, checkpoint: Any, filepath: Any, storage_options: Any = None) -> None:
        self.diary.write(event="save")
        if self.die_in_save is not None:
            left, seconds = self.die_in_save
            self.die_in_save = left - 1, seconds
            if left == 0:
                threading.Thread(target=_die, args=(seconds,), daemon=True).start()
        super().save_checkpoint(checkpoint, filepath, storage_options)
        self.diary.write(event="saved", step=checkpoint["global_step"], name=Path(filepath).name)


def _die(seconds: float) -> None:
    time.sleep(seconds)
    os.kill(os.getpid(), signal.SIGKILL)


@dataclass(kw_only=True)
class Killed:
    """One start of the job, and how it is to end."""

    number: int
    layout: str
    form: str
    every: int
    """Steps between checkpoints."""
    max_steps: int
    victim: int | None = None
    """Rank that gets SIGKILL; ``None``: the job runs to its end."""
    in_save: tuple[int, float] | None = None
    """The victim dies in this save, so many seconds after it began. Otherwise, when ``after_steps`` are done."""
    after_steps: float = 0.0

    @property
    def num_ranks(self) -> int:
        data, tensor, pipeline = LAYOUTS[self.layout][0]
        return data * tensor * pipeline


def train(rank: int, folder: Path, start: Killed, sabotage: Callable[[], Any] | None) -> None:
    """Be one rank of the job. Leaves the process at once when training fails, as a script does."""
    try:
        if sabotage is not None:
            sabotage()
        _fit(rank, folder, start)
    except BaseException:
        (folder / f"error-{start.number}-{rank}").write_text(traceback.format_exc())
        os._exit(1)
    os._exit(0)


def _fit(rank: int, folder: Path, start: Killed) -> None:
    degrees, more = LAYOUTS[start.layout]
    diary = _Diary(folder / f"diary-{start.number}-{rank}")
    L.seed_everything(0, verbose=False)
    strategy = _Strategy(*degrees, archive=None, save_distributed_checkpoint=FORMS[start.form], **more)
    strategy.diary = diary
    if rank == start.victim:
        strategy.die_in_save = start.in_save
    keep = ModelCheckpoint(
        folder / "checkpoints", "{step}", every_n_train_steps=start.every, save_last=True, save_top_k=1
    )
    trainer = L.Trainer(
        accelerator="cpu",
        devices=start.num_ranks,
        strategy=strategy,
        max_steps=start.max_steps,
        callbacks=[diary, keep],
        use_distributed_sampler=False,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    loader = Batches(strategy.coordinate.data, degrees[0])
    module = LitGPT(num_blocks=4, width=16, num_heads=4, context_length=LENGTH, learning_rate=3e-4)
    trainer.fit(module, loader, ckpt_path="last")


@dataclass(kw_only=True)
class Figures:
    """What came of it."""

    losses: list[dict[int, float]] = field(default_factory=list)
    """For each start the loss of every step that it did (mean over the ranks)."""
    starts: list[Killed] = field(default_factory=list)
    resumed_at: list[int | None] = field(default_factory=list)
    """Step at which each start began; ``None`` if it was killed before."""
    in_save: int = 0
    """Kills between the beginning and the end of a save of the rank that was killed."""
    unfinished: int = 0
    """Kills that left a checkpoint half written, or an old one moved aside."""
    passed_over: int = 0
    """Restarts that found no latest checkpoint, or one that was not whole, and took the newest whole one."""
    saved_at: int = 0
    """Step of the latest checkpoint that a restart must find."""
    seen: set[str] = field(default_factory=set)
    """Names of what is half written now."""
    seconds: list[float] = field(default_factory=list)
    """From each kill to the end of the last rank."""

    @property
    def repeated(self) -> int:
        """Steps that were done more than once."""
        done = Counter(step for losses in self.losses for step in losses)
        return sum(count - 1 for count in done.values())

    @property
    def missing(self) -> list[int]:
        """Steps that nobody did."""
        done = {step for losses in self.losses for step in losses}
        return sorted(set(range(1, max(done, default=0) + 1)) - done)


def worst_deviation(expected: dict[int, float], figures: Figures) -> float:
    """Return the largest relative difference of a step's loss from the uninterrupted run's."""
    errors = [
        abs(loss - expected[step]) / abs(expected[step]) for losses in figures.losses for step, loss in losses.items()
    ]
    return max(errors)


def kill_and_restart(
    folder: Path, num_kills: int, *, seed: int = 0, sabotage: Callable[[], Any] | None = None, layouts: Any = LAYOUTS
) -> Figures:
    """Kill and restart so many times, then let the job go on for a few steps and end.

    Raises:
        AssertionError: if ranks were still running 30 s after a kill, a start failed before it was killed, or one began
            before a step that had been saved.
    """
    figures, choose = Figures(), random.Random(seed)
    layout, save_seconds = "", 0.02
    for number in range(num_kills + 1):
        layout = choose.choice([name for name in layouts if name != layout])
        start = Killed(
            number=number,
            layout=layout,
            form=choose.choice(list(FORMS)),
            every=choose.choice((2, 3)),
            max_steps=100_000,
        )
        if number < num_kills:
            start.victim = choose.randrange(start.num_ranks)
            start.after_steps = choose.uniform(-1, 8)
            if number % 2:  # two saves (of the step, and the last) each time
                start.in_save = choose.randrange(5), choose.uniform(0, save_seconds)
        else:
            start.max_steps = max((step for losses in figures.losses for step in losses), default=0) + 6
        save_seconds = run_job(folder, start, figures, sabotage) or save_seconds
    return figures


def run_job(folder: Path, start: Killed, figures: Figures, sabotage: Any = None) -> float | None:
    """Start the job, kill a rank, wait for all others; return how long a save takes.

    Raises:
        AssertionError: see :func:`kill_and_restart`.
    """
    from tests.ranks import fork_rank, free_port, rank_environment

    port, gate = free_port(), os.pipe()
    with tempfile.TemporaryDirectory() as outputs:
        ranks = [
            fork_rank(
                rank,
                Path(outputs),
                rank_environment(rank, start.num_ranks, port),
                gate,
                train,
                (folder, start, sabotage),
            )
            for rank in range(start.num_ranks)
        ]
        try:
            _wait(folder, start, ranks, figures)
        finally:
            for rank in ranks:
                rank.kill()
                rank.pipe.close()
            for descriptor in gate:
                os.close(descriptor)
        output = "".join(rank.read_output() for rank in ranks)
    return _note(folder, start, output, figures)


def _wait(folder: Path, start: Killed, ranks: list[Any], figures: Figures) -> None:
    """Until all ranks have ended. The victim is killed from here, or has killed itself in a save."""
    victim = None if start.victim is None else ranks[start.victim]
    end, killed_at = time.monotonic() + 180, None
    while [rank for rank in ranks if not rank.reap()]:
        time.sleep(0.002)
        if victim is not None and killed_at is None:
            if start.in_save is None and victim.status is None and _steps_done(folder, start) >= start.after_steps:
                victim.kill()
            if victim.reap() and os.WIFSIGNALED(victim.status):
                killed_at = time.monotonic()
                end = killed_at + LIMIT
        if killed_at is None and any(rank.status is not None for rank in ranks):
            end = min(end, time.monotonic() + 5)  # a process that is killed loses its connections before it is gone
        if time.monotonic() > end:
            _give_up(folder, start, ranks)
    if victim is not None and not os.WIFSIGNALED(victim.status):
        _give_up(folder, start, ranks)
    if killed_at is not None:
        figures.seconds.append(time.monotonic() - killed_at)
    if victim is None and any(rank.status for rank in ranks):
        raise AssertionError(f"A start that nobody killed failed: {start}\n{_errors(folder, start)}")


def _give_up(folder: Path, start: Killed, ranks: list[Any]) -> None:
    running = [rank for rank in ranks if not rank.reap()]
    for rank in running:
        rank.dump_stacks()
    time.sleep(1)
    stacks = "".join(f"--- rank {rank.rank} still runs\n{rank.read_stacks()}\n" for rank in running)
    raise AssertionError(
        f"Not all ranks ended, or some failed by themselves: {start}\n{_errors(folder, start)}{stacks}"
    )


def _errors(folder: Path, start: Killed) -> str:
    return "".join(f"--- {path.name}\n{path.read_text()}" for path in sorted(folder.glob(f"error-{start.number}-*")))


def _steps_done(folder: Path, start: Killed) -> float:
    """Steps that the victim has done, and between two of them a random part; less than zero before training."""
    events = _read(folder / f"diary-{start.number}-{start.victim}")
    return sum(event["event"] == "step" for event in events) + (
        random.random() - 0.5 if events else -1 - random.random()
    )


def _read(path: Path) -> list[dict[str, Any]]:
    """Events of a diary; its last line may be cut off."""
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [json.loads(line) for line in lines]


def _note(folder: Path, start: Killed, output: str, figures: Figures) -> float | None:
    diaries = [_read(folder / f"diary-{start.number}-{rank}") for rank in range(start.num_ranks)]
    of_ranks = [{e["step"]: e["loss"] for e in diary if e["event"] == "step"} for diary in diaries]
    common = set.intersection(*(set(losses) for losses in of_ranks))
    figures.losses.append({s: sum(losses[s] for losses in of_ranks) / len(of_ranks) for s in sorted(common)})
    figures.starts.append(start)
    figures.resumed_at.append(next((e["step"] for e in diaries[0] if e["event"] == "start"), None))
    unfinished = {path.name for path in (folder / "checkpoints").glob("*.ckpt.*")}
    left_behind = bool(unfinished - figures.seen)
    figures.unfinished, figures.seen = figures.unfinished + left_behind, unfinished
    there = sorted(os.listdir(folder / "checkpoints")) if figures.saved_at else []
    if figures.resumed_at[-1] is not None:
        assert figures.resumed_at[-1] >= figures.saved_at, (
            f"Step {figures.saved_at} was saved, but lost: {start}\n{there}\n{output}"
        )
    saves = [e["step"] for e in diaries[0] if e["event"] == "saved" and e["name"].startswith("last")]
    if start.form != "async":  # there a save has only begun
        figures.saved_at = max([figures.saved_at, *saves])
    figures.passed_over += "the newest whole checkpoint" in output
    if start.victim is not None:
        of_victim = [event["event"] for event in diaries[start.victim] if event["event"] in ("save", "saved")]
        figures.in_save += left_behind or of_victim[-1:] == ["save"]
    times = [e["at"] for e in diaries[0] if e["event"] in ("save", "saved")]
    durations = [end - begin for begin, end in zip(times[::2], times[1::2], strict=False)]
    return max(durations, default=None)


def uninterrupted(rank: int, num_steps: int) -> dict[int, float]:
    """Return the loss of each step in one process that nobody kills."""
    with tempfile.TemporaryDirectory() as folder:
        start = Killed(number=0, layout="1x1x1", form="file", every=100_000, max_steps=num_steps)
        _fit(0, Path(folder), start)
        return {e["step"]: e["loss"] for e in _read(Path(folder) / "diary-0-0") if e["event"] == "step"}


def main() -> None:
    """Run, and print the figures."""
    from tests.ranks import run_ranks

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="kills-") as folder:
        figures = kill_and_restart(Path(folder), arguments.kills, seed=arguments.seed)
    last = max(step for losses in figures.losses for step in losses)
    with contextlib.redirect_stdout(io.StringIO()):
        expected = run_ranks(1, uninterrupted, last, timeout=600)[0]
    for start, resumed, losses in zip(figures.starts, figures.resumed_at, figures.losses, strict=True):
        print(f"{start.number:3} {start.layout:12} {start.form:10} from step {resumed}, to {max(losses, default=None)}")
    print(f"kills: {arguments.kills}, of these inside a save: {figures.in_save}")
    print(f"kills that left a checkpoint half written: {figures.unfinished}; latest not there: {figures.passed_over}")
    print(f"steps: {last}, missing: {figures.missing or 'none'}, repeated: {figures.repeated}")
    print(f"largest relative difference of a step's loss: {worst_deviation(expected, figures):.1e}")
    seconds = sorted(figures.seconds)
    print(
        f"seconds from a kill to the end of all ranks: median {seconds[len(seconds) // 2]:.2f}, most {seconds[-1]:.2f}"
    )
    print(f"took {time.monotonic() - begin:.0f} s")


if __name__ == "__main__":
    main()

"""Pipelines that sleep for known times: is the measured bubble the analytic one? ``python -m benchmarks.bubbles``.

Every schedule on 2 and 4 ranks: forward, and each half of the backward, take the same time, 20 ms for each block and
stage. The idle share is then (p - 1) / (v m + p - 1) for p ranks with v stages each and m micro-batches, and
(p - 1) / (3 v m + p - 1) for zero bubble. Then one stage is twice as slow, which must show as imbalance of that stage.
Delays of the machine only add to a bubble, so the least of the measured steps counts; more than 2 points off fails.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Mapping
from pathlib import Path

import lightning as L

from benchmarks.peers import machine
from lightning_hybrid.callbacks import BubbleRatio
from lightning_hybrid.pipeline.schedule import find_schedule
from tests.distributed.test_callbacks import SleepingBlock, Words, build_trainer, loader
from tests.ranks import run_ranks

SECONDS, ALLOWED = 0.02, 0.02
SCHEDULES = (
    "GPipe", "1F1B", "Eager1F1B", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV",
)  # fmt: skip


class Kept(BubbleRatio):
    """Keeps every measurement."""

    def __init__(self) -> None:
        super().__init__(every_n_steps=1, picture=False)
        self.kept: list[dict[str, float]] = []

    def publish(self, trainer: L.Trainer, values: Mapping[str, float]) -> None:
        super().publish(trainer, values)
        self.kept.append(dict(values))


def sleep(rank: int, schedule: str, num_ranks: int, slow: int | None, num_steps: int) -> dict[str, float]:
    """Return the measurement with the least bubble."""
    spec, callback = find_schedule(schedule), Kept()
    num_blocks, num_microbatches = num_ranks * spec.stages_per_rank, 2 * num_ranks
    blocks = [SleepingBlock(16, SECONDS * (2 if block == slow else 1)) for block in range(num_blocks)]
    with tempfile.TemporaryDirectory() as folder:
        options = {"schedule": schedule, "num_microbatches": num_microbatches, "max_steps": num_steps}
        trainer = build_trainer((1, 1, num_ranks), Path(folder), [callback], **options)
        trainer.fit(Words(list(blocks)), loader(num_steps, batch_size=num_microbatches))
    return min(callback.kept, key=lambda values: values["bubble/measured"])


def analytic(schedule: str, num_ranks: int) -> float:
    """The idle share where forward and both halves of the backward take equally long."""
    spec = find_schedule(schedule)
    work = spec.stages_per_rank * 2 * num_ranks * (3 if spec.splits_backward else 1)
    return (num_ranks - 1) / (work + num_ranks - 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--ranks", type=int, nargs="*", default=[2, 4])
    chosen = parser.parse_args()
    print(", ".join(f"{name} {value}" for name, value in machine().items()), flush=True)
    print("| schedule | ranks | analytic | measured | one stage twice as slow: imbalance | stage named |", flush=True)
    print("|---|---|---|---|---|---|", flush=True)
    failed = []
    for num_ranks in chosen.ranks:
        for schedule in SCHEDULES:
            even = run_ranks(num_ranks, sleep, schedule, num_ranks, None, chosen.steps, timeout=600)[0]
            slow = run_ranks(num_ranks, sleep, schedule, num_ranks, 1, chosen.steps, timeout=600)[0]
            expected, measured = analytic(schedule, num_ranks), even["bubble/measured"]
            stage, imbalance = int(slow["bubble/slowest_stage"]), slow["bubble/imbalance"]
            print(
                f"| {schedule} | {num_ranks} | {expected:.1%} | {measured:.1%} | {imbalance:.1%} | {stage} |",
                flush=True,
            )
            if abs(measured - expected) > ALLOWED or stage != 1 or imbalance < ALLOWED:
                failed.append(f"{schedule} on {num_ranks} ranks")
    if failed:
        raise SystemExit(
            f"More than {100 * ALLOWED:.0f} points off, or the slow stage was not found: {', '.join(failed)}"
        )


if __name__ == "__main__":
    main()

"""Does an archive stay whole under writers that are killed? ``python -m benchmarks.archive_writers``.

8 processes write 100 runs each into one archive at once, each run three times (running, running with figures, ok) as
``ConfigArchive`` does; a tenth process reads and chooses all the while. Processes are killed at random moments and
others take over their remaining runs, until all have been reported written; damaged files are strewn in. Then: every
entry whole or absent, none lost that was reported written, damaged files named, and the index right.
"""

from __future__ import annotations

import argparse
import dataclasses
import logging
import multiprocessing
import os
import random
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.archive_speed import KINDS, entries
from lightning_hybrid.archive import Archive, Entry, Fingerprint, Hardware, best_entry
from lightning_hybrid.archive.row import row_of

STATES = ("running", "running", "ok")


def write_runs(folder: str, runs: list[tuple[int, Entry]], reported: Any) -> None:
    """Write runs, each in three states; ``reported[number]`` counts those that are there."""
    archive = Archive(folder)
    for number, entry in runs:
        for state in range(reported[number], len(STATES)):
            updated = f"2026-07-31T10:00:{state:02d}Z"
            result = dataclasses.replace(entry.result, status=STATES[state], message="x" * 2000)
            archive.write(dataclasses.replace(entry, updated=updated, result=result))
            reported[number] = state + 1


def read_all_the_while(folder: str, stop: Any, reads: Any) -> None:
    """Choose again and again; a broken entry would be an exception or a warning."""
    logging.getLogger("lightning_hybrid").addHandler(_Fails())
    model = Fingerprint(model_class="Model4", num_parameters=5 * 10**6, hash=f"{4:016x}")
    while not stop.value:
        best_entry(Archive(folder).known(), model, Hardware(device="cuda", kind=KINDS[0], num_devices=8), 8)
        reads.value += 1


class _Fails(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        if "damaged-" not in record.getMessage():
            os._exit(3)


def run(folder: str, num_writers: int, num_runs: int, kill_every: float, chance: random.Random) -> dict[str, int]:
    """Write until every run has been reported; return what happened."""
    context = multiprocessing.get_context("fork")
    made = list(entries(num_writers * num_runs))
    reported = context.Array("b", len(made), lock=False)
    stop, reads = context.Value("b", 0), context.Value("i", 0)
    reader = context.Process(target=read_all_the_while, args=(folder, stop, reads))
    reader.start()
    own = [[(number, made[number]) for number in range(first, len(made), num_writers)] for first in range(num_writers)]
    writers: list[Any] = [None] * num_writers
    kills = 0
    while any(count < len(STATES) for count in reported):
        for place in range(num_writers):
            alive = writers[place] is not None and writers[place].is_alive()
            left = [(number, entry) for number, entry in own[place] if reported[number] < len(STATES)]
            if not alive and left:
                writers[place] = context.Process(target=write_runs, args=(folder, left, reported))
                writers[place].start()
        time.sleep(chance.uniform(0, 2 * kill_every))
        victim = writers[chance.randrange(num_writers)]
        if victim is not None and victim.is_alive():
            victim.kill()
            kills += 1
        if kills % 7 == 0:
            (Path(folder) / f"damaged-{kills}.json").write_text(made[0].to_json()[: chance.randrange(800)])
    for writer in writers:
        writer.join()
    stop.value = 1
    reader.join(60)
    assert reader.exitcode == 0, f"the reader met a broken entry ({reader.exitcode})"
    return {"runs": len(made), "kills": kills, "reads": reads.value}


def check(folder: str, num_runs: int) -> dict[str, int]:
    """Compare the folder with what was reported."""
    names = [name for name in os.listdir(folder) if name.endswith(".json")]
    damaged = [name for name in names if name.startswith("damaged-")]
    found = Archive(folder).list()
    assert len(found) == num_runs == len(names) - len(damaged), (len(found), len(names), len(damaged))
    assert {entry.result.status for entry in found} == {"ok"}, "an older state came back"
    assert sorted(Archive(folder).known()) == sorted(map(row_of, found)), "the index is wrong"
    left = [name for name in os.listdir(folder) if name.endswith(".tmp")]
    return {"entries": len(found), "damaged files": len(damaged), "temporary files of killed writers": len(left)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--writers", type=int, default=8)
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--kill_every", type=float, default=0.05, help="seconds from one kill to the next, on average")
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        done = run(folder, chosen.writers, chosen.runs, chosen.kill_every, random.Random(chosen.seed))
        done |= check(folder, done["runs"])
        print(", ".join(f"{count} {what}" for what, count in done.items()), f"in {time.perf_counter() - start:.1f} s")


if __name__ == "__main__":
    main()

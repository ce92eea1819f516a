"""Do the measured parts explain why n processes are not n times as fast? ``python -m benchmarks.explain [--rounds 3]``.

The work of ``work.py`` in one process takes ``step_1``; n processes would ideally take ``step_1 / n``. What a step on 2
data, tensor or pipeline ranks takes beyond that is split by what :class:`StepBreakdown` measured:

    step_n - step_1 / n = (compute_n - compute_1 / n) + exposed communication + bubble + unexplained

Computing may be slower only because the processes share the machine's caches and memory. So one process is also timed
beside another that does the same, without any exchange between them: what that costs is *contention*,
``(compute_beside - compute_1) / n``; the rest of the first term, *more work*, is what the axis itself costs (smaller
matrices, layers that every rank computes, copies). Unexplained is what optimizer, data and everything else take more
than their share. It is given as a share of ``step_n``; at most 5 % is asked for.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys

from benchmarks.peers import machine

AXES = ("hybrid3d:data", "hybrid3d:sharded", "hybrid3d:tensor", "hybrid3d:pipeline")
ALLOWED = 0.05
Parts = dict[str, float]


def run(system: str, *, at_once: int = 1) -> Parts:
    """Return the mean seconds of a step's parts, over so many runs of the system at the same time."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": ".", "WORK_PARTS": "1", "WORK_STEPS": "32"}
    command = [sys.executable, "-m", "benchmarks.systems", system, "2"]
    started = [
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(at_once)
    ]
    found = []
    for process in started:
        out, errors = process.communicate(timeout=1200)
        lines = [line for line in out.splitlines() if line.startswith('{"parts"')]
        if not lines:
            raise SystemExit(f"{system} gave no parts:\n{out[-2000:]}\n{errors[-4000:]}")
        found.append(json.loads(lines[-1])["parts"])
    return {key: statistics.fmean(parts[key] for parts in found) for key in found[0]}


def explain(alone: Parts, beside: Parts, parts: Parts, num_ranks: int = 2) -> Parts:
    """Split what a step takes beyond its ideal; seconds, and ``unexplained`` over the step as ``share``."""
    more = parts["step/compute_s"] - alone["step/compute_s"] / num_ranks
    contention = (beside["step/compute_s"] - alone["step/compute_s"]) / num_ranks
    difference = parts["step/time_s"] - alone["step/time_s"] / num_ranks
    explained = more + parts["step/communication_s"] + parts["step/bubble_s"]
    return {
        "step": parts["step/time_s"],
        "ideal": alone["step/time_s"] / num_ranks,
        "difference": difference,
        "contention": contention,
        "more work": more - contention,
        "communication": parts["step/communication_s"],
        "bubble": parts["step/bubble_s"],
        "unexplained": difference - explained,
        "share": (difference - explained) / parts["step/time_s"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args().rounds
    print(", ".join(f"{name} {value}" for name, value in machine().items()), flush=True)
    found: dict[str, list[Parts]] = {axis: [] for axis in AXES}
    for number in range(rounds):
        alone, beside = run("hybrid3d:one"), run("hybrid3d:one", at_once=2)
        for axis in AXES:
            found[axis].append(explain(alone, beside, run(axis)))
            print(f"round {number + 1}: {axis} unexplained {found[axis][-1]['share']:.1%}", file=sys.stderr, flush=True)
    columns = [key for key in found[AXES[0]][0] if key != "share"]
    print("| 2 ranks, ms | " + " | ".join(columns) + " | of the step | each round |")
    print("|---" * (len(columns) + 3) + "|")
    for axis, rows in found.items():
        cells = [f"{1e3 * statistics.median(row[key] for row in rows):.0f}" for key in columns]
        shares = [row["share"] for row in rows]
        each = " ".join(f"{share:.1%}" for share in shares)
        print(f"| `{axis}` | " + " | ".join(cells) + f" | {statistics.median(shares):.1%} | {each} |")
    worst = max(abs(statistics.median(row["share"] for row in rows)) for rows in found.values())
    print(f"\nAt most {worst:.1%} of a step is unexplained ({ALLOWED:.0%} allowed).")
    if worst > ALLOWED:
        raise SystemExit(1)


if __name__ == "__main__":
    main()

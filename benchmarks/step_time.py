"""Step time on two processes beside peers: ``python -m benchmarks.step_time [--rounds 5] [SYSTEM ...]``.

Systems run in turn (A B C A B C ...), because the machines drift; the medians over the rounds and their ratios count.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys

from benchmarks.systems import SYSTEMS

BY_TORCHRUN = ("torch-pp", "deepspeed-pp")


def run(system: str, python: str) -> float:
    """Return the median step time in milliseconds of one run."""
    launch = ["-m", "torch.distributed.run", "--nproc_per_node", "2"] if system in BY_TORCHRUN else []
    done = subprocess.run(
        [python, *launch, "-m", "benchmarks.systems", system],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": "."},
        capture_output=True,
        text=True,
        timeout=600,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"step_ms"')]
    if not lines:
        raise SystemExit(f"{system} gave no result:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    return float(json.loads(lines[-1])["step_ms"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("systems", nargs="*", default=["hybrid3d:1F1B", "torch-pp", "one-process"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--python", default=sys.executable, help="an interpreter with the peers installed")
    chosen = parser.parse_args()
    if unknown := set(chosen.systems) - set(SYSTEMS):
        parser.error(f"unknown: {', '.join(sorted(unknown))}; use some of {', '.join(SYSTEMS)}")
    times: dict[str, list[float]] = {system: [] for system in chosen.systems}
    for round_number in range(chosen.rounds):
        for system in chosen.systems:
            times[system].append(run(system, chosen.python))
            print(f"round {round_number + 1}: {system} {times[system][-1]:.0f} ms", flush=True)
    first = chosen.systems[0]
    print(f"\n{'system':<26} {'median ms':>9}   {first} / it (of medians; of each round)")
    for system, found in times.items():
        ratios = sorted(ours / theirs for ours, theirs in zip(times[first], found, strict=True))
        ratio = statistics.median(times[first]) / statistics.median(found)
        each = " ".join(f"{r:.2f}" for r in ratios)
        print(f"{system:<26} {statistics.median(found):>9.0f}   {ratio:.3f} ({each})")


if __name__ == "__main__":
    main()

"""Step times of peers and ours on the same work, in turn: ``python -m benchmarks.peers [--rounds 5] [--json FILE]``.

Without names each mode of ``../shared/peers/peer_steps.py`` runs beside our way to do the same; a mode that cannot run
here is left out, with the reason. In a round every system runs once (A B C ... A B C ...), because machines drift: what
counts is the median over the rounds, and the ratio within each round.

``--growth`` asks other questions of the same systems: what 1, 2, 4 and 8 ranks cost, and what a wider model does. With
more ranks than cores the clock says little, so there the processor time of all ranks together is compared.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import NamedTuple

from benchmarks.systems import BY_TORCHRUN, SYSTEMS

#: Our system -> the peers that do the same.
PEERS = {
    "hybrid3d:one": ("one-process",),
    "hybrid3d:data": ("lightning-ddp", "deepspeed-zero1"),
    "hybrid3d:sharded": ("lightning-fsdp2", "deepspeed-zero3"),
    "hybrid3d:tensor": ("lightning-tp",),
    "hybrid3d:pipeline": ("torch-pp", "deepspeed-pp"),
}
OURS = {peer: ours for ours, peers in PEERS.items() for peer in peers}
GROWTH_RANKS, GROWTH_WIDTHS = (2, 4, 8), (128, 256, 512)
GROWTH = {ours: peers[0] for ours, peers in PEERS.items() if ours != "hybrid3d:one"}


class Run(NamedTuple):
    """One run of one system; milliseconds."""

    step_ms: float
    """Median step by the clock."""
    processor_ms: float
    """Median processor time of a step, all ranks added up."""


def run(system: str, python: str, *, num_ranks: int = 2, width: int = 256) -> Run:
    """Run a system in processes of its own.

    Raises:
        RuntimeError: if it gave no result; with the end of what it said.
    """
    launch = ["-m", "torch.distributed.run", "--nproc_per_node", str(num_ranks)] if system in BY_TORCHRUN else []
    done = subprocess.run(
        [python, *launch, "-m", "benchmarks.systems", system, str(num_ranks)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": ".", "WORK_WIDTH": str(width)},
        capture_output=True,
        text=True,
        timeout=900,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"step_ms"')]
    if not lines:
        raise RuntimeError(f"{system} gave no result:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    found = json.loads(lines[-1])
    return Run(found["step_ms"], found["processor_ms"])


def why_not(system: str, python: str) -> str | None:
    """Why a system cannot run here; ``None`` if it can."""
    if not system.startswith("deepspeed"):
        return None
    done = subprocess.run([python, "-c", "import deepspeed"], capture_output=True, text=True)
    return None if done.returncode == 0 else f"deepspeed cannot be imported ({done.stderr.strip().splitlines()[-1]})"


def in_turn(systems: Sequence[str], rounds: int, python: str) -> dict[str, list[Run]]:
    """Run all systems once a round."""
    found: dict[str, list[Run]] = {system: [] for system in systems}
    for number in range(rounds):
        for system in systems:
            found[system].append(run(system, python))
            print(f"round {number + 1}: {system} {found[system][-1].step_ms:.0f} ms", file=sys.stderr, flush=True)
    return found


def spread(values: Sequence[float]) -> str:
    """``median (least to most)``."""
    return f"{statistics.median(values):.0f} ({min(values):.0f} to {max(values):.0f})"


def ratios(ours: Sequence[float], theirs: Sequence[float]) -> str:
    """Median of the ratios of each round, with the least and the most."""
    each = sorted(a / b for a, b in zip(ours, theirs, strict=True))
    return f"{statistics.median(each):.2f} ({each[0]:.2f} to {each[-1]:.2f})"


def table(found: dict[str, list[Run]], against: dict[str, str]) -> list[str]:
    """Return the lines of a Markdown table, one for each peer -> ours of ``against``."""
    lines = [
        "| peer | step, ms | ours | step, ms | ours / peer | of processor time |",
        "|---|---|---|---|---|---|",
    ]
    for peer, ours in against.items():
        a, b = found[ours], found[peer]
        by_clock, busy = (ratios([x[i] for x in a], [x[i] for x in b]) for i in (0, 1))
        times = [spread([x.step_ms for x in runs]) for runs in (b, a)]
        lines.append(f"| `{peer}` | {times[0]} | `{ours}` | {times[1]} | {by_clock} | {busy} |")
    return lines


def growth(rounds: int, python: str) -> list[str]:
    """Return tables: processor time of all ranks by number of ranks, and clock time at 2 ranks by the model's width."""
    cases = [(ranks, 256) for ranks in GROWTH_RANKS] + [(2, width) for width in GROWTH_WIDTHS if width != 256]
    pairs = [(system, peer) for ours, peer in GROWTH.items() for system, peer in ((ours, ours), (peer, ours))]
    found: dict[tuple[str, int, int], list[Run]] = {}
    for number in range(rounds):
        for width in GROWTH_WIDTHS:
            found.setdefault(("one-process", 1, width), []).append(run("one-process", python, width=width))
        for num_ranks, width in cases:
            for system, _ in pairs:
                key = (system, num_ranks, width)
                found.setdefault(key, []).append(run(system, python, num_ranks=num_ranks, width=width))
                print(f"round {number + 1}: {key} {found[key][-1]}", file=sys.stderr, flush=True)

    def cell(system: str, num_ranks: int, width: int) -> str:
        runs, alone = found[system, num_ranks, width], found["one-process", 1, width]
        busy = [a.processor_ms / b.processor_ms for a, b in zip(runs, alone, strict=True)]
        clock = statistics.median(x.step_ms for x in runs)
        return f"{statistics.median(busy):.2f}, {clock:.0f} ms"

    head = "processor time of all ranks / that of one process, and the clock's time of a step"
    lines = [f"By the number of ranks ({head}):", "", "| system | " + " | ".join(map(str, GROWTH_RANKS)) + " |"]
    lines.append("|---" * (len(GROWTH_RANKS) + 1) + "|")
    lines += [f"| `{s}` | " + " | ".join(cell(s, ranks, 256) for ranks in GROWTH_RANKS) + " |" for s, _ in pairs]
    lines += ["", "By the width, at 2 ranks (the same):", ""]
    lines.append("| system | " + " | ".join(map(str, GROWTH_WIDTHS)) + " |")
    lines.append("|---" * (len(GROWTH_WIDTHS) + 1) + "|")
    lines += [f"| `{s}` | " + " | ".join(cell(s, 2, width) for width in GROWTH_WIDTHS) + " |" for s, _ in pairs]
    for width in GROWTH_WIDTHS:
        alone = spread([x.step_ms for x in found["one-process", 1, width]])
        lines.append(f"\nOne process at width {width}: {alone} ms.")
    return lines


def machine() -> dict[str, str | int | float]:
    """What the times depend on."""
    import torch

    return {
        "date": time.strftime("%Y-%m-%d %H:%M"),
        "cores": os.cpu_count() or 0,
        "load": round(os.getloadavg()[0], 1),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("systems", nargs="*", help="the first is compared with the others (default: all peers)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", metavar="FILE", help="also write every single time there")
    parser.add_argument("--growth", action="store_true", help="by the number of ranks and the model's width instead")
    parser.add_argument("--python", default=sys.executable, help="an interpreter with the peers installed")
    chosen = parser.parse_args()
    if unknown := set(chosen.systems) - set(SYSTEMS):
        parser.error(f"unknown: {', '.join(sorted(unknown))}; use some of {', '.join(SYSTEMS)}")
    print(", ".join(f"{name} {value}" for name, value in machine().items()), flush=True)
    if chosen.growth:
        print("\n".join(growth(chosen.rounds, chosen.python)))
        return
    first, *others = chosen.systems or [None]
    against = dict.fromkeys(others, first) if first else dict(OURS)
    for system in list(against):
        if (reason := why_not(system, chosen.python)) is not None:
            print(f"{system} is left out: {reason}")
            del against[system]
    systems = [first] if first else []
    for peer, ours in against.items():  # a peer runs next to what it is compared with
        systems += [system for system in (ours, peer) if system not in systems]
    found = in_turn(systems, chosen.rounds, chosen.python)
    print("\n".join(table(found, against)) if against else spread([x.step_ms for x in found[systems[0]]]))
    if chosen.json:
        with open(chosen.json, "w") as file:
            json.dump({"machine": machine(), "runs": found}, file, indent=1)


if __name__ == "__main__":
    main()

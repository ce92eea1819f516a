"""The planner beside published measurements: ``python -m benchmarks.planner_published FILE...``.

Each file is a list of rows as in ``published_throughput.json`` (the fields are those that ``planner_rows.py`` reads).
No source has a constant of its own. ``--fit`` prints constants fitted anew; ``--leave-out`` fits them once without each
source.
"""

from __future__ import annotations

import argparse
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from benchmarks.planner_fit import fit
from benchmarks.planner_rows import Case, cases_of, is_out_of_memory, read_rows
from lightning_hybrid.errors import ConfigurationError
from lightning_hybrid.planner import Estimate, estimate
from lightning_hybrid.planner.constants import FITTED, Constants
from lightning_hybrid.planner.rules import MEMORY_SHARE, advise, preference
from lightning_hybrid.planner.search import CLOSE
from lightning_hybrid.planner.stage_memory import FRAGMENTS

GIB = 2**30


@dataclass(frozen=True)
class Answer:
    """What the planner says of a row."""

    case: Case
    estimate: Estimate

    @property
    def time_error(self) -> float:
        """Predicted over measured step time, less one."""
        assert self.case.seconds is not None
        return self.estimate.seconds / self.case.seconds - 1

    @property
    def memory_error(self) -> float:
        """Predicted over measured memory, less one: of what the source measured."""
        assert self.case.gigabytes is not None
        return self.memory / GIB / self.case.gigabytes - 1

    @property
    def memory(self) -> float:
        """Bytes of what the source measured: a device's whole use, the allocator's, or states and activations alone."""
        words = (self.case.row.get("memory_def") or "").lower()
        if "nvidia-smi" in words:
            return self.estimate.peak_memory
        if "params+optimizer" in words:
            return max(stage.states + stage.activations for stage in self.estimate.memory)
        if "last" in words and "rank" in words:
            return self.estimate.memory[-1].allocated
        most = max(stage.allocated for stage in self.estimate.memory)
        return most * FRAGMENTS if "reserved" in words else most

    @property
    def fits(self) -> bool:
        """Whether the planner would call this fitting."""
        return self.estimate.peak_memory <= MEMORY_SHARE * self.case.cluster.gpu.memory * GIB


def answer(cases: Iterable[Case], constants: Constants = FITTED) -> list[Answer]:
    """Ask the planner."""
    return [Answer(case, estimate(case.profile, case.cluster, case.setup, constants=constants)) for case in cases]


def regrets(answers: Iterable[Answer]) -> dict[str, float]:
    """For each group of layouts of one task: measured time of the one predicted to be fastest, over the fastest's."""
    groups: dict[str, list[Answer]] = defaultdict(list)
    for found in answers:
        if found.case.row.get("rank_group") and found.case.seconds is not None:
            groups[f"{found.case.row['file']}:{found.case.row['rank_group']}"].append(found)
    regret = {}
    for name, members in groups.items():
        layouts = {str(member.case.setup) for member in members}
        if len(layouts) > 1:
            chosen = first_ranked(members)
            regret[name] = chosen.case.seconds / min(member.case.seconds for member in members)
    return regret


def first_ranked(answers: Sequence[Answer]) -> Answer:
    """The one that the planner would rank first: of those about as fast as the fastest, the practitioners' choice."""
    limit = min(found.estimate.seconds for found in answers) * (1 + CLOSE)

    def order(found: Answer) -> tuple[int, int, int]:
        return preference(found.estimate, len(advise(found.case.profile, found.case.cluster, found.estimate)))

    close = sorted(answers, key=lambda found: found.estimate.seconds)
    return min((found for found in close if found.estimate.seconds <= limit), key=order)


def summary(name: str, errors: Sequence[float]) -> str:
    """One line: rows, mean and median size of the error, and the mean with its sign."""
    sizes = [abs(error) for error in errors]
    return (
        f"{name[:58]:58} {len(errors):5}  mean {statistics.mean(sizes):6.1%}  median {statistics.median(sizes):6.1%}"
        f"  bias {statistics.mean(errors):+6.1%}"
    )


def by(key: Callable[[Answer], str], answers: Iterable[Answer], error: Callable[[Answer], float]) -> list[str]:
    """A line for each value of ``key``."""
    groups: dict[str, list[float]] = defaultdict(list)
    for found in answers:
        groups[key(found)].append(error(found))
    return [summary(f"  {name}", groups[name]) for name in sorted(groups)]


def report(answers: Sequence[Answer], left_out: Sequence[str]) -> list[str]:
    """All figures, as lines."""
    timed = [found for found in answers if found.case.seconds is not None]
    measured = [found for found in answers if found.case.gigabytes is not None]
    lines = [f"{len(answers)} rows could be asked: {len(timed)} with a step time, {len(measured)} with memory"]
    lines += ["left out:" if left_out else "none left out", *(f"  {why}" for why in left_out)]
    if timed:
        lines += ["", summary("STEP TIME, all usable rows", [found.time_error for found in timed])]
        for title, key in _KEYS.items():
            lines += [f"by {title}:", *by(key, timed, lambda found: found.time_error)]
        lines.append("the ten worst:")
        worst = sorted(timed, key=lambda found: -abs(found.time_error))[:10]
        lines += [_line(found, found.time_error, f"{found.case.seconds:.4g} s") for found in worst]
    if regret := regrets(answers):
        sizes = sorted(regret.values())
        lines += [
            "",
            f"RANK REGRET over {len(sizes)} groups: median {statistics.median(sizes):.3f}, worst {sizes[-1]:.3f}",
        ]
        bad = sorted(regret.items(), key=lambda item: -item[1])[:5]
        lines += [f"  {name}: {value:.3f}" for name, value in bad]
    failed = [found for found in answers if is_out_of_memory(found.case.row)]
    if failed:
        wrong = [found for found in failed if found.fits]
        lines += ["", f"OUT OF MEMORY: of {len(failed)} rows known to be, {len(wrong)} are called fitting (80 %)"]
        lines += [f"  {found.case.label}: {found.estimate.peak_memory / GIB:.1f} GiB" for found in failed]
    if measured:
        ran = [found for found in measured if not is_out_of_memory(found.case.row)]
        refused = sum(found.estimate.peak_memory > found.case.cluster.gpu.memory * GIB for found in ran)
        lines += ["", summary("MEMORY, all usable rows", [found.memory_error for found in ran])]
        lines += ["by source:", *by(_KEYS["source"], ran, lambda found: found.memory_error), "the ten worst:"]
        worst = sorted(ran, key=lambda found: -abs(found.memory_error))[:10]
        lines += [_line(found, found.memory_error, f"{found.case.gigabytes:.4g} GiB") for found in worst]
        lines.append(f"  {refused} of {len(ran)} rows that ran are said to need more than the device has")
    return lines


_KEYS: dict[str, Callable[[Answer], str]] = {
    "source": lambda found: str(found.case.row["source"]),
    "device": lambda found: found.case.cluster.gpu.name,
    "file": lambda found: str(found.case.row["file"]),
}


def _line(found: Answer, error: float, measured: str) -> str:
    what = f"{found.case.cluster.num_devices} devices, {found.case.setup}"
    return f"  {error:+7.1%} of {measured:>10}  {found.case.label}: {what}"


def leave_out(cases: Sequence[Case]) -> list[str]:
    """For each source: the error on its rows with constants that were fitted without it."""
    timed = [case for case in cases if case.seconds is not None]
    sources = sorted({case.row["source"] for case in timed})
    lines, everything = [], []
    for source in sources:
        constants = fit(thinned([case for case in timed if case.row["source"] != source]), Constants())
        errors = [found.time_error for found in answer([c for c in timed if c.row["source"] == source], constants)]
        everything += errors
        lines.append(summary(f"  {source}", errors))
    return [summary("LEFT OUT, one source at a time", everything), *lines]


def thinned(cases: Sequence[Case], most: int = 240) -> list[Case]:
    """At most so many rows of each source, evenly spread: more say nothing new and take long."""
    groups: dict[str, list[Case]] = defaultdict(list)
    for case in cases:
        groups[case.row["source"]].append(case)
    return [case for group in groups.values() for case in group[:: -(-len(group) // most)]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="+", metavar="FILE")
    parser.add_argument("--fit", action="store_true", help="print constants fitted to these files")
    parser.add_argument("--leave-out", action="store_true", help="fit without each source, and show the error on it")
    arguments = parser.parse_args()
    try:
        cases, left_out = cases_of(read_rows(arguments.files))
    except ConfigurationError as error:
        parser.error(str(error))
    print("\n".join(report(answer(cases), left_out)))
    if arguments.fit:
        found = fit(thinned([case for case in cases if case.seconds is not None]), Constants())
        print("\nFITTED\n" + "\n".join(f"  {name}={value:.3g}," for name, value in vars(found).items()))
    if arguments.leave_out:
        print("\n" + "\n".join(leave_out(cases)))


if __name__ == "__main__":
    main()

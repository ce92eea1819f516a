"""Which runs of an archive compare, and what more devices brought. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from lightning_hybrid.archive import Entry
from lightning_hybrid.metrics.scaling import Reference, Scaling, compare

__all__ = ["Group", "group_around", "group_runs", "reference_of"]


@dataclass(frozen=True, kw_only=True)
class Group:
    """Runs of one model on one kind of device in one precision."""

    runs: tuple[Entry, ...]
    """Those with a measured throughput, by devices and then by throughput."""
    baseline: Entry
    """Of the fewest devices, the run with which most others compare; then the fastest."""
    scalings: dict[str, Scaling] = field(default_factory=dict)
    """Id of each other run -> how it compares with the baseline, or why it does not."""

    @property
    def by_tokens(self) -> bool:
        """Whether all of them count tokens, which then are compared instead of samples."""
        return all(run.result.tokens_per_second for run in self.runs)

    @property
    def unit(self) -> str:
        """What the throughput counts."""
        return "tokens/s" if self.by_tokens else "samples/s"

    def rate(self, run: Entry) -> float:
        """Return a run's tokens per second, or samples per second."""
        return (run.result.tokens_per_second if self.by_tokens else run.result.samples_per_second) or 0.0


def group_runs(entries: Iterable[Entry]) -> list[Group]:
    """Return the groups of the runs that ended in order with a throughput; the largest group first."""
    found: dict[tuple[str, str, str, str], list[Entry]] = {}
    for entry in entries:
        if entry.result.is_good and entry.model.num_parameters > 0:
            found.setdefault(_key(entry), []).append(entry)
    groups = [_group(runs) for runs in found.values()]
    return sorted(groups, key=lambda group: -len(group.runs))


def group_around(baseline: Entry, entries: Iterable[Entry]) -> Group:
    """Return the group of a given baseline, with the runs among ``entries`` of its model, device and precision."""
    found = {
        entry.id: entry for entry in (*entries, baseline) if entry.result.is_good and _key(entry) == _key(baseline)
    }
    return _compared(list(found.values()), baseline)


def _key(entry: Entry) -> tuple[str, str, str, str]:
    return entry.model.hash, entry.hardware.device, entry.hardware.kind, entry.settings.precision


def _group(runs: Sequence[Entry]) -> Group:
    fewest = min(run.hardware.num_devices for run in runs)
    candidates = [run for run in runs if run.hardware.num_devices == fewest]

    def worth(candidate: Entry) -> tuple[int, float, str]:
        compared = sum(compare(reference_of(run), reference_of(candidate)).speedup is not None for run in runs)
        return compared, candidate.result.samples_per_second or 0.0, candidate.id

    # Many runs may have one batch; each batch needs to be tried once only.
    batches = {run.batch.global_size: run for run in sorted(candidates, key=lambda r: r.result.samples_per_second or 0)}
    return _compared(runs, max(batches.values(), key=worth))


def _compared(runs: Sequence[Entry], baseline: Entry) -> Group:
    order = sorted(runs, key=lambda run: (run.hardware.num_devices, -(run.result.samples_per_second or 0.0), run.id))
    scalings = {run.id: compare(reference_of(run), reference_of(baseline)) for run in order if run.id != baseline.id}
    return Group(runs=tuple(order), baseline=baseline, scalings=scalings)


def reference_of(entry: Entry) -> Reference:
    """Return what an entry says of its throughput, and what must be equal for another run to compare with it."""
    return Reference(
        num_devices=entry.hardware.num_devices,
        samples_per_second=entry.result.samples_per_second,
        tokens_per_second=entry.result.tokens_per_second,
        global_batch_size=entry.batch.global_size,
        num_data_ranks=entry.degrees.data_parallel_size,
        model=entry.model.hash,
        precision=entry.settings.precision,
        hardware=entry.hardware.kind,
    )

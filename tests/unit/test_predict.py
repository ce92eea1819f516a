"""Which schedule is predicted to be fastest: exact answers for known times, and the reasons to stay with 1F1B."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lightning_hybrid.archive import Batch, Entry, Result, Settings, fastest_schedule
from lightning_hybrid.errors import ConfigurationError
from lightning_hybrid.pipeline.predict import Chain, Times, average, fastest, predict
from tests.unit.archive_entries import layout, make_entry

EVEN = Chain(blocks=[1.0] * 8, num_inputs=[1] * 8)
"""Eight equal blocks; one tensor travels between them."""
IDEAL = Times(forward=8.0, backward=16.0, backward_input=8.0, backward_weight=8.0, prologue=0.0, prologue_per_block=0.0)
"""One second for a block's forward, two for its backward, nothing for anything else."""


def seconds(
    chain: Chain, times: Times, transfer: float = 0.0, ranks: int = 2, microbatches: int = 8
) -> dict[str, float]:
    return {f.spec.name: f.seconds for f in predict(chain, times, transfer, ranks, microbatches)}


def test_textbook_times() -> None:
    """1F1B: (m + p - 1) turns of one rank's forward and backward; interleaving over v stages: m + (p - 1) / v turns."""
    found = seconds(EVEN, IDEAL)
    turn = 4 * 3.0
    assert found["1F1B"] == pytest.approx((8 + 1) * turn)
    assert found["Interleaved1F1B"] == pytest.approx((8 + 1 / 2) * turn)
    assert found["ZBVZeroBubble"] < found["Interleaved1F1B"]
    assert fastest(predict(EVEN, IDEAL, 0.0, 2, 8)).spec.name != "1F1B"


def test_a_dear_prologue_or_split_goes_to_1f1b() -> None:
    """A stage more on each rank begins each of its forwards with a prologue; a split backward may cost more."""
    dear = predict(EVEN, replace(IDEAL, prologue=2.0, backward_weight=14.0), 0.0, 2, 8)
    assert fastest(dear).spec.name == "1F1B"
    split = seconds(EVEN, replace(IDEAL, backward_weight=14.0))
    assert split["Interleaved1F1B"] < split["1F1B"] < split["ZBVZeroBubble"]


def test_a_prologue_is_longer_for_later_stages() -> None:
    later = replace(IDEAL, prologue_per_block=0.5)
    longer = seconds(EVEN, later, ranks=4)["1F1B"]
    assert longer > seconds(EVEN, IDEAL, ranks=4)["1F1B"]
    assert seconds(EVEN, later)["1F1B"] < seconds(EVEN, replace(later, prologue=4.0))["1F1B"]


def test_a_slow_transfer_is_paid_for_at_every_boundary() -> None:
    fast, slow = seconds(EVEN, IDEAL), seconds(EVEN, IDEAL, transfer=0.5)
    assert all(slow[name] > fast[name] for name in fast)


def test_two_inputs_are_not_split() -> None:
    """A stage that gets two tensors runs its whole backward as the inputs' half; the half's own time does not count."""
    two = Chain(blocks=EVEN.blocks, num_inputs=[2] * 8)
    dear = replace(IDEAL, backward_input=80.0, backward_weight=80.0)
    assert seconds(two, dear)["ZBVZeroBubble"] < seconds(EVEN, dear)["ZBVZeroBubble"] / 2


def test_heavy_ends_count() -> None:
    """A head as dear as two blocks takes two blocks' time on the last stage."""
    headed = Chain(blocks=[1.0] * 6, after=2.0, num_inputs=[1] * 6)
    assert seconds(headed, IDEAL)["1F1B"] == pytest.approx(seconds(EVEN, IDEAL)["1F1B"])


def test_only_what_can_run_is_looked_at() -> None:
    assert set(seconds(replace(EVEN, blocks=[1.0] * 3, num_inputs=[1] * 3), IDEAL)) == {"1F1B", "Eager1F1B"}
    assert "Interleaved1F1B" not in seconds(EVEN, IDEAL, microbatches=5)
    assert "DualPipeV" not in seconds(EVEN, IDEAL, ranks=4, microbatches=4)
    with pytest.raises(ConfigurationError, match="1 micro-batches on 2 ranks"):
        predict(EVEN, IDEAL, 0.0, 2, 1)


def test_small_gains_go_to_1f1b() -> None:
    first, second, *_ = predict(EVEN, IDEAL, 0.0, 2, 8)
    assert first.spec.name == "1F1B"
    assert fastest([first, replace(second, seconds=0.98 * first.seconds)]) is first
    better = replace(second, seconds=0.96 * first.seconds)
    assert fastest([first, better]) is better


def test_times_are_averaged_over_ranks() -> None:
    assert average([IDEAL, replace(IDEAL, forward=10.0)]) == replace(IDEAL, forward=9.0)


# ---- measured --------------------------------------------------------------------------------------------------------


def entry(name: str, rate: float, **changes: object) -> Entry:
    base = make_entry(name)
    return replace(
        base,
        settings=replace(base.settings, schedule=name, num_microbatches=8),
        result=Result(status="ok", step_time=1.0, samples_per_second=rate),
        batch=Batch(size_per_data_rank=16),
        **changes,  # type: ignore[arg-type]
    )


def measured(entries: list[Entry], **changes: object) -> str | None:
    base = make_entry("any")
    asked = {"precision": base.settings.precision, "num_microbatches": 8, "size_per_data_rank": 16} | changes
    found = fastest_schedule(entries, base.model, base.hardware, base.degrees, **asked)  # type: ignore[arg-type]
    return None if found is None else found.settings.schedule


def test_the_fastest_measured_schedule() -> None:
    slow, fast = entry("1F1B", 10.0), entry("DualPipeV", 12.0)
    assert measured([]) is None
    assert measured([slow]) == "1F1B"
    assert measured([slow, fast]) == measured([fast, slow]) == "DualPipeV"


def test_other_runs_do_not_count() -> None:
    slow, fast = entry("1F1B", 10.0), entry("DualPipeV", 12.0)
    settings: Settings = replace(fast.settings, num_microbatches=4)
    others = [
        replace(fast, settings=settings),
        replace(fast, settings=replace(fast.settings, precision="bf16-mixed")),
        replace(fast, batch=Batch(size_per_data_rank=64)),
        replace(fast, degrees=layout(1, 2, 4)),
        replace(fast, model=replace(fast.model, hash="0" * 16)),
        replace(fast, hardware=replace(fast.hardware, kind="another")),
        replace(fast, result=Result(status="failed")),
        replace(fast, settings=replace(fast.settings, schedule="none")),
    ]
    for other in others:
        assert measured([slow, other]) == "1F1B"
    assert measured([slow, fast], num_microbatches=4) is None


def test_without_split_backwards() -> None:
    names = {f.spec.name for f in predict(EVEN, IDEAL, 0.0, 2, 8, splits=False)}
    assert names == {"1F1B", "Eager1F1B", "Interleaved1F1B"}

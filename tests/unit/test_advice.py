"""Advice with exact inputs: just above and just below each threshold, and what it says."""

from __future__ import annotations

import pytest

from lightning_hybrid.layout import Layout
from lightning_hybrid.metrics.advice import BatchAndRate, Figures, Link, give_advice, links_of
from lightning_hybrid.metrics.breakdown import PARTS, Breakdown, message_seconds
from lightning_hybrid.pipeline.timeline import Mark

CUBE = Layout(data_parallel_size=2, tensor_parallel_size=2, pipeline_parallel_size=2)


def step(**seconds: float) -> Breakdown:
    return Breakdown(seconds=dict.fromkeys(PARTS, 0.0) | seconds)


def said(figures: Figures) -> dict[str, str]:
    return {advice.key: advice.text for advice in give_advice(figures)}


def test_nothing_known_and_nothing_wrong_say_nothing() -> None:
    assert said(Figures()) == {}
    assert said(Figures(layout=CUBE, breakdowns=[step()] * 8)) == {}  # a step without length
    fine = [step(compute=0.7, communication_tensor=0.2, bubble=0.1)] * 8
    assert said(Figures(layout=CUBE, breakdowns=fine, num_microbatches=4)) == {}


@pytest.mark.parametrize(
    ("axis", "change"),
    [
        ("tensor", "tensor_parallel_size=1 instead of 2 and pipeline_parallel_size=4 instead of 2"),
        ("data_shard", "data_parallel_size=1 instead of 2 and pipeline_parallel_size=4 instead of 2"),
        ("data_replicate", "data_parallel_size=1 instead of 2 and pipeline_parallel_size=4 instead of 2"),
        ("pipeline", "pipeline_parallel_size=1 instead of 2 and data_parallel_size=4 instead of 2"),
        ("world", "global gradient norm"),
        ("unknown", "collectives of your own"),
    ],
)
def test_communication_above_30_percent_names_the_degree_to_change(axis: str, change: str) -> None:
    much = {f"communication_{axis}": 0.25, "communication_unknown" if axis != "unknown" else "bubble": 0.06}
    if axis == "unknown":
        much = {"communication_unknown": 0.31}
    above = said(Figures(layout=CUBE, breakdowns=[step(compute=1 - sum(much.values()), **much)] * 8))
    assert "is 31% of the step (advised: at most 30%)" in above["communication"]
    assert f"on the {axis} axis" in above["communication"]
    assert change in above["communication"]
    below = {name: 0.29 / 0.31 * seconds for name, seconds in much.items()}
    assert said(Figures(layout=CUBE, breakdowns=[step(compute=0.71, **below)] * 8)) == {}


def test_communication_counts_over_all_ranks() -> None:
    """One of two ranks at 50 %, the other at 0: a quarter of the job."""
    layout = Layout(data_parallel_size=2)
    one = [step(compute=1.0, communication_data_shard=1.0), step(compute=1.0, other=1.0)]
    assert said(Figures(layout=layout, breakdowns=one)) == {}


@pytest.mark.parametrize(("num_microbatches", "applies"), [(1, True), (7, True), (8, False), (9, False)])
def test_micro_batches_fewer_than_twice_the_stages(num_microbatches: int, applies: bool) -> None:
    layout = Layout(pipeline_parallel_size=4)
    found = give_advice(Figures(layout=layout, num_microbatches=num_microbatches))
    assert [advice.key for advice in found] == ["microbatches"] * applies
    if num_microbatches == 1:
        assert "Use num_microbatches=8" in found[0].text
        assert "idle 27% of the time instead of 75%" in found[0].text  # 3 / 11 and 3 / 4
        assert found[0].is_certain


def test_a_slow_rank_is_named_with_its_coordinate() -> None:
    ranks = [step(compute=1.0, communication_data_shard=0.2) for _ in range(8)]
    ranks[5] = step(compute=1.2)
    (text,) = said(Figures(layout=CUBE, breakdowns=ranks)).values()
    assert text.startswith("Rank 5 (pipeline 1, data 0, tensor 1) computes 1.20 times as long")
    assert "200 ms more" in text
    assert said(Figures(layout=CUBE, breakdowns=ranks, share_cores=True)) == {}
    ranks[5] = step(compute=1.14, communication_data_shard=0.06)
    assert said(Figures(layout=CUBE, breakdowns=ranks)) == {}


def test_a_slow_stage_is_not_a_slow_rank() -> None:
    """Both tensor ranks of the first pipeline coordinate work 2 s, those of the second 1 s."""
    layout = Layout(tensor_parallel_size=2, pipeline_parallel_size=2)
    found = said(Figures(layout=layout, breakdowns=[step(compute=2.0)] * 2 + [step(compute=1.0, bubble=1.0)] * 2))
    assert list(found) == ["slow stage 0"]
    text = "Pipeline coordinate 0 (ranks 0, 1) computes 1.33 times the mean of all (2000 of 1500 ms"
    assert text in found["slow stage 0"]
    even = [step(compute=1.2)] * 2 + [step(compute=1.0)] * 2
    assert said(Figures(layout=layout, breakdowns=even)) == {}


def test_a_slow_link_is_named_and_waiting_for_a_late_rank_is_not_one() -> None:
    """Tensor ranks 4 and 5 need 300 ms for what others do in 50; in 0 and 1 it is rank 0 that comes late."""
    seconds = [0.05] * 8
    seconds[1], seconds[4], seconds[5] = 0.4, 0.3, 0.32
    ranks = [step(compute=1.0, communication_tensor=s) for s in seconds]
    links = links_of(CUBE, ranks)
    assert [(link.ranks, link.seconds) for link in links if link.axis == "tensor"] == [
        ((0, 1), 0.05), ((2, 3), 0.05), ((4, 5), 0.3), ((6, 7), 0.05),
    ]  # fmt: skip
    assert [link.ranks for link in links if link.axis == "data_shard"] == [(0, 2), (1, 3), (4, 6), (5, 7)]
    (text,) = said(Figures(layout=CUBE, breakdowns=ranks, links=links)).values()
    assert "tensor link of ranks 4, 5 (pipeline 1, data 0, tensor 0 to pipeline 1, data 0, tensor 1)" in text
    assert "takes 300 ms of a step, others of that axis 50 ms" in text
    near = [link._replace(seconds=min(link.seconds, 0.099)) for link in links]
    assert said(Figures(layout=CUBE, breakdowns=ranks, links=near)) == {}
    alone = [Link("tensor", (0, 1), 0.3)]  # nothing to compare it with
    assert said(Figures(layout=CUBE, breakdowns=ranks, links=alone)) == {}


def test_both_directions_of_a_pipelines_link_count_together() -> None:
    layout = Layout(pipeline_parallel_size=3)
    waits = [{(1, 0): 0.2}, {(0, 1): 0.3, (2, 1): 0.01}, {}]
    links = links_of(layout, [step(compute=1.0)] * 3, waits)
    assert links == [Link("pipeline", (0, 1), 0.5), Link("pipeline", (1, 2), 0.01)]
    assert list(said(Figures(layout=layout, breakdowns=[step(compute=1.0)] * 3, links=links))) == [
        "slow link pipeline (0, 1)"
    ]


def test_messages_on_their_way_by_sender() -> None:
    """Stage 1 waits 3 s: 2 s until stage 0 has computed, 1 s for the message. Then one that was there already."""
    timeline = {
        0: [Mark("F", 0, 0, 0, 2), Mark("F", 0, 1, 2, 3), Mark("WAIT_B", 0, 0, 3, 7)],
        1: [Mark("WAIT_F", 1, 0, 0, 3), Mark("F", 1, 0, 3, 4), Mark("WAIT_F", 1, 1, 4, 4), Mark("B", 1, 0, 4, 6.5)],
    }
    assert message_seconds(timeline, 1) == {0: 1.0}
    assert message_seconds(timeline, 0) == {1: 0.5}
    assert message_seconds({0: [Mark("WAIT_F", 1, 0, 0, 3)]}, 0) == {}  # the sender is not known


OLD = BatchAndRate(global_batch_size=16, learning_rate=1e-3, optimizer="AdamW", entry="run-7")


@pytest.mark.parametrize(
    ("here", "applies"),
    [
        (BatchAndRate(global_batch_size=64, learning_rate=1e-3, optimizer="AdamW"), True),
        (BatchAndRate(global_batch_size=64, learning_rate=2e-3, optimizer="AdamW"), False),
        (BatchAndRate(global_batch_size=16, learning_rate=1e-3, optimizer="AdamW"), False),
        (BatchAndRate(global_batch_size=64, learning_rate=1e-3, optimizer="SGD"), False),
        (None, False),
    ],
)
def test_a_changed_batch_without_the_learning_rate(here: BatchAndRate | None, applies: bool) -> None:
    found = give_advice(Figures(here=here, before=OLD))
    assert bool(found) == applies
    if applies:
        assert "64 samples where entry run-7 of the archive had 16" in found[0].text
        assert "by 2 for Adam" in found[0].text and "by 4 for SGD" in found[0].text
    assert give_advice(Figures(here=here)) == []


def test_waiting_for_data_above_10_percent_names_the_rank() -> None:
    ranks = [step(compute=0.9, data_wait=0.1), step(compute=0.86, data_wait=0.14)]
    (text,) = said(Figures(breakdowns=ranks)).values()
    assert "12% of the step" in text and "rank 1 (140 ms)" in text
    assert said(Figures(breakdowns=ranks[:1] * 2)) == {}

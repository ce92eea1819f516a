"""Measured links: curves, what is slow, what an exchange takes, and which axis a slow link carries."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from lightning_hybrid.errors import ConfigurationError
from lightning_hybrid.layout import Layout
from lightning_hybrid.planner import Cluster, ModelProfile, Setup, estimate, plan
from lightning_hybrid.planner.collectives import Group, ring, send
from lightning_hybrid.planner.constants import FITTED
from lightning_hybrid.planner.links import Collective, Curve, Device, Measured, Pair, find_slow
from lightning_hybrid.planner.placement import Placement
from lightning_hybrid.planner.topology import launch_lines, place

GPT = ModelProfile.from_sizes(num_layers=24, hidden_size=2048, num_heads=16, vocab_size=50304, seq_length=2048)


def ring_points(size: int, rate: float, passes: int) -> tuple[tuple[float, float], ...]:
    bytes_ = (2.0**12, 2.0**20, 2.0**24, 2.0**28)
    return tuple((b, passes * (2e-5 + (size - 1) / size * b / rate)) for b in bytes_)


def measured(num: int, per_host: int, slow: dict[tuple[int, int], float] | None = None) -> Cluster:
    """H100s whose links have 300 GB/s (40 GB/s between hosts); pairs of ``slow`` so many times less."""
    devices = tuple(
        Device(
            rank=r,
            host=f"host{r // per_host}",
            name="H100",
            type="cuda",
            memory=80,
            tflops={"bf16": 700},
            bandwidth=3000,
        )
        for r in range(num)
    )
    pairs = []
    for a in range(num):
        for b in range(a + 1, num):
            usual = 300e9 if a // per_host == b // per_host else 40e9
            pairs.append(Pair(ranks=(a, b), latency=1e-5, rate=usual / (slow or {}).get((a, b), 1.0)))
    collectives = []
    for stride in (1, 2, 4, 8):
        for size in (2, 4, 8):
            if stride * size <= num:
                within = stride * size <= per_host
                worst = max(
                    (
                        (slow or {}).get((a, b), 1.0)
                        for a in range(num)
                        for b in range(a + 1, num)
                        if Placement().share_group(a, b, Group(size, stride))
                    ),
                    default=1.0,
                )
                rate = (300e9 if within else 40e9) / worst
                for op in ("all_reduce", "all_gather", "reduce_scatter"):
                    points = ring_points(size, rate, 2 if op == "all_reduce" else 1)
                    collectives.append(Collective(op=op, size=size, stride=stride, points=points))
    found = Measured(backend="nccl", devices=devices, pairs=tuple(pairs), collectives=tuple(collectives))
    return replace(Cluster.named("H100", num, per_node=per_host), measured=replace(found, slow=find_slow(found)))


def test_a_line_through_measured_points_is_found_again():
    latency, rate = Curve(tuple((b, 3e-5 + b / 2e11) for b in (1e3, 1e6, 1e8))).line
    assert latency == pytest.approx(3e-5) and rate == pytest.approx(2e11)
    assert Curve(((1e6, 0.5),)).line == (0.0, 2e6)
    latency, rate = Curve(((1e3, 2e-3), (1e6, 1e-3))).line  # noise: more was faster
    assert latency > 0 and rate == pytest.approx(1e9)


def test_a_curve_joins_its_points_and_goes_on_at_the_rate():
    curve = Curve(((1e3, 1e-4), (1e6, 3e-4), (1e8, 1e-2)))
    assert curve.seconds(10) == 1e-4
    assert curve.seconds(1e6) == pytest.approx(3e-4)
    assert curve.seconds(0.5e8 + 0.5e6) == pytest.approx((3e-4 + 1e-2) / 2)
    assert curve.seconds(2e8) == pytest.approx(1e-2 + 1e8 / curve.line[1])
    with pytest.raises(ValueError, match="ascending"):
        Curve(((1e6, 1.0), (1e3, 2.0)))


def test_measured_exchanges_count_instead_of_nominal_ones():
    cluster = measured(8, 8)
    assert ring(Group(4, 2), 2**24, cluster, FITTED) == pytest.approx(2e-5 + 0.75 * 2**24 / 300e9)
    assert ring(Group(4, 1), 2**24, cluster, FITTED, passes=2) == pytest.approx(2 * (2e-5 + 0.75 * 2**24 / 300e9))
    assert send(Group(2, 4), 2**24, cluster, FITTED) == pytest.approx(FITTED.handover + 1e-5 + 2**24 / 300e9)


def test_groups_that_were_not_measured_follow_from_like_ones():
    cluster = measured(8, 8)
    expected = ring(Group(8, 1), 2**26, cluster, FITTED)
    few = replace(cluster.measured, collectives=tuple(c for c in cluster.measured.collectives if c.size == 4))
    assert ring(Group(8, 1), 2**26, replace(cluster, measured=few), FITTED) == pytest.approx(expected, rel=0.15)
    gathers = replace(few, collectives=tuple(c for c in few.collectives if c.op == "all_gather"))
    twice = ring(Group(8, 1), 2**26, replace(cluster, measured=gathers), FITTED, passes=2)
    assert twice == pytest.approx(2 * expected, rel=0.15)
    none = replace(cluster, measured=replace(few, collectives=()))  # nothing was measured: nominal
    assert ring(Group(8, 1), 2**26, none, FITTED) == ring(Group(8, 1), 2**26, Cluster.named("H100", 8), FITTED)


def test_slow_links_are_named():
    found = measured(8, 8, {(2, 5): 10.0}).measured.slow
    assert [slow.what for slow in found] == ["ranks 2 and 5"]
    assert "30 GB/s" in found[0].text and "300 GB/s" in found[0].text
    assert not measured(8, 8, {(2, 5): 1.5}).measured.slow


def test_a_rank_or_host_all_of_whose_links_are_slow_is_named_once():
    of_rank = {(min(3, b), max(3, b)): 5.0 for b in range(8) if b != 3}
    assert [slow.what for slow in measured(8, 8, of_rank).measured.slow] == ["rank 3 on host host0"]
    of_host = {(a, b): 4.0 for a in range(8) for b in range(8) if a < b and (a // 2 == 1) != (b // 2 == 1)}
    assert [slow.what for slow in measured(8, 2, of_host).measured.slow] == ["host host1"]


def test_a_slow_device_is_named():
    cluster = measured(4, 4)
    lame = replace(cluster.measured.devices[3], tflops={"bf16": 200})
    found = find_slow(replace(cluster.measured, devices=(*cluster.measured.devices[:3], lame)))
    assert [slow.what for slow in found] == ["rank 3 on host host0"] and found[0].share == pytest.approx(200 / 700)


def test_the_slow_link_gets_the_lighter_axis():
    cluster = measured(4, 4, {(2, 3): 10.0})
    setup = Setup(
        layout=Layout(data_parallel_size=2, tensor_parallel_size=2), micro_batch=4, num_microbatches=4, zero=1
    )
    placed = place(GPT, cluster, setup, constants=FITTED)
    usual = estimate(GPT, cluster, setup)
    assert usual.parts["tensor"] > 5 * usual.parts["data"]  # the heavier axis, on the slow link
    assert placed.estimate.seconds < 0.9 * usual.seconds == pytest.approx(0.9 * placed.usual_seconds)
    tensor, data = Group(2, 1), Group(2, 2)
    assert not placed.placement.share_group(2, 3, tensor)
    assert any("not the tensor axis" in reason for reason in placed.reasons), placed.reasons
    even = place(GPT, measured(4, 4), setup, constants=FITTED)
    assert even.placement.usual and not even.reasons  # nothing to gain: the usual order
    assert placed.placement.share_group(2, 3, data) or "carries nothing" in placed.reasons[1]


def test_a_plan_on_a_cluster_with_a_slow_link_goes_around_it():
    best = plan(GPT, measured(4, 4, {(0, 1): 20.0}), global_batch=16).best
    whole = plan(GPT, measured(4, 4), global_batch=16).best
    assert best.placed is not None and best.seconds == best.placed.estimate.seconds
    assert best.seconds < 1.1 * whole.seconds
    assert not best.placed.placement.share_group(0, 1, best.setup.tensor_group)


def test_devices_with_slow_links_stay_idle_where_others_do_the_work():
    cluster = measured(4, 4, {(0, 1): 50.0, (0, 2): 50.0, (0, 3): 50.0})
    setup = Setup(layout=Layout(tensor_parallel_size=2), micro_batch=4, num_microbatches=4)
    placed = place(GPT, cluster, setup, constants=FITTED)
    assert 0 not in placed.placement.order


def test_how_to_start_is_said_in_the_terms_of_the_launcher():
    cluster = measured(8, 4)
    assert launch_lines(Placement((4, 5, 6, 7, 0, 1, 2, 3)), cluster) == [
        "hosts in the order host1, host0 (hostfile, or torchrun's --node_rank 0, 1, ...)"
    ]
    assert launch_lines(Placement((0, 2, 1, 3, 4, 5, 6, 7)), cluster) == ["CUDA_VISIBLE_DEVICES=0,2,1,3 on host0"]
    assert "host0:0, host1:0" in launch_lines(Placement((0, 4, 1, 5, 2, 6, 3, 7)), cluster)[0]
    with pytest.raises(ConfigurationError, match="once"):
        Placement((0, 0))


def test_a_profile_is_read_as_it_was_written(tmp_path: Path):
    cluster = measured(4, 2, {(0, 1): 10.0})
    (tmp_path / "cluster.json").write_text(cluster.to_json())
    assert Cluster.from_json(tmp_path / "cluster.json") == cluster


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema": 99}, "update lightning-hybrid"),
        ({"measured": {"backend": "nccl"}}, "devices"),
        (
            {
                "measured": {
                    "backend": "nccl",
                    "devices": [],
                    "collectives": [{"op": "sing", "size": 2, "stride": 1, "points": []}],
                }
            },
            "sing",
        ),
    ],
)
def test_wrong_profiles_are_refused(tmp_path: Path, change: dict, message: str):
    document = json.loads(measured(4, 4).to_json()) | change
    (tmp_path / "cluster.json").write_text(json.dumps(document))
    with pytest.raises(ConfigurationError, match=message):
        Cluster.from_json(tmp_path / "cluster.json")


def test_orders_of_axes_count_nodes_as_they_are():
    whole = Placement(tuple(range(8)))
    crossed = Placement((0, 4, 1, 5, 2, 6, 3, 7))
    assert whole.spread(Group(2, 1), 4) == (2, 1) and crossed.spread(Group(2, 1), 4) == (1, 2)
    assert crossed.spread(Group(4, 2), 4) == (4, 1)
    cluster = Cluster.named("H100", 8, per_node=4)
    fast = ring(Group(2, 1), 2**26, cluster, FITTED)
    assert ring(Group(2, 1), 2**26, replace(cluster, placement=crossed), FITTED) > 3 * fast

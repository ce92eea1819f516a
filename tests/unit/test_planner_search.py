"""Which plans are found, in which order, and why others are not."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from lightning_hybrid.errors import ConfigurationError
from lightning_hybrid.layout import Layout
from lightning_hybrid.planner import Cluster, ModelProfile, Planning, Setup, estimate, plan
from lightning_hybrid.planner.rules import ADVICE, LIMITS, MEMORY_SHARE, advise, first_problem
from lightning_hybrid.planner.search import CLOSE
from lightning_hybrid.planner.setup import describe

LLAMA_405B = ModelProfile.from_sizes(
    name="Llama 3.1 405B",
    num_layers=126,
    hidden_size=16384,
    num_heads=128,
    num_kv_heads=8,
    ffn_size=53248,
    gated_mlp=True,
    vocab_size=128256,
    seq_length=8192,
)
SMALL = {  # the models of case PLAN-1
    "8 heads, 2 kv": {"num_layers": 10, "num_heads": 8, "num_kv_heads": 2, "hidden_size": 512, "vocab_size": 50257},
    "12 heads": {"num_layers": 12, "num_heads": 12, "hidden_size": 768},
    "9 heads": {"num_layers": 5, "num_heads": 9, "hidden_size": 576},
}


def small_cluster(num_devices: int, memory: float = 16) -> Cluster:
    cluster = Cluster.named("V100-16GB", num_devices)
    return replace(cluster, gpu=replace(cluster.gpu, memory=memory))


def assert_possible(planning: Planning) -> None:
    profile = planning.profile
    for made in planning.plans:
        setup, layout = made.setup, made.setup.layout
        tensor, pipeline = layout.tensor_parallel_size, layout.pipeline_parallel_size
        assert setup.num_devices == layout.data_parallel_size * tensor * pipeline <= planning.cluster.num_devices
        assert profile.num_heads % tensor == profile.num_kv_heads % tensor == 0
        assert pipeline * setup.stages_per_rank <= profile.num_layers == sum(made.estimate.layers)
        assert setup.global_batch == planning.global_batch
        assert made.estimate.peak_memory <= MEMORY_SHARE * planning.cluster.gpu.memory * 2**30
        assert (made.behind == "") == (made is planning.best)


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("devices", [5, 6, 7, 12])
def test_odd_numbers_of_devices_get_possible_degrees(name: str, devices: int):
    profile = ModelProfile.from_sizes(**SMALL[name], seq_length=512)
    planning = plan(profile, small_cluster(devices), global_batch=30)
    assert_possible(planning)
    assert planning.idle == devices - planning.best.setup.num_devices >= 0
    for found in planning.rejected:
        assert found.reason and not any(describe(made.setup.layout) == found.what for made in planning.plans)


def test_the_best_plan_is_the_fastest_or_as_good_as_it():
    planning = plan(ModelProfile.from_sizes(**SMALL["12 heads"], seq_length=512), small_cluster(8), global_batch=32)
    fastest = min(made.seconds for made in planning.plans)
    assert planning.best.seconds <= fastest * (1 + CLOSE)
    rest = [made.seconds for made in planning.plans if made.seconds > fastest * (1 + CLOSE)]
    assert rest == sorted(rest)
    assert planning.best.estimate.seconds == pytest.approx(
        estimate(planning.profile, planning.cluster, planning.best.setup).seconds
    )


def test_405b_on_16384_devices_is_planned_within_a_second():
    cluster = Cluster.named("H100", 16384)
    start = time.process_time()
    planning = plan(LLAMA_405B, cluster, global_batch=2048)
    assert time.process_time() - start < 1
    assert_possible(planning)
    best = planning.best
    assert best.setup.layout.tensor_parallel_size == 8 and best.setup.layout.pipeline_parallel_size > 1
    assert 0.2 < best.estimate.mfu < 0.45


def test_the_published_layout_of_405b_takes_about_its_published_time():
    """Llama 3 (Dubey et al. 2024, table 4): TP 8, PP 16, DP 128, 16 M tokens: 41 % MFU (400 TFLOP/s a GPU)."""
    layout = Layout(data_parallel_size=128, tensor_parallel_size=8, pipeline_parallel_size=16)
    setup = Setup(
        layout=layout,
        micro_batch=1,
        num_microbatches=16,
        schedule="Interleaved1F1B",
        stages_per_rank=4,
        sequence_parallel=True,
        reshard=False,
    )
    found = estimate(LLAMA_405B, Cluster.named("H100", 16384), setup)
    assert found.mfu == pytest.approx(0.41, abs=0.07)


def test_what_ran_counts_instead_of_rules_and_estimates():
    profile = ModelProfile.from_sizes(**SMALL["12 heads"], seq_length=512)
    cluster = small_cluster(8)
    first = plan(profile, cluster, global_batch=32)
    failed, slow = first.best.setup.layout, Layout(data_parallel_size=2, pipeline_parallel_size=4)
    again = plan(profile, cluster, global_batch=32, measured={failed: None, slow: 1e-6})
    assert again.best.setup.layout == slow and again.best.measured and again.best.remarks == ()
    assert all(made.setup.layout != failed for made in again.plans)
    assert any(found.what == describe(failed) and "ran out of memory" in found.reason for found in again.rejected)


def test_what_ran_across_nodes_is_not_judged_by_a_rule():
    profile = ModelProfile.from_sizes(num_layers=8, hidden_size=1024, num_heads=16, seq_length=512)
    across, cluster = Layout(tensor_parallel_size=16), Cluster.named("A100", 16)
    before = plan(profile, cluster, global_batch=16, idle=False)
    assert any(found.what == describe(across) and "tensor within a node" in found.reason for found in before.rejected)
    after = plan(profile, cluster, global_batch=16, idle=False, measured={across: 1e-6})
    assert after.best.setup.layout == across and after.best.remarks == ()


def test_too_little_memory_is_refused_with_what_it_would_take():
    profile = ModelProfile.from_sizes(**SMALL["12 heads"], seq_length=512)
    planning = plan(profile, small_cluster(2, memory=1), global_batch=8)
    assert planning.plans == ()
    with pytest.raises(
        ConfigurationError, match=r"at least \d+\.\d GiB on a device, of which 0\.8 may be used \(room in memory: "
    ):
        _ = planning.best
    with pytest.raises(ConfigurationError, match="global_batch=0"):
        plan(profile, small_cluster(2), global_batch=0)


def test_fewer_devices_are_taken_where_more_are_no_use():
    """48 devices do not divide 128 samples, and no degrees use six for one sample of 9 heads and 5 blocks."""
    small = ModelProfile.from_sizes(num_layers=5, hidden_size=1152, num_heads=9, seq_length=1024, vocab_size=50257)
    assert plan(small, Cluster.named("H100", 48), global_batch=128).idle == 16
    assert plan(small, Cluster.named("H100", 6), global_batch=1).idle == 3
    assert plan(small, Cluster.named("H100", 10), global_batch=3).idle == 7  # three, not half of a half


def test_memory_is_saved_only_where_it_must_be():
    profile = ModelProfile.from_sizes(num_layers=32, hidden_size=4096, num_heads=32, vocab_size=32000, seq_length=2048)
    roomy = plan(profile, Cluster.named("H200", 8), global_batch=64)
    assert roomy.best.setup.recompute == "none"
    tight = plan(profile, replace(Cluster.named("H200", 8), gpu=small_cluster(1, memory=24).gpu), global_batch=64)
    assert any(made.setup.recompute == "full" for made in tight.plans)


def test_compiled_blocks_get_nothing_that_they_cannot_do():
    profile = ModelProfile.from_sizes(**SMALL["12 heads"], seq_length=512)
    for compile in (False, True):
        planning = plan(profile, small_cluster(8), global_batch=32, compile=compile, most=1000)
        setups = [made.setup for made in planning.plans]
        assert any(setup.schedule == "ZBVZeroBubble" or setup.sequence_parallel for setup in setups) is not compile


def test_slow_networks_get_the_lighter_axes():
    """On a slow network shards stay within nodes, or the pipeline crosses it."""
    profile = ModelProfile.from_sizes(num_layers=32, hidden_size=4096, num_heads=32, vocab_size=32000, seq_length=2048)
    slow = plan(profile, Cluster.named("A100", 32, network_gbits=25), global_batch=512).best.setup.layout
    assert slow.pipeline_parallel_size > 1 or slow.replicate_size > 1


def setup(data: int, tensor: int, pipeline: int, count: int = 8, **settings: object) -> Setup:
    layout = Layout(data_parallel_size=data, tensor_parallel_size=tensor, pipeline_parallel_size=pipeline)
    return Setup(layout=layout, micro_batch=1, num_microbatches=count, **settings)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("rule", "broken"),
    [
        ("whole heads", setup(1, 16, 1)),
        ("tensor within a node", replace(setup(1, 1, 1), layout=Layout(tensor_parallel_size=3))),
        ("a block for each stage", setup(1, 1, 64, count=64, schedule="Interleaved1F1B", stages_per_rank=2)),
        ("a micro-batch for each rank", setup(1, 1, 8, count=4)),
        ("whole rounds", setup(1, 1, 4, count=9, schedule="Interleaved1F1B", stages_per_rank=2)),
    ],
)
def test_each_limit_is_found_by_name(rule: str, broken: Setup):
    profile = ModelProfile.from_sizes(num_layers=32, hidden_size=768, num_heads=12, num_kv_heads=6, seq_length=64)
    if rule == "tensor within a node":
        profile = ModelProfile.from_sizes(num_layers=32, hidden_size=768, num_heads=12, num_kv_heads=12, seq_length=64)
    problem = first_problem(profile, Cluster.named("H100", 64), broken)
    assert problem is not None and rule in problem
    assert any(limit.name == rule for limit in LIMITS)
    assert first_problem(profile, Cluster.named("H100", 64), setup(2, 2, 2)) is None


@pytest.mark.parametrize(
    ("rule", "broken"),
    [
        ("twice as many micro-batches as pipeline ranks", setup(1, 1, 8, count=8)),
        ("powers of two first", setup(1, 1, 6, count=12)),
        ("communication below a third", setup(1, 1, 16, count=16)),
        ("gathers within few nodes", setup(256, 1, 1)),
    ],
)
def test_each_advice_is_given_by_name(rule: str, broken: Setup):
    profile = ModelProfile.from_sizes(num_layers=32, hidden_size=4096, num_heads=32, seq_length=2048)
    cluster = Cluster.named("H100", 256)
    remarks = advise(profile, cluster, estimate(profile, cluster, broken))
    assert any(rule in remark for remark in remarks)
    assert any(advice.name == rule for advice in ADVICE)
    quiet = setup(4, 1, 2, count=64)
    assert advise(profile, cluster, estimate(profile, cluster, quiet)) == []


def test_arguments_are_those_of_the_strategy():
    import inspect

    from lightning_hybrid import Hybrid3DStrategy

    known = inspect.signature(Hybrid3DStrategy.__init__).parameters
    planning = plan(LLAMA_405B, Cluster.named("H100", 1024), global_batch=256)
    for made in planning.plans:
        assert set(made.arguments()) <= set(known)
        layout = made.setup.layout
        assert made.arguments()["data_parallel_size"] == layout.data_parallel_size
        Hybrid3DStrategy(**made.arguments())

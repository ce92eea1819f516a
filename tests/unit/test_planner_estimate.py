"""Predicted step times and memory beside published ones; each row names its source."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from benchmarks.planner_published import answer, regrets, report
from benchmarks.planner_rows import case_of, cases_of
from lightning_hybrid.errors import ConfigurationError
from lightning_hybrid.layout import Layout
from lightning_hybrid.planner import Cluster, Estimate, ModelProfile, Setup, estimate
from lightning_hybrid.planner.step import PARTS

KORTHIKANTI = {
    "source": "Korthikanti et al. 2022, table 5",
    "gpu": "A100-SXM-80GB",
    "vocab": 51200,
    "seq": 2048,
    "tp": 8,
    "zero_stage": 0,
    "precision": "fp16",
    "attention": "unfused",
    "file": "tests",
    "usable_time": True,
}
SELECTIVE = KORTHIKANTI | {"recompute": "selective", "seq_parallel": True}
FULL = KORTHIKANTI | {"recompute": "full", "seq_parallel": False}
GPT_175B = {"layers": 96, "hidden": 12288, "heads": 96, "ffn": 49152, "num_gpus": 64, "pp": 8, "vpp": 3}
GPT_175B |= {"schedule": "interleaved-1F1B", "micro_batch": 1, "global_batch": 64}
GPT_22B = {"layers": 48, "hidden": 6144, "heads": 64, "ffn": 24576, "num_gpus": 8, "micro_batch": 4, "global_batch": 4}
MPT = {
    "source": "MosaicML llm-foundry, MPT training benchmarks",
    "vocab": 50368,
    "seq": 2048,
    "zero_stage": 3,
    "precision": "amp_bf16",
    "attention": "flash",
    "arch": "MPT",
    "file": "tests",
    "usable_time": True,
}
MPT_70B = {"layers": 80, "hidden": 8192, "heads": 64, "ffn": 32768, "gpu": "H100-SXM-80GB", "recompute": "full"}
MPT_3B = {"layers": 32, "hidden": 2560, "heads": 20, "ffn": 10240, "gpu": "A100-SXM-80GB", "recompute": "none"}
LLAMA_7B = {
    "source": "IBM fms-fsdp, README",
    "arch": "llama",
    "gpu": "H100-80GB",
    "layers": 32,
    "hidden": 4096,
    "heads": 32,
    "ffn": 11008,
    "vocab": 32000,
    "seq": 4096,
    "num_gpus": 96,
    "dp_replicate": 12,
    "dp_shard": 8,
    "recompute": "none",
    "precision": "bf16",
    "attention": "SDPA flash-2",
    "compile": True,
    "micro_batch": 2,
    "global_batch": 192,
    "file": "tests",
    "usable_time": True,
}
BLOOM = {
    "source": "BigScience tr11, chronicles-prequel",
    "gpu": "A100-SXM-80GB",
    "inter_link": "4x100Gb/s Omni-Path per node",
    "arch": "gpt, tied",
    "layers": 72,
    "hidden": 14336,
    "heads": 64,
    "ffn": 57344,
    "vocab": 250880,
    "seq": 2048,
    "num_gpus": 384,
    "zero_stage": 1,
    "recompute": "full",
    "precision": "fp16",
    "attention": "unfused",
    "memory_def": "nvidia-smi",
    "file": "tests",
    "usable_time": True,
    "usable_memory": True,
}


@pytest.mark.parametrize(
    "row",
    [
        SELECTIVE | GPT_22B | {"iter_time_s": 1.10},
        FULL | GPT_22B | {"iter_time_s": 1.42},
        SELECTIVE | GPT_175B | {"iter_time_s": 13.75},
        FULL | GPT_175B | {"iter_time_s": 18.13},
        MPT | MPT_70B | {"num_gpus": 512, "micro_batch": 8, "global_batch": 4096, "iter_time_s": 16.2685},
        MPT | MPT_70B | {"num_gpus": 64, "micro_batch": 8, "global_batch": 2048, "iter_time_s": 63.0504},
        MPT | MPT_3B | {"num_gpus": 8, "micro_batch": 10, "global_batch": 160, "iter_time_s": 3.7886},
        LLAMA_7B | {"tokens_per_s_per_gpu": 9600},
        BLOOM | {"tp": 8, "pp": 12, "micro_batch": 2, "global_batch": 2048, "iter_time_s": 134.02, "memory_gb": 37},
        BLOOM | {"tp": 4, "pp": 12, "micro_batch": 2, "global_batch": 2048, "iter_time_s": 110.48, "memory_gb": 44},
        BLOOM | {"tp": 2, "pp": 24, "micro_batch": 1, "global_batch": 2048, "iter_time_s": 119.53, "memory_gb": 44},
    ],
    ids=lambda row: f"{row['source'][:12]}-{row['hidden']}-{row.get('recompute')}",
)
def test_step_times_and_memory_are_near_the_published_ones(row: dict[str, Any]):
    [found] = answer([case_of(row)])
    assert abs(found.time_error) < 0.25
    assert found.case.gigabytes is None or abs(found.memory_error) < 0.2


def test_a_wrong_row_is_found_out():
    """The comparison can fail: twice the layers in the same time."""
    [found] = answer([case_of(SELECTIVE | GPT_22B | {"iter_time_s": 1.10, "layers": 96})])
    assert found.time_error > 0.5


def test_rows_that_cannot_be_asked_are_named():
    good = SELECTIVE | GPT_22B | {"iter_time_s": 1.1}
    rows = [good, SELECTIVE | {"id": 7}, good | {"gpu": "Abacus"}, good | {"layers": "48"}]  # a string is a number too
    rows += [good | {"micro_batch": "many"}, good | {"usable_memory": True, "memory_gb": [1]}]
    cases, left_out = cases_of(rows)
    assert [case.seconds for case in cases] == [1.1, 1.1]
    words = ("#7", "No data of a device 'Abacus'", "micro_batch='many'", "memory_gb=[1]")
    assert all(word in reason for word, reason in zip(words, left_out, strict=True)) and "missing" in left_out[0]
    lines = report(answer(cases), left_out)
    assert lines[0] == "2 rows could be asked: 2 with a step time, 0 with memory"
    assert any("STEP TIME" in line for line in lines)


def test_figures_that_sources_print_become_seconds():
    """Korthikanti's 22B: 1.10 s, 41.5 % MFU of 312 TFLOP/s, 7447 tokens a second on 8 devices."""
    row = SELECTIVE | GPT_22B
    by_clock = case_of(row | {"iter_time_s": 1.10}).seconds
    assert case_of(row | {"mfu": 0.415}).seconds == pytest.approx(by_clock, rel=0.01)
    assert case_of(row | {"tokens_per_s_per_gpu": 4 * 2048 / 1.10 / 8}).seconds == pytest.approx(by_clock)
    model = case_of(row | {"tflops_per_gpu": 130, "tflops_def": "model FLOPs"}).seconds
    hardware = case_of(row | {"tflops_per_gpu": 130, "tflops_def": "hardware FLOPs"}).seconds
    assert model == pytest.approx(by_clock, rel=0.01) and hardware == pytest.approx(4 / 3 * by_clock, rel=0.03)


def test_the_layout_ranked_first_is_nearly_the_fastest():
    group = BLOOM | {"rank_group": "bloom", "global_batch": 2048}
    rows = [
        group | {"tp": 8, "pp": 12, "micro_batch": 1, "iter_time_s": 143.31},
        group | {"tp": 8, "pp": 12, "micro_batch": 2, "iter_time_s": 134.02},
        group | {"tp": 4, "pp": 12, "micro_batch": 2, "iter_time_s": 110.48},
        group | {"tp": 2, "pp": 24, "micro_batch": 1, "iter_time_s": 119.53},
    ]
    assert regrets(answer([case_of(row) for row in rows]))["tests:bloom"] < 1.1


def test_what_ran_out_of_memory_is_not_called_fitting():
    failed = {"kind": "oom", "usable_time": False, "usable_memory": False}
    rows = [  # the same source: "GBS Variations", lines 793 and 806
        BLOOM | {"tp": 8, "pp": 1, "micro_batch": 1, "global_batch": 2016, **failed},
        BLOOM | {"tp": 2, "pp": 6, "micro_batch": 1, "global_batch": 2048, **failed},
    ]
    assert not any(found.fits for found in answer([case_of(row) for row in rows]))


PROFILE = ModelProfile.from_sizes(num_layers=32, hidden_size=4096, num_heads=32, vocab_size=32000, seq_length=2048)
CLUSTER = Cluster.named("A100", 64)


def ask(*, data: int = 1, tensor: int = 1, pipeline: int = 1, replicas: int = 1, **settings: Any) -> Estimate:
    layout = Layout(
        data_parallel_size=data,
        tensor_parallel_size=tensor,
        pipeline_parallel_size=pipeline,
        replicate_size=replicas,
    )
    settings = {"micro_batch": 1, "num_microbatches": 8, **settings}
    return estimate(PROFILE, CLUSTER, Setup(layout=layout, **settings))


def test_parts_add_up_and_are_where_they_belong():
    found = ask(data=2, tensor=8, pipeline=4)
    assert set(found.parts) == set(PARTS) and found.seconds == pytest.approx(sum(found.parts.values()))
    assert all(found.parts[name] > 0 for name in ("compute", "tensor", "data", "pipeline", "bubble", "optimizer"))
    assert found.parts["recompute"] == found.parts["context"] == 0
    alone = ask(zero=0)
    assert all(alone.parts[name] == 0 for name in ("tensor", "data", "pipeline", "bubble"))
    assert 0 < found.mfu < 1 and found.tokens_per_second == pytest.approx(16 * 2048 / found.seconds)


def test_recomputing_costs_time_and_saves_memory():
    none, some, whole = (ask(data=8, recompute=how, attention="unfused") for how in ("none", "selective", "full"))
    assert none.seconds < some.seconds < whole.seconds
    assert none.peak_memory > some.peak_memory > whole.peak_memory
    assert whole.parts["recompute"] == pytest.approx(whole.parts["compute"] / 3, rel=0.15)


def test_sharding_saves_memory():
    by_zero = [ask(data=8, zero=zero).memory[0] for zero in (0, 1, 2, 3)]
    totals = [stage.allocated for stage in by_zero]
    assert totals == sorted(totals, reverse=True)
    assert by_zero[0].optimizer == pytest.approx(8 * by_zero[1].optimizer)
    assert ask(data=8, reshard=False).peak_memory > ask(data=8).peak_memory


def test_replicas_across_nodes_gather_within_them():
    whole, in_replicas = ask(data=64), ask(data=64, replicas=8)
    assert in_replicas.memory[0].states > whole.memory[0].states
    assert in_replicas.parts["data"] < whole.parts["data"]


def test_schedules_trade_bubble_for_memory():
    def bubble(schedule: str, virtual: int = 1) -> float:
        return ask(pipeline=4, schedule=schedule, stages_per_rank=virtual).parts["bubble"]

    assert bubble("1F1B") > bubble("ZB-H1") > bubble("ZB-H2")
    assert bubble("Interleaved1F1B", 4) < bubble("Interleaved1F1B", 2) < bubble("1F1B")
    held = {name: ask(pipeline=4, schedule=name).memory[0].activations for name in ("1F1B", "GPipe", "ZB-H2")}
    assert held["1F1B"] < held["ZB-H2"] < held["GPipe"]
    first, *_, last = ask(pipeline=4).memory
    assert first.activations > last.activations and first.logits == 0 < last.logits


def test_one_f_one_b_is_the_formula_of_equal_stages():
    found = ask(pipeline=4, num_microbatches=16, even=True, zero=0)
    work = sum(found.parts[name] for name in ("compute", "pipeline")) / 16  # of the last stage, which has the head
    assert found.parts["bubble"] < 3 * work
    assert found.parts["bubble"] == pytest.approx(3 * work, rel=0.25)


def test_stages_are_cut_so_that_the_head_counts():
    setup = ask(pipeline=4).setup
    assert setup.layers_of_stages(32, head=2.0) == [9, 9, 8, 6]
    assert replace(setup, even=True).layers_of_stages(32, head=2.0) == [8, 8, 8, 8]
    assert replace(setup, even=True).layers_of_stages(22, head=2.0) == [5, 6, 6, 5]
    assert replace(setup, even=True).layers_of_stages(31, head=2.0) == [8, 8, 8, 7]
    assert sum(setup.layers_of_stages(5, head=9.0)) == 5 and min(setup.layers_of_stages(5, head=9.0)) == 1


@pytest.mark.parametrize(
    "settings",
    [
        {"recompute": "all"},
        {"schedule": "2F2B"},
        {"micro_batch": 0},
        {"schedule": "ZBVZeroBubble", "pipeline": 2, "stages_per_rank": 3},
    ],
)
def test_settings_that_mean_nothing_are_refused(settings: dict[str, Any]):
    with pytest.raises(ConfigurationError):
        ask(**settings)

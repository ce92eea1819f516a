"""The table at set-up: what each stage is, and which rank holds it."""

from __future__ import annotations

from typing import Any

from lightning_hybrid.describing.describe import layout_table
from lightning_hybrid.layout import Layout, resolve_layout
from lightning_hybrid.tensor_parallel.plan import PlanEntry, TensorParallelPlan
from lightning_hybrid.tensor_parallel.sequence import Region


def row(layout: Layout, rank: int, stages: dict[int, dict[str, Any]]) -> dict[str, Any]:
    here = layout.coordinate(rank)
    held = {"rank": rank, "pipeline": here.pipeline, "data": here.data, "tensor": here.tensor}
    return {"num_microbatches": 4, "holds": {**held, "num_parameters": 1234, "stages": stages}}


def stage(blocks: list[str], cost: float, num_parameters: int, cut_by: str = "parameters") -> dict[str, Any]:
    return {"blocks": blocks, "cost": cost, "num_parameters": num_parameters, "cut_by": cut_by}


def lines_of(layout: Layout, held: list[dict[int, dict[str, Any]]]) -> list[str]:
    table = layout_table(layout, "Interleaved1F1B", [row(layout, rank, stages) for rank, stages in enumerate(held)])
    return [" ".join(line.split()) for line in table.splitlines()]


def test_stages_are_listed_in_order_whoever_holds_them() -> None:
    layout = resolve_layout(2, data_parallel_size=1, tensor_parallel_size=1, pipeline_parallel_size=2)
    first = {1: stage(["h.2", "h.3"], 0.25, 2000), 3: stage(["h.6", "out.0", "out.1"], 0.3, 12_345)}
    second = {0: stage(["h.0", "h.1"], 0.2, 3000), 2: stage(["h.4", "h.5"], 0.25, 2000)}
    lines = lines_of(layout, [first, second])
    assert lines[0].startswith("lightning_hybrid: data 1 x tensor 1 x pipeline 2, schedule Interleaved1F1B with 4")
    assert lines[1:6] == [
        "stage blocks parameters share of parameters",
        "0 input + h.0..1 3,000 20.0%",
        "1 h.2..3 2,000 25.0%",
        "2 h.4..5 2,000 25.0%",
        "3 h.6, out.0..1 + output 12,345 30.0%",
    ]
    assert lines[7:] == ["0 0 0 1,234 stages 1, 3", "1 0 0 1,234 stages 0, 2"]


def test_a_sharded_rank_holds_a_share() -> None:
    layout = resolve_layout(4, data_parallel_size=2, tensor_parallel_size=1, pipeline_parallel_size=2)
    halves = [stage(["h.0"], 0.5, 10), stage(["h.1"], 0.5, 10)]
    lines = lines_of(
        layout, [{1 - layout.coordinate(r).pipeline: halves[1 - layout.coordinate(r).pipeline]} for r in range(4)]
    )
    assert [line.split(" ", 4)[-1] for line in lines[-4:]] == ["its share of stage 1"] * 2 + [
        "its share of stage 0"
    ] * 2


def test_without_a_pipeline_there_are_no_stages() -> None:
    replicas = resolve_layout(
        2, data_parallel_size=2, tensor_parallel_size=1, pipeline_parallel_size=1, replicate_size=2
    )
    assert lines_of(replicas, [{}, {}])[-1].endswith("1,234 the whole model")


def test_it_says_where_the_sequence_is_split_and_where_not() -> None:
    layout = resolve_layout(2, data_parallel_size=1, tensor_parallel_size=2, pipeline_parallel_size=1)
    plan = TensorParallelPlan(
        tensor_parallel_size=2,
        entries=(PlanEntry(name="h.0.up", style="colwise", source="user"),),
        num_parameters={"h.0.up": 8},
        regions={name: Region(argument=0, output=0, dim=1) for name in ("h.0", "h.1")},
        whole_sequences={"tail.0": "no layer of it is split"},
    )
    lines = layout_table(layout, "none", [row(layout, rank, {}) for rank in range(2)], plan).splitlines()
    assert lines[-2].strip() == "a share of the tokens on each tensor rank between split layers of h.*"
    assert lines[-1].strip() == "all tokens on every tensor rank in tail.*: no layer of it is split"

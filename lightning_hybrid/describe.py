"""What a run's ranks hold, as plain values and as a table."""

from __future__ import annotations

from typing import Any

from torch.distributed.tensor import DTensor

from lightning_hybrid.layout import Layout

__all__ = ["describe_run", "layout_table"]


def describe_run(strategy: Any, part: Any, pipeline: Any) -> dict[str, Any]:
    """Return degrees, schedule and what this rank holds. ``num_parameters`` counts this rank's shards only."""
    layout, here = strategy.layout, strategy.coordinate
    parameters = list(strategy.lightning_module.parameters()) if strategy.lightning_module is not None else []
    held = {
        "rank": strategy.global_rank,
        "pipeline": here.pipeline,
        "data": here.data,
        "tensor": here.tensor,
        "num_parameters": sum((p.to_local() if isinstance(p, DTensor) else p).numel() for p in parameters),
        "stages": {},
    }
    if part is not None and part.stages is not None:
        mine = strategy._spec.stages_of_rank(
            strategy.schedule_rank, layout.pipeline_parallel_size, strategy._stages_per_rank
        )
        held["stages"] = {stage: _stage(part.stages, stage) for stage in mine}
    return {
        "data_parallel_size": layout.data_parallel_size,
        "replicate_size": layout.replicate_size,
        "tensor_parallel_size": layout.tensor_parallel_size,
        "pipeline_parallel_size": layout.pipeline_parallel_size,
        "schedule": strategy.schedule,
        "schedule_table": strategy._spec.text if layout.pipeline_parallel_size > 1 else None,
        "num_microbatches": strategy.num_microbatches,
        "num_stages": strategy.num_stages,
        "stages_per_rank": strategy._stages_per_rank,
        "holds": held,
    }


def _stage(stages: Any, stage: int) -> dict[str, Any]:
    names = [stages.blocks[i] for i in stages.ranges[stage]]
    return {"blocks": names, "cost": stages.costs[stage]}


def layout_table(layout: Layout, schedule: str, rows: list[dict[str, Any]]) -> str:
    """Return lines that say which rank holds what."""
    head = f"lightning_hybrid: {layout}"
    if schedule != "none":
        head += f", schedule {schedule} with {rows[0]['num_microbatches']} micro-batches"
    if layout.pipeline_parallel_size > 1:
        head += " (rank 0 holds the last stage: the loss and the logging are there)"
    lines = [head, "  rank  pipeline  data  tensor   parameters  holds"]
    for row in rows:
        held = row["holds"]
        lines.append(
            f"  {held['rank']:>4}  {held['pipeline']:>8}  {held['data']:>4}  {held['tensor']:>6}"
            f"  {held['num_parameters']:>11,}  {_holds(held['stages'], row['num_stages'])}"
        )
    return "\n".join(lines)


def _holds(stages: dict[int, dict[str, Any]], num_stages: int) -> str:
    if not stages:
        return "the whole model" if num_stages == 1 else ""
    parts = []
    for stage, found in stages.items():
        first, last = found["blocks"][0], found["blocks"][-1].rpartition(".")[2]
        ends = f"{first}" if len(found["blocks"]) == 1 else f"{first}..{last}"
        extra = "input + " if stage == 0 else ""
        extra_end = " + output" if stage == num_stages - 1 else ""
        parts.append(f"stage {stage}: {extra}{ends}{extra_end} ({found['cost']:.0%} of the work)")
    return "; ".join(parts)

"""What a run's ranks hold, as plain values and as a table."""

from __future__ import annotations

import re
from dataclasses import asdict
from typing import Any

from torch.distributed.tensor import DTensor

from lightning_hybrid.describing.holdings import device_memory, holdings
from lightning_hybrid.describing.memory import Memory, memory_lines
from lightning_hybrid.layout import Layout
from lightning_hybrid.tensor_parallel.plan import SMALL, WHOLE, TensorParallelPlan, layers_joined

__all__ = ["describe_run", "layout_table", "memory_table"]

#: Styles whose own parameters stay whole.
_KEEP_WHOLE = (WHOLE, "replicated_with_grad_allreduce", "local_numbers", "colwise_shared")
_SAID_BY = {
    "user": "tp_plan",
    "huggingface": "Hugging Face's plan",
    "inferred": "found by trying",
    "tied": "tied",
    "measured": "measured",
}


def describe_run(strategy: Any, part: Any, pipeline: Any) -> dict[str, Any]:
    """Return degrees, schedule and what this rank holds. ``num_parameters`` counts this rank's shards only.

    ``forward_flops_per_sample`` are those of the whole model, counted along a pipeline's first batch.

    ``memory`` is in bytes (:class:`~lightning_hybrid.describing.memory.Memory`); optimizers are known once they are
    set up.
    """
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
        mine = strategy.choice.spec.stages_of_rank(
            strategy.schedule_rank, layout.pipeline_parallel_size, strategy.choice.stages_per_rank
        )
        held["stages"] = {stage: _stage(part.stages, stage) for stage in mine}
    return {
        "data_parallel_size": layout.data_parallel_size,
        "replicate_size": layout.replicate_size,
        "replica_sync": str(strategy.settings.replica_sync if strategy.replicas is None else strategy.replicas.options),
        "tensor_parallel_size": layout.tensor_parallel_size,
        "pipeline_parallel_size": layout.pipeline_parallel_size,
        "schedule": strategy.schedule,
        "schedule_table": strategy.choice.spec.text if layout.pipeline_parallel_size > 1 else None,
        "num_microbatches": strategy.num_microbatches,
        "num_stages": strategy.num_stages,
        "forward_flops_per_sample": pipeline.forward_flops_per_sample if pipeline is not None else None,
        "stages_per_rank": strategy.choice.stages_per_rank,
        "holds": held,
        "memory": asdict(holdings(strategy, part, pipeline, list(strategy.optimizers))) if part is not None else None,
    }


def memory_table(strategy: Any) -> str:
    """Return lines that say what a training step needs on each rank. A collective over the world."""
    own = strategy.describe()["memory"]
    rows = strategy.all_gather_object(own) if strategy.layout.world_size > 1 else [own]
    found = {rank: Memory(**row) for rank, row in enumerate(rows)}
    lines = memory_lines(found, device_memory(strategy.root_device))
    if strategy.layout.tensor_parallel_size > 1:
        lines.append("  activations count whole blocks and logits, of which tensor ranks keep shares: at most so many")
    return "\n".join(lines)


def _stage(stages: Any, stage: int) -> dict[str, Any]:
    names = [stages.blocks[i] for i in stages.ranges[stage]]
    num_parameters = stages.num_parameters[stage]
    return {"blocks": names, "cost": stages.costs[stage], "num_parameters": num_parameters, "cut_by": stages.cut_by}


def layout_table(
    layout: Layout, schedule: str, rows: list[dict[str, Any]], plan: TensorParallelPlan | None = None
) -> str:
    """Return lines that say what each stage is, which rank holds what, and what tensor parallelism splits."""
    head = f"lightning_hybrid: {layout}"
    if schedule != "none":
        head += f", schedule {schedule} with {rows[0]['num_microbatches']} micro-batches"
    if layout.pipeline_parallel_size > 1:
        head += " (rank 0 holds the last stage: the loss and the logging are there)"
    lines = [head, *_stage_lines({k: v for row in rows for k, v in row["holds"]["stages"].items()})]
    lines.append("  rank  data  tensor   parameters  holds")  # the pipeline coordinate, which runs backwards, says less
    for row in rows:
        held = row["holds"]
        lines.append(
            f"  {held['rank']:>4}  {held['data']:>4}  {held['tensor']:>6}"
            f"  {held['num_parameters']:>11,}  {_holds(held['stages'], layout)}"
        )
    return "\n".join([*lines, *_tensor_lines(plan)])


def _tensor_lines(plan: TensorParallelPlan | None) -> list[str]:
    """What is split and how; what is not, and why."""
    if plan is None or plan.tensor_parallel_size == 1 or not plan.entries:
        return []
    groups: dict[tuple[str, str, str], dict[str, int]] = {}
    for entry in plan.entries:
        if count := plan.num_parameters[entry.name]:
            how = entry.style_name if entry.is_split else "whole"
            said = _SAID_BY.get(entry.source, entry.source) if entry.is_split else ""
            names = groups.setdefault((how, said, entry.note), {})
            names[entry.name] = names.get(entry.name, 0) + count
    total = sum(plan.num_parameters.values())
    split = sum(plan.num_parameters[entry.name] for entry in plan.split if entry.style not in _KEEP_WHOLE)
    head = f"  tensor parallelism splits {split / total:.1%} of the parameters over {plan.tensor_parallel_size} ranks"
    order = sorted(groups, key=lambda key: (key[0] == "whole", key[2] == SMALL))
    width = max(len(how) for how, *_ in groups)
    lines = []
    for how, said, note in order:
        names = groups[how, said, note]
        why = "; ".join(filter(None, (said, note)))
        what = "norms, biases and the like" if note == SMALL else _joined(list(names))
        lines.append(f"    {how:<{width}}  {what} ({sum(names.values()):,} parameters): {why}")
    return [head, *lines, *_sequence_lines(plan)]


def _sequence_lines(plan: TensorParallelPlan) -> list[str]:
    """Where each tensor rank works on a share of the tokens; where not, and why."""
    lines = []
    if plan.regions:
        lines.append(
            f"    a share of the tokens on each tensor rank between split layers of {_joined(list(plan.regions))}"
        )
    for name, reason in plan.whole_sequences.items():
        lines.append(f"    all tokens on every tensor rank in {layers_joined(name)}: {reason}")
    return lines


def _joined(names: list[str]) -> str:
    """``h.*.attention.{q, k, v}``: layers as ``*``, and what stands beside each other in braces."""
    patterns = dict.fromkeys(re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", name, count=1) for name in names)
    if len(patterns) > 6:
        patterns = dict.fromkeys(map(layers_joined, names))
    beside: dict[str, list[str]] = {}
    for pattern in patterns:
        parent, _, last = pattern.rpartition(".")
        beside.setdefault(parent, []).append(last)
    texts = [
        f"{parent}.{last[0] if len(last) == 1 else '{' + ', '.join(last) + '}'}".lstrip(".")
        for parent, last in beside.items()
    ]
    return ", ".join(texts)


def _stage_lines(stages: dict[int, dict[str, Any]]) -> list[str]:
    """What is in each stage, before tensor parallelism and sharding divide it further."""
    if not stages:
        return []
    texts = {stage: _blocks(found["blocks"]) for stage, found in stages.items()}
    texts[min(texts)] = f"input + {texts[min(texts)]}"
    texts[max(texts)] += " + output"
    width = max(map(len, (*texts.values(), "blocks")))
    cut_by = stages[min(stages)]["cut_by"]
    lines = [f"  {'stage':>5}  {'blocks':<{width}}  {'parameters':>13}  share of {cut_by}"]
    for stage in sorted(stages):
        found = stages[stage]
        lines.append(f"  {stage:>5}  {texts[stage]:<{width}}  {found['num_parameters']:>13,}  {found['cost']:>6.1%}")
    return lines


def _blocks(names: list[str]) -> str:
    """``model.h.0..3``; one such run for each list that the names come from."""
    runs: list[list[str]] = []
    for name in names:
        if runs and runs[-1][0].rpartition(".")[0] == name.rpartition(".")[0]:
            runs[-1].append(name)
        else:
            runs.append([name])
    ends = [run[0] if len(run) == 1 else f"{run[0]}..{run[-1].rpartition('.')[2]}" for run in runs]
    return ", ".join(ends)


def _holds(stages: dict[int, dict[str, Any]], layout: Layout) -> str:
    numbers = ", ".join(map(str, sorted(stages)))
    what = f"stage{'s' * (len(stages) > 1)} {numbers}" if stages else "the whole model"
    split = layout.data_parallel_size // layout.replicate_size * layout.tensor_parallel_size
    return what if split == 1 else f"its share of {what}"

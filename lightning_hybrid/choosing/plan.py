"""Degrees that nobody gave and no archive entry says: the planner's best for this module on these devices.

[Note: what is compared]
A loader's batch size is that of a data rank, so runs with more data ranks make larger steps. Degrees are therefore
compared by samples per second. Without a pipeline a rank's batch is one piece; a pipeline cuts it.

[Note: where the planner knows nothing]
A module without a list of blocks that have linear layers (or one that does not show them before it runs) has no
profile. The simple rule is then: all devices on the data axis, sharded. That runs any module and needs the least
memory of what does.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from lightning_hybrid.archive import Archive, Planned, detect_hardware, planned_entries
from lightning_hybrid.choosing.run_facts import BatchFacts, batch_facts, cluster_here, profile_here, whole_model
from lightning_hybrid.errors import ArchiveError, ConfigurationError, HybridError
from lightning_hybrid.layout import Layout, divisors
from lightning_hybrid.planner import Cluster, ModelProfile, Plan, plan
from lightning_hybrid.planner.calibration import Observed, calibrate
from lightning_hybrid.planner.constants import FITTED
from lightning_hybrid.planner.host import CLOSE_ON_HOST, HOST
from lightning_hybrid.planner.search import CLOSE, in_order
from lightning_hybrid.planner.setup import Setup, describe
from lightning_hybrid.settings import Settings
from lightning_hybrid.tensor_parallel.plan import build_tp_plan

__all__ = ["PRECISIONS", "PlanChoice", "choose_by_plan", "planned_choices"]

logger = logging.getLogger(__name__)

_GIB = 2**30
#: What the planner calls Lightning's precisions, by their beginning.
PRECISIONS = {"16": "fp16", "bf16": "bf16", "32": "fp32", "64": "fp32", "transformer-engine": "fp8"}


@dataclass(frozen=True, kw_only=True)
class PlanChoice:
    """Degrees that were chosen, and what is said about it."""

    layout: Layout
    lines: tuple[str, ...]
    """For people: the choice, its reasons, its predictions, the runner-up."""
    reshard: bool | None = None
    """Whether gathered parameters are freed after the forward; ``None``: as usual."""
    recompute: str = "none"
    planned: Planned | None = None
    """Predictions, for loggers and the archive."""
    source: str = "planner"
    """Who chose them."""


@dataclass(frozen=True, kw_only=True)
class _Asked:
    """What a choice must keep to."""

    module: Any
    settings: Settings
    batch: BatchFacts
    replicas: Any
    num_microbatches: Any
    accumulated: int
    """Batches of an update."""
    automatic: bool
    """Whether the module's optimization is."""
    failed: Iterable[Layout]


def choose_by_plan(strategy: Any, module: Any, num_devices: int, *, failed: Iterable[Layout] = ()) -> PlanChoice:
    """Return the best degrees for a run that gives none. Reads only; one rank decides for all.

    Args:
        strategy: The strategy, before its mesh is built.
        module: The LightningModule, whole.
        num_devices: Of the run.
        failed: Degrees that an archive knows to fail.
    """
    failed = set(failed)
    if num_devices == 1:
        return PlanChoice(layout=Layout(), lines=(), source="")
    try:
        return _by_planner(strategy, module, num_devices, failed)
    except (HybridError, ArithmeticError, LookupError, AttributeError, RuntimeError, TypeError, ValueError) as error:
        reason = f"{type(error).__name__}: {error}".splitlines()[0] if str(error) else type(error).__name__
        return _by_rule(strategy.choice.degrees["replicate_size"], num_devices, failed, reason)


def planned_choices(strategy: Any, module: Any, num_devices: int, most: int) -> list[PlanChoice]:
    """Return the best plans with different degrees, the best first.

    Raises:
        ConfigurationError: if the planner does not know the model, or nothing fits.
    """
    ranked, profile, cluster, asked = _planned(strategy, module, num_devices, set())
    firsts = {made.setup.layout: place for place, made in reversed(list(enumerate(ranked)))}
    return [_described(ranked[place:], profile, cluster, asked) for place in sorted(firsts.values())[:most]]


def _by_rule(replicas: Any, num_devices: int, failed: set[Layout], reason: str) -> PlanChoice:
    """All devices on the data axis; see the note."""
    given = replicas if isinstance(replicas, int) else 1
    layout = Layout(data_parallel_size=num_devices, replicate_size=given)
    if layout in failed and given == 1:
        layout = Layout(data_parallel_size=num_devices, replicate_size=num_devices)
    return PlanChoice(
        layout=layout,
        source="simple rule",
        lines=(
            f"degrees: {describe(layout)}, by the simple rule (all data): the planner cannot plan this run ({reason})",
        ),
    )


def _by_planner(strategy: Any, module: Any, num_devices: int, failed: set[Layout]) -> PlanChoice:
    return _described(*_planned(strategy, module, num_devices, failed))


def _planned(
    strategy: Any, module: Any, num_devices: int, failed: set[Layout]
) -> tuple[list[Plan], ModelProfile, Cluster, _Asked]:
    choice = strategy.choice
    whole = whole_model(module)
    trainer = getattr(module, "_trainer", None)
    batch = batch_facts(module, trainer)
    asked = _Asked(
        module=whole,
        settings=choice.settings,
        batch=batch,
        replicas=choice.degrees["replicate_size"],
        num_microbatches=choice.num_microbatches,
        accumulated=getattr(trainer, "accumulate_grad_batches", 1),
        automatic=bool(getattr(module, "automatic_optimization", True)),
        failed=failed,
    )
    cluster = cluster_here(strategy.root_device, num_devices, strategy.num_nodes)
    cluster = replace(cluster, factors=_factors(strategy, num_devices))
    profile = profile_here(whole, batch.length, choice.settings.blocks)
    precision = str(strategy.precision_plugin.precision).split("-")[0]
    return _ranked(profile, cluster, asked, PRECISIONS.get(precision, "bf16")), profile, cluster, asked


def _factors(strategy: Any, num_devices: int) -> dict[str, float]:
    """What earlier runs on such devices say of the planner's predictions; nothing without an archive."""
    url = strategy.choice.settings.archive
    if url is None:
        return {}
    hardware = detect_hardware(strategy.root_device.type, num_devices=num_devices, num_nodes=strategy.num_nodes)
    try:
        entries = planned_entries(Archive(url).known(), hardware, precision=str(strategy.precision_plugin.precision))
    except ArchiveError as error:
        logger.debug("Predictions are not corrected: %s", error)  # who asked for the nearest entry has warned
        return {}
    return calibrate(
        Observed(predicted=made.parts, measured=entry.result.breakdown, factors=made.factors)
        for entry in entries
        if (made := entry.planned) is not None
    )


def _ranked(profile: ModelProfile, cluster: Cluster, asked: _Asked, precision: str) -> list[Plan]:
    """Plans for all sizes of the data axis, the best first.

    Raises:
        ConfigurationError: if none fits.
    """
    found: list[Plan] = []
    reasons: dict[str, str] = {}
    on_host = cluster.seats is not None
    for data in divisors(cluster.num_devices):
        planning = plan(
            profile,
            cluster,
            global_batch=data * asked.batch.samples * asked.accumulated,
            precision=precision,
            sequence_parallel=asked.settings.sequence_parallel,
            compile=asked.settings.compile is not False,
            allowed=_limits(asked, data),
            idle=False,
            most=50,
            constants=HOST if on_host else FITTED,
        )
        found += planning.plans
        reasons |= {
            rejected.what: rejected.reason for rejected in planning.rejected if f"data {data} " in rejected.what
        }
    if not found:
        shown = "; ".join(f"{what}: {why}" for what, why in list(reasons.items())[:3])
        raise ConfigurationError(f"nothing fits ({shown})")
    return in_order(found, by_sample=True, close=CLOSE_ON_HOST if on_host else CLOSE)


def _limits(asked: _Asked, data: int) -> Callable[[Setup], str | None]:
    """What a run of this strategy cannot do, or its user does not want."""
    splits: dict[int, str | None] = {}

    def problem(setup: Setup) -> str | None:
        layout = setup.layout
        if layout.data_parallel_size != data:
            return "another data axis"
        if asked.replicas not in ("auto", layout.replicate_size):
            return f"replicate_size={asked.replicas} was given"
        if layout in asked.failed:
            return "it failed in an earlier run"
        tensor = layout.tensor_parallel_size
        if tensor not in splits:
            splits[tensor] = _tensor_problem(asked, tensor)
        if asked.settings.activation_checkpointing == "full" and setup.recompute == "none":
            return 'activation_checkpointing="full" was given'
        return splits[tensor] or _pipeline_problem(asked, setup)

    return problem


def _tensor_problem(asked: _Asked, tensor: int) -> str | None:
    if tensor == 1:
        return None
    try:
        found = build_tp_plan(asked.module, asked.settings.tp_plan, tensor)
    except ConfigurationError as error:
        return str(error)
    if not found.split:
        return "nothing is known to split: a run would have to find out by trying (give tensor_parallel_size for that)"
    if asked.settings.loss_parallel and "colwise_gather_output" not in found.styles.values():
        return "loss_parallel needs a head that is split"
    return None


def _pipeline_problem(asked: _Asked, setup: Setup) -> str | None:
    ranks = setup.layout.pipeline_parallel_size
    if ranks == 1:
        whole = setup.num_microbatches == asked.accumulated
        return None if whole else "without a pipeline a batch is one piece"
    if not asked.automatic:
        return "a pipeline needs automatic optimization"
    if setup.schedule != "1F1B":
        return "schedules are chosen once blocks are timed"
    usual = min(asked.batch.samples, 2 * ranks if asked.num_microbatches == "auto" else asked.num_microbatches)
    if setup.num_microbatches != asked.accumulated * _nearest(asked.batch.samples, usual):
        return f"{usual} micro-batches of a batch are what a run would have"
    return None


def _nearest(number: int, wanted: int) -> int:
    """The divisor of a batch that is nearest to a number of micro-batches."""
    return min(divisors(number), key=lambda found: (abs(found - wanted), -found))


# ---- what is said --------------------------------------------------------------------------------------------------


def _described(ranked: list[Plan], profile: ModelProfile, cluster: Cluster, asked: _Asked) -> PlanChoice:
    best, batch = ranked[0], asked.batch
    setup, layout = best.setup, best.setup.layout
    runner_up = next((made.setup.layout for made in ranked if made.setup.layout != layout), None)
    planned = Planned(
        step_time=best.seconds,
        samples_per_second=setup.global_batch / best.seconds,
        tokens_per_second=best.estimate.tokens_per_second,
        memory_bytes=best.estimate.peak_memory,
        parts=dict(best.estimate.parts),
        factors=dict(cluster.factors),
        runner_up=None if runner_up is None else _beside(runner_up, layout),
    )
    lines = [
        f"degrees: {describe(layout)}, planned for {profile.num_parameters / 1e6:,.4g} M parameters on"
        f" {cluster if cluster.seats is None else cluster.gpu.name}",
        f"  predicted: a step of {_seconds(best.seconds)} ({_parts(best)}),"
        f" {best.estimate.peak_memory / _GIB:.2f} of {cluster.gpu.memory:.1f} GiB a device;"
        f" an update sees {setup.global_batch} samples: set the learning rate for that",
        *_runner_up(ranked),
    ]
    if cluster.factors:
        changed = ", ".join(f"{part} x {cluster.factors[part]:.2f}" for part, _ in _largest(best))
        lines.append(f"  corrected by what earlier runs on such devices took over what was predicted: {changed}")
    if batch.assumed:
        lines.append(f"  assumed, as nothing says it before the first batch: {', '.join(batch.assumed)}")
    if setup.recompute == "full" and asked.settings.activation_checkpointing == "none":
        lines.append('  activation_checkpointing="full": without it, nothing fits')
    lines += [f"  note: {remark}" for remark in best.remarks]
    return PlanChoice(
        layout=layout,
        lines=tuple(lines),
        reshard=setup.reshard if layout.shard_size > 1 else None,
        recompute=setup.recompute,
        planned=planned,
    )


def _runner_up(ranked: list[Plan]) -> list[str]:
    best = ranked[0]
    other = next((made for made in ranked if made.setup.layout != best.setup.layout), None)
    if other is None:
        return []
    rate, its = (made.setup.global_batch / made.seconds for made in (best, other))
    why = f"{1 - its / rate:.0%} fewer samples/s"
    if its > rate:
        why = (
            f"{its / rate - 1:.0%} more samples/s by estimate, within its error, but more kinds of exchanges or remarks"
        )
    return [f"  runner-up: {_beside(other.setup.layout, best.setup.layout)}, {why}"]


def _beside(other: Layout, best: Layout) -> str:
    """What the degrees are called, so that they are told from others with the same sizes."""
    is_same = str(other) == str(best) and other.replicate_size == 1
    return f"{other} (in shards over {other.shard_size} ranks)" if is_same else describe(other)


def _parts(made: Plan) -> str:
    """What a step is mostly made of."""
    total = sum(made.estimate.parts.values())
    return ", ".join(f"{name} {seconds / total:.0%}" for name, seconds in _largest(made))


def _largest(made: Plan) -> list[tuple[str, float]]:
    """The three largest parts, with their seconds."""
    largest = sorted(made.estimate.parts.items(), key=lambda part: part[1], reverse=True)[:3]
    return [(name, seconds) for name, seconds in largest if seconds > 0]


def _seconds(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"

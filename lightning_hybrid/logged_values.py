"""What ``self.log`` means when a step runs once for each micro-batch, and only on the last stage to its end.

Calls are noted instead of carried out. When all micro-batches are through, one value per name stands for the whole
batch, and every rank of the pipeline makes the real ``self.log`` calls with the same values, so that callbacks decide
alike everywhere.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map
from torchmetrics import Metric
from torchmetrics.utilities import dim_zero_sum

from lightning_hybrid.errors import UnsupportedError
from lightning_hybrid.pipeline.hollow import refuse_hollow
from lightning_hybrid.pipeline.loss import MicrobatchLoss, combine
from lightning_hybrid.training.log_rules import LogRules, apply_rule

__all__ = ["LogRecorder", "MetricMirror", "merge_outputs", "no_advice_to_synchronise"]


def no_advice_to_synchronise() -> None:
    """Lightning advises ``sync_dist=True`` where there is a process group; with one data rank all values are equal."""
    warnings.filterwarnings("ignore", message=r"It is recommended to use `self\.log\(.*sync_dist=True")


@dataclass(kw_only=True)
class _Logged:
    """All values logged under one name in one batch."""

    options: dict[str, Any]
    values: dict[int, Any] = field(default_factory=dict)
    """By micro-batch; the last call wins, as it does in one process."""
    batch_sizes: dict[int, int] = field(default_factory=dict)


class LogRecorder:
    """Notes calls of ``self.log`` by micro-batch."""

    def __init__(self, rules: LogRules | None = None, sizes: Sequence[int] = ()) -> None:
        """``sizes``: the number of samples of each micro-batch. ``rules`` say how values of several are combined."""
        self._rules, self._sizes = rules, sizes
        self._logged: dict[str, _Logged] = {}
        self._microbatch = 0

    @contextmanager
    def recording(self, module: Any, microbatch: int) -> Iterator[None]:
        """While active, ``module.log`` notes instead of logging."""
        self._microbatch = microbatch
        before = module.__dict__.get("log")
        module.__dict__["log"] = self._note
        try:
            yield
        finally:
            module.__dict__.pop("log", None)
            if before is not None:
                module.__dict__["log"] = before

    def _note(self, name: str, value: Any, *positional: Any, **options: Any) -> None:
        names = ("prog_bar", "logger", "on_step", "on_epoch", "reduce_fx")
        options = {**dict(zip(names, positional, strict=False)), **options}
        entry = self._logged.setdefault(name, _Logged(options=options))
        entry.options = options
        if options.get("batch_size") is not None:
            entry.batch_sizes[self._microbatch] = int(options["batch_size"])
        entry.values[self._microbatch] = value.detach() if isinstance(value, Tensor) else value

    def combined(self, losses: Sequence[MicrobatchLoss]) -> list[tuple[str, Any, dict[str, Any]]]:
        """Return one ``(name, value, options)`` per name, in the order of the first calls.

        Values are combined by the rule that was found for their name. Where none was, they are as losses are (a
        weighted mean); those with a ``reduce_fx`` of sum, min or max so, unless they are the loss.
        An explicit ``batch_size`` is the sum over micro-batches. A torchmetrics object is passed by its name.
        """
        return [(name, self._combine(name, entry, losses), _options(entry)) for name, entry in self._logged.items()]

    def numbers(self) -> dict[str, dict[int, Any]]:
        """Return by name, and by micro-batch, the values that are tensors or numbers."""
        logged = {name: entry.values for name, entry in self._logged.items()}
        return {name: values for name, values in logged.items() if not isinstance(next(iter(values.values())), Metric)}

    def _combine(self, name: str, entry: _Logged, losses: Sequence[MicrobatchLoss]) -> Any:
        first = next(iter(entry.values.values()))
        refuse_hollow("A value given to self.log", tree_leaves(list(entry.values.values())))
        if isinstance(first, Metric):
            return first
        reduce_fx = entry.options.get("reduce_fx", "mean")
        rule = None if self._rules is None else self._rules.rule(name, reduce_fx)
        pairs = [(losses[i], value) for i, value in entry.values.items()]
        if rule is None:
            return _reduce(pairs, reduce_fx)
        values = torch.stack([torch.as_tensor(value).detach().float() for _, value in pairs])
        return apply_rule(rule, values, [loss for loss, _ in pairs], [self._sizes[i] for i in entry.values])


def _reduce(pairs: Sequence[tuple[MicrobatchLoss, Any]], reduce_fx: Any) -> Tensor:
    losses = [loss for loss, _ in pairs]
    values = [torch.as_tensor(value).detach() for _, value in pairs]
    if all(value.data_ptr() == loss.value.data_ptr() for loss, value in zip(losses, values, strict=True)):
        return combine(values, losses)  # whatever is done with losses of batches
    values = [value if value.is_floating_point() else value.float() for value in values]
    name = reduce_fx if isinstance(reduce_fx, str) else getattr(reduce_fx, "__name__", "mean")
    if name in ("sum", "min", "max"):
        reduced: Tensor = getattr(torch.stack(values), name)()
        return reduced
    if losses[0].rule == "sum":  # the loss adds up, other values are still means
        return torch.stack(values).mean()
    return combine(values, losses)


def _options(entry: _Logged) -> dict[str, Any]:
    sizes = entry.batch_sizes
    return {**entry.options, "batch_size": sum(sizes.values())} if sizes else entry.options


def merge_outputs(outputs: Sequence[Any], losses: Sequence[MicrobatchLoss], sizes: Sequence[int]) -> Any:
    """Merge what a step returned for each micro-batch into what it would return for the batch.

    Floating scalars are combined as losses are, tensors and lists with an entry for each of the ``sizes`` samples are
    joined, dicts and tuples are merged by entry, and a string or boolean that is the same everywhere is taken. Anything
    else cannot be told (a number that is the same may be a count; an entry may be missing for some) and is ``None``.
    """
    first = outputs[0]
    if any(type(output) is not type(first) for output in outputs):
        return None
    if isinstance(first, dict):
        keys = dict.fromkeys(key for output in outputs for key in output)
        return {key: merge_outputs([output.get(key) for output in outputs], losses, sizes) for key in keys}
    if isinstance(first, tuple):
        if len({len(output) for output in outputs}) > 1:
            return None
        merged = [merge_outputs(list(parts), losses, sizes) for parts in zip(*outputs, strict=True)]
        return type(first)(*merged) if hasattr(first, "_fields") else tuple(merged)
    if isinstance(first, Tensor) and all(output.dim() == 0 for output in outputs):
        is_floating = first.is_floating_point()
        return combine([o.float() for o in outputs], losses).to(first.dtype) if is_floating else None
    if isinstance(first, Tensor):
        fits = all(output.shape == (size, *first.shape[1:]) for output, size in zip(outputs, sizes, strict=True))
        return torch.cat(list(outputs)) if fits else None
    if isinstance(first, list):
        fits = [len(output) for output in outputs] == list(sizes)
        return [x for output in outputs for x in output] if fits else None
    is_plain = isinstance(first, (str, bytes, bool))
    return first if is_plain and all(output == first for output in outputs) else None


def without_large_tensors(output: Any) -> Any:
    """Replace tensors with a batch dimension by ``None``: other stages do not get them."""
    return tree_map(lambda leaf: None if isinstance(leaf, Tensor) and leaf.dim() > 0 else leaf, output)


class MetricMirror:
    """Keeps the torchmetrics objects of a module equal on all stages, though only the last one updates them."""

    def __init__(self, module: nn.Module) -> None:
        self._metrics = {name: part for name, part in module.named_modules() if isinstance(part, Metric)}
        self._counts: dict[str, tuple[int, dict[str, int]]] = {}
        self._sums: dict[str, dict[str, Tensor]] = {}

    @contextmanager
    def refusing_compute(self) -> Iterator[None]:
        """While active, the user's ``metric.compute()`` is refused: it would be of some micro-batches of the batch.

        Raises:
            UnsupportedError: then; not for the ``compute`` of a metric's own ``forward``.
        """
        kept = {name: metric.__dict__["compute"] for name, metric in self._metrics.items()}
        for name, metric in self._metrics.items():
            metric.__dict__["compute"] = functools.partial(_computed, name, metric, kept[name])
        try:
            yield
        finally:
            for name, compute in kept.items():
                self._metrics[name].__dict__["compute"] = compute

    def before(self) -> None:
        """Note where the metrics stand before a step."""
        self._counts = {name: (m._update_count, _lengths(m)) for name, m in self._metrics.items()}
        self._sums = {name: _sums(m) for name, m in self._metrics.items()}

    def value_of_batch(self, metric: Any) -> Any:
        """Return what ``metric(...)`` of the whole batch would have returned, where a step called it several times.

        Raises:
            UnsupportedError: if the states do not add up, so that the batch's part of them cannot be told.
        """
        count, lengths = self._counts[name := self.name_of(metric)]
        if metric._update_count - count < 2 or metric._forward_cache is None:
            return metric._forward_cache
        states, sums = {s: getattr(metric, s) for s in metric._defaults}, self._sums[name]
        if unknown := [state for state in states if state not in lengths and state not in sums]:
            raise UnsupportedError(
                f"self.log of the metric {name} with on_step=True: its value for a batch cannot be told from those of"
                f" micro-batches, since its {', '.join(unknown)} does not add up. Log it with on_step=False,"
                " on_epoch=True, or use pipeline_parallel_size=1."
            )
        kept = metric._computed, metric._to_sync
        try:
            for state, value in states.items():
                setattr(metric, state, value[lengths[state] :] if state in lengths else value - sums[state])
            metric._computed, metric._to_sync = None, metric.dist_sync_on_step
            return metric.compute()
        finally:
            metric._computed, metric._to_sync = kept
            for state, value in states.items():
                setattr(metric, state, value)

    def changes(self) -> dict[str, dict[str, Any]]:
        """Return what the step changed; of list states only what was appended."""
        changed = {}
        for name, metric in self._metrics.items():
            count, lengths = self._counts[name]
            if metric._update_count != count:
                states = {s: getattr(metric, s) for s in metric._defaults}
                new = {s: v[lengths[s] :] if isinstance(v, list) else v for s, v in states.items()}
                changed[name] = {"states": new, "count": metric._update_count, "cache": metric._forward_cache}
        return changed

    def apply(self, changes: dict[str, dict[str, Any]]) -> None:
        """Make this rank's metrics equal to the last stage's."""
        for name, change in changes.items():
            metric = self._metrics[name]
            for state, value in change["states"].items():
                here = getattr(metric, state)
                if isinstance(value, list):
                    here.extend(value)
                else:
                    setattr(metric, state, value)
            metric._update_count, metric._forward_cache = change["count"], change["cache"]
            metric._computed = None

    def name_of(self, metric: Metric) -> str:
        """Return the attribute name of a metric."""
        found: str = next(name for name, part in self._metrics.items() if part is metric)
        return found

    def get(self, name: str) -> Metric:
        """Return the metric of that name."""
        return self._metrics[name]


def _computed(name: str, metric: Metric, compute: Callable[[], Any]) -> Any:
    if metric._should_unsync:  # not within its forward
        raise UnsupportedError(
            f"{name}.compute() in training_step, which runs once for each micro-batch, has no value of the batch."
            f' Call it in on_train_batch_end, or log the metric itself (self.log("{name}", self.{name})); or use'
            " whole_batch_loss=True or pipeline_parallel_size=1."
        )
    return compute()


def _sums(metric: Metric) -> dict[str, Tensor]:
    sums = (state for state, reduction in metric._reductions.items() if reduction is dim_zero_sum)
    return {state: getattr(metric, state).clone() for state in sums if isinstance(getattr(metric, state), Tensor)}


def _lengths(metric: Metric) -> dict[str, int]:
    return {s: len(getattr(metric, s)) for s in metric._defaults if isinstance(getattr(metric, s), list)}

"""What a user says about exchanges between replicas. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, fields, replace
from math import inf
from typing import Any, Literal

from lightning_hybrid.errors import ConfigurationError

__all__ = ["EVENTS", "ReplicaSync"]

#: When an incomplete window is closed.
EVENTS = ("validation", "checkpoint", "end")


@dataclass(frozen=True)
class ReplicaSync:
    """How often replicas exchange, and what they make of it. docs/replicas.md has the rules.

    Raises:
        ConfigurationError: for values that cannot be meant together.
    """

    interval: int | Literal["auto"]
    """Optimizer steps from one exchange to the next (``H``); ``"auto"``: by the first steps' and exchange's times."""
    _: KW_ONLY
    method: Literal["average", "diloco", "auto"] = "average"
    """``"average"``: weights become the mean over the replicas (local SGD; with ``interval=1`` it is gradients that are
    averaged, as in HSDP). ``"diloco"``: the mean difference since the last exchange is a gradient for an outer SGD.
    ``"auto"``, with ``interval="auto"``: averages first, then what suits the interval."""
    outer_lr: float = 0.7
    """Learning rate of DiLoCo's outer SGD."""
    outer_momentum: float = 0.9
    """Its Nesterov momentum; 0: none."""
    num_fragments: int = 1
    """Parts of the model, by blocks, that are exchanged in turn, each once in ``interval`` steps (streaming DiLoCo)."""
    delay: int = 0
    """Optimizer steps for which an exchange runs beside training before its result is used."""
    mixing: float = 0.0
    """Share of a replica's own weights that is kept when an exchange arrives, from 0 (none) to 1, excluded."""
    dtype: Literal["bfloat16"] | None = None
    """What differences are rounded to for the exchange; ``None``: they travel in fp32."""
    offload: bool = False
    """Whether outer weights and momentum lie in the host's memory."""
    close_before: Sequence[str] = EVENTS
    """Before what an incomplete window is closed by an exchange: ``"validation"``, ``"checkpoint"``, ``"end"``."""

    def __post_init__(self) -> None:
        for name, (is_right, right) in _RULES.items():
            if not is_right(value := getattr(self, name)):
                raise ConfigurationError(f"replica_sync: {name}={value!r} must be {right}.")
        object.__setattr__(self, "close_before", tuple(event for event in EVENTS if event in self.close_before))
        self._check_auto()
        self._check_effects()
        if self.interval != "auto" and max(self.num_fragments, self.delay + 1) > self.interval:
            raise ConfigurationError(
                f"replica_sync: num_fragments={self.num_fragments} and delay={self.delay} must fit into"
                f" interval={self.interval} steps: at most {self.interval} fragments, and a delay of at most"
                f" {self.interval - 1}."
            )
        if self.delay and "checkpoint" not in self.close_before:
            raise ConfigurationError(
                f"replica_sync: with delay={self.delay} a checkpoint could fall into a running exchange, which it does"
                ' not hold. Have "checkpoint" in close_before, or use delay=0.'
            )

    def _check_auto(self) -> None:
        if self.method == "auto" and self.interval != "auto":
            raise ConfigurationError(
                f'replica_sync: method="auto" chooses together with the interval, but interval={self.interval}. Give'
                ' method="average" or "diloco", or interval="auto".'
            )
        if self.interval == "auto" and (self.num_fragments > 1 or self.delay):
            raise ConfigurationError(
                f"replica_sync: num_fragments={self.num_fragments} and delay={self.delay} need a known interval; give a"
                ' number in place of interval="auto", or one fragment without a delay.'
            )

    def _check_effects(self) -> None:
        """An option that does nothing is a mistake: whoever gives DiLoCo's rate means DiLoCo."""
        for name, way_out in self._without_effect(self.interval, self.method).items():
            if (value := getattr(self, name)) != getattr(type(self), name):
                raise ConfigurationError(
                    f"replica_sync: {name}={value} has no effect with interval={self.interval} and"
                    f' method="{self.method}". Leave it out, or give {way_out}.'
                )

    def _without_effect(self, interval: int | str, method: str) -> dict[str, str]:
        """Return what does nothing at an interval and method, with what it would take."""
        found: dict[str, str] = {}
        has_outer_state = method != "average" or self.dtype is not None or self.delay > 0
        if method == "average":
            found |= dict.fromkeys(("outer_lr", "outer_momentum"), 'method="diloco"')
        if not has_outer_state:
            found["offload"] = 'method="diloco", dtype="bfloat16" or a delay: without, there are no outer weights'
        if interval == 1 and not has_outer_state:
            found["mixing"] = "an interval of at least 2: with 1 it is gradients that are averaged"
        return found

    def chosen(self, interval: int, method: Any) -> ReplicaSync:
        """Return the same with what was ``"auto"`` decided; what has no effect then is left out."""
        defaults = {name: getattr(type(self), name) for name in self._without_effect(interval, method)}
        return replace(self, **{**defaults, "interval": interval, "method": method})

    @classmethod
    def of(cls, value: Any) -> ReplicaSync:
        """Return what the strategy's argument means: a number of steps, ``"auto"``, a dict, or the options themselves.

        Raises:
            ConfigurationError: for anything else.
        """
        if isinstance(value, cls):
            return value
        if isinstance(value, int) and not isinstance(value, bool):
            return cls(interval=value)
        if value == "auto":
            return cls(interval="auto", method="auto")
        known = {field.name for field in fields(cls)}
        if isinstance(value, Mapping) and "interval" in value and value.keys() <= known:
            return cls(**value)
        raise ConfigurationError(
            f'replica_sync={value!r} must be a number of optimizer steps, "auto", a ReplicaSync, or a dict with'
            f" interval and some of {', '.join(sorted(known))}."
        )

    def __str__(self) -> str:
        """What is not as it is by default, as in YAML: ``{interval: 4, method: diloco}``; or ``1``."""
        given = {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != f.default}
        texts = {name: f"[{', '.join(v)}]" if isinstance(v, tuple) else str(v) for name, v in given.items()}
        only = texts["interval"] if len(texts) == 1 else None
        return only or f"{{{', '.join(f'{name}: {text}' for name, text in texts.items())}}}"

    @property
    def is_every_step(self) -> bool:
        """Whether gradients are averaged at every step, so that replicas never differ (HSDP)."""
        return self.interval == 1 and self.method != "diloco" and self.dtype is None

    @property
    def has_outer_state(self) -> bool:
        """Whether the weights of the last exchange are kept."""
        return self.method == "diloco" or self.dtype is not None or self.delay > 0


_RULES: dict[str, tuple[Any, str]] = {
    "interval": (lambda v: v == "auto" or (type(v) is int and v >= 1), 'an integer of at least 1, or "auto"'),
    "method": (lambda v: v in ("average", "diloco", "auto"), '"average", "diloco" or "auto"'),
    "outer_lr": (lambda v: isinstance(v, (int, float)) and 0 < v < inf, "a positive number"),
    "outer_momentum": (lambda v: isinstance(v, (int, float)) and 0 <= v < 1, "a number from 0 to 1, excluded"),
    "num_fragments": (lambda v: type(v) is int and v >= 1, "an integer of at least 1"),
    "delay": (lambda v: type(v) is int and v >= 0, "an integer of at least 0"),
    "mixing": (lambda v: isinstance(v, (int, float)) and 0 <= v < 1, "a number from 0 to 1, excluded"),
    "dtype": (lambda v: v in (None, "bfloat16"), 'None or "bfloat16"'),
    "offload": (lambda v: isinstance(v, bool), "True or False"),
    "close_before": (
        lambda v: isinstance(v, Sequence) and not isinstance(v, str) and all(e in EVENTS for e in v),
        f"a list of some of {', '.join(map(repr, EVENTS))}",
    ),
}

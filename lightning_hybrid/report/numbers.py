"""How numbers are written in a report: few digits, with their unit; ``"–"`` where there is none. Pure."""

from __future__ import annotations

import math

__all__ = ["NONE", "count", "memory", "number", "rate", "seconds", "share", "ticks"]

NONE = "–"


def number(value: float | None, digits: int = 3) -> str:
    """``1,234``, ``12.3``, ``0.0123``: at least ``digits`` significant digits."""
    if value is None or not math.isfinite(value):
        return NONE
    if value == 0:
        return "0"
    if not 1e-4 <= abs(value) < 1e12:
        return f"{value:.{digits - 1}e}"
    places = max(0, digits - 1 - math.floor(math.log10(abs(value))))
    return f"{value:,.{places}f}"


def seconds(value: float | None) -> str:
    """Seconds as ``12.3 ms`` or ``1.23 s``."""
    if value is None or not math.isfinite(value):
        return NONE
    return f"{number(value)} s" if abs(value) >= 1 else f"{number(1e3 * value)} ms"


def share(value: float | None) -> str:
    """A share as ``12.3 %``."""
    return NONE if value is None or not math.isfinite(value) else f"{100 * value:.1f} %"


def rate(value: float | None, what: str) -> str:
    """``1,234 tokens/s``."""
    return NONE if value is None or not math.isfinite(value) else f"{number(value)} {what}/s"


def count(value: float) -> str:
    """A number of parameters as people say it: ``1.2B``."""
    for size, letter in ((10**12, "T"), (10**9, "B"), (10**6, "M"), (10**3, "k")):
        if value >= size:
            return f"{value / size:.3g}{letter}"
    return f"{value:g}"


def memory(value: float | None) -> str:
    """Bytes as ``1.23 GB`` (10^9)."""
    if value is None or not math.isfinite(value):
        return NONE
    for size, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value:.0f} B"


def ticks(largest: float, most: int = 6) -> list[float]:
    """Return round numbers from 0 up to ``largest``, at most ``most + 1`` of them."""
    if not (math.isfinite(largest) and largest > 0):
        return [0.0]
    rough = largest / most
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * (1 - 1e-9))
    return [step * i for i in range(int(largest / step * (1 + 1e-9)) + 1)]

"""Says advice once."""

from __future__ import annotations

import logging

from lightning_hybrid.metrics.advice import Figures, give_advice

__all__ = ["Adviser"]

_log = logging.getLogger(__name__)


class Adviser:
    """Says what :mod:`lightning_hybrid.metrics.advice` has to say of each measurement of a run, each thing once.

    What settings alone show is said at once; what was measured, when two measurements in a row show it, because one may
    have been disturbed. Call it on global rank 0.
    """

    def __init__(self) -> None:
        self.said: list[str] = []
        """All that was said so far."""
        self._keys: set[str] = set()
        self._last: set[str] = set()

    def consider(self, figures: Figures) -> None:
        """Log as a warning what applies and was not said before."""
        found = give_advice(figures)
        for advice in found:
            if advice.key not in self._keys and (advice.is_certain or advice.key in self._last):
                self._keys.add(advice.key)
                self.said.append(advice.text)
                _log.warning("Advice: %s", advice.text)
        self._last = {advice.key for advice in found}

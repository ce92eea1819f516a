"""Values of a run over its steps, in bounded memory. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from lightning_hybrid.errors import ConfigurationError

__all__ = ["History"]


class History:
    """Keeps evenly spaced rows of a run of unknown length, the first and the newest always among them.

    When there are more than ``max_rows``, every second one is forgotten, and from then on half as many are taken in.

    Args:
        max_rows: even; what is kept never exceeds ``max_rows + 1``.

    Raises:
        ConfigurationError: if ``max_rows`` is odd or less than 2.
    """

    def __init__(self, max_rows: int = 64) -> None:
        if max_rows < 2 or max_rows % 2:
            raise ConfigurationError(f"max_rows={max_rows} must be an even number of at least 2.")
        self._max_rows, self._stride, self._num_added = max_rows, 1, 0
        self._kept: list[tuple[int, dict[str, float]]] = []
        self._newest: list[tuple[int, dict[str, float]]] = []

    def add(self, step: int, values: Mapping[str, float]) -> None:
        """Take in the values of one step; steps come in ascending order."""
        row = (step, dict(values))
        if self._num_added % self._stride:
            self._newest = [row]
        else:
            self._kept, self._newest = [*self._kept, row], []
        self._num_added += 1
        if len(self._kept) > self._max_rows:
            self._kept, self._stride = self._kept[::2], 2 * self._stride

    @property
    def rows(self) -> list[tuple[int, dict[str, float]]]:
        """Return (step, values) of what is kept, in ascending order."""
        return [*self._kept, *self._newest]

"""A strategy set to what an earlier run was set to."""

from __future__ import annotations

import os
from typing import Any

from typing_extensions import Self

from lightning_hybrid.archive import Entry
from lightning_hybrid.archive.share import find_entry
from lightning_hybrid.choosing.choose import ArchiveChoice
from lightning_hybrid.choosing.run_choice import RunChoice
from lightning_hybrid.errors import ConfigurationError

__all__ = ["FromArchive"]

_DEGREES = ("data_parallel_size", "tensor_parallel_size", "pipeline_parallel_size", "replicate_size")


class FromArchive:
    """A strategy that can be made from an archive's entry."""

    choice: RunChoice

    @property
    def started_from(self) -> str | None:
        """Id of the archive entry that degrees or the schedule were taken from."""
        return self.choice.started_from

    @classmethod
    def from_archive(
        cls,
        entry: Entry | str | os.PathLike[str] | dict[str, Any],
        archive: str | os.PathLike[str] = "archive",
        **arguments: Any,
    ) -> Self:
        """Return a strategy with an entry's degrees, schedule, micro-batches, tensor plan and ways to save memory.

        On another number of devices the data axis is resized.

        Args:
            entry: An entry; its id, or the beginning of it; its document's path; or what it must be, as fields of
                :class:`~lightning_hybrid.archive.share.Filter` (``{"model": "LitGPT", "num_devices": 8}``): of those
                known to work the one with the highest throughput of a device.
            archive: Where entries are looked up; also the new run's archive.
            arguments: Of the strategy, apart from degrees; they go before the entry's.

        Raises:
            ArchiveError: if there is no such entry.
            ConfigurationError: if degrees are given too.
        """
        if given := [name for name in _DEGREES if name in arguments]:
            raise ConfigurationError(
                f"from_archive takes {', '.join(given)} from the entry; make Hybrid3DStrategy(...) with degrees of your"
                " own."
            )
        found = find_entry(entry, archive)
        settings = vars(found.settings)
        kept: dict[str, Any] = {"tp_plan": settings["tp_plan"]} if settings["tp_plan"] else {}
        strategy: Any = cls(**{"archive": archive, **kept, **arguments})
        reason = f"as archive entry {found.id}: {found.degrees}"
        strategy.choice.take_entry(
            ArchiveChoice(layout=found.degrees, entry_id=found.id, settings=settings, reason=reason)
        )
        strategy.settings = strategy.choice.settings
        return strategy  # type: ignore[no-any-return]

"""What a training step will need of a rank's memory, from counts that others make. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

from lightning_hybrid.pipeline.schedule import Action, Kind

__all__ = ["Memory", "memory_lines", "most_in_flight"]


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes on one rank; ``None`` where nobody can say beforehand."""

    parameters: int
    """The rank's shares of parameters, and buffers."""
    gradients: int
    """The shares' gradients, as the optimizer gets them."""
    optimizer: int | None
    """The optimizers' states of the shares."""
    gathered: int
    """Most parameters that stand gathered over the data axis at once."""
    unreduced: int
    """Most gradients that stand whole on the rank because they are not yet reduced over the data axis."""
    activations: int | None
    """Most of what autograd keeps for backwards at once; what an operation needs while it runs is not in it.

    With tensor parallelism blocks and logits count whole: an upper bound.
    """
    messages: int
    """What is sent to other stages, as if none of it had left before the step ends."""
    host: int = 0
    """Shares, gradients and states that are offloaded: in the host's memory, so in no other entry and no sum."""

    @property
    def known(self) -> int:
        """The sum of what is known: what a step needs if all comes together."""
        values = [getattr(self, field.name) for field in fields(self) if field.name != "host"]
        return sum(value for value in values if value is not None)

    @property
    def is_complete(self) -> bool:
        """Whether everything is known."""
        return all(getattr(self, field.name) is not None for field in fields(self))


def most_in_flight(
    actions: Sequence[Action], kept: Mapping[int, int], recomputed: Mapping[int, int] | None = None
) -> int:
    """Return the most bytes that one rank's row of a schedule keeps for backwards at once.

    Args:
        actions: The row, in order.
        kept: For each of the rank's stages the bytes that one micro-batch's forward leaves behind.
        recomputed: For stages whose backward at some time holds more than that, how much (blocks are run once more).
    """
    held = most = 0
    for action in actions:
        if action.kind is Kind.FORWARD:
            held += kept[action.stage]
            most = max(most, held)
        else:
            most = max(most, held + (recomputed or {}).get(action.stage, 0))
        if action.kind in (Kind.BACKWARD, Kind.BACKWARD_WEIGHT):
            held -= kept[action.stage]
    return most


def memory_lines(rows: Mapping[int, Memory], device: int | None) -> list[str]:
    """Return a table in MB, a row for each rank; ``device`` is the memory of one, in bytes."""
    offloads = any(memory.host for memory in rows.values())
    names = [field.name for field in fields(Memory) if offloads or field.name != "host"]
    head = "memory of a training step, MB" + (" (what is on the host is not in the sum)" if offloads else "")
    whole = f" of {_mb(device)}" if device is not None else ""
    lines = [f"lightning_hybrid: {head}", "  rank" + "".join(f"  {name:>11}" for name in (*names, "sum"))]
    for rank, memory in rows.items():
        cells = [_mb(getattr(memory, name)) for name in names]
        total = f"{'' if memory.is_complete else '> '}{_mb(memory.known)}"
        lines.append(f"  {rank:>4}" + "".join(f"  {cell:>11}" for cell in (*cells, total)) + whole)
    return lines


def _mb(number: int | None) -> str:
    if number is None:
        return "unknown"
    return f"{number / 1e6:,.1f}" if number >= 1e7 or not number else f"{number / 1e6:.3f}"  # of small models

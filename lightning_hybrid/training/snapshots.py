"""Copies of what user code changes while it runs, such as a cache of keys and values that every block extends."""

from __future__ import annotations

import io
import pickle
from typing import Any

from torch import Tensor, nn

__all__ = ["as_it_is", "is_cache"]


def is_cache(x: Any) -> bool:
    """Whether an object is a cache of Hugging Face's kind."""
    return hasattr(x, "get_seq_length") and not isinstance(x, nn.Module)


def as_it_is(x: Any) -> Any:
    """A copy of an object as it is now, with the same tensors (and modules) inside; the object if it has no copy."""
    shared: list[Any] = []

    class Pickler(pickle.Pickler):
        def persistent_id(self, part: Any) -> int | None:
            if not isinstance(part, (Tensor, nn.Module)):
                return None
            shared.append(part)
            return len(shared) - 1

    class Unpickler(pickle.Unpickler):
        def persistent_load(self, number: Any) -> Any:
            return shared[number]

    buffer = io.BytesIO()
    try:
        Pickler(buffer).dump(x)
        buffer.seek(0)
        return Unpickler(buffer).load()
    except Exception:  # it holds a lock, a lambda, an open file
        return x

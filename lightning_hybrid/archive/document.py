"""Dataclasses <-> plain JSON values, checked field by field. Pure.

Floats that JSON cannot carry are written as the strings ``"NaN"``, ``"Infinity"`` and ``"-Infinity"``, so that every
JSON reader takes the document (a diverged run has such a loss, and that is worth keeping).
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
import types
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from lightning_hybrid.errors import ArchiveError, ConfigurationError

__all__ = ["from_plain", "to_plain"]

T = TypeVar("T")

#: Integers are below.
_MOST = 2**63
#: What steers a terminal, and halves of a pair of surrogates, which no file takes.
_NO_TEXT = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff]")
_NOT_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def to_plain(value: Any) -> Any:
    """Return ``value`` (dataclasses, mappings, sequences, scalars) as values that :mod:`json` writes strictly."""
    if dataclasses.is_dataclass(value):
        return {field.name: to_plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {key: to_plain(item) for key, item in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


def from_plain(kind: type[T], value: Any, *, where: str, ignore_unknown: bool = False) -> T:
    """Build a ``kind`` from what :func:`to_plain` made of it.

    Args:
        kind: a dataclass, or a type that one of its fields may have.
        value: the plain value.
        where: what the messages call it, such as ``"result.status"``.
        ignore_unknown: accept fields that ``kind`` does not have (written by a newer release) instead of refusing them.

    Raises:
        ArchiveError: if a field is missing, unknown or of another type; the message names the field and both types.
    """
    return cast(T, _build(kind, value, where, ignore_unknown))


def _build(kind: Any, value: Any, where: str, ignore_unknown: bool) -> Any:
    if dataclasses.is_dataclass(kind):
        return _build_dataclass(kind, value, where, ignore_unknown)
    origin = get_origin(kind)
    if origin is Literal:
        if value in get_args(kind):
            return value
        raise ArchiveError(f"{where} is {value!r}; it must be one of {', '.join(map(repr, get_args(kind)))}.")
    if origin in (Union, types.UnionType):
        return _build_union(kind, value, where, ignore_unknown)
    if origin is dict and isinstance(value, dict):
        item = get_args(kind)[1]
        for name in value:
            _check_scalar(name, where)
        return {key: _build(item, entry, f"{where}.{key}", ignore_unknown) for key, entry in value.items()}
    if kind is float and isinstance(value, str) and value in _NOT_FINITE:
        return _NOT_FINITE[value]
    _check_scalar(value, where)
    if kind is float and type(value) is int:
        return float(value)
    # Not isinstance: True is an int to Python, but not to a reader of the document.
    if kind in (int, float, str, bool, type(None)) and type(value) is kind:
        return value
    raise ArchiveError(f"{where} is {_shown(value)}, which is not {_name(kind)}.")


def _check_scalar(value: Any, where: str) -> None:
    """Refuse what JSON can say, and files, terminals and arithmetic cannot take: one such entry would end them all."""
    if type(value) is int and abs(value) >= _MOST:
        raise ArchiveError(f"{where} is an integer of {len(str(abs(value)))} digits; at most {_MOST - 1} can be meant.")
    if type(value) is str and (wrong := _NO_TEXT.search(value)):
        raise ArchiveError(f"{where} is {_shown(value)}, in which {wrong.group()!r} is no text.")


def _build_union(kind: Any, value: Any, where: str, ignore_unknown: bool) -> Any:
    options = get_args(kind)
    for option in options:
        if dataclasses.is_dataclass(option) and isinstance(value, dict):
            return _build(option, value, where, ignore_unknown)  # its own message says more
        try:
            return _build(option, value, where, ignore_unknown)
        except ArchiveError:
            continue
    raise ArchiveError(f"{where} is {_shown(value)}, which is not {' or '.join(map(_name, options))}.")


def _build_dataclass(kind: Any, value: Any, where: str, ignore_unknown: bool) -> Any:
    if not isinstance(value, dict):
        raise ArchiveError(f"{where} is {_shown(value)}, which is not an object.")
    for name in value:
        _check_scalar(name, where)
    hints, fields = _hints(kind), {field.name: field for field in dataclasses.fields(kind)}
    unknown = sorted(set(value) - set(fields))
    if unknown and not ignore_unknown:
        raise ArchiveError(f"{where} has unknown fields: {', '.join(unknown)}.")
    arguments = {}
    for name, field in fields.items():
        if name in value:
            arguments[name] = _build(hints[name], value[name], f"{where}.{name}", ignore_unknown)
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise ArchiveError(f"{where}.{name} is missing.")
    try:
        return kind(**arguments)
    except ConfigurationError as error:
        raise ArchiveError(f"{where}: {error}") from error


@functools.cache
def _hints(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _name(kind: Any) -> str:
    names = {int: "an integer", float: "a number", str: "a text", bool: "true or false", type(None): "null"}
    return names.get(kind, "an object")

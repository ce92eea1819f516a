"""HTML whose text is escaped by construction. Pure.

Entries come from files that anybody may have written, so nothing is ever pasted into a page: :func:`tag` escapes every
child that is not :class:`Html` itself, and every attribute.
"""

from __future__ import annotations

import html
from collections.abc import Iterable
from typing import Any

__all__ = ["Html", "join", "tag"]

_VOID = frozenset({"br", "input", "meta"})


class Html(str):
    """Markup, as opposed to text: only this module and the files of this package make it."""

    __slots__ = ()


def tag(name: str, /, *children: Any, **attributes: Any) -> Html:
    """Return an element.

    Args:
        name: of the element.
        children: markup (:class:`Html`) as it is, lists of children, ``None`` for nothing; all else as escaped text.
        attributes: ``class_`` is ``class``, ``data_tip`` is ``data-tip``; ``None`` and ``False`` leave one out.
    """
    written = "".join(
        f" {key.rstrip('_').replace('_', '-')}" + ("" if value is True else f'="{html.escape(str(value))}"')
        for key, value in attributes.items()
        if value is not None and value is not False
    )
    return Html(f"<{name}{written}>" if name in _VOID else f"<{name}{written}>{join(children)}</{name}>")


def join(children: Iterable[Any]) -> Html:
    """Return children one after the other, escaped as in :func:`tag`."""
    return Html("".join(map(_child, children)))


def _child(child: Any) -> str:
    if child is None:
        return ""
    if isinstance(child, Html):
        return child
    if isinstance(child, list | tuple):
        return join(child)
    return html.escape(str(child))

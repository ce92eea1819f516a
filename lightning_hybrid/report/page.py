"""The frame of a page: one file that needs nothing else, works offline and prints. Pure.

The page's policy lets the browser load nothing and run one script only, ours, by its hash: a script that slipped in
from an entry would not run even if escaping failed.
"""

from __future__ import annotations

import base64
import functools
import hashlib
from importlib import resources
from typing import Any

from lightning_hybrid.report.html import Html, join, tag

__all__ = ["build_page"]


def build_page(title: str, *body: Any, footer: Any = None, bare: bool = False) -> str:
    """Return a whole page.

    Args:
        title: plain text.
        body: children as in :func:`~lightning_hybrid.report.html.tag`.
        footer: likewise.
        bare: without heading, buttons and footer: a chart within another page.
    """
    style, script = _file("report.css"), _file("report.js")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=policy),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("title", title),
        tag("style", Html(style)),
    )
    buttons = tag(
        "div",
        tag("button", "Dark / light", type="button", id="theme"),
        tag("button", "Print", type="button", id="print"),
        class_="buttons",
    )
    inner = join(body) if bare else join([buttons, *body, tag("footer", footer)])
    content = tag("body", tag("main", inner, class_="bare" if bare else None), tag("script", Html(script)))
    return f'<!DOCTYPE html>\n<html lang="en">{head}{content}</html>\n'


@functools.cache
def _file(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")

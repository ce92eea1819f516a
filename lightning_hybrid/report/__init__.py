"""A report as one HTML page that needs nothing else: of one run, or of an archive's. Pure: entries in, text out.

Read in this order: :mod:`html <lightning_hybrid.report.html>` (how text stays text), :mod:`run
<lightning_hybrid.report.run>` and :mod:`archive <lightning_hybrid.report.archive>` (what is said), :mod:`charts
<lightning_hybrid.report.charts>` and :mod:`timeline <lightning_hybrid.report.timeline>`, :mod:`page
<lightning_hybrid.report.page>` with ``report.css`` and ``report.js``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lightning_hybrid.archive import Entry
from lightning_hybrid.pipeline.timeline import Mark
from lightning_hybrid.report.archive import archive_sections
from lightning_hybrid.report.html import Html
from lightning_hybrid.report.page import build_page
from lightning_hybrid.report.run import heading, run_sections
from lightning_hybrid.report.timeline import CAPTIONS, timeline_chart

__all__ = ["archive_page", "chart_page", "run_page", "timeline_page"]


def run_page(entry: Entry) -> str:
    """Return the page of one run; what its entry does not have is said to be missing."""
    title = f"{entry.model.model_class}, {entry.degrees}"
    return build_page(title, heading(entry), run_sections(entry), footer=_footer(entry.updated))


def archive_page(entries: Sequence[Entry], where: str) -> str:
    """Return the page of many runs, oldest first; ``where`` is what the archive is called."""
    updated = max((entry.updated for entry in entries), default="")
    return build_page(f"Runs in {where}", archive_sections(entries, where), footer=_footer(updated))


def chart_page(title: str, chart: Html) -> str:
    """Return a page with a chart alone, as for a panel of a dashboard."""
    return build_page(title, chart, bare=True)


def timeline_page(
    title: str,
    measured: Mapping[int, Sequence[Mark]],
    ideal: Mapping[int, Sequence[Mark]] | None = None,
    captions: tuple[str, str] = CAPTIONS,
) -> str:
    """Return a page with a timeline, and below it, on the same scale, its ideal."""
    return chart_page(title, timeline_chart(measured, ideal, captions=captions))


def _footer(updated: str) -> str:
    return f"lightning-hybrid report; last entry of {updated.replace('T', ' ').rstrip('Z')} UTC." if updated else ""

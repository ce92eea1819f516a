"""``lightning-hybrid report``: an HTML page of one run or of an archive."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from lightning_hybrid.archive import Archive, Entry
from lightning_hybrid.errors import ArchiveError, ConfigurationError
from lightning_hybrid.report import archive_page, run_page

__all__ = ["report_command"]


def report_command(source: str = "archive", output: str = "report.html", url: str = "archive") -> None:
    """Write one page, which needs nothing else, of an archive's runs or of one run.

    Args:
        source: An archive (a folder or any fsspec URL), an entry's file, or an entry's id (or its beginning).
        output: The page.
        url: The archive in which an id is looked for.
    """
    page, what = _page(source, url)
    try:
        Path(output).write_text(page, encoding="utf-8")
    except OSError as error:
        raise ConfigurationError(f"output={output!r} cannot be written ({error}); give a file in a folder.") from error
    Console().print(f"{output}: {what}, {len(page.encode()) / 1e6:.2g} MB", highlight=False, soft_wrap=True)


def _page(source: str, url: str) -> tuple[str, str]:
    """Return the page, and what it shows."""
    if source.endswith(".json"):
        folder, _, name = source.rpartition("/")
        return _of(Archive(folder or ".").get(name.removesuffix(".json")))
    entries = Archive(source).list()
    if entries:
        return archive_page(entries, str(Archive(source))), f"{len(entries)} runs"
    folder, _, name = source.rpartition("/")
    problems = []
    for place in [folder] if folder else [url]:
        try:
            return _of(Archive(place).get(name))
        except ArchiveError as error:
            problems.append(str(error))
    raise ArchiveError(
        f"{source!r} is neither an archive with entries nor an entry ({'; '.join(problems)}). Give the folder that"
        ' ConfigArchive wrote (its default is "archive"), the file of an entry in it, or an entry\'s id with --url.'
    )


def _of(entry: Entry) -> tuple[str, str]:
    return run_page(entry), f"run {entry.id}"

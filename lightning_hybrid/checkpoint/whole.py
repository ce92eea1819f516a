"""Checkpoints that are whole or not there: written aside, marked, renamed; and which one to resume from.

A directory is whole if it has its marker, and every file that the marker lists has the size that it lists. A plain file
is whole if its end, which torch writes last, is there. A new checkpoint takes an old one's place by two renames;
between them the old one lies beside as ``<name>.replaced``, and is found there. Nothing here is a collective: one rank
does it.
"""

from __future__ import annotations

import glob
import hashlib
import io
import json
import logging
import os
import time
import zipfile
from collections.abc import Mapping
from typing import Any, Literal

import fsspec
from fsspec.implementations.local import LocalFileSystem

from lightning_hybrid.checkpoint.format import MARKER, META, METADATA, VERSION
from lightning_hybrid.errors import CheckpointError

__all__ = [
    "absolute",
    "begin_aside",
    "checkpoint_to_load",
    "is_directory",
    "latest_checkpoint",
    "local_path",
    "mark_whole",
    "moved_aside",
    "open_file",
    "put_in_place",
    "remove",
    "to_disk",
    "unfinished_checkpoints",
    "why_not_whole",
]

logger = logging.getLogger(__name__)

ASIDE, OLD = ".incomplete", ".replaced"
#: Parts of names that Lightning gives to what it resumes from without having been told a path.
LATEST_NAMES = ("last", "hpc_ckpt_", "on_exception")


def local_path(path: Any) -> str:
    """Return the path that a ``file:`` URL names (Lightning writes ``file:/``, too); others, and paths, as they are."""
    text = os.fspath(path)
    return _open(text)[1] if text.startswith("file:") else os.path.expanduser(text)


def absolute(path: Any) -> str:
    """Return a path that stays the same when the working directory changes; URLs as they are."""
    text = local_path(path)
    return text if "://" in text else os.path.abspath(text)


def is_directory(path: Any) -> bool:
    """Whether there is a directory at a path or URL."""
    fs, at = _open(path)
    return bool(fs.isdir(at))


def begin_aside(path: Any, *, is_folder: bool) -> str:
    """Return where to write what will be at ``path``, and make room for it: an earlier attempt is removed.

    Raises:
        CheckpointError: if there is a folder that is no checkpoint, which the new one would take the place of.
    """
    fs, at = _open(path)
    if fs.isdir(at) and fs.ls(at) and not any(fs.exists(f"{at}/{name}") for name in (MARKER, META, METADATA)):
        raise CheckpointError(
            f"there is a folder which is no checkpoint at {at}. Save to another path, or inside of it."
        )
    aside = at + ASIDE
    remove(fs.unstrip_protocol(aside))
    fs.makedirs(aside if is_folder else os.path.dirname(at), exist_ok=True)
    return aside if isinstance(fs, LocalFileSystem) else str(fs.unstrip_protocol(aside))


def mark_whole(folder: Any, facts: Mapping[str, Any]) -> None:
    """Write the marker into a directory in which everything else lies: sizes of all files, and ``facts``.

    Raises:
        CheckpointError: if a file of some rank cannot be seen from here.
    """
    fs, at = _open(folder)
    sizes = _sizes(fs, at)
    document = {
        "version": VERSION,
        "time": time.time(),
        **facts,
        "files": sizes,
        "sha256": {name: _hash(fs, f"{at}/{name}") for name in (META, METADATA)},
    }
    with fs.open(f"{at}/{MARKER}", "wb") as file:
        file.write(json.dumps(document, indent=1).encode())
        to_disk(file)


def put_in_place(aside: Any, path: Any) -> None:
    """Let what was written aside take its place; what was there before is removed afterwards."""
    fs, at = _open(path)
    _, source = _open(aside)
    if fs.exists(at):  # else the old one may be all that is left
        remove(f"{fs.unstrip_protocol(at)}{OLD}")
    if isinstance(fs, LocalFileSystem):
        if os.path.islink(at):  # the place was lent by save_last="link"
            os.unlink(at)
        elif os.path.isdir(at) or (os.path.exists(at) and os.path.isdir(source)):
            os.rename(at, at + OLD)
        os.replace(source, at)
        _folder_to_disk(os.path.dirname(os.path.abspath(at)))
    else:
        if fs.exists(at):
            fs.mv(at, at + OLD, recursive=True)
        fs.mv(source, at, recursive=True)
    remove(f"{fs.unstrip_protocol(at)}{OLD}")


def remove(path: Any) -> None:
    """Remove a checkpoint of either form, if it is there. Of a link only the link."""
    fs, at = _open(path)
    if isinstance(fs, LocalFileSystem) and os.path.islink(at):
        os.unlink(at)
    elif fs.exists(at):
        fs.rm(at, recursive=True)


def why_not_whole(path: Any) -> str | None:
    """Say what is wrong with a checkpoint, as the rest of a sentence that begins with its name; ``None`` if nothing."""
    fs, at = _open(path)
    if not fs.exists(at):
        return "does not exist"
    if not fs.isdir(at):
        return _why_file_is_not_whole(fs, at)
    if not fs.exists(f"{at}/{MARKER}"):
        if fs.glob(f"{glob.escape(at)}/*.safetensors"):
            return (
                "is a folder of safetensors, weights without a Trainer's state: build the model from it with"
                " lightning_hybrid.load_safetensors, or make a checkpoint of it with `lightning-hybrid convert"
                " SOURCE DESTINATION --to directory --weights_only`"
            )
        return f"has no {MARKER}: saving it was interrupted, or another program wrote it"
    try:
        document = json.loads(fs.cat_file(f"{at}/{MARKER}"))
        files, version = dict(document["files"]), int(document["version"])
    except (ValueError, KeyError, TypeError):
        return f"has a {MARKER} that cannot be read"
    if version > VERSION:
        return f"has form {version}, this version of lightning_hybrid reads up to {VERSION}: update it"
    found = _sizes(fs, at)
    for name, size in files.items():
        if found.get(name) != size:
            return f"is damaged: {name} has {found.get(name, 'no')} bytes where {size} were written"
    for name, digest in document.get("sha256", {}).items():
        if _hash(fs, f"{at}/{name}") != digest:
            return f"is damaged: {name} is not what was written"
    return None


def _why_file_is_not_whole(fs: Any, at: str) -> str | None:
    with fs.open(at, "rb") as file:
        beginning = file.read(2)
        if beginning == b"PK":
            return None if zipfile.is_zipfile(file) else "is cut off: its end is missing"
    if not beginning:
        return "is empty"
    is_old_form = beginning.startswith(b"\x80")  # of torch before 1.6: nothing tells whether all of it is there
    return None if is_old_form else "was not written by torch.save"


def latest_checkpoint(folder: str | os.PathLike[str]) -> str | None:
    """Return the path of the newest whole checkpoint in a folder, ``None`` if there is none.

    Directories and plain files (``*.ckpt``) count; the time is that at which they were complete. What is newer and not
    whole is passed over with a warning that says why.

    Args:
        folder: a path or an fsspec URL; it need not exist.
    """
    fs, at = _open(folder)
    if not fs.isdir(at):
        return None
    found = [(_time(fs, entry), entry) for entry in fs.ls(at, detail=False) if _may_be_one(fs, str(entry))]
    for _, entry in sorted(found, reverse=True):
        path = str(entry) if isinstance(fs, LocalFileSystem) else str(fs.unstrip_protocol(entry))
        if (reason := why_not_whole(path)) is None:
            return path
        logger.warning("%s %s. It is passed over.", path, reason)
    return None


def unfinished_checkpoints(folder: str | os.PathLike[str]) -> list[str]:
    """Return the names of what is half written in a folder: it is being saved now, or that was interrupted."""
    fs, at = _open(folder)
    names = [os.path.basename(str(entry).rstrip("/")) for entry in fs.ls(at, detail=False)] if fs.isdir(at) else []
    return sorted(name for name in names if name.endswith(ASIDE))


def moved_aside(folder: str | os.PathLike[str]) -> list[str]:
    """Return the paths of checkpoints in a folder whose successors were not put in place any more."""
    fs, at = _open(folder)
    entries = [str(entry).rstrip("/") for entry in fs.ls(at, detail=False)] if fs.isdir(at) else []
    return [entry for entry in entries if entry.endswith(OLD) and not fs.exists(entry.removesuffix(OLD))]


def checkpoint_to_load(path: Any) -> str:
    """Return the path of the checkpoint to read where ``path`` was asked for.

    That is ``path`` itself if it is whole. Otherwise, if its name says that the latest one is meant (``last.ckpt``), it
    is the newest whole one in its folder, with a warning.

    Raises:
        FileNotFoundError: if there is nothing at ``path``.
        CheckpointError: if what is there is not whole, or not a checkpoint.
    """
    fs, at = _open(path)
    text = local_path(path)
    if (reason := why_not_whole(text)) is None:
        return text
    if why_not_whole(text + OLD) is None:  # killed between the two renames of put_in_place
        return f"{text}{OLD}"
    name = os.path.basename(at.rstrip("/"))
    other = latest_checkpoint(fs.unstrip_protocol(os.path.dirname(at.rstrip("/"))))
    if other is not None and any(part in name for part in LATEST_NAMES):
        logger.warning("%s %s. Resuming from %s, the newest whole checkpoint beside it.", text, reason, other)
        return other
    beside = f"The newest whole one beside it is {other}." if other else "There is no whole one beside it."
    if reason == "does not exist":
        raise FileNotFoundError(f"The checkpoint {text} does not exist. {beside}")
    raise CheckpointError(f"The checkpoint {text} {reason}. {beside}")


def _may_be_one(fs: Any, entry: str) -> bool:
    """By its name. ``.replaced`` is one whose successor was not put in place any more."""
    name = os.path.basename(entry.rstrip("/"))
    return name.removesuffix(OLD).endswith(".ckpt") or (fs.exists(f"{entry}/{MARKER}") and not name.endswith(ASIDE))


def _time(fs: Any, entry: str) -> float:
    try:
        return float(json.loads(fs.cat_file(f"{entry}/{MARKER}"))["time"])
    except (OSError, ValueError, KeyError, TypeError):
        modified = fs.modified(entry) if fs.exists(entry) else 0.0
        return float(modified.timestamp() if hasattr(modified, "timestamp") else modified)


def _sizes(fs: Any, at: str) -> dict[str, int]:
    files = fs.find(at, detail=True)
    prefix = at.rstrip("/") + "/"
    return {
        str(name).removeprefix(prefix): int(entry["size"])
        for name, entry in sorted(files.items())
        if not str(name).endswith("/" + MARKER)
    }


def _hash(fs: Any, path: str) -> str | None:
    if not fs.exists(path):
        return None
    digest = hashlib.sha256()
    with fs.open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def to_disk(file: Any) -> None:
    """Wait until a local file would survive a loss of power."""
    file.flush()
    try:
        os.fsync(file.fileno())
    except (AttributeError, io.UnsupportedOperation):  # not a local file
        return


def _folder_to_disk(folder: str) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _open(path: Any) -> tuple[Any, str]:
    text = os.fspath(path)
    if "://" not in text or text.startswith("file:"):  # of a local path fsspec takes "::" for a chain of systems
        return LocalFileSystem(), str(LocalFileSystem._strip_protocol(text))
    fs, at = fsspec.url_to_fs(text)
    return fs, str(at)


def open_file(folder: Any, name: str, mode: Literal["rb", "wb"]) -> Any:
    """Open a file in a directory."""
    fs, at = _open(folder)
    return fs.open(f"{at}/{name}", mode)

"""A folder of entries at an fsspec URL: one JSON document per run, no server, no lock.

How a write is atomic: on file systems with a rename (local and shared disks, SFTP, HDFS, SMB) the document is written
under a hidden temporary name in the same folder and renamed over its own name. Object stores have no rename, but a PUT
shows the whole object or the old one, so there the document is written in place. A reader thus sees an entry whole or
not at all, and no writer touches the document of another run.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import time
from collections.abc import Sequence
from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileSystem

from lightning_hybrid.archive.entry import Entry, is_id
from lightning_hybrid.errors import ArchiveError

__all__ = ["Archive"]

log = logging.getLogger(__name__)

#: Protocols whose single write shows the whole object or nothing.
ATOMIC_PUT = frozenset({"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "oci", "oss", "hf", "memory"})
#: No entry is larger, in bytes; what is larger is not read.
MAX_BYTES = 4 * 2**20
#: Age in seconds at which the temporary file of a killed writer is removed.
STALE_SECONDS = 3600.0

#: Files that a warning of this process named already.
_warned: set[str] = set()


class Archive:
    """Entries in one folder. Any number of processes may read and write at once.

    Only names that end in ``.json`` and do not begin with a dot are entries; anything else in the folder is left alone.

    Args:
        url: a path or any fsspec URL. The folder is made at the first write; until then the archive is empty.

    Raises:
        ArchiveError: if fsspec does not know the URL's protocol or its package is not installed.
    """

    def __init__(self, url: str | os.PathLike[str] = "./archive") -> None:
        try:
            self._fs, path = fsspec.url_to_fs(os.fspath(url))
        except (ValueError, ImportError) as error:
            raise ArchiveError(f"cannot open the archive: {error}") from error
        self.path: str = path.rstrip("/") or "/"
        """The folder, without the protocol and any credentials of the URL."""
        self._is_local = isinstance(self._fs, LocalFileSystem)
        self._swept = False

    def __str__(self) -> str:
        if self._is_local:
            return self.path
        protocol = self._fs.protocol
        return f"{protocol if isinstance(protocol, str) else protocol[0]}://{self.path}"

    def file_of(self, entry_id: str) -> str:
        """Return the path of an entry's document, without the protocol."""
        return f"{self.path}/{entry_id}.json"

    def list(self) -> list[Entry]:
        """Return all entries, oldest first. Broken and foreign documents are skipped with one warning each.

        Raises:
            ArchiveError: if the folder exists and cannot be listed.
        """
        entries = []
        for name, size, is_file in self._documents():
            try:
                if not is_file:
                    raise ArchiveError("it is not a file")
                if size is not None and size > MAX_BYTES:
                    raise ArchiveError(f"its {size} bytes are more than the {MAX_BYTES} that an entry may have")
                entries.append(self._read(name))
            except FileNotFoundError:
                continue  # removed since the listing
            except ArchiveError as error:
                self._warn_once(name, error)
        return sorted(entries, key=lambda entry: (entry.time, entry.id))

    def get(self, entry_id: str) -> Entry:
        """Return one entry by its id or by a beginning that no other entry shares.

        Raises:
            ArchiveError: if there is none, or several, or its document is broken.
        """
        try:
            return self._read(self.file_of(self._whole_id(entry_id)))
        except (ArchiveError, FileNotFoundError) as error:
            raise ArchiveError(f"archive {self}, entry {entry_id!r}: {error}") from error

    def _whole_id(self, beginning: str) -> str:
        if is_id(beginning) and self._fs.exists(self.file_of(beginning)):
            return beginning  # without listing a folder that may be long
        ids = [name.rsplit("/", 1)[-1].removesuffix(".json") for name, _, _ in self._documents()]
        found = [name for name in ids if beginning and name.startswith(beginning)]
        if len(found) != 1:
            what = f"{len(found)} of the {len(ids)} ids begin" if found else f"none of the {len(ids)} ids begins"
            raise ArchiveError(f"{what} so; give the whole id of one of them")
        return found[0]

    def write(self, entry: Entry) -> str:
        """Write an entry, or replace it by its newer state, and return its path once it is there for every reader.

        Only the run that made an entry may write it again.

        Raises:
            ArchiveError: if the folder cannot be made or written.
        """
        name, data = self.file_of(entry.id), entry.to_json().encode()
        try:
            self._fs.makedirs(self.path, exist_ok=True)
            self._sweep()
            if self._is_local:
                _replace_local(name, data, self._temporary(entry.id))
            elif _protocols(self._fs) & ATOMIC_PUT:
                self._fs.pipe_file(name, data)
            else:
                self._replace_remote(name, data, self._temporary(entry.id))
        except Exception as error:  # file systems are plug-ins and raise what they like
            raise ArchiveError(
                f"cannot write archive entry {name} ({type(error).__name__}: {error});"
                " give the archive a folder that this user may write."
            ) from error
        return name

    def _temporary(self, entry_id: str) -> str:
        return f"{self.path}/.{entry_id}.{os.getpid()}-{secrets.token_hex(4)}.tmp"

    def _replace_remote(self, name: str, data: bytes, temporary: str) -> None:
        try:
            self._fs.pipe_file(temporary, data)
            self._fs.mv(temporary, name)
        except BaseException:
            with contextlib.suppress(Exception):
                self._fs.rm_file(temporary)
            raise

    def _sweep(self) -> None:
        """Remove, once per archive object, what killed writers left. Local folders only: elsewhere listing is dear."""
        if self._swept or not self._is_local:
            return
        self._swept = True
        oldest = time.time() - STALE_SECONDS
        with os.scandir(self.path) as files:
            for file in files:
                with contextlib.suppress(OSError):
                    if file.name.startswith(".") and file.name.endswith(".tmp") and file.stat().st_mtime < oldest:
                        os.remove(file.path)

    def _documents(self) -> Sequence[tuple[str, int | None, bool]]:
        """Return (path, bytes, whether it is a file) of all names that an entry may have."""
        try:
            self._fs.invalidate_cache(self.path)
            listing: Sequence[dict[str, Any]] = self._fs.ls(self.path, detail=True)
        except FileNotFoundError:
            return []
        except Exception as error:  # see write
            raise ArchiveError(f"cannot list archive {self}: {type(error).__name__}: {error}") from error
        found = []
        for info in listing:
            name = str(info["name"]).rstrip("/")
            base = name.rsplit("/", 1)[-1]
            if base.endswith(".json") and not base.startswith("."):
                found.append((name, info.get("size"), info.get("type") == "file"))
        return found

    def _read(self, name: str) -> Entry:
        try:
            text = self._fs.cat_file(name).decode()
        except FileNotFoundError:
            raise
        except UnicodeDecodeError as error:
            raise ArchiveError(f"it is not text ({error})") from error
        except Exception as error:  # see write
            raise ArchiveError(f"it cannot be read ({type(error).__name__}: {error})") from error
        entry = Entry.from_json(text)
        if self.file_of(entry.id).rsplit("/", 1)[-1] != name.rsplit("/", 1)[-1]:
            raise ArchiveError(f"its name is not that of its id {entry.id} (a copy?)")
        return entry

    def _warn_once(self, name: str, error: ArchiveError) -> None:
        if name not in _warned:
            _warned.add(name)
            log.warning("skipping archive file %s: %s", name, error)


def _protocols(filesystem: Any) -> set[str]:
    protocol = filesystem.protocol
    return {protocol} if isinstance(protocol, str) else set(protocol)


def _replace_local(name: str, data: bytes, temporary: str) -> None:
    try:
        with open(temporary, "xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())  # else a power cut can leave the new name with no content
        os.replace(temporary, name)
    except BaseException:
        with contextlib.suppress(OSError):
            os.remove(temporary)
        raise

"""A folder of entries at an fsspec URL: one JSON document per run, no server, no lock.

How a write is atomic: on file systems with a rename (local and shared disks, SFTP, HDFS, SMB) the document is written
under a hidden temporary name in the same folder and renamed over its own name. Object stores have no rename, but a PUT
shows the whole object or the old one, so there the document is written in place. A reader thus sees an entry whole or
not at all, and no writer touches the document of another run.

How many entries are found fast: a hidden index beside them (:mod:`lightning_hybrid.archive.row`) keeps a line for each
document, with its size, time and inode. A reader lists the folder, reads what no line stands for, and adds lines, so an
index that is missing, damaged or behind costs time and is never wrong. Folders of less than :data:`INDEX_FROM` entries
have none. Entries that a choice falls on are read from their own documents.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import secrets
import stat
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import fsspec
from fsspec.implementations.local import LocalFileSystem

from lightning_hybrid.archive.entry import Entry, is_id
from lightning_hybrid.archive.row import INDEX_NAME, Known, Row, read_index, row_of, to_line
from lightning_hybrid.errors import ArchiveError

__all__ = ["Archive", "no_collection"]

log = logging.getLogger(__name__)

#: Protocols whose single write shows the whole object or nothing.
ATOMIC_PUT = frozenset({"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "oci", "oss", "hf", "memory"})
#: No entry is larger, in bytes; what is larger is not read.
MAX_BYTES = 4 * 2**20
#: Documents without a line that make a reader begin an index. A few are read as fast as it.
INDEX_FROM = 256
#: No index is larger, in bytes for each document of the folder, and altogether without documents.
_INDEX_BYTES, _INDEX_START = 8192, 2**20
#: Age in seconds at which the temporary file of a killed writer is removed.
STALE_SECONDS = 3600.0

#: Files that a warning of this process named already.
_warned: set[str] = set()


class _Document(NamedTuple):
    """A name that an entry may have."""

    name: str
    base: str
    """The name without its folder."""
    size: int | None
    is_file: bool
    key: str
    """Changes with the document; empty where the file system does not say when it was written."""


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
        if self._is_local or "://" in self.path:  # fsspec leaves it there for http
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
        for document in self._documents():
            try:
                entries.append(self._read_listed(document))
            except FileNotFoundError:
                continue  # removed since the listing
            except ArchiveError as error:
                self._warn_once(document.name, str(error))
        return sorted(entries, key=lambda entry: (entry.time, entry.id))

    def known(self) -> Known:
        """Return what choices need to know of all entries, in any order: fast, however many there are.

        Broken and foreign documents are skipped with one warning each.

        Raises:
            ArchiveError: if the folder exists and cannot be listed.
        """
        with no_collection():
            return self._known()

    def _known(self) -> Known:
        documents = self._documents()
        lines, num_lines = self._read_index(len(documents))
        rows, added = list[Row](), list[bytes]()
        for document in documents:
            base = document.base
            line = lines.get(base)
            if line is not None and line[0] == document.key and document.key:
                found = line[1]
            else:
                try:
                    found = row_of(self._read_listed(document))
                except FileNotFoundError:
                    continue
                except ArchiveError as error:
                    found = str(error)
                added.append(to_line(base, document.key, found))
            if isinstance(found, str):
                self._warn_once(document.name, found)
            else:
                rows.append(found)
        if added and (lines or len(added) >= INDEX_FROM):
            self._extend_index(documents, lines, num_lines, added)
        return Known(rows, self._load)

    def _load(self, row: Row) -> Entry | None:
        try:
            return self._read(self.file_of(row.id)) if is_id(row.id) else None
        except FileNotFoundError:
            return None
        except ArchiveError as error:
            self._warn_once(self.file_of(row.id), str(error))
            return None

    def get(self, entry_id: str) -> Entry:
        """Return one entry by its id or by a beginning that no other entry shares.

        Raises:
            ArchiveError: if there is none, or several, or its document is broken.
        """
        try:
            name = self.file_of(self._whole_id(entry_id))
            info = self._fs.info(name)
            return self._read_listed(
                _Document(name, name.rpartition("/")[2], info.get("size"), info.get("type") == "file", "")
            )
        except (ArchiveError, FileNotFoundError) as error:
            raise ArchiveError(f"archive {self}, entry {entry_id!r}: {error}") from error

    def _whole_id(self, beginning: str) -> str:
        if is_id(beginning) and self._fs.exists(self.file_of(beginning)):
            return beginning  # without listing a folder that may be long
        ids = [document.base.removesuffix(".json") for document in self._documents()]
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
            self._note_written(entry, name)
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

    # ---- the index -------------------------------------------------------------------------------------------------

    @property
    def _index(self) -> str:
        return f"{self.path}/{INDEX_NAME}"

    def _read_index(self, num_documents: int) -> tuple[dict[str, tuple[str, Row | str]], int]:
        """Return what :func:`read_index` finds; nothing where there is none, or none of a sane size."""
        try:
            info = self._fs.info(self._index)
            if info["type"] != "file" or info["size"] > _INDEX_START + _INDEX_BYTES * num_documents:
                return {}, 0
            return read_index(self._fs.cat_file(self._index))
        except Exception:  # see write; and an index is never needed
            return {}, 0

    def _extend_index(
        self,
        documents: Iterable[_Document],
        lines: dict[str, tuple[str, Row | str]],
        num_lines: int,
        added: Sequence[bytes],
    ) -> None:
        """Keep what this reader found out: appended, or in a new index where most of the old one is of no use.

        A line that another process adds while an index is replaced is lost; the next reader reads that document.
        """
        with contextlib.suppress(Exception):  # a folder that may only be read
            if self._is_local and num_lines < 2 * len(lines) + INDEX_FROM and lines:
                _append(self._index, b"".join(added))
                return
            present = {document.base for document in documents}
            kept = [to_line(name, *line) for name, line in lines.items() if name in present]
            data, temporary = b"".join([*kept, *added]), self._temporary("index")
            if self._is_local:
                _replace_local(self._index, data, temporary)
            elif _protocols(self._fs) & ATOMIC_PUT:
                self._fs.pipe_file(self._index, data)
            else:
                self._replace_remote(self._index, data, temporary)

    def _note_written(self, entry: Entry, name: str) -> None:
        """Add a line for an entry, if the folder has an index already."""
        if self._is_local and os.path.exists(self._index):
            with contextlib.suppress(OSError):  # the next reader does it
                line = to_line(f"{entry.id}.json", _key(os.stat(name)), row_of(entry))
                _append(self._index, line)

    # ---- documents -------------------------------------------------------------------------------------------------

    def _documents(self) -> Sequence[_Document]:
        """Return all names that an entry may have."""
        try:
            if self._is_local:
                return _scan(self.path)
            self._fs.invalidate_cache(self.path)
            listing: Sequence[dict[str, Any]] = self._fs.ls(self.path, detail=True)
        except FileNotFoundError:
            return []
        except Exception as error:  # see write
            raise ArchiveError(f"cannot list archive {self}: {type(error).__name__}: {error}") from error
        found = []
        for info in listing:
            name = str(info["name"]).rstrip("/")
            if _may_be_entry(base := name.rpartition("/")[2]):
                changed = next((info[key] for key in _CHANGES if info.get(key)), None)
                key = "" if changed is None else f"{info.get('size')}-{changed}"
                found.append(_Document(name, base, info.get("size"), info.get("type") == "file", key))
        return found

    def _read_listed(self, document: _Document) -> Entry:
        if not document.is_file:
            raise ArchiveError("it is not a file")
        if document.size is not None and document.size > MAX_BYTES:
            raise ArchiveError(f"its {document.size} bytes are more than the {MAX_BYTES} that an entry may have")
        return self._read(document.name)

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

    def _warn_once(self, name: str, reason: str) -> None:
        if name not in _warned:
            _warned.add(name)
            log.warning("skipping archive file %s: %s", name, reason)


#: What file systems call the time or the content's sum of a file, the surest first.
_CHANGES = (
    "ETag",
    "etag",
    "md5Hash",
    "content_settings",
    "LastModified",
    "last_modified",
    "updated",
    "mtime",
    "created",
)


@contextlib.contextmanager
def no_collection() -> Iterator[None]:
    """Hundreds of thousands of small objects that all stay would have the collector look at everything, many times."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _may_be_entry(base: str) -> bool:
    return base.endswith(".json") and not base.startswith(".")


def _scan(folder: str) -> list[_Document]:
    """A local folder's documents: two system calls each, and as little else as can be."""
    found, regular = list[_Document](), stat.S_IFREG
    with os.scandir(folder) as files:
        for file in files:
            base = file.name
            if base[-5:] == ".json" and base[0] != ".":  # _may_be_entry, without a call
                try:
                    state = file.stat()
                except FileNotFoundError:  # a link to nowhere, or removed since
                    continue
                is_file = stat.S_IFMT(state.st_mode) == regular
                found.append(_Document(file.path, base, state.st_size, is_file, _key(state)))
    return found


def _key(state: os.stat_result) -> str:
    """Changes whenever a document is written: each write makes a new file."""
    return f"{state.st_size}-{state.st_mtime_ns}-{state.st_ino}"


def _append(name: str, data: bytes) -> None:
    """Add whole lines at the end of a file that any number of processes add to."""
    descriptor = os.open(name, os.O_WRONLY | os.O_APPEND)
    try:
        os.write(descriptor, data)
    finally:
        os.close(descriptor)


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

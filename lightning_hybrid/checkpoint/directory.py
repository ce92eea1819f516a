"""A checkpoint's dict <-> a directory (see :mod:`lightning_hybrid.checkpoint.format`).

Read, it is the same dict as a plain file's, with :class:`~lightning_hybrid.checkpoint.tensors.Stored` tensors. So hooks
may edit it, and what loads plain files loads directories.
"""

from __future__ import annotations

import copy
import io
import os
import re
import shutil
import warnings
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor

from lightning_hybrid.checkpoint.format import ENTRY, META, VERSION, optimizer_key, plain_key
from lightning_hybrid.checkpoint.planners import SharePlanner, StoredTensors
from lightning_hybrid.checkpoint.tensors import Share, Stored
from lightning_hybrid.checkpoint.whole import (
    begin_aside,
    local_path,
    mark_whole,
    open_file,
    put_in_place,
    remove,
    to_disk,
)
from lightning_hybrid.errors import CheckpointError

__all__ = [
    "Parts",
    "as_shares",
    "begin_directory",
    "divide",
    "on_first",
    "read_directory",
    "refuse_shards",
    "take_out",
    "write_directory",
    "write_parts",
]

_Path = tuple[Any, ...]

#: torch's words when a file ends before what it has written.
_CUT_OFF = re.compile(r"unexpected pos|PytorchStreamWriter failed|file write failed")


def as_shares(checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """Return a plain checkpoint's dict with shares for its tensors, to be written as a directory by one process.

    Tensors of the module's state and of optimizers are taken (also those that are not read yet); all else stays.
    """
    shares: dict[int, Any] = {}

    def share(value: Any, key: str | None) -> Any:
        if not isinstance(value, torch.Tensor) or value.numel() == 0:
            return value
        if id(value) not in shares:
            shares[id(value)] = Share.make(value.shape, value.dtype, [((0,) * value.ndim, value)], key)
        return shares[id(value)]

    whole = dict(checkpoint)
    if "state_dict" in whole:
        state = whole["state_dict"] = copy.copy(whole["state_dict"])
        state.update({key: share(value, None) for key, value in state.items()})
    whole["optimizer_states"] = [
        {**state, "state": _named_states(state, share)} for state in whole.get("optimizer_states", ())
    ]
    if "optimizer_states" not in checkpoint:
        del whole["optimizer_states"]
    return whole


def _named_states(state: Mapping[str, Any], share: Callable[[Any, str], Any]) -> dict[Any, Any]:
    groups = state.get("param_names") or [group.get("param_names") for group in state["param_groups"]]
    names: dict[Any, str] = {}
    for group, named in zip(state["param_groups"], groups, strict=True):
        names.update(zip(group["params"], named or map(str, group["params"]), strict=True))
    return {
        index: {key: share(value, f"{names[index]}.{key}") for key, value in values.items()}
        if index in names
        else values
        for index, values in state["state"].items()
    }


def take_out(checkpoint: Mapping[str, Any]) -> tuple[dict[str, Any], dict[_Path, str], dict[str, Any]]:
    """Divide a checkpoint into what ``meta.pt`` holds, where in it a tensor is missing, and these tensors by name."""
    stored: dict[_Path, str] = {}
    shares: dict[str, Any] = {}
    names: dict[int, str] = {}
    around: set[int] = set()

    def walk(value: Any, path: _Path) -> Any:
        if not isinstance(value, (dict, list, tuple)):
            return leaf(value, path)
        if id(value) in around:
            raise CheckpointError(
                f"The checkpoint's {plain_key(path)} contains itself. Take it out in on_save_checkpoint, or use"
                " save_distributed_checkpoint=False."
            )
        around.add(id(value))
        try:
            return inner(value, path)
        finally:
            around.remove(id(value))

    def leaf(value: Any, path: _Path) -> Any:
        if isinstance(value, Share):
            if id(value) not in names:
                is_state = path[0] == "optimizer_states" and value.key is not None
                key = optimizer_key(path[1], value.key) if is_state and value.key else plain_key(path)
                while key in shares:  # two dicts may lead to one name
                    key += "'"
                names[id(value)], shares[key] = key, value
            stored[path] = names[id(value)]
            return None
        return value

    def inner(value: Any, path: _Path) -> Any:
        if isinstance(value, dict):
            changed = {key: new for key, item in value.items() if (new := walk(item, (*path, key))) is not item}
            walked = copy.copy(value) if changed else value  # an OrderedDict keeps torch's versions of modules
            for key, new in changed.items():  # not by `update`, which a Counter adds up with
                walked[key] = new
            return walked
        if type(value) in (list, tuple):
            return type(value)(walk(item, (*path, i)) for i, item in enumerate(value))
        return value

    return walk(dict(checkpoint), ()), stored, shares


def refuse_shards(checkpoint: Mapping[str, Any]) -> None:
    """Of what hooks, callbacks and optimizers have put into a checkpoint, none may be a rank's part of a tensor.

    Raises:
        CheckpointError: with its place in the checkpoint.
    """
    seen: set[int] = set()

    def look(value: Any, path: _Path) -> None:
        if isinstance(value, DTensor):
            raise CheckpointError(
                f"The checkpoint's {plain_key(path)} is a shard (DTensor): rank 0's would be taken for the whole. Save"
                " value.full_tensor(), made on all ranks; for averages of the weights use Lightning's WeightAveraging."
            )
        if isinstance(value, (dict, list, tuple)) and id(value) not in seen:
            seen.add(id(value))
            for key, item in value.items() if isinstance(value, dict) else enumerate(value):
                look(item, (*path, key))

    look(checkpoint, ())


def write_directory(checkpoint: Mapping[str, Any], path: Any, group: dist.ProcessGroup | None = None) -> None:
    """Write a checkpoint as a directory: aside, and in its place when all is there. A collective.

    Args:
        checkpoint: with shares in the place of tensors; what is not a share is taken from the group's first rank.
        path: a folder or an fsspec URL, the same on all ranks, and seen by all of them.
        group: of the ranks that write; all by default. Without a process group it is this process.

    Raises:
        CheckpointError: on every rank, with the first cause. What was at ``path`` is as it was.
    """
    parts = divide(checkpoint, path, group)
    write_parts(parts, begin_directory(path, group), path, group)


@dataclass(frozen=True)
class Parts:
    """A checkpoint that has been divided into what lies in its directory; the first three are the first rank's."""

    meta: bytes
    """The content of ``meta.pt``."""
    facts: Mapping[str, Any]
    """What the marker says besides sizes."""
    wanted: Collection[str]
    """The names of all tensors to which ``meta.pt`` refers."""
    shares: dict[str, Any]


def divide(checkpoint: Mapping[str, Any], path: Any, group: dist.ProcessGroup | None = None) -> Parts:
    """Divide a checkpoint; nothing that is not a tensor is changed by training any more. A collective.

    Raises:
        CheckpointError: on every rank, if something in it cannot be pickled.
    """
    meta, stored, shares = take_out(checkpoint)
    buffer = io.BytesIO()
    meta[ENTRY] = {**meta.get(ENTRY, {}), "version": VERSION, "stored": [[list(p), key] for p, key in stored.items()]}
    on_first(lambda: torch.save(meta, buffer), path, group)
    facts = {key: meta[key] for key in ("global_step", "epoch") if isinstance(meta.get(key), int)}
    return Parts(buffer.getvalue(), facts, set(stored.values()), shares)


def begin_directory(path: Any, group: dist.ProcessGroup | None = None) -> str:
    """Return where to write what will be at ``path``, the same on all ranks. A collective.

    Raises:
        CheckpointError: on every rank, if that is nowhere.
    """
    aside: str = on_first(lambda: begin_aside(path, is_folder=True), path, group)
    return aside


def write_parts(
    parts: Parts, aside: str, path: Any, group: dist.ProcessGroup | None, finish_copies: Callable[[], Any] | None = None
) -> None:
    """See :func:`write_directory`.

    Args:
        parts: what to write.
        aside: from :func:`begin_directory`.
        path: where it will lie.
        group: of the ranks that write.
        finish_copies: to be called on all ranks beforehand.
    """
    try:
        if finish_copies is not None:
            _on_all(finish_copies, path, group)
        _save_tensors(parts, aside, path, group)
        on_first(lambda: _finish(parts, aside, path), path, group)
    except CheckpointError:
        if _is_first(group):
            _try_to_remove(aside)
        raise


def _save_tensors(parts: Parts, aside: str, path: Any, group: dist.ProcessGroup | None) -> None:
    writer = FsspecWriter(aside) if "://" in aside else FileSystemWriter(aside)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*torch.distributed is disabled.*")
            save(parts.shares, storage_writer=writer, planner=SharePlanner(parts.wanted), process_group=group)
    except CheckpointException as error:
        rank, (cause, _) = next(iter(error.failures.items()))
        raise CheckpointError(f"The checkpoint {path} could not be saved: rank {rank}: {_text(cause, path)}") from cause


def _finish(parts: Parts, aside: str, path: Any) -> None:
    with open_file(aside, META, "wb") as file:
        file.write(parts.meta)
        to_disk(file)
    mark_whole(aside, parts.facts)
    put_in_place(aside, path)


def read_directory(path: Any, weights_only: bool | None = None) -> dict[str, Any]:
    """Return the dict of a directory, its tensors not read yet. Not a collective; each rank reads what it uses.

    Raises:
        CheckpointError: if the directory is not one of ours.
    """
    text = local_path(path)
    with open_file(text, META, "rb") as file:
        checkpoint: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=weights_only)
    entry = checkpoint.get(ENTRY, {})
    if "stored" not in entry:
        raise CheckpointError(f"The directory {text} was not written by lightning_hybrid.")
    reader = FsspecReader(text) if "://" in text else FileSystemReader(text)
    tensors = StoredTensors(reader, trusted=weights_only is False)
    found: dict[str, Stored] = {}
    for place, key in entry.pop("stored"):
        if key not in found:
            found[key] = tensors[key]
        checkpoint = _set(checkpoint, place, found[key])
    return checkpoint


def _set(container: Any, path: list[Any], value: Any) -> Any:
    """Put a value at a path; tuples on the way are made anew."""
    if not path:
        return value
    first, *rest = path
    if isinstance(container, tuple):
        return (*container[:first], _set(container[first], rest, value), *container[first + 1 :])
    container[first] = _set(container[first], rest, value)
    return container


def on_first(
    function: Callable[[], Any], path: Any, group: dist.ProcessGroup | None = None, *, doing: str = "saved"
) -> Any:
    """Run a function on the group's first rank and return its result on all. A collective.

    Raises:
        FileNotFoundError: on every rank, if it does.
        CheckpointError: on every rank, if it fails otherwise. ``doing`` says what failed.
    """
    outcome: list[Any] = [None, None]
    if _is_first(group):
        try:
            outcome[0] = function()
        except Exception as error:
            is_told = doing == "loaded" and isinstance(error, (CheckpointError, FileNotFoundError))
            text = f"The checkpoint {path} could not be {doing}: {_text(error, path)}"
            outcome[1] = error if is_told else CheckpointError(text)
    if dist.is_initialized():
        dist.broadcast_object_list(outcome, group=group, group_src=0)
    if outcome[1] is not None:
        raise outcome[1]
    return outcome[0]


def _on_all(function: Callable[[], Any], path: Any, group: dist.ProcessGroup | None) -> None:
    """Run a function on each rank; if it fails on some, fail on all. A collective."""
    problem = None
    try:
        function()
    except Exception as error:
        rank = dist.get_rank() if dist.is_initialized() else 0
        problem = f"The checkpoint {path} could not be saved: rank {rank}: {_text(error, path)}"
    problems = [problem]
    if dist.is_initialized():
        problems = [None] * dist.get_world_size(group)
        dist.all_gather_object(problems, problem, group=group)
    for text in filter(None, problems):
        raise CheckpointError(text)


def _text(error: BaseException, path: Any) -> str:
    text = str(error) or repr(error)
    if isinstance(error, CheckpointError):
        return text
    return f"{type(error).__name__}: {text}{_room(path) if _CUT_OFF.search(text) else ''}"


def _room(path: Any) -> str:
    """What torch does not say of a file that it could not write on."""
    try:
        free = shutil.disk_usage(os.path.dirname(path)).free
    except (OSError, TypeError):
        return ""
    return f". The file was cut off: a full disk ({free / 1e9:.3g} GB are free), or a quota or limit of a file's size"


def _try_to_remove(aside: str) -> None:
    try:
        remove(aside)
    except OSError:  # it is marked by its name, and the first cause matters more
        return


def _is_first(group: dist.ProcessGroup | None) -> bool:
    return not dist.is_initialized() or dist.get_rank(group) == 0

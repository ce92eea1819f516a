"""One form of checkpoint into another, in one process, without a GPU and without the model's code.

Tensors are mapped or read one at a time on both sides: memory is that of one tensor (for safetensors, of one of the
files that are written), whatever the size of the checkpoint.

[Note: a plain file that is filled in place]
``torch.save`` needs all tensors at once. Coming from a directory they are not there. So a file of the right size is
written around tensors whose values are left out (``skip_data``), then mapped, and each tensor is read straight into its
place in the file. The zip archive's checksums are those of zeros then; nothing in torch reads them.
"""

from __future__ import annotations

import mmap
import os
import pickle
import re
import shutil
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import lightning
import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from torch import Tensor

from lightning_hybrid.checkpoint.directory import as_shares, read_directory, write_directory
from lightning_hybrid.checkpoint.files import write_file
from lightning_hybrid.checkpoint.format import ENTRY, MARKER, META, METADATA
from lightning_hybrid.checkpoint.safetensors_files import (
    INDEX,
    SINGLE,
    SafetensorsFolder,
    TensorSpec,
    begin_folder,
    plan_shards,
    size_in_bytes,
    write_index,
    write_shard,
)
from lightning_hybrid.checkpoint.tensors import Stored
from lightning_hybrid.checkpoint.whole import begin_aside, is_directory, local_path, put_in_place, remove, why_not_whole
from lightning_hybrid.errors import CheckpointError, ConfigurationError

__all__ = ["Form", "convert", "form_of"]

Form = Literal["file", "directory", "safetensors"]
_NAMES = {
    "file": "a plain .ckpt file",
    "directory": "a checkpoint directory (save_distributed_checkpoint=True)",
    "safetensors": "a folder of safetensors",
}


@dataclass(kw_only=True)
class Converted:
    """What was done."""

    source: Form
    destination: Form
    num_tensors: int
    num_bytes: int
    left_out: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        scale, unit = (1e9, "GB") if self.num_bytes >= 1e9 else (1e6, "MB")
        size = f"{self.num_tensors:,} tensors of {self.num_bytes / scale:,.3g} {unit}"
        text = f"{_NAMES[self.source]} became {_NAMES[self.destination]}: {size}."
        return text + (f" Left out: {', '.join(self.left_out)}." if self.left_out else "")


def convert(
    source: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    to: Form | None = None,
    *,
    weights_only: bool = False,
    prefix: str = "",
    config: str | os.PathLike[str] | None = None,
    max_shard_size: int | str = "5GB",
    trusted: bool = False,
) -> Converted:
    """Read a checkpoint in any of the three forms and write it in another one.

    Args:
        source: ``.ckpt`` of any Trainer; a checkpoint directory (also an fsspec URL); or a folder of safetensors.
        destination: must not exist. Written aside, and in its place when it is whole.
        to: by default ``"file"`` for a name that ends with ``.ckpt``.
        weights_only: leave out everything but the weights. Needed where safetensors are on either side.
        prefix: the name of the model in the LightningModule with a dot (``"model."``): taken from names on the way to
            safetensors (what lacks it is left out), put before them on the way back.
        config: folder whose ``config.json`` and ``generation_config.json`` are put beside safetensors.
        max_shard_size: of a safetensors file.
        trusted: read a plain file or directory that holds objects of any class; loading such a file can run code.

    Raises:
        CheckpointError: for what cannot be read, is not whole, or exists already; nothing is left at ``destination``.
        ConfigurationError: if the two forms do not go together.
    """
    source, destination = local_path(source), local_path(destination)
    given = form_of(source)
    to = to or ("file" if os.fspath(destination).endswith(".ckpt") else None)
    _check(given, to, destination, weights_only=weights_only, prefix=prefix, config=config)
    assert to is not None
    if given == "safetensors":
        checkpoint, left_out = _from_safetensors(source, prefix), []
    else:
        checkpoint = _read(source, given, trusted)
        left_out = sorted(checkpoint.keys() - {"state_dict"}) if weights_only else []
    if weights_only and given != "safetensors":
        checkpoint = {key: value for key, value in checkpoint.items() if key in _KEPT}
        left_out = [key for key in left_out if key not in (*_KEPT, ENTRY)]
    if to == "safetensors":
        tensors, more = _to_safetensors(checkpoint["state_dict"], prefix)
        _write_safetensors(tensors, destination, size_in_bytes(max_shard_size), config)
        return _report(given, to, tensors, [*left_out, *more])
    if to == "directory":
        write_directory(as_shares(checkpoint), destination)
    elif given == "directory":
        _write_filled(checkpoint, destination)
    else:
        write_file(checkpoint, destination, TorchCheckpointIO())
    return _report(given, to, checkpoint, left_out)


#: What a checkpoint of weights alone has.
_KEPT = (
    "state_dict",
    "pytorch-lightning_version",
    "epoch",
    "global_step",
    "hyper_parameters",
    "hparams_name",
    "datamodule_hyper_parameters",
)


def form_of(path: str | os.PathLike[str]) -> Form:
    """Recognise a checkpoint.

    Raises:
        CheckpointError: if it is none of the three; says what it looks like.
    """
    text = local_path(path)
    if is_directory(text):
        if os.path.exists(os.path.join(text, SINGLE)) or os.path.exists(os.path.join(text, INDEX)):
            return "safetensors"
        if why_not_whole(text) is None:
            return "directory"
        if os.path.exists(os.path.join(text, METADATA)) and not os.path.exists(os.path.join(text, MARKER)):
            raise CheckpointError(
                f"{text} has no {MARKER}: it was interrupted, or is another program's. Lightning's own sharded"
                " checkpoints become plain files by `python -m lightning.pytorch.utilities.consolidate_checkpoint`."
            )
        if os.path.exists(os.path.join(text, MARKER)) or os.path.exists(os.path.join(text, META)):
            raise CheckpointError(f"{text} {why_not_whole(text)}.")
        raise CheckpointError(f"{text} is none of these: {', '.join(_NAMES.values())}.")
    if "://" in text:
        raise CheckpointError(
            f"{text} is no directory; plain files and safetensors are mapped: copy it to a local disk."
        )
    if not os.path.isfile(text):
        raise CheckpointError(f"{text} does not exist.")
    if text.endswith(".safetensors"):
        return "safetensors"
    if (reason := why_not_whole(text)) is not None:
        raise CheckpointError(f"{text} {reason}. It is none of these: {', '.join(_NAMES.values())}.")
    return "file"


def _check(given: Form, to: Form | None, destination: Any, *, weights_only: bool, prefix: str, config: Any) -> None:
    if to is None:
        raise ConfigurationError(f"What shall {destination} be? Say to= one of {list(_NAMES)}.")
    if to not in _NAMES:
        raise ConfigurationError(f"to={to!r} is none of {list(_NAMES)}.")
    if to == given:
        raise ConfigurationError(f"The source is {_NAMES[given]} already; copy it.")
    if "safetensors" in (given, to) and not weights_only:
        what = f"{'has no' if given == 'safetensors' else 'would lose'} optimizer states and progress,"
        raise ConfigurationError(
            f"Safetensors hold weights alone, so the result {what} and can be loaded but not resumed. Say"
            " weights_only=True (--weights_only) if that is meant."
        )
    if (prefix or config) and "safetensors" not in (given, to):
        raise ConfigurationError("prefix and config belong to safetensors; other forms keep their names.")
    if config and to != "safetensors":
        raise ConfigurationError("config is put beside safetensors that are written, not those that are read.")
    if to != "directory" and "://" in os.fspath(destination):
        raise CheckpointError(f"{destination} is a URL; only directories are written there.")
    if os.path.lexists(destination) or ("://" in os.fspath(destination) and is_directory(destination)):
        raise CheckpointError(f"{destination} exists already. Choose another place, or remove it.")


def _read(source: Any, form: Form, trusted: bool) -> dict[str, Any]:
    try:
        if form == "directory":
            checkpoint: Any = read_directory(source, weights_only=not trusted)
        else:
            mapped = zipfile.is_zipfile(source)  # what torch before 1.6 wrote is not one
            checkpoint = torch.load(source, map_location="cpu", mmap=mapped, weights_only=not trusted)
    except pickle.UnpicklingError as error:
        named = re.search(r"GLOBAL (\S+)", str(error))
        raise CheckpointError(
            f"{source} cannot be read safely: it holds objects of {named[1] if named else 'other classes'}. Reading"
            " them can run code; if the checkpoint is your own, say trusted=True (--trusted)."
        ) from error
    except (RuntimeError, EOFError, OSError, ValueError) as error:
        raise CheckpointError(f"{source} cannot be read: {type(error).__name__}: {error}") from error
    if not isinstance(checkpoint, Mapping) or not isinstance(checkpoint.get("state_dict"), Mapping):
        keys = sorted(map(str, checkpoint))[:6] if isinstance(checkpoint, Mapping) else type(checkpoint).__name__
        raise CheckpointError(f"{source} is not a Trainer's checkpoint: it has no state_dict, but {keys}.")
    one_of_each: dict[Any, Tensor] = {}  # tied weights are one memory, and become one tensor
    return {k: _with_tensors(v, lambda t: one_of_each.setdefault(_identity(t), t)) for k, v in checkpoint.items()}


# ---- safetensors ----------------------------------------------------------------------------------------------------


def _from_safetensors(source: Any, prefix: str) -> dict[str, Any]:
    """Return what ``load_from_checkpoint`` takes, with mapped tensors."""
    folder = SafetensorsFolder.find(source)
    return {
        "epoch": 0,
        "global_step": 0,
        "pytorch-lightning_version": lightning.__version__,
        "state_dict": {prefix + name: folder.tensor(name) for name in folder.specs},
    }


def _to_safetensors(state: Mapping[str, Any], prefix: str) -> tuple[dict[str, Tensor], list[str]]:
    """Return the tensors by their names there, tied ones once, and what is left out."""
    tensors: dict[str, Tensor] = {}
    left_out: list[str] = []
    seen: dict[Any, str] = {}
    for key, value in state.items():
        if not key.startswith(prefix) or not isinstance(value, Tensor):
            left_out.append(key)
        elif (same := _identity(value)) in seen:
            left_out.append(f"{key} (tied to {seen[same]})")
        else:
            seen[same] = key
            tensors[key.removeprefix(prefix)] = value
    if not tensors:
        starts = sorted({key.partition(".")[0] for key in state})
        raise ConfigurationError(f"No tensor's name begins with prefix={prefix!r}; they begin with {starts}.")
    return tensors, left_out


def _identity(tensor: Tensor) -> Any:
    if isinstance(tensor, Stored) or tensor.numel() == 0:
        return id(tensor)
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


def _write_safetensors(tensors: Mapping[str, Tensor], destination: Any, limit: int, config: Any) -> None:
    specs = {name: TensorSpec(tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}
    shards = plan_shards(specs, limit)
    aside = begin_folder(destination)
    try:
        for file, names in shards.items():
            write_shard(aside / file, {name: _values(tensors[name]) for name in names})
        write_index(aside, shards, specs)
        for name in ("config.json", "generation_config.json") if config else ():
            if (Path(config) / name).is_file():
                shutil.copy(Path(config) / name, aside / name)
            elif name == "config.json":
                raise CheckpointError(f"{config} has no config.json.")
        put_in_place(aside, destination)
    except BaseException:
        remove(aside)
        raise


def _values(tensor: Tensor) -> Tensor:
    """Values with memory of their own: read, or mapped; copied where several tensors lie in one memory."""
    tensor = tensor.whole() if isinstance(tensor, Stored) else tensor.detach()
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


# ---- a plain file ---------------------------------------------------------------------------------------------------


def _write_filled(checkpoint: Mapping[str, Any], destination: Any) -> None:
    """See the note at the top of this file."""
    aside = begin_aside(destination, is_folder=False)
    try:
        rooms: dict[int, Tensor] = {}
        empty = _with_tensors(checkpoint, lambda t: rooms.setdefault(id(t), torch.empty(t.shape, dtype=t.dtype)))
        with torch.serialization.skip_data():
            torch.save(empty, aside)
        if _num_memories(aside) != len(rooms):  # an object of some other class has tensors, too: written as a whole
            torch.save(_with_tensors(checkpoint, _values), aside)
        else:
            _fill(aside, _tensors(checkpoint))
        with open(aside, "rb+") as file:
            os.fsync(file.fileno())
        put_in_place(aside, destination)
    except BaseException:
        remove(aside)
        raise


def _fill(path: str, values: list[Tensor]) -> None:
    with torch.serialization.set_default_mmap_options(mmap.MAP_SHARED):
        mapped = torch.load(path, mmap=True, weights_only=False)  # what was written just now
    filled: set[int] = set()
    for place, value in zip(_tensors(mapped), values, strict=True):
        if id(value) not in filled:
            filled.add(id(value))
            place.copy_(_values(value))


def _num_memories(path: str) -> int:
    with zipfile.ZipFile(path) as archive:
        return sum(Path(name).parent.name == "data" for name in archive.namelist())


def _tensors(value: Any) -> list[Tensor]:
    """Return all tensors of a checkpoint, in order."""
    found: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    _with_tensors(value, note)
    return found


def _with_tensors(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return a checkpoint with ``change`` made to each of its tensors, in order."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, dict):
        changed = value.copy()
        for key, item in value.items():  # not by `update`, which a Counter adds up with
            changed[key] = _with_tensors(item, change)
        return changed
    if type(value) in (list, tuple):
        return type(value)(_with_tensors(item, change) for item in value)
    return value


def _report(given: Form, to: Form, content: Any, left_out: list[str]) -> Converted:
    found = {_identity(tensor): tensor for tensor in _tensors(dict(content))}
    num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in found.values())
    return Converted(source=given, destination=to, num_tensors=len(found), num_bytes=num_bytes, left_out=left_out)

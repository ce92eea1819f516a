"""Folders of safetensors files, as Hugging Face lays them out: one file, or several with an index.

Files are mapped into memory, never read as a whole: a tensor takes memory where it is copied from.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_hybrid.checkpoint.whole import begin_aside, local_path
from lightning_hybrid.errors import CheckpointError, ConfigurationError

__all__ = [
    "SafetensorsFolder",
    "TensorSpec",
    "begin_folder",
    "plan_shards",
    "size_in_bytes",
    "write_index",
    "write_shard",
]

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


@dataclass(frozen=True)
class TensorSpec:
    """What is known of a tensor without its values."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Size of its values."""
        return self.meta().numel() * self.dtype.itemsize

    def meta(self) -> Tensor:
        """Return a tensor without values."""
        return torch.empty(self.shape, dtype=self.dtype, device="meta")


def _library() -> Any:
    try:
        import safetensors.torch
    except ImportError as error:
        raise CheckpointError(
            'safetensors files need the package safetensors, which comes with the extra "hf":'
            " pip install 'lightning-hybrid[hf]'"
        ) from error
    return safetensors


@dataclass
class SafetensorsFolder:
    """The tensors of one folder, by name. Picklable; opens files when they are asked for."""

    path: Path
    specs: dict[str, TensorSpec]
    """Shape and dtype of every tensor, in the order of the index."""
    files: dict[str, Path]
    """The file of every tensor."""
    _open: dict[Path, Any] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def find(cls, path: str | os.PathLike[str]) -> SafetensorsFolder:
        """Read the headers of all files.

        Args:
            path: a local folder with ``model.safetensors`` or ``model.safetensors.index.json`` and what it lists; or
                one ``.safetensors`` file.

        Raises:
            CheckpointError: if there is nothing of that kind, files are missing, truncated or not what the index says.
        """
        folder = Path(local_path(path))
        if folder.suffix == ".safetensors" and folder.is_file():
            paths, index = [folder], None
        else:
            paths, index = _paths_in(folder)
        specs: dict[str, TensorSpec] = {}
        files: dict[str, Path] = {}
        for file in paths:
            for name, spec in _header(file):
                specs[name], files[name] = spec, file
        lost = [name for name, file in (index or {}).items() if files.get(name, Path()).name != file]
        if lost:
            raise CheckpointError(f"{INDEX} of {folder} places {_some(lost)} in files that do not hold them.")
        return cls(path=folder, specs=specs, files=files)

    def tensor(self, name: str) -> Tensor:
        """Return a tensor that is mapped from its file: the bytes that are copied out of it are read, no others.

        One file is open at a time: ask for tensors in the order of files.
        """
        file = self.files[name]
        if file not in self._open:
            self._open.clear()
            self._open[file] = _library().safe_open(file, framework="pt")
        found: Tensor = self._open[file].get_tensor(name)
        return found

    def close(self) -> None:
        """Let the last file go."""
        self._open.clear()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_open": {}}


def _paths_in(folder: Path) -> tuple[list[Path], dict[str, str] | None]:
    if not folder.is_dir():
        raise CheckpointError(
            f"{folder} is not a local folder. Weights are mapped from local files: download a repository of the Hub"
            " first (huggingface_hub.snapshot_download), or copy what lies elsewhere."
        )
    if (folder / INDEX).is_file():
        try:
            index: dict[str, str] = json.loads((folder / INDEX).read_text())["weight_map"]
        except (ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"{folder / INDEX} is not an index of safetensors files: {error!r}.") from error
        missing = sorted(name for name in set(index.values()) if not (folder / name).is_file())
        if missing:
            raise CheckpointError(f"{folder} lacks {_some(missing)}, which its {INDEX} lists. Download the rest.")
        return [folder / name for name in sorted(set(index.values()))], index
    if (folder / SINGLE).is_file():
        return [folder / SINGLE], None
    names = sorted(entry.name for entry in folder.iterdir())
    raise CheckpointError(
        f"{folder} has neither {SINGLE} nor {INDEX}; it holds {_some(names) or 'nothing'}. Give the path of one"
        " .safetensors file, or let transformers write such a folder: from_pretrained(...).save_pretrained(folder)."
    )


def _header(file: Path) -> Iterator[tuple[str, TensorSpec]]:
    """Read names, shapes and dtypes. The library also checks that the file is as long as its header says."""
    library = _library()
    try:
        with library.safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - no mapping
                tensor = opened.get_tensor(name)  # mapped: nothing is read
                yield name, TensorSpec(tuple(tensor.shape), tensor.dtype)
    except library.SafetensorError as error:
        raise CheckpointError(f"{file} is no whole safetensors file ({error}). Download or write it anew.") from error


def size_in_bytes(size: int | str) -> int:
    """Return bytes for a number or ``"5GB"``, ``"200 MB"``, ``"1GiB"``.

    Raises:
        ConfigurationError: for anything else.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?i?B?)", str(size).strip(), re.IGNORECASE)
    unit = found[2].upper() if found else None
    if found is None or unit not in _UNITS or float(found[1]) * _UNITS[unit] < 1:
        raise ConfigurationError(f'A size is a number of bytes or such as "5GB" or "200MiB", not {size!r}.')
    return int(float(found[1]) * _UNITS[unit])


def plan_shards(specs: Mapping[str, TensorSpec], max_size: int) -> dict[str, list[str]]:
    """Distribute tensors over files, in order: file name -> names. A tensor that is larger has a file of its own."""
    groups: list[list[str]] = []
    room = 0
    for name, spec in specs.items():
        if not groups or spec.num_bytes > room:
            groups.append([])
            room = max_size
        groups[-1].append(name)
        room -= spec.num_bytes
    if len(groups) == 1:
        return {SINGLE: groups[0]}
    return {f"model-{i:05d}-of-{len(groups):05d}.safetensors": names for i, names in enumerate(groups, 1)}


def write_shard(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write one file; mapped tensors are read while they are written.

    Raises:
        CheckpointError: if it cannot be written (disk full, permissions).
    """
    library, memories, own = _library(), set(), {}
    for name, tensor in tensors.items():
        own[name] = tensor.contiguous()
        memory = own[name].untyped_storage().data_ptr()
        if memory in memories and tensor.numel():  # a view of another one: the library wants a memory for each
            own[name] = own[name].clone()
        memories.add(memory)
    try:
        library.torch.save_file(own, path, metadata={"format": "pt"})
    except (OSError, library.SafetensorError) as error:
        raise CheckpointError(f"{path} could not be written: {error}") from error


def write_index(folder: Path, shards: Mapping[str, Sequence[str]], specs: Mapping[str, TensorSpec]) -> None:
    """Write the index of several files; one file needs none."""
    if list(shards) == [SINGLE]:
        return
    total = sum(spec.num_bytes for spec in specs.values())
    weight_map = {name: file for file, names in shards.items() for name in names}
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")


def begin_folder(path: str | os.PathLike[str]) -> Path:
    """Make the folder in which to write what will be put in place under ``path`` when it is whole.

    Raises:
        CheckpointError: if ``path`` exists, or is no local path.
    """
    path = local_path(path)
    if "://" in path:
        raise CheckpointError(f"{path} is a URL; safetensors files are mapped from and written to local folders.")
    if os.path.lexists(path):
        raise CheckpointError(f"{path} exists already. Choose another place, or remove it.")
    return Path(begin_aside(path, is_folder=True))


def _some(names: Sequence[str], most: int = 8) -> str:
    shown = ", ".join(names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"

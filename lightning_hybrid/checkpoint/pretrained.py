"""Weights of Hugging Face's safetensors files for models built on the meta device, streamed to the ranks that own them.

[Note: where values come from]
``load_safetensors`` is called while the model is whole and on the meta device. It finds out which tensor of the files
belongs to which of the model's, says what is missing or left over, and writes an :class:`Origin` on each tensor. That
is all: what becomes of the model until the step is cut (other names by wrappers, adapters, a new head) does not matter,
and a tensor that was replaced is drawn like any other. When this rank's part of the model is made, a tensor with an
origin stays without memory until its share has been cut; the share alone is then copied out of the mapped file.
"""

from __future__ import annotations

import hashlib
import os
import re
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_hybrid.checkpoint.safetensors_files import SafetensorsFolder, TensorSpec
from lightning_hybrid.checkpoint.shares import share_of
from lightning_hybrid.checkpoint.transformers_names import Recipe, plain_recipes, to_ignore, transformers_recipes
from lightning_hybrid.errors import CheckpointError, UnsupportedError
from lightning_hybrid.pipeline.holes import placeholder
from lightning_hybrid.pipeline.hollow import Hollow
from lightning_hybrid.tensor_parallel.styles import joined_rows

__all__ = [
    "ORIGIN",
    "Origin",
    "check_same_origins",
    "is_waiting",
    "load_origins",
    "load_safetensors",
    "origins",
    "refuse_unread",
    "wait_on",
]

#: Attribute of a tensor on the meta device whose values a file has.
ORIGIN = "_hybrid_origin"
_UNREAD = "_hybrid_unread"


@dataclass(frozen=True)
class Origin:
    """Where a tensor's values lie."""

    folder: SafetensorsFolder
    recipe: Recipe

    @property
    def place(self) -> tuple[str, str]:
        """File and name: the order in which to read."""
        first = self.recipe.names[0]
        return str(self.folder.files[first]), first


def load_safetensors(
    module: nn.Module, folder: str | os.PathLike[str], *, prefix: str | None = None, strict: bool = True
) -> None:
    """Give a model the weights of a local folder of safetensors files; each rank reads only what it holds.

    To be called where the model is built, in ``configure_model`` (or ``__init__``)::

        with torch.device("meta"):
            self.model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
        load_safetensors(self.model, folder)

    What is on the meta device gets its values when the strategy ``hybrid3d`` makes this rank's part of the model; no
    rank ever holds the whole model. What has memory already is filled at once (for other strategies leave the meta
    device out). Values are converted to the model's own dtypes. A tied weight may stand under any of its names. Names
    may have a common prefix more or less than the model's (``"model."``), and for models of transformers the names and
    layouts that ``from_pretrained`` knows are understood.

    Args:
        module: the model, or the LightningModule; not yet split.
        folder: with ``model.safetensors``, or ``model.safetensors.index.json`` and its files. Or one such file.
        prefix: what stands before the model's names in the files; by default it is found out.
        strict: refuse a folder that lacks weights or has others. Otherwise these are named in a warning, and what is
            missing is initialised as without a folder.

    Raises:
        CheckpointError: with all missing and unexpected names and wrong shapes in one message; or if the folder cannot
            be read.
        UnsupportedError: if the module has been split already.
    """
    _refuse_split(module)
    source = SafetensorsFolder.find(folder)
    recipes = transformers_recipes(module, source.specs, prefix) or plain_recipes(source.specs)
    tensors = dict(_named(module))
    recipes = _fitted(recipes, tensors, prefix)
    given = _by_tensor(tensors, recipes)
    _report(module, source.path, tensors, recipes, given, strict)
    for name, recipe in given.items():
        if tensors[name].is_meta:
            setattr(tensors[name], ORIGIN, Origin(source, recipe))
            module.__dict__[_UNREAD] = source.path
        else:
            with torch.no_grad():
                tensors[name].copy_(recipe.read(source))
    source.close()


def _named(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield parameters and persistent buffers under each of their names."""
    for prefix, part in module.named_modules():
        start = f"{prefix}." if prefix else ""
        persistent = {k: b for k, b in part._buffers.items() if k not in part._non_persistent_buffers_set}
        for name, tensor in chain(part._parameters.items(), persistent.items()):
            if tensor is not None:
                yield start + name, tensor


def _refuse_split(module: nn.Module) -> None:
    cut = any(isinstance(value, Hollow) for part in module.modules() for value in part.__dict__.values())
    if cut or any(isinstance(p, DTensor) for p in module.parameters()):
        raise UnsupportedError(
            "load_safetensors was called on a model that has been split over ranks already. Call it where the model is"
            " built, in __init__ or in configure_model (there under `if self.model is None`); later weights come from"
            " trainer.fit(ckpt_path=...)."
        )


def _fitted(recipes: Mapping[str, Recipe], tensors: Mapping[str, Tensor], prefix: str | None) -> dict[str, Recipe]:
    """Rename what the files have to the module's names, by adding or taking away a prefix."""
    if prefix is not None:
        return {_without(name, prefix): recipe for name, recipe in recipes.items()}
    changes = [("", "")]
    changes += [(start, "") for start in _starts(recipes)] + [("", start) for start in _starts(tensors)]
    best = max(changes, key=lambda change: sum(_changed(name, *change) in tensors for name in recipes))
    return {_changed(name, *best): recipe for name, recipe in recipes.items()}


def _starts(names: Iterable[str]) -> list[str]:
    """The first one and two components of names, the most frequent first."""
    found = Counter(
        name[: match.end()] for name in names for match in list(re.finditer(r"\.", name))[:2] if match.end() < len(name)
    )
    return [start for start, _ in found.most_common(20)]


def _changed(name: str, without: str, added: str) -> str:
    return added + _without(name, without)


def _without(name: str, prefix: str) -> str:
    return name.removeprefix(prefix)


def _by_tensor(tensors: Mapping[str, Tensor], recipes: Mapping[str, Recipe]) -> dict[str, Recipe]:
    """For each tensor that the files have, its first name and the recipe; a tied one may stand under any name."""
    first: dict[int, str] = {}
    given: dict[str, Recipe] = {}
    for name, tensor in tensors.items():
        one = first.setdefault(id(tensor), name)
        if name in recipes:
            given.setdefault(one, recipes[name])
    return given


def _report(
    module: nn.Module,
    path: Path,
    tensors: Mapping[str, Tensor],
    recipes: Mapping[str, Recipe],
    given: Mapping[str, Recipe],
    strict: bool,
) -> None:
    """Say everything that does not fit in one message."""
    ignored = to_ignore(module)
    first = {name: next(other for other, t in tensors.items() if t is tensor) for name, tensor in tensors.items()}
    missing = sorted(name for name in first if first[name] not in given and not ignored.may_be_missing(name))
    unexpected = sorted(name for name in recipes if name not in tensors and not ignored.may_be_left_over(name))
    shapes = [
        f"{name} is {list(recipe.spec.shape)} {recipe.spec.dtype} there and {list(tensors[name].shape)}"
        f" {tensors[name].dtype} in the model"
        for name, recipe in given.items()
        if recipe.spec.shape != tuple(tensors[name].shape) or not _converts(recipe.spec, tensors[name])
    ]
    lines = [f"{len(missing)} missing: {', '.join(missing)}"] if missing else []
    lines += [f"{len(unexpected)} unexpected: {', '.join(unexpected)}"] if unexpected else []
    if shapes or (lines and strict):
        lines += [f"{len(shapes)} unlike: {'; '.join(shapes)}"] if shapes else []
        raise CheckpointError(
            f"The weights in {path} are not those of {type(module).__name__}.\n" + "\n".join(lines) + "\n"
            "Build the model of this folder's config.json, give prefix= where names in the files have one, or take what"
            " is there with strict=False (not where shapes or dtypes differ)."
        )
    if lines:
        warnings.warn(f"load_safetensors({path}), strict=False: " + "; ".join(lines), stacklevel=3)


def _converts(spec: TensorSpec, tensor: Tensor) -> bool:
    """Whether values mean the same in the other dtype; those of 8 bits and fewer come with scales."""
    short = spec.dtype.is_floating_point and spec.dtype.itemsize < 2
    same_kind = spec.dtype.is_floating_point == tensor.dtype.is_floating_point
    return spec.dtype == tensor.dtype or (same_kind and not short)


# ---- when the part is made ------------------------------------------------------------------------------------------


def origins(module: nn.Module) -> dict[str, Origin]:
    """Return what waits for values from files, by each of its names."""
    found = ((name, getattr(tensor, ORIGIN, None)) for name, tensor in _named(module))
    return {name: origin for name, origin in found if origin is not None}


def check_same_origins(given: Mapping[str, Origin]) -> None:
    """Refuse files that differ from rank to rank (on other nodes). A collective over the world.

    Raises:
        CheckpointError: on every rank.
    """
    text = [f"{name} {origin.place[1]} {origin.recipe.spec}" for name, origin in sorted(given.items())]
    mine = hashlib.sha256("\n".join(text).encode()).hexdigest(), len(text)
    everyone: list[tuple[str, int]] = [mine] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    if len(set(everyone)) > 1:
        other = next(rank for rank, found in enumerate(everyone) if found != everyone[0])
        raise CheckpointError(
            f"Rank {other} found other weights in its safetensors files ({everyone[other][1]} tensors) than rank 0"
            f" ({everyone[0][1]} tensors). Give all nodes the same folder."
        )


def refuse_unread(module: nn.Module) -> None:
    """Refuse a module that was split by its own ``configure_model`` after :func:`load_safetensors`."""
    for part in module.modules():
        if _UNREAD in part.__dict__:
            raise UnsupportedError(
                f"{type(part).__name__} waits for the weights in {part.__dict__[_UNREAD]}, but configure_model has"
                " split or sharded it itself. Leave splitting to the strategy, or load in configure_model, too."
            )


def load_origins(module: nn.Module, given: Mapping[str, Origin]) -> None:
    """Copy what this rank holds of each tensor out of the files, and no more.

    Args:
        module: this rank's part, split and sharded; tensors that are still whole may be without memory.
        given: :func:`origins` of the module when it was whole.
    """
    rows, done = joined_rows(module), set()
    tensors = {name: tensor for name, tensor in _named(module) if name in given}
    with torch.no_grad():
        for name, own in sorted(tensors.items(), key=lambda item: given[item[0]].place):
            if id(own) in done:
                continue
            done.add(id(own))
            whole = given[name].recipe.read(given[name].folder)
            if isinstance(own, DTensor):
                own.copy_(share_of(own, whole, rows=rows.get(name)))
            elif is_waiting(own):
                own.data = whole.to(device=own.device, dtype=own.dtype, copy=True)
            else:
                own.copy_(whole)
            own.__dict__.pop(ORIGIN, None)
    for part in module.modules():
        part.__dict__.pop(_UNREAD, None)
    for origin in given.values():
        origin.folder.close()


def is_waiting(tensor: Tensor) -> bool:
    """Whether a tensor whose values come from files stands there without memory of its own."""
    return hasattr(tensor, ORIGIN) and tensor.numel() > 1 and 0 in tensor.stride()


def wait_on(module: nn.Module, device: torch.device) -> None:
    """Let what waits be on a device, still without memory, so that moving the module does not fill it."""
    for parameter in module.parameters():
        if is_waiting(parameter) and parameter.device != device:
            parameter.data = placeholder(parameter.data, device)

"""Weights of a Trainer, whatever its degrees, as a folder of safetensors files that transformers reads."""

from __future__ import annotations

import copy
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from torch import Tensor, nn

from lightning_hybrid.building.materialize import on_meta
from lightning_hybrid.checkpoint.consolidate import StateKeys, state_in_parts
from lightning_hybrid.checkpoint.directory import on_first
from lightning_hybrid.checkpoint.hooks import CheckpointHooks
from lightning_hybrid.checkpoint.safetensors_files import (
    TensorSpec,
    begin_folder,
    plan_shards,
    size_in_bytes,
    write_index,
    write_shard,
)
from lightning_hybrid.checkpoint.transformers_names import is_transformers_model
from lightning_hybrid.checkpoint.whole import put_in_place
from lightning_hybrid.errors import CheckpointError, ConfigurationError, UnsupportedError

__all__ = ["save_safetensors"]


def save_safetensors(
    trainer: Any,
    folder: str | os.PathLike[str],
    *,
    submodule: str | None = None,
    max_shard_size: int | str = "5GB",
) -> None:
    """Write a Trainer's weights as safetensors files, with a model's ``config.json``. A collective: call it everywhere.

    ``AutoModel...from_pretrained(folder)`` reads it, and so does :func:`lightning_hybrid.load_safetensors`. Rank 0
    writes; it holds one file's tensors at a time. The folder appears when all is written.

    Args:
        trainer: during or after ``fit`` (not inside of a pipelined step), at any degrees; also with ``strategy="ddp"``
            or one device.
        folder: a local folder that does not exist yet.
        submodule: name of the module whose weights are written, under their names in it: ``"model"``. By default the
            model of transformers in the LightningModule if there is one, else all of it (``""``).
        max_shard_size: of a file, in bytes or such as ``"5GB"``; a larger tensor has a file of its own.

    Raises:
        ConfigurationError: for a submodule or size that does not exist.
        CheckpointError: on every rank, if the folder exists or cannot be written.
        UnsupportedError: for a state that is no tensor, other sharding strategies, or a module without values.
    """
    limit = size_in_bytes(max_shard_size)
    module, keys, mesh = _whole_module(trainer)
    part = _chosen(module, submodule)
    start = f"{part}." if part else ""
    state, gather = state_in_parts(module, keys, mesh)
    names: dict[str, str] = {}
    for key in state:  # tied weights once, under their first name
        if key.startswith(start) and keys.canonical.get(key, key) not in names.values():
            names[key.removeprefix(start)] = keys.canonical.get(key, key)
    specs = {name: _spec(name, state[start + name]) for name in names}
    shards = plan_shards(specs, limit)
    aside = on_first(lambda: begin_folder(folder), folder)
    try:
        for file, inside in shards.items():
            found = gather([start + name for name in inside])
            tensors = {name: found[start + name] for name in inside} if found else {}
            on_first(lambda file=file, tensors=tensors: write_shard(aside / file, tensors), folder)  # type: ignore[misc]
            del found, tensors
        on_first(lambda: _finish(aside, module.get_submodule(part), shards, specs), folder)
        on_first(lambda: put_in_place(aside, folder), folder)
    except CheckpointError:
        if not dist.is_initialized() or dist.get_rank() == 0:
            shutil.rmtree(aside, ignore_errors=True)
        raise


def _whole_module(trainer: Any) -> tuple[nn.Module, StateKeys, Any]:
    strategy, module = trainer.strategy, trainer.lightning_module
    if isinstance(strategy, CheckpointHooks) and strategy._part is not None and strategy._module_of_part is module:
        strategy.refuse_apart("save_safetensors")
        strategy.close_window("checkpoint")
        return module, strategy._part.keys, strategy.device_mesh
    if not isinstance(strategy, (CheckpointHooks, DDPStrategy, SingleDeviceStrategy)):
        raise UnsupportedError(
            f"save_safetensors knows the strategies hybrid3d, ddp and one device, not {type(strategy).__name__}. Save a"
            " checkpoint, and convert it with `lightning-hybrid convert`."
        )
    if module is None or on_meta(module) or not any(True for _ in module.parameters()):
        raise UnsupportedError(
            "save_safetensors: the module has no weights yet. Call it after fit or validate; where start_method is"
            ' "fork" or "spawn" and configure_model builds the model, in a hook such as on_train_end, on the ranks.'
        )
    return module, StateKeys.of(module, lambda name: True), None


def _chosen(module: nn.Module, submodule: str | None) -> str:
    if submodule is not None:
        if submodule not in dict(module.named_modules()):
            children = [name for name, _ in module.named_children()]
            raise ConfigurationError(f"submodule={submodule!r} is none of {type(module).__name__}; it has {children}.")
        return submodule
    models = [name for name, part in module.named_modules() if is_transformers_model(part)]
    outermost = [name for name in models if not any(name.startswith(f"{other}.") for other in models if other != name)]
    if len(outermost) > 1:
        raise ConfigurationError(f"There are several models of transformers: give submodule= one of {outermost}.")
    return outermost[0] if outermost else ""


def _spec(name: str, value: Any) -> TensorSpec:
    if not isinstance(value, Tensor):
        raise UnsupportedError(
            f"{name} is a {type(value).__name__} of get_extra_state, and safetensors files hold tensors only. Save a"
            " checkpoint instead, or choose a submodule without such a state."
        )
    return TensorSpec(tuple(value.shape), value.dtype)


def _finish(aside: Path, part: Any, shards: Mapping[str, list[str]], specs: Mapping[str, TensorSpec]) -> None:
    write_index(aside, shards, specs)
    if is_transformers_model(part):
        config = copy.deepcopy(part.config)
        config.architectures = [type(part).__name__]
        dtypes = [spec.dtype for spec in specs.values() if spec.dtype.is_floating_point]
        config.dtype = str(dtypes[0]).removeprefix("torch.")
        config.save_pretrained(aside)
        if part.can_generate():
            part.generation_config.save_pretrained(aside)

"""``lightning-hybrid plan``: degrees for a model that has not run, on a cluster that need not be there."""

from __future__ import annotations

import importlib
import json as json_module
import os
import sys
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import nn

from lightning_hybrid.errors import ConfigurationError
from lightning_hybrid.planner import Cluster, ModelProfile, plan
from lightning_hybrid.planner.constants import FITTED
from lightning_hybrid.planner.host import HOST
from lightning_hybrid.planner.report import planning_tables, planning_to_plain

__all__ = ["plan_command"]

_WIDTH = 200
_SIZES = ("num_layers", "hidden_size", "num_heads", "seq_length")


def plan_command(
    model: str | None = None,
    devices: int = 8,
    device: str = "H100",
    global_batch: int = 256,
    seq_length: int | None = None,
    cluster: str | None = None,
    per_node: int | None = None,
    network_gbits: float | None = None,
    peak: float | None = None,
    memory: float | None = None,
    precision: str = "bf16",
    compile: bool = False,
    num_layers: int | None = None,
    hidden_size: int | None = None,
    num_heads: int | None = None,
    num_kv_heads: int | None = None,
    ffn_size: int | None = None,
    vocab_size: int = 0,
    gated_mlp: bool = False,
    most: int = 5,
    json: bool = False,
) -> None:
    """Say which degrees and settings would train a model fastest, and what a step would take.

    Args:
        model: A Hugging Face config (config.json or its folder), or a class or function by its import path
            (package.module:Name) that makes the module without arguments; sizes are options if left out.
        devices: Devices of the whole run.
        device: Their kind, such as H100 or A100-40GB.
        global_batch: Samples of one optimizer step, over all devices.
        seq_length: Tokens of a sample; by default the longest of a config.
        cluster: A JSON file that describes the devices and links, instead of the kind.
        per_node: Devices of a node.
        network_gbits: Gbit/s of a node to others.
        peak: TFLOP/s (16 bits, dense) of a device that is not known by name; with memory.
        memory: GiB of a device that is not known by name.
        precision: Of matrix products: bf16, fp16, fp8 or fp32.
        compile: Whether blocks are compiled.
        num_layers: Blocks, without a model.
        hidden_size: Features of a token, without a model.
        num_heads: Attention heads, without a model.
        num_kv_heads: Key and value heads, without a model.
        ffn_size: Inner features of the MLP, without a model.
        vocab_size: Words, without a model.
        gated_mlp: Whether the MLP has three matrices, without a model.
        most: Plans to show.
        json: Print JSON for programs.
    """
    machines = Cluster.from_json(cluster) if cluster else None
    if machines is None:
        options = {"per_node": per_node, "network_gbits": network_gbits, "peak": peak, "memory": memory}
        machines = Cluster.named(device, devices, **options)  # type: ignore[arg-type]
    sizes = {
        "num_layers": num_layers,
        "hidden_size": hidden_size,
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "ffn_size": ffn_size,
        "vocab_size": vocab_size,
        "gated_mlp": gated_mlp,
        "seq_length": seq_length,
    }
    profile = _profile(model, sizes)
    wanted: dict[str, Any] = {"global_batch": global_batch, "precision": precision, "compile": compile, "most": most}
    wanted["constants"] = HOST if machines.gpu.host else FITTED
    planning = plan(profile, machines, **wanted)
    if json:
        sys.stdout.write(json_module.dumps(planning_to_plain(planning), indent=2) + "\n")
        return
    _ = planning.best  # refuses with the reasons if nothing fits
    twice = None if machines.gpu.host else machines.with_devices(2 * machines.num_devices)  # ranks share a CPU
    doubled = None if twice is None else plan(profile, twice, **wanted)
    terminal = Console()
    console = terminal if terminal.is_terminal else Console(width=_WIDTH)  # a file has no edge to fit
    console.print(planning_tables(planning, doubled=doubled), highlight=False)


def _profile(model: str | None, sizes: dict[str, Any]) -> ModelProfile:
    if model is None:
        if missing := [name for name in _SIZES if sizes[name] is None]:
            raise ConfigurationError(
                f"Without a model its sizes are needed: {', '.join(f'--{name}' for name in missing)}."
            )
        return ModelProfile.from_sizes(**sizes)
    path = Path(model)
    if path.is_dir():
        path /= "config.json"
    if path.is_file():
        try:
            config = json_module.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ConfigurationError(f"{path} is not JSON: {error}.") from error
        return ModelProfile.from_config(config, seq_length=sizes["seq_length"])
    if sizes["seq_length"] is None:
        raise ConfigurationError(f"{model} does not say how long its samples are: give --seq_length.")
    return ModelProfile.from_module(_make(model), seq_length=sizes["seq_length"])


def _make(path: str) -> nn.Module:
    """Call what an import path names, on the meta device."""
    name, separator, attribute = path.partition(":")
    if not separator:
        raise ConfigurationError(
            f"{path!r} is neither a file or folder with a config nor an import path such as my_package.models:MyModule."
        )
    sys.path.insert(0, os.getcwd())
    try:
        factory = getattr(importlib.import_module(name), attribute)
        with torch.device("meta"):
            module = factory()
            configure = getattr(module, "configure_model", None)
            if callable(configure):
                configure()
    except (ImportError, AttributeError, TypeError) as error:
        raise ConfigurationError(f"{path} cannot be made without arguments: {error}.") from error
    finally:
        sys.path.remove(os.getcwd())
    if not isinstance(module, nn.Module):
        raise ConfigurationError(f"{path} makes {type(module).__name__}, not a torch.nn.Module.")
    return module

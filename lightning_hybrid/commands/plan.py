"""``lightning-hybrid plan``: degrees for a model that has not run, on a cluster that need not be there."""

from __future__ import annotations

import importlib
import json as json_module
import sys
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import nn

from lightning_hybrid.commands.lightning_config import (
    ConfiguredRun,
    from_here,
    is_lightning_config,
    length_of,
    read_lightning_config,
)
from lightning_hybrid.errors import ConfigurationError
from lightning_hybrid.planner import Cluster, ModelProfile, Planning, plan
from lightning_hybrid.planner.constants import FITTED
from lightning_hybrid.planner.host import HOST
from lightning_hybrid.planner.report import planning_tables, planning_to_plain
from lightning_hybrid.report.plan import plan_page

__all__ = ["plan_command"]

_WIDTH = 200
_SIZES = ("num_layers", "hidden_size", "num_heads", "seq_length")


def plan_command(
    model: str | None = None,
    devices: int | None = None,
    device: str = "H100",
    global_batch: int | None = None,
    seq_length: int | None = None,
    cluster: str | None = None,
    per_node: int | None = None,
    network_gbits: float | None = None,
    peak: float | None = None,
    memory: float | None = None,
    precision: str | None = None,
    compile: bool = False,
    num_layers: int | None = None,
    hidden_size: int | None = None,
    num_heads: int | None = None,
    num_kv_heads: int | None = None,
    ffn_size: int | None = None,
    vocab_size: int = 0,
    gated_mlp: bool = False,
    most: int = 5,
    output: str | None = None,
    json: bool = False,
) -> None:
    """Say which degrees and settings would train a model fastest, and what a step would take.

    Args:
        model: A Hugging Face config (config.json or its folder), a LightningCLI config (.yaml), or a class or function
            by its import path (package.module:Name) that makes the module without arguments; sizes are options if left
            out.
        devices: Devices of the whole run; by default a LightningCLI config's, else 8.
        device: Their kind, such as H100 or A100-40GB.
        global_batch: Samples of one optimizer step, over all devices; by default what a LightningCLI config
            makes of its batch size on all devices, else 256.
        seq_length: Tokens of a sample; by default the longest of a config, or what the module says.
        cluster: A JSON file that describes the devices and links, instead of the kind.
        per_node: Devices of a node.
        network_gbits: Gbit/s of a node to others.
        peak: TFLOP/s (16 bits, dense) of a device that is not known by name; with memory.
        memory: GiB of a device that is not known by name.
        precision: Of matrix products: bf16, fp16, fp8 or fp32; by default a LightningCLI config's, else bf16.
        compile: Whether blocks are compiled.
        num_layers: Blocks, without a model.
        hidden_size: Features of a token, without a model.
        num_heads: Attention heads, without a model.
        num_kv_heads: Key and value heads, without a model.
        ffn_size: Inner features of the MLP, without a model.
        vocab_size: Words, without a model.
        gated_mlp: Whether the MLP has three matrices, without a model.
        most: Plans to show.
        output: Write a page (.html) with pictures of memory and step time instead.
        json: Print JSON for programs.
    """
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
    path = Path(model) if model is not None else None
    run = read_lightning_config(path) if path is not None and is_lightning_config(path) else None
    machines = Cluster.from_json(cluster) if cluster else None
    if machines is None:
        options = {"per_node": per_node, "network_gbits": network_gbits, "peak": peak, "memory": memory}
        if devices is None:
            devices = (run.devices if run else None) or 8
        machines = Cluster.named(device, devices, **options)  # type: ignore[arg-type]
    profile = _profile(model, sizes) if run is None else _of_module(run.module, model, seq_length or run.seq_length)
    if global_batch is None:
        global_batch = _global_batch(run, machines.num_devices)
    precision = precision or (run.precision if run else None) or "bf16"
    wanted: dict[str, Any] = {"global_batch": global_batch, "precision": precision, "compile": compile, "most": most}
    wanted["constants"] = HOST if machines.gpu.host else FITTED
    planning = plan(profile, machines, **wanted)
    if json:
        sys.stdout.write(json_module.dumps(planning_to_plain(planning), indent=2) + "\n")
        return
    _ = planning.best  # refuses with the reasons if nothing fits
    if output is not None:
        _write(output, planning)
        return
    twice = None if machines.gpu.host else machines.with_devices(2 * machines.num_devices)  # ranks share a CPU
    doubled = None if twice is None else plan(profile, twice, **wanted)
    terminal = Console()
    console = terminal if terminal.is_terminal else Console(width=_WIDTH)  # a file has no edge to fit
    console.print(planning_tables(planning, doubled=doubled), highlight=False)


def _global_batch(run: ConfiguredRun | None, num_devices: int) -> int:
    """Samples of an optimizer step, where no option says it."""
    if run is not None and run.batch_size is not None:
        return run.batch_size * run.accumulated * num_devices
    text = "Nothing says the batch size: 256 samples a step are assumed; give --global_batch."
    Console(stderr=True).print(text, highlight=False, soft_wrap=True)
    return 256


def _write(output: str, planning: Planning) -> None:
    if Path(output).suffix.lower() not in (".html", ".htm"):
        raise ConfigurationError(f"output={output!r} has an unknown ending; a plan is written as .html.")
    try:
        Path(output).write_text(plan_page(planning), encoding="utf-8")
    except OSError as error:
        raise ConfigurationError(f"output={output!r} cannot be written ({error}); give a file in a folder.") from error
    best = planning.best
    text = f"{output}: {planning.profile.name} with {best.setup}, a step of {best.seconds:.3g} s"
    Console().print(text, highlight=False, markup=False, soft_wrap=True)


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
    if path.is_file() and path.suffix != ".py":
        try:
            config = json_module.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ConfigurationError(f"{path} is not JSON: {error}.") from error
        return ModelProfile.from_config(config, seq_length=sizes["seq_length"])
    module = _make(model)
    return _of_module(module, model, sizes["seq_length"] or length_of(module))


def _of_module(module: nn.Module, what: str | None, seq_length: int | None) -> ModelProfile:
    if seq_length is None:
        raise ConfigurationError(f"{what} does not say how long its samples are: give --seq_length.")
    return ModelProfile.from_module(module, seq_length=seq_length)


def _make(path: str) -> nn.Module:
    """Call what an import path names, on the meta device."""
    name, separator, attribute = path.partition(":")
    if not separator:
        raise ConfigurationError(
            f"{path!r} is neither a file or folder with a config nor an import path such as my_package.models:MyModule."
        )
    try:
        with from_here():
            factory = getattr(importlib.import_module(name), attribute)
            with torch.device("meta"):
                made = factory()
                module = made[0] if isinstance(made, tuple) and made else made  # with its loader, as for `check`
                configure = getattr(module, "configure_model", None)
                if callable(configure):
                    configure()
    except (Exception, SystemExit) as error:  # user code, called where it did not expect it
        raise ConfigurationError(
            f"{path} cannot be made without arguments, on the meta device: {type(error).__name__}: {error}"
        ) from error
    if not isinstance(module, nn.Module):
        raise ConfigurationError(f"{path} makes {type(module).__name__}, not a torch.nn.Module.")
    return module

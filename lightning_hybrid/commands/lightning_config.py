"""What a LightningCLI config says of a run: the module, made on the meta device, and its batch, devices, precision."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import yaml
from jsonargparse import ArgumentError, ArgumentParser
from torch import nn

from lightning_hybrid.choosing.plan import PRECISIONS
from lightning_hybrid.choosing.run_facts import batch_facts, whole_model
from lightning_hybrid.errors import ConfigurationError

__all__ = ["ConfiguredRun", "from_here", "is_lightning_config", "length_of", "read_lightning_config"]


@dataclass(frozen=True, kw_only=True)
class ConfiguredRun:
    """What ``lightning-hybrid plan`` takes from a config where its options say nothing."""

    module: nn.Module
    seq_length: int | None = None
    batch_size: int | None = None
    """Samples of a data rank's batch."""
    accumulated: int = 1
    """Batches of an optimizer step."""
    devices: int | None = None
    precision: str | None = None


def is_lightning_config(path: Path) -> bool:
    """Whether a file is YAML, which configs of models never are."""
    return path.suffix in (".yaml", ".yml")


def read_lightning_config(path: Path) -> ConfiguredRun:
    """Read a config as LightningCLI does: ``model`` with ``class_path`` and ``init_args``, ``data``, ``trainer``.

    Raises:
        ConfigurationError: says what is wrong with it.
    """
    try:
        config = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError, RecursionError) as error:
        raise ConfigurationError(f"{path} cannot be read as YAML: {error}.") from error
    if isinstance(config, Mapping) and isinstance(config.get("fit"), Mapping):
        config = config["fit"]  # as print_config writes it with subcommands
    model = config.get("model") if isinstance(config, Mapping) else None
    if isinstance(model, str):
        model = {"class_path": model}
    if not isinstance(model, Mapping):
        raise ConfigurationError(
            f"{path} has no model. A LightningCLI config has model: with class_path and init_args."
        )
    if "class_path" not in model:
        raise ConfigurationError(
            f"{path} does not say which class its model is (the script does, in LightningCLI(MyModule)). Write it as"
            f" model: {{class_path: my_package.MyModule, init_args: {{{', '.join(map(str, model))}: ...}}}}."
        )
    module = _make(model, path)
    trainer, data = _section(config, "trainer"), _section(config, "data")
    data = {**data, **_section(data, "init_args")}
    facts = batch_facts(module, SimpleNamespace(datamodule=data))
    assumed = " ".join(facts.assumed)
    return ConfiguredRun(
        module=module,
        seq_length=None if "tokens" in assumed else facts.length,
        batch_size=None if "batches" in assumed else facts.samples,
        accumulated=_count(trainer, "accumulate_grad_batches") or 1,
        devices=_devices(trainer),
        precision=PRECISIONS.get(str(trainer.get("precision") or "32").split("-")[0]),
    )


def length_of(module: nn.Module) -> int | None:
    """Tokens of a sample, where the module says it by a usual name or its table of positions."""
    facts = batch_facts(module, None)
    return None if any("tokens" in text for text in facts.assumed) else facts.length


def _make(model: Mapping[str, Any], path: Path) -> nn.Module:
    parser = ArgumentParser(exit_on_error=False)
    parser.add_subclass_arguments(nn.Module, "model", required=True)
    try:
        with from_here():
            chosen = parser.parse_object({"model": dict(model)})
            with torch.device("meta"):
                instantiate = getattr(parser, "instantiate", None) or parser.instantiate_classes  # before 4.49
                made = instantiate(chosen).model
            return whole_model(made)
    except ArgumentError as error:  # jsonargparse lists what it has tried; the first is what was meant
        lines = [line.strip() for line in str(error).splitlines()]
        first = next((i for i, line in enumerate(lines) if line.startswith("- ")), 0)
        told = [line for line in lines[first : first + 3] if not line.startswith("- Expected")]
        raise ConfigurationError(f"The model of {path} cannot be made: {' '.join(told).lstrip('- ')}.") from error
    except Exception as error:  # user code, called where it did not expect it
        raise ConfigurationError(
            f"The model of {path} cannot be made on the meta device: {type(error).__name__}: {error}"
        ) from error


@contextmanager
def from_here() -> Iterator[None]:
    """Within the ``with`` block modules of the working directory can be imported, as a script's own can."""
    here = str(Path.cwd())
    sys.path.insert(0, here)
    try:
        yield
    finally:
        sys.path.remove(here)


def _section(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    found = config.get(name)
    return dict(found) if isinstance(found, Mapping) else {}


def _count(values: Mapping[str, Any], name: str) -> int | None:
    value = values.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def _devices(trainer: Mapping[str, Any]) -> int | None:
    """Devices of the whole run, where they are a number (not "auto")."""
    each = trainer.get("devices")
    number = len(each) if isinstance(each, list) else _count(trainer, "devices")
    return None if number is None else number * (_count(trainer, "num_nodes") or 1)

"""Names and layouts of tensors in files, as transformers' ``from_pretrained`` understands them.

Since version 5 a model's tensors may differ from those in files on the Hub: a renamed module, or the experts of a layer
joined into one tensor. transformers keeps the rules; they are applied to one tensor at a time here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from torch import Tensor, nn

from lightning_hybrid.checkpoint.safetensors_files import SafetensorsFolder, TensorSpec
from lightning_hybrid.errors import CheckpointError

__all__ = ["Ignored", "Recipe", "is_transformers_model", "plain_recipes", "to_ignore", "transformers_recipes"]


@dataclass(frozen=True)
class Recipe:
    """How to make one of the model's tensors from those in files."""

    names: tuple[str, ...]
    """In the files."""
    spec: TensorSpec
    """Of the result."""
    joins: Any = None
    """transformers' converter, if it takes more than reading."""
    patterns: tuple[str, ...] = ()
    """The converter's name for each of ``names``."""
    first_name: str = ""
    result: str = ""
    """Which of the converter's results."""
    config: Any = None

    def read(self, folder: SafetensorsFolder) -> Tensor:
        """Return the whole tensor: mapped from the file, or for joined ones in memory."""
        if self.joins is None:
            return folder.tensor(self.names[0])
        tensors = [folder.tensor(name) for name in self.names]
        return _convert(self, tensors)[self.result]


def _convert(recipe: Recipe, tensors: list[Tensor]) -> dict[str, Tensor]:
    converter = deepcopy(recipe.joins)
    for name, pattern, tensor in zip(recipe.names, recipe.patterns, tensors, strict=True):
        converter.add_tensor(recipe.first_name, name, pattern, tensor)
    try:
        made = converter.convert(recipe.first_name, model=None, config=recipe.config)
    except Exception as error:
        raise CheckpointError(
            f"{recipe.first_name} cannot be made of {', '.join(recipe.names[:4])} as transformers does ({error!r})."
            " Write a folder with the model's own names: from_pretrained(...).save_pretrained(folder,"
            " save_original_format=False)."
        ) from error
    return {name: found[0] if isinstance(found, list) else found for name, found in made.items()}


def plain_recipes(specs: Mapping[str, TensorSpec]) -> dict[str, Recipe]:
    """Tensors as they stand in the files."""
    return {name: Recipe((name,), spec) for name, spec in specs.items()}


def is_transformers_model(module: nn.Module) -> bool:
    """Whether it is one, told without importing transformers."""
    return any(t.__name__ == "PreTrainedModel" and t.__module__.startswith("transformers.") for t in type(module).mro())


def transformers_recipes(
    module: nn.Module, specs: Mapping[str, TensorSpec], prefix: str | None
) -> dict[str, Recipe] | None:
    """Return a recipe for each tensor under its name in the model; ``None`` if the module is not of transformers."""
    if not is_transformers_model(module):
        return None
    model: Any = module
    rules = import_module("transformers.core_model_loading")
    transforms = import_module("transformers.conversion_mapping").get_model_conversion_mapping(model)
    renamings = [t for t in transforms if isinstance(t, rules.WeightRenaming)]
    converters = {p: t for t in transforms if isinstance(t, rules.WeightConverter) for p in t.source_patterns}
    found: dict[str, Recipe] = {}
    joined: dict[str, list[tuple[str, str]]] = {}
    for name in sorted(specs, key=rules.dot_natural_key):
        plain = name.removeprefix(prefix or "")
        renamed, pattern = rules.rename_source_key(plain, renamings, list(dict.fromkeys(converters.values())))
        renamed = prefix + renamed if prefix and plain != name else renamed
        if pattern is None:
            found[renamed] = Recipe((name,), specs[name])
        else:
            joined.setdefault(renamed, []).append((name, pattern))
    for first_name, parts in joined.items():
        names, patterns = zip(*parts, strict=True)
        recipe = Recipe(names, specs[names[0]], converters[patterns[0]], patterns, first_name, first_name, model.config)
        for result, tensor in _convert(recipe, [specs[name].meta() for name in names]).items():
            spec = TensorSpec(tuple(tensor.shape), tensor.dtype)
            found[result] = Recipe(names, spec, recipe.joins, patterns, first_name, result, model.config)
    return found


@dataclass(frozen=True)
class Ignored:
    """Patterns of names that a model of transformers does not mind."""

    missing: tuple[str, ...] = ()
    left_over: tuple[str, ...] = ()

    def may_be_missing(self, name: str) -> bool:
        """Whether the model gets this tensor by itself."""
        return any(re.search(pattern, name) for pattern in self.missing)

    def may_be_left_over(self, name: str) -> bool:
        """Whether old files have this tensor for nothing."""
        return any(re.search(pattern, name) for pattern in self.left_over)


def to_ignore(module: nn.Module) -> Ignored:
    """Return the model's own lists; nothing for other modules."""
    if not is_transformers_model(module):
        return Ignored()
    missing, left_over = (
        getattr(module, f"_keys_to_ignore_on_load_{what}", None) for what in ("missing", "unexpected")
    )
    return Ignored(tuple(missing or ()), tuple(left_over or ()))

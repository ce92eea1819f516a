"""What is known of Hugging Face's models beside their plans."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from torch import nn

from lightning_hybrid.errors import UnsupportedError

__all__ = ["pretrained_models", "refuse_attention_weights"]


def pretrained_models(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Hugging Face models inside ``module``, outer ones first. Without transformers imported there can be none."""
    if "transformers" in sys.modules:
        from transformers import PreTrainedModel

        for name, child in module.named_modules():
            if isinstance(child, PreTrainedModel):
                yield name, child


def refuse_attention_weights(module: nn.Module) -> None:
    """Have split models refuse calls that ask for attention weights: each rank has those of its own heads."""
    for _, model in pretrained_models(module):
        model.register_forward_pre_hook(_look, with_kwargs=True)


def _look(model: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
    asked = kwargs.get("output_attentions")
    if asked or (asked is None and getattr(model.config, "output_attentions", False)):
        raise UnsupportedError(
            f"output_attentions=True of {type(model).__name__}: with tensor parallelism each rank has the attention"
            " weights of its own heads only. Leave it out, or use tensor_parallel_size=1."
        )

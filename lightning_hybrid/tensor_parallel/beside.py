"""What code outside of a block sees of a call beside its result: attributes, buffers, and what hooks are shown.

An auxiliary loss is often kept in an attribute (``self.aux_loss = ...``), statistics in a buffer, and activations are
collected by hooks. In a split block all of these may be of this rank's features or tokens only.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

__all__ = ["copied", "numbers_in", "run_with_beside"]

#: Attributes that every module has.
_OWN = frozenset(vars(nn.Module()))


def copied(block: nn.Module) -> nn.Module:
    """A copy, in which tensors with a history that a forward has left in attributes have none (they cannot have).

    What hooks of others are bound to is copied, too, so that nobody sees the copy's calls; where that cannot be (a
    profiler), it is shared.
    """
    kept = {id(x): x.detach() for _, x in _attributes(block) if not x.is_leaf}
    try:
        return copy.deepcopy(block, dict(kept))
    except Exception:
        return copy.deepcopy(block, {**kept, **{id(owner): owner for owner in _owners_of_hooks(block)}})


def _owners_of_hooks(block: nn.Module) -> Iterator[Any]:
    own = set(map(id, block.modules()))
    for part in block.modules():
        for hook in (*part._forward_pre_hooks.values(), *part._forward_hooks.values()):
            function = _function_of(hook)
            if id(owner := getattr(function, "__self__", function)) not in own:
                yield owner


def _function_of(hook: Any) -> Any:
    return _function_of(hook.func) if isinstance(hook, functools.partial) else hook


def numbers_in(values: Any) -> list[Tensor]:
    """All tensors and plain numbers."""
    return [x if isinstance(x, Tensor) else torch.tensor(x) for x in tree_leaves(values) if _is_number(x)]


def run_with_beside(block: nn.Module, run: Callable[[], Any]) -> tuple[list[Tensor], list[Tensor]]:
    """Run the block; return the tensors of its result, and those that can be seen beside."""
    shown: list[Any] = []
    handles = [
        part.register_forward_hook(lambda *call: shown.append(call[-1]))
        for part in block.modules()
        if part is not block and any(map(_is_users, part._forward_hooks.values()))
    ]
    buffers = {name: buffer.clone() for name, buffer in block.named_buffers()}
    before = dict(_attributes(block))
    try:
        result = run()
    finally:
        for handle in handles:
            handle.remove()
    kept = [x for key, x in _attributes(block) if x is not before.get(key)]
    counted = [x for name, x in block.named_buffers() if name in buffers and not torch.equal(x, buffers[name])]
    return numbers_in(result), [*kept, *numbers_in(shown), *counted]


def _attributes(block: nn.Module) -> Iterator[tuple[Any, Tensor]]:
    """Tensors in attributes, also in lists and dicts, that are neither parameters nor buffers."""
    for name, part in block.named_modules():
        for attribute, value in vars(part).items():
            for i, leaf in enumerate(tree_leaves(value) if attribute not in _OWN else ()):
                if isinstance(leaf, Tensor):
                    yield (name, attribute, i), leaf


def _is_number(x: Any) -> bool:
    return isinstance(x, (Tensor, bool, int, float))


def _is_users(hook: Any) -> bool:
    """Whether a hook is not one of a library's: Hugging Face puts some on all attentions, for who asks for weights."""
    libraries = ("transformers.", "torch.", "lightning.", "lightning_hybrid.")
    return not getattr(_function_of(hook), "__module__", "").startswith(libraries)

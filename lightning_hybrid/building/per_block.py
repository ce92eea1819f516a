"""What is done to each block besides splitting it: activation checkpointing, and ``torch.compile``.

Both change the block in place and leave its parameters' names as they are: the block's class gets a ``forward`` that
recomputes (so hooks, ``fully_shard``'s too, run once), and compilation is torch's own ``Module.compile``.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from lightning_hybrid.errors import ConfigurationError, UnsupportedError
from lightning_hybrid.training.snapshots import as_it_is, is_cache

__all__ = [
    "ActivationCheckpointing",
    "apply_per_block",
    "can_split_backward",
    "check_per_block",
    "check_split_backward",
]

#: ``"none"``, ``"full"``, ``"selective"``, or the operations (``torch.ops.aten.mm.default``) whose results are kept.
ActivationCheckpointing = Literal["none", "full", "selective"] | list[Any]

#: What ``"selective"`` keeps: products of matrices and attention, whose results cost far more time than their memory.
KEPT = (
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten.convolution.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
)


def check_per_block(activation_checkpointing: Any, compile: Any) -> None:
    """Refuse values that mean nothing.

    Raises:
        ConfigurationError: with what may be given instead.
    """
    known = activation_checkpointing in ("none", "full", "selective") or (
        isinstance(activation_checkpointing, list)
        and all(isinstance(op, torch._ops.OpOverload) for op in activation_checkpointing)
    )
    if not known:
        raise ConfigurationError(
            f'activation_checkpointing={activation_checkpointing!r} is unknown; use "none", "full", "selective", or the'
            " operations whose results are kept, such as [torch.ops.aten.mm.default]."
        )
    if not isinstance(compile, (bool, Mapping)):
        raise ConfigurationError(
            f"compile={compile!r} must be True, False, or a dict with the arguments of torch.compile."
        )


def can_split_backward(activation_checkpointing: Any, compile: Any) -> bool:
    """Whether a schedule may run the gradients of inputs and of weights apart (zero-bubble).

    A compiled block has one backward for both, and torch recomputes selectively only once (2.13).
    """
    return activation_checkpointing in ("none", "full") and compile is False


def check_split_backward(schedule: str, activation_checkpointing: Any, compile: Any) -> None:
    """Refuse a schedule of that name that splits backwards where :func:`can_split_backward` says no."""
    if not can_split_backward(activation_checkpointing, compile):
        raise UnsupportedError(
            f'schedule="{schedule}" runs the gradients of inputs and of weights apart, which compiled blocks and'
            f" selective recomputation do not allow (compile={compile!r},"
            f" activation_checkpointing={activation_checkpointing!r}). Use compile=False and"
            ' activation_checkpointing="full" or "none", or schedule="1F1B" or "Interleaved1F1B".'
        )


def apply_per_block(
    blocks: Iterable[nn.Module], *, activation_checkpointing: ActivationCheckpointing, compile: bool | Mapping[str, Any]
) -> None:
    """Have blocks recompute their activations in the backward, and compile them, in place.

    Args:
        blocks: Those that this rank holds.
        activation_checkpointing: ``"full"`` keeps a block's arguments only, ``"selective"`` keeps results of matrix
            products and attention too, a list keeps the results of those operations.
        compile: ``True``, or the arguments of ``torch.compile``.
    """
    for block in blocks:
        if activation_checkpointing != "none":
            _recompute(block, _contexts(activation_checkpointing))
        if compile is not False:
            block.compile(**(compile if isinstance(compile, Mapping) else {}))


def _contexts(activation_checkpointing: ActivationCheckpointing) -> Callable[[], Any] | None:
    if activation_checkpointing == "full":
        return None
    kept = list(KEPT) if activation_checkpointing == "selective" else list(activation_checkpointing)
    return functools.partial(create_selective_checkpoint_contexts, kept)


def _with_caches_as_before(
    forward: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Callable[..., Any]:
    """``forward``, which when repeated sees caches of keys and values as they were: it has extended them since."""
    if not any(is_cache(x) for x in (*args, *kwargs.values())):
        return forward
    before = (
        [as_it_is(x) if is_cache(x) else x for x in args],
        {n: as_it_is(x) for n, x in kwargs.items() if is_cache(x)},
    )
    calls = itertools.count()

    def run(block: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if next(calls):
            args = tuple(as_it_is(old) if is_cache(old) else x for x, old in zip(args, before[0], strict=True))
            kwargs |= {name: as_it_is(old) for name, old in before[1].items()}
        return forward(block, *args, **kwargs)

    return run


def _recompute(block: nn.Module, contexts: Callable[[], Any] | None) -> None:
    """Give one instance a class whose ``forward`` is checkpointed, as ``fully_shard`` gives it one."""
    base: Any = type(block)
    options: dict[str, Any] = {} if contexts is None else {"context_fn": contexts}

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return base.forward(self, *args, **kwargs)
        run = _with_caches_as_before(base.forward, args, kwargs)
        return checkpoint(run, self, *args, use_reentrant=False, **options, **kwargs)

    namespace = {"forward": forward, "__module__": base.__module__, "__qualname__": base.__qualname__}
    block.__class__ = type(base.__name__, (base,), namespace)

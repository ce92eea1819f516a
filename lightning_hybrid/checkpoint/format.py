"""The directory form of a checkpoint: what lies in it, and what its tensors are called.

::

    epoch=3.ckpt/
        .metadata            torch.distributed.checkpoint's: keys, shapes, and which file has which part of a tensor
        __0_0.distcp, ...    its files, one for each rank that wrote
        meta.pt              everything else, in the form of Lightning's plain file, by torch.save
        complete.json        written last: the sizes of all files; without it the checkpoint is not whole

``meta.pt`` is the checkpoint's dict as Lightning and the user's hooks made it, where ``None`` stands for every tensor
that is kept beside it. Its entry ``"lightning_hybrid"`` has under ``"stored"`` a list of ``[path, key]``: the keys that
lead through the dict to such a ``None``, and the name of the tensor in ``.metadata``. Tied weights are two paths with
one key. Keys are the path joined by dots (``state_dict.<parameter name>``); states of optimizers are named by parameter
instead of by number: ``optimizer_0.state.<parameter name>.exp_avg``, all of the shapes and row orders of one process.
Groups and their settings stand in ``meta.pt``, as does ``"param_names"``, which leads from numbers to names.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

__all__ = ["ENTRY", "MARKER", "META", "METADATA", "VERSION", "optimizer_key", "nested", "plain_key"]

META = "meta.pt"
METADATA = ".metadata"
MARKER = "complete.json"
ENTRY = "lightning_hybrid"
"""Key of our own entry in a checkpoint."""
VERSION = 1
"""Of this form; raised when older readers cannot read it any more."""


def plain_key(path: Sequence[Any]) -> str:
    """Return the name of the tensor at a path of the checkpoint's dict."""
    return ".".join(map(str, path))


def optimizer_key(index: int, state: str) -> str:
    """Return the name of an optimizer's state, such as ``optimizer_0.state.head.weight.exp_avg``."""
    return f"optimizer_{index}.state.{state}"


def nested(key: str) -> tuple[str, ...]:
    """Return where torch's tools (``dcp_to_torch_save``) put a tensor: what it belongs to, then its whole name."""
    kind, _, name = key.partition(".")
    if not kind.startswith("optimizer_"):
        return (kind, name) if name else (kind,)
    state, _, name = name.partition(".")
    parameter, _, name = name.rpartition(".")
    return kind, state, parameter, name

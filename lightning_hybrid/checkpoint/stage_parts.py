"""What hooks put into a checkpoint by parameter name, such as averages of their own: each stage has its parameters."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from torch import Tensor
from torch.nn import Parameter

__all__ = ["join_stages"]

#: Entries that the strategy and Lightning make, which are whole.
_WHOLE = ("state_dict", "optimizer_states", "lr_schedulers", "loops")

_Path = tuple[Any, ...]


def join_stages(
    checkpoint: Mapping[str, Any], names: Collection[str], gather: Callable[[Any], list[Any]]
) -> dict[str, Any]:
    """Return a checkpoint in which dicts of tensors by parameter name have those of all pipeline stages.

    With a pipeline ``{name: p.clone() for name, p in self.named_parameters()}`` is one stage's. The user's own dicts
    are not changed. A collective over the pipeline axis; tensors move only where stages have other names.

    Args:
        checkpoint: as hooks have left it.
        names: of all parameters and buffers of the module, in order.
        gather: gives every rank the objects of all ranks of the pipeline axis.
    """
    joined = dict(checkpoint)
    mine = dict(_named(joined, frozenset(names)))
    keys = {path: sorted(found, key=repr) for path, found in mine.items()}
    everyone = gather(keys)
    differ = {
        path for other in everyone for path in other if any(path in o and o[path] != other[path] for o in everyone)
    }
    if not differ:
        return joined
    parts = gather({path: mine[path] for path in differ if path in mine})
    order = {name: i for i, name in enumerate(names)}
    for path in differ & mine.keys():
        found = {name: tensor for part in reversed(parts) for name, tensor in part.get(path, {}).items()}
        own = _copied(joined, path)
        others = {key: value for key, value in own.items() if key not in found}
        own.clear()
        own.update({name: found[name] for name in sorted(found, key=order.__getitem__)} | others)
    return joined


def _named(value: Any, names: frozenset[str], path: _Path = ()) -> list[tuple[_Path, dict[str, Tensor]]]:
    """Dicts in which tensors stand under names of parameters, by their place."""
    found = []
    for key, item in value.items():
        if type(item) is dict and not (not path and key in _WHOLE):
            if named := {k: v for k, v in item.items() if type(v) in (Tensor, Parameter) and k in names}:
                found.append(((*path, key), named))
            found += _named(item, names, (*path, key))
    return found


def _copied(container: dict[Any, Any], path: _Path) -> dict[Any, Any]:
    """Copy the dicts along a path, and return the last."""
    for key in path:
        container[key] = container = dict(container[key])
    return container

"""The environment variables that say which rank this process is: refused before ranks wait for one that never comes."""

from __future__ import annotations

import contextlib
import functools
import os
import socket
from collections.abc import Mapping
from typing import Any

from lightning_hybrid.errors import ConfigurationError

__all__ = ["check_rank_variables"]

_PORT = "MASTER_PORT"
_LEAST = {"RANK": 0, "LOCAL_RANK": 0, "NODE_RANK": 0, "GROUP_RANK": 0, "WORLD_SIZE": 1, "LOCAL_WORLD_SIZE": 1, _PORT: 1}


def check_rank_variables(
    environment: Any, *, num_devices: int, num_nodes: int, variables: Mapping[str, str] = os.environ
) -> None:
    """Check what ``torchrun``, Lightning or a user has set. Each rank sees its own alone, so nothing is exchanged.

    Args:
        environment: Lightning's cluster environment of this process.
        num_devices: Processes on each node.
        num_nodes: Nodes.
        variables: Those of the process.

    Raises:
        ConfigurationError: names the variable, its value, and what would be right.
    """
    numbers = {name: _integer(name, variables[name]) for name in _LEAST if name in variables}
    if numbers.get(_PORT, 1) > 65535:
        raise ConfigurationError(f"{_PORT}={numbers[_PORT]} must be a port, between 1 and 65535.")
    try:
        environment.validate_settings(num_devices=num_devices, num_nodes=num_nodes)
    except ValueError as error:
        raise ConfigurationError(str(error)) from error
    if "LOCAL_RANK" in numbers:
        _check_place(numbers, num_devices, num_nodes)
    if num_nodes > 1 or environment.creates_processes_externally:
        _check_address(variables.get("MASTER_ADDR"))


def _integer(name: str, value: str) -> int:
    with contextlib.suppress(ValueError):
        if (number := int(value)) >= _LEAST[name]:
            return number
    raise ConfigurationError(
        f"The environment variable {name}={value!r} must be an integer of at least {_LEAST[name]}."
    )


def _check_place(numbers: Mapping[str, int], num_devices: int, num_nodes: int) -> None:
    trainer = f"the Trainer has devices={num_devices}, num_nodes={num_nodes}"
    world, local = num_devices * num_nodes, numbers["LOCAL_RANK"]
    node = numbers.get("NODE_RANK", numbers.get("GROUP_RANK", 0))
    if local >= num_devices:
        raise ConfigurationError(
            f"LOCAL_RANK={local}, but {trainer}: local ranks are 0 to {num_devices - 1}. Start {num_devices} processes"
            " on each node, or set devices= to the number that you start."
        )
    if node >= num_nodes:
        raise ConfigurationError(
            f"NODE_RANK={node}, but {trainer}: nodes are 0 to {num_nodes - 1}. Set num_nodes= to the number of nodes."
        )
    if numbers.get("WORLD_SIZE", world) != world:
        raise ConfigurationError(
            f"WORLD_SIZE={numbers['WORLD_SIZE']}, but {trainer}, which are {world} processes. Start as many processes,"
            " or set devices= and num_nodes= to what you start."
        )
    if numbers.get("RANK", 0) >= world:
        raise ConfigurationError(f"RANK={numbers['RANK']}, but {trainer}: ranks are 0 to {world - 1}.")


@functools.lru_cache
def _check_address(address: str | None) -> None:
    if address is None:
        return
    try:
        socket.getaddrinfo(address.strip() or "(empty)", None)
    except (OSError, UnicodeError) as error:
        raise ConfigurationError(
            f"MASTER_ADDR={address!r} is no machine that this one knows ({error}). Set it to the name or the IP address"
            " of the machine with rank 0."
        ) from error

"""Degrees <-> ranks <-> coordinates. Pure: no torch, no process group."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_hybrid.errors import ConfigurationError

__all__ = ["AXES", "Coordinate", "Layout", "resolve_layout"]

#: Mesh axes from the outermost (slow links) to the innermost (fast links).
AXES = ("pipeline_parallel", "data_parallel_replicate", "data_parallel_shard", "tensor_parallel")


@dataclass(frozen=True, kw_only=True)
class Coordinate:
    """Where one rank stands on each mesh axis; each field counts from 0."""

    pipeline: int
    replicate: int
    shard: int
    tensor: int
    data: int
    """Position along the flattened data axis (replicate x shard): decides which samples the rank reads."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The degrees of one run.

    Raises:
        ConfigurationError: if a degree is not a positive integer, or ``replicate_size`` does not divide
            ``data_parallel_size``.
    """

    data_parallel_size: int = 1
    """Number of ranks that read different samples."""
    tensor_parallel_size: int = 1
    """Number of ranks that split each block's matrices."""
    pipeline_parallel_size: int = 1
    """Number of ranks that split the blocks."""
    replicate_size: int = 1
    """Number of replicas along the data axis; the rest of ``data_parallel_size`` shards (HSDP)."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigurationError(f"{name}={value!r} must be an integer of at least 1.")
        if self.data_parallel_size % self.replicate_size:
            raise ConfigurationError(
                f"replicate_size={self.replicate_size} does not divide data_parallel_size={self.data_parallel_size};"
                f" use one of {divisors(self.data_parallel_size)}."
            )

    @property
    def shard_size(self) -> int:
        """Number of ranks over which parameters are sharded."""
        return self.data_parallel_size // self.replicate_size

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Sizes along :data:`AXES`."""
        return (self.pipeline_parallel_size, self.replicate_size, self.shard_size, self.tensor_parallel_size)

    @property
    def world_size(self) -> int:
        """Number of devices used."""
        return self.data_parallel_size * self.tensor_parallel_size * self.pipeline_parallel_size

    def coordinate(self, rank: int) -> Coordinate:
        """Return where ``rank`` stands; tensor is innermost, pipeline outermost."""
        if not 0 <= rank < self.world_size:
            raise ConfigurationError(f"rank {rank} is outside of 0..{self.world_size - 1}.")
        rest, tensor = divmod(rank, self.tensor_parallel_size)
        rest, shard = divmod(rest, self.shard_size)
        pipeline, replicate = divmod(rest, self.replicate_size)
        return Coordinate(
            pipeline=pipeline, replicate=replicate, shard=shard, tensor=tensor, data=replicate * self.shard_size + shard
        )

    def rank(self, *, pipeline: int = 0, replicate: int = 0, shard: int = 0, tensor: int = 0) -> int:
        """Return the global rank at a coordinate (inverse of :meth:`coordinate`)."""
        return (
            (pipeline * self.replicate_size + replicate) * self.shard_size + shard
        ) * self.tensor_parallel_size + tensor

    def __str__(self) -> str:
        data, tensor, pipeline = self.data_parallel_size, self.tensor_parallel_size, self.pipeline_parallel_size
        return f"data {data} x tensor {tensor} x pipeline {pipeline}"


def divisors(number: int) -> list[int]:
    """All divisors of ``number`` in ascending order."""
    return [n for n in range(1, number + 1) if number % n == 0]


def resolve_layout(
    num_devices: int,
    *,
    data_parallel_size: int | str = "auto",
    tensor_parallel_size: int | str = "auto",
    pipeline_parallel_size: int | str = "auto",
    replicate_size: int | str = 1,
) -> Layout:
    """Turn degrees that may be ``"auto"`` into a :class:`Layout` that uses exactly ``num_devices``.

    What the given degrees leave over goes to the first automatic one of data, pipeline, tensor; the others are 1.

    Raises:
        ConfigurationError: if the product of the degrees cannot be ``num_devices``; the message names degrees that fit.
    """
    given = {
        "data_parallel_size": data_parallel_size,
        "tensor_parallel_size": tensor_parallel_size,
        "pipeline_parallel_size": pipeline_parallel_size,
    }
    for name, value in {**given, "replicate_size": replicate_size}.items():
        if value != "auto" and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            raise ConfigurationError(f'{name}={value!r} must be "auto" or an integer of at least 1.')
    degrees = {name: value for name, value in given.items() if isinstance(value, int)}
    for name, value in degrees.items():
        if num_devices % value:
            fits = ", ".join(map(str, divisors(num_devices)))
            raise ConfigurationError(f"{name}={value} does not divide {num_devices} devices; use one of {fits}.")
    product = 1
    for value in degrees.values():
        product *= value
    order = ("data_parallel_size", "pipeline_parallel_size", "tensor_parallel_size")
    automatic = [name for name in order if name not in degrees]
    if num_devices % product or (not automatic and product != num_devices):
        text = " x ".join(f"{name}={value}" for name, value in degrees.items())
        raise ConfigurationError(
            f"{text} makes {product}, but there are {num_devices} devices."
            f' Change a degree so that the product is {num_devices}, set one of them to "auto",'
            f" or use devices={product}."
        )
    for name in automatic:
        degrees[name] = num_devices // product if name == automatic[0] else 1
    replicas = 1 if replicate_size == "auto" else int(replicate_size)
    return Layout(**degrees, replicate_size=replicas)

"""What each pipeline rank holds. Pure."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from lightning_hybrid.planner.profile import ModelProfile
from lightning_hybrid.planner.setup import Setup

__all__ = ["COMMUNICATOR_BYTES", "FRAGMENTS", "KERNEL_BYTES", "StageMemory", "in_flight", "memory_of_stages"]

#: What driver and kernels take beside the allocator.
KERNEL_BYTES = 1.5 * 2**30
#: What communicators take where there are other ranks (driver, kernels and communicators together: 5 GiB in Sailor's
#: measurements, and in what nvidia-smi showed of BLOOM's runs).
COMMUNICATOR_BYTES = 3.5 * 2**30
#: What Python and its libraries take in each process where ranks are processes of a CPU (torch 2.13, Lightning 2.6).
PROCESS_BYTES = 0.5 * 2**30
#: What the allocator reserves for each byte that is in use: the upper end of what has been measured (1.05 to 1.10).
FRAGMENTS = 1.10


@dataclass(frozen=True, kw_only=True)
class StageMemory:
    """Bytes on each device of one pipeline rank, at the worst moment of a step."""

    parameters: float
    gradients: float
    optimizer: float
    gathered: float
    """Parameters that stand whole beside their shards."""
    activations: float
    logits: float
    alone: bool = False
    """Whether there is no other rank to talk to."""
    host: bool = False
    """Whether the device is a CPU."""

    @property
    def allocated(self) -> float:
        """What the allocator has given out."""
        return float(sum(getattr(self, field.name) for field in fields(self) if field.name not in ("alone", "host")))

    @property
    def states(self) -> float:
        """Parameters, gradients and optimizer states."""
        return self.parameters + self.gradients + self.optimizer + self.gathered

    @property
    def total(self) -> float:
        """What the device must have: with the allocator's gaps, driver and communicators."""
        if self.host:
            return self.allocated * FRAGMENTS + PROCESS_BYTES
        return self.allocated * FRAGMENTS + KERNEL_BYTES + (0.0 if self.alone else COMMUNICATOR_BYTES)


def in_flight(setup: Setup, stage: int) -> float:
    """Micro-batches, in whole ranks' blocks, whose activations a pipeline rank keeps at most."""
    ranks, count, virtual = setup.layout.pipeline_parallel_size, setup.num_microbatches, setup.stages_per_rank
    if ranks == 1:
        return 1.0
    name = setup.schedule
    if name == "GPipe":
        return float(count)
    if name in ("Interleaved1F1B", "InterleavedZeroBubble"):
        return min(count * virtual, 2 * (ranks - stage - 1) + (virtual - 1) * ranks + 1) / virtual
    if name == "ZB-H2":
        return float(min(count, 2 * ranks - 1))
    if name == "ZB-H1":  # what the weights' halves keep back fills what later stages would have free
        return float(min(count, ranks))
    if name in ("ZBVZeroBubble", "DualPipeV"):
        return float(min(count, ranks + (name == "DualPipeV")))
    return float(min(count, ranks - stage))


def memory_of_stages(
    profile: ModelProfile, setup: Setup, layers: list[int], *, host: bool = False
) -> list[StageMemory]:
    """Bytes of each pipeline rank.

    Args:
        profile: The model.
        setup: The run.
        layers: Blocks of each rank.
        host: Whether ranks are processes of a CPU.
    """
    last = len(layers) - 1
    stages = [_stage(profile, setup, count, stage, stage == last) for stage, count in enumerate(layers)]
    return [replace(stage, host=True) for stage in stages] if host else stages


def stage_parameters(profile: ModelProfile, setup: Setup, count: int, *, first: bool, last: bool) -> float:
    """Parameters on each tensor rank of a stage."""
    tensor = setup.layout.tensor_parallel_size
    whole = profile.layer_parameters - profile.split_parameters
    parameters = count * (profile.split_parameters / tensor + whole)
    tables = first + last if not (first and last and profile.tied_embeddings) else 1
    return parameters + tables * profile.embedding_parameters / tensor + profile.outside_parameters * first


def _stage(profile: ModelProfile, setup: Setup, count: int, stage: int, last: bool) -> StageMemory:
    tensor, shards = setup.layout.tensor_parallel_size, setup.shards
    parameters = stage_parameters(profile, setup, count, first=stage == 0, last=last)
    tokens = setup.micro_batch * profile.seq_length / setup.context
    activations, logits = _activations(profile, setup, count, stage, tokens), 0.0
    if last and profile.vocab_size:
        logits = 10 * tokens * profile.vocab_size / tensor  # at 16 bits, in fp32, and the gradient in fp32
    kept = setup.gradient_bytes
    if setup.zero < 3:
        step = 4 if kept < 4 else 0  # the optimizer takes gradients in fp32
        return StageMemory(
            parameters=2 * parameters,
            gradients=(kept + setup.gradient_twins) * parameters / (shards if setup.zero == 2 else 1),
            optimizer=(12 + step) * parameters / (shards if setup.zero else 1),
            gathered=0.0,
            activations=activations,
            logits=logits,
            alone=setup.num_devices == 1,
        )
    unit = max(profile.layer_parameters, profile.embedding_parameters) / tensor
    gathered = setup.width * (min(2 * unit, parameters) if setup.reshard else parameters)
    waiting = kept * (min(unit, parameters) if setup.reshard else parameters)  # gradients that are not yet reduced
    if shards == 1:  # replicas: gradients are where the optimizer takes them, and weights are cast one layer at a time
        gathered, waiting = 0.0, 0.0
    return StageMemory(
        parameters=4 * parameters / shards,
        gradients=4 * parameters / shards,
        optimizer=8 * parameters / shards,
        gathered=gathered + waiting,
        activations=activations,
        logits=logits,
        alone=setup.num_devices == 1,
    )


def _activations(profile: ModelProfile, setup: Setup, count: int, stage: int, tokens: float) -> float:
    tensor, parallel = setup.layout.tensor_parallel_size, setup.sequence_parallel
    tokens *= 2 if setup.precision == "fp32" else 1  # formulas are for 16 bits

    def of_block(recompute: str) -> float:
        return tokens * profile.activation_bytes(
            tensor, recompute=recompute, sequence_parallel=parallel, flash=setup.flash, fused=setup.fused
        )

    spread = tensor if parallel else 1
    boundaries = (stage == 0) + (
        stage < setup.layout.pipeline_parallel_size - 1
    )  # the embedding's output, and what is sent
    edge = 2 * tokens * profile.hidden_size / spread * boundaries * setup.stages_per_rank
    again = of_block("none") if setup.recompute == "full" and count else 0.0
    again += 2 * 2 * tokens * profile.hidden_size / spread  # gradients of a block's output and input
    return (of_block(setup.recompute) * count + edge) * in_flight(setup, stage) + again

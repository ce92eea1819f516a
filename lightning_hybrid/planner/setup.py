"""How a model is trained on a cluster: degrees and everything else that costs time or memory. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from lightning_hybrid.errors import ConfigurationError
from lightning_hybrid.layout import Layout
from lightning_hybrid.planner.collectives import Group

__all__ = ["ATTENTION", "RECOMPUTE", "SCHEDULES", "Setup", "describe"]

#: How attention is computed.
ATTENTION = ("unfused", "flash", "flash2", "cudnn")
#: What is computed again in the backward, from nothing to whole blocks.
RECOMPUTE = ("none", "selective", "ops", "full")
#: Schedules whose time and memory are known, and the stages that each rank must have (``None``: any number).
SCHEDULES: Mapping[str, int | None] = MappingProxyType(
    {
        "GPipe": 1,
        "1F1B": 1,
        "Interleaved1F1B": None,
        "InterleavedZeroBubble": None,
        "ZBVZeroBubble": 2,
        "DualPipeV": 2,
        "ZB-H1": 1,
        "ZB-H2": 1,
    }
)


def describe(layout: Layout) -> str:
    """Degrees in words, with replicas where there are some."""
    return str(layout) + (f" (in {layout.replicate_size} replicas)" if layout.replicate_size > 1 else "")


@dataclass(frozen=True, kw_only=True)
class Setup:
    """Degrees and settings of one run.

    Raises:
        ConfigurationError: if a setting is unknown or does not fit the others.
    """

    layout: Layout
    micro_batch: int
    """Samples of one micro-batch on one data rank."""
    num_microbatches: int
    """Micro-batches of one data rank in a step."""
    schedule: str = "1F1B"
    stages_per_rank: int = 1
    recompute: str = "none"
    """``selective``: attention (Megatron); ``ops``: all but attention and every other product with weights
    (torchtitan); ``full``: whole blocks."""
    zero: int = 3
    """What is sharded over the data axis: 0 nothing, 1 optimizer states, 2 gradients too, 3 parameters too."""
    reshard: bool = True
    """With ``zero=3``, whether parameters are freed after the forward and gathered again for the backward."""
    sequence_parallel: bool = False
    context: int = 1
    """Ranks among which the tokens of a sample are divided (between tensor and data ranks)."""
    precision: str = "bf16"
    attention: str = "flash2"
    """``unfused`` (scores in memory), ``flash`` (its first version, or Triton's), ``flash2``, or ``cudnn`` (and other
    kernels that are written for the device, such as the third version on Hopper)."""
    fused: bool = False
    """Whether element-wise work is compiled into few kernels."""
    gradient_bytes: int = 4
    """Of an element of a gradient when it is kept and reduced."""
    gradient_twins: int = 0
    """Bytes of gradients in the working precision that are kept beside those (DeepSpeed's bf16, nanotron)."""
    adapters: bool = False
    """Whether only small adapters train: no gradients, states or weights' half of the backward for the rest."""
    overlap_tensor: bool = False
    """Whether tensor ranks exchange while they compute (Transformer Engine's user buffers, asynchronous TP)."""
    even: bool = False
    """Whether blocks are dealt out evenly, whatever head and loss cost (Megatron); else so that stages cost alike."""

    def __post_init__(self) -> None:
        if self.recompute not in RECOMPUTE:
            raise ConfigurationError(f"recompute={self.recompute!r} is none of {', '.join(RECOMPUTE)}.")
        if self.schedule not in SCHEDULES:
            raise ConfigurationError(f"schedule={self.schedule!r} is none of {', '.join(SCHEDULES)}.")
        if self.attention not in ATTENTION:
            raise ConfigurationError(f"attention={self.attention!r} is none of {', '.join(ATTENTION)}.")
        wanted = SCHEDULES[self.schedule]
        if wanted is not None and wanted != self.stages_per_rank and self.layout.pipeline_parallel_size > 1:
            raise ConfigurationError(
                f"schedule={self.schedule!r} has {wanted} stages on each rank, not {self.stages_per_rank}."
            )
        for name in ("micro_batch", "num_microbatches", "stages_per_rank", "context"):
            if getattr(self, name) < 1:
                raise ConfigurationError(f"{name}={getattr(self, name)!r} must be at least 1.")

    @property
    def width(self) -> float:
        """Bytes of an element that is computed with or sent."""
        return 4.0 if self.precision == "fp32" else 2.0

    @property
    def flash(self) -> bool:
        """Whether attention's scores never reach memory."""
        return self.attention != "unfused"

    @property
    def global_batch(self) -> int:
        """Samples of one step."""
        return self.micro_batch * self.num_microbatches * self.layout.data_parallel_size

    @property
    def num_devices(self) -> int:
        """Devices that take part."""
        return self.layout.world_size * self.context

    @property
    def shards(self) -> int:
        """Ranks over which states are sharded."""
        return self.layout.shard_size * self.context

    @property
    def tensor_group(self) -> Group:
        """Ranks that split matrices."""
        return Group(self.layout.tensor_parallel_size, 1)

    @property
    def context_group(self) -> Group:
        """Ranks that split samples."""
        return Group(self.context, self.layout.tensor_parallel_size)

    @property
    def shard_group(self) -> Group:
        """Ranks that hold one copy of the states."""
        return Group(self.shards, self.layout.tensor_parallel_size)

    @property
    def replica_group(self) -> Group:
        """Ranks that hold the same shard."""
        return Group(self.layout.replicate_size, self.layout.tensor_parallel_size * self.shards)

    @property
    def pipeline_group(self) -> Group:
        """Ranks that hold different stages."""
        stride = self.layout.tensor_parallel_size * self.context * self.layout.data_parallel_size
        return Group(self.layout.pipeline_parallel_size, stride)

    def layers_of_stages(self, num_layers: int, head: float) -> list[int]:
        """Blocks of each pipeline rank.

        Args:
            num_layers: Blocks of the model.
            head: What head and loss cost, in blocks.
        """
        ranks = self.layout.pipeline_parallel_size
        if ranks == 1:
            return [num_layers]
        if self.even:
            if num_layers % ranks and (num_layers + 2) % ranks == 0:  # embedding and head count as a block each
                each = (num_layers + 2) // ranks
                return [each - 1, *[each] * (ranks - 2), each - 1]
            each = -(-num_layers // ranks)
            return [max(0, min(each, num_layers - each * rank)) for rank in range(ranks)]
        last = min(max(1, round((num_layers + head) / ranks - head)), num_layers - ranks + 1)
        base, more = divmod(num_layers - last, ranks - 1)
        return [base + (rank < more) for rank in range(ranks - 1)] + [last]

    def __str__(self) -> str:
        layout = self.layout
        text = describe(layout)
        text += f" x context {self.context}" if self.context > 1 else ""
        text += f", {self.num_microbatches} micro-batches of {self.micro_batch}"
        if layout.pipeline_parallel_size > 1:
            stages = f" with {self.stages_per_rank} stages a rank" if self.stages_per_rank > 1 else ""
            text += f", {self.schedule}{stages}"
        return text + f", recompute {self.recompute}"

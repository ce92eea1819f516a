"""How long one block computes on one device. Pure.

[Note: a matrix product]
``2 M N K`` operations at the rate of the best product, plus the tiles that idle in the last wave (at 128 x 256 outputs
for each multiprocessor), plus one reading and writing of the operands that is not quite hidden: small or thin products
come out slower, by their shape alone. Backward is two products of the same size.
"""

from __future__ import annotations

from dataclasses import dataclass

from lightning_hybrid.planner.constants import Constants
from lightning_hybrid.planner.gpus import COOL, Gpu
from lightning_hybrid.planner.profile import ModelProfile

__all__ = ["BlockTime", "Work", "block_time", "head_time", "host_work"]

_TILE = 128 * 256
#: Share of the best matrix product's rate that attention reaches with kernels written for the device, forward and
#: backward together (FlashAttention-3 on H100: 0.9 forward without a mask, less with one; Shah et al. 2024, figure 5).
_OWN_ATTENTION = 0.75


@dataclass(frozen=True, kw_only=True)
class Work:
    """How a block is computed."""

    tensor: int = 1
    context: int = 1
    """Ranks among which the tokens of a sample are divided."""
    micro_batch: int = 1
    sequence_parallel: bool = False
    precision: str = "bf16"
    """Data type of the linear layers; ``fp8`` leaves attention at ``bf16``."""
    attention: str = "flash2"
    fused: bool = False
    """Whether element-wise work is compiled into few kernels."""


@dataclass(frozen=True, kw_only=True)
class BlockTime:
    """Seconds of one micro-batch on the device, without communication."""

    forward: float
    backward_input: float
    backward_weight: float
    attention: float
    """The part of ``forward`` that selective recomputation repeats."""
    products: float = 0.0
    """The part of ``forward`` that is products with weights."""

    @property
    def backward(self) -> float:
        """Both halves."""
        return self.backward_input + self.backward_weight


def block_time(profile: ModelProfile, gpu: Gpu, work: Work, constants: Constants) -> BlockTime:
    """Seconds of one block."""
    tokens = work.micro_batch * profile.seq_length / work.context
    products = 0.0
    for matmul in profile.matmuls:
        inputs, outputs = matmul.shape(work.tensor)
        rows = max(tokens * matmul.share, 1.0)
        products += matmul.copies * _product(rows, inputs, outputs, gpu, work.precision, constants)
    attention, attention_backward = _attention(profile, tokens, gpu, work, constants)
    other = _elementwise(profile, tokens, gpu, work, constants)
    return BlockTime(
        forward=products + attention + other,
        backward_input=products + attention_backward + 1.25 * other,
        backward_weight=products,
        attention=attention,
        products=products,
    )


#: Kernels of a block's forward with flash attention: four products, attention, two norms, activation, rotation, biases,
#: dropout and residuals. Without flash attention come heads copied into place and back, a second product, scale, mask,
#: softmax and its dropout with a random state of its own; tensor ranks have two exchanges.
_KERNELS, _UNFUSED_KERNELS, _EXCHANGES = 16, 9, 2
#: Of those that remain when element-wise work is compiled.
_COMPILED = 0.6


def host_work(work: Work) -> float:
    """What the host has to start in a block's forward, relative to a block with flash attention on one device."""
    kernels = _KERNELS + _UNFUSED_KERNELS * (work.attention == "unfused") + _EXCHANGES * (work.tensor > 1)
    return kernels / _KERNELS * (_COMPILED if work.fused else 1.0)


def head_time(profile: ModelProfile, gpu: Gpu, work: Work, constants: Constants) -> BlockTime:
    """Seconds of head and loss: a product, and some passes over the logits (fp32 in the loss)."""
    if not profile.vocab_size:
        return BlockTime(forward=0.0, backward_input=0.0, backward_weight=0.0, attention=0.0)
    tokens, words = work.micro_batch * profile.seq_length / work.context, profile.vocab_size / work.tensor
    precision = "bf16" if work.precision == "fp8" else work.precision
    product = _product(tokens, profile.hidden_size, words, gpu, precision, constants)
    traffic = constants.elementwise * tokens * words / (gpu.bandwidth * 1e9 * constants.memory)
    return BlockTime(
        forward=product + 14 * traffic,
        backward_input=product + 10 * traffic,
        backward_weight=product,
        attention=0.0,
    )


def _rate(gpu: Gpu, dtype: str, constants: Constants) -> float:
    """FLOP/s of large matrix products in a long run.

    A best product that was measured at 8 bits is already bound by the power that the device may draw.
    """
    if dtype == "fp8" and gpu.matmul_fp8:
        return gpu.sustained(dtype)
    warmth = min(1.0, gpu.watts / (gpu.peak("bf16") / 1e12) / COOL)
    return gpu.sustained(dtype) * float(warmth**constants.throttle)


def _product(rows: float, inputs: float, outputs: float, gpu: Gpu, dtype: str, constants: Constants) -> float:
    waves = rows * outputs + constants.wave * gpu.multiprocessors * _TILE
    width = {"fp32": 4, "tf32": 4, "fp8": 1.5}.get(dtype, 2)
    traffic = width * (rows * inputs + inputs * outputs + rows * outputs)
    seconds = 2 * inputs * waves / (_rate(gpu, dtype, constants) * constants.matmul)
    return seconds + constants.operands * traffic / (gpu.bandwidth * 1e9 * constants.memory)


def _attention(profile: ModelProfile, tokens: float, gpu: Gpu, work: Work, constants: Constants) -> tuple[float, float]:
    """Seconds forward and backward. Flash attention skips what the mask hides, and computes the scores again."""
    dtype = "bf16" if work.precision == "fp8" else work.precision
    flops = tokens * profile.attention_flops / work.tensor
    if work.attention != "unfused":
        share = max(gpu.fast_attention, _OWN_ATTENTION) if work.attention == "cudnn" else gpu.fast_attention
        rate = _rate(gpu, dtype, constants) * share * constants.flash
        rate *= constants.first_flash if work.attention == "flash" else 1.0
        forward = flops * (0.5 if profile.causal else 1.0) / rate
        return forward, 2.5 * forward
    products = flops / (_rate(gpu, dtype, constants) * constants.narrow_attention)
    scores = tokens * profile.seq_length * profile.num_heads / work.tensor
    traffic = constants.scores * scores / (gpu.bandwidth * 1e9 * constants.memory)
    return products + 11 * traffic, 2 * products + 13 * traffic


def _elementwise(profile: ModelProfile, tokens: float, gpu: Gpu, work: Work, constants: Constants) -> float:
    """Seconds forward of norms, residuals and dropout (in common to tensor ranks), and of what is between products."""
    common = 11.0 * profile.hidden_size / (work.tensor if work.sequence_parallel else 1)
    heads = 2.0 * (2 * profile.num_heads + 2 * profile.num_kv_heads) * profile.head_dim
    inner = (3.0 if profile.gated_mlp else 2.0) * profile.ffn_size * profile.num_active_experts
    traffic = 2 * tokens * (common + (heads + inner) / work.tensor) * (0.6 if work.fused else 1.0)
    return constants.elementwise * traffic / (gpu.bandwidth * 1e9 * constants.memory)

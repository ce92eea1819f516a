"""What a model asks of the devices: matrix products, parameters and activations of one block. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from lightning_hybrid.errors import ConfigurationError

__all__ = ["Matmul", "ModelProfile"]


@dataclass(frozen=True, kw_only=True)
class Matmul:
    """A linear layer of a block: ``(tokens, inputs) @ (inputs, outputs)``."""

    inputs: int
    outputs: int
    split: str = "columns"
    """What tensor parallelism divides: ``columns`` (outputs), ``rows`` (inputs), or ``none``."""
    share: float = 1.0
    """Part of the tokens that pass through (experts)."""
    copies: float = 1
    """Such layers in a block (experts); a half where every other block has one."""

    def shape(self, tensor: int) -> tuple[float, float]:
        """(inputs, outputs) on one of ``tensor`` ranks."""
        columns, rows = self.split == "columns", self.split == "rows"
        return self.inputs / (tensor if rows else 1), self.outputs / (tensor if columns else 1)

    @property
    def parameters(self) -> int:
        """Weights of all copies."""
        return round(self.inputs * self.outputs * self.copies)


@dataclass(frozen=True, kw_only=True)
class ModelProfile:
    """A chain of equal blocks between an embedding and a head, for sequences of one length.

    Raises:
        ConfigurationError: if a size is not positive.
    """

    name: str = "model"
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_size: int
    """Inner size of a block's MLP (of one expert); 0 if the block has none."""
    vocab_size: int
    """Outputs of the head; 0 without one."""
    seq_length: int
    matmuls: tuple[Matmul, ...]
    """Linear layers of a block."""
    gated_mlp: bool = False
    num_active_experts: int = 1
    num_experts: int = 1
    tied_embeddings: bool = False
    causal: bool = True
    other_parameters: int = 0
    """Of a block, beside its linear layers (norms, biases)."""
    outside_parameters: int = 0
    """Outside of blocks, embedding and head (learned positions, a last norm)."""

    def __post_init__(self) -> None:
        for name in ("num_layers", "hidden_size", "num_heads", "num_kv_heads", "head_dim", "seq_length"):
            if getattr(self, name) < 1:
                raise ConfigurationError(f"{name}={getattr(self, name)!r} of a model must be at least 1.")
        for name in ("ffn_size", "vocab_size"):
            if getattr(self, name) < 0:
                raise ConfigurationError(f"{name}={getattr(self, name)!r} of a model must be at least 0.")
        if self.num_heads % self.num_kv_heads:
            raise ConfigurationError(
                f"num_kv_heads={self.num_kv_heads} does not divide num_heads={self.num_heads}: each key and value head"
                " serves equally many query heads."
            )

    @classmethod
    def from_sizes(
        cls,
        *,
        num_layers: int,
        hidden_size: int,
        num_heads: int,
        seq_length: int,
        vocab_size: int = 0,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        ffn_size: int | None = None,
        gated_mlp: bool = False,
        num_experts: int = 1,
        num_active_experts: int = 1,
        tied_embeddings: bool = False,
        causal: bool = True,
        learned_positions: bool = False,
        name: str = "model",
    ) -> ModelProfile:
        """Describe a transformer by its sizes.

        Args:
            num_layers: Blocks.
            hidden_size: Features of a token between blocks.
            num_heads: Query heads.
            seq_length: Tokens of a sample.
            vocab_size: Words of embedding and head; 0 without them.
            num_kv_heads: Key and value heads; by default as many as query heads.
            head_dim: Features of a head; by default ``hidden_size / num_heads``.
            ffn_size: Inner features of the MLP; by default four times ``hidden_size``.
            gated_mlp: Whether the MLP has a third matrix (SwiGLU).
            num_experts: MLPs of a block among which tokens choose.
            num_active_experts: How many of them a token passes.
            tied_embeddings: Whether head and embedding share weights.
            causal: Whether tokens see only those before them.
            learned_positions: Whether each position has an embedding of its own.
            name: For tables.

        Raises:
            ConfigurationError: if a size is not positive, or kv heads do not divide heads.
        """
        if num_heads < 1 or hidden_size < 1:
            raise ConfigurationError(f"hidden_size={hidden_size} and num_heads={num_heads} must be at least 1.")
        if head_dim is None and hidden_size % num_heads:
            raise ConfigurationError(
                f"hidden_size={hidden_size} is not divisible by num_heads={num_heads}; give head_dim."
            )
        head_dim, ffn_size = head_dim or hidden_size // num_heads, 4 * hidden_size if ffn_size is None else ffn_size
        kv_heads = num_kv_heads or num_heads
        share = num_active_experts / num_experts
        up = (2 if gated_mlp else 1) * ffn_size
        matmuls = [
            Matmul(inputs=hidden_size, outputs=(num_heads + 2 * kv_heads) * head_dim),
            Matmul(inputs=num_heads * head_dim, outputs=hidden_size, split="rows"),
        ]
        if num_experts > 1:
            matmuls.append(Matmul(inputs=hidden_size, outputs=num_experts, split="none"))
        if ffn_size:
            matmuls.append(Matmul(inputs=hidden_size, outputs=up, share=share, copies=num_experts))
            matmuls.append(Matmul(inputs=ffn_size, outputs=hidden_size, split="rows", share=share, copies=num_experts))
        return cls(
            name=name,
            num_layers=num_layers,
            hidden_size=hidden_size,
            num_heads=num_heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            ffn_size=ffn_size,
            vocab_size=vocab_size,
            seq_length=seq_length,
            matmuls=tuple(matmuls),
            gated_mlp=gated_mlp,
            num_experts=num_experts,
            num_active_experts=num_active_experts,
            tied_embeddings=tied_embeddings,
            causal=causal,
            other_parameters=4 * hidden_size,
            outside_parameters=2 * hidden_size + (seq_length * hidden_size if learned_positions else 0),
        )

    @classmethod
    def from_config(cls, config: Any, *, seq_length: int | None = None) -> ModelProfile:
        """Describe a Hugging Face model by its config (object, or the dict of its ``config.json``).

        Where transformers has such a model, that is read (on the meta device); else the config's sizes by their names.

        Args:
            config: The config; of a model with several (vision and text) the text's.
            seq_length: Tokens of a sample; by default the longest that the config allows.

        Raises:
            ConfigurationError: if a size is missing; the message names it. Of a model with encoder and decoder, if
                transformers is not installed.
        """
        from lightning_hybrid.planner.read import profile_of_config

        return profile_of_config(config, seq_length)

    @classmethod
    def from_module(cls, module: Any, *, seq_length: int, blocks: Any = None) -> ModelProfile:
        """Describe a module by its linear layers; it may lie on the meta device. Nothing runs.

        Args:
            module: The module; a config that it carries (Hugging Face's) says what its layers do not show.
            seq_length: Tokens of a sample.
            blocks: As for :class:`~lightning_hybrid.Hybrid3DStrategy`.

        Raises:
            ConfigurationError: if there is no list of blocks, or its blocks have no linear layers.
        """
        from lightning_hybrid.planner.read import profile_of_module

        return profile_of_module(module, seq_length, blocks)

    @cached_property
    def layer_parameters(self) -> int:
        """Parameters of one block."""
        return sum(matmul.parameters for matmul in self.matmuls) + self.other_parameters

    @cached_property
    def split_parameters(self) -> int:
        """Those of a block's parameters that tensor parallelism divides."""
        return sum(matmul.parameters for matmul in self.matmuls if matmul.split != "none")

    @property
    def embedding_parameters(self) -> int:
        """Parameters of the embedding, and of the head."""
        return self.vocab_size * self.hidden_size

    @cached_property
    def num_parameters(self) -> int:
        """Of the whole model; tied weights count once."""
        tables = 1 if self.tied_embeddings else 2
        return self.num_layers * self.layer_parameters + tables * self.embedding_parameters + self.outside_parameters

    @cached_property
    def attention_flops(self) -> float:
        """Floating point operations of a block's attention, a token, forward, as if every token saw all others."""
        return 4.0 * self.seq_length * self.num_heads * self.head_dim

    @cached_property
    def layer_flops(self) -> float:
        """Floating point operations of one block, a token, forward."""
        return sum(2.0 * m.parameters * m.share for m in self.matmuls) + self.attention_flops

    @property
    def head_flops(self) -> float:
        """Floating point operations of the head, a token, forward."""
        return 2.0 * self.embedding_parameters

    @cached_property
    def flops_per_sample(self) -> float:
        """Floating point operations that training on a sample needs, forward and backward (what MFU counts)."""
        return 3.0 * self.seq_length * (self.num_layers * self.layer_flops + self.head_flops)

    def activation_bytes(
        self, tensor: int, *, recompute: str, sequence_parallel: bool, flash: bool, fused: bool = False
    ) -> float:
        """Bytes that one block keeps for its backward, a token, at 16 bits (Korthikanti et al. 2022, table 2).

        Args:
            tensor: Tensor-parallel ranks.
            recompute: See :class:`~lightning_hybrid.planner.setup.Setup`. With ``"ops"`` a block keeps its input, what
                attention returns, and the results of every other product with weights.
            sequence_parallel: Whether what tensor ranks would hold in common is divided by tokens.
            flash: Whether attention keeps no scores.
            fused: Whether a gated MLP's activation is one kernel, which keeps nothing of its own.
        """
        hidden, spread = self.hidden_size, tensor if sequence_parallel else 1
        if recompute == "full":
            return 2.0 * hidden / spread
        attention = (
            2.0 * (self.num_heads + 2 * self.num_kv_heads) * self.head_dim + 2.0 * self.num_heads * self.head_dim
        )
        if recompute == "ops":
            results = sum(m.shape(tensor)[1] * m.copies * m.share for m in self.matmuls)
            return 2.0 * hidden / spread + 2.0 * self.num_heads * self.head_dim / tensor + results
        width = 4.0 if not self.gated_mlp else 6.0 if fused else 8.0  # what enters and leaves the activation
        inner = width * self.ffn_size * self.num_active_experts
        scores = 0.0 if flash or recompute == "selective" else 5.0 * self.num_heads * self.seq_length
        return 10.0 * hidden / spread + (attention + inner + scores) / tensor

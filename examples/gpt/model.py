"""A small byte-level GPT in plain PyTorch.

Nothing here knows of parallelism. Two habits of the code matter for it all the same, and are good habits anyway:
the blocks form an ``nn.ModuleList`` (so there are places to cut a pipeline at), and attention asks its tensors for
the number of heads instead of computing it from the model's width (so it also runs on a rank that holds only some).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

VOCABULARY_SIZE = 256
"""One token per byte."""


class Attention(nn.Module):
    """Causal self-attention: ``(B, T, width)`` to ``(B, T, width)``."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.head_dim = width // num_heads
        self.q = nn.Linear(width, width)
        self.k = nn.Linear(width, width)
        self.v = nn.Linear(width, width)
        self.o = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        # -1 is "the heads that are here": all of them, or a tensor-parallel rank's share.
        q, k, v = (p(x).view(batch, length, -1, self.head_dim).transpose(1, 2) for p in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.o(mixed.transpose(1, 2).reshape(batch, length, -1))
        return out


class MLP(nn.Module):
    """Two linear layers with GELU between them; four times as wide inside."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(F.gelu(self.up(x)))
        return out


class Block(nn.Module):
    """One pre-norm transformer block: ``(B, T, width)`` to ``(B, T, width)``."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = Attention(width, num_heads)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = MLP(width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        out: Tensor = x + self.mlp(self.mlp_norm(x))
        return out


class GPT(nn.Module):
    """Bytes in, logits for the next byte out: ``(B, T)`` of int64 to ``(B, T, 256)``.

    Raises ``ValueError`` where ``num_heads`` does not divide ``width``.
    """

    def __init__(self, *, num_blocks: int, width: int, num_heads: int, context_length: int) -> None:
        super().__init__()
        if width % num_heads:
            raise ValueError(f"num_heads={num_heads} does not divide width={width}; choose a divisor of {width}")
        self.token_embedding = nn.Embedding(VOCABULARY_SIZE, width)
        self.position_embedding = nn.Embedding(context_length, width)
        self.blocks = nn.ModuleList(Block(width, num_heads) for _ in range(num_blocks))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY_SIZE, bias=False)
        self.apply(_initialise)

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.token_embedding(tokens) + self.position_embedding(positions)
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(self.norm(x))
        return out


def _initialise(module: nn.Module) -> None:
    """GPT-2's initialisation: small normal weights, no biases."""
    if isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)

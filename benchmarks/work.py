"""One fixed piece of work, so that step times of different systems can be compared.

A GPT of 8 blocks, width 256, 8 heads, sequences of 128 tokens, vocabulary of 4096 (8.4 M parameters); global batch
of 16 sequences, AdamW, fp32. Every system sees the same rows in the same order. ``WORK_WIDTH`` in the environment makes
it larger or smaller, to see how costs grow with it; ``WORK_STEPS`` makes a run longer.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, NUM_STEPS = int(os.environ.get("WORK_WIDTH", 256)), int(os.environ.get("WORK_STEPS", 15))
VOCABULARY, NUM_HEADS, NUM_BLOCKS, LENGTH = 4096, 8, 8, 128
BATCH_SIZE, NUM_MICROBATCHES, NUM_WARMUP = 16, 8, 4


class Block(nn.Module):
    """Pre-norm attention and MLP, with separate projections."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.query, self.key, self.value, self.output = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.attention_norm(x)
        q, k, v = (
            part(normed).unflatten(-1, (-1, WIDTH // NUM_HEADS)).transpose(1, 2)
            for part in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.output(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.mlp_norm(x))))


class Embed(nn.Module):
    """Tokens and positions."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)

    def forward(self, ids: Tensor) -> Tensor:
        return self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))


class GPT(nn.Module):
    """Embedding, blocks, head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = Embed()
        self.blocks = nn.ModuleList(Block() for _ in range(NUM_BLOCKS))
        self.head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(x)
        return logits


class LitGPT(L.LightningModule):
    """The same as a LightningModule."""

    def __init__(self) -> None:
        super().__init__()
        self.model = GPT()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return loss_of(self.model(batch[:, :-1]), batch[:, 1:])

    def configure_optimizers(self) -> Any:
        return optimizer_of(self.parameters())


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def optimizer_of(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)


def rows() -> Tensor:
    """All rows of a run, ``(num_rows, LENGTH + 1)``."""
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, VOCABULARY, (BATCH_SIZE * NUM_STEPS, LENGTH + 1), generator=generator)


#: Runs a step on one batch of rows; returns the loss where this process knows it.
Step = Callable[[Tensor], float | None]

"""Models as people bring them, tiny: each entry makes an ordinary LightningModule and its rows.

The number of blocks is 4 unless said otherwise; in an encoder and a decoder together.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY, LENGTH, NUM_ROWS = 64, 12, 16


class Lit(L.LightningModule):
    """Training step and SGD; subclasses give the loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def loss(self, batch: Any) -> Tensor:
        raise NotImplementedError

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1)


class HuggingFace(Lit):
    def loss(self, batch: Any) -> Tensor:
        loss: Tensor = self.model(**batch).loss
        return loss


class Classifier(Lit):
    def loss(self, batch: Any) -> Tensor:
        return F.cross_entropy(self.model(batch["x"]), batch["y"])


def generator(seed: int = 1) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def text_rows(**more: Callable[[Tensor], Tensor]) -> list[dict[str, Tensor]]:
    """Token rows with padding of different lengths; labels are -100 there."""
    ids = torch.randint(3, VOCABULARY, (NUM_ROWS, LENGTH), generator=generator())
    rows = []
    for index, row in enumerate(ids):
        mask = torch.ones(LENGTH, dtype=torch.long)
        mask[LENGTH - index % 5 :] = 0
        labels = torch.where(mask.bool(), row, -100)
        rows.append({"input_ids": row, "attention_mask": mask, "labels": labels})
    return rows


def even_rows(num_rows: int) -> list[dict[str, Tensor]]:
    """Rows without padding: data ranks average over as many tokens each."""
    ids = torch.randint(3, VOCABULARY, (num_rows, LENGTH), generator=generator())
    return [{"input_ids": row, "attention_mask": torch.ones(LENGTH, dtype=torch.long), "labels": row} for row in ids]


def labelled_rows(shape: tuple[int, ...], num_classes: int = 5) -> list[dict[str, Tensor]]:
    x = torch.randn(NUM_ROWS, *shape, generator=generator())
    y = torch.randint(0, num_classes, (NUM_ROWS,), generator=generator(2))
    return [{"x": a, "y": b} for a, b in zip(x, y, strict=True)]


def hugging_face(name: str, **options: Any) -> Callable[..., L.LightningModule]:
    """A causal language model of that configuration class, or another head given as ``head``."""

    def make(num_blocks: int = 4) -> L.LightningModule:
        import transformers

        given = dict(options)
        numbers = {"num_hidden_layers": num_blocks, "n_layer": num_blocks}
        numbers |= {"num_layers": num_blocks // 2, "num_decoder_layers": num_blocks // 2}
        given |= {key: number for key, number in numbers.items() if key in given}
        head = given.pop("head", "AutoModelForCausalLM")
        config = getattr(transformers, name)(**given)
        model = getattr(transformers, head).from_config(config)
        if given.get("gradient_checkpointing"):
            model.gradient_checkpointing_enable()
        return HuggingFace(model.train())

    return make


SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "use_cache": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


class Encoder(nn.Module):
    """``nn.TransformerEncoder`` between an embedding and a head, with a padding mask."""

    def __init__(self, num_blocks: int = 4) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 16)
        layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, num_blocks, enable_nested_tensor=False)
        self.head = nn.Linear(16, VOCABULARY)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        out: Tensor = self.head(self.encoder(self.embedding(ids), src_key_padding_mask=~mask.bool()))
        return out


class LitEncoder(Lit):
    def loss(self, batch: Any) -> Tensor:
        logits = self.model(batch["input_ids"], batch["attention_mask"])
        return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=-100)


class NanoBlock(nn.Module):
    """Fused query-key-value, head size computed from the global width."""

    def __init__(self, width: int = 16, num_heads: int = 2) -> None:
        super().__init__()
        self.n_head = num_heads
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.c_attn(self.ln_1(x)).split(width, dim=2)
        q, k, v = (t.view(batch, length, self.n_head, width // self.n_head).transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.c_proj(y.transpose(1, 2).contiguous().view(batch, length, width))
        y = self.mlp(self.ln_2(x))
        y += x  # in place, as people write it
        return y


class NanoGPT(nn.Module):
    """Parts in a ModuleDict; the head uses the embedding's weight without a module of its own."""

    def __init__(self, num_blocks: int = 4) -> None:
        super().__init__()
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(VOCABULARY, 16),
                "wpe": nn.Embedding(LENGTH, 16),
                "h": nn.ModuleList(NanoBlock() for _ in range(num_blocks)),
                "ln_f": nn.LayerNorm(16),
            }
        )

    def forward(self, ids: Tensor) -> Tensor:
        parts: Any = self.transformer
        x = parts["wte"](ids) + parts["wpe"](torch.arange(ids.shape[1], device=ids.device))
        for block in parts["h"]:
            x = block(x)
        out: Tensor = parts["ln_f"](x) @ parts["wte"].weight.T
        return out


class LitNano(Lit):
    def loss(self, batch: Any) -> Tensor:
        logits = self.model(batch["input_ids"])
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten(), ignore_index=-100)


class ViT(nn.Module):
    """A learned position parameter and a class token, held by the model itself."""

    def __init__(self, num_blocks: int = 4) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, 16, 4, stride=4)
        self.cls_token = nn.Parameter(torch.randn(1, 1, 16) * 0.02)
        self.positions = nn.Parameter(torch.randn(1, 5, 16) * 0.02)
        layers = (nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True) for _ in range(num_blocks))
        self.layers = nn.ModuleList(layers)
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, 5)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patch(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls_token.expand(x.shape[0], -1, -1), x], dim=1) + self.positions
        for layer in self.layers:
            x = layer(x)
        out: Tensor = self.head(self.norm(x[:, 0]))
        return out


class ConvBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(8, 8, 3, padding=1), nn.GroupNorm(2, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.relu(self.norm(self.conv(x)))


class ConvNet(nn.Module):
    def __init__(self, num_blocks: int = 4) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.blocks = nn.Sequential(*(ConvBlock() for _ in range(num_blocks)))
        self.head = nn.Linear(8, 5)

    def forward(self, images: Tensor) -> Tensor:
        out: Tensor = self.head(self.blocks(self.stem(images)).mean(dim=(2, 3)))
        return out


def mlp(num_blocks: int = 4) -> nn.Module:
    return nn.Sequential(
        nn.Flatten(),
        *(layer for _ in range(num_blocks) for layer in (nn.Linear(12, 12), nn.Tanh())),
        nn.Linear(12, 5),
    )


class TwoLists(nn.Module):
    """Two lists of blocks of different width in a row, with a projection between them."""

    def __init__(self, num_blocks: int = 4) -> None:
        super().__init__()
        self.embed = nn.Linear(12, 8)
        self.narrow = nn.ModuleList(nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.GELU()) for _ in range(3))
        self.project = nn.Linear(8, 16)
        self.wide = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16), nn.GELU()) for _ in range(num_blocks)
        )
        self.head = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x.flatten(1))
        for block in self.narrow:
            x = x + block(x)
        x = self.project(x)
        for block in self.wide:
            x = x + block(x)
        out: Tensor = self.head(x)
        return out


class Adapted(nn.Module):
    """A frozen linear with a trainable low-rank update, as LoRA does."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(2, base.in_features) * 0.1)
        self.up = nn.Parameter(torch.randn(base.out_features, 2) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.base(x) + x @ self.down.T @ self.up.T
        return out


def adapted(what: str) -> Callable[..., L.LightningModule]:
    """A frozen GPT whose ``"first"`` or ``"last"`` half of the blocks has adapters, or whose ``"embedding"`` trains."""

    def make(num_blocks: int = 4) -> L.LightningModule:
        model = NanoGPT(num_blocks).requires_grad_(False)
        parts: Any = model.transformer
        half = num_blocks // 2
        for block in {"first": parts["h"][:half], "last": parts["h"][half:], "embedding": []}[what]:
            block.c_attn = Adapted(block.c_attn)
        if what == "embedding":
            parts["wpe"].requires_grad_(True)
        return LitNano(model)

    return make


@dataclass(frozen=True)
class Entry:
    make: Callable[..., L.LightningModule]
    """``make(num_blocks=4)``"""
    rows: Callable[[], Any]


def checkpointed(num_blocks: int = 4) -> L.LightningModule:
    """Blocks called through torch's own activation checkpointing."""
    from torch.utils.checkpoint import checkpoint

    class Model(NanoGPT):
        def forward(self, ids: Tensor) -> Tensor:
            parts: Any = self.transformer
            x = parts["wte"](ids) + parts["wpe"](torch.arange(ids.shape[1], device=ids.device))
            for block in parts["h"]:
                x = checkpoint(block, x, use_reentrant=False)
            out: Tensor = parts["ln_f"](x) @ parts["wte"].weight.T
            return out

    return LitNano(Model(num_blocks))


ZOO: dict[str, Entry] = {
    "llama": Entry(hugging_face("LlamaConfig", **SMALL, num_key_value_heads=2), text_rows),
    "llama_checkpointed": Entry(
        hugging_face("LlamaConfig", **SMALL, num_key_value_heads=2, gradient_checkpointing=True), text_rows
    ),
    "mixtral": Entry(
        hugging_face("MixtralConfig", **SMALL, num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2),
        text_rows,
    ),
    "qwen3": Entry(hugging_face("Qwen3Config", **SMALL, num_key_value_heads=2, head_dim=8), text_rows),
    "gpt_neox": Entry(hugging_face("GPTNeoXConfig", **SMALL), text_rows),
    "gpt2": Entry(
        hugging_face(
            "GPT2Config",
            vocab_size=VOCABULARY,
            n_embd=32,
            n_layer=4,
            n_head=4,
            n_positions=16,
            use_cache=False,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            bos_token_id=1,
            eos_token_id=2,
        ),
        text_rows,
    ),
    "gemma3": Entry(
        hugging_face("Gemma3TextConfig", **SMALL, num_key_value_heads=2, head_dim=8, sliding_window=4), text_rows
    ),
    "bert": Entry(
        hugging_face("BertConfig", **SMALL, **NO_DROPOUT, max_position_embeddings=16, head="AutoModelForMaskedLM"),
        text_rows,
    ),
    "vit_hf": Entry(
        hugging_face(
            "ViTConfig",
            hidden_size=16,
            num_hidden_layers=4,
            num_attention_heads=4,
            intermediate_size=32,
            image_size=8,
            patch_size=4,
            num_labels=5,
            head="AutoModelForImageClassification",
        ),
        lambda: [{"pixel_values": row["x"], "labels": row["y"]} for row in labelled_rows((3, 8, 8))],
    ),
    "t5": Entry(
        hugging_face(
            "T5Config",
            vocab_size=VOCABULARY,
            d_model=16,
            d_kv=4,
            d_ff=32,
            num_layers=2,
            num_decoder_layers=2,
            num_heads=4,
            dropout_rate=0.0,
            use_cache=False,
            pad_token_id=0,
            decoder_start_token_id=0,
            eos_token_id=1,
            head="AutoModelForSeq2SeqLM",
        ),
        text_rows,
    ),
    "transformer_encoder": Entry(lambda num_blocks=4: LitEncoder(Encoder(num_blocks)), text_rows),
    "nanogpt": Entry(lambda num_blocks=4: LitNano(NanoGPT(num_blocks)), text_rows),
    "nanogpt_checkpointed": Entry(checkpointed, text_rows),
    "vit": Entry(lambda num_blocks=4: Classifier(ViT(num_blocks)), lambda: labelled_rows((3, 8, 8))),
    "convnet": Entry(lambda num_blocks=4: Classifier(ConvNet(num_blocks)), lambda: labelled_rows((3, 8, 8))),
    "mlp": Entry(lambda num_blocks=4: Classifier(mlp(num_blocks)), lambda: labelled_rows((12,))),
    "two_lists": Entry(lambda num_blocks=4: Classifier(TwoLists(num_blocks)), lambda: labelled_rows((12,))),
    "adapters_last": Entry(adapted("last"), text_rows),
    "adapters_first": Entry(adapted("first"), text_rows),
    "embedding_only": Entry(adapted("embedding"), text_rows),
}

"""Models, plans and the comparison with one process that the tests of tensor parallelism share."""

from __future__ import annotations

import copy
import dataclasses
import os
from collections.abc import Callable
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from lightning_hybrid import parallelize
from lightning_hybrid.tensor_parallel import check
from lightning_hybrid.tensor_parallel.apply import apply_tensor_parallel
from lightning_hybrid.tensor_parallel.plan import build_tp_plan

GPT_PLAN = {
    "token_embedding": "embedding_rowwise",
    "attention.q": "colwise",
    "attention.k": "colwise",
    "attention.v": "colwise",
    "attention.o": "rowwise",
    "mlp.up": "colwise",
    "mlp.down": "rowwise",
    "head": "colwise_gather_output",
}

TINY: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}


def build_gpt(*, num_heads: int = 4) -> nn.Module:
    from examples.gpt.model import GPT

    return randomised(GPT(num_blocks=2, width=32, num_heads=num_heads, context_length=16))


def build_huggingface(kind: str, **options: Any) -> nn.Module:
    import transformers as hf

    options = {**TINY, "vocab_size": 64, "max_position_embeddings": 64, **options}
    config = getattr(hf, f"{kind}Config")(**options)
    config._attn_implementation = config._experts_implementation = "eager"  # the others know no fp64
    return randomised(hf.AutoModelForCausalLM.from_config(config))


def randomised(model: nn.Module) -> nn.Module:
    """Every parameter random: at their initial zeros, biases could be added any number of times."""
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        noise = 0.2 * torch.randn(parameter.shape, generator=generator)
        parameter.data.copy_(noise + (1.0 if parameter.ndim == 1 else 0.0))
    return model.double()


class Share(L.Callback):
    """Which part of the blocks' parameters is split (without a plan embeddings and heads are not); the plan."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        plan = trainer.strategy._part.plan
        keep = ("replicated_with_grad_allreduce", "local_numbers", "colwise_shared", "whole")
        inside = [entry for entry in plan.entries if any(part.isdigit() for part in entry.name.split("."))]
        split = sum(plan.num_parameters[entry.name] for entry in inside if entry.style not in keep)
        self.share = split / max(sum(plan.num_parameters[entry.name] for entry in inside), 1)
        self.text = str(plan)


def unchecked() -> None:
    """The first way that runs is taken for right."""
    right = check.check_block
    check.check_block = lambda *call: dataclasses.replace(
        right(*call), output=0.0, inputs=0.0, gradients={}, partial=frozenset()
    )
    parallelize.check_outside = lambda *args: None


class Holder(nn.Module):
    """Stands for a LightningModule: the model is somewhere inside, the loss is made from its logits."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def loss(self, tokens: Tensor) -> Tensor:
        out = self.model(tokens[:, :-1])
        logits = out if isinstance(out, Tensor) else out.logits
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    forward = loss


def start(shape: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def full(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def compare(
    build: Callable[[], nn.Module],
    plan: dict[str, str] | None,
    mesh: DeviceMesh,
    *,
    after: Callable[[Holder], None] | None = None,
    shard: bool = False,
    num_steps: int = 1,
    vocabulary: int = 64,
) -> dict[str, float]:
    """Return the relative error of the loss and of every gradient (by name) against one process, on this rank.

    The mesh has axes (data, tensor). ``num_steps`` backward passes accumulate. ``after`` may spoil the split model.
    """
    reference = Holder(build())
    model = copy.deepcopy(reference)
    apply_tensor_parallel(model, mesh["tensor"], build_tp_plan(model, plan, mesh["tensor"].size()))
    if after:
        after(model)
    if shard:
        for block in model.modules():
            if type(block).__name__ in ("Block", "LlamaDecoderLayer", "Qwen3DecoderLayer", "GPTNeoXLayer"):
                fully_shard(block, mesh=mesh["data"])
        fully_shard(model, mesh=mesh["data"])
    errors, data = {}, mesh["data"]
    for step in range(num_steps):
        tokens = torch.randint(vocabulary, (4, 9), generator=torch.Generator().manual_seed(step))
        expected = reference.loss(tokens)
        expected.backward()
        own = tokens.chunk(data.size())[data.get_local_rank()]
        loss = model(own)
        loss.backward()
        total = loss.detach().clone()
        dist.all_reduce(total, group=data.get_group())
        errors[f"loss {step}"] = relative(total / data.size(), expected)
    for (name, parameter), (_, other) in zip(model.named_parameters(), reference.named_parameters(), strict=True):
        gradient = full(parameter.grad)
        if not shard:  # plain gradients are not reduced over data by anybody
            gradient = gradient.clone()
            dist.all_reduce(gradient, group=data.get_group())
            gradient /= data.size()
        errors[name] = relative(gradient, full(other.grad))
        assert full(parameter).shape == other.shape
    dist.destroy_process_group()
    return errors


def relative(value: Tensor, expected: Tensor) -> float:
    """Relative error of the norm; absolute where the truth is (numerically) zero, such as a key bias's gradient."""
    size = expected.detach().norm().item()
    return (value.detach() - expected.detach()).norm().item() / (size if size > 1e-9 else 1.0)

"""What is said of a rank without its devices: what a run says, and what its tensors come to on paper's scale."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Iterable
from typing import Any

import lightning as L
import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, default_collate

from lightning_hybrid import Hybrid3DStrategy, describe_rank, parallelize
from lightning_hybrid.errors import ConfigurationError, UnsupportedError
from tests.distributed.equality import QUIET, must_differ
from tests.distributed.zoo import SMALL, ZOO, hugging_face
from tests.ranks import run_ranks

RUNS: dict[str, tuple[str, dict[str, Any]]] = {
    "2x2x2": (
        "llama",
        {
            "data_parallel_size": 2,
            "tensor_parallel_size": 2,
            "pipeline_parallel_size": 2,
            "schedule": "Interleaved1F1B",
            "num_microbatches": 4,
        },
    ),
    "hsdp, tied": ("nanogpt", {"data_parallel_size": 4, "replicate_size": 2, "reshard_after_forward": True}),
    "sequence": ("llama", {"tensor_parallel_size": 2, "sequence_parallel": True}),
    "replicas": ("nanogpt", {"data_parallel_size": 2, "replicate_size": 2}),
}
NUM_RANKS = {"2x2x2": 8, "hsdp, tied": 4, "sequence": 2, "replicas": 2}


def strategy_of(options: dict[str, Any]) -> Hybrid3DStrategy:
    one = dict.fromkeys(("data_parallel_size", "tensor_parallel_size", "pipeline_parallel_size"), 1)
    return Hybrid3DStrategy(archive=None, **{**one, **options})


def with_adamw(model: str) -> L.LightningModule:
    module = ZOO[model].make()
    module.configure_optimizers = lambda: torch.optim.AdamW(module.parameters())  # type: ignore[method-assign]
    return module


def rows_of(model: str) -> list[dict[str, Any]]:
    """Without padding, which would decide what attention keeps, and so be another in each batch."""
    return [{key: row[key] for key in ("input_ids", "labels")} for row in ZOO[model].rows()]


def described_in_a_run(rank: int, name: str) -> dict[str, Any]:
    model, options = RUNS[name]
    strategy = strategy_of(options)
    trainer = L.Trainer(devices=NUM_RANKS[name], strategy=strategy, max_steps=1, **QUIET)
    trainer.fit(with_adamw(model), DataLoader(rows_of(model), batch_size=4))
    return strategy.describe()


def described_without(name: str, ranks: Iterable[int]) -> list[dict[str, Any]]:
    model, options = RUNS[name]
    batch, size = default_collate(rows_of(model)[:4]), NUM_RANKS[name]
    return [
        describe_rank(strategy_of(options), with_adamw(model), batch, num_devices=size, rank=rank) for rank in ranks
    ]


@pytest.mark.parametrize("name", RUNS)
def test_every_rank_is_described_as_in_a_run(name: str) -> None:
    found = run_ranks(NUM_RANKS[name], described_in_a_run, name)
    for said, right in zip(described_without(name, range(NUM_RANKS[name])), found, strict=True):
        assert said == right
    assert not torch.distributed.is_initialized()


def test_wrong_variant_another_rank_is_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    before = described_without("2x2x2", (0, 7))
    assert before[0] != before[1] and before[0]["memory"] != before[1]["memory"]
    monkeypatch.setattr(parallelize, "apply_tensor_parallel", lambda *args, **kwargs: None)
    after = described_without("2x2x2", (0, 7))
    assert all(a["memory"]["parameters"] < b["memory"]["parameters"] for a, b in zip(before, after, strict=True))


def test_what_must_be_tried_on_ranks_is_refused() -> None:
    options = {"tensor_parallel_size": 2}
    batch = default_collate(ZOO["nanogpt"].rows()[:4])
    with pytest.raises(UnsupportedError, match=r"transformer.h.0 is split over 2 ranks.*tp_plan"):
        describe_rank(strategy_of(options), ZOO["nanogpt"].make(), batch, num_devices=2)


def inside_a_run(rank: int) -> None:
    torch.distributed.init_process_group("gloo")
    describe_rank(strategy_of({}), ZOO["nanogpt"].make(), None, num_devices=1)


def test_inside_of_a_run_it_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="a process group of its own"):
        run_ranks(1, inside_a_run)


# ---- Llama 3 405B on 16,384 devices ---------------------------------------------------------------------------------

LLAMA_405B = {
    **SMALL,
    "vocab_size": 128256,
    "hidden_size": 16384,
    "intermediate_size": 53248,
    "num_hidden_layers": 126,
    "num_attention_heads": 128,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
}
DEGREES_405B = {"data_parallel_size": 128, "tensor_parallel_size": 8, "pipeline_parallel_size": 16}
#: The last stage's first rank, one in the middle, the first stage's last one. (The last stage is pipeline rank 0's.)
RANKS_405B = (0, 8 * 1024 + 500, 16 * 1024 - 1)
MOST_SECONDS, MOST_BYTES = 60.0, 4e9


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def counted(module: nn.Module) -> dict[str, int]:
    """Bytes of a rank's tensors as they are, and of the states that a real AdamW makes of them."""
    shards = [nn.Parameter(local(p).detach()) for p in module.parameters()]
    for shard in shards:
        shard.grad = torch.empty_like(shard)
    optimizer = torch.optim.AdamW(shards)
    optimizer.step()
    states = [value for state in optimizer.state.values() for value in state.values()]
    return {
        "parameters": sum(t.nbytes for t in (*shards, *module.buffers())),
        "gradients": sum(shard.grad.nbytes for shard in shards if shard.grad is not None),
        "optimizer": sum(value.nbytes for value in states),
    }


def large(index: int, sabotage: Callable[[], None] | None = None, num_blocks: int = 126) -> dict[str, Any]:
    if sabotage is not None:
        sabotage()
    start, rank = time.process_time(), RANKS_405B[index]  # of this process: others use the cores too
    with torch.device("meta"):
        module = hugging_face("LlamaConfig", **LLAMA_405B)(num_blocks)
    module.configure_optimizers = lambda: torch.optim.AdamW(module.parameters())  # type: ignore[method-assign]
    ids = torch.zeros(16, 64, dtype=torch.long)
    strategy = strategy_of({**DEGREES_405B, "num_microbatches": 16, "schedule": "1F1B"})
    said = describe_rank(strategy, module, {"input_ids": ids, "labels": ids}, num_devices=16384, rank=rank)
    found = counted(module)
    return {
        "said": said,
        "counted": found,
        "seconds": time.process_time() - start,
        "bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def check_large(one: dict[str, Any]) -> None:
    said = one["said"]["memory"]
    assert {key: said[key] for key in one["counted"]} == one["counted"]
    (stage,) = one["said"]["holds"]["stages"].values()
    whole = 4 * stage["num_parameters"]
    share = whole / (128 * 8)
    assert said["gradients"] <= 1.01 * share  # rows do not divide evenly: the last rank holds less
    assert said["gathered"] == pytest.approx(whole / 8, rel=1e-3)


def test_llama_405b_on_16384_devices() -> None:
    found = run_ranks(len(RANKS_405B), large, timeout=150)
    stages = [next(iter(one["said"]["holds"]["stages"])) for one in found]
    assert stages == [15, 7, 0]
    for one in found:
        check_large(one)
        assert one["seconds"] < MOST_SECONDS and one["bytes"] < MOST_BYTES, (one["seconds"], one["bytes"])
    parameters = found[0]["said"]["holds"]["stages"][15]["num_parameters"]
    assert parameters == 7 * (2 * 16384**2 + 2 * 16384 * 1024 + 3 * 16384 * 53248 + 2 * 16384) + 16384 * 128257


def nothing_is_split() -> None:
    parallelize.apply_tensor_parallel = lambda *args, **kwargs: None


def test_wrong_variant_a_share_that_is_too_large_is_seen() -> None:
    (right,) = run_ranks(1, large, None, 16)
    check_large(right)
    (wrong,) = run_ranks(1, large, nothing_is_split, 16)
    with must_differ():
        check_large(wrong)

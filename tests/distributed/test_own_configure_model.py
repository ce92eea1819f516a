"""A ``configure_model`` written for Lightning's ModelParallelStrategy runs unchanged, and equals one process."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional as F
from torch.utils.data import DataLoader

import lightning_hybrid.parallelize
from lightning_hybrid.errors import ConfigurationError, UnsupportedError
from tests.distributed.equality import (
    ONE_PROCESS,
    QUIET,
    Recorder,
    Trace,
    assert_equal,
    merged,
    must_differ,
    trace,
    worst_error,
)
from tests.distributed.zoo import VOCABULARY, Lit, even_rows
from tests.ranks import run_ranks

WIDTH, HEADS = 16, 4


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for part in (self.wq, self.wk, self.wv))
        out: Tensor = self.wo(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return out


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w2, self.w3 = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH), nn.Linear(WIDTH, 32)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.w2(F.silu(self.w1(x)) * self.w3(x))
        return out


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.ffn_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention, self.feed_forward = Attention(), FeedForward()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        out: Tensor = x + self.feed_forward(self.ffn_norm(x))
        return out


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tok_embeddings, self.output = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.layers, self.norm = nn.ModuleList(Block() for _ in range(2)), nn.LayerNorm(WIDTH)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tok_embeddings(ids)
        for layer in self.layers:
            x = layer(x)
        out: Tensor = self.output(self.norm(x))
        return out


SPLIT: dict[str, Any] = {
    "attention.wq": ColwiseParallel(),
    "attention.wk": ColwiseParallel(),
    "attention.wv": ColwiseParallel(),
    "attention.wo": RowwiseParallel(),
    "feed_forward.w1": ColwiseParallel(),
    "feed_forward.w2": RowwiseParallel(),
    "feed_forward.w3": ColwiseParallel(),
}


class Own(Lit):
    """As in Lightning's guide: ``what`` is split and sharded, by its own words."""

    def __init__(self, what: str = "all") -> None:
        super().__init__(Transformer())
        self.what = what

    def loss(self, batch: Any) -> Tensor:
        return F.cross_entropy(self.model(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten())

    def configure_model(self) -> None:
        if isinstance(self.model.output.weight, DTensor) or self._device_mesh is None:
            return
        tensor, data = self.device_mesh["tensor_parallel"], self.device_mesh["data_parallel"]
        if tensor.size() > 1:
            self.split(tensor)
        if data.size() > 1 and self.what != "not sharded":
            for layer in self.model.layers:
                fully_shard(layer, mesh=data)
            fully_shard(self if self.what == "the module itself" else self.model, mesh=data)

    def split(self, mesh: Any) -> None:
        if self.what == "sequence":
            ends = {
                "tok_embeddings": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
                "norm": SequenceParallel(),
                "output": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
            }
            joined = PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate())
            inside = dict.fromkeys(("attention", "feed_forward"), joined)
            norms = {name: SequenceParallel() for name in ("attention_norm", "ffn_norm")}
            last = {name: RowwiseParallel(output_layouts=Shard(1)) for name in ("attention.wo", "feed_forward.w2")}
            parallelize_module(self.model, mesh, ends)
            for layer in self.model.layers:
                parallelize_module(layer, mesh, {**SPLIT, **inside, **norms, **last})
        else:
            for layer in self.model.layers:
                parallelize_module(layer, mesh, SPLIT)


Run = tuple[str, dict[str, Any]]
"""What is split, and degrees."""
CLIP = {"gradient_clip_val": 0.3}
DEGREES: dict[str, dict[str, int]] = {
    "tp2": {"tensor_parallel_size": 2},
    "dp2": {"data_parallel_size": 2},
    "tp2-dp2": {"tensor_parallel_size": 2, "data_parallel_size": 2},
    "hsdp": {"data_parallel_size": 4, "replicate_size": 2},
}


def runs(rank: int, todo: list[Run], unseeded: bool = False, sabotage: Any = None) -> list[Trace]:
    def make(what: str) -> Own:
        torch.manual_seed(rank if unseeded else 0)
        return Own(what)

    rows = even_rows(24)
    return [
        trace(rank, lambda what=what: make(what), rows, degrees, sabotage=sabotage, **CLIP)  # type: ignore[misc]
        for what, degrees in todo
    ]


def runs_of_lightning(rank: int) -> Trace:
    """The same module under the strategy that it was written for."""
    L.seed_everything(0, verbose=False)
    recorder = Recorder()
    strategy = ModelParallelStrategy(data_parallel_size=1, tensor_parallel_size=2)
    options: dict[str, Any] = {**QUIET, "max_epochs": 1, "callbacks": [recorder], "strategy": strategy}
    L.Trainer(devices=2, use_distributed_sampler=False, **options).fit(Own(), DataLoader(even_rows(24), batch_size=8))  # type: ignore[arg-type]
    return recorder.trace


def number(degrees: dict[str, int]) -> int:
    return degrees.get("tensor_parallel_size", 1) * degrees.get("data_parallel_size", 1)


def test_it_equals_one_process_and_lightnings_own_strategy() -> None:
    expected = run_ranks(1, runs, [("all", ONE_PROCESS)])[0][0]
    for name, degrees in DEGREES.items():
        todo = [("all", degrees), ("sequence", degrees)] if name.startswith("tp") else [("all", degrees)]
        found = run_ranks(number(degrees), runs, todo)
        for index, _ in enumerate(todo):
            assert_equal(expected, [run[index] for run in found])
    with must_differ():
        assert_equal(expected, [run[0] for run in run_ranks(2, runs, [("all", DEGREES["dp2"])], False, no_reduction)])
    lightning = merged(run_ranks(2, runs_of_lightning))  # it cannot clip: "mixed torch.Tensor and DTensor"
    assert worst_error(expected.gradients[0], lightning.gradients[0])[0] < 1e-5


def no_reduction() -> None:
    """Each data rank keeps its own gradients."""
    FSDPParamGroup.post_backward = lambda self, *unused: None  # type: ignore[method-assign]


def test_what_ranks_hold_alike_is_synchronised() -> None:
    """Without a common seed: embedding, norms and biases of both tensor ranks are those of the first."""
    for sabotage in (None, no_synchronisation):
        found = run_ranks(2, runs, [("all", DEGREES["tp2"])], True, sabotage)
        alike = [torch.equal(*(run[0].after[name] for run in found)) for name in ("model.tok_embeddings.weight",)]
        assert alike == [sabotage is None]


def no_synchronisation() -> None:
    lightning_hybrid.parallelize.synchronise_own = lambda module, mesh: None


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("not sharded", DEGREES["tp2-dp2"], r"split parameters, but \d+ \(model.tok_embeddings.weight, .* not on the data"),
    ("all", {**DEGREES["tp2"], "tp_plan": {"output": "colwise_gather_output"}}, "tp_plan=.* would not be applied"),
    ("all", {**DEGREES["dp2"], "activation_checkpointing": "full"}, "activation_checkpointing='full' would not be"),
    ("all", {**DEGREES["dp2"], "reshard_after_forward": True}, "reshard_after_forward=True would not be applied"),
    ("all", {**DEGREES["tp2"], "pipeline_parallel_size": 2}, "cannot be cut into 2 pipeline stages afterwards"),
]


@pytest.mark.parametrize(("what", "degrees", "message"), REFUSED, ids=range(len(REFUSED)))
def test_what_does_not_work_is_refused_by_name(what: str, degrees: dict[str, Any], message: str) -> None:
    with pytest.raises((ConfigurationError, UnsupportedError), match=message):
        run_ranks(number(degrees) * degrees.get("pipeline_parallel_size", 1), runs, [(what, degrees)])

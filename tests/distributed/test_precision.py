"""Precision: at bf16-mixed and bf16-true every module sees and returns the dtypes that it has in one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from lightning_hybrid import sharding
from lightning_hybrid.pipeline.step import PipelineRank
from tests.distributed.equality import ONE_PROCESS, Trace, assert_equal, full, must_differ, trace, union
from tests.distributed.zoo import VOCABULARY, Lit, generator
from tests.ranks import run_ranks

WIDTH, LENGTH, FIRST_POSITION = 16, 8, 293  # bf16 represents even numbers only from 256 to 512
ROWS = torch.randint(0, VOCABULARY, (24, LENGTH), generator=generator())
PLAN = {f"blocks.*.{name}": style for name, style in zip("qkvo", ["colwise"] * 3 + ["rowwise"], strict=True)}
PLAN |= {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}
DEGREES: dict[str, dict[str, Any]] = {
    "dp2": {"data_parallel_size": 2},
    "tp2": {"tensor_parallel_size": 2, "tp_plan": PLAN},
    "pp2": {"pipeline_parallel_size": 2, "schedule": "1F1B"},
}


class Block(nn.Module):
    """Attention with rotary tables that are handed to it in fp32, and a buffer in its arithmetic."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.register_buffer("gain", torch.empty(()))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        self.gain.fill_(0.5)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor) -> Tensor:
        y = self.norm(x)
        q, k, v = (f(y).unflatten(-1, (-1, 4)).transpose(1, 2) for f in (self.q, self.k, self.v))
        q, k = ((t * cos + t.roll(2, -1) * sin).to(v.dtype) for t in (q, k))
        x = x + self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.gain * self.down(F.gelu(self.up(self.norm_2(x))))


class LitRotary(Lit):
    def __init__(self) -> None:
        super().__init__(nn.Module())
        self.build()

    def build(self) -> None:
        self.embedding, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def loss(self, batch: Tensor) -> Tensor:
        positions = torch.arange(LENGTH, device=batch.device) + FIRST_POSITION
        angles = torch.outer(positions.float(), 10.0 ** -torch.arange(4.0, dtype=torch.float32))
        x = self.embedding(batch) + torch.zeros(WIDTH)  # of the precision's default dtype
        for block in self.blocks:
            x = block(x, angles.cos(), angles.sin(), positions)
        logits = self.head(x)[:, :-1].float()
        return F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class LitIsland(LitRotary):
    """Blocks that leave autocast for their products, as numerically delicate code does."""

    def loss(self, batch: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return super().loss(batch)


class MetaRotary(LitRotary):
    """Built without memory, as a model too large for one rank is."""

    def build(self) -> None:
        pass

    def configure_model(self) -> None:
        if not hasattr(self, "blocks"):
            with torch.device("meta"):
                LitRotary.build(self)


class Dtypes(L.Callback):
    """Notes what each module gets and returns, and what parameters, gradients and the optimizer's state are."""

    def __init__(self) -> None:
        self.table: dict[str, Any] = {}

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        for name, part in pl_module.named_modules():
            part.register_forward_pre_hook(self._pre_hook(name), with_kwargs=True)
            part.register_forward_hook(lambda part, args, out, name=name: self._note(f"{name} returns", out))

    def _pre_hook(self, name: str) -> Callable[..., None]:
        return lambda part, args, kwargs: self._note(f"{name} gets", *args, *kwargs.values())

    def _note(self, key: str, *values: Any) -> None:
        self.table.setdefault(key, [str(v.dtype) for v in values if isinstance(v, Tensor)])

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        (optimizer,) = trainer.optimizers
        for name, parameter in pl_module.named_parameters():
            self._note(f"{name} is", parameter, parameter.grad)
            self._note(f"{name} has", *(v for v in optimizer.state[parameter].values()))


def run(rank: int, precision: str, degrees: dict[str, Any], make: Any = LitRotary, sabotage: Any = None) -> Any:
    watch = Dtypes()
    found = trace(rank, make, ROWS, degrees, precision=precision, callbacks=[watch], sabotage=sabotage)
    return found, watch.table


def check(expected: tuple[Trace, Any], found: list[tuple[Trace, Any]]) -> None:
    table: dict[str, Any] = {}
    for _, part in found:
        for key, dtypes in part.items():
            assert table.setdefault(key, dtypes) == dtypes, f"ranks differ: {key} {table[key]} and {dtypes}"
    wrong = {key: (found, expected[1].get(key)) for key, found in table.items() if found != expected[1].get(key)}
    assert not wrong and table.keys() == expected[1].keys(), wrong
    losses = [sum(step) / len(found) for step in zip(*(one.losses for one, _ in found), strict=True)]
    assert len(losses) == 3 and losses == pytest.approx(expected[0].losses, rel=2e-2)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
def test_dtypes_are_those_of_one_process(precision: str) -> None:
    expected = run_ranks(1, run, precision, ONE_PROCESS)[0]
    dtypes = {str(torch.float32), str(torch.bfloat16)} & {d for found in expected[1].values() for d in found}
    assert len(dtypes) == (1 if precision == "32-true" else 2)  # the tables are not trivial
    for degrees in DEGREES.values():
        check(expected, run_ranks(2, run, precision, degrees))


def cast_as_fully_shard_does_by_default() -> None:
    sharding._reduction = lambda module: MixedPrecisionPolicy(param_dtype=torch.bfloat16)


def test_wrong_variant_rotary_tables_cast_down_are_seen() -> None:
    expected = run_ranks(1, run, "bf16-mixed", ONE_PROCESS)[0]
    found = run_ranks(2, run, "bf16-mixed", DEGREES["dp2"], LitRotary, cast_as_fully_shard_does_by_default)
    with must_differ():
        check(expected, found)


def backward_under_autocast() -> None:
    right = PipelineRank._backward

    def wrong(self: PipelineRank, action: Any) -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            right(self, action)

    PipelineRank._backward = wrong  # type: ignore[method-assign]


def test_blocks_outside_of_autocast_have_gradients_in_fp32() -> None:
    """The backward of a pipelined step runs inside of ``training_step``, but not inside of its autocast."""
    expected = run_ranks(1, run, "bf16-mixed", ONE_PROCESS, LitIsland)[0][0]
    found = [one for one, _ in run_ranks(2, run, "bf16-mixed", DEGREES["pp2"], LitIsland)]
    assert_equal(expected, found)
    wrong = run_ranks(2, run, "bf16-mixed", DEGREES["pp2"], LitIsland, backward_under_autocast)
    with must_differ():
        assert_equal(expected, [one for one, _ in wrong])


def test_models_of_the_meta_device_get_the_same_weights_in_bf16() -> None:
    weights = {
        name: union([one.before for one, _ in run_ranks(2, run, "bf16-true", degrees, MetaRotary)])
        for name, degrees in DEGREES.items()
    }
    for found in weights.values():
        assert {tensor.dtype for tensor in found.values()} == {torch.bfloat16}
        assert found.keys() == weights["dp2"].keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in weights["dp2"].items())


GRADIENTS = (torch.randn(2, 4, 8, generator=generator()) + 1).bfloat16()
"""For each data rank those of four backwards; their sum in bf16 is another than the rounded sum."""


def reduce_gradients_of(rank: int, reduce_dtype: torch.dtype | None) -> Tensor:
    sharding._reduction = lambda module: MixedPrecisionPolicy(reduce_dtype=reduce_dtype, cast_forward_inputs=False)
    module = nn.Linear(8, 1, bias=False).bfloat16()
    mesh, device = init_device_mesh("cpu", (2,)), torch.device("cpu")
    root = sharding.apply_sharding(module, [], mesh, group=mesh.get_group(), device=device, reshard=False)
    for index, gradient in enumerate(GRADIENTS[rank]):
        sharding.set_gradient_sync(root, index == 3)
        sharding.call_inside(root, lambda gradient=gradient: module(gradient)).sum().backward()
    return full({"weight": module.weight.grad})["weight"].flatten()


def test_gradients_in_bf16_are_summed_in_fp32() -> None:
    right = (GRADIENTS.float().sum((0, 1)) / 2).bfloat16()
    own = sharding._reduction(nn.Linear(2, 2).bfloat16()).reduce_dtype
    assert sharding._reduction(nn.Linear(2, 2).double()).reduce_dtype is None
    found, wrong = (run_ranks(2, reduce_gradients_of, dtype)[0] for dtype in (own, None))
    assert torch.equal(found, right) and not torch.equal(wrong, right)

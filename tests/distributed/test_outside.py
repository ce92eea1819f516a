"""Plans for layers outside of the blocks, and blocks that differ by their number only: right, or refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_hybrid import parallelize
from lightning_hybrid.errors import ConfigurationError
from lightning_hybrid.tensor_parallel.kinds import kind_of, told_apart
from tests.distributed.equality import ONE_PROCESS, Trace, assert_equal, must_differ, trace
from tests.distributed.zoo import VOCABULARY, Lit, generator
from tests.ranks import run_ranks

WIDTH, LENGTH = 16, 8
ROWS = torch.randint(0, VOCABULARY // 2, (24, LENGTH), generator=generator())  # so that a half of the logits has them


class Block(nn.Module):
    """Every other one attends with a bias by distance, for each head: by its number, or by a setting."""

    def __init__(self, layer_idx: int) -> None:
        super().__init__()
        self.layer_idx, self.n_head = layer_idx, 4
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)

    @property
    def is_biased(self) -> bool:
        return self.layer_idx % 2 == 1

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (-1, 4)).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1))
        distance = torch.arange(x.shape[1])
        distance = distance - distance.unsqueeze(1)
        bias = torch.zeros(())
        if self.is_biased:  # of all heads' slopes the first: wrong for the second rank's
            bias = torch.stack([distance * 0.5 * (head + 1) for head in range(q.shape[1])])
        mixed = F.scaled_dot_product_attention(q, k, v, bias.to(x) if bias.ndim else None)
        out: Tensor = x + self.out(mixed.transpose(1, 2).flatten(2))
        return out


class BySetting(Block):
    def __init__(self, layer_idx: int) -> None:
        super().__init__(layer_idx)
        self.scales = (0.5,) if layer_idx % 2 else None

    @property
    def is_biased(self) -> bool:
        return self.scales is not None


class LitOutside(Lit):
    block: Any = Block

    def __init__(self) -> None:
        super().__init__(nn.Module())
        self.embedding, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.before, self.after = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.blocks = nn.ModuleList(self.block(i) for i in range(4))

    def loss(self, batch: Tensor) -> Tensor:
        x = self.after(F.gelu(self.before(self.embedding(batch))))
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), batch.flatten())


class LitBySetting(LitOutside):
    block = BySetting


class LitManual(LitOutside):
    """Asks for its optimizer, which is not there yet when the plan is checked."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        loss = self.loss(batch)
        self.manual_backward(loss)
        optimizer.step()
        return {"loss": loss.detach()}


class LitLater(LitOutside):
    """Needs, behind the blocks, what a hook makes when training starts."""

    def on_train_start(self) -> None:
        self.factor = 2.0

    def loss(self, batch: Tensor) -> Tensor:
        return super().loss(batch) * self.factor


def run(rank: int, degrees: dict[str, Any], make: Any = LitOutside, sabotage: Any = None) -> Trace:
    return trace(rank, make, ROWS, degrees, sabotage=sabotage)


def on(**plan: str) -> dict[str, Any]:
    return {"tensor_parallel_size": 2, "tp_plan": plan}


PAIR = {"before": "colwise", "after": "rowwise"}


def test_a_pair_outside_of_the_blocks_equals_one_process() -> None:
    expected = run_ranks(1, run, ONE_PROCESS)[0]
    many = [on(**PAIR), {**on(**PAIR, head="colwise_gather_output"), "pipeline_parallel_size": 2}]
    for degrees in many:
        assert_equal(expected, run_ranks(2 * degrees.get("pipeline_parallel_size", 1), run, degrees))


@pytest.mark.parametrize("make", [LitManual, LitLater])
def test_steps_that_need_what_comes_later_equal_one_process(make: Any) -> None:
    expected = run_ranks(1, run, ONE_PROCESS, make)[0]
    assert_equal(expected, run_ranks(2, run, on(**PAIR), make))


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_rounding_is_no_reason_to_refuse_and_hides_nothing(precision: str) -> None:
    def fit(rank: int, plan: dict[str, str]) -> list[float]:
        return trace(rank, LitOutside, ROWS, on(**plan), precision=precision).losses

    assert len(run_ranks(2, fit, PAIR)[0]) == 3
    with pytest.raises(ConfigurationError, match="Outside of the blocks"):
        run_ranks(2, fit, {"head": "colwise"})


@pytest.mark.parametrize(
    "plan",
    [
        {"head": "colwise"},
        {"norm": "replicated_with_grad_allreduce"},
        {"after": "all_reduce"},
        {"before": "colwise"},
        {"head": "rowwise"},
    ],
    ids=lambda plan: "-".join(*plan.items()),
)
def test_what_is_wrong_outside_of_the_blocks_is_refused(plan: dict[str, str]) -> None:
    with pytest.raises(ConfigurationError, match=r"Outside of the blocks .* splits " + next(iter(plan))):
        run_ranks(2, run, on(**plan))


def unchecked() -> None:
    parallelize.check_outside = lambda *args: None


def test_unchecked_it_would_be_wrong() -> None:
    expected = run_ranks(1, run, ONE_PROCESS)[0]
    for plan in ({"head": "colwise"}, {"norm": "replicated_with_grad_allreduce"}):
        found = run_ranks(2, run, on(**plan), LitOutside, unchecked)
        with must_differ():
            assert_equal(expected, found)


@pytest.mark.parametrize("make", [LitOutside, LitBySetting])
def test_blocks_that_differ_by_their_number_are_told_apart(make: Any) -> None:
    """Those without a bias are split, the others stay whole."""
    expected = run_ranks(1, run, ONE_PROCESS, make)[0]
    assert_equal(expected, run_ranks(2, run, {"tensor_parallel_size": 2}, make))
    plan = {"blocks.*.qkv": "colwise", "blocks.*.out": "rowwise"}
    with pytest.raises(ConfigurationError, match=r"The block 'blocks\.[01]' (computes something else|fails)"):
        run_ranks(2, run, on(**plan), make)


def all_alike() -> None:
    right = parallelize.told_apart

    def told(*args: Any) -> Any:
        groups, found = right(*args)
        first = next(iter(found))
        return {first: [name for names in groups.values() for name in names]}, {first: found[first]}

    parallelize.told_apart = told


def test_taken_for_alike_they_would_be_wrong() -> None:
    expected = run_ranks(1, run, ONE_PROCESS)[0]
    found = run_ranks(2, run, {"tensor_parallel_size": 2}, LitOutside, all_alike)
    with must_differ():
        assert_equal(expected, found)


def test_numbers_that_are_not_used_tell_nothing_apart() -> None:
    class Same(Block):
        @property
        def is_biased(self) -> bool:
            return False

    model = nn.ModuleList([Same(0), Same(1), Same(2), Block(0), Block(1), Block(2)])
    call = ((torch.zeros(2, 4, WIDTH, requires_grad=True),), {})
    names = [str(i) for i in range(6)]
    kinds = {name: kind_of(model.get_submodule(name)) for name in names}
    groups, calls = told_apart(model, kinds, {"0": call, "3": call}, dict.fromkeys(names, ()))
    assert groups == {"0": ["0", "1", "2"], "3": ["3", "5"], "4": ["4"]} and calls.keys() == groups.keys()
    plans = {**dict.fromkeys(names, ()), "1": ("other",)}
    del kinds["3"], kinds["4"], kinds["5"]
    assert told_apart(model, kinds, {"0": call}, plans)[0] == {"0": ["0", "2"], "1": ["1"]}

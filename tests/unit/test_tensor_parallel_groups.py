"""Which linears of a block may be split together is read from one forward; and the table of what is split."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from lightning_hybrid.describing.describe import layout_table
from lightning_hybrid.layout import resolve_layout
from lightning_hybrid.tensor_parallel.collectives import JoinedRows
from lightning_hybrid.tensor_parallel.infer import Group, _by_head, find_groups
from lightning_hybrid.tensor_parallel.plan import PlanEntry, TensorParallelPlan
from lightning_hybrid.tensor_parallel.styles import ByHead


class Block(nn.Module):
    """Four linears of one width, wired by a function."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.a, self.b, self.c, self.d = (nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "gated":
            return x + self.d(self.c(self.b(x).sigmoid() * self.a(x)))
        if self.how == "residual between":
            return self.b(x + self.a(x))
        if self.how == "attention":
            return self.d((self.a(x) @ self.b(x).transpose(-1, -2)).softmax(-1) @ self.c(x))
        if self.how == "twice":
            return self.b(self.a(self.a(x)))
        if self.how == "in place":
            return self.b(self.a(x).relu_())
        return self.b(self.a(x.detach()) + torch.ones(8))  # "constant": what does not depend on the input may come in


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("gated", [(("a", "b"), "c")]),
        ("residual between", []),
        ("attention", [(("a", "b", "c"), "d")]),
        ("twice", []),
        ("in place", [(("a",), "b")]),
        ("constant", [(("a",), "b")]),
    ],
)
def test_groups(how: str, expected: list[tuple[tuple[str, ...], str]]) -> None:
    block = Block(how)
    before = {name: parameter.clone() for name, parameter in block.named_parameters()}
    groups = find_groups(block, ((torch.zeros(2, 3, 8, requires_grad=True),), {}))
    assert [(tuple(sorted(group.first)), group.last) for group in groups] == expected
    assert all(torch.equal(parameter, before[name]) for name, parameter in block.named_parameters())
    assert not any(part._forward_hooks for part in block.modules())


def test_the_owner_and_the_arguments_that_linears_get_as_they_are() -> None:
    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, mask: Tensor, *, hidden: Tensor) -> Tensor:
            out: Tensor = self.down(self.up(hidden) * mask)
            return out

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Inner()

        def forward(self, x: Tensor) -> Tensor:
            return x + self.inner(torch.ones(8), hidden=x * 2)

    assert find_groups(Outer(), ((torch.zeros(2, 8, requires_grad=True),), {})) == [
        Group(first=("inner.up",), last="inner.down", owner="inner", stand_ins=("hidden",))
    ]


def test_what_is_joined_by_head_is_as_little_as_needed() -> None:
    ways = list(_by_head(ByHead(arguments=("bias",), results=(1, 2))))
    assert ways == [ByHead(), *(ByHead(arguments=("bias",), results=found) for found in ((), (1,), (1, 2)))]
    assert list(_by_head(ByHead())) == [ByHead()]


def test_each_rank_holds_its_rows_of_every_part() -> None:
    order = JoinedRows(parts=(4, 2, 2), num_shares=2).order
    assert order.tolist() == [0, 1, 4, 6, 2, 3, 5, 7]


def test_the_table_says_what_is_split_and_why_not() -> None:
    entries, counts = [], {}
    for layer in range(3):
        for last in ("q", "k"):
            entries.append(PlanEntry(name=f"h.{layer}.attn.{last}", style="colwise", source="inferred"))
        entries.append(PlanEntry(name=f"h.{layer}.mlp.0", style="whole", source="none", note="33 does not divide"))
        entries.append(PlanEntry(name=f"h.{layer}.attn", style="local_numbers", source="inferred"))
        entries.append(PlanEntry(name=f"h.{layer}.norm", style="replicated_with_grad_allreduce", source="measured"))
    counts = {entry.name: 0 if entry.style == "local_numbers" else 100 for entry in entries}
    plan = TensorParallelPlan(tensor_parallel_size=2, entries=tuple(entries), num_parameters=counts)
    layout = resolve_layout(2, data_parallel_size=1, tensor_parallel_size=2, pipeline_parallel_size=1)
    rows = [
        {
            "num_microbatches": 1,
            "holds": {"rank": 0, "pipeline": 0, "data": 0, "tensor": 0, "num_parameters": 1, "stages": {}},
        }
    ]
    lines = [" ".join(line.split()) for line in layout_table(layout, "none", rows, plan).splitlines()[-4:]]
    assert lines == [
        "tensor parallelism splits 50.0% of the parameters over 2 ranks",
        "colwise h.*.attn.{q, k} (600 parameters): found by trying",
        "replicated_with_grad_allreduce h.*.norm (300 parameters): measured",
        "whole h.*.mlp.0 (300 parameters): 33 does not divide",
    ]

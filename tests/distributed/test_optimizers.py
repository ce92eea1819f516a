"""Optimizers: any that works by element equals one process; others are refused by name; one gradient norm for all."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lightning_hybrid.checkpoint.hooks as hooks
from lightning_hybrid import grad_norm
from lightning_hybrid.errors import UnsupportedError
from lightning_hybrid.training import optimizer_scope
from tests.distributed.equality import ONE_PROCESS, Trace, assert_equal, must_differ, trace
from tests.distributed.zoo import VOCABULARY, Lit, generator
from tests.ranks import run_ranks

WIDTH = 16
ROWS = torch.randint(0, VOCABULARY, (24, 8), generator=generator())
PLAN = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}
TP = {"tensor_parallel_size": 2, "tp_plan": PLAN}
PP = {"pipeline_parallel_size": 2, "schedule": "1F1B"}
DEGREES: dict[str, dict[str, Any]] = {
    "dp2": {"data_parallel_size": 2},
    "tp2": TP,
    "pp2": PP,
    "2x2x2": {"data_parallel_size": 2, **TP, **PP},
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class LitTied(Lit):
    """Groups by name, of which some are empty on each stage; the head's weight is the embedding's."""

    factor, make_optimizer = 1.0, torch.optim.SGD
    options: ClassVar[dict[str, Any]] = {"lr": 0.1}

    def __init__(self) -> None:
        super().__init__(nn.Module())
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def loss(self, batch: Tensor) -> Tensor:
        x = self.embedding(batch)
        for block in self.blocks:
            x = block(x)
        logits = x @ self.embedding.weight.T
        return self.factor * F.cross_entropy(logits[:, :-1].flatten(0, 1), batch[:, 1:].flatten())

    def groups(self) -> list[dict[str, Any]]:
        named = list(self.named_parameters())
        kinds = ("embedding", "blocks.0", "blocks.1")
        return [{"params": [p for name, p in named if name.startswith(kind)]} for kind in kinds]

    def configure_optimizers(self) -> Any:
        first, second, last = self.groups()
        return self.make_optimizer([first, {**second, "lr": 0.05}, last], **self.options)


class Lion(torch.optim.Optimizer):
    """Somebody's own: the sign of a momentum, smoothed so that rounding does not decide."""

    def __init__(self, params: Iterable[Any], lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = closure() if closure is not None else None
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
                    momentum.lerp_(p.grad, 0.1)
                    p.add_((momentum / 1e-3).tanh(), alpha=-group["lr"])
        return loss


OPTIMIZERS: list[tuple[Any, dict[str, Any]]] = [
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    (torch.optim.AdamW, {"lr": 0.01, "eps": 1e-3}),
    (torch.optim.AdamW, {"lr": 0.01, "eps": 1e-3, "fused": True}),
    (torch.optim.Adam, {"lr": 0.01, "eps": 1e-3, "amsgrad": True, "foreach": True}),
    (torch.optim.RMSprop, {"lr": 0.01, "eps": 1e-3, "momentum": 0.5}),
    (torch.optim.Adagrad, {"lr": 0.01, "eps": 1e-3}),
    (torch.optim.NAdam, {"lr": 0.01, "eps": 1e-3}),
    (Lion, {"lr": 0.01}),
]


def run(rank: int, degrees: dict[str, Any], sabotage: Any = None) -> list[Trace]:
    found = []
    for cls, options in OPTIMIZERS:
        made = type("LitThis", (LitTied,), {"make_optimizer": cls, "options": options})
        found.append(trace(rank, made, ROWS, degrees, sabotage=sabotage))
    return found


def test_optimizers_equal_one_process() -> None:
    expected = run_ranks(1, run, ONE_PROCESS)[0]
    for name, degrees in DEGREES.items():
        found = run_ranks(8 if name == "2x2x2" else 2, run, degrees, timeout=240)
        for right, traces in zip(expected, zip(*found, strict=True), strict=True):
            assert_equal(right, list(traces))


class LitMuon(LitTied):
    """The matrices of blocks under Muon, all else under AdamW, as people use it."""

    cls: Any = torch.optim.Muon

    def configure_optimizers(self) -> Any:
        return self.cls([p for p in self.parameters() if p.ndim == 2], lr=0.01)


class LitAdafactor(LitMuon):
    cls = torch.optim.Adafactor


class Coupled(Lion):
    """Its step size depends on all gradients together."""

    def step(self, closure: Any = None) -> Any:
        total = sum(p.grad.square().sum() for g in self.param_groups for p in g["params"] if p.grad is not None)
        with torch.no_grad():
            for p in [p for g in self.param_groups for p in g["params"] if p.grad is not None]:
                p.sub_(p.grad / total)


class LitCoupled(LitMuon):
    cls = Coupled


@pytest.mark.parametrize("make", [LitMuon, LitAdafactor])
@pytest.mark.parametrize("degrees", [DEGREES["dp2"], TP], ids=["dp2", "tp2"])
def test_an_optimizer_of_whole_matrices_is_refused_on_shards(make: Any, degrees: dict[str, Any]) -> None:
    name = make.cls.__name__
    with pytest.raises(UnsupportedError, match=rf"{name} updates a matrix as a whole, but ranks.*data_parallel_size=1"):
        run_ranks(2, trace, make, ROWS, degrees)


def test_an_optimizer_of_all_parameters_is_refused_with_a_pipeline() -> None:
    with pytest.raises(UnsupportedError, match=r"Coupled looks at several parameters.*pipeline_parallel_size=1"):
        run_ranks(2, lambda rank: trace(rank, LitCoupled, ROWS, PP))


def run_whole(rank: int, degrees: dict[str, Any], sabotage: Any = None) -> list[Trace]:
    return [trace(rank, make, ROWS, degrees, sabotage=sabotage) for make in (LitMuon, LitAdafactor)]


def test_whole_matrices_equal_one_process_in_a_pipeline() -> None:
    """Muon computes in bf16."""
    expected, found = run_ranks(1, run_whole, ONE_PROCESS)[0], run_ranks(2, run_whole, PP)
    for right, traces, tolerance in zip(expected, zip(*found, strict=True), (2e-3, 2e-5), strict=True):
        assert_equal(right, list(traces), tolerance=tolerance)


def do_not_refuse() -> None:
    hooks.refuse_wide_optimizers = lambda optimizer, layout: None


def test_wrong_variant_muon_on_shards_is_seen() -> None:
    expected = run_ranks(1, run_whole, ONE_PROCESS)[0][0]
    found = run_ranks(2, lambda rank: trace(rank, LitMuon, ROWS, TP, sabotage=do_not_refuse))
    with must_differ():
        assert_equal(expected, found, tolerance=2e-3)


def test_scopes() -> None:
    def scope(cls: Any, **options: Any) -> list[bool]:
        optimizer = cls([nn.Parameter(torch.ones(2, 2))], **{**options, "lr": 0.0})
        group = optimizer.param_groups[0]
        return [optimizer_scope._update_differs(optimizer, group, by=by) for by in ("rows", "parameter")]

    for cls, options in OPTIMIZERS:
        assert scope(cls, **options) == [False, False], cls
    assert scope(torch.optim.Muon) == scope(torch.optim.Adafactor) == [True, False]
    assert scope(Coupled) == [True, True]


# ---- one norm ------------------------------------------------------------------------------------------------------


class LitClip(LitTied):
    """``Trainer(gradient_clip_val=...)``, and the norm logged before and after."""

    factor = 5.0

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.log("norm", grad_norm(self))
        self.log("largest", grad_norm(self, float("inf")))


class LitOwnClip(LitClip):
    """Clips by itself."""

    def configure_gradient_clipping(self, optimizer: Any, **_: Any) -> None:
        self.clip_gradients(optimizer, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
        self.log("clipped", grad_norm(self))


def run_clip(rank: int, degrees: dict[str, Any], sabotage: Any = None) -> list[Trace]:
    options = [{"gradient_clip_val": 0.5}, {}]
    pairs = zip((LitClip, LitOwnClip), options, strict=True)
    return [trace(rank, make, ROWS, degrees, sabotage=sabotage, **option) for make, option in pairs]


def check_clip(expected: list[Trace], found: list[list[Trace]]) -> None:
    for right, traces in zip(expected, zip(*found, strict=True), strict=True):
        assert_equal(right, list(traces))
        for key in right.metrics:
            if key != "train_loss":
                assert [one.metrics[key] for one in traces] == pytest.approx([right.metrics[key]] * len(traces))


def test_the_norm_is_that_of_the_whole_model() -> None:
    expected = run_ranks(1, run_clip, ONE_PROCESS)[0]
    assert expected[1].metrics["norm"] > 1 and expected[1].metrics["clipped"] == pytest.approx(0.5, rel=1e-4)
    for degrees in (DEGREES["dp2"], PP, {"data_parallel_size": 2, **PP}, {**TP, **PP}):
        check_clip(expected, run_ranks(2 if degrees in (DEGREES["dp2"], PP) else 4, run_clip, degrees))


def tied_weights_count_twice() -> None:
    from lightning_hybrid.training.setup_pipeline import PipelineSetup

    PipelineSetup.copies = lambda self: {}  # type: ignore[method-assign]


def test_wrong_variant_tied_weights_that_count_twice_are_seen() -> None:
    expected, found = run_ranks(1, run_clip, ONE_PROCESS)[0], run_ranks(2, run_clip, PP, tied_weights_count_twice)
    with must_differ():
        check_clip(expected, found)


class LitPenalty(LitTied):
    def loss(self, batch: Tensor) -> Tensor:
        return super().loss(batch) + 0.01 * sum(p.square().sum() for p in self.parameters())


def test_a_penalty_over_all_parameters_is_right_or_refused() -> None:
    expected = run_ranks(1, lambda rank: trace(rank, LitPenalty, ROWS, ONE_PROCESS))[0]
    assert_equal(expected, run_ranks(2, lambda rank: trace(rank, LitPenalty, ROWS, PP)))
    for degrees in (DEGREES["dp2"], TP):
        with pytest.raises(UnsupportedError, match=r"parameters of a block outside of the block's call.*decay"):
            run_ranks(2, lambda rank, degrees=degrees: trace(rank, LitPenalty, ROWS, degrees))

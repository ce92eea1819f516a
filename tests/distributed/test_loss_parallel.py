"""Logits that stay split over the vocabulary: the same loss, gradients and values as joined ones."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from examples.gpt.train import TP_PLAN
from lightning_hybrid.errors import ConfigurationError, UnsupportedError
from lightning_hybrid.strategy import Hybrid3DStrategy
from lightning_hybrid.tensor_parallel import sharded_logits
from lightning_hybrid.tensor_parallel.collectives import share_bounds
from lightning_hybrid.tensor_parallel.joined_late import joined
from lightning_hybrid.tensor_parallel.sharded_logits import ShardedLogits
from tests.distributed.equality import ONE_PROCESS, Trace, assert_equal, must_differ, trace
from tests.distributed.test_equality import LENGTH, SGDGPT
from tests.distributed.zoo import ZOO, generator
from tests.ranks import run_ranks

SIZE, NUM_ROWS = 17, 12
PLAN = {**TP_PLAN, "head": "colwise_gather_output"}

USES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mean": F.cross_entropy,
    "sum": lambda x, t: F.cross_entropy(x, t, reduction="sum"),
    "rows": lambda x, t: (F.cross_entropy(x, t, reduction="none") * torch.arange(NUM_ROWS)).sum(),
    "ignored": lambda x, t: F.cross_entropy(x, t, ignore_index=3),
    "smoothed": lambda x, t: F.cross_entropy(x, t, label_smoothing=0.1),
    "positional": lambda x, t: F.cross_entropy(x, t, None, None, 5, None, "mean", 0.2),
    "module": lambda x, t: torch.nn.CrossEntropyLoss(ignore_index=2)(x, t),
    "shifted": lambda x, t: F.cross_entropy(x.view(3, 4, SIZE)[:, :-1].reshape(-1, SIZE), t[:9]),
    "ellipsis": lambda x, t: F.cross_entropy(x.view(3, 4, -1)[..., 1:, :].flatten(0, 1), t[:9]),
    "cast": lambda x, t: F.cross_entropy(x.float().to(torch.float64), t),
    "weighted": lambda x, t: F.cross_entropy(x, t, weight=torch.arange(SIZE, dtype=x.dtype)),
    "probabilities": lambda x, t: F.cross_entropy(x, F.one_hot(t, SIZE).to(x.dtype)),
    "classes_second": lambda x, t: F.cross_entropy(x.view(3, 4, SIZE).transpose(1, 2), t.view(3, 4)),
    "something_else": lambda x, t: x.log_softmax(-1).square().mean() + x.max(),
    "both": lambda x, t: F.cross_entropy(x, t) + 0.1 * x.logsumexp(-1).square().mean(),
    "last_dimension": lambda x, t: F.cross_entropy(x[:, :7], t % 7),
}


def compare(rank: int, num_ranks: int) -> dict[str, float]:
    dist.init_process_group("gloo", rank=rank, world_size=num_ranks)
    x = torch.randn(NUM_ROWS, SIZE, dtype=torch.float64, generator=generator())
    target = torch.randint(0, SIZE, (NUM_ROWS,), generator=generator(2))
    start, end = share_bounds(SIZE, num_ranks, rank)
    errors = {}
    for name, use in USES.items():
        whole, local = x.clone().requires_grad_(), x[:, start:end].clone().requires_grad_()
        expected, found = use(whole, target), use(ShardedLogits(local, SIZE, dist.group.WORLD), target)
        assert type(found) is Tensor
        (2 * expected).backward()
        (2 * found).backward()
        assert whole.grad is not None and local.grad is not None
        errors[name] = float((found - expected).abs() + (local.grad - whole.grad[:, start:end]).abs().max())
    return errors


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_every_use_equals_joined_logits(num_ranks: int) -> None:
    for errors in run_ranks(num_ranks, compare, num_ranks):
        wrong = {name: error for name, error in errors.items() if error > (1e-6 if name == "cast" else 1e-12)}
        assert not wrong


def look(rank: int) -> None:
    dist.init_process_group("gloo", rank=rank, world_size=2)
    x = torch.randn(4, 6, generator=generator())
    logits = ShardedLogits(x[:, 3 * rank : 3 * rank + 3].clone().requires_grad_(), 6, dist.group.WORLD)
    assert logits.shape == (4, 6) and len(logits) == 4 and logits.size(-1) == 6 and logits.requires_grad
    if rank == 0:
        assert "this rank's share" in repr(logits)  # by one rank alone
    for change in (lambda: logits.mul_(2), lambda: logits.__setitem__(0, 1.0), lambda: logits.retain_grad()):
        with pytest.raises(UnsupportedError, match="loss_parallel=False"):
            change()
    assert torch.equal(joined({"logits": logits})["logits"], x)
    assert torch.equal(logits.argmax(-1), x.argmax(-1))


def test_what_is_read_and_what_is_refused() -> None:
    run_ranks(2, look)


class GPT(SGDGPT):
    """Reads its logits for something else too, and returns them."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        logits = self.model(batch[:, :-1])
        targets = batch[:, 1:].masked_fill(batch[:, 1:] % 5 == 0, -100)
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        if batch_idx == 2:
            self.log("accuracy", (logits.argmax(-1) == targets).float().mean())
        return {"loss": loss, "logits": logits}


class SeesLogits(L.Callback):
    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *_: Any) -> None:
        if outputs.get("logits") is not None:
            assert type(outputs["logits"]) is Tensor


ROWS = torch.randint(0, 256, (24, LENGTH + 1), generator=generator())


def run(rank: int, degrees: dict[str, Any], sabotage: Callable[[], None] | None = None) -> Trace:
    make = lambda: GPT(num_blocks=2, width=16, num_heads=4, context_length=LENGTH)  # noqa: E731
    return trace(rank, make, ROWS, degrees, sabotage=sabotage, callbacks=[SeesLogits()])


@pytest.mark.parametrize(("tensor", "pipeline"), [(2, 1), (4, 1), (2, 2)])
def test_equals_one_process(tensor: int, pipeline: int) -> None:
    degrees = {"tensor_parallel_size": tensor, "pipeline_parallel_size": pipeline}
    expected = run_ranks(1, run, ONE_PROCESS)[0]
    options = {**degrees, "tp_plan": PLAN, "loss_parallel": True, "schedule": "1F1B"}
    assert_equal(expected, run_ranks(tensor * pipeline, run, options, timeout=100))


def no_sum_over_ranks() -> None:
    """Each rank's softmax is over its own columns."""

    class NoSums:
        ReduceOp = dist.ReduceOp
        get_rank, get_world_size = staticmethod(dist.get_rank), staticmethod(dist.get_world_size)
        all_reduce = staticmethod(lambda tensor, *args, **kwargs: None)

    sharded_logits.dist = NoSums  # type: ignore[assignment]


def test_a_softmax_over_a_share_is_noticed() -> None:
    expected = run_ranks(1, run, ONE_PROCESS)[0]
    options = {"tensor_parallel_size": 2, "tp_plan": PLAN, "loss_parallel": True}
    with must_differ():
        assert_equal(expected, run_ranks(2, run, options, no_sum_over_ranks))


def llama(rank: int, degrees: dict[str, Any]) -> Trace:
    entry = ZOO["llama"]
    return trace(rank, entry.make, entry.rows(), degrees)


@pytest.mark.skipif(not importlib.util.find_spec("transformers"), reason="needs transformers")
def test_hugging_face_equals_one_process() -> None:
    expected = run_ranks(1, llama, ONE_PROCESS)[0]
    assert_equal(expected, run_ranks(2, llama, {"tensor_parallel_size": 2, "loss_parallel": True}))


def test_other_values_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="loss_parallel='yes' must be True or False"):
        Hybrid3DStrategy(loss_parallel="yes")  # type: ignore[arg-type]


def test_a_head_that_is_not_split_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r'tp_plan=.*"colwise_gather_output".*loss_parallel=False'):
        run_ranks(2, run, {"tensor_parallel_size": 2, "tp_plan": TP_PLAN, "loss_parallel": True})

"""States of optimizers that are copied while training goes on: steps wait, and what changes all the same is found."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_hybrid.checkpoint.host_copies import HostCopies
from lightning_hybrid.checkpoint.tensors import Share
from lightning_hybrid.errors import CheckpointError

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "loop": lambda p: torch.optim.AdamW(p, foreach=False),
    "foreach": lambda p: torch.optim.AdamW(p, foreach=True),
    "fused": lambda p: torch.optim.AdamW(p, fused=True),
    "momentum": lambda p: torch.optim.SGD(p, momentum=0.9, fused=True),
    "own": lambda p: Own(p),
}


class Own(torch.optim.SGD):
    """Changes its state before it calls the closure, as none of torch's does."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, momentum=0.9)

    def step(self, closure: Any = None) -> Any:
        for state in self.state.values():
            state["momentum_buffer"].mul_(0.5)
        return super().step(closure)


def trained(kind: str) -> tuple[nn.Module, torch.optim.Optimizer, Callable[[], None]]:
    torch.manual_seed(0)
    model = nn.Linear(128, 64, bias=False)
    optimizer = OPTIMIZERS[kind](model.parameters())

    def gradients() -> None:
        model(torch.randn(4, 128)).square().mean().backward()

    gradients()
    optimizer.step()
    return model, optimizer, gradients


def shares_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """As the strategy makes them."""
    (weight,) = model.parameters()
    found = {"state_dict.weight": Share.make(weight.shape, weight.dtype, [((0, 0), weight.detach())])}
    for name, value in optimizer.state[weight].items():
        share = Share.make(value.shape, value.dtype, [((0,) * value.ndim, value.detach())], f"weight.{name}")
        share.source = value
        found[f"optimizer_0.state.weight.{name}"] = share
    return found


def values(shares: dict[str, Any]) -> dict[str, Tensor]:
    return {key: share.pieces[0][1].clone() for key, share in shares.items()}


@pytest.mark.parametrize("with_closure", [False, True])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_step_waits(kind: str, with_closure: bool) -> None:
    model, optimizer, gradients = trained(kind)
    copies, order = HostCopies(), list[str]()
    expected = values(shares_of(model, optimizer))
    for _ in range(2):  # the second time in the memory of the first
        copied = copies.begin(shares_of(model, optimizer))
        assert len(copied["state_dict.weight"].pieces) == 1, "at once"
        expected = values(shares_of(model, optimizer))

        def finish() -> None:
            order.append("copied")
            copies.finish()

        thread = threading.Timer(0.1, finish)
        thread.start()

        def closure() -> Any:
            order.append("closure")
            gradients()

        closure() if not with_closure else None
        optimizer.step(closure if with_closure else None)  # type: ignore[arg-type]
        thread.join()
        copies.release()
        torch.testing.assert_close(values(copied), expected, rtol=0, atol=0)
    assert order == (["copied", "closure"] if with_closure and kind == "own" else ["closure", "copied"]) * 2
    assert not torch.equal(values(shares_of(model, optimizer))["state_dict.weight"], expected["state_dict.weight"])


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_without_the_wait_a_mixed_checkpoint_is_refused(kind: str) -> None:
    model, optimizer, gradients = trained(kind)
    copies, expected = HostCopies(), values(shares_of(model, optimizer))
    copied = copies.begin(shares_of(model, optimizer))
    copies.release()  # the wrong variant: nothing holds the step up
    gradients()
    optimizer.step()
    with pytest.raises(CheckpointError, match=r"optimizer_0\.state\.weight\.\w+, and . other states"):
        copies.finish()
    found = values(copied)
    assert torch.equal(found["state_dict.weight"], expected["state_dict.weight"])
    name = "exp_avg" if "adam" in type(optimizer).__name__.lower() else "momentum_buffer"
    assert not torch.equal(found[f"optimizer_0.state.weight.{name}"], expected[f"optimizer_0.state.weight.{name}"])


@pytest.mark.parametrize("change", ["in place", "replaced"])
def test_hooks_may_replace_a_state_but_not_change_it(change: str) -> None:
    model, optimizer, _ = trained("loop")
    copies, expected = HostCopies(), values(shares_of(model, optimizer))
    copied = copies.begin(shares_of(model, optimizer))
    (state,) = optimizer.state.values()
    if change == "replaced":
        state["exp_avg"] = torch.zeros_like(state["exp_avg"])
        copies.finish()
        torch.testing.assert_close(values(copied), expected, rtol=0, atol=0)
    else:
        state["exp_avg"][3, 5] = 0  # not among the samples
        with pytest.raises(CheckpointError, match=r"weight\.exp_avg, and 0 other"):
            copies.finish()
    copies.release()


def test_before_the_first_checkpoint_it_can_be_sent_to_processes() -> None:
    assert isinstance(pickle.loads(pickle.dumps(HostCopies())), HostCopies)

"""Weights without values get some while a step is tried, and are then as before."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import lightning as L
import torch
from torch import nn

from lightning_hybrid.building.materialize import values_to_try_with
from lightning_hybrid.pipeline.holes import placeholder
from lightning_hybrid.tensor_parallel.random_inputs import float_dtype
from lightning_hybrid.training.quiet import quiet_step


def test_values_are_lent() -> None:
    module = nn.Sequential(
        nn.Linear(64, 64), nn.Linear(64, 64), nn.LayerNorm(64), nn.Linear(64, 512, dtype=torch.bfloat16)
    )
    kept = module[1].bias.detach().clone()
    for part in (module[0], module[2], module[3]):
        for name, parameter in part.named_parameters():
            setattr(part, name, nn.Parameter(placeholder(parameter)))
    parameters = list(module.parameters())
    with values_to_try_with(module):
        one = [p.detach().clone() for p in module.parameters()]
        assert all(p.is_contiguous() and p.detach().float().std() > 0.01 for p in parameters)
        assert len({p.untyped_storage().data_ptr() for p in parameters if p.ndim == 2}) == 3, "one piece for each dtype"
        assert not torch.equal(module[0].weight, module[1].weight)
        assert module[2].weight.mean() > 0.9
    assert all(p is q for p, q in zip(parameters, module.parameters(), strict=True))
    assert torch.equal(module[1].bias, kept)
    assert not any(module[0].weight.stride())
    assert not module[3].weight.any()
    with values_to_try_with(module):
        assert all(torch.equal(p, q) for p, q in zip(one, module.parameters(), strict=True)), "the same on all ranks"


def test_very_large_ones_take_little_memory() -> None:
    module = nn.Linear(1, 1, bias=False)
    module.weight = nn.Parameter(placeholder(torch.empty(128_256, 16_384, device="meta")))
    with values_to_try_with(module):
        weight = module.weight.detach()
        assert weight.untyped_storage().nbytes() < 2**24
        assert weight[:64].std() > 0.01 and not torch.equal(weight[0], weight[1])


def test_integers_do_not_say_in_what_a_block_computes() -> None:
    block = nn.Linear(2, 2, dtype=torch.bfloat16)
    ids = nn.Parameter(torch.arange(3), requires_grad=False)
    assert float_dtype(nn.ModuleList([nn.ParameterList([ids]), block])) == torch.bfloat16
    assert float_dtype(nn.ParameterList([ids])) == torch.get_default_dtype()


def test_a_quiet_step_leaves_lists_of_weights_to_those_who_gather_them() -> None:
    module: Any = L.LightningModule()
    module.cell = nn.GRU(2, 2)
    with quiet_step(module, SimpleNamespace(loggers=[]), set()):
        module.cell.weight_ih_l0 = nn.Parameter(torch.zeros(6, 2))  # as fully_shard does
    assert module.cell._flat_weights[0] is module.cell.weight_ih_l0

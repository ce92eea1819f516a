"""Frozen weights beside trained ones (PPM-3): adapters on some layers, and a layer that is unfrozen during training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor

from tests.distributed.equality import ONE_PROCESS, Trace, assert_equal, must_differ, trace
from tests.distributed.zoo import ZOO, adapted, even_rows
from tests.ranks import run_ranks

KINDS = ("adapters_last", "adapters_first", "embedding_only")
PP2 = {"pipeline_parallel_size": 2, "schedule": "1F1B", "num_microbatches": 2}
DEGREES: dict[str, dict[str, Any]] = {
    "pp2": PP2,
    "dp2": {"data_parallel_size": 2},
    "tp2": {"tensor_parallel_size": 2},
    "dp2-pp2": {"data_parallel_size": 2, **PP2},
}


class Keep(L.Callback):
    """What a checkpoint holds, on the rank that writes it."""

    def __init__(self, path: Path) -> None:
        self.path, self.saved = path, dict[str, Tensor]()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        trainer.save_checkpoint(self.path / "all.ckpt")
        if trainer.global_rank == 0:
            self.saved = torch.load(self.path / "all.ckpt", weights_only=True)["state_dict"]


class Unfreeze(L.Callback):
    """At the second epoch the first block's MLP trains too, as ``BaseFinetuning`` does it."""

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        if trainer.current_epoch == 1:
            known = {id(p) for group in trainer.optimizers[0].param_groups for p in group["params"]}
            parameters = list(pl_module.model.transformer["h"][0].mlp.parameters())
            for parameter in parameters:
                parameter.requires_grad_(True)
            trainer.optimizers[0].add_param_group({"params": [p for p in parameters if id(p) not in known]})


def run(rank: int, kind: str, degrees: dict[str, Any], path: Path) -> tuple[Trace, dict[str, Tensor]]:
    keep = Keep(path)
    torch.manual_seed(0)
    return trace(rank, ZOO[kind].make, even_rows(24), degrees, callbacks=[keep]), keep.saved


def unfreeze(rank: int, degrees: dict[str, Any], callback: type[L.Callback] = Unfreeze) -> Trace:
    return trace(rank, adapted("last"), even_rows(16), degrees, callbacks=[callback()], max_epochs=2)


def runs(rank: int, names: list[str | None], path: Path) -> list[tuple[list[tuple[Trace, dict[str, Tensor]]], Trace]]:
    """For each of the degrees (None: one process) all kinds of adapters, and a layer that is unfrozen."""
    all_degrees = [DEGREES[name] if name else ONE_PROCESS for name in names]
    return [([run(rank, kind, d, path) for kind in KINDS], unfreeze(rank, d)) for d in all_degrees]


@pytest.mark.parametrize(("num_ranks", "names"), [(2, ["pp2", "dp2", "tp2"]), (4, ["dp2-pp2"])])
def test_equal_to_one_process(num_ranks: int, names: list[str | None], tmp_path: Path) -> None:
    """Frozen weights keep every bit, and a checkpoint has all weights."""
    adapters, unfrozen = run_ranks(1, runs, [None], tmp_path)[0][0]
    found = run_ranks(num_ranks, runs, names, tmp_path, timeout=200)
    for index, _ in enumerate(names):
        assert_equal(unfrozen, [one[index][1] for one in found])
        for kind, (right, saved) in enumerate(adapters):
            frozen = [name for name, p in ZOO[KINDS[kind]].make().named_parameters() if not p.requires_grad]
            parts = [one[index][0][kind][0] for one in found]
            assert_equal(right, parts)
            assert all(torch.equal(part.before[n], part.after[n]) for part in parts for n in frozen if n in part.before)
            assert found[0][index][0][kind][1].keys() == saved.keys()
            torch.testing.assert_close(found[0][index][0][kind][1], saved)
    with must_differ():
        assert_equal(unfrozen, [run_ranks(1, unfreeze, ONE_PROCESS, L.Callback)[0]])

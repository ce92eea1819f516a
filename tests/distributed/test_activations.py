"""Messages between stages: received ahead where shapes can be known, and right where they turn out otherwise."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch.nn.functional as F
from torch import Tensor

import lightning_hybrid.training.setup_pipeline
from lightning_hybrid.pipeline.activations import Activations
from lightning_hybrid.pipeline.contract import Rehearsal
from tests.distributed.equality import ONE_PROCESS, Trace, assert_equal, must_differ, trace
from tests.distributed.test_pipeline_cases import rows_of
from tests.distributed.zoo import LitNano, NanoGPT
from tests.ranks import run_ranks

PP2 = {"pipeline_parallel_size": 2, "num_microbatches": 2}
LENGTHS = [[12, 9, 12, 5, 8, 8, 8, 8], [12, 9, 12, 5, 8, 8, 8, 8], [3, 3, 2, 1, 12, 5, 6, 8], [7, 6, 7, 7, 7, 7, 7, 7]]


class Trimmed(LitNano):
    """Cuts padding off inside of the step: shapes depend on the values of a batch, not on its shapes."""

    def loss(self, batch: Any) -> Tensor:
        length = int((batch["labels"] >= 0).sum(1).max())
        logits = self.model(batch["input_ids"][:, :length])
        return F.cross_entropy(logits.flatten(0, 1), batch["labels"][:, :length].flatten(), ignore_index=-100)


class CountAhead(L.Callback):
    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        pipeline = getattr(trainer.strategy, "_pipeline", None)
        self.num = pipeline.step._rank.activations.num_ahead if pipeline is not None else 0


def run(rank: int, degrees: dict[str, Any], sabotage: Any = None) -> tuple[Trace, int]:
    Rehearsal.find = lambda self, read_loss: (None, True)  # type: ignore[method-assign]  # its messages are not meant
    rows = rows_of([n for lengths in LENGTHS for n in lengths])
    counter = CountAhead()
    found = trace(rank, lambda: Trimmed(NanoGPT()), rows, degrees, callbacks=[counter], sabotage=sabotage)
    return found, counter.num


def test_unexpected_shapes_are_received() -> None:
    """Micro-batches look alike, but their lengths are (12, 8), the same, (3, 12) and (7, 7)."""
    (expected, _) = run_ranks(1, run, ONE_PROCESS)[0]
    last, first = run_ranks(2, run, PP2)
    assert_equal(expected, [last[0], first[0]])
    # nothing is expected in the first step; of each look the last shape in later ones: 8 in the second and third, 12
    # in the fourth, of which the second step's second micro-batch and no other has the expected one
    assert (last[1], first[1]) == (1, 0)


def read_what_was_expected() -> None:
    """Takes the first message, whatever the step turned out to need."""

    def receive(self: Any, local: Any, source: int, stage: int, microbatch: int) -> list[Tensor]:
        right = original(self, local, source, stage, microbatch)
        return [t.roll(1, 0) for t in right] if self.num_ahead else right

    original = Activations.receive
    Activations.receive = receive  # type: ignore[method-assign]


def test_a_wrong_message_is_noticed() -> None:
    (expected, _) = run_ranks(1, run, ONE_PROCESS)[0]
    with must_differ():
        assert_equal(expected, [found for found, _ in run_ranks(2, run, PP2, read_what_was_expected)])


def as_nccl() -> None:
    """Groups by boundary instead of tags, as messages go over NCCL."""
    lightning_hybrid.training.setup_pipeline.has_tags = lambda group: False


@pytest.mark.parametrize(("num_ranks", "schedule"), [(2, "Interleaved1F1B"), (2, "DualPipeV"), (4, "1F1B")])
def test_messages_without_tags(num_ranks: int, schedule: str) -> None:
    degrees = {"pipeline_parallel_size": num_ranks, "schedule": schedule}
    (expected, _) = run_ranks(1, run, ONE_PROCESS)[0]
    assert_equal(expected, [found for found, _ in run_ranks(num_ranks, run, degrees, as_nccl)])

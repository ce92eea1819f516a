"""Wrong use gets a sentence with numbers and the way out, on every rank, before any training."""

from __future__ import annotations

import warnings
from typing import Any, cast

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.utilities import grad_norm as lightning_grad_norm
from torch import nn
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import DataLoader, default_collate

from examples.gpt.train import TP_PLAN
from lightning_hybrid import Hybrid3DStrategy
from lightning_hybrid.errors import ConfigurationError, HybridError, UnsupportedError
from tests.distributed.equality import QUIET
from tests.distributed.test_equality import ROWS, SGDGPT, make_module
from tests.distributed.zoo import Classifier, labelled_rows, mlp
from tests.ranks import run_ranks


class Watched(SGDGPT):
    """Counts real training steps (the looks ahead of time do not reach the optimizer)."""

    num_optimizer_steps = 0

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.num_optimizer_steps += 1


def fit(module: L.LightningModule, num_devices: int, **arguments: Any) -> None:
    strategy = Hybrid3DStrategy(archive=None, **arguments)
    trainer = L.Trainer(devices=num_devices, strategy=strategy, max_steps=2, **QUIET)
    trainer.fit(module, DataLoader(ROWS, batch_size=8))


def refusal(rank: int, arguments: dict[str, Any], model: dict[str, Any], num_devices: int) -> str:
    """Return what the run said, after making sure that it said it in time."""
    module = Watched(**{"num_blocks": 4, "width": 16, "num_heads": 4, "context_length": 16, **model})
    with pytest.raises(HybridError) as caught:
        fit(module, num_devices, **arguments)
    assert module.num_optimizer_steps == 0
    return str(caught.value)


def small(kind: type[L.LightningModule], **sizes: Any) -> Any:
    return kind(**{"num_blocks": 2, "width": 16, "num_heads": 4, "context_length": 16, **sizes})


@pytest.mark.parametrize(
    ("arguments", "model", "num_devices", "words"),
    [
        ({"data_parallel_size": 3}, {}, 4, ["data_parallel_size=3", "4 devices", "1, 2, 4"]),
        ({"pipeline_parallel_size": 3}, {}, 4, ["pipeline_parallel_size=3", "4 devices"]),
        ({"tensor_parallel_size": 2, "pipeline_parallel_size": 4}, {}, 4, ["8", "4 devices"]),
        (
            {"data_parallel_size": 1, "tensor_parallel_size": 1, "pipeline_parallel_size": 2},
            {},
            4,
            ["makes 2", "4 devices", '"auto"'],
        ),
        ({"pipeline_parallel_size": 4}, {"num_blocks": 2}, 4, ["4 pipeline stages", "has 2", "at most 2"]),
        (
            {"pipeline_parallel_size": 2, "schedule": "Interleaved1F1B"},
            {"num_blocks": 3},
            2,
            ["4 pipeline stages", "has 3"],
        ),
        (
            {"tensor_parallel_size": 2, "tp_plan": TP_PLAN},
            {"num_heads": 1},
            2,
            ["tensor_parallel_size=2", "1"],
        ),
        ({"tensor_parallel_size": 4, "tp_plan": TP_PLAN}, {"width": 18, "num_heads": 3}, 4, ["4", "3"]),
        ({"pipeline_parallel_size": 2, "schedule": "2F2B"}, {}, 2, ["'2F2B'", "1F1B", "GPipe"]),
        ({"pipeline_parallel_size": 2, "num_microbatches": 1}, {}, 2, ["num_microbatches=1", "2 pipeline ranks"]),
        (
            {"pipeline_parallel_size": 2, "num_microbatches": 5, "schedule": "Interleaved1F1B"},
            {},
            2,
            ["num_microbatches=5", "4 or 6"],
        ),
        ({"data_parallel_size": 2, "replicate_size": 3}, {}, 2, ["replicate_size=3", "data_parallel_size=2"]),
        ({"data_parallel_size": 0}, {}, 2, ["data_parallel_size=0", "at least 1"]),
        ({"num_microbatches": "many"}, {}, 2, ["num_microbatches='many'"]),
        ({"start_method": "thread"}, {}, 2, ["'thread'", "fork"]),
        ({"pipeline_parallel_size": 2, "blocks": "model.layers"}, {}, 2, ["'model.layers'", "model.blocks"]),
        ({"pipeline_parallel_size": 2, "stages_per_rank": 2}, {}, 2, ["stages_per_rank=2", "Interleaved1F1B"]),
    ],
)
def test_is_refused_on_every_rank(
    arguments: dict[str, Any], model: dict[str, Any], num_devices: int, words: list[str]
) -> None:
    messages = run_ranks(num_devices, refusal, arguments, model, num_devices)
    for message in messages:
        for word in words:
            assert word in message, message
        assert any(word in message.lower() for word in ("use ", "change", "must be", "choose")), message


class Manual(SGDGPT):
    def __init__(self) -> None:
        super().__init__(num_blocks=4, width=16, num_heads=4, context_length=16)
        self.automatic_optimization = False


class ByFrequency(SGDGPT):
    def __init__(self, **sizes: Any) -> None:
        super().__init__(**sizes)
        self.model.token_embedding.scale_grad_by_freq = True  # type: ignore[union-attr]


class Twice(SGDGPT):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch) + self.loss(batch.flip(0))


class Skip(SGDGPT):
    """The embedding's output reaches the head past the blocks."""

    def forward(self, tokens: Any) -> Any:
        model: Any = self.model
        first = model.token_embedding(tokens)
        x = first
        for block in model.blocks:
            x = block(x)
        return model.head(model.norm(x + first))


def refused_module(rank: int, kind: type[L.LightningModule]) -> str:
    module = kind() if kind is Manual else kind(num_blocks=4, width=16, num_heads=4, context_length=16)
    with pytest.raises(HybridError) as caught:
        fit(module, 2, data_parallel_size=1, tensor_parallel_size=1, pipeline_parallel_size=2)
    return str(caught.value)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (Manual, ["Manual optimization"]),
        (ByFrequency, ["model.token_embedding", "scale_grad_by_freq"]),
        (Twice, ["model.blocks.0", "more than once"]),
        (Skip, ["model.token_embedding", "skip a pipeline stage"]),
    ],
)
def test_a_step_that_cannot_be_cut_is_refused_by_name(kind: type[L.LightningModule], words: list[str]) -> None:
    for message in run_ranks(2, refused_module, kind):
        assert all(word in message for word in [*words, "pipeline_parallel_size=1"]), message


def trains_without_pipeline(rank: int, kind: type[SGDGPT]) -> float:
    module = kind(num_blocks=2, width=16, num_heads=4, context_length=16)
    fit(module, 2, data_parallel_size=2)
    return float(torch.stack([p.full_tensor().norm() for p in module.parameters()]).sum())  # type: ignore[operator]


@pytest.mark.parametrize("kind", [Twice, Skip])
def test_what_cannot_be_cut_still_trains_without_a_pipeline(kind: type[SGDGPT]) -> None:
    first, second = run_ranks(2, trains_without_pipeline, kind)
    assert first == second > 0


class Samples(SGDGPT):
    """As Lightning's GAN example: the model is called at the end of an epoch."""

    def on_train_epoch_end(self) -> None:
        self(ROWS[:2])

    def forward(self, tokens: Any) -> Any:
        model: Any = self.model
        return model(tokens)


class ClipsByTorch(SGDGPT):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        clip_grad_norm_(self.parameters(), 0.1)


def what_is_refused_outside_of_steps(rank: int) -> dict[str, str]:
    sizes = {"num_blocks": 2, "width": 16, "num_heads": 4, "context_length": 16}
    degrees = ("data_parallel_size", "tensor_parallel_size", "pipeline_parallel_size")
    said = {}
    for degree in degrees:
        arguments = {**dict.fromkeys(degrees, 1), degree: 2}
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            fit(module := SGDGPT(**sizes), 2, **arguments)
            module.trainer.strategy.lightning_module_state_dict()
            assert not [w for w in warned if "state_dict()" in str(w.message)]
            module.model.state_dict()
        (said[f"state {degree}"],) = [str(w.message) for w in warned if "state_dict()" in str(w.message)]
        with pytest.raises(UnsupportedError) as again:
            fit(module, 2, **arguments)
        said[f"again {degree}"] = str(again.value)
        if degree == "data_parallel_size":
            fit(ClipsByTorch(**sizes), 2, **arguments)  # shards of one kind: torch's own is right
        else:
            with pytest.raises(UnsupportedError) as clipped:
                fit(ClipsByTorch(**sizes), 2, **arguments)
            said[f"clip {degree}"] = str(clipped.value)
        if degree != "tensor_parallel_size":
            with pytest.raises(HybridError) as outside:
                fit(Samples(**sizes), 2, **arguments)
            said[f"outside {degree}"] = str(outside.value)
    fit(module := SGDGPT(**sizes), 2, data_parallel_size=2, replicate_size=2)
    fit(module, 2, data_parallel_size=2, replicate_size=2)  # a replica is whole
    return said


def test_a_part_is_refused_to_a_second_trainer_and_to_calls_outside_of_steps() -> None:
    for said in run_ranks(2, what_is_refused_outside_of_steps):
        for case, message in said.items():
            words = {
                "state": ["GPT.state_dict() has this rank's part", "save_checkpoint"],
                "again": ["SGDGPT", "load_from_checkpoint"],
                "clip": ["clip_grad_norm_", "lightning_hybrid.grad_norm"],
                "outside": ["outside of a training", "=1"],
            }[case.split()[0]]
            assert all(word in message for word in words), (case, message)


def test_arguments_are_refused_where_they_are_given() -> None:
    with pytest.raises(ConfigurationError, match="unknown"):
        Hybrid3DStrategy(schedule="fastest")
    assert make_module().automatic_optimization


class Habits(Classifier):
    """One habit that a pipeline cannot take, at a time."""

    def __init__(self, habit: str) -> None:
        super().__init__(mlp())
        self.habit, model = habit, cast(Any, self.model)
        if habit == "compiled":
            self.model = torch.compile(self.model, backend="eager")  # type: ignore[assignment]
        elif habit == "compiled in place":
            self.model.compile(backend="eager")
        elif habit == "weight_norm":
            torch.nn.utils.weight_norm(next(part for part in model.modules() if isinstance(part, nn.Linear)))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.habit == "skips" and batch_idx == 1:
            return None
        if self.habit == "cut":
            return F.cross_entropy(self.model(batch["x"]), batch["y"], weight=batch["weights"])
        return super().training_step(batch, batch_idx)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if self.habit == "norms":
            self.log_dict(lightning_grad_norm(self, 2))


class Own:
    def __init__(self, x: torch.Tensor) -> None:
        self.x = x


HABITS = {
    "compiled": r"model is compiled by torch.compile.*compile=True",
    "compiled in place": r"model is compiled by torch.compile.*compile=True",
    "norms": r"Lightning's grad_norm sees this rank's part.*lightning_hybrid.grad_norm\(self\)",
    "weight_norm": r"torch.nn.utils.parametrizations.weight_norm",
    "skips": "skips the batch.*Return the loss times 0",
    "cut": r"'weights' are cut into micro-batches.*unbatched=\['weights'\]",
    "class": "a Own, a class of its own.*Make it a dataclass",
}


def refused_habits(rank: int) -> None:
    def collate(rows: Any) -> Any:
        return {**default_collate(rows), "weights": torch.ones(5)}

    for habit, message in HABITS.items():
        collates = {"cut": collate, "class": lambda rows: Own(torch.zeros(len(rows), 12))}
        loader = DataLoader(labelled_rows((12,)), batch_size=5, collate_fn=collates.get(habit))
        trainer = L.Trainer(devices=2, strategy=Hybrid3DStrategy(1, 1, 2, archive=None), max_epochs=1, **QUIET)
        with pytest.raises(HybridError, match=message):
            trainer.fit(Habits(habit), loader)


def test_habits_are_refused_with_the_right_way_out() -> None:
    run_ranks(2, refused_habits)


def test_ranks_that_differ_are_refused() -> None:
    """A crash in gloo, a wait for each other, or other learning rates on other shards, without a word."""

    def run(rank: int) -> list[str]:
        class Own(Watched):
            rate = 0.1

            def configure_optimizers(self) -> Any:
                return torch.optim.SGD(self.parameters(), lr=self.rate)

        wide, slow = small(Own, width=16 + 16 * rank), small(Own)
        slow.rate = 0.1 + rank
        found = []
        for module, options in ((small(Own), {"gradient_clip_val": [None, 1.0][rank]}), (wide, {}), (slow, {})):
            strategy = Hybrid3DStrategy(2, 1, 1, archive=None)
            trainer = L.Trainer(devices=2, strategy=strategy, max_steps=2, **QUIET, **options)
            with pytest.raises(ConfigurationError) as caught:
                trainer.fit(module, DataLoader(ROWS, batch_size=8))
            assert module.num_optimizer_steps == 0
            found.append(str(caught.value))
        return found

    first, second = run_ranks(2, run)
    assert first == second
    for text, words in zip(first, ("gradient_clip_val is None", "(256, 16) float32", "lr of group 0"), strict=True):
        assert text.startswith("Ranks differ in ") and words in text

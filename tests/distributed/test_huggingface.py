"""Unmodified models of Hugging Face, from config."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch

from lightning_hybrid.errors import UnsupportedError
from tests.distributed.equality import ONE_PROCESS, Trace, assert_equal, must_differ, trace
from tests.ranks import run_ranks

transformers = pytest.importorskip("transformers")

VOCABULARY, LENGTH = 64, 12
ROWS = torch.randint(1, VOCABULARY, (24, LENGTH), generator=torch.Generator().manual_seed(1))


class LitLlama(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        config = transformers.LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            use_cache=False,
        )
        self.model = transformers.AutoModelForCausalLM.from_config(config)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.model(input_ids=batch, attention_mask=torch.ones_like(batch), labels=batch).loss
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def run(rank: int, degrees: dict[str, Any], sabotage: Any = None) -> Trace:
    return trace(rank, LitLlama, ROWS, degrees, sabotage=sabotage)


@pytest.fixture(scope="module")
def expected() -> Trace:
    return run_ranks(1, run, ONE_PROCESS)[0]


@pytest.mark.parametrize("triple", [(2, 2, 2), (1, 2, 2), (1, 1, 4)], ids=lambda triple: "x".join(map(str, triple)))
def test_llama_equals_one_process(triple: tuple[int, int, int], expected: Trace) -> None:
    data, tensor, pipeline = triple
    degrees = {"data_parallel_size": data, "tensor_parallel_size": tensor, "pipeline_parallel_size": pipeline}
    assert_equal(expected, run_ranks(data * tensor * pipeline, run, degrees, timeout=120))


class LitAttentions(LitLlama):
    """Each tensor rank would have the attention weights of its own heads."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        out = self.model(input_ids=batch, labels=batch, output_attentions=True)
        return out.loss + sum(weights.square().mean() for weights in out.attentions)


def test_attention_weights_of_split_models_are_refused() -> None:
    def ask(rank: int) -> None:
        trace(rank, LitAttentions, ROWS, {"tensor_parallel_size": 2})

    with pytest.raises(UnsupportedError, match=r"output_attentions=True of LlamaForCausalLM.*tensor_parallel_size=1"):
        run_ranks(2, ask)


def gradients_of_boundaries_halved() -> None:
    import lightning_hybrid.pipeline.step as step

    right = step.PipelineRank._hand_over

    def wrong(self: Any, kind: str, tensors: Any, stage: int, microbatch: int) -> None:
        right(self, kind, [t / 2 for t in tensors] if kind == "B" else tensors, stage, microbatch)

    step.PipelineRank._hand_over = wrong  # type: ignore[method-assign]


def test_a_wrong_run_is_noticed(expected: Trace) -> None:
    found = run_ranks(2, run, {"pipeline_parallel_size": 2}, gradients_of_boundaries_halved)
    with must_differ():
        assert_equal(expected, found)

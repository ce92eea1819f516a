"""Models built on the meta device: the same weights at all degrees, memory for what a rank holds, refusals by name."""

from __future__ import annotations

import resource
from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lightning_hybrid.parallelize
from lightning_hybrid import Hybrid3DStrategy
from lightning_hybrid.building import materialize
from lightning_hybrid.errors import UnsupportedError
from tests.distributed.equality import QUIET, Trace, assert_equal, merged, must_differ, trace
from tests.distributed.zoo import SMALL, text_rows
from tests.ranks import begin_peak_anew, run_ranks

ONE_RANK = {"data_parallel_size": 1}
DEGREES = [(2, 1, 1), (1, 2, 1), (1, 1, 2), (1, 1, 4), (2, 2, 2)]
TP_PLAN = {"model.layers.*.up": "colwise", "model.layers.*.down": "rowwise"}


class Rotary(nn.Module):
    """Buffers that are not in checkpoints, of floats and of integers, and one that is."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width
        self.register_buffer("inv_freq", torch.empty(width // 2), persistent=False)
        self.register_buffer("order", torch.empty(width, dtype=torch.long), persistent=False)
        self.register_buffer("scale", torch.empty(()))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        exponents = torch.arange(self.width // 2, device=self.inv_freq.device) / (self.width // 2)
        self.inv_freq.copy_(100.0**-exponents)
        self.order.copy_(torch.arange(self.width - 1, -1, -1))
        self.scale.fill_(3.0)

    def forward(self, length: int) -> Tensor:
        angles = torch.arange(length)[:, None] * self.inv_freq
        return (torch.cat([angles.cos(), angles.sin()], dim=-1) * self.scale)[:, self.order]


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.gain = nn.Parameter(torch.empty(width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.trunc_normal_(self.gain, std=0.5)
        nn.init.orthogonal_(self.down.weight)  # a child's, over what the child has done itself

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x) + positions))) * self.gain


class Model(nn.Module):
    """A tied embedding, an ``_init_weights`` as nanoGPT has it, and a ``reset_parameters`` for the whole."""

    def __init__(self, width: int = 16, num_layers: int = 4) -> None:
        super().__init__()
        self.embedding, self.rotary = nn.Embedding(64, width), Rotary(width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(num_layers))
        self.head = nn.Linear(width, 64, bias=False)
        self.head.weight = self.embedding.weight

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=0.7)

    def reset_parameters(self) -> None:
        for layer in self.layers:
            nn.init.uniform_(layer.norm.weight, 0.9, 1.1)

    def forward(self, ids: Tensor) -> Tensor:
        x, positions = self.embedding(ids), self.rotary(ids.shape[1])
        for layer in self.layers:
            x = layer(x, positions)
        return self.head(x)


class LitMeta(L.LightningModule):
    """Builds its model on the meta device, or for real."""

    def __init__(self, make: Callable[[], nn.Module] = Model, device: str = "meta") -> None:
        super().__init__()
        self.make, self.on, self.model = make, device, None

    def configure_model(self) -> None:
        if self.model is None:
            with torch.device(self.on):
                self.model = self.make()

    def on_train_start(self) -> None:
        for name, buffer in self.model.named_buffers():  # also fails if one holds what memory held before
            self.log(name, buffer.double().sum().float())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if hasattr(self.model, "config"):
            return self.model(**batch).loss
        logits = self.model(batch["input_ids"])
        return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=-100)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def llama() -> nn.Module:
    import transformers

    config = transformers.LlamaConfig(**SMALL, num_key_value_heads=2, tie_word_embeddings=True)
    return transformers.AutoModelForCausalLM.from_config(config)


def degrees_of(data: int, tensor: int, pipeline: int, plan: Any = None) -> dict[str, Any]:
    return {
        "data_parallel_size": data,
        "tensor_parallel_size": tensor,
        "pipeline_parallel_size": pipeline,
        "tp_plan": plan if tensor > 1 else None,
    }


def train(rank: int, make: Callable[[], nn.Module], degrees: dict[str, Any], sabotage: Any = None) -> Trace:
    torch.full((1 << 20,), float("nan"))  # memory that nobody fills is then seen
    rows = [{"input_ids": row["input_ids"], "labels": row["input_ids"]} for row in text_rows()]
    return trace(rank, lambda: LitMeta(make), rows, degrees, sabotage=sabotage, max_steps=2)


@pytest.fixture(scope="module", params=[Model, llama], ids=["own", "hugging_face"])
def whole(request: Any) -> tuple[Any, Any, Trace]:
    plan = TP_PLAN if request.param is Model else None
    return request.param, plan, run_ranks(1, train, request.param, ONE_RANK)[0]


@pytest.mark.parametrize("degrees", DEGREES, ids=lambda triple: "x".join(map(str, triple)))
def test_the_same_weights_and_steps_at_all_degrees(degrees: tuple[int, int, int], whole: Any) -> None:
    make, plan, expected = whole
    num_ranks = degrees[0] * degrees[1] * degrees[2]
    found = run_ranks(num_ranks, train, make, degrees_of(*degrees, plan), timeout=120)
    before = merged(found).before
    assert before.keys() == expected.before.keys()
    for name, tensor in expected.before.items():
        assert torch.equal(before[name], tensor), name
    assert_equal(expected, found)
    for trace_ in found:
        for name, value in expected.metrics.items():
            assert trace_.metrics[name] == value, name


def test_weights_are_distributed_as_they_should_be(whole: Any) -> None:
    make, _, expected = whole
    weights = {name: tensor for name, tensor in expected.before.items() if tensor.ndim == 2}
    for name, tensor in weights.items():
        first, second = tensor.chunk(2)
        assert not torch.equal(first, second), f"both halves of {name} are equal"
    embedding = next(tensor for name, tensor in weights.items() if "embed" in name)
    assert float(embedding.std()) == pytest.approx(0.7 if make is Model else 0.02, rel=0.1)
    if make is Model:
        assert expected.metrics["rotary.scale"] == 3.0
        down = expected.before["model.layers.1.down.weight"]
        torch.testing.assert_close(down @ down.T, torch.eye(16))
        assert not torch.equal(down, expected.before["model.layers.2.down.weight"])


def no_seed_of_its_own() -> None:
    materialize.derive_seed = lambda seed, *parts: hash((seed, torch.distributed.get_rank())) % 2**40  # type: ignore[attr-defined]


def test_wrong_variant_a_seed_of_each_rank_is_seen() -> None:
    expected = run_ranks(1, train, Model, ONE_RANK)[0]
    found = run_ranks(2, train, Model, degrees_of(1, 1, 2), no_seed_of_its_own)
    with must_differ():
        before = {name: tensor for trace_ in found for name, tensor in trace_.before.items()}
        assert all(torch.equal(before[name], tensor) for name, tensor in expected.before.items())


# ---- built for real -------------------------------------------------------------------------------------------------


class Irregular(Model):
    """A tensor that is no buffer, and a parameter whose module cannot initialise itself."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.linspace(-1, 1, 16)
        self.offset = nn.ParameterList([nn.Parameter(torch.full((16,), 0.1))])

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids) + (self.table * self.offset[0]).sum()


class LitReal(LitMeta):
    """Built in ``__init__``."""

    def __init__(self) -> None:
        super().__init__(Irregular, "cpu")
        self.model = self.make()


def train_real(rank: int, degrees: dict[str, Any], sabotage: Any = None) -> list[Trace]:
    """Built in ``__init__`` and in ``configure_model``, after another seed on each rank but the first."""
    torch.full((1 << 20,), float("nan"))
    rows = [{"input_ids": row["input_ids"], "labels": row["input_ids"]} for row in text_rows()]

    def unlike(make: Callable[[], Any]) -> Any:
        torch.manual_seed(123 + rank)
        return make()

    kinds = (LitReal, lambda: LitMeta(Irregular, "cpu"))
    return [trace(rank, lambda make=make: unlike(make), rows, degrees, sabotage=sabotage) for make in kinds]


def check_real(expected: list[Trace], found: list[list[Trace]]) -> None:
    for right, traces in zip(expected, zip(*found, strict=True), strict=True):
        before = merged(list(traces)).before
        assert all(torch.equal(before[name], tensor) for name, tensor in right.before.items())
        assert_equal(right, list(traces))
        for one in traces:
            assert {name: one.metrics[name] for name in right.metrics} == right.metrics


def test_what_is_built_for_real_has_the_weights_of_the_first_rank() -> None:
    expected = run_ranks(1, train_real, {})[0]
    assert expected[0].metrics["rotary.scale"] == 3.0
    for degrees in [(2, 1, 1), (1, 2, 1), (1, 1, 2), (2, 2, 1)]:
        number = degrees[0] * degrees[1] * degrees[2]
        check_real(expected, run_ranks(number, train_real, degrees_of(*degrees, TP_PLAN), timeout=120))
    with must_differ():
        check_real(expected, run_ranks(2, train_real, degrees_of(1, 2, 1, TP_PLAN), not_synchronised))


def not_synchronised() -> None:
    lightning_hybrid.parallelize.synchronise = lambda module, device: None


# ---- refused --------------------------------------------------------------------------------------------------------


class NoReset(Model):
    def __init__(self) -> None:
        super().__init__()
        self.layers[3].extra = nn.ParameterList([nn.Parameter(torch.zeros(3))])


class PartlyFilled(Model):
    def __init__(self) -> None:
        super().__init__()
        self.layers[3].register_buffer("mask", torch.zeros(4, 4))

    def reset_parameters(self) -> None:
        self.layers[3].mask[0].fill_(1)


class Unregistered(Model):
    def __init__(self) -> None:
        super().__init__()
        self.layers[3].table = [torch.zeros(3)]


class Reads(Model):
    def reset_parameters(self) -> None:
        if self.layers[0].up.weight.sum() > 0:
            self.layers[0].up.bias.zero_()


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (NoReset, r"model.layers.3.extra.0 .*reset_parameters\(self\) in ParameterList"),
        (PartlyFilled, "model.layers.3.mask .*reset_parameters"),
        (Unregistered, r"model.layers.3.table of Layer .*register_buffer"),
        (Reads, "model was built on the meta device and cannot be initialised in parts"),
    ],
)
def test_what_would_get_no_values_is_refused_by_name(make: Any, name: str) -> None:
    def on_every_rank(rank: int) -> None:
        with pytest.raises(UnsupportedError, match=name):
            train(rank, make, degrees_of(1, 1, 2))

    run_ranks(2, on_every_rank)


def test_on_meta_on_some_ranks_only_is_refused() -> None:
    def on_every_rank(rank: int) -> None:
        module = LitMeta(Model, "meta" if rank == 0 else "cpu")
        with pytest.raises(UnsupportedError, match=r"model.embedding.weight is on the meta device on rank 0"):
            trace(rank, lambda: module, text_rows(), degrees_of(1, 1, 2))

    run_ranks(2, on_every_rank)


@pytest.mark.parametrize("make", [Model, NoReset])
def test_a_checkpoint_overwrites_what_was_drawn(make: Any, tmp_path: Any) -> None:
    """Also what has no ``reset_parameters``; a checkpoint without it changes nothing about the refusal."""
    path = str(tmp_path / "whole.ckpt")

    def save(rank: int) -> dict[str, Tensor]:
        L.seed_everything(7, verbose=False)
        trainer = L.Trainer(devices=1, max_steps=0, **QUIET)
        module = LitMeta(make, "cpu")
        trainer.fit(module, text_rows())
        trainer.save_checkpoint(path)
        return {name: tensor.clone() for name, tensor in module.state_dict().items()}

    def resume(rank: int) -> dict[str, Tensor]:
        L.seed_everything(1, verbose=False)
        strategy = Hybrid3DStrategy(archive=None, **degrees_of(1, 1, 2))
        module = LitMeta(make)
        trainer = L.Trainer(devices=2, strategy=strategy, max_steps=0, **QUIET)
        trainer.fit(module, torch.utils.data.DataLoader(text_rows(), batch_size=8), ckpt_path=path)
        return {name: tensor.detach().clone() for name, tensor in module.named_parameters()}

    saved = run_ranks(1, save)[0]
    found = run_ranks(2, resume)
    assert set().union(*found) == {n for n in saved if n != "model.rotary.scale" and n != "model.head.weight"}
    for part in found:
        for name, tensor in part.items():
            assert torch.equal(tensor, saved[name]), name


def big() -> nn.Module:
    return Model(width=512, num_layers=48)


def growth(rank: int, device: str) -> int:
    """Bytes by which this rank's peak memory grows while a pipeline of four is set up, up to the first step."""
    grown: list[int] = []

    class Lit(LitMeta):
        def on_train_start(self) -> None:
            grown.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before)

    for make in (Model, big):  # the first one to load what any run loads
        strategy = Hybrid3DStrategy(archive=None, **degrees_of(1, 1, 4))
        trainer = L.Trainer(devices=4, strategy=strategy, max_steps=1, **QUIET)
        begin_peak_anew()
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        trainer.fit(Lit(make, device), torch.utils.data.DataLoader(text_rows(), batch_size=4))
    return grown[1]


def size_of_big() -> int:
    with torch.device("meta"):
        return sum(p.numel() * p.element_size() for p in big().parameters())


def test_a_rank_takes_memory_for_its_own_stage_only() -> None:
    total = size_of_big()
    assert total > 200e6
    for grown in run_ranks(4, growth, "meta", timeout=120):
        assert grown < 1.5 * total / 4, f"{grown / 1e6:.0f} MB for a share of {total / 4e6:.0f} MB"


def test_wrong_variant_the_whole_model_in_memory_is_seen() -> None:
    for grown in run_ranks(4, growth, "cpu", timeout=120):
        assert grown > 0.95 * size_of_big()

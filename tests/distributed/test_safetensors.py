"""Weights from and to folders that transformers writes and reads, at any degrees."""

from __future__ import annotations

import functools
import resource
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

from lightning_hybrid import Hybrid3DStrategy, load_safetensors, save_safetensors
from lightning_hybrid.checkpoint import pretrained
from lightning_hybrid.checkpoint.safetensors_files import TensorSpec, plan_shards, write_index, write_shard
from lightning_hybrid.errors import CheckpointError, UnsupportedError
from tests.distributed.equality import ONE_PROCESS, QUIET, Trace, assert_equal, merged, must_differ, trace
from tests.distributed.test_meta_device import LitMeta, Model, degrees_of
from tests.distributed.zoo import SMALL, ZOO, HuggingFace, even_rows, hugging_face, text_rows
from tests.ranks import begin_peak_anew, run_ranks

transformers = pytest.importorskip("transformers")

KINDS = {
    "llama": hugging_face("LlamaConfig", **SMALL, num_key_value_heads=2, tie_word_embeddings=True),
    "gpt2": ZOO["gpt2"].make,
    "mixtral": hugging_face(
        "MixtralConfig", **SMALL, num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2
    ),
}
TWO = [(2, 1, 1), (1, 2, 1), (1, 1, 2)]
FOUR = [(2, 2, 1), (1, 2, 2)]


class FromFolder(HuggingFace):
    """Built on the meta device; the weights come from a folder."""

    def __init__(self, folder: Path, **options: Any) -> None:
        L.LightningModule.__init__(self)
        self.folder, self.options, self.model = folder, options, None

    def configure_model(self) -> None:
        if self.model is None:
            with torch.device("meta"):
                self.model = build(self.folder)
            load_safetensors(self.model, self.folder, **self.options)


def build(folder: Path) -> nn.Module:
    config = transformers.AutoConfig.from_pretrained(folder)
    return transformers.AutoModelForCausalLM.from_config(config).train()


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    found = {}
    for name, make in KINDS.items():
        torch.manual_seed(5)
        found[name] = tmp_path_factory.mktemp(name) / "written"
        model = make().model
        with torch.no_grad():
            for parameter in model.parameters():  # no ones or zeros, which nobody would miss
                parameter.add_(0.05 * torch.randn_like(parameter))
        model.save_pretrained(found[name], max_shard_size="40KB")
    return found


class Writes(L.Callback):
    """Writes the trained weights."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        save_safetensors(trainer, self.folder, max_shard_size="40KB")


def train(
    rank: int, folders: dict[str, Path], degrees: list[Any], out: Path | None = None, sabotage: Any = None
) -> list[tuple[str, Trace]]:
    """One step at each of the degrees, from each folder; in one process with transformers' own loading."""
    found = []
    sizes = ("data_parallel_size", "tensor_parallel_size", "pipeline_parallel_size")
    for triple in degrees:
        for name, folder in folders.items():
            if triple and triple[1] > 1 and name == "mixtral":
                continue  # its experts cannot be tried on weights that have no memory yet, whatever they come from
            make = FromFolder if triple else pretrained_by_transformers
            options = dict(zip(sizes, triple, strict=True)) if triple else ONE_PROCESS
            callbacks = [Writes(out / f"{name}-{triple}")] if out else []
            steps: dict[str, Any] = {"max_steps": 1, "callbacks": callbacks, "sabotage": sabotage}
            found.append((name, trace(rank, functools.partial(make, folder), even_rows(8), options, **steps)))
    return found


def pretrained_by_transformers(folder: Path) -> L.LightningModule:
    return HuggingFace(transformers.AutoModelForCausalLM.from_pretrained(folder).train())


def check(expected: dict[str, Trace], found: list[list[tuple[str, Trace]]]) -> None:
    for runs in zip(*found, strict=True):
        right, traces = expected[runs[0][0]], [run for _, run in runs]
        before = merged(traces).before
        assert before.keys() == right.before.keys()
        assert all(torch.equal(before[name], tensor) for name, tensor in right.before.items())
        assert_equal(right, traces)


@pytest.fixture(scope="module")
def expected(folders: dict[str, Path]) -> dict[str, Trace]:
    return dict(run_ranks(1, train, folders, [None])[0])


def check_written(expected: dict[str, Trace], out: Path) -> None:
    """What was written is, to transformers, the model after the same step of one process."""
    for folder in out.iterdir():
        model, report = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
        assert not any(report.values()), report
        right = expected[folder.name.split("-")[0]].after
        for name, tensor in model.named_parameters():
            torch.testing.assert_close(tensor, right[f"model.{name}"], rtol=1e-5, atol=1e-6, msg=folder.name)


def test_each_rank_reads_its_part_and_the_whole_is_written(
    folders: dict[str, Path], expected: dict[str, Trace], tmp_path: Path
) -> None:
    assert all(len(list(folder.glob("*.safetensors"))) > 2 for folder in folders.values())
    check(expected, run_ranks(2, train, folders, TWO, tmp_path, timeout=200))
    assert len(list(tmp_path.iterdir())) == 3 * 3 - 1
    check_written(expected, tmp_path)


def test_with_two_degrees_at_a_time(folders: dict[str, Path], expected: dict[str, Trace], tmp_path: Path) -> None:
    gpt2 = {"gpt2": folders["gpt2"]}
    check(expected, run_ranks(4, train, gpt2, FOUR, tmp_path, timeout=200))
    check_written(expected, tmp_path)


def rows_in_the_order_of_the_file() -> None:
    pretrained.joined_rows = lambda module: {}  # type: ignore[attr-defined]


def test_wrong_variant_rows_in_the_order_of_the_file_are_seen(
    folders: dict[str, Path], expected: dict[str, Trace]
) -> None:
    gpt2 = {"gpt2": folders["gpt2"]}
    found = run_ranks(2, train, gpt2, [(1, 2, 1)], None, rows_in_the_order_of_the_file)
    with must_differ():
        check(expected, found)


# ---- memory ---------------------------------------------------------------------------------------------------------


class Streams(LitMeta):
    """A model of its own, also for real."""

    def __init__(self, folder: Path, device: str = "meta", **size: int) -> None:
        super().__init__(lambda: Model(**size), device)
        self.folder = folder

    def configure_model(self) -> None:
        if self.model is None:
            super().configure_model()
            load_safetensors(self.model, self.folder)


SMALL_MODEL, BIG_MODEL = {"width": 16, "num_layers": 4}, {"width": 384, "num_layers": 48}


def write(folder: Path, dtype: torch.dtype = torch.float32, **size: int) -> int:
    """Write weights that are all twos, in files of 20 MB; returns their bytes."""
    with torch.device("meta"):
        state = Model(**size).state_dict()
    del state["head.weight"]  # tied
    specs = {name: TensorSpec(tuple(t.shape), dtype) for name, t in state.items()}
    folder.mkdir()
    shards = plan_shards(specs, 20_000_000)
    for file, names in shards.items():
        write_shard(folder / file, {name: torch.full(specs[name].shape, 2.0, dtype=dtype) for name in names})
    write_index(folder, shards, specs)
    return sum(spec.num_bytes for spec in specs.values())


def growth(rank: int, folder: Path, out: Path, device: str, degrees: tuple[int, int, int], limit: str = "5MB") -> int:
    """Bytes by which this rank's peak memory grows while weights are read, spread and written, up to the first step."""
    grown: list[int] = []

    class Lit(Streams):
        def on_train_start(self) -> None:
            save_safetensors(self.trainer, out / str(len(grown)), max_shard_size=limit)
            grown.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before)

    for name, size in (("small", SMALL_MODEL), ("big", BIG_MODEL)):  # the first to load what any run loads
        strategy = Hybrid3DStrategy(archive=None, **degrees_of(*degrees))
        trainer = L.Trainer(devices=2, strategy=strategy, max_steps=1, **QUIET)
        begin_peak_anew()
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        trainer.fit(Lit(folder / name, device, **size), DataLoader(text_rows(), batch_size=4))
    return grown[1]


@pytest.fixture(scope="module")
def sizes(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    folder = tmp_path_factory.mktemp("memory")
    write(folder / "small", **SMALL_MODEL)
    return folder, write(folder / "big", **BIG_MODEL)


@pytest.mark.parametrize("degrees", [(2, 1, 1), (1, 1, 2)], ids=["data", "pipeline"])
def test_no_rank_holds_the_whole_model(degrees: Any, sizes: tuple[Path, int], tmp_path: Path) -> None:
    folder, total = sizes
    assert total > 100e6
    for grown in run_ranks(2, growth, folder, tmp_path, "meta", degrees, timeout=120):
        assert grown < 0.75 * total, f"{grown / 1e6:.0f} MB for half of {total / 1e6:.0f} MB"


def test_wrong_variant_the_whole_model_in_memory_is_seen(sizes: tuple[Path, int], tmp_path: Path) -> None:
    folder, total = sizes
    for grown in run_ranks(2, growth, folder, tmp_path / "a", "cpu", (2, 1, 1), timeout=120):
        assert grown > 0.95 * total
    first, _ = run_ranks(2, growth, folder, tmp_path / "b", "meta", (1, 1, 2), "1GB", timeout=120)
    assert first > 1.2 * total, "all tensors were gathered for one file"


# ---- refused --------------------------------------------------------------------------------------------------------


class TooLate(Streams):
    def on_fit_start(self) -> None:
        load_safetensors(self.model, self.folder)


class ShardsItself(Streams):
    def configure_model(self) -> None:
        if self.model is None:
            super().configure_model()
            fully_shard(self, mesh=self.device_mesh["data_parallel"])


def test_refused_by_name_on_every_rank(tmp_path: Path) -> None:
    write(tmp_path / "0", **SMALL_MODEL)
    write(tmp_path / "1", torch.bfloat16, **SMALL_MODEL)

    def train_small(module: L.LightningModule, degrees: tuple[int, int, int] = (2, 1, 1)) -> None:
        strategy = Hybrid3DStrategy(archive=None, **degrees_of(*degrees))
        trainer = L.Trainer(devices=2, strategy=strategy, max_steps=1, **QUIET)
        trainer.fit(module, DataLoader(text_rows(), batch_size=4))

    def on_every_rank(rank: int) -> None:
        for degrees in [(2, 1, 1), (1, 1, 2)]:
            with pytest.raises(UnsupportedError, match=r"split over ranks already. Call it where the model is"):
                train_small(TooLate(tmp_path / "0", **SMALL_MODEL), degrees)
        with pytest.raises(UnsupportedError, match=r"Model waits for the weights in .*split or sharded it itself"):
            train_small(ShardsItself(tmp_path / "0", **SMALL_MODEL))
        with pytest.raises(CheckpointError, match=r"Rank 1 found other weights .* than rank 0"):
            train_small(Streams(tmp_path / str(rank), **SMALL_MODEL))

    run_ranks(2, on_every_rank, timeout=120)

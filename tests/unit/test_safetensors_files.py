"""Which tensors of a folder belong to a model, in one process; what is refused, and what it says."""

from __future__ import annotations

import json
import pickle
import sys
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import nn

from lightning_hybrid import load_safetensors, save_safetensors
from lightning_hybrid.checkpoint.pretrained import ORIGIN, origins
from lightning_hybrid.checkpoint.safetensors_files import (
    INDEX,
    SINGLE,
    SafetensorsFolder,
    TensorSpec,
    begin_folder,
    plan_shards,
    size_in_bytes,
    write_index,
    write_shard,
)
from lightning_hybrid.errors import CheckpointError, ConfigurationError, UnsupportedError

pytest.importorskip("safetensors")


class Inner(nn.Module):
    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.head = nn.Linear(4, 7, bias=False)
        self.register_buffer("scale", torch.ones(()))
        self.register_buffer("cache", torch.ones(3), persistent=False)
        if tied:
            self.head.weight = self.embedding.weight


class Outer(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.model = Inner(**options)


def values(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: torch.full_like(t, float(i + 1)) for i, (name, t) in enumerate(module.state_dict().items())}


def written(folder: Path, state: dict[str, torch.Tensor], limit: int = 100) -> Path:
    folder.mkdir(exist_ok=True)
    specs = {name: TensorSpec(tuple(t.shape), t.dtype) for name, t in state.items()}
    shards = plan_shards(specs, limit)
    for file, names in shards.items():
        write_shard(folder / file, {name: state[name] for name in names})
    write_index(folder, shards, specs)
    return folder


@pytest.mark.parametrize("target", [Inner, Outer])
@pytest.mark.parametrize("source", [Inner, Outer])
@pytest.mark.parametrize("limit", [100, 10**9])
def test_names_may_have_a_prefix_more_or_less(target: Any, source: Any, limit: int, tmp_path: Path) -> None:
    state = values(source())
    module = target()
    load_safetensors(module, written(tmp_path, state, limit))
    assert [t.flatten()[0].item() for t in module.state_dict().values()] == [1, 2, 3, 4, 5, 6, 7]
    assert (tmp_path / INDEX).exists() is (limit == 100)


def test_a_given_prefix_is_taken(tmp_path: Path) -> None:
    state = {f"a.b.{name}": value for name, value in values(Inner()).items()}
    module = Inner()
    load_safetensors(module, written(tmp_path, state), prefix="a.b.")
    assert module.head.weight[0, 0] == 7
    with pytest.raises(CheckpointError, match=r"7 missing: .*head.weight"):
        load_safetensors(module, tmp_path, prefix="a.")


@pytest.mark.parametrize("absent", ["embedding.weight", "head.weight"])
def test_a_tied_weight_may_stand_under_any_name(absent: str, tmp_path: Path) -> None:
    state = values(Inner(tied=True))
    del state[absent]
    module = Inner(tied=True)
    load_safetensors(module, written(tmp_path, state))
    assert module.head.weight is module.embedding.weight
    assert torch.equal(module.head.weight, next(value for key, value in state.items() if value.shape == (7, 4)))


def test_other_floating_dtypes_are_converted(tmp_path: Path) -> None:
    state = {name: value.bfloat16() for name, value in values(Inner()).items()}
    module = Inner().double()
    load_safetensors(module, written(tmp_path, state))
    assert module.head.weight.dtype == torch.float64 and module.head.weight[0, 0] == 7


def test_what_does_not_fit_is_said_at_once(tmp_path: Path) -> None:
    state = values(Inner())
    del state["head.weight"], state["layers.0.bias"]
    state |= {"layers.7.bias": torch.ones(4), "scale": torch.ones((), dtype=torch.int8), "layers.1.bias": torch.ones(5)}
    with pytest.raises(CheckpointError) as caught:
        load_safetensors(Inner(), written(tmp_path, state))
    text = str(caught.value)
    assert "2 missing: head.weight, layers.0.bias\n1 unexpected: layers.7.bias\n2 unlike: " in text
    assert "layers.1.bias is [5] torch.float32 there and [4] torch.float32 in the model" in text
    assert "scale is [] torch.int8 there and [] torch.float32" in text
    with pytest.raises(CheckpointError, match="unlike"):
        load_safetensors(Inner(), tmp_path, strict=False)


def test_not_strict_takes_what_is_there(tmp_path: Path) -> None:
    state = values(Inner())
    del state["head.weight"]
    module, before = Inner(), torch.zeros(7, 4)
    with torch.no_grad():
        module.head.weight.zero_()
    with pytest.warns(UserWarning, match=r"strict=False: 1 missing: head.weight; 1 unexpected: more"):
        load_safetensors(module, written(tmp_path, {**state, "more": torch.ones(2)}), strict=False)
    assert torch.equal(module.head.weight, before) and module.layers[1].bias[0] == state["layers.1.bias"][0]


def test_what_waits_keeps_its_origin_under_other_names(tmp_path: Path) -> None:
    state = values(Inner())
    with torch.device("meta"):
        module = Inner()
    load_safetensors(module, written(tmp_path, state))
    assert module.head.weight.is_meta
    module.head, wrapper = nn.Linear(4, 3), nn.Module()  # a new head, and a wrapper with names of its own
    wrapper.base = pickle.loads(pickle.dumps(module))
    found = origins(wrapper)
    assert found.keys() == {f"base.{name}" for name in state if not name.startswith("head")}
    for name, origin in found.items():
        assert torch.equal(origin.recipe.read(origin.folder), state[name.removeprefix("base.")])
    assert not hasattr(module.head.weight, ORIGIN)


def test_folders_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"org/name is not a local folder.*snapshot_download"):
        SafetensorsFolder.find("org/name")
    with pytest.raises(CheckpointError, match="holds nothing"):
        SafetensorsFolder.find(tmp_path)
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(CheckpointError, match=r"it holds pytorch_model.bin.*save_pretrained"):
        SafetensorsFolder.find(tmp_path)
    folder = written(tmp_path / "a", values(Inner()))
    files = sorted(folder.glob("*.safetensors"))
    content = files[0].read_bytes()
    files[0].write_bytes(content[:-4])
    with pytest.raises(CheckpointError, match=rf"{files[0].name} is no whole safetensors file"):
        SafetensorsFolder.find(folder)
    files[0].unlink()
    with pytest.raises(CheckpointError, match=rf"lacks {files[0].name}, which its"):
        SafetensorsFolder.find(folder)
    files[0].write_bytes(files[1].read_bytes())
    with pytest.raises(CheckpointError, match=r"places scale in files that do not hold them"):
        SafetensorsFolder.find(folder)
    (folder / INDEX).write_text("[]")
    with pytest.raises(CheckpointError, match="is not an index"):
        SafetensorsFolder.find(folder)


def test_the_extra_is_named_where_the_library_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = written(tmp_path, values(Inner()))
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    with pytest.raises(CheckpointError, match=r"pip install 'lightning-hybrid\[hf\]'"):
        SafetensorsFolder.find(folder)


def test_files_are_filled_in_order() -> None:
    specs = {name: TensorSpec((size,), torch.float32) for name, size in zip("abcd", (1, 2, 9, 1), strict=True)}
    assert list(plan_shards(specs, 12).values()) == [["a", "b"], ["c"], ["d"]]
    assert list(plan_shards(specs, 12)) == [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    assert plan_shards(specs, 1000) == {SINGLE: list("abcd")}


@pytest.mark.parametrize(("text", "size"), [("5GB", 5 * 10**9), ("1.5 KiB", 1536), (17, 17), ("200mb", 2 * 10**8)])
def test_sizes(text: Any, size: int) -> None:
    assert size_in_bytes(text) == size


@pytest.mark.parametrize("text", ["", "5 apples", -1, 0, "GB"])
def test_sizes_that_are_none(text: Any) -> None:
    with pytest.raises(ConfigurationError, match="A size is"):
        size_in_bytes(text)


# ---- out ------------------------------------------------------------------------------------------------------------


class Lit(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = Inner(tied=True)


class Counting(Lit):
    def get_extra_state(self) -> int:
        return 3


def trainer_of(module: L.LightningModule) -> L.Trainer:
    trainer = L.Trainer(accelerator="cpu", devices=1, logger=False, enable_checkpointing=False)
    trainer.strategy.connect(module)
    return trainer


def test_a_plain_trainer_writes_too(tmp_path: Path) -> None:
    module = Lit()
    save_safetensors(trainer_of(module), tmp_path / "all")
    save_safetensors(trainer_of(module), tmp_path / "part", submodule="model", max_shard_size=100)
    assert set(SafetensorsFolder.find(tmp_path / "all").specs) == set(module.state_dict()) - {"model.head.weight"}
    other = Inner(tied=True)
    load_safetensors(other, tmp_path / "part")
    assert all(torch.equal(value, module.model.state_dict()[name]) for name, value in other.state_dict().items())
    assert json.loads((tmp_path / "part" / INDEX).read_text())["metadata"]["total_size"] == (28 + 40 + 1) * 4
    assert sorted(path.name for path in tmp_path.iterdir()) == ["all", "part"]


def test_what_cannot_be_written_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = trainer_of(Lit())
    with pytest.raises(CheckpointError, match="exists already"):
        save_safetensors(trainer, tmp_path)
    with pytest.raises(CheckpointError, match="is a URL"):
        begin_folder("memory://a")
    with pytest.raises(ConfigurationError, match=r"submodule='net' is none of Lit; it has \['model'\]"):
        save_safetensors(trainer, tmp_path / "a", submodule="net")
    with pytest.raises(UnsupportedError, match="_extra_state is a int of get_extra_state"):
        save_safetensors(trainer_of(Counting()), tmp_path / "a")
    with torch.device("meta"):
        weightless = Lit()
    for without in (weightless, L.LightningModule()):
        with pytest.raises(UnsupportedError, match="has no weights yet"):
            save_safetensors(trainer_of(without), tmp_path / "a")

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("safetensors.torch.save_file", full)
    with pytest.raises(CheckpointError, match=r"could not be written: .*No space left"):
        save_safetensors(trainer, tmp_path / "a")
    assert not list(tmp_path.iterdir())

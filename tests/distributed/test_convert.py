"""``lightning-hybrid convert``: between a plain file, a directory and safetensors, in one process."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_hybrid import Hybrid3DStrategy, cli
from lightning_hybrid.checkpoint import convert as convert_module
from lightning_hybrid.checkpoint.convert import convert, form_of
from lightning_hybrid.checkpoint.directory import read_directory
from lightning_hybrid.checkpoint.safetensors_files import SafetensorsFolder
from lightning_hybrid.errors import CheckpointError, ConfigurationError
from tests.distributed.test_checkpoint import (
    LAYOUTS,
    PLAN,
    LitLM,
    assert_same_training,
    build_trainer,
    loader,
    train,
)
from tests.ranks import begin_peak_anew, run_ranks

pytest.importorskip("safetensors")


def run(folder: Path, name: str, epochs: int, start: str | None = None, **options: Any) -> Path:
    """Train at some degrees, from a checkpoint in the folder; returns the new one."""
    out = f"{name}-{epochs}.ckpt"
    path = folder / start if start else None
    run_ranks(LAYOUTS[name].world_size, train, name, folder, epochs, path, out, LitLM, options, timeout=120)
    return folder / out


def save_directory(rank: int, folder: Path) -> None:
    """At 2 tensor x 2 pipeline ranks."""
    strategy = Hybrid3DStrategy(
        **vars(LAYOUTS["tp2-pp2"]), tp_plan=PLAN, archive=None, save_distributed_checkpoint=True
    )
    trainer = build_trainer("plain", folder, devices=4, strategy=strategy, max_epochs=1, limit_val_batches=0)
    trainer.fit(LitLM(tied=True), loader(3, rank, LAYOUTS["tp2-pp2"]))
    trainer.save_checkpoint(folder / "four")


def load(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = torch.load(path, weights_only=True)
    return content


def differences(one: Any, other: Any, path: str = "") -> list[str]:
    if isinstance(one, Tensor):
        return [] if isinstance(other, Tensor) and torch.equal(one, other) and one.dtype == other.dtype else [path]
    if isinstance(one, Mapping):
        if not isinstance(other, Mapping) or one.keys() != other.keys():
            return [path]
        return [line for key in one for line in differences(one[key], other[key], f"{path}.{key}")]
    if isinstance(one, (list, tuple)):
        if len(one) != len(other):
            return [path]
        return [
            line for i, pair in enumerate(zip(one, other, strict=True)) for line in differences(*pair, f"{path}.{i}")
        ]
    return [] if one == other else [path]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """After one epoch of a plain Trainer, with a tied weight."""
    return run(tmp_path_factory.mktemp("plain"), "plain", 1, tied=True)


def test_a_directory_of_a_file_is_resumed_at_other_degrees(plain: Path) -> None:
    folder = plain.parent
    convert(plain, folder / "directory", "directory")
    assert form_of(folder / "directory") == "directory"
    found = run(folder, "pp2", 2, "directory", tied=True)
    assert_same_training(load(found), load(run(folder, "plain", 2, tied=True)))


def test_there_and_back_is_the_same(plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    convert(plain, tmp_path / "directory", "directory")
    convert(tmp_path / "directory", tmp_path / "again.ckpt")
    again, expected = load(tmp_path / "again.ckpt"), load(plain)
    again.pop("lightning_hybrid")
    assert not differences(again, expected)
    state = again["state_dict"]
    assert state["head.weight"].data_ptr() == state["embedding.weight"].data_ptr()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["again.ckpt", "directory"]
    monkeypatch.setattr(convert_module, "_fill", lambda *_: None)
    convert(tmp_path / "directory", tmp_path / "wrong.ckpt")
    wrong = load(tmp_path / "wrong.ckpt")
    wrong.pop("lightning_hybrid")
    assert differences(wrong, expected), "values that were left out were not noticed"


def test_a_directory_of_four_ranks_becomes_the_file_of_one_process(plain: Path) -> None:
    run_ranks(4, save_directory, plain.parent, timeout=120)
    convert(plain.parent / "four", plain.parent / "one.ckpt")
    found = load(plain.parent / "one.ckpt")
    del found["lightning_hybrid"]
    assert_same_training(found, load(plain))


@pytest.mark.parametrize("start", ["file", "directory"])
def test_weights_alone_to_safetensors_and_back(start: str, plain: Path, tmp_path: Path) -> None:
    source = plain
    if start == "directory":
        source = tmp_path / "directory"
        convert(plain, source, "directory")
    done = convert(source, tmp_path / "safe", "safetensors", weights_only=True, max_shard_size="4KB")
    assert "optimizer_states" in done.left_out and "head.weight (tied to embedding.weight)" in done.left_out
    convert(tmp_path / "safe", tmp_path / "back.ckpt", weights_only=True)
    convert(tmp_path / "safe", tmp_path / "back", "directory", weights_only=True)
    expected = load(plain)["state_dict"]
    del expected["head.weight"]
    assert not differences(load(tmp_path / "back.ckpt")["state_dict"], expected)
    read = read_directory(tmp_path / "back", weights_only=True)["state_dict"]
    assert not differences({key: value.whole() for key, value in read.items()}, expected)
    module = LitLM.load_from_checkpoint(tmp_path / "back.ckpt", tied=True, strict=False)
    assert torch.equal(module.head.weight, expected["embedding.weight"])


def test_the_command(plain: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text("{}")
    arguments = [str(plain), str(tmp_path / "safe"), "--to", "safetensors", "--prefix", "blocks."]
    assert cli.main(["convert", *arguments]) == 1
    assert "Say weights_only=True (--weights_only)" in capsys.readouterr().err
    assert cli.main(["convert", *arguments, "--weights_only", "--config", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "a plain .ckpt file became a folder of safetensors: 30 tensors of" in text
    assert "Left out: " in text and "embedding.weight" in text
    assert {path.name for path in (tmp_path / "safe").iterdir()} == {"config.json", "model.safetensors"}
    assert cli.main(["convert", *arguments, "--weights_only"]) == 1
    assert "exists already" in capsys.readouterr().err
    assert (
        cli.main(["convert", str(tmp_path / "safe"), str(tmp_path / "a.ckpt"), "--weights_only", "--prefix", "b."]) == 0
    )
    assert all(key.startswith("b.") for key in load(tmp_path / "a.ckpt")["state_dict"])


def test_tensors_of_every_kind(tmp_path: Path) -> None:
    base = torch.arange(12.0).view(3, 4)
    state = {"whole": base, "transposed": base.T, "flat": base.view(12), "row": base[1], "empty": torch.empty(0, 4)}
    state |= {
        "scalar": torch.tensor(3),
        "expanded": torch.ones(1).expand(5),
        "half": torch.ones(3, dtype=torch.bfloat16),
    }
    torch.save({"state_dict": state, "nested": [(torch.ones(2), {"a": base[0]})]}, tmp_path / "a.ckpt")
    convert(tmp_path / "a.ckpt", tmp_path / "directory", "directory")
    convert(tmp_path / "directory", tmp_path / "b.ckpt")
    convert(tmp_path / "directory", tmp_path / "safe", "safetensors", weights_only=True)
    convert(tmp_path / "a.ckpt", tmp_path / "safe2", "safetensors", weights_only=True, max_shard_size=64)
    found = load(tmp_path / "b.ckpt")
    del found["lightning_hybrid"]
    assert not differences(found, load(tmp_path / "a.ckpt"))
    for name in ("safe", "safe2"):
        folder = SafetensorsFolder.find(tmp_path / name)
        assert not differences({key: folder.tensor(key) for key in folder.specs}, state)


class Own:
    """Of a class that torch.load does not know."""

    def __init__(self) -> None:
        self.tensor = torch.arange(3)


def test_objects_of_own_classes_need_trust(plain: Path, tmp_path: Path) -> None:
    torch.save({**load(plain), "own": Own()}, tmp_path / "own.ckpt")
    with pytest.raises(CheckpointError, match=r"objects of tests\S*Own\..*say trusted=True"):
        convert(tmp_path / "own.ckpt", tmp_path / "a", "directory")
    convert(tmp_path / "own.ckpt", tmp_path / "a", "directory", trusted=True)
    convert(tmp_path / "a", tmp_path / "b.ckpt", trusted=True)
    found = torch.load(tmp_path / "b.ckpt", weights_only=False)
    assert torch.equal(found["own"].tensor, torch.arange(3))
    assert not differences(found["state_dict"], load(plain)["state_dict"])


def test_what_cannot_be_converted_is_refused(plain: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "text.ckpt").write_text("some text")
    torch.save({"weight": torch.ones(2)}, tmp_path / "weights.ckpt")
    convert(plain, tmp_path / "whole", "directory")
    damaged = next(path for path in (tmp_path / "whole").iterdir() if path.suffix == ".distcp")
    for source, to, words in [
        (tmp_path / "none.ckpt", "directory", "none.ckpt does not exist"),
        (tmp_path / "empty", "file", "is none of these: a plain .ckpt file, a checkpoint directory"),
        (tmp_path / "text.ckpt", "directory", "was not written by torch.save"),
        (tmp_path / "weights.ckpt", "directory", r"has no state_dict, but \['weight'\]"),
        ("memory://a.ckpt", "directory", "is no directory; plain files and safetensors are mapped"),
        (plain, "file", "is a plain .ckpt file already; copy it"),
        (plain, None, "What shall .* be\\? Say to="),
        (plain, "zip", "to='zip' is none of"),
        (plain, "safetensors", "would lose optimizer states and progress, and can be loaded but not resumed"),
    ]:
        with pytest.raises((CheckpointError, ConfigurationError), match=words):
            convert(source, tmp_path / "out", to)
    for options, words in [
        ({"prefix": "model."}, "belong to safetensors"),
        ({"to": "safetensors", "weights_only": True, "prefix": "model."}, "they begin with .*'blocks', 'embedding'"),
        ({"to": "safetensors", "weights_only": True, "config": tmp_path}, "has no config.json"),
    ]:
        with pytest.raises((CheckpointError, ConfigurationError), match=words):
            convert(plain, tmp_path / "out", **{"to": "directory", **options})
    damaged.write_bytes(damaged.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match="whole is damaged"):
        convert(tmp_path / "whole", tmp_path / "out.ckpt")
    assert not [path for path in tmp_path.iterdir() if path.name.startswith("out")]


# ---- memory ---------------------------------------------------------------------------------------------------------

NUM_TENSORS, SIZE = 24, 1_000_000
STEPS = [("a.ckpt", "directory"), ("directory", "file"), ("a.ckpt", "safetensors"), ("safetensors", "file")]


class Peak(threading.Thread):
    """Watches how much memory of its own (not mapped from files) the process has, also when something is put in place.

    The checkpoint that is converted is still held then.
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        super().__init__(daemon=True)
        begin_peak_anew()
        self.start_bytes, self.peak, self.ended = own_memory(), 0, threading.Event()
        right = os.replace
        patch.setattr(os, "replace", lambda *paths: (self.look(), right(*paths)))

    def look(self) -> None:
        self.peak = max(self.peak, own_memory())

    def run(self) -> None:
        while not self.ended.wait(0.001):
            self.look()

    def stop(self) -> int:
        self.ended.set()
        self.join()
        return max(0, self.peak - self.start_bytes)


def own_memory() -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon"))
    return int(line.split()[1]) * 1024


def growth(rank: int, folder: Path, sabotage: Callable[[], None] | None = None) -> dict[str, int]:
    """Bytes of its own that each conversion takes, at most."""
    if sabotage:
        sabotage()
    grown = {}
    for source, to in [
        ("a.ckpt", "directory"),
        ("directory", "file"),
        ("a.ckpt", "safetensors"),
        ("safetensors", "file"),
    ]:
        weights_only = "safetensors" in (source, to)
        out = folder / (to if source == "a.ckpt" else f"{source}-{to}.ckpt")
        with pytest.MonkeyPatch.context() as patch:
            peak = Peak(patch)
            peak.start()
            convert(folder / source, out, to, weights_only=weights_only, max_shard_size=8 * SIZE)  # type: ignore[arg-type]
            grown[f"{source} to {to}"] = peak.stop()
    return grown


def everything_is_read_first() -> None:
    right = convert_module._read

    def read(*args: Any) -> dict[str, Any]:
        checkpoint = right(*args)
        checkpoint["state_dict"] = {key: value.clone() + 0 for key, value in checkpoint["state_dict"].items()}
        return checkpoint

    convert_module._read = read


@pytest.mark.parametrize("sabotage", [None, everything_is_read_first])
def test_memory_is_that_of_a_few_tensors(sabotage: Any, tmp_path: Path) -> None:
    state = {f"layer.{i}.weight": torch.full((SIZE,), float(i)) for i in range(NUM_TENSORS)}
    torch.save({"state_dict": state, "global_step": 3}, tmp_path / "a.ckpt")
    (grown,) = run_ranks(1, growth, tmp_path, sabotage, timeout=120)
    total = 4 * SIZE * NUM_TENSORS
    if sabotage is None:
        assert max(grown.values()) < 0.35 * total, grown
    else:
        assert grown["a.ckpt to directory"] > 0.9 * total and grown["directory to file"] > 0.9 * total, grown

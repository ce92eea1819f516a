"""Checkpoints as directories, written and read by one process: what is whole, what is passed over, what is read."""

from __future__ import annotations

import logging
import os
import pickle
import shutil
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO

from lightning_hybrid.checkpoint.directory import as_shares, read_directory, write_directory
from lightning_hybrid.checkpoint.files import write_file
from lightning_hybrid.checkpoint.planners import StoredTensors
from lightning_hybrid.checkpoint.tensors import Elsewhere, Share, Stored
from lightning_hybrid.checkpoint.whole import checkpoint_to_load, latest_checkpoint, put_in_place, why_not_whole
from lightning_hybrid.errors import CheckpointError


def content(step: int = 3) -> dict[str, Any]:
    weight = torch.arange(24.0).view(6, 4) + step
    state = OrderedDict(embedding=weight, head=weight, bias=torch.ones(3, dtype=torch.bfloat16), none=torch.empty(0, 2))
    moments = {0: {"step": torch.tensor(3.0), "exp_avg": weight / 2}, 1: {"step": torch.tensor(3.0)}}
    optimizer = {
        "state": moments,
        "param_groups": [{"params": [0, 1], "lr": 0.1}],
        "param_names": [["embedding", "bias"]],
    }
    return {"state_dict": state, "optimizer_states": [optimizer], "global_step": step, "epoch": 1, "mine": (1, [2.5])}


def save(path: Any, step: int = 3) -> Any:
    write_directory(as_shares(content(step)), path)
    return path


def test_what_is_read_is_what_was_written(tmp_path: Path) -> None:
    found = read_directory(save(tmp_path / "a.ckpt"), weights_only=True)
    expected = content()
    assert list(found["state_dict"]) == list(expected["state_dict"])
    torch.testing.assert_close(dict(found["state_dict"]), dict(expected["state_dict"]), rtol=0, atol=0)
    assert found["state_dict"]["embedding"] is found["state_dict"]["head"], "tied"
    for key, states in expected["optimizer_states"][0]["state"].items():
        torch.testing.assert_close(dict(found["optimizer_states"][0]["state"][key]), states, rtol=0, atol=0)
    assert found["optimizer_states"][0]["param_groups"] == expected["optimizer_states"][0]["param_groups"]
    assert (found["mine"], found["global_step"]) == ((1, [2.5]), 3)


def test_names_in_the_directory_are_those_of_parameters(tmp_path: Path) -> None:
    from torch.distributed.checkpoint import FileSystemReader
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    keys = StoredTensors(FileSystemReader(save(tmp_path / "a.ckpt"))).keys()  # type: ignore[attr-defined]
    moments = {"optimizer_0.state.embedding.exp_avg"}
    steps = {"optimizer_0.state.embedding.step", "optimizer_0.state.bias.step"}
    assert set(keys) == {"state_dict.embedding", "state_dict.bias", *moments, *steps}
    dcp_to_torch_save(tmp_path / "a.ckpt", tmp_path / "by_torch.pt")
    state = torch.load(tmp_path / "by_torch.pt", weights_only=True)
    assert torch.equal(state["state_dict"]["embedding"], content()["state_dict"]["embedding"]), "torch's tools read it"


def test_only_what_is_cut_out_is_read() -> None:
    whole, boxes = torch.arange(24.0).view(6, 4), []

    def read(start: Any, size: Any, into: torch.Tensor | None) -> torch.Tensor:
        boxes.append((tuple(start), tuple(size)))
        box = whole[tuple(slice(a, a + n) for a, n in zip(start, size, strict=True))]
        return box if into is None else into.copy_(box)

    stored = Stored.make(whole.shape, whole.dtype, read)
    assert (stored.shape, stored.dtype, stored.device.type, stored.is_meta, boxes) == (
        (6, 4),
        torch.float32,
        "cpu",
        False,
        [],
    )
    assert torch.equal(stored.box((slice(1, 3),)), whole[1:3])
    assert torch.equal(stored.index_select(0, torch.tensor([4, 2])), whole[[4, 2]])
    assert torch.equal(stored.index_select(-1, torch.tensor([2, 1])), whole[:, [2, 1]])
    assert boxes == [((1, 0), (2, 4)), ((2, 0), (3, 4)), ((0, 1), (6, 2))]
    assert torch.equal(stored * 2, whole * 2)
    assert boxes[-1] == ((0, 0), (6, 4))
    into = torch.zeros(3, 2, dtype=torch.float64)
    stored.read_into(into, (slice(1, 4), slice(2, 4)))
    assert torch.equal(into, whole[1:4, 2:].double())
    assert boxes[-1] == ((1, 2), (3, 2))


def test_weights_are_read_into_their_place(tmp_path: Path) -> None:
    stored = read_directory(save(tmp_path / "a.ckpt"))["state_dict"]["embedding"]
    parameter = torch.nn.Parameter(torch.zeros(stored.shape, dtype=torch.float64))
    place, version = parameter.data_ptr(), parameter._version
    with torch.no_grad():
        assert parameter.copy_(stored) is parameter
    assert (parameter.data_ptr(), parameter._version > version) == (place, True)
    assert torch.equal(parameter, content()["state_dict"]["embedding"].double())


def half_of(tensor: torch.Tensor) -> None:
    tensor[:2, :].zero_()
    tensor[2] += 1


IN_PLACE: dict[str, Callable[[torch.Tensor], Any]] = {
    "mul_": lambda tensor: tensor.mul_(2),
    "slices": half_of,
    "init": torch.nn.init.ones_,
    "data": lambda tensor: tensor.data.view(-1).zero_(),
    "numpy": lambda tensor: tensor.numpy().fill(3),
    "foreach": lambda tensor: torch._foreach_mul_([tensor], 2.0),
    "copy_": lambda tensor: tensor.copy_(torch.ones(4)),
    "out": lambda tensor: torch.mul(tensor, 2, out=tensor),
}


@pytest.mark.parametrize("name", IN_PLACE)
def test_edits_in_place_are_loaded(name: str, tmp_path: Path) -> None:
    whole = content()["state_dict"]["embedding"].clone()
    stored = read_directory(save(tmp_path / "a.ckpt"))["state_dict"]["embedding"]
    IN_PLACE[name](whole)
    IN_PLACE[name](stored)
    assert not torch.equal(whole, content()["state_dict"]["embedding"])
    into = torch.zeros(2, 2)
    stored.read_into(into, (slice(1, 3), slice(2, 4)))
    for found, right in [(into, whole[1:3, 2:]), (stored.box((slice(1, 3),)), whole[1:3]), (stored.whole(), whole)]:
        assert torch.equal(found, right)
    assert torch.equal(torch.empty(whole.shape).copy_(stored), whole)


def test_what_is_read_is_not_kept_without_need(tmp_path: Path) -> None:
    stored = read_directory(save(tmp_path / "a.ckpt"))["state_dict"]["embedding"]
    _ = stored * 2, stored.clone(), float(stored.sum()), len(stored), stored.double(), stored.to_sparse()
    write_directory(as_shares({"state_dict": {"embedding": stored}}), tmp_path / "b.ckpt")
    assert stored.kept is None


def test_shares_are_not_computed_with() -> None:
    share = Share.make((2, 3), torch.float32, [((0, 0), torch.ones(2, 3))])
    assert share.detach() is share
    assert share.cpu().shape == (2, 3)
    with pytest.raises(CheckpointError, match="save_distributed_checkpoint=False"):
        share * 2


def delete(name: str) -> Callable[[Path], None]:
    return lambda path: (path / name).unlink()


def halve(path: Path) -> None:
    file = next(path.glob("*.distcp"))
    os.truncate(file, file.stat().st_size // 2)


def swap_bytes(path: Path) -> None:
    data = (path / "meta.pt").read_bytes()
    (path / "meta.pt").write_bytes(data[:100] + bytes([data[100] ^ 1]) + data[101:])


DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no metadata": (delete(".metadata"), r"\.metadata has no bytes"),
    "a shard cut to half": (halve, r"__0_0\.distcp has \d+ bytes where \d+ were written"),
    "a shard is missing": (lambda path: next(path.glob("*.distcp")).unlink(), "has no bytes"),
    "an empty file": (lambda path: (path / "meta.pt").write_bytes(b""), "meta.pt has 0 bytes"),
    "a bit": (swap_bytes, "meta.pt is not what was written"),
    "no marker": (delete("complete.json"), "was interrupted, or another program"),
    "an empty marker": (lambda path: (path / "complete.json").write_bytes(b""), "cannot be read"),
    "only a temporary one": (lambda path: path.rename(f"{path}.incomplete"), "does not exist"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_the_newest_whole_one_is_resumed_from(damage: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    do, text = DAMAGE[damage]
    save(tmp_path / "step=2.ckpt", 2)
    save(tmp_path / "step=4.ckpt", 4)
    broken = save(tmp_path / "last.ckpt", 6)
    assert latest_checkpoint(tmp_path) == str(broken)
    do(broken)
    with caplog.at_level(logging.WARNING):
        assert checkpoint_to_load(broken) == str(tmp_path / "step=4.ckpt")
    assert "last.ckpt" in caplog.text
    explicit = tmp_path / "named.ckpt"
    if broken.exists():
        broken.rename(explicit)
        with pytest.raises(CheckpointError, match=text) as refused:
            checkpoint_to_load(explicit)
        assert "step=4.ckpt" in str(refused.value)
    save(broken, 6)
    assert checkpoint_to_load(broken) == str(broken), "saving it again succeeds"
    assert read_directory(broken)["global_step"] == 6


def test_a_stray_file_does_no_harm(tmp_path: Path) -> None:
    path = save(tmp_path / "last.ckpt")
    (path / "notes.txt").write_text("mine")
    assert checkpoint_to_load(path) == str(path)


@pytest.mark.parametrize("kind", ["folder", "file"])
def test_a_kill_between_the_renames_loses_nothing(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "last.ckpt"
    save(path, 2)

    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", killed)
    write = save if kind == "folder" else lambda path, step: write_file(content(step), path, TorchCheckpointIO())
    with pytest.raises(KeyboardInterrupt):
        write(path, 4)
    monkeypatch.undo()
    assert not path.exists()
    assert read_directory(checkpoint_to_load(path))["global_step"] == 2
    assert latest_checkpoint(tmp_path) == f"{path}.replaced"
    save(path, 4)
    assert sorted(os.listdir(tmp_path)) == ["last.ckpt"]
    assert read_directory(path)["global_step"] == 4


def test_a_full_disk_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save(tmp_path / "last.ckpt", 2)

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("torch.distributed.checkpoint.filesystem.torch.save", full)
    with pytest.raises(CheckpointError, match=r"last.ckpt could not be saved: .*No space left on device"):
        save(path, 4)
    monkeypatch.setattr("lightning_hybrid.checkpoint.files.torch.save", full)
    with pytest.raises(OSError, match="No space left"):
        write_file(content(4), path, TorchCheckpointIO())
    assert os.listdir(tmp_path) == ["last.ckpt"]
    assert read_directory(path)["global_step"] == 2


def test_plain_files_count_too(tmp_path: Path) -> None:
    assert latest_checkpoint(tmp_path / "nowhere") is None
    write_file(content(2), tmp_path / "step=2.ckpt", TorchCheckpointIO())
    write_file(content(4), tmp_path / "last.ckpt", TorchCheckpointIO())
    assert torch.load(tmp_path / "last.ckpt", weights_only=True)["global_step"] == 4
    assert latest_checkpoint(tmp_path) == str(tmp_path / "last.ckpt")
    os.truncate(tmp_path / "last.ckpt", 2000)
    assert why_not_whole(tmp_path / "last.ckpt") == "is cut off: its end is missing"
    assert checkpoint_to_load(tmp_path / "last.ckpt") == str(tmp_path / "step=2.ckpt")
    (tmp_path / "other.ckpt").write_text("a letter")
    with pytest.raises(CheckpointError, match="was not written by"):
        checkpoint_to_load(tmp_path / "other.ckpt")


def test_a_directory_of_another_program_is_refused(tmp_path: Path) -> None:
    from torch.distributed.checkpoint import save as dcp_save

    dcp_save({"a": torch.ones(2)}, checkpoint_id=tmp_path / "a", no_dist=True)
    with pytest.raises(CheckpointError, match="another program wrote it"):
        checkpoint_to_load(tmp_path / "a")


def test_weights_of_hugging_face_are_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "[hf] model").mkdir()
    (tmp_path / "[hf] model" / "model-00001-of-00002.safetensors").touch()
    with pytest.raises(CheckpointError, match=r"is a folder of safetensors.*load_safetensors.*convert"):
        checkpoint_to_load(tmp_path / "[hf] model")


def test_a_link_is_replaced_not_what_it_leads_to(tmp_path: Path) -> None:
    target = save(tmp_path / "step=2.ckpt", 2)
    (tmp_path / "last.ckpt").symlink_to("step=2.ckpt")
    save(tmp_path / "last.ckpt", 4)
    assert read_directory(target)["global_step"] == 2
    assert read_directory(tmp_path / "last.ckpt")["global_step"] == 4
    shutil.copytree(target, tmp_path / "a.incomplete")
    put_in_place(tmp_path / "a.incomplete", target)
    assert why_not_whole(target) is None


class Runs:
    def __reduce__(self) -> Any:
        return os.mkdir, ("it-ran",)


def test_metadata_that_would_run_code_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = save(tmp_path / "a.ckpt")
    (path / ".metadata").write_bytes(pickle.dumps(Runs()))
    with pytest.raises(pickle.UnpicklingError, match=r"posix\.mkdir.*weights_only=False"):
        read_directory(path, weights_only=True)
    assert not (tmp_path / "it-ran").exists()
    with pytest.raises(AttributeError):  # what it made is no metadata
        read_directory(path, weights_only=False)
    assert (tmp_path / "it-ran").exists(), "the attack is a real one"


def test_a_path_with_colons_and_spaces(tmp_path: Path) -> None:
    folder = tmp_path / "a::b" / "ein Ordner, größer #1"
    save(folder / "a::c.ckpt")
    assert latest_checkpoint(folder) == str(folder / "a::c.ckpt")
    assert read_directory(folder / "a::c.ckpt", True)["mine"] == (1, [2.5])
    assert os.listdir(tmp_path) == ["a::b"]


def test_a_dict_in_itself_is_refused(tmp_path: Path) -> None:
    checkpoint: dict[str, Any] = {**content(), "mine": {"deep": [1, {}]}}
    checkpoint["mine"]["deep"][1]["again"] = checkpoint["mine"]
    with pytest.raises(CheckpointError, match=r"mine\.deep\.1\.again contains itself"):
        write_directory(as_shares(checkpoint), tmp_path / "a.ckpt")
    checkpoint["mine"] = [shared := [1], shared]  # twice is not in itself
    write_directory(as_shares(checkpoint), tmp_path / "a.ckpt")


class Lit(L.LightningModule):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layer = torch.nn.Linear(width, 2)


def test_load_from_checkpoint_reads_directories(tmp_path: Path) -> None:
    module = Lit(3)
    checkpoint = {"state_dict": module.state_dict(), "hyper_parameters": {"width": 3}, "pytorch-lightning_version": "2"}
    write_directory(as_shares(checkpoint), tmp_path / "a.ckpt")
    found = Lit.load_from_checkpoint(tmp_path / "a.ckpt")
    torch.testing.assert_close(found.state_dict(), module.state_dict(), rtol=0, atol=0)
    assert Lit.load_from_checkpoint(tmp_path / "a.ckpt", map_location="cpu", width=3).hparams == {"width": 3}
    save(tmp_path / "b.ckpt")
    for wanted in (False, None):  # as Trainers with other strategies read it
        whole = TorchCheckpointIO().load_checkpoint(tmp_path / "b.ckpt", weights_only=wanted)
        assert type(whole["state_dict"]["bias"]) is torch.Tensor
        assert whole["state_dict"]["embedding"] is whole["state_dict"]["head"]
        moments, expected = (found["optimizer_states"][0]["state"][0] for found in (whole, content()))
        assert type(moments["exp_avg"]) is torch.Tensor
        assert torch.equal(moments["exp_avg"], expected["exp_avg"])
    os.remove(tmp_path / "a.ckpt" / "complete.json")
    with pytest.raises(CheckpointError, match=r"has no complete\.json"):
        Lit.load_from_checkpoint(tmp_path / "a.ckpt")
    torch.save(checkpoint, tmp_path / "file.ckpt")
    assert torch.equal(Lit.load_from_checkpoint(tmp_path / "file.ckpt").layer.bias, module.layer.bias)


def test_weights_that_another_rank_has() -> None:
    weight: Any = Elsewhere.of((3, 4), torch.float32)
    assert (weight.half().dtype, weight.cpu().shape, (weight * 2).t().shape) == (torch.float16, (3, 4), (4, 3))
    for compute in (lambda: float(weight.norm()), lambda: weight.half().tolist(), lambda: (weight * 2).numpy()):
        with pytest.raises(CheckpointError, match=r"if self\.trainer\.is_global_zero"):
            compute()

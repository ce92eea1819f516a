"""How checkpoint files are read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO

from lightning_hybrid.checkpoint.files import read_checkpoint

CONTENT = {"state_dict": {"weight": torch.arange(1_000_000.0)}, "epoch": 3}


def is_mapped(tensor: torch.Tensor, path: Path) -> bool:
    """Whether the tensor's memory belongs to the file, by the process's own map of its memory."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, end = (int(number, 16) for number in line.split()[0].split("-"))
        if start <= tensor.data_ptr() < end:
            return line.endswith(str(path))
    return False


def test_a_local_file_is_mapped(tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    torch.save(CONTENT, path)
    found = read_checkpoint(path, TorchCheckpointIO(), weights_only=True)
    assert torch.equal(found["state_dict"]["weight"], CONTENT["state_dict"]["weight"])  # type: ignore[index]
    assert is_mapped(found["state_dict"]["weight"], path)
    assert not is_mapped(TorchCheckpointIO().load_checkpoint(path)["state_dict"]["weight"], path)


def test_an_old_format_is_read_as_before(tmp_path: Path) -> None:
    path = tmp_path / "old.ckpt"
    torch.save(CONTENT, path, _use_new_zipfile_serialization=False)
    found = read_checkpoint(path, TorchCheckpointIO(), weights_only=True)
    assert torch.equal(found["state_dict"]["weight"], CONTENT["state_dict"]["weight"])  # type: ignore[index]


def test_a_url_is_read_as_before() -> None:
    import fsspec

    with fsspec.open("memory://folder/a.ckpt", "wb") as file:
        torch.save(CONTENT, file)
    assert read_checkpoint("memory://folder/a.ckpt", TorchCheckpointIO(), weights_only=True)["epoch"] == 3


def test_the_users_own_reader_is_asked(tmp_path: Path) -> None:
    class Own(TorchCheckpointIO):
        def load_checkpoint(self, path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
            return {"read": path, **kwargs}

    path = tmp_path / "a.ckpt"
    torch.save(CONTENT, path)
    assert read_checkpoint(path, Own(), weights_only=False) == {"read": path, "weights_only": False}


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"missing\.ckpt"):
        read_checkpoint(tmp_path / "missing.ckpt", TorchCheckpointIO())

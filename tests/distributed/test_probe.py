"""The probe on gloo: a link that is slowed down is named; all ranks end when one fails."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from lightning.pytorch import Trainer
from torch.utils.data import DataLoader

from lightning_hybrid import Hybrid3DStrategy
from lightning_hybrid.archive import Archive
from lightning_hybrid.callbacks import ConfigArchive, LinkProbe
from lightning_hybrid.cli import main
from lightning_hybrid.errors import ProbeError
from lightning_hybrid.machine import link_times, local_ranks
from lightning_hybrid.machine.local_ranks import run_here
from lightning_hybrid.planner import Cluster
from tests.distributed.zoo import ZOO, even_rows
from tests.ranks import run_ranks

SWAP = link_times.swap


def probe_with_a_slow_link(rank: int, slow: set[int] | None, seconds: float) -> str:
    def swap(outgoing: Any, incoming: Any, to: int, source: int, group: Any) -> None:
        if slow == {rank, to} and group is dist.group.WORLD:
            time.sleep(seconds)
        SWAP(outgoing, incoming, to, source, group)

    link_times.swap = swap
    return Cluster.probe(quick=True).to_json()


def test_a_link_that_is_slowed_down_is_named(tmp_path: Path):
    profiles = run_ranks(4, probe_with_a_slow_link, {1, 3}, 0.1)
    assert len(set(profiles)) == 1  # the same on all ranks
    (tmp_path / "cluster.json").write_text(profiles[0])
    cluster = Cluster.from_json(tmp_path / "cluster.json")
    measured = cluster.measured
    assert measured is not None and cluster.num_devices == 4
    worst = min(measured.slow, key=lambda slow: slow.share)  # on a busy machine others may be named too
    assert worst.what == "ranks 1 and 3" and worst.share < 0.2
    assert len(measured.pairs) == 6
    assert {found.op for found in measured.collectives} == set(link_times.OPS)
    assert all(device.memory > 0 and device.tflops["fp32"] > 0 for device in measured.devices)


def test_axes_of_given_degrees_are_measured_on_ranks_started_here(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = str(tmp_path / "cluster.json")
    assert main(["probe", "--devices=2", "--tensor_parallel_size=2", "--quick", f"--output={path}"]) == 0
    out = capsys.readouterr().out
    assert "tensor_parallel" in out and "Written to" in out and "GB/s" in out
    measured = Cluster.from_json(path).measured
    assert measured is not None and {found.axis for found in measured.collectives} == {"tensor_parallel"}
    assert main(["probe", "--devices=2", "--tensor_parallel_size=3", f"--output={path}"]) == 1
    assert "does not divide" in capsys.readouterr().err


def wait_for_others(store: str, rank: int, world_size: int) -> None:
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world_size)
    if rank == 1:
        raise ValueError("no such device")
    dist.barrier()


def die(store: str, rank: int, world_size: int) -> None:
    if rank == 1:
        os._exit(7)
    time.sleep(60)


def test_all_ranks_end_within_seconds_when_one_fails(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(local_ranks.os, "environ", dict(os.environ))  # type: ignore[attr-defined]
    start = time.monotonic()
    with pytest.raises(ProbeError, match="Rank 1 of 3 failed: ValueError: no such device"):
        run_here(3, wait_for_others, timeout=60)
    with pytest.raises(ProbeError, match="Rank 1 of 2 failed: it ended with exit code 7"):
        run_here(2, die, timeout=60)
    with pytest.raises(ProbeError, match=r"1 ranks were not done after 0\.5 s"):
        run_here(1, lambda store, rank, world_size: time.sleep(60), timeout=0.5)
    assert time.monotonic() - start < 20


def train_with_a_probe(rank: int, folder: str) -> dict[str, float]:
    probe, archive = LinkProbe(), ConfigArchive(folder)
    strategy = Hybrid3DStrategy(data_parallel_size=1, tensor_parallel_size=2, pipeline_parallel_size=2)
    trainer = Trainer(
        **{"strategy": strategy, "accelerator": "cpu", "devices": 4, "callbacks": [probe, archive], "max_steps": 1},
        **{"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False},
    )
    trainer.fit(ZOO["llama"].make(), DataLoader(even_rows(4), batch_size=4))
    return probe.links


def test_links_are_measured_when_training_starts_and_kept_with_the_run(tmp_path: Path):
    links = run_ranks(4, train_with_a_probe, str(tmp_path))
    assert set(links[0]) == {"tensor_parallel", "pipeline_parallel"} and all(found == links[0] for found in links)
    entry = Archive(tmp_path).list()[0]
    assert entry.hardware.links == links[0] and min(links[0].values()) > 0

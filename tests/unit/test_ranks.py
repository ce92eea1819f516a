"""The launcher of forked ranks: it must report the right failure, and end whatever hangs."""

from __future__ import annotations

import gc
import multiprocessing
import os
import re
import signal
import sys
import time
from pathlib import Path

import lightning
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.demos.boring_classes import BoringModel
from torch.utils.data import DataLoader

from lightning_hybrid.errors import ConfigurationError
from tests.ranks import RankError, RankTimeoutError, run_ranks


def test_results_come_in_the_order_of_ranks():
    def function(rank: int, factor: int) -> int:
        time.sleep(0.05 * (3 - rank))  # the last rank is the first to end
        return rank * factor

    assert run_ranks(4, function, 10) == [0, 10, 20, 30]


def test_ranks_have_a_launchers_environment_and_one_thread():
    def function(rank: int) -> tuple[str, str, str, int]:
        return os.environ["RANK"], os.environ["LOCAL_RANK"], os.environ["WORLD_SIZE"], torch.get_num_threads()

    assert run_ranks(2, function) == [("0", "0", "2", 1), ("1", "1", "2", 1)]
    assert "RANK" not in os.environ


def test_first_failure_in_time_keeps_its_type_and_traceback(tmp_path: Path):
    def function(rank: int) -> None:
        if rank == 1:
            (tmp_path / "fails now").touch()
            raise ConfigurationError("pipeline_parallel_size=3 does not divide 8 devices.")
        while not (tmp_path / "fails now").exists():
            time.sleep(0.01)
        time.sleep(0.05)
        raise RuntimeError("gave up")

    with pytest.raises(ConfigurationError, match="does not divide 8 devices") as caught:
        run_ranks(2, function)
    text = str(caught.value.__cause__)
    assert text.startswith("rank 1 of 2 failed first.\nTraceback")
    assert "--- rank 0 failed later ---\nRuntimeError: gave up" in text


def test_broken_connection_is_not_the_cause():
    def function(rank: int) -> None:
        dist.init_process_group("gloo")
        dist.barrier()
        try:
            if rank == 1:
                raise ValueError("the cause")
            dist.barrier()
        finally:
            dist.destroy_process_group()
            time.sleep(1.0 * rank)  # the rank that is to blame tidies up longer than the others

    with pytest.raises(ValueError, match="the cause") as caught:
        run_ranks(2, function)
    text = str(caught.value.__cause__)
    assert text.startswith("rank 1 of 2 failed first.")
    assert re.search(r"rank 0 failed later ---\nRuntimeError: .*Connection (closed|reset) by peer", text)


def test_failure_of_one_rank_ends_the_others_at_once():
    def function(rank: int) -> None:
        if rank == 0:
            raise ValueError("wrong number: 7")
        time.sleep(600)

    start = time.monotonic()
    with pytest.raises(ValueError, match="wrong number: 7") as caught:
        run_ranks(2, function)
    assert time.monotonic() - start < 5
    assert "--- rank 1 was still running ---" in str(caught.value.__cause__)


def test_hanging_collective_times_out_with_stacks():
    def function(rank: int) -> None:
        dist.init_process_group("gloo")
        if rank == 0:
            dist.barrier()  # rank 1 never comes
        time.sleep(600)

    start = time.monotonic()
    with pytest.raises(RankTimeoutError, match=r"rank 0, 1 of 2 still running after 2 s") as caught:
        run_ranks(2, function, timeout=2)
    assert time.monotonic() - start < 8
    zero, one = str(caught.value).split("--- rank 1 was still running ---")
    assert "in barrier" in zero
    assert "in barrier" not in one
    assert "in function" in one


def test_killed_rank_is_named():
    def function(rank: int) -> None:
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(600)

    with pytest.raises(RankError, match="rank 1 was ended by SIGKILL before its function ended"):
        run_ranks(2, function)


def test_a_crash_shows_where_it_happened():
    def crashes_here(rank: int) -> None:
        os.kill(os.getpid(), signal.SIGSEGV)

    with pytest.raises(RankError, match=r"(?s)ended by SIGSEGV.*Segmentation fault.*in crashes_here"):
        run_ranks(1, crashes_here)


def test_garbage_of_the_parent_is_not_collected_in_a_rank():
    class Garbage:
        def __init__(self) -> None:
            self.cycle = self

        def __del__(self) -> None:
            if os.getpid() != parent:
                os.kill(os.getpid(), signal.SIGKILL)

    parent = os.getpid()
    Garbage()
    run_ranks(1, lambda rank: gc.collect())


def test_exception_that_cannot_be_rebuilt_still_shows_its_traceback():
    class PickyError(Exception):
        def __init__(self, one: int, two: int) -> None:
            super().__init__(f"{one} and {two}")

    def function(rank: int) -> None:
        raise PickyError(1, 2)

    with pytest.raises(RankError, match="PickyError: 1 and 2"):
        run_ranks(1, function)


def test_system_exit_in_a_rank_does_not_end_pytest():
    with pytest.raises(RankError, match="SystemExit: 3"):
        run_ranks(1, lambda rank: sys.exit(3))


def test_skip_in_a_rank_skips_the_test():
    with pytest.raises(pytest.skip.Exception, match="needs two hosts"):
        run_ranks(2, lambda rank: pytest.skip("needs two hosts"))


def test_large_results_pass_the_pipe():
    results = run_ranks(2, lambda rank: torch.full((500_000,), float(rank)))
    assert [tensor.mean().item() for tensor in results] == [0.0, 1.0]


def test_output_of_ranks_is_replayed(capsys: pytest.CaptureFixture[str]):
    run_ranks(2, lambda rank: print(f"hello from {rank}"))
    assert "--- output of rank 1 ---\nhello from 1" in capsys.readouterr().out


def test_no_process_survives():
    def function(rank: int) -> tuple[int, int]:
        workers = os.fork()
        if workers == 0:
            time.sleep(600)
        return os.getpid(), workers

    (parent, worker), *_ = run_ranks(1, function)
    with pytest.raises(ProcessLookupError):
        os.kill(parent, 0)
    assert is_gone(worker)


def test_dataloader_workers_work_and_vanish():
    def function(rank: int) -> tuple[list[int], list[int]]:
        loader = DataLoader(range(4), batch_size=2, num_workers=2, persistent_workers=True)
        read = [int(number) for batch in loader for number in batch]
        return read, [worker.pid for worker in multiprocessing.active_children()]

    for read, workers in run_ranks(2, function):
        assert read == [0, 1, 2, 3]
        assert len(workers) == 2
        assert all(map(is_gone, workers))


def is_gone(pid: int) -> bool:
    """True when the process has ended (an orphan stays a zombie until init collects it)."""
    for _ in range(100):
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except OSError:
            return True
        time.sleep(0.02)
    return False


def fit_with_ddp(rank: int, folder: str) -> tuple[int, int, float, torch.Tensor]:
    model = BoringModel()
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        max_steps=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        limit_val_batches=0,
        default_root_dir=folder,
    )
    trainer.fit(model)
    return trainer.global_rank, trainer.world_size, float(trainer.is_global_zero), model.layer.weight.detach()


def test_trainer_takes_part_as_the_rank(tmp_path: Path):
    (rank0, world, zero0, weight0), (rank1, _, zero1, weight1) = run_ranks(2, fit_with_ddp, str(tmp_path))
    assert (rank0, rank1, world, zero0, zero1) == (0, 1, 2, 1.0, 0.0)
    torch.testing.assert_close(weight0, weight1, rtol=0, atol=0)

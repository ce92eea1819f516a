"""What an error means for the other ranks, and what of it can be shown."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest
import torch

from lightning_hybrid.checkpoint.directory import on_first
from lightning_hybrid.errors import CheckpointError
from lightning_hybrid.failures.failing import exit_codes
from lightning_hybrid.failures.failure import Failure, is_consequence
from lightning_hybrid.failures.watch_hub import how_it_ended

GLOO = "[gloo/transport/tcp/pair.cc:537] Connection closed by peer [127.0.0.1]:3"


class Speechless(Exception):
    def __str__(self) -> str:
        raise RuntimeError("it cannot say")


def caught(error: BaseException, cause: BaseException | None = None) -> BaseException:
    try:
        raise error from cause
    except type(error) as found:
        return found


def test_only_connections_between_ranks_are_consequences() -> None:
    """The same words come from the connections of a user's own."""
    for error in (RuntimeError(GLOO), torch.distributed.DistNetworkError("failed to recv, got 0 bytes")):
        assert is_consequence(caught(error))
        assert is_consequence(caught(ValueError("a hook"), error))
    for error in (ConnectionResetError("Connection reset by peer"), RuntimeError("Timed out waiting for a lock")):
        assert not is_consequence(caught(error))
        assert not is_consequence(caught(ValueError("a hook"), error))
    assert not is_consequence(caught(Speechless()))


@pytest.mark.parametrize("text", ["half a pair \udcff", "\x1b[31mred", "nul \x00"], ids=ascii)
def test_any_text_can_be_shown(text: str) -> None:
    failure = Failure.of(caught(ValueError(text)), rank=0, place="", action="")
    assert failure.report().encode() and "\x1b" not in failure.report() and "\x00" not in failure.cause
    assert Failure.of(caught(Speechless()), rank=0, place="", action="").cause


def test_a_file_that_is_cut_off_speaks_of_the_disk(tmp_path: object) -> None:
    def save() -> None:
        raise RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 704 vs 598")

    with pytest.raises(CheckpointError, match=r"unexpected pos.*a full disk \([\d.e+]+ GB are free\)"):
        on_first(save, f"{tmp_path}/x.ckpt")


def test_looking_at_children_leaves_their_end_to_be_named() -> None:
    asleep, gone = (subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) for _ in range(2))
    try:
        assert exit_codes([asleep, gone]) == [None, None]
        os.kill(gone.pid, signal.SIGKILL)
        end = time.monotonic() + 10
        while exit_codes([gone]) == [None] and time.monotonic() < end:
            time.sleep(0.01)
        assert exit_codes([asleep, gone]) == [None, -signal.SIGKILL]
        assert "SIGKILL" in how_it_ended(gone.pid)
        gone.wait()
        assert exit_codes([gone]) == [-signal.SIGKILL]
    finally:
        asleep.kill()
        asleep.wait()

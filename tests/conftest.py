"""Fixtures of all tests, and guards that fail a test which leaves something behind."""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy
import pytest
import torch
import torch.distributed

from tests import ranks

for name in (  # imported on first use: once here, before ranks are forked, not by each of them (0.2 s)
    "torch.distributed.checkpoint",
    "torch.distributed.elastic.multiprocessing.api",
    "transformers.generation.utils",
    "transformers.modeling_utils",
    *(f"transformers.models.{name}.modeling_{name}" for name in ("gpt2", "llama", "t5", "bert", "gemma3", "mixtral")),
):
    with contextlib.suppress(ImportError):
        importlib.import_module(name)

#: Set by Lightning or pytest as they work; put back without a word.
HARMLESS = {"PYTEST_CURRENT_TEST", "PL_GLOBAL_SEED", "PL_SEED_WORKERS"}


@pytest.fixture
def run_ranks() -> Callable[..., list[Any]]:
    """:func:`tests.ranks.run_ranks`: fork ranks, return their results."""
    return ranks.run_ranks


@pytest.fixture(autouse=True)
def same_seed() -> None:
    """Every test starts from the same random state, whatever ran before it."""
    random.seed(0)
    numpy.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def nothing_leaks() -> Iterator[None]:
    """Fail a test that leaks environment variables, child processes or the default process group."""
    environment, children = dict(os.environ), child_processes()
    yield
    leaks = restore_environment(environment)
    leaks += [f"child process {pid}: {what}" for pid, what in child_processes().items() if pid not in children]
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
        leaks.append("the default process group")
    assert not leaks, "The test left behind: " + "; ".join(leaks)


def restore_environment(before: dict[str, str]) -> list[str]:
    """Put the environment back; return a line per variable that had changed and is not harmless."""
    changed = {name for name in {*before, *os.environ} if before.get(name) != os.environ.get(name)}
    lines = [f"{name}={os.environ.get(name)!r} (was {before.get(name)!r})" for name in sorted(changed - HARMLESS)]
    for name in changed - {"PYTEST_CURRENT_TEST"}:
        os.environ.pop(name, None)
        if name in before:
            os.environ[name] = before[name]
    return lines


def child_processes() -> dict[int, str]:
    """Children of this process by id, from /proc where there is one; multiprocessing's own helper does not count."""
    multiprocessing.active_children()  # collects those that have ended
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:  # the usual case: none at all
        return {}
    children = {}
    for folder in Path("/proc").glob("[0-9]*"):  # /proc/self/task/*/children may leave some out
        try:
            state, parent = (folder / "stat").read_text().rpartition(")")[2].split()[:2]
            command = (folder / "cmdline").read_text(errors="replace").replace("\0", " ").strip()
        except OSError:  # it has just ended
            continue
        if int(parent) == os.getpid() and state != "Z" and "resource_tracker" not in command:
            children[int(folder.name)] = command
    return children

"""Ranks that torchrun has started again must not read what killed ones have left in the agent's store."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
from torch.distributed import TCPStore

from lightning_hybrid.failures.restart import group_options


def test_each_attempt_has_keys_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = timedelta(seconds=5)
    agent = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    given = {"TORCHELASTIC_USE_AGENT_STORE": "True", "GROUP_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    for name, value in {**given, "MASTER_PORT": str(agent.port), "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    stores = []
    for attempt in ("0", "1", "2"):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", attempt)
        stores.append(group_options(torch.device("cpu"), seconds).get("store"))
    assert stores[0] is None and stores[1] is not None and stores[2] is not None
    agent.set("rank 1", "of attempt 0")
    stores[1].set("rank 1", "of attempt 1")
    assert not stores[2].check(["rank 1"]) and stores[1].get("rank 1") == b"of attempt 1"
    monkeypatch.setenv("GROUP_WORLD_SIZE", "2")
    assert group_options(torch.device("cpu"), seconds) == {"timeout": seconds, "device_id": None}

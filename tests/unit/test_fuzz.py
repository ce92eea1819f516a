"""Damaged archive entries, cluster files, schedule tables, YAML and batches never end in an unclear error.

A document is changed at random: values replaced, keys taken away or added, bytes flipped. Whatever comes of it is
either read, or refused by one of our errors. (Seeded: the same 1,000 inputs in every run.)
"""

from __future__ import annotations

import json
import random
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from lightning_hybrid import Hybrid3DStrategy
from lightning_hybrid.archive import Entry
from lightning_hybrid.batches.microbatches import BatchSplitter
from lightning_hybrid.errors import HybridError
from lightning_hybrid.pipeline.schedule import find_schedule
from lightning_hybrid.planner import Cluster
from tests.unit.archive_entries import make_entry

ODD: list[Any] = [None, True, -1, 0, 1.5, 1e308, 2**70, "", "x", "../..", "\x00", [], [1], {}, {"a": 1}, float("nan")]
CLUSTER = {"device": "H100", "num_devices": 8, "per_node": 8, "link": 450.0, "network_gbits": 400.0, "schema": 1}
TABLE = "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"
STRATEGY: dict[str, Any] = {
    "data_parallel_size": 2,
    "tensor_parallel_size": 1,
    "pipeline_parallel_size": 2,
    "num_microbatches": 4,
    "schedule": "1F1B",
    "replica_sync": {"interval": 4},
    "tp_plan": {"a": "colwise"},
    "compile": {"mode": "default"},
    "activation_checkpointing": "full",
}


def changed(document: Any, choose: random.Random) -> Any:
    """The same with one thing wrong somewhere."""
    document = json.loads(json.dumps(document))
    target: Any = document
    while isinstance(target, dict) and target:
        key = choose.choice(list(target))
        if not isinstance(target[key], (dict, list)) or not target[key] or choose.random() < 0.3:
            break
        target = target[key]
    if isinstance(target, dict) and target:
        what = choose.randrange(3)
        if what == 0:
            del target[key]
        else:
            target["odd" if what == 1 and choose.random() < 0.3 else key] = choose.choice(ODD)
    elif isinstance(target, list) and target:
        target[choose.randrange(len(target))] = choose.choice(ODD)
    return document


def damaged(text: str, choose: random.Random) -> bytes:
    """The text with a few bytes changed, or cut off."""
    data = bytearray(text.encode())
    for _ in range(choose.randrange(1, 4)):
        data[choose.randrange(len(data))] = choose.randrange(256)
    return bytes(data[: choose.randrange(len(data))] if choose.random() < 0.2 else data)


def entry(choose: random.Random, folder: Path) -> None:
    document = json.loads(make_entry().to_json())
    if choose.random() < 0.3:
        Entry.from_json(damaged(json.dumps(document), choose).decode(errors="replace"))
    else:
        Entry.from_json(json.dumps(changed(document, choose)))


def cluster(choose: random.Random, folder: Path) -> None:
    path = folder / "cluster.json"
    text = json.dumps(changed(CLUSTER, choose))
    path.write_bytes(damaged(text, choose) if choose.random() < 0.3 else text.encode())
    Cluster.from_json(path)


def table(choose: random.Random, folder: Path) -> None:
    path = folder / "table.csv"
    path.write_bytes(damaged(TABLE, choose))
    find_schedule(str(path))


def arguments(choose: random.Random, folder: Path) -> None:
    """As they come from a YAML file."""
    given = yaml.safe_load(yaml.safe_dump(changed(STRATEGY, choose)))
    given.pop("odd", None)  # Python itself refuses arguments that do not exist
    Hybrid3DStrategy(**given)


def batch(choose: random.Random, folder: Path) -> None:
    def leaf(depth: int) -> Any:
        kinds: list[Any] = [
            torch.zeros(choose.randrange(5), 2),
            torch.zeros(()),
            "text",
            choose.choice(ODD),
            ["a"] * choose.randrange(5),
            torch.zeros(4).to_sparse(),
        ]
        if depth:
            kinds += [{"x": leaf(depth - 1), "y": leaf(depth - 1)}, [leaf(depth - 1), leaf(depth - 1)]]
        return choose.choice(kinds)

    BatchSplitter().split(leaf(3), choose.randrange(1, 5))


@pytest.mark.parametrize("read", [entry, cluster, table, arguments, batch], ids=lambda read: str(read.__name__))
def test_no_unclear_errors(read: Any, tmp_path: Path) -> None:
    faults, refused = [], 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for seed in range(200):
            try:
                read(random.Random(seed), tmp_path)
            except HybridError as error:
                refused += bool(str(error).strip())
            except Exception as error:
                faults.append(f"seed {seed}: {type(error).__name__}: {str(error)[:200]}")
    assert not faults, f"{len(faults)} of them: " + "\n".join(faults[:15])
    assert refused > 20

"""Reads the file of an offline W&B run, as ``wandb sync`` would.

wandb 0.31 writes it from Go and brings no reader. The format is LevelDB's log: after a header of 7 bytes, blocks of
32 KiB with chunks ``crc32 (4 bytes), length (2), type (1: whole, 2: first, 3: middle, 4: last), data``; each record is
a protocol buffer.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_BLOCK, _HEADER, _CHUNK = 32768, 7, 7
_WHOLE, _LAST = 1, 4


def read_records(path: Path) -> Iterator[bytes]:
    data, position, parts = path.read_bytes(), _HEADER, b""
    assert data[:4] == b":W&B"
    while position + _CHUNK <= len(data):
        room = _BLOCK - position % _BLOCK
        if room < _CHUNK:  # what is left of a block is padding
            position += room
            continue
        length, kind = struct.unpack("<HB", data[position + 4 : position + _CHUNK])
        if kind == 0:
            break
        parts += data[position + _CHUNK : position + _CHUNK + length]
        position += _CHUNK + length
        if kind in (_WHOLE, _LAST):
            yield parts
            parts = b""


def read_run(path: Path) -> dict[str, Any]:
    """Return what a run file holds: rows of history, config, names of files, definitions of metrics, the summary."""
    from wandb.proto import wandb_internal_pb2

    run: dict[str, Any] = {"history": [], "config": {}, "files": [], "metrics": {}, "summary": {}}
    for data in read_records(path):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        kind = record.WhichOneof("record_type")
        if kind == "history":
            row = {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
            run["history"].append(row)
        elif kind == "config":
            run["config"] |= {item.key: json.loads(item.value_json) for item in record.config.update}
        elif kind == "metric":
            run["metrics"][record.metric.name or record.metric.glob_name] = record.metric
        elif kind == "summary":
            for item in record.summary.update:
                run["summary"][item.key or ".".join(item.nested_key)] = json.loads(item.value_json)
        elif kind == "files":
            run["files"] += [item.path for item in record.files.files]
    return run

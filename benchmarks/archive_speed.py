"""How long an archive of many entries takes to answer: ``python -m benchmarks.archive_speed [--entries 100000]``.

Entries of 20 models on four kinds of devices, a tenth of them failures, are put into a folder (the slow part); then
the choice for one of the models is made without an index, with it, after 100 more runs, and with the index damaged.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from lightning_hybrid.archive import Archive, Entry, Fingerprint, Hardware, Result, best_entry
from lightning_hybrid.archive.row import INDEX_NAME
from lightning_hybrid.layout import Layout

KINDS = ("NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-80GB", "NVIDIA L4", "NVIDIA H200")


def entries(count: int) -> Iterator[Entry]:
    """Entries of many models, with all that a real run's has."""
    for number in range(count):
        model = number % 20
        degrees = Layout(data_parallel_size=2 ** (number % 4), tensor_parallel_size=2 ** (number // 4 % 3))
        good = number % 10 != 3
        yield Entry(
            id=f"20260731T093000Z-Model{model}-{number:06d}",
            time="2026-07-31T09:30:00Z",
            updated="2026-07-31T09:31:00Z",
            model=Fingerprint(model_class=f"Model{model}", num_parameters=10**6 * (model + 1), hash=f"{model:016x}"),
            hardware=Hardware(device="cuda", kind=KINDS[number % 4], num_devices=degrees.world_size),
            degrees=degrees,
            software={"torch": "2.13.0", "lightning": "2.6.6"},
            result=Result(
                status="ok" if good else "oom",
                samples_per_second=100.0 + number % 977 if good else None,
                breakdown={f"step/part{part}_s": 0.1 for part in range(12)},
            ),
        )


def choose(folder: Path) -> tuple[float, float, str]:
    """Seconds of a choice (on the wall, of the processor), and the entry chosen."""
    model = Fingerprint(model_class="Model4", num_parameters=5 * 10**6, hash=f"{4:016x}")
    start, worked = time.perf_counter(), time.process_time()
    found = best_entry(Archive(folder).known(), model, Hardware(device="cuda", kind=KINDS[0], num_devices=8), 8)
    assert found is not None
    return time.perf_counter() - start, time.process_time() - worked, found.entry.id


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--entries", type=int, default=100_000)
    count = parser.parse_args().entries
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for entry in entries(count):
            (folder / f"{entry.id}.json").write_text(entry.to_json())
        results = {"without an index (read once)": choose(folder), "with the index": choose(folder)}
        archive = Archive(folder)
        for entry in entries(100):
            archive.write(dataclasses.replace(entry, id=f"new-{entry.id}"))
        results["after 100 more runs"] = choose(folder)
        index = folder / INDEX_NAME
        data = bytearray(index.read_bytes())
        for place in range(0, len(data), len(data) // 50):
            data[place] ^= 0xFF
        index.write_bytes(data)
        results["50 bytes of the index damaged"] = choose(folder)
        results["mended"] = choose(folder)
        print(json.dumps({"entries": count, "index_bytes": os.path.getsize(index)}))
        for what, (seconds, worked, chosen) in results.items():
            print(f"{what:<32} {seconds:8.3f} s   {worked:8.3f} s of the processor   {chosen}")


if __name__ == "__main__":
    main()

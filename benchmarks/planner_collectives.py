"""The planner's exchanges beside measured ones: ``python -m benchmarks.planner_collectives FILE``.

The file is a list of rows as in ``collective_curves.json``. Two questions: how near the nominal formulas are, with
nothing but the data sheet's links; and how near measured curves are at sizes that were left out (each second one), as
the planner reads them (points with lines between) and as latency and rate alone.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections import defaultdict
from pathlib import Path
from typing import Any

from lightning_hybrid.planner import Cluster
from lightning_hybrid.planner.collectives import Group, ring
from lightning_hybrid.planner.constants import FITTED, Constants
from lightning_hybrid.planner.links import Curve

OPS = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1}


def nominal(row: dict[str, Any], constants: Constants = FITTED) -> float:
    """Predicted over measured seconds, less one."""
    cluster = Cluster.named(row["gpu"].split("(")[0], 8 * row["nodes"], per_node=8)
    op = row["op"]
    seconds = ring(Group(row["ranks"], 1), row["bytes"], cluster, constants, passes=OPS[op], op=op)
    return seconds / (row["time_us"] * 1e-6) - 1


def left_out(rows: list[dict[str, Any]]) -> tuple[list[float], list[float]]:
    """Errors at each second size, of the curve through the others, and of its line."""
    points = sorted((float(row["bytes"]), row["time_us"] * 1e-6) for row in rows)
    curve = Curve(tuple(points[::2]))
    latency, rate = curve.line
    inner = points[1:-1:2]
    return (
        [curve.seconds(size) / seconds - 1 for size, seconds in inner],
        [(latency + size / rate) / seconds - 1 for size, seconds in inner],
    )


def mean(errors: list[float]) -> str:
    return f"{statistics.mean(map(abs, errors)):6.1%}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file")
    rows = [row for row in json.loads(Path(parser.parse_args().file).read_text()) if row["op"] in OPS]
    groups: dict[tuple[str, str, int], list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        groups[row["gpu"].split("(")[0].strip(), row["op"], row["ranks"]].append(row)
    print(f"{'device':10} {'operation':15} {'ranks':>5}  {'nominal':>8}  {'bias':>7}  {'curve':>7}  {'line':>7}")
    everything: list[list[float]] = [[], [], []]
    for (gpu, op, ranks), found in sorted(groups.items()):
        errors = [nominal(row) for row in found]
        curve, line = left_out(found)
        for whole, part in zip(everything, (errors, curve, line), strict=True):
            whole += part
        bias = f"{statistics.mean(errors):+7.1%}"
        print(f"{gpu:10} {op:15} {ranks:5}  {mean(errors):>8}  {bias}  {mean(curve):>7}  {mean(line):>7}")
    print(f"{'all':32}  {mean(everything[0]):>8}  {'':7}  {mean(everything[1]):>7}  {mean(everything[2]):>7}")


if __name__ == "__main__":
    main()

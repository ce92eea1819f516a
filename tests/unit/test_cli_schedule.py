"""``lightning-hybrid schedule``: what it draws, what it says, and what it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightning_hybrid import cli
from lightning_hybrid.commands.schedule import most_held, timeline_lines
from lightning_hybrid.pipeline.schedule import SCHEDULES, find_schedule
from lightning_hybrid.pipeline.timeline import simulate


def test_gpipe_in_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["schedule", "gpipe", "--stages", "2", "--microbatches", "2"]) == 0
    title, first, second, time, held = capsys.readouterr().out.splitlines()
    assert title == "GPipe, 2 stages on 2 ranks, 2 micro-batches"
    assert first.rstrip() == "stage 0  F0 F1          B0--- B1---"
    assert second.rstrip() == "stage 1     F0 F1 B0--- B1---"
    assert time == "9 ms, 33.3% of it idle (bubble)."  # (p - 1) / (m + p - 1)
    assert held.endswith("rank 0: 2, rank 1: 2.")


@pytest.mark.parametrize("name", sorted(SCHEDULES))
@pytest.mark.parametrize("width", [60, 200])
def test_every_schedule_fits(name: str, width: int) -> None:
    spec = find_schedule(name)
    table = spec.table(4, 8, spec.stages_per_rank)
    times = {(k, s): t for k, t in (("F", 1), ("B", 2), ("I", 1), ("W", 1)) for s in range(4 * spec.stages_per_rank)}
    for colour in (False, True):
        lines = timeline_lines(simulate(table, times), width, colour=colour)
        assert len(lines) == 4
        assert max(len(line.plain) for line in lines) <= width
    assert most_held(table[0]) == {"gpipe": 8, "1f1b": 4, "eager1f1b": 5}.get(name, most_held(table[0]))


@pytest.mark.parametrize("ending", ["html", "png", "svg"])
def test_pictures(ending: str, tmp_path: Path) -> None:
    path = tmp_path / f"schedule.{ending}"
    arguments = ["ZBVZeroBubble", "--stages", "8", "--microbatches", "4", "-o", str(path)]
    assert cli.main(["schedule", *arguments]) == 0
    content = path.read_bytes()
    assert content.startswith({"html": b"<!DOCTYPE html>", "png": b"\x89PNG", "svg": b"<?xml"}[ending])
    if ending == "html":
        assert content.count(b'<rect class="k-F') == 8 * 4
        assert b"rank 0: stages 0, 7" in content
        assert b"simulated: " in content and b"Measured" not in content


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nonsense"], "is unknown; use one of"),
        (["1F1B", "--stages", "8", "--microbatches", "4"], "fewer than the 8 pipeline ranks"),
        (["ZBVZeroBubble", "--stages", "5"], "use stages=4"),
        (["1F1B", "--stages_per_rank", "2"], "leave it out"),
        (["1F1B", "--forward", "-1"], "forward=-1 must be milliseconds"),
        (["1F1B", "-o", "picture.bmp"], "use one of .html, .png, .svg, .pdf"),
    ],
)
def test_refusals(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["schedule", *arguments]) == 1
    assert message in capsys.readouterr().err

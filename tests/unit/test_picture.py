"""The timeline's picture: what stands in it, that it is cheap, and that it leaves matplotlib's global state alone."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from lightning_hybrid.pipeline.picture import draw_timeline
from lightning_hybrid.pipeline.schedule import find_schedule
from lightning_hybrid.pipeline.timeline import Mark, Timeline, simulate


def run(name: str, ranks: int, microbatches: int, stages_per_rank: int = 1, transfer: float = 0.0) -> Timeline:
    table = find_schedule(name).table(ranks, microbatches, stages_per_rank)
    times = {(k, s): t for k, t in (("F", 0.01), ("B", 0.02)) for s in range(ranks * stages_per_rank)}
    return simulate(table, times, transfer=transfer)


def test_numbers_rows_captions_and_legend() -> None:
    measured = run("1F1B", 2, 4, transfer=0.005)
    measured[0] += [Mark("REDUCE", -1, -1, 0.2, 0.21), Mark("OPTIMIZER", -1, -1, 0.21, 0.22)]
    figure = draw_timeline(measured, run("1F1B", 2, 4), title="1F1B, step 3")
    above, below = figure.axes
    numbers = [text.get_text() for text in above.texts]
    assert sorted(numbers) == sorted("0123" * 4)  # forwards and backwards of two stages
    assert [label.get_text() for label in above.get_yticklabels()] == ["stage 0", "stage 1"]
    assert above.get_title(loc="left") == "measured: 170 ms, 29.4% of it idle (bubble)"
    assert below.get_title(loc="left") == "ideal at the same action times: 150 ms, 20.0% of it idle (bubble)"
    assert above.get_xlim() == below.get_xlim()  # one scale, so that lengths compare
    legend = [text.get_text() for text in figure.legends[0].get_texts()]
    assert legend == ["forward", "backward", "optimizer", "exposed communication", "idle (bubble)"]


def test_virtual_stages_are_named() -> None:
    figure = draw_timeline(run("Interleaved1F1B", 2, 4, 2))
    assert len(figure.axes) == 1
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == [
        "rank 0: stages 0, 2",
        "rank 1: stages 1, 3",
    ]


def test_sixteen_stages_and_64_microbatches(tmp_path: Path) -> None:
    begin = time.process_time()
    draw_timeline(run("1F1B", 16, 64)).savefig(tmp_path / "large.png")
    assert time.process_time() - begin < 10  # one by one the boxes take 20 s
    assert (tmp_path / "large.png").stat().st_size > 20_000


def test_no_global_state() -> None:
    before = "matplotlib.pyplot" in sys.modules
    draw_timeline(run("GPipe", 2, 2))
    assert ("matplotlib.pyplot" in sys.modules) == before


@pytest.mark.parametrize("timeline", [{}, {0: []}, {0: [Mark("OPTIMIZER", -1, -1, 0, 1)]}])
def test_nothing_to_draw_is_no_error(timeline: Timeline, tmp_path: Path) -> None:
    draw_timeline(timeline, timeline).savefig(tmp_path / "empty.png")

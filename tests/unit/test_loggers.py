"""What each kind of logger gets of values, pictures and charts; packages that are not installed are stood in for."""

from __future__ import annotations

import re
from importlib import resources
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.loggers.logger import Logger

from lightning_hybrid.archive import Archive
from lightning_hybrid.callbacks import ScalingEfficiency, StepBreakdown
from lightning_hybrid.callbacks.loggers import log_values, show
from lightning_hybrid.metrics.scaling import Scaling
from lightning_hybrid.metrics.throughput import Throughput
from lightning_hybrid.report.figures import draw_breakdown
from lightning_hybrid.report.parts import COLOURS, LABELS, css_class
from tests.unit.test_report import RUNS


class Fake(Logger):
    """A logger whose ``experiment`` notes the calls of the methods that it has."""

    def __init__(self, *methods: str, error: Exception | None = None, **attributes: Any) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.rows: list[tuple[dict[str, float], int | None]] = []
        self.experiment = SimpleNamespace(**{name: self._note(name, error) for name in methods})
        vars(self).update(attributes)

    def _note(self, name: str, error: Exception | None) -> Any:
        def method(*arguments: Any, **options: Any) -> None:
            if error is not None:
                raise error
            self.calls.append((name, *arguments, options))

        return method

    name = version = "fake"

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.rows.append((metrics, step))

    def log_hyperparams(self, *_: Any, **__: Any) -> None: ...


def test_each_logger_gets_what_it_can_show(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    board = Fake("add_figure")
    flow = Fake("log_artifact", "log_text", run_id="7")
    broken = Fake("log_artifact", "log_text", run_id="8", error=RuntimeError("no disk"))
    loggers = [board, flow, broken, Fake(), CSVLogger(tmp_path)]
    rows = [(step, RUNS[0].result.breakdown) for step in (4, 10)]
    figure = draw_breakdown(rows)
    for step in (10, 20):
        path = show(loggers, tmp_path / "new", "step/breakdown", figure, "<p>page</p>", step)
    assert path == tmp_path / "new" / "breakdown.png"
    assert path.read_bytes().startswith(b"\x89PNG")
    assert board.calls[0] == ("add_figure", "step/breakdown", figure, {"global_step": 10, "close": False})
    assert flow.calls[:2] == [
        ("log_artifact", "7", str(path), "step", {}),
        ("log_text", "7", "<p>page</p>", "step/breakdown_chart.html", {}),
    ]
    assert caplog.text.count("did not take the picture") == 1  # once for a logger and a picture, and training goes on
    log_values([board, flow], {"step/time_s": 0.1}, 3)
    assert board.rows == flow.rows == [({"step/time_s": 0.1}, 3)]


class FakeTrainer(SimpleNamespace):
    __hash__ = object.__hash__  # type: ignore[assignment]


def draw(callback: Any, logger: Fake, folder: Path, *arguments: Any) -> None:
    trainer: Any = FakeTrainer(loggers=[logger], strategy=SimpleNamespace(), world_size=8)
    callback._draw(trainer, folder, *arguments)


def test_a_run_is_shown_among_those_of_the_archive(tmp_path: Path) -> None:
    for entry in RUNS:
        Archive(tmp_path / "archive").write(entry)
    flow, callback = Fake("log_artifact", "log_text", run_id="7"), ScalingEfficiency(tmp_path / "archive")
    callback.throughput = Throughput(num_devices=8, seconds=1.0, num_steps=1, samples=60, tokens=60 * 128)
    callback.scaling = Scaling(kind="weak", speedup=6.0, efficiency=0.75, per_doubling=1.8)
    draw(callback, flow, tmp_path, RUNS[0])
    (_, _, picture, _, _), (_, _, page, name, _) = flow.calls
    assert Path(picture).stat().st_size > 10_000
    assert name == "scaling/devices_chart.html"
    assert page.count("<circle") == 5  # the baseline, three that compare, this run
    assert "this run, data 8 x tensor 1 x pipeline 1" in page
    assert "55555" not in page  # which does not compare
    callback.scaling = Scaling(kind="none", speedup=None, efficiency=None, per_doubling=None)
    draw(callback, flow, tmp_path, RUNS[0])
    assert len(flow.calls) == 2  # a run that does not compare is shown nowhere


def test_one_measurement_is_no_course(tmp_path: Path) -> None:
    board, callback = Fake("add_figure"), StepBreakdown()
    callback.history.add(4, RUNS[0].result.breakdown)
    draw(callback, board, tmp_path)
    assert board.calls == []
    callback.history.add(10, RUNS[0].result.breakdown)
    draw(callback, board, tmp_path)
    assert [call[:2] for call in board.calls] == [("add_figure", "step/breakdown")]


def test_pictures_and_page_have_the_same_colours() -> None:
    style = resources.files("lightning_hybrid.report").joinpath("report.css").read_text()
    variables = dict(re.findall(r"(--[a-z-]+): (#[0-9a-f]{6});", style.partition("}")[0]))
    assert COLOURS.keys() == LABELS.keys()
    for part, colour in COLOURS.items():
        (variable,) = set(re.findall(rf"\.{css_class(part)} {{ background: var\((--[a-z-]+)\)", style))
        assert variables[variable] == colour, part

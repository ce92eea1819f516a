"""The report's page: well-formed, needs nothing else, says what entries say and nothing that they do not."""

from __future__ import annotations

import dataclasses
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from lightning_hybrid import cli
from lightning_hybrid.archive import Archive, Entry, Planned
from lightning_hybrid.archive.record import write_history, write_timeline
from lightning_hybrid.metrics.breakdown import PARTS
from lightning_hybrid.metrics.bubble import measure_bubble
from lightning_hybrid.pipeline.schedule import find_schedule
from lightning_hybrid.pipeline.timeline import simulate, table_of
from lightning_hybrid.report import archive_page, run_page
from lightning_hybrid.report.charts import Point, devices_chart
from lightning_hybrid.report.groups import group_runs
from lightning_hybrid.report.html import Html, tag
from lightning_hybrid.report.numbers import count, memory, number, seconds, share, ticks
from tests.browser import CHROMIUM, Browser
from tests.unit.archive_entries import make_entry

EVIL = '</script></style></title><img src=x onerror="window.hacked=1"><script>window.hacked=2</script>\'"&'


def measured(
    name: str, degrees: tuple[int, int, int], *, rate: float, batch: int = 16, schedule: str = "1F1B"
) -> Entry:
    """An entry of a run of which everything was measured: parts that add up to 100 ms, a pipeline's step."""
    entry = make_entry(name, degrees, rate=rate, tokens=128 * rate, time=f"2026-07-31T09:30:{len(name):02d}Z")
    spent = {"compute": 0.05, "communication_tensor": 0.03, "bubble": 0.02}
    values = {"step/time_s": 0.1} | {f"step/{part}_s": spent.get(part, 0.0) for part in PARTS}
    history = write_history((step, values | {"bubble/measured": 0.3, "bubble/ideal": 0.2}) for step in (4, 10, 20))
    timeline, bubble = {}, {}
    if (ranks := degrees[2]) > 1:
        times = {(k, s): t for k, t in (("F", 0.01), ("B", 0.02), ("I", 0.01), ("W", 0.01)) for s in range(2 * ranks)}
        spec = find_schedule(schedule)
        marks = simulate(spec.table(ranks, 4, spec.stages_per_rank), times, transfer=0.005)
        found = measure_bubble(marks, table_of(marks))
        bubble = {
            f"bubble/{key}": getattr(found, key) for key in ("measured", "ideal", "schedule", "imbalance", "overhead")
        }
        timeline = write_timeline(marks)
    result = dataclasses.replace(
        entry.result, step_time=0.1, breakdown=values, bubble=bubble, history=history, timeline=timeline,
        peak_memory_bytes=7_000_000_000, memory={"activations": 5e9}, last_loss=2.5, first_loss=3.5,
    )  # fmt: skip
    settings = dataclasses.replace(entry.settings, schedule=schedule if ranks > 1 else "none")
    data = degrees[0]
    sizes = dataclasses.replace(
        entry.batch, global_size=batch, size_per_data_rank=batch // data, accumulate_grad_batches=1
    )
    planned = Planned(
        step_time=0.08, samples_per_second=1.25 * rate, tokens_per_second=160 * rate, memory_bytes=6e9,
        parts={"compute": 0.04, "recompute": 0.01, "tensor": 0.03}, factors={"compute": 1.25}, runner_up="data 9",
    )  # fmt: skip
    return dataclasses.replace(entry, result=result, settings=settings, batch=sizes, planned=planned)


RUNS = [
    measured("1", (1, 1, 1), rate=10.0),
    measured("22", (2, 1, 1), rate=18.0),  # the same batch: strong, 90 %
    measured("333", (4, 1, 1), rate=32.0, batch=64),  # four times: weak, 80 %
    measured("4444", (1, 1, 4), rate=24.0, schedule="ZBVZeroBubble"),  # strong, 60 %
    measured("55555", (4, 1, 1), rate=999.0, batch=77),  # does not compare
    make_entry("666666", (8, 1, 1), status="oom", rate=None, time="2026-07-31T10:30:00Z"),
]


def hostile() -> Entry:
    """An entry in which every text is an attack, and what lines there are cannot be read."""

    def spoil(value: Any) -> Any:
        if isinstance(value, dict):
            return {
                EVIL if isinstance(k, str) and k in ("torch", "a", "*.up") else k: spoil(v) for k, v in value.items()
            }
        return f"{EVIL}{value}" if isinstance(value, str) else value

    plain = json.loads(measured("evil", (2, 2, 2), rate=5.0).to_json())
    kept = {"id": plain["id"], "time": plain["time"], "updated": plain["updated"]}
    spoiled = spoil({key: value for key, value in plain.items() if key not in kept}) | kept
    spoiled["result"] |= {"status": "failed", "message": EVIL, "history": {"steps": EVIL}, "breakdown": {EVIL: 1.0}}
    spoiled["result"]["bubble"] = {
        "bubble/measured": "Infinity",
        "bubble/slowest_stage": "NaN",
        "bubble/slowdown": "NaN",
    }
    return Entry.from_json(json.dumps(spoiled))


class Reader(HTMLParser):
    """Checks that elements close in order, and takes in text and attributes."""

    VOID = frozenset({"br", "input", "meta", "img"})

    def __init__(self, page: str) -> None:
        super().__init__()
        self.stack: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.text = ""
        self.feed(page)
        self.close()
        assert not self.stack

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in self.VOID:
            self.stack.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.stack.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.stack and self.stack[-1] not in ("script", "style"):
            self.text += data + "\n"


@pytest.fixture(scope="module")
def page() -> str:
    return archive_page(RUNS, "the archive")


def test_pages_are_whole_and_need_nothing_else(page: str) -> None:
    for text in (page, run_page(RUNS[3]), run_page(make_entry()), archive_page([make_entry()], "one")):
        reader = Reader(text)
        assert {"script", "style"} <= set(reader.tags)
        assert all(
            value is not None and value.startswith("#") for key, value in reader.attributes if key in ("src", "href")
        )
        assert "@import" not in text and "url(" not in text and "://" not in text
        ids = [value for key, value in reader.attributes if key == "id"]
        assert len(ids) == len(set(ids))


def test_texts_of_entries_are_text(page: str) -> None:
    for text in (run_page(hostile()), archive_page([*RUNS, hostile()], EVIL)):
        reader = Reader(text)
        assert reader.tags.count("script") == reader.tags.count("style") == 1
        assert "img" not in reader.tags
        assert not [key for key, _ in reader.attributes if key.startswith("on")]
        assert EVIL in reader.text  # it is all there to be read
    assert Reader(str(tag("p", EVIL, title=EVIL))).attributes == [("title", EVIL)]
    assert tag("p", Html("<b>")) == "<p><b></p>"  # the variant that would let it through


def test_a_run_says_what_was_measured() -> None:
    text = Reader(run_page(RUNS[3])).text
    for fact in ("50.0 %", "30.0 ms", "communication, tensor", "ZBVZeroBubble", "rank 0: stages 0, 7", "7 GB", "2.50",
                 "predicted 80.0 ms", "1.25", "runner-up: data 9", "compute × 1.25"):  # fmt: skip
        assert fact in text, fact
    assert "Not recorded" not in text
    assert re.search(r"Measured: \d+ ms, [\d.]+ % of it idle", text)


def test_a_run_says_what_was_not_recorded() -> None:
    text = Reader(run_page(make_entry())).text
    assert text.count("Not recorded: ") == 5  # breakdown, course, timeline, bubble, memory
    entry = make_entry()
    broken = dataclasses.replace(
        entry, result=dataclasses.replace(entry.result, timeline={"0": "x"}, history={"a": "1"})
    )
    assert Reader(run_page(broken)).text.count("Cannot be shown: ") == 2
    stuck = {"0": "0B0 0 1; 0F0 1 2"}  # a backward before its forward has no ideal
    stuck_page = run_page(dataclasses.replace(entry, result=dataclasses.replace(entry.result, timeline=stuck)))
    assert "Measured: 2.00 ms" in stuck_page and "Ideal" not in stuck_page


def test_runs_are_compared_where_they_compare(page: str) -> None:
    (group,) = group_runs(RUNS)
    assert group.baseline.id == "1"
    assert {id_: scaling.kind for id_, scaling in group.scalings.items()} == {
        "22": "strong", "333": "weak", "4444": "strong", "55555": "none"
    }  # fmt: skip
    text = Reader(page).text
    assert "each doubling gained × 1.80" in text
    assert "1 run does not compare with the baseline" in text
    assert "55555: batch: 16 samples a step on 1 device(s) there, 77 on 4 here" in text
    assert text.count("\n90.0 %\n") == text.count("\n80.0 %\n") == text.count("\n60.0 %\n") == 1  # in the table
    other = dataclasses.replace(RUNS[1], settings=dataclasses.replace(RUNS[1].settings, precision="bf16-mixed"))
    assert len(group_runs([RUNS[0], other])) == 2  # another precision is another group
    far = Point(num_devices=8, value=1e308, kind="strong", tip="")  # whatever an archive from strangers says
    chart = devices_chart([far], Point(num_devices=1, value=5e-324, kind="baseline", tip=""), "samples/s")
    assert chart is not None and "nan" not in chart and "inf" not in chart


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        (
            [number(v) for v in (None, 0, 0.01234, 12.345, 123456.7, float("nan"))],
            ["–", "0", "0.0123", "12.3", "123,457", "–"],
        ),
        ([seconds(v) for v in (1.5, 0.0123)], ["1.50 s", "12.3 ms"]),
        ([share(v) for v in (0.1234, None, float("inf"))], ["12.3 %", "–", "–"]),
        ([count(v) for v in (999, 1.5e9)], ["999", "1.5B"]),
        ([memory(v) for v in (None, 12, 1.5e9)], ["–", "12 B", "1.5 GB"]),
        (ticks(33, 6), [0, 10, 20, 30]),
        (ticks(0), [0]),
    ],
)
def test_numbers(written: list[Any], expected: list[Any]) -> None:
    assert written == expected


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for entry in RUNS:
        Archive("archive").write(entry)
    for arguments, says in (
        (["archive"], "6 runs"),
        ([], "6 runs"),
        (["archive/4444.json"], "run 4444"),
        (["archive/44"], "run 4444"),
        (["44"], "run 4444"),
    ):
        assert cli.main(["report", *arguments, "-o", "page.html"]) == 0
        assert capsys.readouterr().out.startswith(f"page.html: {says}, ")
        assert "<!DOCTYPE html>" in Path("page.html").read_text()
    assert cli.main(["report", "elsewhere"]) == 1
    assert "neither an archive with entries nor an entry" in capsys.readouterr().err
    assert cli.main(["report", "archive", "-o", "no/folder.html"]) == 1
    assert "cannot be written" in capsys.readouterr().err


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine")
def test_in_a_browser(tmp_path: Path) -> None:
    """Clicks through an archive's page with a hostile entry: sort, filter, open a run, hover, hide, theme, print."""
    path = tmp_path / "page.html"
    path.write_text(archive_page([*RUNS, hostile()], EVIL), encoding="utf-8")
    with Browser(tmp_path / "profile") as browser:
        browser.resize(1250)
        browser.open(path)
        assert browser.run("typeof window.hacked") == "undefined"
        assert browser.run("document.images.length + document.scripts.length") == 1

        rows = "[...document.querySelectorAll('#runs tbody tr')].filter(r => !r.hidden)"
        ids = f"{rows}.map(r => r.dataset.text.split(' ')[0])"
        head = "[...document.querySelectorAll('#runs th')].find(h => h.textContent == 'tokens/s')"
        browser.run(f"{head}.firstChild.click()")
        assert browser.run(ids)[:3] == ["55555", "333", "4444"]
        browser.run(f"{head}.firstChild.click()")
        assert browser.run(ids)[-1] == "666666"  # without a rate: last in both orders
        type_in = "{{const i = document.getElementById('filter'); i.value = '{}'; i.dispatchEvent(new Event('input'))}}"
        browser.run(type_in.format("zbv"))
        assert browser.run(ids) == ["4444"]
        assert browser.run("document.getElementById('shown').textContent") == "1 of 7"
        browser.run(type_in.format(""))
        browser.run("document.querySelector('[data-status=ok]').click()")
        assert sorted(browser.run(ids)) == ["666666", "evil"]

        browser.run("document.querySelector('a[href=\"#run-4444\"]').click()")
        assert browser.run("document.getElementById('run-4444').open")
        browser.hover("#run-4444 .timeline rect[data-m='2']")
        assert "micro-batch 2" in browser.run("document.getElementById('tip').textContent")
        lit = browser.run("[...document.querySelectorAll('#run-4444 .lit')].map(e => e.dataset.m)")
        assert set(lit) == {"2"} and len(lit) == 2 * 8 * 3  # measured and ideal; 8 stages; F, I and W
        forwards = "[...document.querySelectorAll('#run-4444 svg .k-F')]"
        hidden = f"{forwards}.every(e => getComputedStyle(e).visibility == 'hidden')"
        assert not browser.run(hidden)
        browser.run("document.querySelector('#run-4444 .timeline .legend button[data-k=k-F]').click()")
        assert browser.run(hidden)

        colour = "getComputedStyle(document.body).backgroundColor"
        before = browser.run(colour)
        browser.run("document.getElementById('theme').click()")
        assert browser.run(colour) != before
        for width in (1250, 400):
            browser.resize(width)
            assert (
                browser.run("document.documentElement.scrollWidth") <= width
            )  # tables and charts scroll by themselves
        assert len(browser.call("Page.printToPDF")["data"]) > 10_000
        assert browser.complaints == []
        assert {url.split("#")[0] for url in browser.requests} <= {path.as_uri(), "about:blank"}

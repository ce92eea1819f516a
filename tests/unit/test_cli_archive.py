"""``lightning-hybrid archive``: tables for people, JSON for programs, one sentence for mistakes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rich.console import Console

from lightning_hybrid import cli
from lightning_hybrid.archive import Archive, Entry
from lightning_hybrid.commands import archive as cli_archive
from tests.unit.archive_entries import make_entry

ENTRIES = [
    make_entry("a", time="2026-07-31T08:00:00Z"),
    make_entry("b", (4, 2, 1), rate=1234.5, time="2026-07-31T09:00:00Z"),
    make_entry("c", (8, 1, 1), status="oom", rate=None, time="2026-07-31T10:00:00Z"),
]


@pytest.fixture
def url(tmp_path: Path) -> str:
    for entry in ENTRIES:
        Archive(tmp_path).write(entry)
    return str(tmp_path)


def test_list(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["archive", "list", "--url", url]) == 0
    header, *lines = capsys.readouterr().out.splitlines()
    assert header.split()[:3] == ["id", "status", "d"]
    assert [line.split()[0] for line in lines] == ["a", "b", "c"]
    assert "4 x 2 x 1" in lines[1]
    assert "1,234" in lines[1]
    assert "8 x NVIDIA H200" in lines[1]
    Archive(url).write(make_entry("d", (4, 1, 2, 2), time="2026-07-31T11:00:00Z"))
    assert cli.main(["archive", "list", "--url", url]) == 0
    assert "4 x 1 x 2, 2 replicas" in capsys.readouterr().out.splitlines()[-1]


def test_list_fits_a_narrow_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], url: str
) -> None:
    monkeypatch.setattr(cli_archive, "Console", lambda **_: Console(width=80, force_terminal=True, color_system=None))
    assert cli.main(["archive", "list", "--url", url]) == 0
    assert all(len(line) <= 80 for line in capsys.readouterr().out.splitlines())


@pytest.mark.parametrize(
    ("arguments", "ids"),
    [
        ([], "abc"),
        (["--status", "ok"], "ab"),
        (["--last", "1"], "c"),
        (["--model", "GPT", "--last", "2"], "bc"),
        (["--model", "BERT"], ""),
    ],
)
def test_list_as_json(url: str, capsys: pytest.CaptureFixture[str], arguments: list[str], ids: str) -> None:
    assert cli.main(["archive", "list", "--url", url, "--json", *arguments]) == 0
    documents = json.loads(capsys.readouterr().out)
    assert [Entry.from_json(json.dumps(document)) for document in documents] == [e for e in ENTRIES if e.id in ids]


def test_empty_archive(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for command, answer in {"list": "No such entries in", "best": "No entry of"}.items():
        assert cli.main(["archive", command, "--url", str(tmp_path / "none")]) == 0
        assert capsys.readouterr().out.startswith(answer)
    assert not (tmp_path / "none").exists()


def test_show(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["archive", "show", "b", "--url", url]) == 0
    assert Entry.from_json(capsys.readouterr().out) == ENTRIES[1]


def test_best_says_what_and_why_and_what_it_passed_over(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["archive", "best", "--url", url]) == 0
    out = capsys.readouterr().out
    assert out.startswith("starting from archive entry b: the same model")
    assert "Not tried again: data 8 x tensor 1 x pipeline 1 ran out of memory in c." in out
    assert cli.main(["archive", "best", "--like", "a", "--num_devices", "16", "--json", "--url", url]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["id"], found["degrees"]["data_parallel_size"]) == ("b", 8)
    assert cli.main(["archive", "best", "--num_devices", "3", "--json", "--url", url]) == 0
    assert json.loads(capsys.readouterr().out) is None


def test_mistakes_get_one_sentence(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["archive", "show", "zzz", "--url", url]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("ArchiveError: ")
    assert captured.err.count("\n") == 1
    with pytest.raises(SystemExit) as error:
        cli.main(["archive", "lst"])
    assert error.value.code == 2


@pytest.mark.parametrize(
    ("arguments", "ids"),
    [
        (["--device", "h200"], "abc"),
        (["--device", "A100"], ""),
        (["--num_devices", "4"], ""),
        (["--since", "2026-07-31T09"], "bc"),
        (["--until", "2026-07-31T09"], "ab"),
        (["--precision", "16-true"], ""),
    ],
)
def test_filters(url: str, capsys: pytest.CaptureFixture[str], arguments: list[str], ids: str) -> None:
    assert cli.main(["archive", "list", "--url", url, "--json", *arguments]) == 0
    assert [document["id"] for document in json.loads(capsys.readouterr().out)] == list(ids)


def test_diff(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["archive", "diff", "a", "b", "--url", url]) == 0
    lines = {line.split()[0]: line.split()[1:] for line in capsys.readouterr().out.splitlines()}
    assert lines["result.samples_per_second"] == ["10", "1234.5", "123.45"]
    assert lines["degrees.pipeline_parallel_size"] == ["2", "1", "0.50"]
    assert "software.torch" not in lines
    assert cli.main(["archive", "diff", "a", "a", "--url", url, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {}


def test_export_and_import(url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, other = tmp_path / "hand" / "on.jsonl", str(tmp_path / "other")
    file.parent.mkdir()
    assert cli.main(["archive", "export", str(file), "--url", url, "--status", "ok"]) == 0
    with file.open("a") as lines:
        lines.write("{}\n" + "x" * (5 * 2**20) + "\n")
        lines.write(ENTRIES[2].to_json().replace("\n", "").replace('"c"', '"../../c"') + "\n")
        lines.write(ENTRIES[2].to_json().replace("\n", "") + "\n")
    capsys.readouterr()
    assert cli.main(["archive", "import", str(file), "--url", other]) == 0
    captured = capsys.readouterr()
    assert "3 new, 0 updated, 0 known already, 3 skipped." in captured.out
    assert [f"line {number}:" in captured.err for number in (2, 3, 4, 5, 6)] == [False, True, True, True, False]
    assert Archive(other).list() == ENTRIES
    assert not list(tmp_path.parent.glob("c.json"))
    newer = make_entry("a", updated="2026-08-01T00:00:00Z")
    Archive(url).write(newer)
    assert cli.main(["archive", "import", url, "--url", other]) == 0  # another archive
    assert "0 new, 1 updated, 2 known already, 0 skipped." in capsys.readouterr().out
    assert Archive(other).get("a") == newer
    assert cli.main(["archive", "export", "somewhere.txt", "--url", url]) == 1
    assert cli.main(["archive", "import", str(tmp_path / "none.jsonl"), "--url", url]) == 1


def test_import_of_a_wandb_artifact(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import wandb

    class Api:
        def artifact(self, name: str) -> Api:
            assert name == "team/project/archive-entry-1:latest"
            return self

        def download(self, root: str) -> str:
            (Path(root) / "a.json").write_text(ENTRIES[0].to_json())
            (Path(root) / "b.json").write_text("{")
            return root

    monkeypatch.setattr(wandb, "Api", Api)
    source = "wandb:team/project/archive-entry-1:latest"
    assert cli.main(["archive", "import", source, "--url", str(tmp_path / "new")]) == 0
    assert "1 new, 0 updated, 0 known already, 1 skipped." in capsys.readouterr().out

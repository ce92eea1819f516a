"""Every wrong input of the table is refused by one of our errors, which says what was given and what would be right."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import yaml
from lightning.pytorch.cli import LightningArgumentParser

from lightning_hybrid.cli import main
from lightning_hybrid.errors import HybridError
from tests.unit.wrong_inputs import COMMANDS, GROUPS, WRONG, YAML


@pytest.mark.parametrize("group", GROUPS)
def test_wrong_inputs_are_refused(group: str, tmp_path: Path) -> None:
    faults = []
    for number, (_, given, words) in enumerate(line for line in WRONG if line[0] == group):
        folder = tmp_path / str(number)
        folder.mkdir()
        try:
            GROUPS[group](given, folder)
        except HybridError as error:
            missing = [word for word in words if word not in str(error)]
            if missing:
                faults.append(f"{_shown(given)}: {missing} are not in {str(error)[:300]!r}")
        except BaseException as error:
            faults.append(f"{_shown(given)}: {type(error).__name__}: {str(error)[:300]}")
        else:
            faults.append(f"{_shown(given)} was taken")
    assert not faults, "\n".join(faults)


def test_the_command_line_says_what_is_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "numbers.json").write_text("[1, 2]")
    sizes = {"num_hidden_layers": 4, "hidden_size": 64, "num_attention_heads": 4}
    (tmp_path / "sizeless.json").write_text(json.dumps(sizes))
    faults = []
    for command, words in COMMANDS:
        try:
            code: Any = main(command)
        except SystemExit as end:
            code = end.code
        except BaseException as error:
            faults.append(f"{command}: {type(error).__name__}: {error}")
            continue
        text = capsys.readouterr().err
        if not code or "Traceback" in text or any(word not in text for word in words):
            faults.append(f"{command}: exit code {code}, {text[-300:]!r}")
    assert not faults, "\n".join(faults)


def test_yaml_of_a_lightning_cli_says_what_is_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    parser = LightningArgumentParser()
    parser.add_lightning_class_args(L.Trainer, "trainer")
    faults = []
    for text, words in YAML:
        said = ""
        try:
            trainer = {"accelerator": "cpu", "devices": 2, "logger": False, **yaml.safe_load(text)}
            parser.instantiate_classes(parser.parse_object({"trainer": trainer}))
        except (SystemExit, ValueError) as error:
            said = f"{error}{capsys.readouterr().err}"
        missing = [word for word in words if word not in said]
        if missing:
            faults.append(f"{text}: {missing} are not in {said[-600:]!r}" if said else f"{text} was taken")
    assert not faults, "\n".join(faults)


def test_the_table_is_large_enough() -> None:
    assert len(WRONG) + len(COMMANDS) + len(YAML) >= 150
    assert {line[0] for line in WRONG} == set(GROUPS)
    assert all(len(words) >= 2 for _, _, words in WRONG)


def _shown(given: Any) -> str:
    return repr(given)[:120]

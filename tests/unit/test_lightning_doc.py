"""The check-list in ``docs/lightning.md`` names tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def missing(text: str) -> list[str]:
    """Return the names of tests in a table's last column that there are not."""
    found = []
    for line in text.splitlines():
        module = ""
        for name in re.findall(r"`([^`]+)`", line.rsplit(" | ", 1)[-1]) if line.startswith("| ") else []:
            if re.fullmatch(r"unit/\w+\.py|[\w.]+", name):
                path = ROOT / "tests" / name if "/" in name else ROOT / f"tests/distributed/test_{name}.py"
                is_there = path.is_file() or name in ("equality.trace", "val_of_list", "val_total")
            else:
                given, _, function = name.partition("::")
                module = given or module
                text_of = (ROOT / f"tests/distributed/test_{module}.py").read_text()
                is_there = f"def {function.partition('[')[0]}" in text_of
            found += [] if is_there else [name]
    return found


def test_what_is_named_exists() -> None:
    text = (ROOT / "docs" / "lightning.md").read_text()
    assert not missing(text)
    assert len(re.findall(r"`\w*::test_", text)) > 30  # they are looked at


def test_wrong_variant_a_test_that_is_not_there_is_seen() -> None:
    assert missing("| item | here | `hooks::test_order`, `::test_nothing`, `nowhere` |") == [
        "::test_nothing",
        "nowhere",
    ]

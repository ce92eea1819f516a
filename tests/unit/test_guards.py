"""The guards of tests/conftest.py fail a test that leaves something behind (each guard shown with a leaking test)."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

CONFTEST = (Path(__file__).parents[1] / "conftest.py").read_text()

LEAKS = {
    "environment": ("import os\ndef test(): os.environ['LEAKED'] = '1'", "LEAKED='1' (was None)"),
    "removed variable": ("import os\ndef test(): del os.environ['HOME']", "HOME=None (was "),
    "process": (
        "import subprocess\ndef test(): subprocess.Popen(['sleep', '0.5'])",
        "child process * sleep 0.5",
    ),
    "process group": (
        "import torch.distributed as dist\ndef test():\n"
        "    dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)",
        "the default process group",
    ),
}


@pytest.mark.parametrize("kind", LEAKS)
def test_leak_fails_the_test(pytester: pytest.Pytester, kind: str):
    source, message = LEAKS[kind]
    pytester.makeconftest(CONFTEST)
    pytester.makepyfile(source)
    result = pytester.runpytest_inprocess("-p", "no:cacheprovider")
    if kind == "process":
        os.waitpid(-1, 0)  # else the guard of this very test finds it too
    result.assert_outcomes(passed=1, errors=1)
    result.stdout.fnmatch_lines([f"*The test left behind: {message.replace('[', '[[]')}*"])


def test_clean_test_passes(pytester: pytest.Pytester):
    pytester.makeconftest(CONFTEST)
    pytester.makepyfile("def test(monkeypatch): monkeypatch.setenv('SET', '1')")
    pytester.runpytest_inprocess("-p", "no:cacheprovider").assert_outcomes(passed=1)

"""sdist -> wheel -> import, beside a user's own ``callbacks/`` folder; from nothing but the built files."""

from __future__ import annotations

import importlib
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # mypy brings it on Python 3.10

ROOT = Path(__file__).parents[2]
DATA = {"lightning_hybrid/py.typed", "lightning_hybrid/report/report.css", "lightning_hybrid/report/report.js"}


def run_python(*arguments: str, cwd: Path, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, *arguments], cwd=cwd, env=os.environ | environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.strip()


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with the sdist of a copy of this checkout, and the wheel built from that sdist."""
    folder = tmp_path_factory.mktemp("packaging")
    ignore = shutil.ignore_patterns(".*", "build", "dist", "*.egg-info", "__pycache__", "archive*", "wandb", "runs")
    shutil.copytree(ROOT, folder / "checkout", symlinks=True, ignore=lambda path, names: ignored(ignore, path, names))
    run_python("-m", "build", "--no-isolation", "--outdir", str(folder), str(folder / "checkout"), cwd=folder)
    return folder


def ignored(patterns, path: str, names: list[str]) -> set[str]:
    """Generated folders at the top of the checkout; ``lightning_hybrid/archive`` is a package."""
    return set(patterns(path, names)) if Path(path) == ROOT else {name for name in names if name == "__pycache__"}


def package_folders() -> dict[str, Path]:
    """Dotted name of each folder of the library -> the folder, ``callbacks`` by its link."""
    core = ROOT / "lightning_hybrid"
    folders = [path.parent for path in [*core.rglob("*.py"), *(core / "callbacks").rglob("*.py")]]
    return {".".join(folder.relative_to(ROOT).parts): folder for folder in folders}


def test_packages_are_the_folders_on_disk():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    assert sorted(settings["packages"]) == sorted(package_folders())
    for name, folder in package_folders().items():
        assert (folder / "__init__.py").is_file(), name


def test_wheel_holds_every_module_and_nothing_else(dist: Path):
    (wheel,) = dist.glob("*.whl")
    files = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    modules = [(name.replace(".", "/"), path) for name, path in package_folders().items()]
    expected = {f"{name}/{module.name}" for name, path in modules for module in path.glob("*.py")}
    assert files == expected | DATA


def test_sdist_holds_what_a_packager_needs(dist: Path):
    (sdist,) = dist.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"CHANGELOG.md", "LICENSE", "README.md", "examples/gpt/train.py", "tests/ranks.py"} <= names


PROGRAM = """
import callbacks, lightning_hybrid, lightning_hybrid.callbacks
print(callbacks.MINE, lightning_hybrid.__file__, lightning_hybrid.callbacks.__file__)
"""


def test_installed_wheel_lives_beside_a_users_callbacks(dist: Path, tmp_path: Path):
    (wheel,) = dist.glob("*.whl")
    site, user = tmp_path / "site", tmp_path / "user"
    run_python("-m", "pip", "install", "--quiet", "--no-deps", "--target", str(site), str(wheel), cwd=tmp_path)
    (user / "callbacks").mkdir(parents=True)
    (user / "callbacks" / "__init__.py").write_text("MINE = 'the user has this one'\n")
    printed = run_python("-c", PROGRAM, cwd=user, PYTHONPATH=str(site))
    package = site / "lightning_hybrid"
    assert printed == f"the user has this one {package / '__init__.py'} {package / 'callbacks' / '__init__.py'}"


def test_top_level_callbacks_is_refused():
    with pytest.raises(ImportError, match=r"as `lightning_hybrid\.callbacks`"):
        importlib.import_module("callbacks")


def test_commands_can_be_imported():
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert set(scripts) == {"lightning-hybrid"}
    for target in scripts.values():
        module, _, function = target.partition(":")
        assert callable(getattr(importlib.import_module(module), function))

"""Imports go one way: errors <- layout <- mesh <- parts <- parallelize <- strategy; and pure parts stay pure."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PURE = ("errors", "layout", "describing.memory", "metrics", "planner", "archive")
PURE += tuple(f"pipeline.{name}" for name in ("partition", "schedule", "timeline"))
LEVELS = {
    "errors": 0,
    "layout": 1,
    "mesh": 2,
    "tensor_parallel": 3,
    "data_parallel": 3,
    "sharding": 3,
    "activation_checkpoint": 3,
}
LEVELS |= {"parallelize": 4, "strategy": 5, "callbacks": 6}


def imported_names(source: str) -> Iterator[str]:
    """Dotted names that a source imports when it runs; ``from a import b`` gives ``a.b``."""
    nodes = [ast.parse(source)]
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            nodes += node.orelse
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: relative import; write the absolute one"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        else:
            nodes += ast.iter_child_nodes(node)


def starts(name: str, prefix: str) -> bool:
    return f"{name}.".startswith(f"{prefix}.")


def level_of(name: str) -> int | None:
    return LEVELS.get(name.split(".")[0])


def violations(module: str, source: str) -> list[str]:
    """What the module ``lightning_hybrid.<module>`` may not import, one line each."""
    found = []
    pure, own_level = any(starts(module, part) for part in PURE), level_of(module)
    for name in imported_names(source):
        inner = name.removeprefix("lightning_hybrid.")
        if pure and any(starts(name, other) for other in ("lightning", "pytorch_lightning", "torch.distributed")):
            found.append(f"{module} is pure, but imports {name}")
        if inner == name:
            continue
        is_command = module in ("cli", "__main__") or starts(module, "commands")
        if (starts(inner, "cli") or starts(inner, "commands")) and not is_command:
            found.append(f"{module} imports {name}; nothing imports the command line")
        if starts(inner, "callbacks") and not starts(module, "callbacks") and not is_command:
            found.append(f"{module} imports {name}; the core never imports callbacks")
        level = level_of(inner)
        if level is not None and own_level is not None and level > own_level:
            found.append(f"{module} (level {own_level}) imports {name} (level {level})")
    return found


def modules() -> list[tuple[str, Path]]:
    core = ROOT / "lightning_hybrid"
    paths = [(path.relative_to(core), path) for path in core.rglob("*.py") if "callbacks" not in path.parts]
    paths += [(path.relative_to(ROOT), path) for path in (ROOT / "callbacks").rglob("*.py")]
    return [(".".join(name.with_suffix("").parts).removesuffix(".__init__"), path) for name, path in paths]


def test_imports_go_one_way():
    found = [line for module, path in modules() for line in violations(module, path.read_text())]
    assert not found, "\n".join(found)


def test_all_modules_were_seen():
    assert {"errors", "layout", "callbacks", "pipeline.schedule"} <= {module for module, _ in modules()}


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("layout", "import lightning.pytorch as pl"),
        ("metrics.bubble", "def f():\n    from torch import distributed"),
        ("pipeline.step", "from lightning_hybrid.callbacks import BubbleRatio"),
        ("strategy", "from lightning_hybrid import cli"),
        ("layout", "from lightning_hybrid.mesh import build_mesh"),
    ],
)
def test_wrong_imports_are_found(module: str, source: str):
    assert violations(module, source)


def test_imports_for_types_alone_are_free():
    assert not violations("layout", "if TYPE_CHECKING:\n    import lightning")

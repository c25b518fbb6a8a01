"""The direction of imports, read from the sources: down only, no peer imports another, one door to the network."""

from __future__ import annotations

import ast
from pathlib import Path

import weft

ROOT = Path(weft.nn.__file__).parent.parent
LEVELS = {
    "core": 0,
    "store": 1,
    "data": 2,
    "kernels": 3,
    **dict.fromkeys(("nn", "comm", "partition", "cost"), 4),
    "chunks": 5,
    "strategies": 6,
    **dict.fromkeys(("planner", "engine", "report"), 7),
    "cli": 8,
}
NETWORK = {"comm", "engine/launch.py"}


def imports(path: Path) -> set[str]:
    """Full names of the modules that a file imports, wherever in it."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: relative import"
            assert node.module
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def test_imports_go_down() -> None:
    for path in ROOT.rglob("*.py"):
        place = path.relative_to(ROOT).parts
        here = place[0].removesuffix(".py")
        if here not in LEVELS:
            continue
        for name in imports(path):
            parts = name.split(".")
            if parts[0] != "weft" or len(parts) < 2 or parts[1] == here:
                continue
            if parts[1] == "_native":
                assert here == "core", f"{path} imports the extension past core.native"
                continue
            assert LEVELS.get(parts[1], 9) < LEVELS[here], f"{path} imports {name}: upward or sideways"


def test_one_door_to_the_network() -> None:
    for path in ROOT.rglob("*.py"):
        place = path.relative_to(ROOT)
        if any(name.startswith("torch.distributed") for name in imports(path)):
            assert place.parts[0] in NETWORK or str(place) in NETWORK, f"{path} imports torch.distributed"


def test_nothing_is_unpickled() -> None:
    for path in ROOT.rglob("*.py"):
        text = path.read_text()
        for word in ("allow_pickle=True", "pickle.load", "torch.load("):
            assert word not in text, f"{path}: {word}"

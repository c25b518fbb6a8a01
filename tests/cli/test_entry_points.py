"""Installed packages declare extensions as entry points; weft imports one when a name is not built in."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from copy import copy
from pathlib import Path

import numpy as np
import pytest

import weft
from tests.cli.test_extensions import GRAPH
from tests.lib.running import complaints, losses
from weft.cli.main import main
from weft.partition import METHODS
from weft.strategies import STRATEGIES

CODE = f'''
import torch

import weft
from weft.strategies.vertex.plan import HybridPlan


def doubled(logits, labels):
    return 2 * torch.nn.functional.cross_entropy(logits, labels, reduction="none")


def errors(logits, labels):
    return (logits.argmax(1) != labels).float().mean()


errors.higher_is_better = False


def tiny():
    return weft.load("{GRAPH}")


def halves(graph, num_parts):
    return [vertex * num_parts // graph.num_vertices for vertex in range(graph.num_vertices)]


class DeclaredPlan(HybridPlan):
    name = "declared"


def net(num_features, num_classes):
    return weft.nn.GCN(num_features, out_width=num_classes, hidden=8)
'''
DECLARED = """
[weft.loss]
doubled = declared_for_test:doubled
bce = declared_for_test:missing
[weft.metric]
errors = declared_for_test:errors
accuracy = declared_for_test:missing
[weft.dataset]
tiny = declared_for_test:tiny
[weft.partition]
halves = declared_for_test:halves
missing = declared_for_test:missing
[weft.strategy]
declared = declared_for_test:DeclaredPlan
renamed = declared_for_test:DeclaredPlan
[weft.model]
net = declared_for_test:net
number = sys:maxsize
"""
FLAGS = ["--dtype", "float64", "--epochs", "3", "--quiet"]


@pytest.fixture(autouse=True)
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An installed package `declared-for-test`, and an empty current folder; its names are removed afterwards."""
    install(tmp_path / "packages", "declared-for-test", DECLARED)
    (tmp_path / "packages" / "declared_for_test.py").write_text(CODE)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path / "packages")])
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    before = [copy(registry) for registry in (METHODS, STRATEGIES)]
    yield tmp_path / "packages"
    sys.modules.pop("declared_for_test", None)
    for registry, entries in zip((METHODS, STRATEGIES), before, strict=True):
        registry.clear()  # type: ignore[attr-defined]
        registry.update(entries)  # type: ignore[attr-defined]


def install(folder: Path, name: str, declared: str) -> None:
    """Create the metadata of an installed package.

    Args:
        folder: Folder in Python's path.
        name: Name of the package.
        declared: Text of its entry_points.txt.
    """
    metadata = folder / f"{name.replace('-', '_')}-1.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(declared)


def test_names_of_packages_are_found() -> None:
    assert main(["train", GRAPH, *FLAGS, "--metrics", "accuracy", "--out", "built-in"]) == 0
    assert "declared_for_test" not in sys.modules
    flags = ["--loss", "doubled", "--metrics", "errors,accuracy", "--out", "one"]
    assert main(["train", "tiny", *FLAGS, *flags]) == 0
    assert losses(Path("one"))[0] == pytest.approx(2 * losses(Path("built-in"))[0], rel=1e-12)
    assert main(["partition", "tiny", "--parts", "2", "--method", "halves", "--out", "book.safetensors"]) == 0


def test_local_ranks_find_them() -> None:
    flags = ["--loss", "doubled", "--metrics", "errors", "--model", "net"]
    assert main(["train", "tiny", *FLAGS, *flags, "--out", "one"]) == 0
    placement = ["--strategy", "declared", "--workers", "2", "--partition", "halves", "--out", "two"]
    assert main(["train", "tiny", *FLAGS, *flags, *placement]) == 0
    assert losses(Path("two")) == pytest.approx(losses(Path("one")), rel=1e-9)
    # The run's file names the model, which weft imports, because an installed package declares it.
    assert main(["predict", "two", "--out", "logits.npy"]) == 0
    assert np.load("logits.npy").shape == (60, 3)
    assert isinstance(weft.Run.open("one").model, weft.nn.Stack)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ["--strategy", "hybrid", "--partition", "missing"],
            "partition missing: the package declared-for-test declares it as declared_for_test:missing, which cannot "
            "be imported (AttributeError: module 'declared_for_test' has no attribute 'missing'): update or uninstall",
        ),
        (["--strategy", "renamed"], "strategy renamed: declared_for_test.DeclaredPlan.name must be 'renamed'"),
        (
            ["--model", "number"],
            "declares it as sys:maxsize, which is a int, no function or class: update",
        ),
        (["--model", "net", "--heads", "8"], "heads has no effect on a custom model"),
        (["--model", "nett"], "unknown model 'nett'"),
    ],
)
def test_mistakes_are_one_line(flags: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", GRAPH, *FLAGS, *flags]) == 2
    (line,) = complaints(capsys.readouterr().err)
    assert message in line


def test_two_packages_with_one_name(package: Path, capsys: pytest.CaptureFixture[str]) -> None:
    install(package, "another", "[weft.loss]\ndoubled = another:doubled\n")
    assert main(["train", GRAPH, *FLAGS, "--loss", "doubled"]) == 2
    (line,) = complaints(capsys.readouterr().err)
    assert "loss doubled: the packages another and declared-for-test both declare it: uninstall one of them" in line

"""Modules of `--import` register functions and classes, which flags then accept by name."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from copy import copy
from pathlib import Path

import numpy as np
import pytest
import torch

import weft
from tests.lib.running import losses
from weft.cli.main import main
from weft.data.io import datasets
from weft.partition import METHODS
from weft.strategies import STRATEGIES
from weft.training.custom_functions import REGISTERED
from weft.training.flag_checks import open_book

GRAPH = "sbm:vertices=60,degree=4,classes=3,features=5"
MODULE = f'''
import torch
import weft
from weft.strategies.vertex.plan import HybridPlan


@weft.register("loss")
def doubled(logits, labels):
    return 2 * torch.nn.functional.cross_entropy(logits, labels, reduction="none")


@weft.register("metric")
def errors(logits, labels):
    return (logits.argmax(1) != labels).float().mean()


errors.higher_is_better = False


@weft.register("dataset")
def tiny():
    return weft.load("{GRAPH}")


@weft.register("partition")
def halves(graph, num_parts):
    return [vertex * num_parts // graph.num_vertices for vertex in range(graph.num_vertices)]


@weft.register("strategy")
class RenamedPlan(HybridPlan):
    name = "renamed"
'''
FLAGS = ["--import", "mine_for_test", "--dtype", "float64", "--epochs", "3", "--quiet"]


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A module of extensions in the current folder; its names are removed afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    registries = [METHODS, STRATEGIES, datasets.REGISTERED, *REGISTERED.values()]
    before = [copy(registry) for registry in registries]
    path = tmp_path / "mine_for_test.py"
    path.write_text(MODULE)
    yield path
    sys.modules.pop("mine_for_test", None)
    for registry, entries in zip(registries, before, strict=True):
        registry.clear()
        registry.update(entries)


@pytest.mark.usefixtures("module")
def test_flags_accept_registered_names(tmp_path: Path) -> None:
    assert main(["train", "tiny", *FLAGS, "--loss", "doubled", "--metrics", "errors,accuracy", "--out", "a"]) == 0
    assert main(["train", GRAPH, "--dtype", "float64", "--epochs", "3", "--quiet", "--out", "b"]) == 0
    run = weft.Run.open("a")
    assert losses(Path("a"))[0] == pytest.approx(2 * losses(Path("b"))[0], rel=1e-12)
    assert run.summary["val_errors"] == pytest.approx(1 - run.summary["val_accuracy"])
    command = ["predict", "a", "--import", "mine_for_test", "--out", str(tmp_path / "logits.npy")]
    assert main(command) == 0
    assert np.load(tmp_path / "logits.npy").shape == (60, 3)
    assert (
        main(["partition", "tiny", *FLAGS[:2], "--parts", "2", "--method", "halves", "--out", "book.safetensors"]) == 0
    )
    book = weft.partition.PartitionBook.open("book.safetensors", weft.load("tiny"))
    assert book.part.tolist() == [0] * 30 + [1] * 30


@pytest.mark.usefixtures("module")
def test_local_ranks_import_the_module() -> None:
    assert main(["train", "tiny", *FLAGS, "--loss", "doubled", "--metrics", "errors", "--out", "one"]) == 0
    flags = ["--strategy", "renamed", "--workers", "2", "--partition", "halves", "--out", "two"]
    assert main(["train", "tiny", *FLAGS, "--loss", "doubled", "--metrics", "errors", *flags]) == 0
    assert losses(Path("two")) == pytest.approx(losses(Path("one")), rel=1e-9)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "--import mine_for_test: cannot be imported (ModuleNotFoundError: No module named 'mine_for_test')"),
        ("1 / 0", "--import mine_for_test: cannot be imported (ZeroDivisionError: division by zero)"),
        ("import weft; weft.register('los')", "unknown kind of extension 'los': did you mean 'loss'?"),
        (
            "import weft\n@weft.register('partition')\ndef metis(): ...",
            "weft.register: weft has a partition named metis: rename yours",
        ),
        (
            "import weft\n@weft.register('loss')\ndef bce(): ...",
            "loss: weft has a built-in named bce: rename your function",
        ),
        (
            "import weft\n@weft.register('partition')\ndef halves(graph, num): return [0.5] * 60",
            "part: float32 [60] is no partition of",
        ),
        ("import weft\n@weft.register('partition')\ndef halves(graph, num): return [7] * 60", "the parts are 7 to 7"),
    ],
)
def test_mistakes_are_one_line(
    text: str | None, message: str, module: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    module.write_text(text or "")
    if text is None:
        module.unlink()
    flags = ["--strategy", "hybrid", "--partition", "halves"] if "halves" in str(text) else []
    flags += ["--loss", "bce"] if "bce" in str(text) else []
    assert main(["train", GRAPH, *FLAGS, *flags]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


def test_no_file_names_a_module(module: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("run.toml").write_text(f'import = "{module.stem}"\n')
    for arguments in (["train", "--config", "run.toml"], ["sweep", "run.toml"]):
        assert main([*arguments, GRAPH]) == 2
        assert "run.toml: unknown option 'import'" in capsys.readouterr().err
    assert module.stem not in sys.modules


def test_an_array_is_a_partition(tmp_path: Path) -> None:
    graph = weft.load(GRAPH)
    part = torch.arange(60) % 3
    book = weft.partition.PartitionBook.of(graph, part.tolist())
    assert (book.num_parts, book.part.tolist()) == (3, part.tolist())
    book.save(tmp_path / "book.safetensors")
    assert weft.partition.PartitionBook.open(tmp_path / "book.safetensors", graph).quality.cut == book.quality.cut
    path = tmp_path / "parts.npy"
    np.save(path, part)
    assert open_book(str(path), 3, graph).part.tolist() == part.tolist()
    reordered = weft.load(GRAPH, order="degree")
    assert torch.equal(open_book(str(path), 3, reordered).part.long(), part[reordered.ids])
    for values, message in [(part[1:], r"int64 \[59\] is no partition"), (part + 1, "the parts are 1 to 3")]:
        np.save(path, values)
        with pytest.raises(weft.InputError, match=f"parts.npy: part: {message}"):
            open_book(str(path), 3, graph)
    path.write_bytes(b"no array")
    with pytest.raises(weft.InputError, match=r"parts.npy"):
        open_book(str(path), 3, graph)

"""Partition books are saved atomically and opened unchanged, for their graph only; the command writes them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import weft
from tests.lib.graph_checks import assert_one_line
from weft.cli.main import main
from weft.data import Graph, load, reorder
from weft.partition import PartitionBook, PartitionOptions, make_book
from weft.partition.book import checksum, read
from weft.utils.errors import InputError

RECIPE = "rmat:60,300"


@pytest.fixture
def graph() -> Graph:
    return load(RECIPE)


def test_opened_books_equal_saved_ones(graph: Graph, tmp_path: Path) -> None:
    book = weft.partition.make_book(graph, 3, method="fennel", options=PartitionOptions(stream="random", seed=2**40))
    path = tmp_path / "new" / "book.safetensors"
    book.save(path)
    opened = PartitionBook.open(path, graph)
    assert torch.equal(opened.part, book.part)
    for field in ("num_parts", "method", "options", "fingerprint", "quality"):
        assert getattr(opened, field) == getattr(book, field), field
    assert list(path.parent.iterdir()) == [path]


def test_parts_without_vertices(graph: Graph, tmp_path: Path) -> None:
    part = torch.full((60,), 2, dtype=torch.int32)
    quality = weft.partition.Quality.measure(graph, part, 4, seconds=0.0)
    book = PartitionBook(part=part, num_parts=4, method="mine", fingerprint=graph.fingerprint, quality=quality)
    book.save(tmp_path / "book")
    opened = PartitionBook.open(tmp_path / "book", graph)
    assert opened.quality.vertices == (0, 0, 60, 0)
    assert opened.members(0).tolist() == []
    assert opened.members(2).tolist() == list(range(60))


def test_a_book_is_replaced_atomically(graph: Graph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "book"
    make_book(graph, 2, method="range").save(path)
    before = path.read_bytes()

    def fail(*_: object) -> None:
        raise OSError("no space left")

    with monkeypatch.context() as patch:
        patch.setattr("weft.utils.files.file_writing.sync", fail)
        with pytest.raises(OSError, match="no space left"):
            make_book(graph, 3, method="range").save(path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]
    make_book(graph, 3, method="range").save(path)
    assert PartitionBook.open(path, graph).num_parts == 3


def test_other_files_are_not_replaced(graph: Graph, tmp_path: Path) -> None:
    book = make_book(graph, 2, method="range")
    (tmp_path / "notes").write_text("mine")
    save_file({"part": book.part}, tmp_path / "tensors")
    for name, message in (("notes", "is no partition book"), ("tensors", "is no partition book"), ("", "is a folder")):
        with pytest.raises(InputError) as error:
            book.save(tmp_path / name)
        assert_one_line(error, tmp_path / name, message)
    assert (tmp_path / "notes").read_text() == "mine"


@pytest.mark.parametrize("other", [load("rmat:60,301"), reorder(load(RECIPE), "degree")])
def test_a_book_of_another_graph(graph: Graph, tmp_path: Path, other: Graph) -> None:
    make_book(graph, 2, method="range").save(tmp_path / "book")
    with pytest.raises(InputError) as error:
        PartitionBook.open(tmp_path / "book", other)
    assert_one_line(error, tmp_path / "book", "another graph", graph.fingerprint[:12], "--order", "weft partition")


def cut_short(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def rewrite(path: Path, **changes: str) -> None:
    metadata, part = read(path)
    save_file({"part": part}, path, metadata | changes)


def write_book(path: Path, part: torch.Tensor, **changes: object) -> None:
    """Replace the content of a book, with a matching checksum."""
    metadata, _ = read(path)
    about = json.dumps(json.loads(metadata["about"]) | changes)
    save_file({"part": part}, path, metadata | {"about": about, "sha256": checksum(about, part)})


PARTS = torch.arange(60, dtype=torch.int32) % 2


@pytest.mark.parametrize(
    ("part", "changes", "message"),
    [
        (PARTS + 1, {}, "'part' goes from 1 to 2 in 2 parts"),
        (PARTS - 1, {}, "'part' goes from -1 to 0 in 2 parts"),
        (PARTS[:59], {}, "[59], not int32 of [60]"),
        (PARTS.long(), {}, "torch.int64 of shape [60]"),
        (PARTS.float(), {}, "torch.float32 of shape [60]"),
        (PARTS.view(30, 2), {}, "[30, 2], not int32 of [60]"),
        (PARTS, {"num_parts": 1}, "'part' goes from 0 to 1 in 1 parts"),
        (PARTS, {"num_parts": "2"}, "'num_parts' is '2'"),
        (PARTS, {"quality": {"cut": 3}}, "KeyError"),
        (PARTS, {"more": 3}, "TypeError"),
        (PARTS, {"fingerprint": 3}, "another graph"),
    ],
)
def test_a_book_with_other_content(
    graph: Graph, tmp_path: Path, part: torch.Tensor, changes: dict[str, object], message: str
) -> None:
    """A book with a right checksum but invalid parts or metadata is refused."""
    path = tmp_path / "book"
    make_book(graph, 2, method="range").save(path)
    write_book(path, PARTS)
    assert torch.equal(PartitionBook.open(path, graph).part, PARTS)
    write_book(path, part.contiguous(), **changes)
    with pytest.raises(InputError) as error:
        PartitionBook.open(path, graph)
    assert_one_line(error, path, message, "weft partition")


def other_seconds(path: Path) -> None:
    about = json.loads(read(path)[0]["about"])
    about["quality"]["seconds"] = 0.0
    rewrite(path, about=json.dumps(about))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: path.unlink(), "no such file"),
        (lambda path: path.write_bytes(b""), "cannot be read"),
        (lambda path: path.write_text("part,vertex\n0,1\n"), "cannot be read"),
        (cut_short, "cannot be read"),
        (flip_a_bit, "is damaged"),
        (other_seconds, "is damaged"),
        (lambda path: rewrite(path, version="2"), "has version 2, but this weft reads versions up to 1: upgrade weft"),
        (lambda path: rewrite(path, format="weft-graph"), "is no partition book"),
        (lambda path: save_file({"parts": torch.zeros(60)}, path), "cannot be read"),
    ],
)
def test_a_damaged_book(graph: Graph, tmp_path: Path, damage: Callable[[Path], None], message: str) -> None:
    path = tmp_path / "book"
    make_book(graph, 2, method="range").save(path)
    damage(path)
    with pytest.raises(InputError) as error:
        PartitionBook.open(path, graph)
    assert_one_line(error, path, message, "weft partition" if "version" not in message else "upgrade weft")


def test_the_command(
    graph: Graph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["partition", RECIPE, "--parts", "3", "--method", "balanced", "--slack", "0.2", "--seed", "5"]) == 0
    printed = capsys.readouterr().out
    book = PartitionBook.open(tmp_path / "books" / "rmat-60-300-balanced-3.safetensors", load(RECIPE, seed=5))
    assert (book.num_parts, book.options["slack"], book.options["seed"]) == (3, 0.2, 5)
    for text in ("remote vertices", f"cut {book.quality.cut:,} of 300 edges", "min/max", "rmat-60-300-balanced-3"):
        assert text in printed
    assert main(["partition", RECIPE, "--order", "bfs", "--parts", "2", "--out", "here"]) == 0
    assert PartitionBook.open(tmp_path / "here", reorder(graph, "bfs")).method == "metis"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--parts", "61"], "--parts 61: rmat"),
        (["--parts", "0"], "--parts 0"),
        (["--parts", "2", "--method", "fenel"], "unknown method 'fenel': did you mean 'fennel'?"),
        (["--parts", "2", "--slack", "-1"], "--slack -1.0: give at least 0"),
        (["--parts", "2", "--stream", "ids"], "unknown --stream 'ids'"),
        (["--parts", "2", "--out", "."], "is a folder"),
        ([], "the following arguments are required: --parts"),
    ],
)
def test_errors_of_the_partition_command(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["partition", RECIPE, *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("weft: error: ")
    assert message in captured.err
    assert captured.err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []

"""Edge lists in text and .npy files are read; an error names the wrong line."""

from __future__ import annotations

import gzip
import random
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.lib.graph_checks import assert_one_line, same_graph
from weft.cli.main import main
from weft.data import Graph, load, read_edges
from weft.data.tables import text_table
from weft.runtime.memory import limit as module
from weft.utils.errors import InputError


def expected(weight: list[float] | None = None) -> Graph:
    return Graph.from_edges(
        torch.tensor([0, 3, 3, 2]),
        torch.tensor([1, 1, 1, 2]),
        weight=None if weight is None else torch.tensor(weight),
        name="g",
    )


@pytest.mark.parametrize(
    "content",
    [
        "0 1\n3 1\n3 1\n2 2\n",
        "0 1\n3 1\n3 1\n2 2",
        "# a comment\n%another\n\n0 1\r\n  3\t1  \n\n # indented\n3 1\n2 2\n\n",
        "source,target\n0,1\n3, 1\n3,1\n2,2\n",
        "# made by hand\nfrom;to\n0;1\n3;1\n3;1\n2;2\n",
        "+0 1\n03 1\n3 1\n2 2\n",
        "\ufeff0 1\n3 1 # after an edge\n3 1\t#\n2 2\n",
    ],
)
@pytest.mark.parametrize("suffix", ["txt", "csv", "tsv.gz"])
def test_forms_of_text(content: str, suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"g.{suffix}"
    path.write_bytes(gzip.compress(content.encode()) if suffix.endswith("gz") else content.encode())
    same_graph(load(path), expected())


def test_weights(tmp_path: Path) -> None:
    path = tmp_path / "g.csv"
    path.write_text("source,target,weight\n0,1,0.5\n3,1,-2e3\n3,1,.25\n2,2,7\n")
    same_graph(load(path), expected([0.5, -2000.0, 0.25, 7.0]))


@pytest.mark.parametrize(
    ("content", "parts"),
    [
        ("0 1\n2 x\n", ["line 2", "'2 x'", "'x' is no number"]),
        ("# c\n\n0 1\n0 1 2\n", ["line 4", "'0 1 2'", "3 columns, not 2"]),
        ("a b\n0 1\n2\n", ["line 3", "'2'", "1 columns, not 2"]),
        ("0,1\n1,,2\n", ["line 2", "'1,,2'", "3 columns, not 2"]),
        ("0,1\n1,2,\n", ["line 2", "'1,2,'", "3 columns, not 2"]),
        ("0 1\n1.5 2\n", ["line 2", "'1.5'", "whole numbers"]),
        ("0 1\n1 -2\n", ["line 2", "'1 -2'", "count from 0"]),
        ("0 1\n1-2 3\n", ["line 2", "'1-2'"]),
        ("0 1\n9223372036854775808 3\n", ["line 2", "9223372036854775808", "largest vertex id"]),
        ("0 1 1\n1.5 2 1\n", ["line 2", "'1.5 2 1'", "whole numbers"]),
        ("0 1 1\n1 2 nan\n", ["line 2", "'1 2 nan'", "weight must be finite"]),
        ("0 1 1 1\n", ["line 1", "'0 1 1 1'", "two columns"]),
        ("0\n", ["line 1", "two columns"]),
        ("0 1\n\x00\x01\n", ["line 2", "\\x00\\x01"]),
        ("0 1\n2 " + "x" * 500, ["line 2", "xxx..."]),
        ("0 1 1\n1 nan 1\n", ["line 2", "'1 nan 1'", "whole numbers"]),
        ("0 1 1\n1 2 1e39\n", ["line 2", "'1 2 1e39'", "weight must be finite"]),
        ("0 1\n" + " " * 200_000 + "\n" + "1" * 200_000 + "x 1\n", ["line 3", "no number"]),
        ("0 1\n900000000 2\n", ["900000000", "2 edges", "14.40 GB of memory", "numpy.unique", "num_vertices"]),
        ("# nothing\n", ["holds no edges"]),
        ("source target\n", ["holds no edges"]),
        ("", ["holds no edges"]),
        ("0 1\n2 50%\n", ["line 2", "'50%' is no number"]),
    ],
)
def test_errors_name_the_line(content: str, parts: list[str], tmp_path: Path) -> None:
    path = tmp_path / "g.txt"
    path.write_text(content)
    with pytest.raises(InputError) as error:
        load(path)
    assert_one_line(error, path, *parts)


@pytest.mark.parametrize("block_bytes", [1, 7, 64, 1000])
def test_graphs_do_not_depend_on_the_block_size(
    block_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(3)
    lines = ["# head", "u v", *(f"{rng.randrange(90)}\t{rng.randrange(90)}" for _ in range(300)), ""]
    lines[50:50] = ["", "% note"]
    path = tmp_path / "g.txt"
    path.write_text("\n".join(lines))
    whole = load(path)
    monkeypatch.setattr(text_table, "BLOCK_BYTES", block_bytes)
    same_graph(load(path), whole)
    lines[200] = "7 7 7"
    path.write_text("\n".join(lines))
    with pytest.raises(InputError) as error:
        load(path)
    assert_one_line(error, "line 201", "'7 7 7'")


def test_features_and_labels(tmp_path: Path) -> None:
    (tmp_path / "g.txt").write_text("0 1\n3 1\n3 1\n2 2\n")
    x, y = np.arange(10, dtype=np.float32).reshape(5, 2), np.array([0, 1, -1, 2, 0])
    np.save(tmp_path / "x.npy", x)
    np.save(tmp_path / "y.npy", y)
    (tmp_path / "x.csv").write_text("first,second\n" + "\n".join(f"{a},{b}" for a, b in x))
    (tmp_path / "y.csv").write_text("class\n" + "\n".join(map(str, y)))
    graphs = [
        read_edges(tmp_path / "g.txt", features=tmp_path / f"x.{kind}", labels=tmp_path / f"y.{kind}")
        for kind in ("npy", "csv")
    ]
    same_graph(*graphs)
    assert graphs[0].num_vertices == 5
    assert graphs[0].x is not None
    assert graphs[0].y is not None
    assert np.array_equal(graphs[0].x.numpy(), x)
    assert graphs[0].y.tolist() == y.tolist()
    assert graphs[0].train_mask is not None
    assert not graphs[0].train_mask[2]


def test_files_that_do_not_fit(tmp_path: Path) -> None:
    edges, x, y = tmp_path / "g.txt", tmp_path / "x.csv", tmp_path / "y.csv"
    edges.write_text("0 1\n5 1\n")
    x.write_text("1 2\n3 4\n5 6\n")
    y.write_text("0\n1\n")
    for files, parts in (
        ({"features": x}, [edges, "line 2", "'5 1'", "largest vertex id is 2"]),
        ({"features": x, "labels": y}, [y, "2 rows", x, "3"]),
        ({"features": tmp_path / "none.npy"}, [tmp_path / "none.npy", "no such file"]),
        ({"labels": tmp_path / "none.csv"}, [tmp_path / "none.csv", "no such file"]),
    ):
        with pytest.raises(InputError) as error:
            read_edges(edges, **files)
        assert_one_line(error, *parts)
    x.write_text("1 2\n3 nan\n")
    with pytest.raises(InputError) as error:
        read_edges(edges, features=x)
    assert_one_line(error, x, "line 2", "'3 nan'", "finite")
    np.save(tmp_path / "x.npy", np.array([[1.0], [np.inf]]))
    with pytest.raises(InputError) as error:
        read_edges(edges, features=tmp_path / "x.npy")
    assert_one_line(error, tmp_path / "x.npy", "features[1, 0] is inf")


def test_blank_lines_are_skipped_quickly(tmp_path: Path) -> None:
    """100 MB of blank lines are skipped in seconds, without being held in memory."""
    path = tmp_path / "g.csv.gz"
    with gzip.open(path, "wb", compresslevel=1) as file:
        file.write(b" " * 1_000_000)
        for _ in range(100):
            file.write(b"\n" * 1_000_000)
        file.write(b"0,1\n3,1\n3,1\n2,x\n")
    with pytest.raises(InputError) as error:
        load(path)
    assert_one_line(error, "line 100000004", "'2,x'")


@pytest.mark.parametrize("block_bytes", [7, 1 << 24])
def test_a_line_without_an_end(block_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_table, "BLOCK_BYTES", block_bytes)
    monkeypatch.setattr(text_table, "MAX_LINE_BYTES", 20)
    path = tmp_path / "g.txt"
    path.write_bytes(b"0 1\n3 1\n3 1\n2 2" + b" " * 10)
    same_graph(load(path), expected())
    path.write_bytes(b"0 1\n" + bytes(30))
    with pytest.raises(InputError) as error:
        load(path)
    assert_one_line(error, path, "line 2", "longer than 20 bytes")


def test_a_table_that_is_larger_than_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "g.txt"
    path.write_text("0 1\n3 1\n3 1\n2 2")
    monkeypatch.setattr(module, "memory_limit_bytes", lambda: 4 * 16)
    same_graph(load(path), expected())
    monkeypatch.setattr(module, "memory_limit_bytes", lambda: 4 * 16 - 1)
    with pytest.raises(InputError) as error:
        load(path)
    assert_one_line(error, path, "lines", "of memory")


def test_features_outside_of_float32_are_refused(tmp_path: Path) -> None:
    (tmp_path / "g.txt").write_text("0 1\n")
    (tmp_path / "x.csv").write_text("1\n1e39\n")
    with pytest.raises(InputError) as error:
        read_edges(tmp_path / "g.txt", features=tmp_path / "x.csv")
    assert_one_line(error, tmp_path / "x.csv", "line 2", "'1e39'", "finite")


@pytest.mark.parametrize("path", ["a\nb\x1b.csv", "x" * 5000 + ".csv"])
def test_errors_of_strange_paths_are_printable(path: str) -> None:
    with pytest.raises(InputError) as error:
        load(path)
    assert str(error.value).isprintable()


@pytest.mark.parametrize("dtype", ["<i4", "<i8", ">i4", "<u2", ">u8"])
@pytest.mark.parametrize("transposed", [False, True])
def test_binary(dtype: str, transposed: bool, tmp_path: Path) -> None:
    edges = np.array([[0, 3, 3, 2], [1, 1, 1, 2]], dtype=dtype)
    np.save(tmp_path / "g.npy", edges.T if transposed else edges)
    same_graph(load(tmp_path / "g.npy"), expected())
    np.save(tmp_path / "g.npy", np.ascontiguousarray(edges.T) if transposed else np.asfortranarray(edges))
    same_graph(load(tmp_path / "g.npy"), expected())


@pytest.mark.parametrize(
    ("array", "parts"),
    [
        (np.zeros((3, 4), np.int64), ["[3, 4]", "(2, E) or (E, 2)"]),
        (np.zeros((2, 4)), ["float64", "integers"]),
        (np.array([["a", "b"]]), ["<U1", "save real numbers"]),
        (np.array([[1, -1], [0, 0]]), ["edge_index[0][1] is -1", "negative"]),
    ],
)
def test_bad_binary(array: np.ndarray, parts: list[str], tmp_path: Path) -> None:
    np.save(tmp_path / "g.npy", array)
    with pytest.raises(InputError) as error:
        load(tmp_path / "g.npy")
    assert_one_line(error, tmp_path / "g.npy", *parts)


def test_an_import_names_the_file_of_a_wrong_id(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An import checks the ids while it copies them, and leaves no graph folder."""
    np.save(tmp_path / "edges.npy", np.array([[1, -1], [0, 0]]))
    assert main(["data", "import", str(tmp_path / "edges.npy"), "--out", str(tmp_path / "graph")]) == 2
    assert f"{tmp_path / 'edges.npy'}: source[1] is -1: vertices are numbered from 0" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["edges.npy"]


def test_broken_gzip(tmp_path: Path) -> None:
    whole = gzip.compress(b"0 1\n" * 1000)
    path = tmp_path / "g.txt.gz"
    for content in (whole[:-9], b"0 1\n"):
        path.write_bytes(content)
        with pytest.raises(InputError) as error:
            load(path)
        assert_one_line(error, path, "no whole gzip file", "fetch it again")

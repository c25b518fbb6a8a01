"""Importing from every source, by `weft data import` or in Python, gives the same graph and returns the same ids."""

from __future__ import annotations

import gzip
import pickle
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import weft
from tests.lib.graph_checks import assert_one_line, same_graph
from tests.lib.running import complaints
from weft.cli.main import main
from weft.data import DataWarning, Graph, load
from weft.data.io import graph_parts, ogb
from weft.data.store import write_parts
from weft.data.store.import_parts import import_parts
from weft.data.tables import edge_list, table
from weft.data.vertex_names import NameCollector, NameIndex, Texts
from weft.utils.errors import InputError

IDS = ["ann", "bob", "c\u00e9d", "dan", "eve", "007"]
SOURCE, TARGET = [0, 1, 2, 3, 4, 0, 3], [1, 2, 3, 4, 0, 5, 3]
X = [[0.5, 1], [1, 0], [0, 1], [2, 1], [1, 1], [0, 0]]
Y = [0, 1, 0, 1, -1, 0]
SPLIT = ["train", "train", "train", "val", "", "test"]
WEIGHT = [1.0, 2, 3, 4, 5, 6, 7]
COLUMNS = {"id": "user", "source": "src", "target": "dst", "label": "y", "split": "part", "weight": "w"}


def frames() -> tuple[Any, Any]:
    """Return the graph as two data frames, of vertices and edges."""
    pandas = pytest.importorskip("pandas")
    x, y = np.array(X), [None if label < 0 else label for label in Y]
    labels = pandas.array(y, dtype="Int64")
    vertices = pandas.DataFrame({"user": IDS, "a": x[:, 0], "b": x[:, 1], "y": labels, "part": SPLIT})
    endpoints = [[IDS[v] for v in ids] for ids in (SOURCE, TARGET)]
    return vertices, pandas.DataFrame({"src": endpoints[0], "dst": endpoints[1], "w": WEIGHT})


def wanted(name: str = "graph") -> Graph:
    """Return the expected graph, without vertex names."""
    masks = {f"{split}_mask": [word == split for word in SPLIT] for split in ("train", "val", "test")}
    weight = np.array(WEIGHT, np.float32)
    return Graph.from_edges(SOURCE, TARGET, x=X, y=Y, weight=weight, name=name, **masks)


def by_parquet(folder: Path) -> Graph:
    return by_files(folder, ".parquet", lambda frame, path: frame.to_parquet(path))


def by_arrow(folder: Path) -> Graph:
    return by_files(folder, ".feather", lambda frame, path: frame.to_feather(path))


def by_csv(folder: Path) -> Graph:
    return by_files(folder, ".csv", lambda frame, path: frame.to_csv(path, index=False))


def by_tsv(folder: Path) -> Graph:
    return by_files(folder, ".tsv.gz", lambda frame, path: frame.to_csv(path, index=False, sep="\t"))


def by_files(folder: Path, suffix: str, write: Callable[[Any, Path], None]) -> Graph:
    """Write two tables to files, and import them part by part."""
    pytest.importorskip("pyarrow")
    paths = [folder / f"{name}{suffix}" for name in ("vertices", "graph")]
    for frame, path in zip(frames(), paths, strict=True):
        write(frame, path)
    words = ["data", "import", "--vertices", paths[0], "--edges", paths[1], "--features", "a:raw,b:raw"]
    words += [word for name, column in COLUMNS.items() for word in (f"--{name}", column)]
    assert main([str(word) for word in [*words, "--out", folder / "store"]]) == 0
    return Graph.open(folder / "store")


def by_frames(folder: Path) -> Graph:
    del folder
    return Graph.from_tables(*frames(), features=["a:raw", "b:raw"], **COLUMNS)


def by_index(folder: Path) -> Graph:
    del folder
    vertices, edges = frames()
    return Graph.from_tables(vertices.set_index("user"), edges, features=["a:raw", "b:raw"], **COLUMNS)


def by_arrays(folder: Path) -> Graph:
    del folder
    vertices = {"user": IDS, "x": np.array(X, np.float32), "y": np.array(Y), "part": SPLIT}
    endpoints = [[IDS[v] for v in ids] for ids in (SOURCE, TARGET)]
    return Graph.from_tables(vertices, {"src": endpoints[0], "dst": endpoints[1], "w": WEIGHT}, features="x", **COLUMNS)


def by_lists_in_parquet(folder: Path) -> Graph:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    vertices = pyarrow.table({"user": IDS, "x": X, "y": Y, "part": SPLIT})
    endpoints = [[IDS[v] for v in ids] for ids in (SOURCE, TARGET)]
    (folder / "graph").mkdir()
    for part in range(2):  # A folder of files is read as one table.
        rows = slice(4 * part, 4 * part + 4)
        columns = {"src": endpoints[0][rows], "dst": endpoints[1][rows], "w": WEIGHT[rows]}
        parquet.write_table(pyarrow.table(columns), folder / "graph" / f"{part}.parquet")
    return Graph.from_tables(vertices, folder / "graph", features="x", **COLUMNS)


def by_networkx(folder: Path) -> Graph:
    del folder
    networkx = pytest.importorskip("networkx")
    graph = networkx.MultiDiGraph()
    for name, x, y, part in zip(IDS, X, Y, SPLIT, strict=True):
        graph.add_node(name, x=x, y=None if y < 0 else y, part=part)
    for source, target, weight in zip(SOURCE, TARGET, WEIGHT, strict=True):
        graph.add_edge(IDS[source], IDS[target], w=weight)
    return Graph.from_networkx(graph, features="x", label="y", split="part", weight="w")


SOURCES = (by_parquet, by_arrow, by_csv, by_tsv, by_frames, by_index, by_arrays, by_lists_in_parquet, by_networkx)


@pytest.mark.parametrize("part_rows", [2, 1 << 20])
@pytest.mark.parametrize("read", SOURCES)
def test_imported_vertex_names_label_predictions(
    read: Callable[[Path], Graph], part_rows: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The imported graph equals the expected one, and rows of a prediction have its vertex names."""
    monkeypatch.setattr(table, "PART_ROWS", part_rows)
    graph = read(tmp_path)
    assert graph.vertex_names is not None
    assert graph.vertex_names.tolist() == IDS
    assert graph.vertex_names.find(["007", "bob"]) == [5, 1]
    same_graph(graph, wanted(graph.name))
    if part_rows > 2:
        predict_by_names(graph, tmp_path)


def predict_by_names(graph: Graph, folder: Path) -> None:
    """Train for a few epochs with reordered vertices, predict, and check the names of the rows."""
    graph.save(folder / "imported", overwrite=True)
    run = weft.train(str(folder / "imported"), "gcn", epochs=3, hidden=4, order="degree", out=folder / "run")
    rows = weft.predict(run, out=folder / "rows.npy")
    parquet = pytest.importorskip("pyarrow.parquet")
    weft.predict(run, out=folder / "rows.parquet")
    table = parquet.read_table(folder / "rows.parquet")
    assert graph.vertex_names is not None
    assert table.column_names == [graph.vertex_names.column, "logit_0", "logit_1"]
    assert table[0].to_pylist() == graph.vertex_names.tolist()
    assert np.array_equal(np.stack([table[1], table[2]], 1), rows.numpy())


def test_vertex_names_that_are_numbers(tmp_path: Path) -> None:
    numbers = [10**12, -5, 7, 3, 2, 1]
    endpoints = {"source": [numbers[v] for v in SOURCE], "target": [numbers[v] for v in TARGET]}
    vertices = {"key": numbers, "x": np.array(X), "y": np.array(Y), "part": SPLIT}
    graph = Graph.from_tables(vertices, endpoints, id="key", features="x", label="y", split="part")
    graph.save(tmp_path / "g")
    opened = Graph.open(tmp_path / "g")
    assert opened.vertex_names is not None
    assert opened.vertex_names.tolist() == numbers
    assert graph.fingerprint == wanted().fingerprint
    predict_by_names(opened, tmp_path)


def test_edges_alone_name_their_vertices(tmp_path: Path) -> None:
    (tmp_path / "g.txt").write_text("# who follows whom\nbob ann 2\nann bob 1.5\ndan  bob 1\n")
    words = ["data", "import", "--edges", str(tmp_path / "g.txt"), "--source", "0", "--target", "1", "--weight", "2"]
    with pytest.warns(DataWarning, match="1 pairs of vertices have edges of different weights"):
        assert main([*words, "--undirected", "--out", str(tmp_path / "g")]) == 0
    graph = Graph.open(tmp_path / "g")
    assert graph.vertex_names is not None
    assert graph.vertex_names.tolist() == ["bob", "ann", "dan"]
    source, target = graph.in_edges.edges()
    assert list(zip(source.tolist(), target.tolist(), strict=True)) == [(1, 0), (2, 0), (0, 1), (0, 2)]
    assert graph.in_edges.weight is not None
    assert graph.in_edges.weight.tolist() == [1.5, 1, 2, 1]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"ann \xe9va 1\n", r"column '1': b'\\xe9va' is no UTF-8: save text as UTF-8"),
        ("ann bob 1\n".encode("utf-16"), "is text in UTF-16: save it as UTF-8"),
        (b"ann bob 1\nbob eve 1_000\n", "column '2', row 1: '1_000' is no number"),
        (b"ann bob 1 # first\nbob eve 1\n", "line 2 .* has 3 columns, not 5: .* each comment a line of its own"),
    ],
)
def test_text_tables_that_are_refused(content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "g.txt").write_bytes(content)
    with pytest.raises(InputError, match=message):
        Graph.from_tables(None, tmp_path / "g.txt", source="0", target="1", weight="2")


def test_texts_with_equal_hashes_are_distinguished(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Texts, "keys", lambda self: np.ones(len(self), np.uint64))
    index = NameIndex(Texts.of(IDS), "id")
    assert index.find(Texts.of(["eve", "zed", "ann"])).tolist() == [4, -1, 0]
    with pytest.raises(InputError) as error:
        NameIndex(Texts.of(["a", "b", "c", "b", "a"]), "id")
    assert_one_line(error, "id is 'b' in rows 1 and 3")


def test_names_are_collected_once() -> None:
    collector = NameCollector()
    for part in (["b", "", "b"], ["a\u00e9", "b"], [], ["x" * 3000]):
        collector.add(Texts.of(part))
    assert collector.ids().tolist() == ["b", "", "a\u00e9", "x" * 3000]


def changed(**columns: Any) -> dict[str, Any]:
    vertices, edges = frames()
    for name, values in columns.items():
        frame = vertices if name in ("user", "a", "y", "part", "t") else edges
        frame[name] = values
    return {"vertices": vertices, "edges": edges}


@pytest.mark.parametrize(
    ("columns", "options", "parts"),
    [
        ({"dst": ["bob", "zed", *"abcde"]}, {}, ["edges: column 'dst', row 1: 'zed' is no vertex's id"]),
        ({"src": ["bob", None, *["ann"] * 5]}, {}, ["column 'src', row 1: is missing"]),
        ({"user": ["a", "b", "c", "b", "e", "f"]}, {}, ["column 'user' is 'b' in rows 1 and 3"]),
        (
            {"user": ["a", 2, "c", "b", "e", "f"]},
            {},
            ["column 'user', row 0: is 'a', but ids are all whole numbers, or"],
        ),
        (
            {"user": [2.0**60, *range(5)]},
            {},
            ["column 'user', row 0: is above 2**53 in a column of floats", "give text"],
        ),
        ({"user": [b"\xe9"] * 6}, {}, ["b'\\xe9' is no UTF-8: save text as UTF-8"]),
        ({"user": [["a"]] * 6}, {}, ["column 'user', row 0: is ['a'], but ids are"]),
        ({"a": [[1, 2]] * 5 + [[1]]}, {}, ["column 'a', row 5: [1] is no number, or a list of another length"]),
        ({"a": [["u"]] * 6}, {}, ["column 'a', row 0: ['u'] is no number"]),
        ({"y": [["u"]] * 6}, {}, ["column 'y', row 0: ['u'] is no number"]),
        ({}, {"features": ["a", "b", "a"]}, ["--features names column 'a' twice"]),
        ({"a": [1, 2, None, 4, 5, 6]}, {"features": "a:raw"}, ["vertices: column 'a', row 2: is missing: fill it in"]),
        (
            {"a": [1, 2, 1e300, 4, 5, 6]},
            {"features": "a:raw"},
            ["vertices: column 'a', row 2: is infinite or above 3e38"],
        ),
        ({"a": [1, 2, np.inf, 4, 5, 6]}, {}, ["vertices: column 'a', row 2: is infinite"]),
        ({"a": list("uvwxyz")}, {"features": "a:log"}, ["vertices: column 'a', row 0: 'u' is no number: correct it"]),
        ({"a": list("12x456")}, {}, ["vertices: column 'a': contains numbers and texts such as 'x': correct them"]),
        ({"w": [1, 2, None, 4, 5, 6, 7]}, {}, ["edges: column 'w', row 2: is missing"]),
        ({"y": list("uvwxyz")}, {"label_kind": "values"}, ["column 'y': contains text: leave out --label-kind"]),
        ({"y": [1.0, 0, 1, None, 0, 1]}, {}, ["column 'y': contains whole numbers as floats", "--label-kind classes"]),
        ({"a": [None] * 6}, {}, ["vertices: column 'a': no training row has a value: leave the column out"]),
        ({"y": ["1", "0", "x", None, "1", "0"]}, {}, ["column 'y': contains numbers and texts such as 'x'"]),
        ({"y": np.arange(6).astype("M8[D]")}, {}, ["column 'y', row 0: datetime.datetime(1970, 1, 1, 0, 0) is no"]),
        ({"part": ["train", "tset", *SPLIT[2:]]}, {}, ["column 'part', row 1: 'tset' is not train, val, test"]),
        ({}, {"label": "why"}, ["vertices: unknown column of --label 'why'"]),
        ({}, {"target": "dts"}, ["edges: unknown column of --target 'dts': did you mean 'dst'?"]),
        ({}, {"split_time": "a"}, ["--split part is a column"]),
        ({}, {"split_time": "part", "split": None}, ["column 'part': is text"]),
        ({}, {"id": None}, ["column 'src', row 0: ", " is text, but no --id is given"]),
        ({}, {"vertices": None}, ["--id names a column of vertices", "--vertices"]),
        ({}, {"edges": 3}, ["edges is of type int: give a DataFrame"]),
        ({}, {"edges": "no.parquet"}, ["no.parquet: no such file"]),
    ],
)
def test_errors_name_the_column(columns: dict[str, Any], options: dict[str, Any], parts: list[str]) -> None:
    arguments = {"features": ["a", "b"], **COLUMNS, **changed(**columns), **options}
    with pytest.raises(InputError) as error:
        Graph.from_tables(**arguments)
    assert_one_line(error, *parts)


@pytest.mark.parametrize("part_rows", [3, 1 << 20])
def test_large_numbers_that_become_equal_in_float32_warn(
    part_rows: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each column warns once, in tables and in files of arrays and text, whatever the parts."""
    monkeypatch.setattr(table, "PART_ROWS", part_rows)
    monkeypatch.setattr(edge_list, "BLOCK_ENTRIES", 2 * part_rows)
    times = np.array([1_700_000_000, 1_700_000_001, 1_700_001_000] * 2)
    edges = {"src": SOURCE[:6], "dst": TARGET[:6], "w": times, "f": times / 1e9}
    options = {"source": "src", "target": "dst", "weight": "w", "edge_features": "f", "features": "t:raw"}
    count = 1 if part_rows > 3 else 2
    with pytest.warns(DataWarning) as caught:
        Graph.from_tables({"t": times}, edges, **options)
    columns = ["edges: column 'w'", "vertices: column 't'"]
    assert sorted(str(warning.message).split(" become")[0] for warning in caught) == [
        f"{column}: {count} numbers above 2**24" for column in columns
    ]
    np.save(tmp_path / "x.npy", np.stack([times / 1e9, times], 1))
    np.savetxt(tmp_path / "e.txt", np.stack([SOURCE[:6], TARGET[:6], times], 1), "%d")
    with pytest.warns(DataWarning) as caught:
        import_parts(edge_list.edge_list_parts(tmp_path / "e.txt", features=tmp_path / "x.npy"), tmp_path / "g")
    texts = [str(warning.message).removeprefix(f"{tmp_path}/").split(" become")[0] for warning in caught]
    assert texts == ["e.txt: column: 1 numbers above 2**24", f"x.npy: features[:, 1]: {count} numbers above 2**24"]


def test_features_of_arrays_that_float32_cannot_hold_are_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.array([[1.0], [1e300]]))
    (tmp_path / "e.txt").write_text("0 1\n")
    with pytest.raises(InputError, match=r"x.npy: features\[1, 0\] is 1e\+300, which torch.float32 cannot hold"):
        import_parts(edge_list.edge_list_parts(tmp_path / "e.txt", features=tmp_path / "x.npy"), tmp_path / "g")


def test_two_columns_of_one_name_are_refused() -> None:
    vertices, edges = frames()
    vertices.columns = ["user", "a", "a", "y", "part"]
    with pytest.raises(InputError) as error:
        Graph.from_tables(vertices, edges, features="a", **COLUMNS)
    assert_one_line(error, "vertices: 2 columns are named 'a': rename them")


def test_missing_values_and_types_of_arrow() -> None:
    """Booleans with nulls, decimals, bytes and masked arrays are read, and lists that are no numbers are refused."""
    pyarrow = pytest.importorskip("pyarrow")
    ids = [2**60 + 1, 2**60 + 2, 2**60 + 3]
    edges = {"source": ids[:2], "target": ids[1:]}
    flags = pyarrow.array([True, None, False])
    for user in (pyarrow.array(ids), pyarrow.array([Decimal(number) for number in ids])):
        columns = {"user": user, "flag": flags.is_valid(), "y": flags}
        graph = Graph.from_tables(pyarrow.table(columns), edges, id="user", features="flag", label="y")
        assert graph.vertex_names is not None
        assert graph.x is not None
        assert graph.y is not None
        assert graph.vertex_names.tolist() == ids
        assert graph.x.tolist() == [[1], [0], [1]]
        assert graph.y.tolist() == [1, -1, 0]
    named = {"user": pyarrow.array([b"a", b"b", b"c"]), "y": flags, "list": pyarrow.array([["u"], ["v"], ["w"]])}
    names = Graph.from_tables(pyarrow.table(named), {"source": ["a"], "target": ["c"]}, id="user").vertex_names
    assert names is not None
    assert names.tolist() == ["a", "b", "c"]
    masked = Graph.from_tables({"y": np.ma.array([1, 2, 3], mask=[0, 1, 0])}, {"source": [0], "target": [1]}, label="y")
    assert masked.y is not None
    assert masked.y.tolist() == [1, -1, 3]
    with pytest.raises(InputError, match=r"column 'list', row 0: \['u'\] is no number"):
        Graph.from_tables(pyarrow.table(named), {"source": [0], "target": [1]}, features="list")


def test_a_line_with_too_few_values(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    (tmp_path / "e.csv").write_text("source,target\n0,1\n2\n")
    with pytest.raises(
        InputError, match=r"e.csv, line 3: has 1 value, and the header has 2 \(2\): correct it, or quote"
    ):
        Graph.from_tables(None, tmp_path / "e.csv")


def test_errors_in_csv_files_name_the_line(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    (tmp_path / "v.csv").write_text("id,a\n1,2\n2,x\n")
    (tmp_path / "e.csv").write_text("source,target\n1,2\n")
    with pytest.raises(InputError) as error:
        Graph.from_tables(tmp_path / "v.csv", tmp_path / "e.csv", id="id", features="a:standard")
    assert_one_line(error, "v.csv: column 'a', line 3: 'x' is no number")


def test_without_pyarrow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("pyarrow", "pyarrow.dataset"):
        monkeypatch.setitem(__import__("sys").modules, name, None)
    (tmp_path / "e.csv").write_text("source,target\n1,2\n")
    with pytest.raises(InputError) as error:
        Graph.from_tables(None, tmp_path / "e.csv")
    assert_one_line(error, "e.csv: needs pyarrow: pip install 'weft[tables]'")


def test_split_by_dates() -> None:
    days = np.array(["2020-01-05", "2020-01-01", "2020-01-02", "2020-01-03", "2020-01-04", "2021-01-01"], "M8[D]")
    vertices, edges = frames()
    vertices["t"] = days
    vertices["y"] = 0
    options = {**COLUMNS, "split": (0.5, 0.25, 0.25), "split_time": "t"}
    graph = Graph.from_tables(vertices, edges, **options)
    assert graph.train_mask is not None
    assert graph.test_mask is not None
    assert graph.train_mask.tolist() == [False, True, True, True, False, False]
    assert graph.test_mask.tolist() == [True, False, False, False, False, True]
    pandas = pytest.importorskip("pandas")
    utc = pandas.to_datetime(days, utc=True)
    times = [time.tz_convert("Asia/Tokyo").to_pydatetime() for time in utc]
    for column in (utc, pandas.Series(times, dtype=object), pandas.Series(days.tolist(), dtype=object)):
        vertices["t"] = column
        again = Graph.from_tables(vertices, edges, **options)
        assert torch.equal(again.train_mask, graph.train_mask)  # type: ignore[arg-type]
    times[0] = times[0].replace(tzinfo=None)
    vertices["t"] = pandas.Series(times, dtype=object)
    with pytest.raises(InputError, match="column 't': is text: give numbers or points in time"):
        Graph.from_tables(vertices, edges, **options)


def test_an_edge_list_with_files_of_features_and_labels(tmp_path: Path) -> None:
    lines = [f"{u} {v} {w}" for u, v, w in zip(SOURCE, TARGET, WEIGHT, strict=True)]
    (tmp_path / "graph.txt").write_text("\n".join(lines))
    np.save(tmp_path / "x.npy", np.array(X))
    np.save(tmp_path / "y.npy", np.array(Y))
    np.save(tmp_path / "split.npy", np.array(SPLIT))
    (tmp_path / "split.txt").write_text("train\ntrain\n0\nval\nnone\ntest\n")
    words = ["data", "import", tmp_path / "graph.txt", "--features", tmp_path / "x.npy", "--labels", tmp_path / "y.npy"]
    for number, split in enumerate((tmp_path / "split.npy", tmp_path / "split.txt", "60,20,20")):
        out = tmp_path / f"store{number}"
        assert main([str(word) for word in [*words, "--split", split, "--out", out]]) == 0
        if number < 2:
            same_graph(Graph.open(out), wanted())
    random = Graph.open(tmp_path / "store2")
    same_graph(random, wanted().with_split())
    assert random.path is not None


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.int8], ids=str)
def test_features_in_fewer_bits(
    dtype: torch.dtype, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Features are rounded on request, in parts or in memory; an array in float16 keeps its type."""
    monkeypatch.setattr(graph_parts, "BLOCK_ENTRIES", 4)  # int8: the scale of a column is that of several blocks
    edges, x, name = tmp_path / "edges.txt", np.array(X, np.float32) / 7, str(dtype).removeprefix("torch.")
    edges.write_text("".join(f"{source} {target}\n" for source, target in zip(SOURCE, TARGET, strict=True)))
    sources = {"wide": x, "narrow": x.astype(np.float16)}
    for kind, array in sources.items():
        np.save(tmp_path / f"{kind}.npy", array)
        arguments = ["data", "import", str(edges), "--features", str(tmp_path / f"{kind}.npy")]
        rounding = ["--feature-dtype", name] if kind == "wide" else []
        assert main([*arguments, *rounding, "--out", str(tmp_path / kind)]) == 0
        narrow = Graph.from_edges(SOURCE, TARGET, x=array).with_feature_dtype(dtype if rounding else torch.float16)
        assert load(tmp_path / kind).x.dtype == narrow.x.dtype
        assert torch.equal(load(tmp_path / kind).x[:], narrow.x[:])
    assert "features          2 in float16\n" in capsys.readouterr().out
    for source in ("digits", "cites:vertices=50,edges=200,features=3,classes=2"):
        out = tmp_path / source[:5]
        assert main(["data", "import", source, "--feature-dtype", name, "--out", str(out)]) == 0
        assert torch.equal(load(out).x[:], load(source).with_feature_dtype(dtype).x[:])
    assert f" in {name}\n" in capsys.readouterr().out
    assert main(["data", "import", str(edges), "--feature-dtype", name, "--out", str(tmp_path / "none")]) == 2
    assert "has no features" in capsys.readouterr().err


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("kind", [np.int32, np.int64, np.uint16])
def test_edges_in_an_array(order: str, kind: type, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(write_parts, "BLOCK_EDGES", 3)
    edges = np.array([SOURCE, TARGET], kind)
    np.save(tmp_path / "graph.npy", edges if order == "C" else np.ascontiguousarray(edges.T))
    for undirected in ((), ("--undirected",)):
        out = tmp_path / f"store{len(undirected)}"
        assert main(["data", "import", str(tmp_path / "graph.npy"), *undirected, "--out", str(out)]) == 0
        same_graph(Graph.open(out), Graph.from_edges(edges, undirected=bool(undirected)))


@pytest.mark.parametrize("compressed", [False, True])
def test_folders_of_ogb(compressed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ogb, "PART_BYTES", 24)
    features = np.arange(14, dtype=np.float32).reshape(7, 2)
    plain = write_ogb_text(tmp_path / "graph", features)
    binary = write_ogb_binary(tmp_path / "binary", compressed)
    masks = {f"{split}_mask": [word == split for word in SPLIT] for split in ("train", "val", "test")}
    expected = Graph.from_edges(SOURCE, TARGET, x=X, y=Y, edge_features=features, **masks)
    same_graph(load(plain), expected)
    for folder, undirected in ((plain, []), (binary, ["--undirected"])):
        out = tmp_path / f"{folder.name}-store"
        assert main(["data", "import", str(folder), *undirected, "--out", str(out)]) == 0
    same_graph(Graph.open(tmp_path / "graph-store"), expected)
    both = Graph.from_edges(SOURCE, TARGET, x=X, y=Y, undirected=True, name="binary", **masks)
    same_graph(Graph.open(tmp_path / "binary-store"), both)


def write_ogb_text(folder: Path, edge_features: np.ndarray) -> Path:
    """Write a folder like that of ogbn-arxiv, with edge features."""
    write_ogb_splits(folder)
    (folder / "raw").mkdir()
    for name, rows in (
        ("edge", np.array([SOURCE, TARGET]).T),
        ("num-node-list", np.array([[len(IDS)]])),
        ("node-feat", np.array(X)),
        ("node-label", np.array(Y)[:, None]),
        ("edge-feat", edge_features),
    ):
        write_gz(folder / "raw" / f"{name}.csv.gz", rows)
    return folder


def write_ogb_binary(folder: Path, compressed: bool) -> Path:
    """Write a folder like that of ogbn-papers100M."""
    write_ogb_splits(folder)
    (folder / "raw").mkdir()
    save = np.savez_compressed if compressed else np.savez
    edges = np.array([SOURCE, TARGET])
    numbers = {"num_nodes_list": np.array([len(IDS)]), "num_edges_list": np.array([len(SOURCE)])}
    save(folder / "raw" / "data.npz", edge_index=edges, node_feat=np.array(X, np.float32), node_year=edges, **numbers)
    y = np.where(np.array(Y) < 0, np.nan, np.array(Y, np.float32))[:, None]
    save(folder / "raw" / "node-label.npz", node_label=y)
    return folder


def write_ogb_splits(folder: Path) -> None:
    (folder / "split" / "time").mkdir(parents=True)
    for name, word in (("train", "train"), ("valid", "val"), ("test", "test")):
        ids = np.flatnonzero(np.array(SPLIT) == word)[:, None]
        write_gz(folder / "split" / "time" / f"{name}.csv.gz", ids)


def write_gz(path: Path, rows: np.ndarray) -> None:
    path.write_bytes(gzip.compress("\n".join(",".join(map(str, row)) for row in rows.tolist()).encode()))


@pytest.mark.parametrize(
    ("name", "rows", "parts"),
    [
        ("edge", np.array([[0, 1], [2, 6]]), ["edge.csv.gz: line 2 '2,6'", "largest vertex id is 5"]),
        ("edge-feat", np.ones((3, 1)), ["edge-feat.csv.gz: has fewer rows"]),
        ("node-feat", np.ones((5, 2)), ["features has 5 rows, but the graph has 6 vertices"]),
        ("num-node-list", np.array([[3], [3]]), ["contains 2 graphs"]),
        ("triplet-type-list", np.array([[0, 1, 2]]), ["several vertex types", "from_pyg"]),
    ],
)
def test_errors_in_folders_of_ogb(
    name: str, rows: np.ndarray, parts: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_ogb_text(tmp_path / "g", np.ones((7, 1)))
    write_gz(folder / "raw" / f"{name}.csv.gz", rows)
    assert main(["data", "import", str(folder), "--out", str(tmp_path / "out")]) == 2
    (line,) = complaints(capsys.readouterr().err)
    for part in parts:
        assert part in line
    assert [path.name for path in tmp_path.iterdir()] == ["g"]


def test_scipy() -> None:
    sparse = pytest.importorskip("scipy.sparse")
    matrix = sparse.coo_array((WEIGHT, (SOURCE, TARGET)), (6, 6)).tocsr()
    graph = Graph.from_scipy(matrix, x=X, y=Y)
    same_graph(graph, Graph.from_edges(SOURCE, TARGET, x=X, y=Y, weight=WEIGHT))
    assert Graph.from_scipy((matrix > 0).astype(int)).in_edges.weight is None
    with pytest.raises(InputError) as error:
        Graph.from_scipy(matrix[:3])
    assert_one_line(error, "[3, 6]", "one row and one column for each vertex")


def test_networkx_joins_both_ways_and_keeps_parallel_edges() -> None:
    networkx = pytest.importorskip("networkx")
    graph = Graph.from_networkx(networkx.MultiGraph([(5, 9), (5, 9), (7, 7)]))
    assert graph.vertex_names is not None
    assert graph.vertex_names.tolist() == [5, 9, 7]
    source, target = graph.in_edges.edges()
    assert list(zip(source.tolist(), target.tolist(), strict=True)) == [(1, 0), (1, 0), (0, 1), (0, 1), (2, 2)]
    with pytest.raises(InputError) as error:
        Graph.from_networkx(networkx.grid_2d_graph(2, 2))
    assert_one_line(error, "column 'node': contains lists", "whole numbers or text")


def test_dgl() -> None:
    dgl = pytest.importorskip("dgl")
    dgl_graph = dgl.graph((SOURCE, TARGET), num_nodes=6)
    dgl_graph.ndata["feat"], dgl_graph.ndata["label"] = torch.tensor(X), torch.tensor(Y)
    dgl_graph.ndata["train_mask"] = torch.tensor([word == "train" for word in SPLIT])
    dgl_graph.edata["w"] = torch.tensor(WEIGHT)
    graph = Graph.from_dgl(dgl_graph, weight="w")
    train_mask = dgl_graph.ndata["train_mask"]
    same_graph(graph, Graph.from_edges(SOURCE, TARGET, x=X, y=Y, weight=torch.tensor(WEIGHT), train_mask=train_mask))
    with pytest.raises(InputError) as error:
        Graph.from_dgl(dgl_graph, edge_features="f")
    assert_one_line(error, "graph.edata has no 'f': it has w")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["digits", "--id", "x"], "--id has no effect without --edges FILE"),
        (["digits", "--features", "x.npy"], "--features has no effect on digits"),
        (["digits", "--undirected"], "--undirected has no effect on digits"),
        (["digits", "--split", "part"], "--split part: digits has no columns"),
        (["digits", "--split", "60,20"], "add up to 1"),
        (["digits", "--split", "60,20,x"], "give three percentages"),
        (["digits", "--edges", "e.csv"], "give only one of them"),
        ([], "nothing to import"),
        (["data.pt"], "data.pt: no such file or folder"),
    ],
)
def test_errors_name_the_flag(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["data", "import", *words, "--out", str(tmp_path / "out")]) == 2
    (line,) = complaints(capsys.readouterr().err)
    assert message in line
    assert not list(tmp_path.iterdir())


class Exploit:
    """Object that creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self._path,)


@pytest.mark.parametrize("suffix", [".parquet", ".feather"])
def test_types_of_arrow_are_not_unpickled(suffix: str, tmp_path: Path) -> None:
    """Columns may name a Python type, which pyarrow unpickled before version 14.0.1 (CVE-2023-47248)."""
    arrow = pytest.importorskip("pyarrow")
    feather, parquet = pytest.importorskip("pyarrow.feather"), pytest.importorskip("pyarrow.parquet")
    path, mark = tmp_path / f"edges{suffix}", tmp_path / "mark"
    metadata = {
        "ARROW:extension:name": "arrow.py_extension_type",
        "ARROW:extension:metadata": pickle.dumps(Exploit(mark)),
    }
    fields = [arrow.field(name, arrow.int64(), metadata=metadata) for name in ("source", "target")]
    content = arrow.table([[0, 1], [1, 2]], schema=arrow.schema(fields))
    (parquet.write_table if suffix == ".parquet" else feather.write_feather)(content, path)
    assert next(iter(table.open_table(path, "edges").parts({"source": table.ID})))["source"].values.tolist() == [0, 1]
    assert not mark.exists()


def test_pickled_files_are_refused(tmp_path: Path) -> None:
    torch.save({"x": torch.ones(2)}, tmp_path / "data.pt")
    with pytest.raises(InputError) as error:
        load(tmp_path / "data.pt")
    assert_one_line(error, "unpickled", "weft.Graph.from_pyg(data).save(folder)")

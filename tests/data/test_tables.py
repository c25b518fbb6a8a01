"""Transforms of table columns, typed tables by a schema file, and predictions on later tables."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

import weft
from tests.lib.graph_checks import assert_one_line, same_graph
from weft.cli.main import main
from weft.data import DataWarning, Graph, VertexNames
from weft.data.tables import table
from weft.data.tables.schema import Schema
from weft.data.tables.transforms import NumberTransform
from weft.prediction.link_scores import read_pairs
from weft.utils.errors import InputError

N = 60
RNG = np.random.default_rng(3)
SPLIT = ["train"] * 40 + ["val"] * 10 + ["test"] * 10
TRAIN = np.arange(N) < 40
EDGES = {"source": RNG.integers(0, N, 200), "target": RNG.integers(0, N, 200)}
AMOUNT = RNG.lognormal(3, 2, N)
WITH_GAPS = np.where(np.arange(N) % 7 == 0, np.nan, AMOUNT)
COUNTRY = [None if i % 9 == 4 else ["DE", "FR", "IT"][i % 3] for i in range(N)]
DAYS = np.datetime64("2024-02-01") + RNG.integers(0, 900, N)


def features_of(columns: dict[str, Any], *features: str) -> NDArray[np.float32]:
    """Return the features of a graph whose vertices have some columns, of which the first 40 rows are for training."""
    graph = Graph.from_tables({**columns, "part": SPLIT}, EDGES, features=features, split="part")
    assert graph.x is not None
    return graph.x.numpy()


@pytest.fixture(params=[7, 1 << 17])
def _parts(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read tables in parts of a few rows, or whole."""
    monkeypatch.setattr(table, "PART_ROWS", request.param)


@pytest.mark.usefixtures("_parts")
@pytest.mark.parametrize("kind", ["", ":standard", ":minmax", ":log", ":rank"])
def test_numbers(kind: str) -> None:
    """Statistics come from the training rows alone; a missing number becomes their mean, and is flagged."""
    x = features_of({"amount": WITH_GAPS}, f"amount{kind}")
    present, missing = TRAIN & ~np.isnan(WITH_GAPS), np.isnan(WITH_GAPS)
    values = np.log1p(WITH_GAPS) if kind == ":log" else WITH_GAPS
    mean, deviation = values[present].mean(), values[present].std()
    expected, fill = (values - mean) / deviation, 0.0
    if kind == ":minmax":
        low, high = values[present].min(), values[present].max()
        expected, fill = (values - low) / (high - low), (mean - low) / (high - low)
    if kind == ":rank":
        ranks = np.searchsorted(np.sort(values[present]), values) / (present.sum() - 1)
        margin = 0.5 / present.sum()
        expected = torch.special.ndtri(torch.from_numpy(ranks.clip(margin, 1 - margin))).numpy()
        rows = present  # other values lie between the quantiles
    else:
        rows = ~missing
    np.testing.assert_allclose(x[rows, 0], expected[rows], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(x[missing, 0], fill, atol=1e-6)
    assert x[:, 1].tolist() == missing.tolist()
    assert x.shape == (N, 2)


def test_stored_transforms_give_the_same_bits() -> None:
    graph = Graph.from_tables({"amount": WITH_GAPS, "part": SPLIT}, EDGES, features="amount", split="part")
    assert graph.schema is not None
    transform = Schema.from_record(json.loads(json.dumps(graph.schema.record())), "run").vertices[""].features[0]
    assert isinstance(transform, NumberTransform)
    manual = ((np.nan_to_num(WITH_GAPS) - transform.center[0]) / transform.scale[0]).astype(np.float32)
    assert np.array_equal(graph.x[:, 0], np.where(np.isnan(WITH_GAPS), 0, manual))  # type: ignore[index]


@pytest.mark.usefixtures("_parts")
def test_categories() -> None:
    """A category has a column, a missing one its own; one that no training row has gives zeros, and is counted."""
    country = [*COUNTRY[:-2], "SE", "SE"]
    with pytest.warns(DataWarning, match="column 'country' has 2 values that no training row has"):
        x = features_of({"country": country}, "country")
    for row, value in enumerate(country):
        assert x[row].tolist() == [value == "DE", value == "FR", value == "IT", value is None]
    hashed = features_of({"country": COUNTRY}, "country:hashed=5")
    assert hashed.shape == (N, 6)
    assert (hashed.sum(1) == 1).all()
    assert len({tuple(row) for row, value in zip(hashed.tolist(), COUNTRY, strict=True) if value == "DE"}) == 1
    many = features_of({"name": [f"user {i}" for i in range(30)] * 2}, "name:onehot")
    assert many.shape == (N, 30)
    with pytest.warns(DataWarning, match="column 'name': nearly every text is different"):
        wide = Graph.from_tables({"name": [f"user {i}" for i in range(70)]}, EDGES, features="name")
    assert wide.num_features == 64  # more than 64 different texts are hashed


@pytest.mark.usefixtures("_parts")
def test_dates() -> None:
    """A date becomes standardised days before the latest, and sine and cosine of periods; texts are dates as well."""
    x = features_of({"day": DAYS}, "day")
    age = (DAYS[TRAIN].max() - DAYS).astype(np.float64)
    angle = 2 * math.pi * DAYS.astype(np.int64)[:, None] / np.array([365.2425, 7])
    expected = [(age - age[TRAIN].mean()) / age[TRAIN].std()]
    expected += [function(angle[:, period]) for period in range(2) for function in (np.sin, np.cos)]
    np.testing.assert_allclose(x, np.stack(expected, 1), atol=1e-5)
    assert np.array_equal(features_of({"day": DAYS.astype(str)}, "day"), x)
    hours = features_of({"day": DAYS + np.timedelta64(6, "h")}, "day")
    np.testing.assert_allclose(hours[:, 5:], np.broadcast_to([1, 0], (N, 2)), atol=1e-5)


def test_flags_lists_and_raw_numbers() -> None:
    flags = [None if i == 3 else i % 3 == 0 for i in range(N)]
    x = features_of({"flag": flags, "list": AMOUNT.reshape(-1, 1) * [1, 2], "count": np.arange(N)}, "flag", "list")
    mean = np.mean([flag for flag in flags[:40] if flag is not None])
    np.testing.assert_allclose(x[:, 0], [mean if flag is None else flag for flag in flags], rtol=1e-6)
    assert np.flatnonzero(x[:, 1]).tolist() == [3]
    assert np.array_equal(x[:, 2:], (AMOUNT.reshape(-1, 1) * [1, 2]).astype(np.float32))
    assert features_of({"count": np.arange(N)}, "count:raw")[:, 0].tolist() == list(range(N))
    assert features_of({"a:rank": np.arange(N)}, "a:rank").shape == (N, 1)  # a column may have a colon in its name


def test_edge_features_and_weights() -> None:
    amount = RNG.lognormal(3, 2, 200)
    graph = Graph.from_tables(None, {**EDGES, "amount": amount}, weight="amount", edge_features="amount:log")
    assert graph.edge_features is not None
    assert graph.in_edges.weight is not None
    logarithms = np.log1p(amount)
    expected = (np.log1p(graph.in_edges.weight.double().numpy()) - logarithms.mean()) / logarithms.std()
    np.testing.assert_allclose(graph.edge_features[:, 0], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("columns", "feature", "parts"),
    [
        ({"a": AMOUNT}, "a:ranks", ["--features a:ranks: the kind 'ranks': did you mean 'rank'?"]),
        ({"a": AMOUNT}, "a:rank=3", ["--features a:rank=3: only hashed has a number"]),
        ({"a": AMOUNT}, "a:onehot", ["column 'a', row 0: has a fraction, so it is no category: give rank or standard"]),
        ({"a": AMOUNT}, "a:bool", ["column 'a', row 0: is neither 0 nor 1"]),
        ({"a": AMOUNT}, "a:date", ["column 'a': contains float64, no dates: write dates as 2026-11-28"]),
        ({"a": ["2024-01-01"] * 59 + ["no"]}, "a:date", ["column 'a', row 59: is no date: write"]),
        ({"a": ["2024-02-31"] * N}, "a:date", ["column 'a', rows from 0:", "correct the date"]),
        ({"a": ["yes"] * 59 + ["perhaps"]}, "a:bool", ["column 'a', row 59: is neither true nor false"]),
        ({"a": ["2024-01-01"] * 20 + ["2024-01-02"] * 39 + ["no"]}, "a:date", ["column 'a', row 59: is no date"]),
        ({"a": [*["2024-01-01", "2024-01-02", "unknown"] * 20]}, "a", ["contains dates and texts such as 'unknown'"]),
        (
            {"a": ["2024-01-01T00:00+02:00", *["2024-01-01"] * 59]},
            "a:date",
            ["row 1: has no time zone, but other rows"],
        ),
        ({"a": AMOUNT}, "part", ["column 'part' is the split: leave it out of the features"]),
        ({"a": [np.nan] * 40 + [1.0] * 20}, "a", ["column 'a': no training row has a value: leave the column out"]),
    ],
)
def test_columns_that_are_refused(columns: dict[str, Any], feature: str, parts: list[str]) -> None:
    with pytest.raises(InputError) as error:
        features_of(columns, feature)
    assert_one_line(error, *parts)


def edge_columns() -> dict[str, Any]:
    """Return a table of 200 edges with labels that are text, amounts and splits."""
    fraud = [None if i % 10 == 0 else ["fraud", "fine"][i % 3 > 0] for i in range(200)]
    split = [["train", "train", "val", "test"][i % 4] for i in range(200)]
    return {**EDGES, "amount": RNG.lognormal(3, 2, 200), "fraud": fraud, "part": split}


@pytest.mark.usefixtures("_parts")
def test_labels_of_edges(tmp_path: Path) -> None:
    """Edges to validate or test carry no messages; labels, features and splits are in the order of the table."""
    columns = edge_columns()
    options = {"features": "amount", "edge_features": "amount:log", "edge_label": "fraud", "split": "part"}
    graph = Graph.from_tables({"amount": AMOUNT}, columns, **options)
    labels = graph.edge_labels
    assert labels is not None
    train = np.array([part == "train" for part in columns["part"]])
    assert graph.num_edges == train.sum()
    listed = ~train | np.array([name is not None for name in columns["fraud"]])
    assert np.array_equal(labels.edges[:, :2], np.stack([EDGES["source"], EDGES["target"]], 1)[listed])
    names = [graph.class_names[label] if label >= 0 else None for label in labels.y.tolist()]
    assert names == [name for name, chosen in zip(columns["fraud"], listed, strict=True) if chosen]
    assert np.array_equal(labels.train_mask, train[listed])
    logarithms = np.log1p(columns["amount"])
    expected = (logarithms - logarithms[train].mean()) / logarithms[train].std()
    np.testing.assert_allclose(labels.features[:, 0], expected[listed], rtol=1e-5)  # type: ignore[index]
    graph.save(tmp_path / "g")
    pandas = pytest.importorskip("pandas")
    pandas.DataFrame({"amount": AMOUNT}).to_parquet(tmp_path / "v.parquet")
    pandas.DataFrame(columns).to_parquet(tmp_path / "e.parquet")
    words = ["data", "import", "--vertices", str(tmp_path / "v.parquet"), "--edges", str(tmp_path / "e.parquet")]
    words += [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    assert main([*words, "--out", str(tmp_path / "parts")]) == 0
    for folder in ("g", "parts"):
        again = Graph.open(tmp_path / folder)
        same_graph(again, replace(graph, name=again.name))
        assert again.edge_labels is not None
        for name, tensor in again.edge_labels.arrays().items():
            assert torch.equal(tensor, labels.arrays()[name])
    with pytest.raises(InputError, match="label and edge_label: a model learns one of them"):
        Graph.from_tables({"amount": AMOUNT}, columns, label="amount", edge_label="fraud")


def test_scores_of_later_edges(tmp_path: Path) -> None:
    """A run on labels of edges scores the edges of later tables, whose column of splits says which carry messages."""
    write_company(tmp_path)
    text = SCHEMA.replace('predict = "user"', 'predict = "buys"').replace('label = "risk"\nsplit = "60,20,20"\n', "")
    later = text.replace("[edges.buys]", '[edges.buys]\nsplit = "part"').replace("purchases", "later")
    text = text.replace("[edges.buys]", '[edges.buys]\nlabel = "kind"')
    pandas = pytest.importorskip("pandas")
    purchases = pandas.read_parquet(tmp_path / "purchases.parquet")
    purchases["kind"] = ["gift" if i % 3 else "own" for i in range(90)]
    purchases.to_parquet(tmp_path / "purchases.parquet")
    (tmp_path / "schema.toml").write_text(text)
    graph = Graph.from_schema(tmp_path / "schema.toml")
    assert graph.edge_labels is not None
    run = weft.train(graph, "rgcn", task="edge", epochs=2, hidden=4, out=tmp_path / "run")
    rows = weft.predict(run, tmp_path / "schema.toml")
    assert rows.shape == (90, 2)  # no purchase carries messages, since no column of splits says that some do
    purchases["part"] = ["train"] * 60 + ["test"] * 30
    purchases.drop(columns="kind").to_parquet(tmp_path / "later.parquet")
    (tmp_path / "later.toml").write_text(later.replace('predict = "buys"\n', ""))
    out = tmp_path / "scores.csv"
    assert weft.predict(run, tmp_path / "later.toml", what="probabilities", out=out).shape == (30, 2)
    table = pandas.read_csv(out)
    assert list(table.columns) == ["source", "target", "probability_gift", "probability_own"]
    assert table["source"].tolist() == purchases["user_id"][60:].tolist()


def test_a_column_of_splits_of_later_edges(tmp_path: Path) -> None:
    """Later edges carry messages or are scored by a column of the same name as in training."""
    columns = edge_columns()
    run = weft.train(
        Graph.from_tables({"amount": AMOUNT}, columns, features="amount", edge_label="fraud", split="part"),
        task="edge", epochs=1, hidden=4, out=tmp_path / "run",
    )  # fmt: skip
    later = {name: columns[name] for name in ("source", "target")}
    assert len(weft.predict(run, vertices={"amount": AMOUNT}, edges=later)) == 200
    assert len(weft.predict(run, vertices={"amount": AMOUNT}, edges={**later, "part": columns["part"]})) == 100
    ids = tmp_path / "ids.csv"
    ids.write_text("id\n")
    plain = weft.train(
        Graph.from_tables({"a": AMOUNT, "y": np.arange(N) % 2}, EDGES, features="a", label="y"), epochs=1
    )
    weft.predict(plain, vertices={"a": AMOUNT}, edges=EDGES, ids=ids, out=tmp_path / "none.csv")
    assert (tmp_path / "none.csv").read_text().count("\n") == 1


def test_pairs_of_types_that_share_ids() -> None:
    """An id of a pair is searched among the vertices of the type that the relation has on this side."""
    names = VertexNames.of(np.array([1, 2, 3, 1, 2, 9]), "id")
    relations = {"relations": ("user|buys|item", "item|like|item"), "vertex_types": ("user", "item")}
    edges = Graph.from_edges([0, 4], [3, 5], edge_type=[0, 1], type_offsets=(0, 3, 6), num_vertices=6, **relations)
    graph = replace(edges, vertex_names=names)
    pairs = {"source": [1, 2, 1], "target": ["1", "9", "2"], "relation": ["0", "user|buys|item", "item|like|item"]}
    assert read_pairs(pairs, graph).tolist() == [[0, 3, 0], [1, 5, 0], [3, 4, 1]]
    with pytest.raises(InputError, match="column 'target', row 1: '3' is no vertex's id there"):
        read_pairs(pairs | {"target": ["1", "3", "2"]}, graph)


def test_types_of_pandas_and_csv(tmp_path: Path) -> None:
    """Booleans with missing values, decimals, and booleans and row numbers in CSV files are read as they are meant."""
    pandas = pytest.importorskip("pandas")
    flags = pandas.array([True, None, False] * 20, dtype="boolean")
    frame = pandas.DataFrame({"flag": flags, "price": [Decimal("2.5"), Decimal(4)] * 30, "sure": ["yes", "no"] * 30})
    x = Graph.from_tables(frame, EDGES, features=["flag", "price:raw", "sure:bool"]).x
    assert x is not None
    assert x[:3].tolist() == [[1, 0, 2.5, 1], [0.5, 1, 4, 0], [0, 0, 2.5, 1]]
    frame.to_csv(tmp_path / "v.csv", index=False)
    pandas.DataFrame(EDGES).to_csv(tmp_path / "e.csv", index=False)
    words = ["data", "import", "--vertices", str(tmp_path / "v.csv"), "--edges", str(tmp_path / "e.csv")]
    assert main([*words, "--features", "flag,price:raw,sure:bool", "--out", str(tmp_path / "g")]) == 0
    opened = Graph.open(tmp_path / "g")
    assert opened.x is not None
    assert torch.equal(opened.x, x)
    assert Graph.from_tables(frame, EDGES, features="flag").x is not None
    late = {"when": ["2024-01-01T01:00+02:00", "2023-12-31T23:00Z"]}
    times = Graph.from_tables(late, {"source": [0], "target": [1]}, features="when").x
    assert times is not None
    assert torch.equal(times[0], times[1])


def test_the_label_is_no_feature() -> None:
    with pytest.raises(InputError, match="column 'y' is the label: leave it out of the features"):
        Graph.from_tables({"y": np.arange(N) % 2}, EDGES, features="y", label="y")
    with pytest.warns(DataWarning, match="vertices: 20 rows have a split, but no label: they are in no split"):
        graph = Graph.from_tables({"y": ["a", None, "b"] * 20, "part": SPLIT}, EDGES, label="y", split="part")
    assert not (graph.train_mask & (graph.y < 0)).any()  # type: ignore[operator]


def test_trained_rows_belong_to_the_same_vertices(tmp_path: Path) -> None:
    """A model has a row for each item without features: other items, or another order, are refused."""
    write_company(tmp_path)
    (tmp_path / "schema.toml").write_text(SCHEMA.replace('features = "price:log"\n', ""))
    run = weft.train(Graph.from_schema(tmp_path / "schema.toml"), "rgcn", epochs=1, hidden=4, out=tmp_path / "run")
    (tmp_path / "next").mkdir()
    write_company(tmp_path / "next", month=1)
    assert len(weft.predict(run, tmp_path / "next" / "schema.toml")) == 42
    items = (tmp_path / "next" / "items.csv").read_text().splitlines()
    (tmp_path / "next" / "items.csv").write_text("\n".join([items[0], *reversed(items[1:])]))
    with pytest.raises(InputError, match="has not the same vertices without features, in the same order"):
        weft.predict(run, tmp_path / "next" / "schema.toml")


def test_class_names() -> None:
    """Labels that are text keep their names, also in a graph folder."""
    risk = [None if i % 5 == 0 else ["low", "high", "middle"][i % 3] for i in range(N)]
    graph = Graph.from_tables({"risk": risk}, EDGES, label="risk")
    assert graph.class_names == ("high", "low", "middle")
    assert graph.y is not None
    assert [graph.class_names[label] if label >= 0 else None for label in graph.y.tolist()] == risk


def write_company(folder: Path, month: int = 0) -> None:
    """Write tables of users, items and purchases, with their schema; a month has other users than another."""
    pandas = pytest.importorskip("pandas")
    rng = np.random.default_rng(month)
    users = [f"u{month}-{i}" for i in range(30)]
    columns = {"user_id": users, "age": np.where(np.arange(30) % 8, AMOUNT[:30], np.nan), "country": COUNTRY[:30]}
    risk = ["high" if age > 20 else "low" for age in AMOUNT[:30]]
    pandas.DataFrame({**columns, "risk": risk}).to_parquet(folder / "users.parquet")
    items = {"item": np.arange(12) + 100, "price": AMOUNT[:12]}
    pandas.DataFrame(items).to_csv(folder / "items.csv", index=False)
    who, what = rng.integers(0, 30, 90), rng.integers(0, 12, 90)
    bought = {"user_id": [users[i] for i in who], "item": what + 100, "amount": AMOUNT[what]}
    pandas.DataFrame(bought).to_parquet(folder / "purchases.parquet")
    knows = {"a": [users[i] for i in who], "b": [users[i] for i in what]}
    pandas.DataFrame(knows).to_parquet(folder / "friends.parquet")
    (folder / "schema.toml").write_text(SCHEMA)


SCHEMA = """predict = "user"
[vertices.user]
table = "users.parquet"
id = "user_id"
features = ["age", "country:onehot"]
label = "risk"
split = "60,20,20"
[vertices.item]
table = "items.csv"
id = "item"
features = "price:log"
[edges.buys]
table = "purchases.parquet"
source = "user.user_id"
target = "item.item"
features = ["amount:log"]
[edges.knows]
table = "friends.parquet"
source = "user.a"
target = "user.b"
"""


def test_typed_tables(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A schema file gives vertex types, relations, features by type and labels; in parts and in memory alike."""
    write_company(tmp_path)
    assert main(["data", "import", str(tmp_path / "schema.toml"), "--out", str(tmp_path / "g")]) == 0
    assert (
        "user.age          standard (2 columns, one of them flags missing values): numbers" in capsys.readouterr().out
    )
    graph = Graph.open(tmp_path / "g")
    assert graph.vertex_types == ("user", "item")
    assert graph.relations == ("user|buys|item", "user|knows|user")
    assert {name: tuple(rows.shape) for name, rows in graph.features.items()} == {"user": (30, 6), "item": (12, 1)}
    assert graph.edge_features is not None
    assert graph.edge_features.shape == (180, 1)
    assert graph.edge_type is not None
    assert not graph.edge_features[graph.edge_type == 1].any()
    assert graph.vertex_names is not None
    assert graph.vertex_names.tolist()[29:32] == ["u0-29", "100", "101"]
    assert int(graph.train_mask.sum()) == 18  # type: ignore[union-attr]
    same_graph(Graph.from_schema(tmp_path / "schema.toml"), graph)
    graph.save(tmp_path / "again")
    assert Graph.open(tmp_path / "again").schema == graph.schema


def test_predictions_on_later_tables(tmp_path: Path) -> None:
    """The transforms of the training tables apply to other tables, and give the same bits as for the same rows."""
    write_company(tmp_path)
    graph = Graph.from_schema(tmp_path / "schema.toml")
    run = weft.train(graph, "rgcn", epochs=2, hidden=4, out=tmp_path / "run")
    rows = weft.predict(run, graph)
    assert torch.equal(weft.predict(run, tmp_path / "schema.toml"), rows)
    (tmp_path / "next").mkdir()
    write_company(tmp_path / "next", month=1)
    later = weft.predict(run, tmp_path / "next" / "schema.toml")
    assert later.shape == rows.shape
    assert not torch.equal(later, rows)
    with pytest.raises(InputError, match="a graph, and --vertices or --edges: give one or the other"):
        weft.predict(run, graph, edges=EDGES)
    with pytest.raises(InputError, match=r"table of vertices .*is missing: give a schema file"):
        weft.predict(run, vertices={"a": [1]}, edges=EDGES)


def test_tables_of_predictions(tmp_path: Path) -> None:
    """A table has types, ids, class names, and several kinds of results; it can be of one type or of some ids."""
    parquet, csv = pytest.importorskip("pyarrow.parquet"), pytest.importorskip("pyarrow.csv")
    write_company(tmp_path)
    graph = Graph.from_schema(tmp_path / "schema.toml")
    run = weft.train(graph, "rgcn", epochs=2, hidden=4, out=tmp_path / "run")
    logits = weft.predict(run, graph)
    weft.predict(run, graph, what="classes,probabilities", out=tmp_path / "all.parquet")
    table = parquet.read_table(tmp_path / "all.parquet")
    assert table.column_names == ["type", "id", "class", "probability_high", "probability_low"]
    assert table["type"].to_pylist() == ["user"] * 30 + ["item"] * 12
    assert table["id"].to_pylist() == graph.vertex_names.tolist()  # type: ignore[union-attr]
    assert table["class"].to_pylist() == [graph.class_names[number] for number in logits.argmax(1).tolist()]
    assert np.array_equal(table["probability_high"].to_numpy(), logits.softmax(1)[:, 0].numpy())
    rows = weft.predict(run, graph, what="classes", vertex_type="item", out=tmp_path / "of_type.csv")
    assert torch.equal(rows, logits[30:].argmax(1))
    assert csv.read_csv(tmp_path / "of_type.csv").to_pydict() == {
        "type": ["item"] * 12,
        "id": list(range(100, 112)),
        "class": [graph.class_names[number] for number in rows.tolist()],
    }
    (tmp_path / "ids.csv").write_text("id\nu0-7\nu0-2\n")
    for ids in (tmp_path / "ids.csv", ["u0-7", "u0-2"]):
        some = weft.predict(run, graph, what="probabilities", ids=ids, out=tmp_path / "some.npy", overwrite=True)
        assert torch.equal(some, logits.softmax(1)[[7, 2]])
        assert np.array_equal(np.load(tmp_path / "some.npy"), some.numpy())
    for options, message in (
        ({"what": "classes,logits"}, "only a .parquet or .csv file can hold several"),
        ({"what": "classes,embeddings", "out": tmp_path / "x.csv"}, "or embeddings alone"),
        ({"what": "logit"}, "did you mean 'logits'"),
        ({"ids": ["u0-99"]}, "'u0-99' is no vertex's id"),
        ({"vertex_type": "users"}, "did you mean 'user'"),
    ):
        with pytest.raises(InputError, match=message):
            weft.predict(run, graph, **options)  # type: ignore[arg-type]


def test_predictions_on_a_later_table_of_vertices_and_of_edges(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    vertices = {"id": np.arange(N), "amount": WITH_GAPS, "y": np.arange(N) % 3}
    graph = Graph.from_tables(vertices, EDGES, id="id", features="amount", label="y")
    graph.save(tmp_path / "g")
    run = weft.train(str(tmp_path / "g"), "gcn", epochs=2, hidden=4, out=tmp_path / "run")
    pandas.DataFrame({"id": np.arange(20) + 5, "amount": WITH_GAPS[5:25]}).to_parquet(tmp_path / "v.parquet")
    pandas.DataFrame({"source": [5, 6], "target": [6, 7]}).to_parquet(tmp_path / "e.parquet")
    words = ["predict", str(tmp_path / "run"), "--vertices", str(tmp_path / "v.parquet"), "--edges"]
    assert main([*words, str(tmp_path / "e.parquet"), "--out", str(tmp_path / "rows.npy")]) == 0
    assert graph.x is not None
    manual = Graph.from_edges([0, 1], [1, 2], x=graph.x[5:25])
    assert np.array_equal(np.load(tmp_path / "rows.npy"), weft.predict(run, manual).numpy())
    words = ["predict", str(tmp_path / "run"), "--vertices", str(tmp_path / "v.parquet")]
    assert main([*words, "--out", str(tmp_path / "more.npy")]) == 2


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('id = "user_id"', 'idd = "user_id"', r"\[vertices.user\]: unknown key 'idd': did you mean 'id'?"),
        ('source = "user.a"', 'source = "uses.a"', "vertex type 'uses': did you mean 'user'?"),
        ('source = "user.a"', 'source = "a"', r"\[edges.knows\]: source = 'a': give the vertex type and the column"),
        ('"age"', '"agee"', "users.parquet: unknown column of --features 'agee': did you mean 'age'?"),
        ('predict = "user"', 'predict = "item"', "item has no label, but is to be predicted"),
        ('predict = "user"', "predict =", "schema.toml: .*: correct the file"),
        ('table = "items.csv"', "", r"\[vertices.item\]: has no table: add table = "),
        ('table = "items.csv"', "table = 3", r"\[vertices.item\]: table = 3: give a text"),
        ('target = "item.item"', 'target = "user.item"', "column 'item', row 0: 1.. is a number, and .* contains text"),
        ('id = "item"', 'id = "item"\nsplit = "60,20,20"', "split of item has no effect: only the table to predict"),
        ('split = "60,20,20"', 'split = "60,20,x"', "split = '60,20,x': give a column, or 60,20,20"),
    ],
)
def test_schemas_that_are_refused(old: str, new: str, message: str, tmp_path: Path) -> None:
    write_company(tmp_path)
    (tmp_path / "schema.toml").write_text(SCHEMA.replace(old, new, 1))
    with pytest.raises(InputError, match=message) as error:
        Graph.from_schema(tmp_path / "schema.toml")
    assert "\n" not in str(error.value)


def test_a_damaged_schema_in_a_graph_folder_is_refused(tmp_path: Path) -> None:
    Graph.from_tables({"a": AMOUNT}, EDGES, features="a").save(tmp_path / "g")
    manifest = json.loads((tmp_path / "g" / "manifest.json").read_text())
    for damage in ({"kind": "no"}, {"no": 1}, {"center": 3}):
        record = json.loads(json.dumps(manifest["schema"]))
        record["vertices"][""]["features"][0].update(damage)
        (tmp_path / "g" / "manifest.json").write_text(json.dumps(manifest | {"schema": record}))
        with pytest.raises(InputError, match=r"manifest\.json: field 'schema' is damaged"):
            Graph.open(tmp_path / "g")
    again = Schema.from_record(manifest["schema"], "g").record()
    assert json.loads(json.dumps(again)) == manifest["schema"]


def test_a_draft_of_a_schema(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keys and references are recognised; the draft can be imported as it is, and is refused without edges."""
    write_company(tmp_path)
    paths = [str(tmp_path / name) for name in ("users.parquet", "items.csv", "purchases.parquet", "friends.parquet")]
    monkeypatch.chdir(tmp_path.parent)
    relative = [f"{tmp_path.name}/{Path(path).name}" for path in paths]
    assert main(["data", "schema", *relative, "--out", f"{tmp_path.name}/draft.toml"]) == 0
    text = (tmp_path / "draft.toml").read_text()
    assert '[edges.purchases]\ntable = "' in text
    assert 'source = "users.user_id"\ntarget = "items.item"\nfeatures = ["amount"]' in text
    assert 'source = "users.a"\ntarget = "users.b"' in text
    assert '# label = "risk"' in text
    assert main(["data", "import", str(tmp_path / "draft.toml"), "--out", str(tmp_path / "g")]) == 0
    assert main(["data", "import", str(tmp_path / "no.toml"), "--out", str(tmp_path / "g")]) == 2  # before it is read
    assert "a graph folder exists already" in capsys.readouterr().err
    assert main(["data", "schema", *paths, "--out", str(tmp_path / "draft.toml")]) == 2
    assert main(["data", "schema", *paths[:2]]) == 2
    odd = tmp_path / "my users (1).parquet"
    (tmp_path / "users.parquet").rename(odd)
    capsys.readouterr()
    assert main(["data", "schema", str(odd), *paths[1:3]]) == 0
    printed = capsys.readouterr().out
    assert "\n[vertices.my_users_1]\ntable = " in printed


def test_a_draft_of_tables_with_mistakes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An id that occurs twice is named; text with numbers refers to numbers, and a column before the key is no key."""
    numbers, calls_of = np.arange(1200), np.arange(900)
    users = {"rank": numbers + 9000, "user": np.append(numbers[:-1], 7), "age": numbers % 50}
    calls = {"caller": calls_of.astype(str), "callee": (7 * calls_of % 1100).astype(str), "length": calls_of}
    paths = [str(tmp_path / f"{name}.parquet") for name in ("users", "calls")]
    for path, columns in zip(paths, (users, calls), strict=True):
        pytest.importorskip("pandas").DataFrame(columns).to_parquet(path)
    assert main(["data", "schema", *paths]) == 0
    draft = capsys.readouterr().out
    duplicate = "# Correct the table first: user is 7 in rows 7 and 1199: give every vertex one row and one id"
    assert f'{duplicate}\nid = "user"\nfeatures = ["rank", "age"]\n' in draft
    assert 'source = "users.caller"\ntarget = "users.callee"\nfeatures = ["length"]\n' in draft


@pytest.mark.parametrize(
    ("users", "calls", "message"),
    [
        ("id,age\nu1,3\nu2\n", "", r"users.csv, line 3: has 1 value, and the header has 2 \(u2\): correct it"),
        ("id,age\nu1,3\nu2,4,5\n", "", r"users.csv, line 3: has 3 values, and the header has 2 \(u2,4,5\): correct"),
        ("", "", "users.csv: is empty: its first line must contain the names of the columns"),
        ("id,age\nu1,3\n", "", "calls.csv: is empty"),
    ],
)
def test_csv_files_with_mistakes(users: str, calls: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "users.csv").write_text(users)
    (tmp_path / "calls.csv").write_text(calls)
    with pytest.raises(InputError, match=message) as error:
        Graph.from_tables(tmp_path / "users.csv", tmp_path / "calls.csv", id="id", source="a", target="b")
    assert_one_line(error)
    (tmp_path / "folder").mkdir()
    with pytest.raises(InputError, match="folder: contains no table: give a file or folder of"):
        Graph.from_tables(tmp_path / "folder", tmp_path / "calls.csv", id="id")


@pytest.mark.parametrize(
    ("ids", "source", "message"),
    [
        ([0, 1], ["0", "u1"], "'source', row 1: 'u1' is text, and vertices: column 'id' contains whole numbers: save"),
        (["u0", "u1"], [0, 1], "'source', row 0: 0 is a number, and vertices: column 'id' contains text, such as 'u0'"),
        (None, [0, 1], "edges: of the columns 'source' and 'target', one contains text and the other numbers: save"),
    ],
)
def test_ids_of_two_kinds(ids: Any, source: Any, message: str) -> None:
    """The message names both tables, if ids are text in one and numbers in the other."""
    vertices = None if ids is None else {"id": ids}
    with pytest.raises(InputError, match=message) as error:
        Graph.from_tables(vertices, {"source": source, "target": ["u0", "u1"]}, id=None if ids is None else "id")
    assert_one_line(error)


def test_info_of_a_graph_from_tables(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_company(tmp_path)
    (tmp_path / "e.toml").write_text(
        SCHEMA.replace('predict = "user"', "").replace('label = "risk"\nsplit = "60,20,20"\n', "").replace(
            "[edges.buys]", '[edges.buys]\nlabel = "user_id"'
        )
    )  # fmt: skip
    assert main(["data", "import", str(tmp_path / "e.toml"), "--out", str(tmp_path / "g")]) == 0
    capsys.readouterr()
    assert main(["data", "info", str(tmp_path / "g")]) == 0
    lines = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert lines["features"] == "6 of user, 1 of item"
    assert lines["train"] == "edges       54"
    assert main(["train", str(tmp_path / "e.toml")]) == 2
    assert "must become a graph first: weft data import" in capsys.readouterr().err

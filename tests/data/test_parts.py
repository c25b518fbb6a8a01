"""Graphs imported in parts give the same store as whole graphs; an interrupted import leaves no files."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.lib.graph_checks import CALM, assert_one_line, same_graph
from weft.data import DataWarning, Graph
from weft.data.io.graph_parts import EdgesOfPart, GraphParts, gather_parts
from weft.data.store import external_sort, write_parts
from weft.data.store.external_sort import buckets
from weft.data.store.import_parts import import_parts
from weft.utils.errors import InputError


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Split every graph into several buckets and blocks."""
    monkeypatch.setattr(external_sort, "BUCKET_RECORDS", 5)
    monkeypatch.setattr(write_parts, "BLOCK_EDGES", 3)


@st.composite
def parts(draw: st.DrawFn) -> GraphParts:
    """Sample a small graph in parts, with or without weights, features, labels and a number of vertices."""
    num_vertices = draw(st.integers(1, 9))
    sizes = draw(st.lists(st.integers(0, 12), max_size=4))
    seed = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    weighted, featured, stated = draw(st.booleans()), draw(st.booleans()), draw(st.booleans())
    edges = [
        EdgesOfPart(
            source=torch.randint(0, num_vertices, (size,), generator=seed),
            target=torch.randint(0, num_vertices, (size,), generator=seed),
            weight=torch.rand(size, generator=seed) if weighted else None,
            features=torch.randn(size, 2, generator=seed) if featured else None,
        )
        for size in sizes
    ]
    x = torch.randn(num_vertices, 3, generator=seed)
    return GraphParts(
        name="drawn",
        edges=lambda: iter(edges),
        num_vertices=num_vertices if stated else None,
        x=(lambda: iter(x.split(2))) if stated else None,
        y=torch.randint(-1, 3, (num_vertices,), generator=seed) if stated else None,
        undirected=draw(st.booleans()),
    )


@pytest.mark.filterwarnings("ignore:undirected:weft.data.DataWarning")
@CALM
@given(parts=parts())
def test_equals_the_store_of_a_whole_graph(parts: GraphParts, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("stores")
    graph = Graph.of(gather_parts(parts))
    graph.save(folder / "whole")
    import_parts(parts, folder / "parts")
    same_graph(Graph.open(folder / "parts"), graph)
    manifests = [json.loads((folder / name / "manifest.json").read_text()) for name in ("whole", "parts")]
    for entry in (entry for manifest in manifests for entry in manifest["files"].values()):
        del entry["modified"]
    assert manifests[0] == manifests[1]
    assert not list(folder.glob(".*"))


def test_undirected_adds_missing_reverse_edges(tmp_path: Path) -> None:
    edges = EdgesOfPart(
        source=torch.tensor([0, 1, 2, 0, 2]), target=torch.tensor([1, 0, 2, 1, 1]), weight=torch.arange(5.0)
    )
    parts = GraphParts(name="g", edges=lambda: iter([edges]), undirected=True)
    for read in (lambda: Graph.of(gather_parts(parts)), lambda: import_parts(parts, tmp_path / "g")):
        with pytest.warns(DataWarning, match="1 pairs of vertices have edges of different weights") as caught:
            graph = read()
        assert len(caught) == 1
    source, target = graph.in_edges.edges()
    assert graph.in_edges.weight is not None
    weights = dict(zip(zip(source.tolist(), target.tolist(), strict=True), graph.in_edges.weight.tolist(), strict=True))
    assert weights == {(0, 1): 0.0, (1, 0): 1.0, (2, 2): 2.0, (2, 1): 4.0, (1, 2): 4.0}
    assert graph.num_edges == len(weights)


def test_buckets_contain_whole_rows() -> None:
    first_rows, offsets = buckets(torch.tensor([2, 0, 9, 1, 1, 4]).numpy(), num_records=5)
    assert first_rows.tolist() == [0, 2, 3, 5]
    assert offsets.tolist() == [0, 2, 11, 13, 17]


def failing(parts: GraphParts, error: BaseException) -> GraphParts:
    """Return the parts of a graph whose edges end with an error."""

    def edges() -> Iterator[EdgesOfPart]:
        yield from parts.edges()
        raise error

    return replace(parts, edges=edges)


SMALL = GraphParts(
    name="g",
    edges=lambda: iter([EdgesOfPart(source=torch.tensor([0, 1]), target=torch.tensor([1, 1]))]),
    num_vertices=2,
)


@pytest.mark.parametrize("error", [InputError("line 3"), KeyboardInterrupt(), OSError(28, "No space left")])
def test_an_interrupted_import_leaves_no_files(error: BaseException, tmp_path: Path) -> None:
    with pytest.raises(type(error)):
        import_parts(failing(SMALL, error), tmp_path / "g")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"x": lambda: iter([torch.zeros(3, 2)])}, "features has 3 rows, but the graph has 2 vertices"),
        ({"y": torch.tensor([0, -2])}, "y[1] is -2: classes count from 0"),
        ({"y": torch.tensor([0])}, "y has shape [1]"),
        ({"edges": lambda: iter([EdgesOfPart(source=torch.tensor([2**33]), target=torch.tensor([0]))])}, "2 vertices"),
        (
            {
                "edges": lambda: iter([EdgesOfPart(source=torch.tensor([2**33]), target=torch.tensor([0]))]),
                "num_vertices": None,
            },
            "number the vertices from 0",
        ),
    ],
)
def test_errors_name_the_field(changed: dict[str, object], message: str, tmp_path: Path) -> None:
    with pytest.raises(InputError) as error:
        import_parts(replace(SMALL, **changed), tmp_path / "g")  # type: ignore[arg-type]
    assert_one_line(error, message)
    assert not list(tmp_path.iterdir())

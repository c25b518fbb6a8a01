"""Predictions beyond memory: column by column, the same numbers, in files, without one large tensor."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import weft
from tests.lib.graphs import NUM_CLASSES, NUM_FEATURES, make_graph
from weft.data import Graph
from weft.parallel import row_ranges
from weft.parallel.columns import streamed_columns
from weft.parallel.columns.streamed_columns import StreamedColumns
from weft.storage.host_rows import HostRows
from weft.strategies import single
from weft.training import rank
from weft.utils.errors import InputError

WIDTH = 4
"""Number of columns for which the memory suffices."""


@pytest.fixture(params=[False])
def graph(request: pytest.FixtureRequest, tmp_path: Path) -> Graph:
    """A graph in a folder; with edge weights if the parameter is True."""
    make_graph(60, weighted=request.param).save(tmp_path / "graph")
    return Graph.open(tmp_path / "graph")


def limit_memory(graph: Graph, monkeypatch: pytest.MonkeyPatch, width: float = WIDTH, itemsize: int = 8) -> None:
    """Give this process the memory in which sums of `width` columns can be computed."""
    num_bytes = graph.num_vertices * itemsize * width / streamed_columns.MEMORY_SHARE
    for module in (streamed_columns, single, rank):
        monkeypatch.setattr(module, "memory_limit_bytes", lambda: math.ceil(num_bytes))
    monkeypatch.setattr(row_ranges, "RANGE_BYTES", 1000)


def widths_of_files(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list to which the number of columns of each new file is added."""
    widths, original = list[int](), HostRows.__init__

    def note(rows: HostRows, num_rows: int, width: int, *rest: Any, **named: Any) -> None:
        widths.append(width)
        original(rows, num_rows, width, *rest, **named)

    monkeypatch.setattr(HostRows, "__init__", note)
    return widths


def pyg_model(name: str) -> torch.nn.Module:
    nn = pytest.importorskip("torch_geometric.nn")
    return getattr(nn, name)(NUM_FEATURES, 9, 3, NUM_CLASSES, jk="cat").double()


@pytest.mark.parametrize(
    ("model", "options", "graph"),
    [
        ("gcn", {"residual": True, "norm": "layer"}, True),
        ("sage", {"norm": "batch"}, False),
        ("gin", {}, False),
        ("gcn", {"decoupled": True}, False),
        ("GraphSAGE", {}, False),
    ],
    ids=["weighted gcn", "sage", "gin", "decoupled", "pyg"],
    indirect=["graph"],
)
def test_rows_are_those_in_memory(
    model: str, options: dict[str, Any], graph: Graph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = pyg_model(model) if model[0].isupper() else model
    by_model = {"model": module} if model[0].isupper() else {}
    defaults = {} if by_model else {"hidden": 9, "layers": 3}
    run = weft.train(graph, module, out=tmp_path / "run", epochs=2, dtype="float64", quiet=True, **defaults, **options)
    expected = weft.predict(run, graph, **by_model)
    limit_memory(graph, monkeypatch)
    widths = widths_of_files(monkeypatch)
    assert (weft.predict(run, graph, **by_model) - expected).abs().max() < 1e-12
    assert 1 <= max(widths) <= WIDTH
    assert torch.equal(weft.predict(run, graph, what="classes", **by_model), expected.argmax(1))


def test_a_file_is_not_read_after_it_was_replaced(
    graph: Graph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """gcn needs one set of files, in which hidden rows and sums replace each other, also in bfloat16."""
    run = weft.train(graph, "gcn", out=tmp_path / "run", hidden=16, layers=3, epochs=1, dtype="bfloat16", quiet=True)
    expected = weft.predict(run, graph)
    limit_memory(graph, monkeypatch, width=16, itemsize=2)
    widths = widths_of_files(monkeypatch)
    rows = weft.predict(run, graph)
    # Sums of the features; hidden rows, which sums replace; transformed rows, of which logits are sums.
    assert widths == [NUM_FEATURES, 16, NUM_CLASSES]
    assert (rows - expected).abs().max() < 0.02 * expected.abs().max()


def test_what_does_not_fit_is_refused(graph: Graph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = {
        model: weft.train(graph, model, out=tmp_path / model, epochs=1, quiet=True, hidden=8)
        for model in ("gcn", "gat")
    }
    limit_memory(graph, monkeypatch, width=0.5, itemsize=4)
    with pytest.raises(InputError, match=r"graph: the sums of one column need .* of memory"):
        weft.predict(runs["gcn"], graph, out=tmp_path / "logits.npy")
    with pytest.raises(InputError, match=r"strategy single needs .* available: give --strategy offload"):
        weft.predict(runs["gat"], graph)
    assert not [*tmp_path.glob("*logits*")]


def test_an_error_in_a_column_shows(graph: Graph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = weft.train(graph, "gcn", out=tmp_path / "run", epochs=1, dtype="float64", quiet=True, hidden=8)
    expected = weft.predict(run, graph)
    limit_memory(graph, monkeypatch)
    right = StreamedColumns._features

    def wrong(streamed: StreamedColumns, columns: slice) -> Tensor:
        return right(streamed, slice(0, columns.stop - columns.start))

    monkeypatch.setattr(StreamedColumns, "_features", wrong)
    assert (weft.predict(run, graph) - expected).abs().max() > 1e-6

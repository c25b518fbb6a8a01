"""Features in 16 bits, or in int8 with scales, give the results of the same numbers in 32 bits, bit for bit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import weft
from weft.data import DataWarning, Graph, reorder
from weft.parallel.columns import streamed_columns
from weft.storage import host_rows
from weft.storage.host_rows import IndexedRows
from weft.storage.quantized_table import QuantizedTable
from weft.strategies import single
from weft.utils.errors import InputError

STRATEGIES = {
    "single": {},
    "tensor": {"workers": 2},
    "hybrid": {"workers": 2, "partition": "random"},
    "offload": {"device_memory": "600KB"},
    "pipeline": {"workers": 2, "chunks": 3},
    "split": {"workers": 2, "batch_size": "200", "cache_memory": "20KB"},
}
CASES = [
    pytest.param(name, dtype, marks=[] if quick else pytest.mark.slow, id=f"{name}-{dtype}".replace("torch.", ""))
    for name in STRATEGIES
    for dtype, quick in {torch.float16: True, torch.bfloat16: False, torch.int8: name == "tensor"}.items()
]


def narrow(dtype: torch.dtype) -> Graph:
    """Return `digits` with features that 32 bits can hold, but fewer bits not, before they are rounded."""
    graph = weft.load("digits")
    return replace(graph, x=graph.x / torch.linspace(3, 7, graph.num_features)).with_feature_dtype(dtype)


def wide(graph: Graph) -> Graph:
    """Return a graph with the same features in float32."""
    return replace(graph, x=graph.x[:].float())


@pytest.mark.parametrize(("strategy", "dtype"), CASES)
def test_losses_equal_those_of_wide_features(strategy: str, dtype: torch.dtype, tmp_path: Path) -> None:
    graph = narrow(dtype)
    graph.save(tmp_path / "narrow")
    stored = Graph.open(tmp_path / "narrow")
    assert stored.x.dtype == dtype
    options = {"strategy": strategy, "hidden": 8, "epochs": 2, **STRATEGIES[strategy]}
    losses, expected = (
        weft.train(each, out=tmp_path / name, **options).summary["loss"]
        for name, each in {"stored": stored, "wide": wide(graph)}.items()
    )
    assert losses == expected


def test_predictions_equal_those_of_wide_features(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Training aggregates the features column by column, and so does a prediction for which memory is short."""
    monkeypatch.setattr(host_rows, "FILE_SHARE", 0)
    graph = narrow(torch.int8)
    graphs = {"narrow": graph, "wide": wide(graph)}
    options = {"model": "sage", "hidden": 8, "epochs": 1, "dtype": "bfloat16"}
    runs = {name: weft.train(each, out=tmp_path / name, **options) for name, each in graphs.items()}
    assert runs["narrow"].summary["loss"] == runs["wide"].summary["loss"]
    for module in (streamed_columns, single):
        monkeypatch.setattr(module, "memory_limit_bytes", lambda: graph.num_vertices * 64)
    logits, expected = (weft.predict(runs[name], each) for name, each in graphs.items())
    assert torch.equal(logits, expected)


def test_numbers_in_int8_differ_by_half_a_scale() -> None:
    x = torch.randn(500, 4, generator=torch.Generator().manual_seed(0)) * torch.tensor([1e-3, 0.0, 1.0, 1e3])
    graph = Graph.from_edges([0], [1], x=x, num_vertices=500)
    table = graph.with_feature_dtype(torch.int8).x
    assert torch.equal(table.scale, (x.abs().amax(0) / 127).where(torch.tensor([True, False, True, True]), 1))
    assert ((table[:] - x).abs() <= table.scale * 0.500001).all()
    assert table.values.abs().amax(0).tolist() == [127, 0, 127, 127]


def test_columns_far_from_zero_are_named() -> None:
    x = torch.stack([torch.arange(1990.0, 2021), torch.linspace(-1, 1, 31)], 1)
    with pytest.warns(DataWarning, match=r"x\[:, 0\]: int8 has few numbers between 1990 and 2020: subtract an offset"):
        Graph.from_edges([0], [1], x=x).with_feature_dtype(torch.int8)


def test_rows_and_columns_of_a_table_in_int8() -> None:
    graph = narrow(torch.int8)
    x, ids = graph.x[:], torch.tensor([7, 3, 3, 900])
    assert torch.equal(x, graph.x.values * graph.x.scale)
    assert torch.equal(graph.x[ids], x[ids])
    assert torch.equal(graph.x[5:90, 3:17], x[5:90, 3:17])
    assert torch.equal(graph.x[ids, 3:17], x[ids, 3:17])
    rows = torch.empty(2, graph.num_features)
    IndexedRows(graph.x, ids, torch.float32).gather(torch.tensor([0, 3]), rows)
    assert torch.equal(rows, x[[7, 900]])
    reordered = reorder(graph, "degree")
    assert reordered.x.dtype == torch.int8
    assert torch.equal(reordered.x[:], x[reordered.ids])
    assert graph.density == wide(graph).density
    assert torch.equal(graph.with_feature_dtype(torch.float32).x, x)


def test_features_by_vertex_type_in_int8(tmp_path: Path) -> None:
    types = {"vertex_types": ("a", "b", "c"), "type_offsets": (0, 2, 3, 4)}
    features = {"a": torch.tensor([[1.0, 3.0], [0.5, 0.0]]), "c": torch.tensor([[5.0]])}
    graph = Graph.from_edges([0], [2], edge_type=[0], relations=("a|to|b",), features=features, **types)
    graph.with_feature_dtype(torch.int8).save(tmp_path / "graph")
    stored = Graph.open(tmp_path / "graph")
    assert {table.dtype for table in stored.features.values()} == {torch.int8}
    for name, x in features.items():
        assert (stored.features[name][:] - x).abs().max() < 0.02
    merged = Graph.from_edges([0], [2], x=torch.arange(8.0).view(4, 2), num_vertices=4, **types)
    by_type = merged.with_feature_dtype(torch.int8).by_type()
    assert by_type.features["a"].dtype == torch.int8
    assert (by_type.features["c"][:] - torch.tensor([[6.0, 7.0]])).abs().max() < 0.05


def test_a_number_beyond_the_range_is_refused() -> None:
    graph = Graph.from_edges([0], [1], x=torch.tensor([[1.0], [1e5]]))
    with pytest.raises(InputError, match=r"x\[1, 0\] is 1000000?"):
        graph.with_feature_dtype(torch.float16)
    with pytest.raises(InputError, match=r"cannot be stored as torch\.float64"):
        graph.with_feature_dtype(torch.float64)
    with pytest.raises(InputError, match="no features"):
        replace(graph, x=None).with_feature_dtype(torch.float16)
    with pytest.raises(InputError, match=r"x\[:, 0\] has 3\.4e\+38, which int8 cannot hold"):
        replace(graph, x=torch.full((2, 1), 3.4e38)).with_feature_dtype(torch.int8)


@pytest.mark.parametrize(
    ("values", "scale", "problem"),
    [
        (torch.zeros(3, 2), torch.ones(2), "give int8"),
        (torch.zeros(3, 2, dtype=torch.int8), torch.ones(2).double(), "scales float32"),
        (torch.zeros(3, 2, dtype=torch.int8), torch.ones(3), "one scale for each column"),
        (torch.zeros(3, 2, dtype=torch.int8), torch.tensor([1.0, 0.0]), "must be positive"),
        (torch.zeros(3, 2, dtype=torch.int8), torch.tensor([1.0, float("nan")]), "must be positive"),
    ],
)
def test_wrong_scales_are_refused(values: torch.Tensor, scale: torch.Tensor, problem: str) -> None:
    with pytest.raises(InputError, match=problem):
        QuantizedTable(values, scale)

"""Convolutions that normalize by degrees: which sums weft finds, PyG's results with them, and what stays refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.lib.convolutions import make_net
from tests.lib.graphs import NUM_CLASSES, NUM_FEATURES, make_graph
from weft.nn import GraphView, PyGConv, convert
from weft.nn.aggregate.topology import Topology
from weft.nn.layers.pyg_conv import ConvWithSums
from weft.nn.messages import InEdgeSums
from weft.utils.errors import InputError

pyg = pytest.importorskip("torch_geometric.nn")

from torch_geometric.typing import OptPairTensor  # noqa: E402
from torch_geometric.utils import degree, scatter  # noqa: E402


class Weighing(nn.Module):
    """A convolution that gets edge weights."""

    def __init__(self, conv: nn.Module) -> None:
        super().__init__()
        self.conv = conv

    def forward(self, x: Tensor, edge_index: Tensor, edge_weight: Tensor | None = None) -> Tensor:
        result: Tensor = self.conv(x, edge_index, edge_weight)
        return result


CONVOLUTIONS: dict[str, Callable[[], nn.Module]] = {
    "ChebConv": lambda: pyg.ChebConv(NUM_FEATURES, NUM_CLASSES, 3),
    "improved": lambda: pyg.GCNConv(NUM_FEATURES, NUM_CLASSES, improved=True),
    "maximum": lambda: pyg.GCNConv(NUM_FEATURES, NUM_CLASSES, add_self_loops=False, aggr="max"),
}


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_equals_pyg(name: str, weighted: bool) -> None:
    """Logits and gradients are PyG's, on a directed graph with loops, duplicate edges and an isolated vertex."""
    torch.manual_seed(0)
    graph, model = make_graph(23, weighted=weighted), Weighing(CONVOLUTIONS[name]()).double()
    converted = convert(model, edge_inputs=["edge_weight"] if weighted else [])
    assert graph.x is not None
    x, weight = graph.x.double(), graph.in_edges.weight
    edges = graph.in_edges.with_weight(None if weight is None else weight.double())
    results, gradients = [], []
    for logits in (
        converted([GraphView.of(edges) for _ in range(converted.num_stages)], x),
        model(x, torch.stack(edges.edges()), edges.weight),
    ):
        results.append(logits)
        gradients.append(torch.autograd.grad(logits.square().sum(), [*model.parameters()]))
    torch.testing.assert_close(*results, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(*gradients, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("name", "sums"),
    [
        ("FAConv", InEdgeSums((0,), ((),), learned=False)),
        ("PDNConv", InEdgeSums((0,), ((),), learned=True)),
        ("normalized by degrees", InEdgeSums((0,), ((),), learned=False)),
        ("normalized by learned weights", InEdgeSums((0,), ((2,),), learned=True)),
        ("TransformerConv", InEdgeSums()),
    ],
)
def test_sums_of_a_convolution(name: str, sums: InEdgeSums) -> None:
    model = convert(make_net(name), edge_inputs=[] if name == "FAConv" else ["edge_attr"])
    (layer,) = (part for part in model.modules() if isinstance(part, PyGConv))
    assert layer.sums == sums
    assert isinstance(layer, ConvWithSums) == bool(sums.calls)
    assert model.num_stages == 1 + bool(sums.calls)


class ScaledRows(pyg.MessagePassing):
    """A convolution that multiplies the rows of sources by what `scale` returns, from its rows and edges."""

    def __init__(self, scale: Callable[..., Tensor]) -> None:
        super().__init__()
        self.in_channels, self.out_channels, self.scale = NUM_FEATURES, NUM_FEATURES, scale

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        result: Tensor = self.propagate(edge_index, x=x, scale=self.scale(x, edge_index)[:, None])
        return result

    def message(self, x_j: Tensor, scale_j: Tensor) -> Tensor:
        return x_j * scale_j


def out_degrees(x: Tensor, edge_index: Tensor) -> Tensor:
    return degree(edge_index[0], len(x), x.dtype)


def sums_of_rows(x: Tensor, edge_index: Tensor) -> Tensor:
    return scatter(x[edge_index[0], 0], edge_index[1], dim_size=len(x))


def sums_of_sums(x: Tensor, edge_index: Tensor) -> Tensor:
    degrees = degree(edge_index[1], len(x), x.dtype)
    return scatter(degrees[edge_index[0]], edge_index[1], dim_size=len(x))


def hubs(x: Tensor, edge_index: Tensor) -> Tensor:
    return 1 + (degree(edge_index[1], len(x)) > 100).to(x.dtype)


def clamped_degrees(x: Tensor, edge_index: Tensor) -> Tensor:
    return torch.bincount(edge_index[1], minlength=len(x)).clamp(min=16).to(x.dtype).rsqrt()


def hubs_by_out_edges(x: Tensor, edge_index: Tensor) -> Tensor:
    return hubs(x, edge_index.flip(0))


def neighbours_of_a_year(x: Tensor, edge_index: Tensor) -> Tensor:
    return scatter((x[edge_index[0], 1] == 2015).to(x.dtype), edge_index[1], dim_size=len(x))


def neighbours_that_are_hubs(x: Tensor, edge_index: Tensor) -> Tensor:
    return scatter(hubs(x, edge_index)[edge_index[0]] - 1, edge_index[1], dim_size=len(x))


def sums_of_a_number(x: Tensor, edge_index: Tensor) -> Tensor:
    return scatter(torch.full(edge_index[:1].shape[1:], float(x.max())), edge_index[1], dim_size=len(x))


@pytest.mark.parametrize("scale", [hubs, clamped_degrees])
def test_thresholds_of_degrees_are_found(scale: Callable[..., Tensor]) -> None:
    """On the few edges of a trial, no degree reaches the threshold, so that the results alone do not tell."""
    model = convert(pyg.Sequential("x, edge_index", [(ScaledRows(scale), "x, edge_index -> x")]))
    assert any(isinstance(part, ConvWithSums) for part in model.modules())


def test_thresholds_in_a_convolution_of_pairs_are_refused() -> None:
    """A convolution that gets rows of targets apart cannot compute the sums of sources in a step before."""

    class OfPair(ScaledRows):
        def forward(self, x: Any, edge_index: Tensor) -> Tensor:
            return super().forward(x if isinstance(x, Tensor) else x[0], edge_index)

    OfPair.forward.__annotations__["x"] = OptPairTensor
    with pytest.raises(InputError, match="OfPair reads more of the graph than the in-edges of a vertex"):
        convert(pyg.Sequential("x, edge_index", [(OfPair(hubs), "x, edge_index -> x")]))


class ScaledByPositions(ScaledRows):
    """A convolution that also gets positions."""

    def forward(self, x: Tensor, positions: Tensor, edge_index: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x * (positions @ x.new_ones(3, 1)), edge_index)


def test_further_rows_may_have_another_width_than_the_first() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = ScaledByPositions(hubs)

        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            result: Tensor = self.conv(x, x[:, :3], edge_index)
            return result

    assert convert(Net()).num_stages == 2


def test_sums_that_only_targets_read_need_no_exchange() -> None:
    class OfTargets(ScaledRows):
        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            result: Tensor = self.propagate(edge_index, x=x, scale=torch.ones_like(x[:, :1]))
            return result * self.scale(x, edge_index)[:, None]

    model = convert(pyg.Sequential("x, edge_index", [(OfTargets(sums_of_rows), "x, edge_index -> x")]))
    assert model.num_stages == 1


class ScaledByConstant(ScaledRows):
    """A convolution whose scale is the degree times a parameter that is not trained."""

    def __init__(self) -> None:
        super().__init__(out_degrees)
        self.factor = nn.Parameter(torch.ones(1), requires_grad=False)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        degrees = scatter(self.factor.expand(edge_index.shape[1]), edge_index[1], dim_size=len(x))
        result: Tensor = self.propagate(edge_index, x=x, scale=degrees[:, None])
        return result


def test_constant_sums_are_computed_again_only_if_they_change(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, compute = list[InEdgeSums](), InEdgeSums.compute
    graph, conv = make_graph(23), ScaledByConstant()
    model = convert(pyg.Sequential("x, edge_index", [(conv, "x, edge_index -> x")]))
    monkeypatch.setattr(InEdgeSums, "compute", lambda sums, call: calls.append(sums) or compute(sums, call))
    assert graph.x is not None
    x, topology = graph.x.float(), Topology(graph.in_edges)
    for factor, num_calls in ((1.0, 1), (2.0, 2)):
        conv.factor.fill_(factor)
        for _ in range(2):
            logits = model([GraphView(topology) for _ in range(model.num_stages)], x)
            torch.testing.assert_close(logits, conv(x, topology.edge_index))
        assert len(calls) == num_calls


@pytest.mark.parametrize("dtype", [None, torch.int64])
def test_sums_may_have_another_type_than_rows(dtype: torch.dtype | None) -> None:
    """PyG's `degree` returns float32 unless it gets a type. weft compares results in float64."""
    conv = ScaledRows(lambda x, edge_index: 1 / (1 + degree(edge_index[1], len(x), dtype)).to(x.dtype))
    model = convert(pyg.Sequential("x, edge_index", [(conv, "x, edge_index -> x")]))
    assert any(isinstance(part, ConvWithSums) for part in model.modules())


@pytest.mark.parametrize(
    "scale",
    [
        *(out_degrees, sums_of_rows, sums_of_sums),
        *(hubs_by_out_edges, neighbours_of_a_year, neighbours_that_are_hubs, sums_of_a_number),
    ],
)
def test_other_sums_are_refused(scale: Callable[..., Tensor]) -> None:
    with pytest.raises(InputError, match="ScaledRows reads more of the graph than the in-edges of a vertex"):
        convert(pyg.Sequential("x, edge_index", [(ScaledRows(scale), "x, edge_index -> x")]))


def test_cached_edges_are_refused() -> None:
    net = make_net("FAConv")
    net.conv.cached = True  # type: ignore[union-attr]
    with pytest.raises(InputError, match="FAConv with cached=True reuses the edges of its first call"):
        convert(net)


def test_negative_weights_have_no_laplacian() -> None:
    edges = make_graph(23, weighted=True).in_edges
    assert edges.weight is not None
    with pytest.raises(InputError, match=r"an edge weight is -1, and a Laplacian needs weights of at least 0"):
        Topology(edges.with_weight(edges.weight.index_fill(0, torch.tensor([2]), -1))).laplacian(True, torch.float64)


@pytest.mark.parametrize("error", ["local sums", "sums of other vertices", "in-degrees in a Laplacian"])
def test_a_planted_error_is_detected(error: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A convolution reads the sums that a rank has computed itself, or those of another vertex."""
    call, root_scale = ConvWithSums._call, Topology._root_scale

    def planted(self: ConvWithSums, view: Any, sources: Tensor, *rest: Any) -> Tensor:
        width = sum(self.row_arguments.widths)
        if sources.shape[1] == 1:
            return call(self, view, sources, *rest)
        if error == "local sums":
            return PyGConv._call(self, view, sources[:, :width], *rest)
        rows, sums = sources.split([width, self.sums.width], 1)
        return call(self, view, torch.cat([rows, sums.roll(1, 0)], 1), *rest)

    if error == "in-degrees in a Laplacian":
        monkeypatch.setattr(Topology, "_out_root_scale", lambda *values: root_scale(*values, adds_loops=False))
    else:
        monkeypatch.setattr(ConvWithSums, "_call", planted)
    with pytest.raises(InputError, match="would compute other numbers than in PyG"):
        convert(make_net("ChebConv" if "Laplacian" in error else "FAConv"))

"""Converted models of HeteroData have PyG's results for every vertex type; a failed conversion names the line."""

from __future__ import annotations

import copy
import gc
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.lib.graphs import make_named_relations, make_typed_graph
from tests.lib.session import Flops
from weft.comm import Group
from weft.config.optimisations import Optimisations
from weft.data import Graph, GraphShape
from weft.nn import Converted, GraphView, Workload, check_row_independence, convert
from weft.nn.aggregate.topology import Topology
from weft.nn.aggregate.typed_block import RelationEdges, TypeOrder
from weft.nn.convert import hetero
from weft.nn.convert.typed_steps import MeanOfType
from weft.nn.graph_view import Inputs
from weft.nn.layers.relation_convs import HanAttention, RelationBlock, RelationConv, RelationConvs
from weft.nn.layers.typed_input import typed_rows
from weft.nn.sparse_rows import SparseRows
from weft.nn.workload.outline_view import OutlineView
from weft.strategies import get_strategy
from weft.utils.errors import InputError

pyg = pytest.importorskip("torch_geometric.nn")

from torch_geometric.data import HeteroData  # noqa: E402

from benchmarks.pyg_models import BY_TYPE, RELATIONS, SMALL, Hetero, HeteroEdges  # noqa: E402


def graph_of(name: str) -> Graph:
    graph = make_typed_graph(23, "some" if "some" in name else "x")
    if "edges" in name:
        graph = replace(graph, edge_features=torch.randn(graph.num_edges, 3))
    return make_named_relations(graph).by_type()


def make_model(name: str, **options: Any) -> nn.Module:
    torch.manual_seed(3)
    model = BY_TYPE[name](**options).double()
    for parameter in model.parameters():
        nn.init.uniform_(parameter, -0.6, 0.6)
    return model


def of_pyg(model: nn.Module, graph: Graph) -> dict[str, Tensor]:
    data = graph.to_pyg()
    values = {} if graph.edge_features is None else {"edge_attr_dict": data.edge_attr_dict}
    values = {name: {key: x.double() for key, x in value.items()} for name, value in values.items()}
    rows = model({name: x.double() for name, x in data.x_dict.items()}, data.edge_index_dict, **values)
    return rows if isinstance(rows, dict) else {"a": rows}


def of_weft(model: Converted, graph: Graph) -> Tensor:
    features = None if graph.edge_features is None else graph.edge_features.double()
    topology = Topology(
        graph.in_edges, edge_type=graph.edge_type, num_relations=len(graph.relations), edge_features=features
    )
    x = torch.empty(graph.num_vertices, 0, dtype=torch.float64)
    inputs = Inputs(rows=x, typed=typed_rows(graph, slice(None), "cpu", torch.float64))
    return model([GraphView(topology, inputs=inputs) for _ in range(model.num_stages)], x)


@pytest.mark.parametrize("name", BY_TYPE)
def test_equals_pyg(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits of the vertex types that the model returns, gradients and evaluation equal PyG's; other logits are 0."""
    graph, model = graph_of(name), make_model(name)
    shape, inputs = GraphShape.of(graph), ["edge_attr"] if "edges" in name else []
    original, converted = copy.deepcopy(model), convert(model, edge_inputs=inputs, shape=shape).train()
    with monkeypatch.context() as patch:
        patch.setattr(F, "dropout", lambda x, *_, **__: x)
        patch.setattr(GraphView, "dropout", lambda _self, x, _p, **_: x)
        y, expected = of_weft(converted, graph), of_pyg(original.train(), graph)
    check_by_type(graph, y, expected)
    grad = torch.randn_like(y)
    y.backward(grad)
    ranges = [graph.type_range(vertex_type) for vertex_type in expected]
    torch.autograd.backward(list(expected.values()), [grad[span.start : span.stop] for span in ranges])
    parameters = dict(model.named_parameters())
    for path, parameter in original.named_parameters():
        expected_grad = parameter.grad
        if expected_grad is None:  # no row that this parameter computes is read
            assert parameters[path].grad is None or not parameters[path].grad.any(), path
        else:
            torch.testing.assert_close(parameters[path].grad, expected_grad, rtol=1e-9, atol=1e-9, msg=path)
    check_by_type(graph, of_weft(converted.eval(), graph), of_pyg(original.eval(), graph))


@pytest.mark.parametrize("name", BY_TYPE)
def test_rows_are_independent_of_others(name: str) -> None:
    """Ranks may store some of the rows: no layer is said to mix rows, since all run on the rows of each type."""
    graph, edges = graph_of(name), ["edge_attr"] if "edges" in name else []
    model = convert(make_model(name), edge_inputs=edges, shape=GraphShape.of(graph))
    check_row_independence(Workload(model, graph), all_rows=False)


def test_linear_transforms_of_sparse_features_take_all_arguments() -> None:
    x, bias = torch.zeros(9, 20, dtype=torch.float64).index_fill_(1, torch.tensor([3]), 2.0), torch.ones(4).double()
    sparse, weight = SparseRows.of(x, 0.05), torch.randn(4, 20, dtype=torch.float64)
    for result in (
        F.linear(sparse, weight, bias),
        F.linear(sparse, weight, bias=bias),
        F.linear(input=sparse, weight=weight, bias=bias),
    ):
        torch.testing.assert_close(result, x @ weight.t() + bias, rtol=1e-12, atol=0)
    torch.testing.assert_close(F.linear(sparse, weight[0]), x @ weight[0], rtol=1e-12, atol=0)
    sparse.mul_(2)
    torch.testing.assert_close(F.linear(sparse, weight), x @ weight.t(), rtol=1e-12, atol=0)


WIDTHS = {"a": 3, "b": 4, "c": 5, "d": 6, "e": 7}
"""Number of features by vertex type, in a graph with five types and nine relations."""
NINE = [("abcde"[i % 5], f"r{i}", "abcde"[(2 * i + 1) % 5]) for i in range(9)]
"""Relations of this graph, two of which join the same types."""


class Wide(nn.Module):
    """Two layers of a convolution by relation, over rows of another width for each type."""

    def __init__(self, kind: Any, **options: Any) -> None:
        super().__init__()
        first = {(s, name, t): kind((WIDTHS[s], WIDTHS[t]), 16, **options) for s, name, t in NINE}
        second = {relation: kind((16, 16), 16, **options) for relation in NINE}
        self.convs = nn.ModuleList(pyg.HeteroConv(convs) for convs in (first, second))

    def forward(self, x_dict: dict[str, Tensor], edge_index_dict: dict[Any, Tensor]) -> dict[str, Tensor]:
        for conv in self.convs:
            x_dict = {name: x.relu() for name, x in conv(x_dict, edge_index_dict).items()}
        return x_dict


def make_nine_relations(*, sparse: bool = False) -> Graph:
    """Return a graph with five types and nine relations; if `sparse`, most features of all types but one are zero."""
    random, data = torch.Generator().manual_seed(0), HeteroData()
    sizes = {name: 20 + 10 * number for number, name in enumerate(WIDTHS)}
    for name, size in sizes.items():
        data[name].x = torch.randn(size, WIDTHS[name], generator=random)
        if sparse and name != "e":
            data[name].x[torch.arange(size * WIDTHS[name]).view(size, -1) % 11 > 0] = 0
    for source, name, target in NINE:
        ends = [torch.randint(sizes[end], (90,), generator=random) for end in (source, target)]
        data[source, name, target].edge_index = torch.stack(ends)
    return Graph.from_pyg(data)


@pytest.mark.parametrize("aggr", ["sum", "mean"])
@pytest.mark.parametrize("kind", ["SAGEConv", "GraphConv"])
def test_relations_need_no_more_flops_than_in_pyg(kind: str, aggr: str) -> None:
    """Each relation multiplies its own columns of the joined rows, and only rows of targets with in-edges by it."""
    torch.manual_seed(3)
    graph, model = make_nine_relations(), Wide(getattr(pyg, kind), aggr=aggr).double()
    converted = convert(copy.deepcopy(model), shape=GraphShape.of(graph))
    with Flops() as flops:
        y = of_weft(converted, graph)
        y.sum().backward()
    with Flops() as expected_flops:
        expected = of_pyg(model, graph)
        torch.cat([*expected.values()]).sum().backward()
    check_by_type(graph, y, expected)
    for parameter, original in zip(converted.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, original.grad)
    assert 0.5 * expected_flops.total < flops.total < expected_flops.total


@pytest.mark.parametrize("kind", ["GATConv", "GATv2Conv", "TransformerConv"])
def test_sparse_features_are_multiplied_by_their_nonzeros(kind: str) -> None:
    """Also inside of PyG's convolutions, with PyG's results; the plan counts as many FLOPs, which are fewer."""
    torch.manual_seed(3)
    graph, options = make_nine_relations(sparse=True), {} if kind == "TransformerConv" else {"add_self_loops": False}
    model = Wide(getattr(pyg, kind), **options).double()
    converted = convert(copy.deepcopy(model), shape=GraphShape.of(graph))
    traces = {}
    for without in ("reach,sparse", "reach"):
        plan = get_strategy("single")(Workload(converted, graph, Optimisations.without(without)), 1)
        traces[without] = plan.trace(0, training=True)
    placed = plan.place(Group())
    (step,) = placed.steps(0)
    with Flops() as flops:
        y = placed.forward(step)
        placed.backward(y, torch.ones_like(y))
    expected = of_pyg(model, graph)
    torch.cat([*expected.values()]).sum().backward()
    check_by_type(graph, y, expected)
    for parameter, original in zip(placed.model.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, original.grad, rtol=1e-9, atol=1e-9)
    assert flops.total == traces["reach"].flops < traces["reach,sparse"].flops
    calls = [call for operation in traces["reach"].operations for call in operation.calls]
    for kernel in ("sparse", "sparse_backward"):
        assert {call.sizes[2] for call in calls if call.kernel == kernel} == {WIDTHS[name] for name in "abcd"}


@pytest.mark.parametrize("error", ["another column", "dense products in the plan"])
def test_a_planted_error_in_sparse_features_is_detected(error: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if error == "another column":
        right = SparseRows.transformed
        wrong = lambda x, weight, added=None: right(x, weight.roll(1, 1), added)  # noqa: E731
        monkeypatch.setattr(SparseRows, "transformed", wrong)
    else:
        monkeypatch.setattr(OutlineView, "has_all_sources", False)
    with pytest.raises(AssertionError):
        test_sparse_features_are_multiplied_by_their_nonzeros("GATConv")


def test_a_step_leaves_no_tensors_to_the_garbage_collector() -> None:
    """Live rows of a step would stay in memory until Python happens to collect cycles."""
    graph = graph_of("pyg-hetero")
    converted = convert(make_model("pyg-hetero"), shape=GraphShape.of(graph))
    gc.collect()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        of_weft(converted, graph).sum().backward()
        gc.collect()
        assert not any(isinstance(each, Tensor) for each in gc.garbage)
    finally:
        gc.set_debug(0)
        gc.garbage.clear()


def test_transforms_by_type_write_no_slices() -> None:
    """PyTorch copies the gradient of all rows for each slice that a forward pass wrote, as PyG's HGTConv does."""
    graph = graph_of("pyg-hetero-hgt")
    y = of_weft(convert(make_model("pyg-hetero-hgt"), shape=GraphShape.of(graph)), graph)
    functions, waiting = set[Any](), [y.grad_fn]
    while waiting:
        function = waiting.pop()
        if function is not None and function not in functions:
            functions.add(function)
            waiting += [source for source, _ in function.next_functions]
    names = {function.name() for function in functions}
    assert "CatBackward0" in names
    assert not any("CopySlices" in name for name in names)


def check_by_type(graph: Graph, y: Tensor, expected: dict[str, Tensor]) -> None:
    for name in graph.vertex_types:
        span = graph.type_range(name)
        rows = y[span.start : span.stop]
        torch.testing.assert_close(rows, expected.get(name, torch.zeros_like(rows)), rtol=1e-9, atol=1e-9)


def test_a_layer_needs_one_aggregate() -> None:
    """All relations of a layer share one aggregate. Parameters keep the names of the model."""
    for name, number in (("pyg-hetero", 2), ("pyg-hetero-max", 2), ("pyg-to-hetero", 2)):
        model = make_model(name)
        converted = convert(model, shape=GraphShape.of(graph_of(name)))
        assert converted.num_stages == number
        assert converted.state_dict().keys() == model.state_dict().keys()


@pytest.mark.parametrize("error", ["another kind of rows", "a sum for a mean", "another relation"])
def test_a_planted_error_is_detected(error: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right = hetero.JoinedRelations
    if error == "another kind of rows":
        split = TypeOrder.split
        monkeypatch.setattr(TypeOrder, "split", lambda order, x, places: split(order, x.roll(1, 0), places))
    elif error == "a sum for a mean":
        monkeypatch.setattr(hetero, "JoinedRelations", lambda _reduce, *rest: right("sum", *rest))
    else:
        wrong = lambda reduce, slots, *rest: right(reduce, (slots[0]._replace(relation=1), *slots[1:]), *rest)  # noqa: E731
        monkeypatch.setattr(hetero, "JoinedRelations", wrong)
    with pytest.raises((AssertionError, InputError)):
        test_equals_pyg("pyg-hetero", monkeypatch)


@pytest.mark.parametrize("error", ["another relation", "rows of other vertices"])
def test_a_planted_error_in_convolutions_by_relation_is_detected(error: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RelationConvs.on_block

    def wrong(self: RelationConvs, view: Any, block: Any, rows: Any) -> Any:
        first, *rest = self.inputs
        if error == "another relation":
            self.inputs = [first._replace(relation=len(rest)), *rest]
        else:
            rows = [x.roll(1, 0) for x in rows]
        return run(self, view, block, rows)

    monkeypatch.setattr(RelationConvs, "on_block", wrong)
    with pytest.raises(InputError, match="would compute other numbers"):
        test_equals_pyg("pyg-hetero-attention", monkeypatch)


@pytest.mark.parametrize("error", ["another relation", "a sum for a mean"])
def test_a_planted_error_in_attention_over_relations_is_detected(error: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if error == "another relation":
        monkeypatch.setattr(RelationBlock, "relation", 0)
    else:
        resume = MeanOfType.resume
        monkeypatch.setattr(MeanOfType, "resume", lambda *values: 2 * resume(*values))
    with pytest.raises(InputError, match="would compute other numbers than in PyG"):
        test_equals_pyg("pyg-hetero-han", monkeypatch)


class SomeRelations(nn.Module):
    """HANConv on all relations but the first one of the graph."""

    def __init__(self) -> None:
        super().__init__()
        _, *self.relations = RELATIONS
        self.conv = pyg.HANConv(dict.fromkeys("abc", SMALL.features), SMALL.classes, (["a", "b", "c"], self.relations))

    def forward(self, x_dict: dict[str, Tensor], edge_index_dict: dict[Any, Tensor]) -> Tensor:
        result: Tensor = self.conv(x_dict, {each: edge_index_dict[each] for each in self.relations})["a"]
        return result


def test_attention_over_some_relations_is_planned() -> None:
    graph = graph_of("x")
    model = convert(SomeRelations().double(), shape=GraphShape.of(graph))
    (layer, *_) = (part for part in model.modules() if isinstance(part, HanAttention))
    assert "__".join(RELATIONS[0]) not in layer.conv.lin_src
    trace = get_strategy("communicated")(Workload(model, graph), 2).trace(0, training=True)
    assert trace.operations


def test_dropout_of_attention_over_relations_is_refused() -> None:
    model = make_model("pyg-hetero-han")
    model.conv1.dropout = 0.3
    with pytest.raises(InputError, match=r"pyg_models\.py:\d+ .*: HANConv has dropout=0\.3, whose masks would differ"):
        convert(model, shape=GraphShape.of(graph_of("x")))


class Written(nn.Module):
    """A model whose forward pass, and whose convolution over the first relation, are the given ones."""

    def __init__(self, forward: Any, conv: nn.Module | None = None) -> None:
        super().__init__()
        self.written, self.lin = forward, nn.Linear(7, 7)
        conv = conv or pyg.SAGEConv((7, 7), 7)
        self.conv = pyg.HeteroConv({RELATIONS[0]: conv})

    def forward(self, x_dict: dict[str, Tensor], edge_index_dict: dict[Any, Tensor]) -> Any:
        return self.written(self, x_dict, edge_index_dict)


def plain(self: Any, x_dict: Any, edge_index_dict: Any) -> Any:
    return self.conv(x_dict, edge_index_dict)["a"]


def mixing(self: Any, x_dict: Any, edge_index_dict: Any) -> Any:
    return self.conv(x_dict, edge_index_dict)["a"] + x_dict["b"]


def misnaming(self: Any, x_dict: Any, edge_index_dict: Any) -> Any:
    return {"b": self.conv(x_dict, edge_index_dict)["a"]}


def reading_edges(_self: Any, x_dict: Any, edge_index_dict: Any) -> Any:
    return x_dict["a"] * edge_index_dict["a", "r0", "a"].sum()


def reversing_edges(self: Any, x_dict: Any, edge_index_dict: Any) -> Any:
    return self.conv(x_dict, {relation: edges.flip(0) for relation, edges in edge_index_dict.items()})["a"]


def crossing(self: Any, x_dict: Any, edge_index_dict: Any) -> Any:
    return self.conv({"a": x_dict["b"]}, edge_index_dict)["a"]


@pytest.mark.parametrize(
    ("forward", "message"),
    [
        (mixing, r"x_dict\[.b.\].*rows of a and b are combined"),
        (misnaming, "must return the rows of a vertex type"),
        (reading_edges, r"sum\(\).*the model uses \w+ outside of a convolution"),
        (reversing_edges, "SAGEConv gets edges that are not in edge_index_dict"),
        (crossing, r"SAGEConv over a\|r0\|a must get rows of a and of a"),
    ],
)
def test_what_cannot_be_converted_is_refused(forward: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        convert(Written(forward), shape=GraphShape.of(graph_of("x")))


@pytest.mark.parametrize(
    ("conv", "message"),
    [
        (lambda: pyg.GATConv((7, 7), 7, dropout=0.5), r"conv\(x_dict, edge_index_dict\).*GATConv has dropout=0\.5"),
        (lambda: pyg.GCNConv(7, 7), r"conv\(x_dict, edge_index_dict\).*GCNConv reads more of the graph"),
    ],
)
def test_unsupported_convolutions_are_refused(conv: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        convert(Written(plain, conv()), shape=GraphShape.of(graph_of("x")))


class OwnMean(pyg.MessagePassing):
    """Mean of source rows plus the target's row; without an annotation of x, which tests set."""

    def __init__(self) -> None:
        super().__init__(aggr="mean")
        self.lin, self.lin_root = nn.Linear(7, 5), nn.Linear(7, 5)
        self.out_channels = 5

    def forward(self, x, edge_index):  # type: ignore[no-untyped-def]
        x_source, x_target = (x, x) if isinstance(x, Tensor) else x
        size = (len(x_source), len(x_target))
        return self.propagate(edge_index, x=(self.lin(x_source), None), size=size) + self.lin_root(x_target)

    def message(self, x_j: Tensor) -> Tensor:
        return x_j


class BetweenTypes(nn.Module):
    """A HeteroConv of `OwnMean`."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = pyg.HeteroConv({relation: OwnMean() for relation in RELATIONS})

    def forward(self, x_dict: dict[str, Tensor], edge_index_dict: dict[Any, Tensor]) -> Any:
        return self.conv(x_dict, edge_index_dict)["a"]


@pytest.mark.parametrize("annotation", [Tensor | tuple[Tensor, Tensor], "Union[Tensor, OptPairTensor]"], ids=str)
def test_own_layers_run_between_types(annotation: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(OwnMean.forward.__annotations__, "x", annotation)
    graph, model = graph_of("x"), BetweenTypes().double()
    y = of_weft(convert(model, shape=GraphShape.of(graph)).eval(), graph)
    check_by_type(graph, y, of_pyg(model, graph))


def test_own_layers_that_take_no_pair_are_refused_between_types() -> None:
    with pytest.raises(InputError, match=r"OwnMean takes no pair.*annotate x in its forward"):
        convert(BetweenTypes(), shape=GraphShape.of(graph_of("x")))


def test_self_loops_between_types_are_refused() -> None:
    class Crossing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = pyg.GATConv((7, 7), 7)

        def forward(self, x_dict: dict[str, Tensor], edge_index_dict: dict[Any, Tensor]) -> Tensor:
            return self.conv((x_dict["b"], x_dict["a"]), edge_index_dict[RELATIONS[1]])

    with pytest.raises(InputError, match="GATConv with add_self_loops=True joins vertices of two types"):
        convert(Crossing(), shape=GraphShape.of(graph_of("x")))


def test_a_convolution_computes_the_rows_of_its_types_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under `single`, so that the FLOPs of convolutions are PyG's."""
    graph, model, rows = graph_of("x"), make_model("pyg-hetero-attention"), list[tuple[int, int]]()
    converted = convert(model, shape=GraphShape.of(graph))
    run = RelationConvs.on_block

    def record(self: RelationConvs, view: Any, block: Any, x: Sequence[Tensor]) -> Sequence[Tensor]:
        results = run(self, view, block, x)
        rows.extend((len(x[each.source]), len(y)) for each, y in zip(self.inputs, results, strict=True))
        return results

    monkeypatch.setattr(RelationConvs, "on_block", record)
    of_weft(converted, graph)
    sizes = {name: len(graph.type_range(name)) for name in graph.vertex_types}
    used = [(source, target) for source, _, target in RELATIONS if target == "a"]
    assert len(set(sizes.values())) > 1
    assert {(sizes[source], sizes[target]) for source, target in used} <= set(rows)
    assert max(number for pair in rows for number in pair) == max(sizes.values()) < graph.num_vertices


KERNEL_OPTIONS: list[tuple[Any, dict[str, Any]]] = [
    (pyg.GATConv, {"concat": False, "negative_slope": 0.4, "add_self_loops": False}),
    (pyg.GATConv, {"residual": True, "bias": False, "add_self_loops": False}),
    (pyg.GATv2Conv, {"concat": False, "residual": True, "add_self_loops": False}),
    (pyg.TransformerConv, {}),
    (pyg.TransformerConv, {"concat": False, "beta": True}),
    (pyg.TransformerConv, {"beta": True, "bias": False}),
    (pyg.TransformerConv, {"root_weight": False}),
]
"""Convolutions between two types that weft's kernels compute, with their options."""


@pytest.mark.parametrize(("kind", "options"), KERNEL_OPTIONS)
def test_attention_by_kernels_equals_pyg(kind: Any, options: dict[str, Any]) -> None:
    """Results and gradients equal PyG's, with parallel edges and a target without in-edges."""
    torch.manual_seed(0)
    conv = kind((3, 5), 2, heads=3, **options).double()
    rows = torch.randn(6, 3, dtype=torch.float64), torch.randn(4, 5, dtype=torch.float64)
    index = torch.stack([torch.randint(6, (20,)), torch.randint(3, (20,)).sort().values])
    layer = RelationConv(conv, 0)
    assert layer.has_kernel
    y, expected = (
        layer(RelationBlock(cast(Any, None), RelationEdges(index), 4, rows[1], (0, 0, 1)), rows[0]),
        conv(rows, index),
    )
    torch.testing.assert_close(y, expected, rtol=1e-9, atol=1e-9)
    grads = (
        torch.autograd.grad(each.square().sum(), [*conv.parameters()], allow_unused=True) for each in (y, expected)
    )
    for ours, of_pyg in zip(*grads, strict=True):
        torch.testing.assert_close(ours, of_pyg, rtol=1e-9, atol=1e-9)


def test_a_convolution_over_vertices_without_features_is_refused() -> None:
    """Vertex types without features have no input rows, as in PyG, so no convolution can read or return them."""
    with pytest.raises(InputError, match=r"SAGEConv over c\|r2\|a must get rows of c"):
        convert(Hetero(SMALL, {"a": 4, "b": 3, "c": 3}), shape=GraphShape.of(graph_of("some")))


def test_uninitialized_lazy_layers_are_refused() -> None:
    with pytest.raises(InputError, match="run one forward pass on your data"):
        convert(Written(plain, pyg.SAGEConv((-1, -1), 7)), shape=GraphShape.of(graph_of("x")))


def test_a_graph_without_vertex_types_is_refused() -> None:
    with pytest.raises(InputError, match="Hetero takes rows by vertex type, but the graph has no vertex types"):
        convert(make_model("pyg-hetero"))


class Transforming(HeteroEdges):
    """Passes transformed edge features to its convolutions."""

    def forward(self, x_dict: Any, edge_index_dict: Any, edge_attr_dict: Any) -> Any:
        return super().forward(x_dict, edge_index_dict, {name: x.relu() for name, x in edge_attr_dict.items()})


class Weighted(Hetero):
    def forward(self, x_dict: Any, edge_index_dict: Any, edge_weight_dict: Any = None) -> Any:  # noqa: ARG002
        return super().forward(x_dict, edge_index_dict)


def test_other_values_of_edges_are_refused() -> None:
    shape = GraphShape.of(graph_of("edges"))
    with pytest.raises(InputError, match=r"GATConv over \S+ gets an edge_attr that is not the graph's"):
        convert(Transforming(), edge_inputs=["edge_attr"], shape=shape)
    with pytest.raises(InputError, match="weft only passes x_dict, edge_index_dict, and edge_attr_dict if the graph"):
        convert(HeteroEdges(), shape=shape)
    convert(Weighted(), shape=shape)
    with pytest.raises(InputError, match="takes edge_weight_dict, but weft supports no edge weights by relation"):
        convert(Weighted(), shape=replace(shape, weighted=True))

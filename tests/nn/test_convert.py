"""Models written for PyG, converted: PyG's numbers on one device, its names, and a line where it cannot be."""

from __future__ import annotations

import copy
import pickle
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.lib.graphs import NUM_CLASSES, NUM_FEATURES, make_graph
from weft.data import Adjacency
from weft.kernels import EdgeDropout, reference
from weft.nn import Converted, GraphView, PyGConv, Sum, convert
from weft.nn.convert.convert import parameters_of
from weft.nn.convert.native_layers import Aggregated, GlobalNorm
from weft.nn.layers.phases import Boundary
from weft.utils.errors import InputError
from weft.utils.random import key

pyg = pytest.importorskip("torch_geometric.nn")

from torch_geometric.utils import add_self_loops  # noqa: E402

from benchmarks.pyg_models import BY_BLOCKS, BY_TYPE, GAT, GCN, PYG_MODELS, RGCN  # noqa: E402

MODELS = [name for name in PYG_MODELS if name not in BY_TYPE]
NUM_VERTICES = 23


class Data(SimpleNamespace):
    """A graph as PyG hands it over, with one loop at most for each vertex."""

    @classmethod
    def make(cls) -> Data:
        graph, random = make_graph(NUM_VERTICES), torch.Generator().manual_seed(1)
        source, target = torch.stack(graph.in_edges.edges()).unique(dim=1)
        keep = source != target  # PyG gives a loop the mean of the other edges' features, weft has the loop's own
        source, target = torch.cat([source[keep], torch.tensor([])]).long(), torch.cat([target[keep]])
        weight = torch.rand(len(source), generator=random, dtype=torch.float64) + 0.1
        sizes = {"num_sources": NUM_VERTICES, "num_targets": NUM_VERTICES}
        edges = Adjacency.from_edges(source, target, weight=weight, **sizes)
        return cls(
            x=torch.randn(NUM_VERTICES, NUM_FEATURES, generator=random, dtype=torch.float64),
            edges=edges,
            edge_index=torch.stack(edges.edges()),
            edge_weight=edges.weight,
            edge_attr=torch.randn(len(source), 3, generator=random, dtype=torch.float64),
            edge_type=torch.randint(0, 5, (len(source),), generator=random),
        )

    def of_pyg(self, model: nn.Module, given: list[str]) -> Tensor:
        names = [one.name for one in parameters_of(model)]
        if names == ["data"]:
            return model(self)
        known = {name: getattr(self, name) for name in names if name in ("edge_index", "edge_type", *given)}
        return model(self.x, *known.values()) if "Sequential" in type(model).__name__ else model(self.x, **known)

    def of_weft(self, model: Converted) -> Tensor:
        view = GraphView.of(self.edges, edge_features=self.edge_attr, edge_type=self.edge_type, num_relations=5)
        return model([copy.copy(view) for _ in range(model.num_stages)], self.x)


def without_dropout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose masks are keyed in weft, and PyTorch's otherwise."""
    monkeypatch.setattr(F, "dropout", lambda x, *_, **__: x)
    monkeypatch.setattr(GraphView, "dropout", lambda _self, x, _p: x)
    monkeypatch.setattr(GraphView, "mask_key", lambda _self, _p: None)


def made(name: str) -> nn.Module:
    torch.manual_seed(3)
    model = PYG_MODELS[name]().double()
    for parameter in model.parameters():
        nn.init.uniform_(parameter, -0.6, 0.6)
    return model


def given_of(name: str) -> list[str]:
    return ["edge_attr"] if "edges" in name else ["edge_weight"] if name == "pyg-gcn" else []


@pytest.mark.parametrize("name", MODELS)
def test_equals_pyg(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits, gradients, running statistics, and then an evaluation."""
    data, model, given = Data.make(), made(name), given_of(name)
    own, converted = copy.deepcopy(model), convert(model, given=given).train()
    with monkeypatch.context() as patch:
        without_dropout(patch)
        y, expected = data.of_weft(converted), data.of_pyg(own.train(), given)
    torch.testing.assert_close(y, expected, rtol=1e-9, atol=1e-9)
    grad = torch.randn_like(y)
    y.backward(grad)
    expected.backward(grad)
    found = dict(model.named_parameters())
    for path, parameter in own.named_parameters():
        torch.testing.assert_close(found[path].grad, parameter.grad, rtol=1e-9, atol=1e-9, msg=path)
    y, expected = data.of_weft(converted.eval()), data.of_pyg(own.eval(), given)
    torch.testing.assert_close(y, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", ["pyg-gat-dropout", "pyg-gatv2-dropout", "pyg-gatv2-dropout-edges"])
def test_dropout_of_attention_equals_pygs_under_the_same_masks(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits and gradients in training; in PyG the loops come behind the edges, as in weft's masks."""
    data, model, given = Data.make(), made(name), given_of(name)
    own, converted = copy.deepcopy(model).train(), convert(model, given=given).train()
    ids, num_edges = torch.arange(NUM_VERTICES), data.edges.num_edges
    dropped = []

    def imposed(x: Tensor, p: float, training: bool) -> Tensor:
        if len(x) == NUM_VERTICES:  # of rows
            return x
        assert training
        assert len(x) == num_edges + NUM_VERTICES
        dropped.append(p)
        return reference.dropped(x, data.edges, EdgeDropout(p, key(0, 1), 0, ids, ids))

    with monkeypatch.context() as patch:
        patch.setattr(F, "dropout", imposed)
        expected = data.of_pyg(own, given)
    with monkeypatch.context() as patch:
        patch.setattr(GraphView, "dropout", lambda _self, x, _p: x)
        y = data.of_weft(converted)
    assert dropped == [0.6, 0.6]
    torch.testing.assert_close(y, expected, rtol=1e-9, atol=1e-9)
    grad = torch.randn_like(y)
    y.backward(grad)
    expected.backward(grad)
    for path, parameter in own.named_parameters():
        torch.testing.assert_close(
            model.get_parameter(path).grad,
            parameter.grad,
            rtol=1e-9,
            atol=1e-9,
            msg=lambda said, path=path: path + said,
        )


@pytest.mark.parametrize("name", ["pyg-gin", "pyg-transformer", "pyg-basic"])
def test_weights_go_both_ways(name: str) -> None:
    model = made(name)
    converted, other = convert(model), made(name)
    state = converted.state_dict()
    assert state.keys() == other.state_dict().keys()
    other.load_state_dict(state)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter += 1
    converted.load_state_dict(other.state_dict())
    for path, parameter in model.named_parameters():
        torch.testing.assert_close(parameter, other.get_parameter(path), rtol=0, atol=0)


def test_it_reaches_other_processes() -> None:
    for name in MODELS:
        converted = convert(made(name))
        again = pickle.loads(pickle.dumps(converted))
        torch.testing.assert_close(Data.make().of_weft(again.eval()), Data.make().of_weft(converted.eval()))


def test_what_weft_has_runs_in_its_aggregates() -> None:
    """So `tensor` has it, whose ranks have columns of all rows and no edges."""
    for name in MODELS:
        converted = convert(made(name), given=given_of(name))
        by_blocks = any(isinstance(part, PyGConv) for part in converted.modules())
        assert by_blocks == (name in BY_BLOCKS), name


class Weighing(nn.Module):
    """A convolution by blocks that is not given the weights which the graph has, or is."""

    def __init__(self, weighs: bool) -> None:
        super().__init__()
        self.weighs, self.conv = weighs, pyg.GraphConv(NUM_FEATURES, NUM_CLASSES, aggr="max")

    def forward(self, x: Tensor, edge_index: Tensor, edge_weight: Tensor) -> Tensor:
        return self.conv(x, edge_index, edge_weight) if self.weighs else self.conv(x, edge_index)


@pytest.mark.parametrize("aggr", ["max", "median"])
@pytest.mark.parametrize("weighs", [False, True])
def test_a_convolution_has_the_weights_that_it_is_given(weighs: bool, aggr: str) -> None:
    data, model = Data.make(), Weighing(weighs).double()
    if aggr == "median":
        model.conv.aggr, model.conv.aggr_module = aggr, pyg.aggr.MedianAggregation()
    own, converted = copy.deepcopy(model), convert(model)
    expected = own(data.x, data.edge_index, data.edge_weight)
    torch.testing.assert_close(data.of_weft(converted), expected, rtol=1e-9, atol=1e-9)


def test_edge_features_that_a_convolution_was_not_made_for() -> None:
    """PyG's GATConv without edge_dim leaves them."""
    data, model = Data.make(), GAT().double()
    own, converted = copy.deepcopy(model), convert(model, given=["edge_attr"])
    expected = own.eval()(data.x, data.edge_index, data.edge_attr)
    torch.testing.assert_close(data.of_weft(converted.eval()), expected, rtol=1e-9, atol=1e-9)


def test_relations_that_weft_has_not_are_named() -> None:
    with pytest.raises(InputError, match=r"conv1.*RGCNConv reads edge_type.*RGCNConv with aggr='mean'"):
        convert(RGCN(aggr="max"))


class Written(nn.Module):
    """A model whose forward is somebody's function."""

    def __init__(self, forward: Any, **parts: nn.Module) -> None:
        super().__init__()
        self.conv, self.written = pyg.GCNConv(NUM_FEATURES, NUM_CLASSES), forward
        for name, part in parts.items():
            self.add_module(name, part)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.written(self, x, edge_index)


def undropped(self: Any, x: Tensor, edge_index: Tensor) -> Tensor:
    return self.conv(F.dropout(x), edge_index)


def branching(self: Any, x: Tensor, edge_index: Tensor) -> Tensor:
    return self.conv(x, edge_index) if x.sum() > 0 else x


def reading_edges(self: Any, x: Tensor, edge_index: Tensor) -> Tensor:
    return self.conv(x[edge_index[0]], edge_index)


def drawing(self: Any, x: Tensor, edge_index: Tensor) -> Tensor:
    return self.conv(x + torch.rand(x.shape), edge_index)


def counting(self: Any, x: Tensor, edge_index: Tensor) -> Tensor:
    number = x.size(0)
    return self.conv(x, edge_index) * number


def assigning(self: Any, x: Tensor, edge_index: Tensor) -> Tensor:
    x[0] = 0.0
    return self.conv(x, edge_index)


def normalising(self: Any, x: Tensor, edge_index: Tensor) -> Tensor:
    return self.norm(self.conv(x, edge_index))


def turning_edges(self: Any, x: Tensor, edge_index: Tensor) -> Tensor:
    return self.conv(x, edge_index.flip(0))


def with_loops(self: Any, x: Tensor, edge_index: Tensor) -> Tensor:
    return self.conv(x, add_self_loops(edge_index)[0])


def weighing_by_another(self: Any, x: Tensor, edge_index: Tensor) -> Tensor:
    return self.conv(x, edge_index, x[:, 0])


def asking_for_attention(self: Any, x: Tensor, edge_index: Tensor) -> Any:
    return self.gat(x, edge_index, return_attention_weights=True)[0]


def two_results(self: Any, x: Tensor, edge_index: Tensor) -> Any:
    return self.conv(x, edge_index), x


@pytest.mark.parametrize(
    ("forward", "said"),
    [
        (undropped, r"F\.dropout\(x\).*stays on in evaluation: pass training=self\.training"),
        (branching, r"test_convert.py:\d+ .*x\.sum\(\) > 0.*cannot trace"),
        (reading_edges, r"edge_index\[0\].*the model uses edge_index outside of a convolution"),
        (drawing, r"rand draws random numbers"),
        (asking_for_attention, r"GATConv gets return_attention_weights, but"),
        (turning_edges, r"flip\(0\).*GCNConv gets an edge_index that is not the graph's"),
        (with_loops, r"test_convert.py:\d+ .*add_self_loops.*cannot trace"),
        (weighing_by_another, r"x\[:, 0\].*GCNConv gets an edge_weight that is not the graph's"),
        (assigning, r"x\[0\] = 0\.0.*cannot trace"),
        (two_results, "one tensor with a row for each vertex"),
    ],
)
def test_what_cannot_be_converted_is_named(forward: Any, said: str) -> None:
    with pytest.raises(InputError, match=said):
        convert(Written(forward, gat=pyg.GATConv(NUM_FEATURES, NUM_CLASSES)))


def test_hooks_run() -> None:
    data, lin = Data.make(), nn.Linear(NUM_FEATURES, NUM_FEATURES)
    model = Written(alone, gat=pyg.GATConv(NUM_FEATURES, NUM_CLASSES), lin=lin).double()
    for part in (lin, model.gat, model.gat.lin):
        part.register_forward_hook(lambda *call: 2 * call[-1])
    own, converted = copy.deepcopy(model), convert(model)
    torch.testing.assert_close(data.of_weft(converted), data.of_pyg(own, []), rtol=1e-9, atol=1e-9)


def alone(self: Any, x: Tensor, edge_index: Tensor) -> Tensor:
    return self.gat(self.lin(x), edge_index)


@pytest.mark.parametrize("norm", ["GraphNorm", "InstanceNorm", "PairNorm", "LayerNorm"])
def test_a_norm_that_couples_rows_is_refused(norm: str) -> None:
    made = pyg.PairNorm() if norm == "PairNorm" else getattr(pyg, norm)(NUM_CLASSES)
    with pytest.raises(InputError, match=r"self\.norm.*normalizes a row by the rows of other vertices.*use BatchNorm"):
        convert(Written(normalising, norm=made))


def test_a_number_of_rows_does_not_cross_an_aggregate() -> None:
    converted = convert(Written(counting).double())
    with pytest.raises(InputError, match=r"a value of type int that was computed before this aggregate"):
        Data.make().of_weft(converted)


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (lambda: GAT(conv=pyg.GATConv, dropout=0.3, fill_value=0.0), "GATConv has dropout=0.3, whose masks"),
        (
            lambda: pyg.Sequential("x, edge_index", [(pyg.ChebConv(7, 5, 2), "x, edge_index -> x")]),
            "ChebConv uses vertex degrees or self-loops",
        ),
        (lambda: pyg.Sequential("x, edge_index, batch", [(nn.Linear(7, 5), "x -> x")]), "needs batch"),
        (lambda: nn.Bilinear(7, 7, 5), "needs input2"),
    ],
)
def test_what_weft_has_not_is_named(model: Any, said: str) -> None:
    with pytest.raises(InputError, match=said):
        convert(model())


def test_a_given_name_that_there_is_not() -> None:
    with pytest.raises(InputError, match="edge_size"):
        convert(GCN(), given=["edge_size"])


@pytest.mark.parametrize("error", ["a sum for a mean", "a local batch norm", "no dropout"])
def test_a_planted_error_shows(error: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name = {"a sum for a mean": "pyg-mixed", "a local batch norm": "pyg-gin", "no dropout": "pyg-gcn"}[error]
    if error == "a sum for a mean":
        monkeypatch.setattr(Aggregated, "begin", planted_sum)
    elif error == "a local batch norm":
        monkeypatch.setattr(GlobalNorm, "begin", lambda _self, _model, _view, x: x)
    else:
        monkeypatch.setattr(GraphView, "dropout", lambda _self, x, _p: 2 * x)
    with pytest.raises(AssertionError):
        test_equals_pyg(name, monkeypatch) if error != "no dropout" else same_without(name)


def planted_sum(self: Aggregated, _model: nn.Module, _view: Any, x: Tensor) -> Boundary:
    request = self.make(x)
    return Boundary(request=request._replace(op=Sum(weighted=True)), steps=self.steps)


def same_without(name: str) -> None:
    data, converted = Data.make(), convert(made(name), given=given_of(name))
    torch.testing.assert_close(data.of_weft(converted.train()), data.of_weft(converted.eval()))


class UnderAutocast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = pyg.GCNConv(NUM_FEATURES, NUM_CLASSES)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y: Tensor = self.conv(x, edge_index)
        return y


class ChangedUnderNoGrad(UnderAutocast):
    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        y: Tensor = self.conv(x, edge_index)
        with torch.no_grad():
            y.clamp_(0)
        return y


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (UnderAutocast, r"self\.conv\(x, edge_index\)`: torch\.autocast cannot be converted"),
        (ChangedUnderNoGrad, r"y\.clamp_\(0\)`: a tensor is changed in place under torch\.no_grad"),
    ],
)
def test_contexts_that_cannot_be_followed_are_named(model: type[nn.Module], said: str) -> None:
    with pytest.raises(InputError, match=said):
        convert(model())


class ConstantEncoder(nn.Module):
    """Changes in place, under torch.no_grad, what was made there."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(NUM_FEATURES, NUM_FEATURES), nn.ReLU(inplace=True))
        self.conv = pyg.GCNConv(NUM_FEATURES, NUM_CLASSES)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        with torch.no_grad():
            h = self.encoder(x)
        y: Tensor = self.conv(h, edge_index)
        return y


def test_a_change_in_place_of_what_has_no_gradient_is_followed() -> None:
    data, model = Data.make(), ConstantEncoder().double()
    torch.testing.assert_close(data.of_weft(convert(model)), data.of_pyg(model, []), rtol=1e-9, atol=1e-9)


class TakesEdgeAttr(UnderAutocast):
    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor | None = None) -> Tensor:  # noqa: ARG002
        y: Tensor = self.conv(x, edge_index)
        return y


def test_edge_features_that_became_weights_are_named() -> None:
    with pytest.raises(InputError, match="takes edge_attr, but the graph has edge weights instead"):
        convert(TakesEdgeAttr(), given=["edge_weight"])

"""A converted PyG model has the results and parameter names of the original; a failed conversion names the line."""

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
from tests.lib.pairwise import param
from weft.data import Adjacency
from weft.kernels import EdgeDropout, reference
from weft.nn import Converted, GraphView, PyGConv, Sum, convert
from weft.nn.convert import comparison
from weft.nn.convert.convert import parameters_of
from weft.nn.convert.native_layers import Aggregated, GlobalNorm
from weft.nn.convert.traced_model import _flatten, _restored
from weft.nn.layers.phases import Boundary
from weft.utils.errors import InputError
from weft.utils.random import key

pyg = pytest.importorskip("torch_geometric.nn")

from torch_geometric.utils import add_self_loops  # noqa: E402

from benchmarks.pyg_models import BY_BLOCKS, BY_TYPE, GAT, GCN, PYG_MODELS, RGCN  # noqa: E402

MODELS = [name for name in PYG_MODELS if name not in BY_TYPE]
NUM_VERTICES = 23


class Data(SimpleNamespace):
    """Attributes of a graph in PyG's form, with at most one self-loop per vertex."""

    @classmethod
    def make(cls) -> Data:
        graph, random = make_graph(NUM_VERTICES), torch.Generator().manual_seed(1)
        source, target = torch.stack(graph.in_edges.edges()).unique(dim=1)
        keep = (
            source != target
        )  # PyG replaces a loop's features by the mean of the other edges' features; weft uses the loop's.
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

    def of_pyg(self, model: nn.Module, edge_inputs: list[str]) -> Tensor:
        names = [parameter.name for parameter in parameters_of(model)]
        if names == ["data"]:
            return model(self)
        arguments = {name: getattr(self, name) for name in names if name in ("edge_index", "edge_type", *edge_inputs)}
        return (
            model(self.x, *arguments.values()) if "Sequential" in type(model).__name__ else model(self.x, **arguments)
        )

    def of_weft(self, model: Converted) -> Tensor:
        view = GraphView.of(self.edges, edge_features=self.edge_attr, edge_type=self.edge_type, num_relations=5)
        return model([copy.copy(view) for _ in range(model.num_stages)], self.x)


def without_dropout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disable dropout, because weft and PyTorch generate different masks."""
    monkeypatch.setattr(F, "dropout", lambda x, *_, **__: x)
    monkeypatch.setattr(GraphView, "dropout", lambda _self, x, _p: x)
    monkeypatch.setattr(GraphView, "mask_key", lambda _self, _p: None)


def make_model(name: str) -> nn.Module:
    torch.manual_seed(3)
    model = PYG_MODELS[name]().double()
    for parameter in model.parameters():
        nn.init.uniform_(parameter, -0.6, 0.6)
    return model


def edge_inputs_of(name: str) -> list[str]:
    return ["edge_attr"] if "edges" in name else ["edge_weight"] if name == "pyg-gcn" else []


@pytest.mark.parametrize("name", MODELS)
def test_equals_pyg(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits, gradients, and the logits of a later evaluation (which uses running statistics) equal PyG's.

    Convolutions become native layers if there is one, which `tensor` needs: its ranks have columns of all rows.
    """
    data, model, edge_inputs = Data.make(), make_model(name), edge_inputs_of(name)
    original, converted = copy.deepcopy(model), convert(model, edge_inputs=edge_inputs).train()
    assert any(isinstance(part, PyGConv) for part in converted.modules()) == (name in BY_BLOCKS)
    with monkeypatch.context() as patch:
        without_dropout(patch)
        y, expected = data.of_weft(converted), data.of_pyg(original.train(), edge_inputs)
    torch.testing.assert_close(y, expected, rtol=1e-9, atol=1e-9)
    grad = torch.randn_like(y)
    y.backward(grad)
    expected.backward(grad)
    parameters = dict(model.named_parameters())
    for path, parameter in original.named_parameters():
        torch.testing.assert_close(parameters[path].grad, parameter.grad, rtol=1e-9, atol=1e-9, msg=path)
    y, expected = data.of_weft(converted.eval()), data.of_pyg(original.eval(), edge_inputs)
    torch.testing.assert_close(y, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", ["pyg-gat-dropout", "pyg-gatv2-dropout", "pyg-gatv2-dropout-edges"])
def test_attention_dropout_equals_pyg_with_the_same_masks(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits and gradients in training equal PyG's. Both have the loops after the edges."""
    data, model, edge_inputs = Data.make(), make_model(name), edge_inputs_of(name)
    original, converted = copy.deepcopy(model).train(), convert(model, edge_inputs=edge_inputs).train()
    ids, num_edges = torch.arange(NUM_VERTICES), data.edges.num_edges
    dropped = []

    def same_mask(x: Tensor, p: float, training: bool) -> Tensor:
        if len(x) == NUM_VERTICES:  # dropout of rows
            return x
        assert training
        assert len(x) == num_edges + NUM_VERTICES
        dropped.append(p)
        return reference.dropped(x, data.edges, EdgeDropout(p, key(0, 1), 0, ids, ids))

    with monkeypatch.context() as patch:
        patch.setattr(F, "dropout", same_mask)
        expected = data.of_pyg(original, edge_inputs)
    with monkeypatch.context() as patch:
        patch.setattr(GraphView, "dropout", lambda _self, x, _p: x)
        y = data.of_weft(converted)
    assert dropped == [0.6, 0.6]
    torch.testing.assert_close(y, expected, rtol=1e-9, atol=1e-9)
    grad = torch.randn_like(y)
    y.backward(grad)
    expected.backward(grad)
    for path, parameter in original.named_parameters():
        torch.testing.assert_close(
            model.get_parameter(path).grad,
            parameter.grad,
            rtol=1e-9,
            atol=1e-9,
            msg=lambda text, path=path: path + text,
        )


@pytest.mark.parametrize("name", ["pyg-gin", "pyg-transformer", "pyg-basic"])
def test_state_dicts_load_in_both_directions(name: str) -> None:
    model = make_model(name)
    converted, other = convert(model), make_model(name)
    state = converted.state_dict()
    assert state.keys() == other.state_dict().keys()
    other.load_state_dict(state)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter += 1
    converted.load_state_dict(other.state_dict())
    for path, parameter in model.named_parameters():
        torch.testing.assert_close(parameter, other.get_parameter(path), rtol=0, atol=0)


@pytest.mark.parametrize(
    "name",
    [param(name, name=name, quick=name in ("pyg-gat-edges", "pyg-basic", "pyg-transformer")) for name in MODELS],
)
def test_converted_models_can_be_pickled(name: str) -> None:
    converted = convert(make_model(name))
    copied = pickle.loads(pickle.dumps(converted))
    torch.testing.assert_close(Data.make().of_weft(copied.eval()), Data.make().of_weft(converted.eval()))


class Weighing(nn.Module):
    """A convolution without a native layer, with or without the edge weights as an argument."""

    def __init__(self, weighs: bool) -> None:
        super().__init__()
        self.weighs, self.conv = weighs, pyg.GraphConv(NUM_FEATURES, NUM_CLASSES, aggr="max")

    def forward(self, x: Tensor, edge_index: Tensor, edge_weight: Tensor) -> Tensor:
        return self.conv(x, edge_index, edge_weight) if self.weighs else self.conv(x, edge_index)


@pytest.mark.parametrize("aggr", ["max", "median"])
@pytest.mark.parametrize("weighs", [False, True])
def test_a_convolution_uses_edge_weights_only_if_they_are_passed(weighs: bool, aggr: str) -> None:
    data, model = Data.make(), Weighing(weighs).double()
    if aggr == "median":
        model.conv.aggr, model.conv.aggr_module = aggr, pyg.aggr.MedianAggregation()
    original, converted = copy.deepcopy(model), convert(model)
    expected = original(data.x, data.edge_index, data.edge_weight)
    torch.testing.assert_close(data.of_weft(converted), expected, rtol=1e-9, atol=1e-9)


def test_a_convolution_without_edge_dim_ignores_edge_features() -> None:
    """PyG's GATConv without edge_dim ignores edge features, and so does its conversion."""
    data, model = Data.make(), GAT().double()
    original, converted = copy.deepcopy(model), convert(model, edge_inputs=["edge_attr"])
    expected = original.eval()(data.x, data.edge_index, data.edge_attr)
    torch.testing.assert_close(data.of_weft(converted.eval()), expected, rtol=1e-9, atol=1e-9)


def test_relational_convolutions_without_a_native_layer_equal_pyg() -> None:
    data, model = Data.make(), RGCN(aggr="max").double()
    original, converted = copy.deepcopy(model).eval(), convert(model).eval()
    expected = original(data.x, data.edge_index, data.edge_type)
    torch.testing.assert_close(data.of_weft(converted), expected, rtol=1e-9, atol=1e-9)


class Written(nn.Module):
    """A model whose forward pass is the given function."""

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


def adding_noise(self: Any, x: Tensor, edge_index: Tensor) -> Tensor:
    return self.conv(x + torch.rand(x.shape), edge_index)


def counting(self: Any, x: Tensor, edge_index: Tensor) -> Tensor:
    number = x.size(0)
    return self.conv(x, edge_index) * number


def assigning(self: Any, x: Tensor, edge_index: Tensor) -> Tensor:
    x[0] = 0.0
    return self.conv(x, edge_index)


def normalising(self: Any, x: Tensor, edge_index: Tensor) -> Tensor:
    return self.norm(self.conv(x, edge_index))


def reversing_edges(self: Any, x: Tensor, edge_index: Tensor) -> Tensor:
    return self.conv(x, edge_index.flip(0))


def with_loops(self: Any, x: Tensor, edge_index: Tensor) -> Tensor:
    return self.conv(x, add_self_loops(edge_index)[0])


def weighting_by_features(self: Any, x: Tensor, edge_index: Tensor) -> Tensor:
    return self.conv(x, edge_index, x[:, 0])


def returning_attention(self: Any, x: Tensor, edge_index: Tensor) -> Any:
    return self.gat(x, edge_index, return_attention_weights=True)[0]


def two_results(self: Any, x: Tensor, edge_index: Tensor) -> Any:
    return self.conv(x, edge_index), x


@pytest.mark.parametrize(
    ("forward", "message"),
    [
        (undropped, r"F\.dropout\(x\).*stays on in evaluation: pass training=self\.training"),
        (branching, r"test_convert.py:\d+ .*x\.sum\(\) > 0.*cannot trace"),
        (reading_edges, r"edge_index\[0\].*the model uses edge_index outside of a convolution"),
        (adding_noise, r"rand draws random numbers"),
        (returning_attention, r"GATConv gets return_attention_weights, but"),
        (reversing_edges, r"flip\(0\).*GCNConv gets an edge_index that is not the graph's"),
        (with_loops, r"test_convert.py:\d+ .*add_self_loops.*cannot trace"),
        (weighting_by_features, r"x\[:, 0\].*GCNConv gets an edge_weight that is not the graph's"),
        (assigning, r"x\[0\] = 0\.0.*cannot trace"),
        (two_results, "one tensor with a row for each vertex"),
    ],
)
def test_what_cannot_be_converted_is_refused(forward: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        convert(Written(forward, gat=pyg.GATConv(NUM_FEATURES, NUM_CLASSES)))


def test_hooks_run() -> None:
    data, lin = Data.make(), nn.Linear(NUM_FEATURES, NUM_FEATURES)
    model = Written(linear_then_gat, gat=pyg.GATConv(NUM_FEATURES, NUM_CLASSES), lin=lin).double()
    for part in (lin, model.gat, model.gat.lin):
        part.register_forward_hook(lambda *call: 2 * call[-1])
    original, converted = copy.deepcopy(model), convert(model)
    torch.testing.assert_close(data.of_weft(converted), data.of_pyg(original, []), rtol=1e-9, atol=1e-9)


def linear_then_gat(self: Any, x: Tensor, edge_index: Tensor) -> Tensor:
    return self.gat(self.lin(x), edge_index)


def stacking(self: Any, x: Tensor, edge_index: Tensor) -> Tensor:
    y = self.conv(x, edge_index)
    summed = torch.sum(torch.stack([y, y.tanh(), y.relu()], dim=0), dim=0)
    return summed + torch.sum(torch.stack(y.split(1, dim=1)), dim=0)


def test_sums_of_stacked_rows_equal_pyg() -> None:
    """The sum of listed rows needs no stack; that of the result of a call does."""
    data, model = Data.make(), Written(stacking).double()
    original, converted = copy.deepcopy(model), convert(model)
    torch.testing.assert_close(data.of_weft(converted), data.of_pyg(original, []), rtol=1e-9, atol=1e-9)
    calls = [step.operation for step in converted.programs[True].steps]
    assert calls.count(torch.stack) == 1


@pytest.mark.parametrize("norm", ["GraphNorm", "InstanceNorm", "PairNorm", "LayerNorm"])
def test_a_norm_that_couples_rows_is_refused(norm: str) -> None:
    module = pyg.PairNorm() if norm == "PairNorm" else getattr(pyg, norm)(NUM_CLASSES)
    with pytest.raises(InputError, match=r"self\.norm.*normalizes a row by the rows of other vertices.*use BatchNorm"):
        convert(Written(normalising, norm=module))


def test_the_number_of_rows_cannot_be_used_after_an_aggregate() -> None:
    with pytest.raises(InputError, match=r"a value of type int that was computed before this aggregate"):
        convert(Written(counting).double())


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (lambda: GAT(conv=pyg.GATConv, dropout=0.3, fill_value=0.0), "GATConv has dropout=0.3, whose masks"),
        (
            lambda: pyg.Sequential("x, edge_index", [(pyg.ChebConv(7, 5, 2, "rw"), "x, edge_index -> x")]),
            r"ChebConv reads more of the graph than the in-edges",
        ),
        (lambda: pyg.Sequential("x, edge_index, batch", [(nn.Linear(7, 5), "x -> x")]), "needs batch"),
        (lambda: nn.Bilinear(7, 7, 5), "needs input2"),
    ],
)
def test_unsupported_modules_are_refused(model: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        convert(model())


def test_an_unknown_edge_input_is_refused() -> None:
    with pytest.raises(InputError, match="edge_size"):
        convert(GCN(), edge_inputs=["edge_size"])


@pytest.mark.parametrize("error", ["a sum for a mean", "a local batch norm", "no dropout"])
def test_a_planted_error_is_detected(error: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name = {"a sum for a mean": "pyg-mixed", "a local batch norm": "pyg-gin", "no dropout": "pyg-gcn"}[error]
    if error == "a sum for a mean":
        monkeypatch.setattr(Aggregated, "begin", planted_sum)
    elif error == "a local batch norm":
        monkeypatch.setattr(GlobalNorm, "begin", lambda _self, _model, _view, x: x)
    else:
        monkeypatch.setattr(GraphView, "dropout", lambda _self, x, _p: 2 * x)
    with pytest.raises((AssertionError, InputError)):
        test_equals_pyg(name, monkeypatch) if error != "no dropout" else same_without(name)


def planted_sum(self: Aggregated, _model: nn.Module, _view: Any, x: Tensor) -> Boundary:
    request = self.make(x)
    return Boundary(request=request._replace(op=Sum(weighted=True)), steps=self.steps)


def same_without(name: str) -> None:
    data, converted = Data.make(), convert(make_model(name), edge_inputs=edge_inputs_of(name))
    torch.testing.assert_close(data.of_weft(converted.train()), data.of_weft(converted.eval()))


def test_nan_in_float32_alone_is_a_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    run = comparison._logits
    factor = {torch.float32: torch.nan, torch.float64: 1.0}
    monkeypatch.setattr(comparison, "_logits", lambda *args: (y := run(*args)) * factor[y.dtype])
    with pytest.raises(InputError, match="logits in float32 by nan"):
        convert(GCN())


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
    ("model", "message"),
    [
        (UnderAutocast, r"self\.conv\(x, edge_index\)`: torch\.autocast cannot be converted"),
        (ChangedUnderNoGrad, r"y\.clamp_\(0\)`: a tensor is changed in place under torch\.no_grad"),
    ],
)
def test_unsupported_contexts_are_refused(model: type[nn.Module], message: str) -> None:
    with pytest.raises(InputError, match=message):
        convert(model())


class ConstantEncoder(nn.Module):
    """A model that changes a tensor in place under torch.no_grad, where the tensor was also created."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(NUM_FEATURES, NUM_FEATURES), nn.ReLU(inplace=True))
        self.conv = pyg.GCNConv(NUM_FEATURES, NUM_CLASSES)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        with torch.no_grad():
            h = self.encoder(x)
        y: Tensor = self.conv(h, edge_index)
        return y


def test_in_place_changes_without_gradients_are_converted() -> None:
    data, model = Data.make(), ConstantEncoder().double()
    torch.testing.assert_close(data.of_weft(convert(model)), data.of_pyg(model, []), rtol=1e-9, atol=1e-9)


class TakesEdgeAttr(UnderAutocast):
    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor | None = None) -> Tensor:  # noqa: ARG002
        y: Tensor = self.conv(x, edge_index)
        return y


def test_a_model_that_takes_edge_features_refuses_edge_weights() -> None:
    with pytest.raises(InputError, match="takes edge_attr, but the graph has edge weights instead"):
        convert(TakesEdgeAttr(), edge_inputs=["edge_weight"])


def test_the_state_of_a_gru_keeps_its_shape_on_a_rank_of_few_rows() -> None:
    """A state [1, 1, F] of one row could also have its rows first; the comparison on many rows has shown which."""
    converted = convert(PYG_MODELS["pyg-gru"]())
    name = min(converted.with_leading_dim)
    rows: dict[str, Tensor] = {}
    shapes = {name: _flatten(torch.ones(1, 1, 8), name, rows, 1, "", converted.with_leading_dim)}
    fewer = {name: rows[name][:0]}
    assert _restored(fewer, shapes)[name].shape == (1, 0, 8)

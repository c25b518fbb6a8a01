"""The comparison of a converted model with its original finds every difference; `single` runs such a model as it is."""

from __future__ import annotations

import copy
import json
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import weft
from tests.lib.graphs import NUM_CLASSES, NUM_FEATURES, make_graph
from weft.data import Adjacency, Graph, GraphShape
from weft.nn import Converted, Unconverted, convert
from weft.nn.convert import comparison_view, fx_calls, tracing
from weft.nn.graph_view import GraphView
from weft.nn.layers import pyg_conv
from weft.nn.messages import InEdgeSums
from weft.utils.errors import InputError

pyg = pytest.importorskip("torch_geometric.nn")
EPOCHS = 3
LEARNING_RATE = 0.05
SHAPE = GraphShape(num_features=NUM_FEATURES)


class TwoLayers(nn.Module):
    """Two GCN layers; derived classes change the rows between them."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = pyg.GCNConv(NUM_FEATURES, 8), pyg.GCNConv(8, NUM_CLASSES)

    def between(self, h: Tensor) -> Tensor:
        return h.relu()

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        y: Tensor = self.conv2(self.between(self.conv1(x, edge_index)), edge_index)
        return y


class GradientsOff(TwoLayers):
    def between(self, h: Tensor) -> Tensor:
        with torch.set_grad_enabled(False):
            frozen = h.sigmoid()
        return h * frozen


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, h: Tensor) -> Tensor:
        return h.view_as(h)

    @staticmethod
    def backward(_: Any, *grads: Tensor) -> Tensor:
        return -grads[0]


class GradientReversal(TwoLayers):
    def between(self, h: Tensor) -> Tensor:
        reversed_rows: Tensor = Reversed.apply(h)
        return reversed_rows


class Autocast(TwoLayers):
    def between(self, h: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return (h @ torch.eye(8, dtype=h.dtype)).to(h.dtype)


class KeptInEvaluation(TwoLayers):
    """A batch norm that stays in evaluation mode."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)

    def train(self, mode: bool = True) -> KeptInEvaluation:
        super().train(mode)
        self.norm.eval()
        return self

    def between(self, h: Tensor) -> Tensor:
        rows: Tensor = self.norm(h)
        return rows


class NormByHead(TwoLayers):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)

    def between(self, h: Tensor) -> Tensor:
        rows: Tensor = self.norm(h.view(-1, 4))
        return rows.view(-1, 8)


class NormOfThreeDimensions(TwoLayers):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(2)

    def between(self, h: Tensor) -> Tensor:
        rows: Tensor = self.norm(h.view(-1, 2, 4))
        return rows.view(-1, 8)


class ChangedThroughView(TwoLayers):
    def between(self, h: Tensor) -> Tensor:
        h.view(-1, 2, 4)[:, 0].mul_(3)
        return h


class ChangedAlias(TwoLayers):
    def between(self, h: Tensor) -> Tensor:
        alias = h
        h += 1
        return h + alias


class CountingSteps(TwoLayers):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros(()))

    def between(self, h: Tensor) -> Tensor:
        if self.training:
            self.steps.add_(1)
        return h


class ClampedWeight(TwoLayers):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))

    def between(self, h: Tensor) -> Tensor:
        self.scale.data.clamp_(0, 0.5)
        return h * self.scale


class DropoutOfKind(TwoLayers):
    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.drop = kind(0.5)

    def between(self, h: Tensor) -> Tensor:
        rows: Tensor = self.drop(h)
        return rows


class FunctionalAlphaDropout(TwoLayers):
    def between(self, h: Tensor) -> Tensor:
        return functional.alpha_dropout(h, 0.5, training=self.training)


class OtherInEvaluation(TwoLayers):
    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        rows = self.between(self.conv1(x, edge_index))
        y: Tensor = self.conv2(rows if self.training else -rows, edge_index)
        return y


class SourceDegrees(pyg.MessagePassing):
    """A layer that reads the degrees of sources, although its forward takes a pair."""

    def __init__(self, only_weighted: bool = False) -> None:
        super().__init__(aggr="sum")
        self.lin, self.out_channels, self.only_weighted = nn.Linear(8, NUM_CLASSES), NUM_CLASSES, only_weighted

    def forward(
        self, x: Tensor | tuple[Tensor, Tensor], edge_index: Tensor, edge_weight: Tensor | None = None
    ) -> Tensor:
        rows = x[0] if isinstance(x, tuple) else x
        num_targets = len(x[1]) if isinstance(x, tuple) else len(x)
        degree = torch.bincount(edge_index[1], minlength=len(rows)).clamp(min=1).to(rows.dtype)
        scale = degree[edge_index[0]].rsqrt()
        if edge_weight is not None:
            scale = scale * edge_weight
        elif self.only_weighted:
            scale = torch.ones_like(scale)
        y: Tensor = self.propagate(edge_index, x=(rows, rows[:num_targets]), scale=scale, size=(len(rows), num_targets))
        return self.lin(y)

    def message(self, x_j: Tensor, scale: Tensor) -> Tensor:
        return x_j * scale[:, None]


SourceDegrees.forward.__annotations__["x"] = "Tensor | Tuple[Tensor, Tensor]"  # as in many layers of PyG


class ReadsSourceDegrees(TwoLayers):
    def __init__(self) -> None:
        super().__init__()
        self.conv2 = SourceDegrees()


class ReadsSourceDegreesIfWeighted(TwoLayers):
    def __init__(self) -> None:
        super().__init__()
        self.conv2 = SourceDegrees(only_weighted=True)

    def forward(self, x: Tensor, edge_index: Tensor, edge_weight: Tensor | None = None) -> Tensor:
        y: Tensor = self.conv2(self.conv1(x, edge_index), edge_index, edge_weight)
        return y


class LastRow(TwoLayers):
    """Uses the last row as a virtual node."""

    def between(self, h: Tensor) -> Tensor:
        return h + h[-1]


class MixedInEvaluation(TwoLayers):
    def between(self, h: Tensor) -> Tensor:
        return h if self.training else h - h.mean(0)


class OtherConvolution(TwoLayers):
    """Calls another convolution in evaluation than in training."""

    def __init__(self) -> None:
        super().__init__()
        self.conv3 = pyg.TransformerConv(8, NUM_CLASSES)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        rows = self.conv1(x, edge_index)
        y: Tensor = (self.conv2 if self.training else self.conv3)(rows, edge_index)
        return y


class NumberedRows(TwoLayers):
    """Has an embedding for each vertex of a graph of 40 vertices."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(40, 8)

    def between(self, h: Tensor) -> Tensor:
        return h + self.embedding.weight


def with_hook(kind: str) -> nn.Module:
    """Return a model with a hook of a kind: on a parameter, or on the gradients of a module."""
    model = TwoLayers()
    if kind == "parameter":
        model.conv1.bias.register_hook(lambda grad: 2 * grad)
    else:
        model.conv2.register_full_backward_hook(
            lambda _, grads, __: tuple(grad * 2 for grad in grads if grad is not None)
        )
    return model


def with_replaced_method() -> nn.Module:
    """Return a model of which an instance's method was replaced."""
    model = TwoLayers()
    model.conv1.forward = partial(scaled_forward, model.conv1)
    return model


def scaled_forward(conv: Any, x: Tensor, edge_index: Tensor) -> Tensor:
    return 2 * pyg.GCNConv.forward(conv, x, edge_index)


KINDS: dict[str, Callable[[], nn.Module]] = {
    "set_grad_enabled": GradientsOff,
    "autograd.Function": GradientReversal,
    "autocast": Autocast,
    "batch norm in evaluation mode": KeptInEvaluation,
    "batch norm by head": NormByHead,
    "batch norm of three dimensions": NormOfThreeDimensions,
    "change through a view": ChangedThroughView,
    "change of an alias": ChangedAlias,
    "counter": CountingSteps,
    "clamped weight": ClampedWeight,
    "AlphaDropout": partial(DropoutOfKind, nn.AlphaDropout),
    "FeatureAlphaDropout": partial(DropoutOfKind, nn.FeatureAlphaDropout),
    "Dropout1d": partial(DropoutOfKind, nn.Dropout1d),
    "functional alpha dropout": FunctionalAlphaDropout,
    "other signs in evaluation": OtherInEvaluation,
    "source degrees": ReadsSourceDegrees,
    "source degrees if weighted": ReadsSourceDegreesIfWeighted,
    "other convolution in evaluation": OtherConvolution,
    "embedding by vertex": NumberedRows,
    "parameter hook": partial(with_hook, "parameter"),
    "module hook": partial(with_hook, "module"),
    "replaced method": with_replaced_method,
}
"""Models of each kind that conversion once ignored without a warning."""
CORRECT = {"other signs in evaluation", "set_grad_enabled"}
"""Kinds that are converted correctly."""
WEIGHTED = {"source degrees if weighted"}


def inputs_of(kind: str) -> dict[str, Any]:
    """Return the arguments of `convert` for a kind."""
    weighted = kind in WEIGHTED
    shape = GraphShape(num_features=NUM_FEATURES, weighted=weighted)
    return {"edge_inputs": ["edge_weight"] if weighted else [], "shape": shape}


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_is_correct_or_refused_by_its_line(kind: str) -> None:
    if kind in CORRECT:
        assert isinstance(convert(KINDS[kind](), **inputs_of(kind)), Converted)
    else:
        with pytest.raises(InputError, match=r"\w+\.py:\d+|SourceDegrees|hook") as error:
            convert(KINDS[kind](), **inputs_of(kind))
        assert "\n" not in str(error.value)


@pytest.mark.parametrize("make", [LastRow, MixedInEvaluation])
@pytest.mark.parametrize("order", ["none", "bfs"])
def test_vertices_that_interact_outside_of_layers_are_refused_but_in_single(
    make: type[nn.Module], order: str, tmp_path: Path
) -> None:
    graph = without_loops(make_graph(40))
    options: dict[str, Any] = {"epochs": 1, "quiet": True, "order": order}
    with pytest.raises(InputError, match="mixes vertices outside of message passing"):
        weft.train(graph, make(), strategy="communicated", workers=2, out=tmp_path / "two", **options)
    if order == "none":
        weft.train(graph, make(), out=tmp_path / "one", **options)
    else:
        with pytest.raises(InputError, match="mixes vertices outside of message passing"):
            weft.train(graph, make(), out=tmp_path / "one", **options)


def test_a_model_that_runs_as_it_is_refuses_another_order(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"Without --order, --strategy single"):
        weft.train(without_loops(make_graph(40)), NumberedRows(), order="bfs", out=tmp_path / "run", quiet=True)


def test_unchecked_is_refused_where_it_has_no_effect(tmp_path: Path) -> None:
    for model in ("gcn", weft.nn.Stack([weft.nn.SAGEConv(NUM_FEATURES, NUM_CLASSES)])):
        with pytest.raises(InputError, match="unchecked has no effect"):
            weft.train(make_graph(40), model, unchecked=True, out=tmp_path / "run", quiet=True)


def test_wrappers_are_removed() -> None:
    model = TwoLayers()
    for wrapper in (torch.compile(model), nn.DataParallel(model), torch.optim.swa_utils.AveragedModel(model)):
        assert isinstance(convert(wrapper, shape=SHAPE), Converted)


def test_unnamed_arguments_are_refused(tmp_path: Path) -> None:
    class Unnamed(TwoLayers):
        def forward(self, *args: Tensor) -> Tensor:
            return super().forward(*args)

    with pytest.raises(InputError, match=r"Unnamed\.forward\(\*args\) does not name what it takes"):
        weft.train(make_graph(40), Unnamed(), out=tmp_path / "run", quiet=True)


def test_several_aggregations_are_read() -> None:
    model = pyg.Sequential(
        "x, edge_index", [(pyg.SAGEConv(NUM_FEATURES, NUM_CLASSES, ["mean", "max"]), "x, edge_index -> x")]
    )
    assert isinstance(convert(model, shape=SHAPE), Converted)


FOUND = r"would compute other numbers|fails where the original|cannot trace|cannot be compared|calls other convolutions"
"""Messages of the comparison, and of the tracing before it."""


def without_rules(patch: pytest.MonkeyPatch) -> None:
    """Switch off every special rule that refuses a kind of model before the comparison."""
    patch.setattr(fx_calls, "_check_supported", lambda _: None)
    patch.setattr(torch, "is_autocast_enabled", lambda _: False)
    patch.setattr(tracing, "COUPLING", ())
    trial = pyg_conv.Trial(sums=InEdgeSums(), out_width=NUM_CLASSES)
    patch.setattr(pyg_conv.Trial, "of", lambda *_, **__: trial)


@pytest.mark.parametrize("kind", sorted(KINDS.keys() - CORRECT))
def test_the_comparison_alone_finds_each_kind(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    without_rules(monkeypatch)
    with pytest.raises(InputError, match=FOUND):
        convert(KINDS[kind](), **inputs_of(kind))
    assert isinstance(convert(TwoLayers(), shape=SHAPE), Converted)


def test_the_first_differing_convolution_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        comparison_view.ComparisonView, "aggregate", lambda self, *args: 2 * GraphView.aggregate(self, *args)
    )
    with pytest.raises(
        InputError, match=r"test_comparison\.py:\d+ `.*self\.conv1\(x, edge_index\).*logits in the first"
    ):
        convert(TwoLayers(), shape=SHAPE)


def test_the_comparison_has_no_side_effects() -> None:
    torch.manual_seed(5)
    model = pyg.GAT(NUM_FEATURES, 8, 2, NUM_CLASSES, dropout=0.5, norm="batch_norm")
    before, state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    convert(model, shape=SHAPE)
    assert torch.equal(torch.get_rng_state(), state)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name
    assert all(parameter.grad is None for parameter in model.parameters())


class OnlyFloat32(TwoLayers):
    def between(self, h: Tensor) -> Tensor:
        return h @ torch.ones(8, 8, dtype=torch.float32)


def test_a_model_that_cannot_be_compared_is_refused_unless_unchecked() -> None:
    with pytest.raises(InputError, match=r"cannot be compared.*float64.*unchecked=True"):
        convert(OnlyFloat32(), shape=SHAPE)
    assert isinstance(convert(OnlyFloat32(), shape=SHAPE, unchecked=True), Converted)


def without_loops(graph: Graph) -> Graph:
    """Return a graph without self-loops, since PyG's layers count a repeated one once."""
    source, target = graph.in_edges.edges()
    keep, weight = source != target, graph.in_edges.weight
    in_edges = Adjacency.from_edges(
        source[keep],
        target[keep],
        num_sources=graph.num_vertices,
        num_targets=graph.num_vertices,
        weight=None if weight is None else weight[keep],
    )
    return replace(graph, in_edges=in_edges)


def losses_of_pyg(model: nn.Module, graph: Graph) -> list[float]:
    """Return the losses of training a model with PyTorch alone."""
    edge_index = torch.stack(graph.in_edges.edges())
    weight = graph.in_edges.weight
    assert graph.x is not None
    assert graph.y is not None
    assert graph.train_mask is not None
    x, losses = graph.x.double(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    for _ in range(EPOCHS):
        optimizer.zero_grad()
        y = model.train()(x, edge_index) if weight is None else model.train()(x, edge_index, weight.double())
        loss = functional.cross_entropy(y[graph.train_mask], graph.y[graph.train_mask])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("kind", sorted(KINDS.keys() - {"parameter hook"} - {k for k in KINDS if "ropout" in k}))
def test_single_trains_each_kind_with_the_losses_of_pyg(kind: str, tmp_path: Path) -> None:
    graph = without_loops(make_graph(40, weighted=kind in WEIGHTED))
    torch.manual_seed(0)
    model = KINDS[kind]().double()
    original = copy.deepcopy(model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run = weft.train(
            graph,
            model,
            optimizer="sgd",
            lr=LEARNING_RATE,
            weight_decay=0.0,
            epochs=EPOCHS,
            dtype="float64",
            out=tmp_path / "run",
            quiet=True,
        )
    unconverted = [str(warning.message) for warning in caught if "runs as it is" in str(warning.message)]
    assert len(unconverted) == (kind not in CORRECT)
    records = map(json.loads, (run.folder / "metrics.jsonl").read_text().splitlines())
    losses = [record["loss"] for record in records if record["kind"] == "epoch"]
    torch.testing.assert_close(losses, losses_of_pyg(original, graph), rtol=1e-9, atol=1e-9)


def test_a_parameter_with_a_hook_is_refused() -> None:
    with pytest.raises(InputError, match=r"conv1\.bias has a hook"):
        Unconverted(with_hook("parameter"), frozenset(), NUM_CLASSES)

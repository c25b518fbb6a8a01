"""A model driven from boundary to boundary is its forward pass, whoever drives it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from tests.lib.cases import Case
from tests.lib.graphs import make_graph
from tests.lib.session import Session
from weft.comm import Group
from weft.nn import (
    BatchNorm,
    Decoupled,
    GCNConv,
    GraphView,
    Linear,
    LinkModel,
    RowLayer,
    SAGEConv,
    Stack,
    Total,
    View,
    WholeLayer,
)
from weft.nn.layers.decoder import Dot
from weft.nn.layers.phases import Boundary, PhasedModel
from weft.strategies import ResidentPlaced, Step


def boundaries(case: Case, *, training: bool) -> list[Boundary]:
    """The boundaries that a case's model comes to."""
    placed = Session(case, "single", Group())
    model, strategy, found = placed.model.train(training), placed.strategy, []
    assert isinstance(model, PhasedModel)
    assert isinstance(strategy, ResidentPlaced)
    views = strategy.views(Step(epoch=0, training=training))
    assert views[0].inputs.rows is not None
    reached = model.begin(views, views[0].inputs.rows)
    while isinstance(reached, Boundary):
        found.append(reached)
        reached = model.resume(views, reached.cross(views[reached.stage]))
    return found


@pytest.mark.parametrize("training", [True, False])
def test_a_batch_norm_has_two_boundaries_in_training(training: bool) -> None:
    found = boundaries(Case(model="gcn", norm="batch"), training=training)
    assert [isinstance(one.request.op, Total) for one in found] == (
        [False, True, True, False, True, True, False] if training else [False] * 3
    )
    assert [one.stage for one in found] == ([0, 0, 0, 1, 1, 1, 2] if training else [0, 1, 2])


def test_a_decoupled_model_asks_once_for_all_its_products() -> None:
    (boundary,) = boundaries(Case(model="gat", decoupled=True, layers=4), training=True)
    assert boundary.steps == 4
    assert boundary.request.op.loops
    assert set(boundary.request.source) == {"h", "logit_src"}
    assert set(boundary.request.target) == {"logit_dst"}


def test_a_layer_without_phases_is_an_aggregate_itself() -> None:
    found = boundaries(Case(model="SAGEConv", layers=2, hidden=8), training=True)
    assert [type(one.request.op) for one in found] == [WholeLayer] * 2


def test_nothing_goes_on_that_is_not_read_again() -> None:
    """The rows that a layer has read are for the residual alone, where its result is as wide."""
    for residual, names in ((False, set()), (True, {"residual"})):
        first, second, last = boundaries(Case(model="gcn", residual=residual), training=True)
        assert not first.rows
        assert set(second.rows) == names
        assert not last.rows


class Repeated(nn.Module):
    """A propagation of one's own."""

    out_width = 5

    def forward(self, view: View, x: Tensor, steps: int = 1) -> Tensor:
        return view.propagate(x, steps=steps)


@pytest.mark.parametrize("num_updates", [1, 3])
def test_a_propagation_of_ones_own_makes_all_steps(num_updates: int) -> None:
    graph = make_graph(23)
    view, x = GraphView.of(graph.in_edges), torch.randn(23, 5)
    model = Decoupled(Stack([RowLayer(Linear(5, 5), 5) for _ in range(num_updates)]), Repeated())
    expected = model.updates([view] * num_updates, x)
    for _ in range(num_updates):
        expected = view.propagate(expected)
    torch.testing.assert_close(model([view], x), expected)


def test_hooks_are_called_wherever_they_are() -> None:
    """On layers, norms, models inside models: what has a hook runs whole, with the same numbers."""
    graph = make_graph(23)
    view, x = GraphView.of(graph.in_edges), torch.randn(23, 7)
    updates = Stack([RowLayer(Linear(5, 5), 5), RowLayer(Linear(5, 5), 5)])
    models: Sequence[nn.Module] = (
        LinkModel(Stack([SAGEConv(7, 6), GCNConv(6, 5)], norm="batch", residual=True), Dot()),
        Decoupled(Stack([RowLayer(Linear(7, 5), 5), *updates.layers], norm="batch"), GCNConv(5, 5, update=False)),
    )
    for model in models:
        views: list[View] = [view] * model.num_stages
        seen: set[str] = set()
        expected = model(views, x)
        named = {name: one for name, one in model.named_modules() if not name.endswith((".input", ".update"))}
        called = {name for name, one in named.items() if not isinstance(one, nn.ModuleList | Dot)}
        for name in called:
            named[name].register_forward_hook(lambda *_, name=name, seen=seen: seen.add(name))
        assert torch.equal(model(views, x), expected)
        assert seen == called


def test_a_batch_norm_of_ones_own_is_called() -> None:
    class Doubled(BatchNorm):
        def forward(self, view: View, x: Tensor, steps: int = 1) -> Tensor:
            return 2 * super().forward(view, x, steps)

    view, x = GraphView.of(make_graph(23).in_edges), torch.randn(23, 7)
    model, other = (Stack([GCNConv(7, 6), RowLayer(nn.Identity(), 6)], norm="batch") for _ in range(2))
    other.load_state_dict(model.state_dict())
    other.norms[0] = Doubled(6)
    torch.testing.assert_close(other([view] * 2, x), 2 * model([view] * 2, x))

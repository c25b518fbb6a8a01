"""Running a model phase by phase, from boundary to boundary, equals its forward pass."""

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
from weft.utils.errors import InputError


def boundaries(case: Case, *, training: bool) -> list[Boundary]:
    """Return the boundaries of a case's model, in the order in which its forward pass reaches them."""
    placed = Session(case, "single", Group())
    model, strategy, reached = placed.model.train(training), placed.strategy, []
    assert isinstance(model, PhasedModel)
    assert isinstance(strategy, ResidentPlaced)
    views = strategy.views(Step(epoch=0, training=training))
    assert views[0].inputs.rows is not None
    phase = model.begin(views, views[0].inputs.rows)
    while isinstance(phase, Boundary):
        reached.append(phase)
        phase = model.resume(views, phase.cross(views[phase.stage]))
    return reached


@pytest.mark.parametrize("training", [True, False])
def test_a_batch_norm_has_two_boundaries_in_training(training: bool) -> None:
    reached = boundaries(Case(model="gcn", norm="batch"), training=training)
    assert [isinstance(boundary.request.op, Total) for boundary in reached] == (
        [False, True, True, False, True, True, False] if training else [False] * 3
    )
    assert [boundary.stage for boundary in reached] == ([0, 0, 0, 1, 1, 1, 2] if training else [0, 1, 2])


def test_a_decoupled_model_has_one_boundary_for_all_steps() -> None:
    (boundary,) = boundaries(Case(model="gat", decoupled=True, layers=4), training=True)
    assert boundary.steps == 4
    assert boundary.request.op.loops
    assert set(boundary.request.source) == {"h", "logit_src"}
    assert set(boundary.request.target) == {"logit_dst"}


def test_a_layer_without_phases_is_one_aggregate() -> None:
    reached = boundaries(Case(model="SAGEConv", layers=2, hidden=8), training=True)
    assert [type(boundary.request.op) for boundary in reached] == [WholeLayer] * 2


def test_only_rows_that_are_read_again_cross_a_boundary() -> None:
    """The input rows of a layer cross its boundary only for a residual connection, which needs equal widths."""
    for residual, names in ((False, set()), (True, {"residual"})):
        first, second, last = boundaries(Case(model="gcn", residual=residual), training=True)
        assert not first.rows
        assert set(second.rows) == names
        assert not last.rows


class Repeated(nn.Module):
    """A custom propagation layer."""

    out_width = 5

    def forward(self, view: View, x: Tensor, steps: int = 1) -> Tensor:
        return view.propagate(x, steps=steps)


class Widthless(nn.Module):
    """A custom layer that does not state the width of its result."""

    def forward(self, view: View, x: Tensor) -> Tensor:
        return view.propagate(x)


def test_a_layer_without_out_width_is_named() -> None:
    with pytest.raises(InputError, match=r"^weft\.nn\.Stack: Widthless \(layer 2\) has no attribute out_width: set it"):
        Stack([Repeated(), Widthless(), Repeated()])


@pytest.mark.parametrize("num_updates", [1, 3])
def test_a_custom_propagation_runs_all_steps(num_updates: int) -> None:
    graph = make_graph(23)
    view, x = GraphView.of(graph.in_edges), torch.randn(23, 5)
    model = Decoupled(Stack([RowLayer(Linear(5, 5), 5) for _ in range(num_updates)]), Repeated())
    expected = model.updates([view] * num_updates, x)
    for _ in range(num_updates):
        expected = view.propagate(expected)
    torch.testing.assert_close(model([view], x), expected)


def test_hooks_of_all_modules_are_called() -> None:
    """A layer, norm or nested model with a forward hook runs as a whole, with the same results."""
    graph = make_graph(23)
    view, x = GraphView.of(graph.in_edges), torch.randn(23, 7)
    updates = Stack([RowLayer(Linear(5, 5), 5), RowLayer(Linear(5, 5), 5)])
    models: Sequence[nn.Module] = (
        LinkModel(Stack([SAGEConv(7, 6), GCNConv(6, 5)], norm="batch", residual=True), Dot()),
        Decoupled(Stack([RowLayer(Linear(7, 5), 5), *updates.layers], norm="batch"), GCNConv(5, 5, update=False)),
    )
    for model in models:
        views: list[View] = [view] * model.num_stages
        called: set[str] = set()
        expected = model(views, x)
        named = {name: module for name, module in model.named_modules() if not name.endswith((".input", ".update"))}
        hooked = {name for name, module in named.items() if not isinstance(module, nn.ModuleList | Dot)}
        for name in hooked:
            named[name].register_forward_hook(lambda *_, name=name, called=called: called.add(name))
        assert torch.equal(model(views, x), expected)
        assert called == hooked


def test_a_custom_batch_norm_is_called() -> None:
    class Doubled(BatchNorm):
        def forward(self, view: View, x: Tensor, steps: int = 1) -> Tensor:
            return 2 * super().forward(view, x, steps)

    view, x = GraphView.of(make_graph(23).in_edges), torch.randn(23, 7)
    model, other = (Stack([GCNConv(7, 6), RowLayer(nn.Identity(), 6)], norm="batch") for _ in range(2))
    other.load_state_dict(model.state_dict())
    other.norms[0] = Doubled(6)
    torch.testing.assert_close(other([view] * 2, x), 2 * model([view] * 2, x))

"""Every convolution of PyG and custom ones (tests/lib/convolutions.py): PyG's numbers, and the same on all ranks."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.lib.cases import BY_TYPE, Case
from tests.lib.convolutions import CUSTOM, NAMES, PAGE, WithFirstRows, case_of, how, make_net, page
from tests.lib.graphs import NUM_FEATURES, make_graph
from tests.lib.pairwise import param
from tests.lib.session import Given, check_close, check_on_ranks, reference
from weft.nn import Workload, convert
from weft.strategies import STRATEGIES, get_strategy
from weft.utils.errors import InputError

pytest.importorskip("torch_geometric")

STRATEGIES_OF_ROWS = ("communicated", "cached", "hybrid", "tensor", "offload", "pipeline")
FAILING = {
    **dict.fromkeys(
        (("AntiSymmetricConv", "offload"), ("AntiSymmetricConv", "pipeline")),
        "parameters without a gradient under single get one of zeros",
    ),
}
"""Known defects."""
QUICK = ("TransformerConv", "edge MLP", "EGNN-like coordinates", "PointNetConv")
"""Convolutions of the quick set."""


@pytest.mark.parametrize("name", [param(name, name=name, quick=name in QUICK) for name in NAMES])
def test_equals_pyg(name: str) -> None:
    """Logits and gradients are PyG's, on a directed graph with loops, duplicate edges and an isolated vertex."""
    if how(name).native is not False and name != "ChebConv":
        pytest.skip("refused, or native: PyG's layers count a repeated self-loop once (tests/nn/test_convert.py)")
    case = case_of(name)
    graph, converted = case.build()
    expected, model = reference(case), make_net(name).double()
    model.load_state_dict(converted.state_dict())
    edges = torch.stack(graph.in_edges.edges())
    shuffled = torch.randperm(graph.num_edges, generator=torch.Generator().manual_seed(0))
    if name == "PDNConv":  # of several self-loops of a vertex, PyG keeps the last one's weight
        shuffled = torch.arange(graph.num_edges)
    arguments = {"edge_attr": graph.edge_features, "edge_type": graph.edge_type}
    names = [each for each, taken in (("edge_attr", case.edge_features), ("edge_type", case.typed)) if taken]
    rows = [arguments[each][shuffled] for each in names]  # type: ignore[index]
    rows = [each.double() if each.is_floating_point() else each.long() for each in rows]
    assert graph.x is not None
    logits = model(graph.x.double(), edges[:, shuffled], *rows)
    torch.nn.functional.cross_entropy(logits[graph.train_mask], graph.y[graph.train_mask]).backward()
    check_close(expected.logits, logits.detach(), name)
    for parameter, tensor in model.named_parameters():
        if tensor.grad is not None:
            check_close(expected.gradients[parameter], tensor.grad, f"{name}: gradient of {parameter}")


def test_further_rows_without_a_comparison() -> None:
    """The width of the result, and what a convolution reads of the graph, are then found when the plan is made."""
    from torch_geometric.nn import FAConv
    from torch_geometric.utils import degree

    class ScaledConv(FAConv):
        """A convolution that reads the number of out-edges of a vertex."""

        def forward(self, x: Tensor, x_0: Tensor, edge_index: Tensor) -> Tensor:
            scale = degree(edge_index[0], len(x)).clamp(min=1).rsqrt()
            result: Tensor = super().forward(scale[:, None] * x, x_0, edge_index)
            return result

    model = convert(make_net("PointNetConv"), unchecked=True)
    work = Workload(model, make_graph(23))
    plan = get_strategy("single")(work, 1)
    assert [op.width for op in work.outline(plan.traits, training=True)] == [NUM_FEATURES + 3]
    net = convert(WithFirstRows(ScaledConv(NUM_FEATURES), NUM_FEATURES), unchecked=True)
    with pytest.raises(InputError, match="ScaledConv reads more of the graph than the in-edges of a vertex"):
        get_strategy("single")(Workload(net, make_graph(23)), 1)


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 3], ids=["P1", "P3"])
@pytest.mark.parametrize("strategy", STRATEGIES_OF_ROWS)
@pytest.mark.parametrize("name", NAMES)
def test_strategies_agree(name: str, strategy: str, size: int) -> None:
    """Logits, gradients, losses and counts are those of `single`, under every strategy that runs the convolution."""
    native = how(name).native
    if native is None or (native is False and STRATEGIES[strategy].traits.block_error):
        pytest.skip("refused")
    if (name, strategy) in FAILING:
        pytest.xfail(FAILING[name, strategy])
    check_on_ranks(size, case_of(name), strategy, Given(chunks=3), full=True)


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 3], ids=["P1", "P3"])
@pytest.mark.parametrize("strategy", [name for name in STRATEGIES_OF_ROWS if not STRATEGIES[name].traits.block_error])
@pytest.mark.parametrize("model", BY_TYPE)
def test_strategies_agree_on_a_convolution_over_all_relations(model: str, strategy: str, size: int) -> None:
    case = Case(model=model, typed="x", sparse=model == "pyg-hetero-hgt")
    check_on_ranks(size, case, strategy, Given(chunks=3), full=True)


@pytest.mark.slow
def test_page_is_current() -> None:
    assert PAGE.read_text() == page(), "run python -m tests.lib.convolutions"
    assert all(how(name).native is not None for name in CUSTOM)

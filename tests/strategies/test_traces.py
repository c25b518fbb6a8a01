"""Traces of tensor parallelism, compared with the formulas of the paper. Other tests compare traces with counts."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import takewhile

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode, flop_registry, register_flop_formula

from tests.lib.cases import MACHINE, Case
from tests.lib.graphs import NUM_CLASSES, NUM_FEATURES
from tests.lib.session import NOTHING, Given, check_case, workload
from weft.comm import Group
from weft.cost import Trace
from weft.data import GraphStats, load
from weft.nn import Stack, View, Workload, make_model
from weft.nn.workload.flops import PRODUCTS
from weft.strategies import STRATEGIES, Step, get_strategy
from weft.utils.errors import InputError

STATS = GraphStats(num_vertices=1003, num_edges=5000, num_features=17)


def traces(size: int, *, training: bool = True, **options: object) -> list[Trace]:
    work = Workload(make_model("gcn", STATS.num_features, 5, **options), STATS)  # type: ignore[arg-type]
    plan = get_strategy("tensor")(work, size)
    return [plan.trace(rank, training=training) for rank in range(size)]


def rounds(trace: Trace) -> int:
    return trace.collectives["rows_to_cols"] + trace.collectives["cols_to_rows"]


@pytest.mark.parametrize("layers", [2, 3, 7])
def test_decoupled_rounds_are_4_whatever_the_depth(layers: int) -> None:
    assert {rounds(trace) for trace in traces(3, decoupled=True, layers=layers)} == {4}


def test_coupled_rounds_are_at_most_the_papers() -> None:
    """Section 4.1.2: 10 for 3 layers. The first aggregate of constant features is computed once and needs no round."""
    assert {rounds(trace) for trace in traces(3, layers=3)} == {8}
    assert {rounds(trace) for trace in traces(3, layers=3, input_dropout=0.5)} == {9}


@pytest.mark.parametrize("model", ["gcn", "gat"])
def test_an_aggregate_is_not_priced_as_a_copy_of_its_rows(model: str) -> None:
    """Passes over rows do not grow with the number of features, which only linear layers read."""

    def passed_bytes(num_features: int) -> int:
        work = Workload(make_model(model, num_features, 5, hidden=16), replace(STATS, num_features=num_features))
        operations = get_strategy("single")(work, 1).trace(0, training=True).operations
        calls = [call for operation in operations for call in operation.calls]
        return sum(call.sizes[0] * call.number for call in calls if call.kernel == "pass")

    assert passed_bytes(1700) == passed_bytes(17) > 0


def test_edges_differ_by_at_most_one_column() -> None:
    for hidden in (1, 2, 7, 64):
        edges = [trace.edges for trace in traces(4, layers=2, hidden=hidden)]
        assert max(edges) - min(edges) <= 2 * STATS.num_edges  # one column, forward and backward


def test_volume_is_constant_in_the_number_of_ranks() -> None:
    """Section 3.2: 2 V D (P - 1) / P per layer and direction, over all ranks."""
    for size in (2, 3, 4):
        rank_traces = traces(size, decoupled=True, layers=2)
        sent = sum(trace.bytes_sent["rows_to_cols"] + trace.bytes_sent["cols_to_rows"] for trace in rank_traces)
        assert sent == pytest.approx(4 * STATS.num_vertices * 5 * 4 * (size - 1) / size, rel=0.01)


def test_sent_equals_received() -> None:
    rank_traces = traces(4, layers=3)
    for tag in ("rows_to_cols", "cols_to_rows"):
        assert sum(trace.bytes_sent[tag] for trace in rank_traces) == sum(
            trace.bytes_received[tag] for trace in rank_traces
        )


@pytest.mark.parametrize(
    ("stats", "hidden", "heads", "expected"),
    [
        (STATS, 64, 4, "whole vectors"),  # no head is cut: only right vectors are sent
        (STATS, 4, 1, "whole vectors"),
        (STATS, 256, 1, "partial sums"),
        (replace(STATS, num_edges=500_000), 256, 1, "whole vectors"),
    ],
)
def test_the_exchange_for_logits_that_sends_least_is_chosen(
    stats: GraphStats, hidden: int, heads: int, expected: str
) -> None:
    """The trace names the chosen exchange, and the bytes of each: those of its operations without the columns of h."""
    model = make_model("gatv2", stats.num_features, 5, hidden=hidden, heads=heads)
    plan = get_strategy("tensor")(Workload(model, stats), 4)
    plan.layout.__dict__["num_remote"] = 2000  # otherwise counted in a graph
    traces = [plan.trace(rank, training=False) for rank in range(4)]
    operations_by_rank = [
        [operation for operation in trace.operations if operation.kind != "dense"] for trace in traces
    ]
    chosen, candidates = operations_by_rank[0][0].how.split(", of ")
    candidate_bytes = {
        name: int(number.replace(",", "")) for name, number in re.findall(r"([a-z][a-z -]+) ([\d,]+) B", candidates)
    }
    assert chosen == expected == min(list(candidate_bytes)[:2], key=lambda name: candidate_bytes[name])
    assert list(candidate_bytes) == ["whole vectors", "partial sums", "data-parallel"]
    before = [
        operation.bytes_sent
        for operations in operations_by_rank
        for operation in takewhile(lambda operation: operation.kind != "aggregate", operations)
    ]
    assert sum(before) == 3 * stats.num_vertices * hidden + candidate_bytes[expected]  # 4 bytes each, to 3 of 4 ranks


@pytest.mark.parametrize("strategy", ["single", "offload"])
def test_a_product_that_is_not_counted_is_detected(strategy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted error is in products without a sum, which compute gradients."""
    case = Case(model="gcn", layers=2)
    check_case(Group(), case, strategy, full=True)
    monkeypatch.delitem(PRODUCTS, torch.ops.aten.mm)
    workload.cache_clear()
    with pytest.raises(AssertionError, match="flops, the trace says"):
        check_case(Group(), case, strategy, full=True)


def test_flops_are_those_of_any_library() -> None:
    """A dense layer so large that oneDNN computes it counts like a matrix product, forward and backward."""
    if torch.ops.mkldnn._linear_pointwise not in flop_registry:  # PyTorch's registry has none of oneDNN
        register_flop_formula(torch.ops.mkldnn._linear_pointwise)(lambda x, weight, *_, **__: 2 * x.numel() * weight[0])
    graph = load("rmat:vertices=3000,edges=9k,features=60,classes=5")
    model = make_model("sage", 60, 5, hidden=64, dropout=0.0)
    plan = get_strategy("single")(Workload(model, graph))
    placed = plan.place(Group())
    with FlopCounterMode(display=False) as counter:
        logits = placed.forward(Step(epoch=0, training=True))
        placed.backward(logits, torch.ones_like(logits))
    assert any("_linear_pointwise" in str(kind) for kind in counter.get_flop_counts()["Global"])
    assert counter.get_total_flops() == plan.trace(training=True).flops


class Opaque(torch.nn.Module):
    """A layer that reads the edges themselves."""

    out_width = 7

    def forward(self, view: View, x: torch.Tensor) -> torch.Tensor:
        source, edge_index, num_targets = view.block(x)
        return torch.zeros(num_targets, 7).index_add(0, edge_index[1], source[edge_index[0]])


def test_a_plan_refuses_what_its_strategy_cannot_run() -> None:
    with pytest.raises(InputError, match=r"view.block.*: use --strategy ") as caught:
        get_strategy("tensor")(Workload(Stack([Opaque()]), STATS), 2)
    suggested = set(re.findall(r"[a-z]+", str(caught.value).partition("--strategy ")[2])) & STRATEGIES.keys()
    assert suggested == {"hybrid", "communicated", "cached", "offload", "pipeline", "single"}
    assert not any(STRATEGIES[name].traits.block_error for name in suggested)
    with pytest.raises(InputError, match="single runs on one rank"):
        get_strategy("single")(Workload(make_model("gcn", 17, 5), STATS), 2)
    with pytest.raises(InputError, match="unknown strategy 'tensr': did you mean 'tensor'"):
        get_strategy("tensr")


def test_caching_supports_at_most_100_aggregates() -> None:
    """Models with more aggregates run under strategies that cache nothing."""
    graph, _ = Case(model="gcn").build()
    model = make_model("gcn", NUM_FEATURES, NUM_CLASSES, decoupled=True, layers=101)
    work = Workload(model, graph)
    assert len(NOTHING.plan("communicated", work, 2).layout.blocks.dependencies(0).hops) == 101
    with pytest.raises(InputError, match="101 aggregates, but caching supports at most 100"):
        get_strategy("cached")(work, 2)


def test_a_cache_ratio_caches_the_cheapest_sources() -> None:
    """Without a profile of the machine, the cheapest sources are those with the fewest in-edges."""
    graph = load("rmat:vertices=600,edges=6k,features=7,classes=5")
    model = make_model("gcn", NUM_FEATURES, NUM_CLASSES, layers=3)
    cheap = [
        Given(cache_ratio=0.3, machine=machine).plan("hybrid", Workload(model, graph), 2).layout.blocks.dependencies(0)
        for machine in (None, MACHINE)
    ]
    edges = [plan.hops[0].block.num_edges for plan in cheap]
    assert edges[0] == pytest.approx(edges[1], rel=0.1)

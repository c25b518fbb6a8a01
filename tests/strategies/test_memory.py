"""The bytes that a plan says a step makes, beside those of the tensors that are alive while ranks run it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch

import weft
from tests.lib.cases import Case
from tests.lib.pairwise import param
from tests.lib.ranks import on_ranks
from weft.comm import Group
from weft.data import Adjacency
from weft.nn import Workload, make_model
from weft.parallel.chunks.run.chunk_runtime import Runtime
from weft.parallel.columns.column_memory import PassSizes
from weft.runtime.tensor_peak import TensorPeak
from weft.strategies import Placed, get_strategy
from weft.strategies.placed_view import Exchange
from weft.strategies.resident import ResidentPlaced, ResidentPlan
from weft.strategies.tensor.plan import TensorOptions, TensorPlan
from weft.strategies.vertex.blocks import Halos
from weft.strategies.vertex.plan import CommunicatedPlan
from weft.strategies.vertex.stale import StalePlan
from weft.training.tasks.metrics import NodeTask

GRAPH = "rmat:vertices=2k,edges=12k,features=16,classes=4"
RANKS, NEAR = 2, 0.1


@pytest.mark.parametrize("model", ["gcn", "gat", "gatv2"])
@pytest.mark.parametrize("strategy", ["communicated", "cached", "hybrid", "stale"])
def test_rows_that_come_are_told(strategy: str, model: str) -> None:
    """Those of an attention are there twice at most: gradients go on when what its kernels keep is gone."""
    told, seen = zip(*on_ranks(RANKS, step_bytes, strategy, model), strict=True)
    assert max(told) == pytest.approx(max(seen), rel=NEAR)


@pytest.mark.parametrize("model", ["gcn", "gat"])
def test_old_halos_are_told(model: str) -> None:
    """A step that exchanges leaves as much anew, which one that does not leaves alone; sums over the least rows too."""
    for told, seen in on_ranks(RANKS, table_bytes, model):
        assert told == seen > 0


def table_bytes(group: Group, model: str) -> tuple[int, int]:
    """Of the halos that a rank keeps under `stale`: what its plan says, and what a later exchange makes."""
    work = workload(model)
    plan, without = (get_strategy(strategy)(work, group.size) for strategy in ("stale", "communicated"))
    assert isinstance(plan, StalePlan)
    assert isinstance(without, CommunicatedPlan)
    every = plan.options.refresh_every
    left = [alive for _, alive in step_peaks(plan.place(group), epochs=every + 2)]
    told = plan.resident_memory(group.rank).device - without.resident_memory(group.rank).device
    return told, left[every] - left[every + 1]


@pytest.mark.parametrize("model", ["gcn", "gat"])
@pytest.mark.parametrize("strategy", ["communicated", "cached", "hybrid", "tensor"])
def test_edges_are_kept_the_other_way_where_gradients_go_back(strategy: str, model: str) -> None:
    """Not those of aggregates that are made only once, nor those of a block whose sums go by slices of it."""
    for told, seen in on_ranks(RANKS, edge_bytes, strategy, model):
        assert told == seen


def edge_bytes(group: Group, strategy: str, model: str) -> tuple[int, int]:
    """Of the ids that a rank has for its edges: what its plan says, and those that are there behind a step."""
    work = workload(model)
    plan = get_strategy(strategy)(work, group.size)
    assert isinstance(plan, ResidentPlan)
    told = plan.resident_memory(group.rank).device
    plan.resident_edges = lambda _: []  # type: ignore[method-assign]
    told -= plan.resident_memory(group.rank).device
    placed = plan.place(group)
    assert isinstance(placed, ResidentPlaced)
    step_peaks(placed, epochs=1)
    found = {id(edges): (edges, num_edges) for one in placed.whole.exchanges for edges, num_edges in arrangements(one)}
    return told, sum((4 if edges._existing_transpose() is None else 12) * number for edges, number in found.values())


def arrangements(exchange: Exchange) -> Iterator[tuple[Adjacency, int]]:
    """The edges of a stage, as they are and by where the rows that are summed come from, and how many these are."""
    found = [exchange.topology.adjacency]
    if isinstance(exchange, Halos):
        found = [block.adjacency for block in exchange.blocks]
        for block in exchange.blocks:
            for slices in block._slices.values():
                found += [slices.local, *(part.adjacency for part in slices.remote)]
            if block.least_halo is not None and block.least_halo.route.sums is not None:
                yield block.least_halo.route.sums, block.least_halo.route.num_summed
    for edges in found:
        yield edges, edges.num_edges


@pytest.mark.parametrize("dropped", [False, True])
@pytest.mark.parametrize("reached", [False, True])
def test_columns_of_features_are_kept_for_dropout_alone(reached: bool, dropped: bool) -> None:
    """Which makes others of them in each step; an aggregate of constant ones is made once, and they are let go."""
    for told, seen in on_ranks(RANKS, column_bytes, reached, dropped):
        assert told == seen
        assert bool(seen) == dropped


def column_bytes(group: Group, reached: bool, dropped: bool) -> tuple[int, int]:
    """Of the columns of features that a rank of `tensor` has behind a step: what its plan says, and those there are."""
    graph = weft.load(GRAPH)
    if reached:
        graph = replace(graph, train_mask=torch.arange(graph.num_vertices) < 3)
    model = make_model("gin", graph.num_features, graph.num_classes, input_dropout=0.5 * dropped)
    work = Workload(model, graph)
    plan = TensorPlan(work, group.size)
    assert (plan.step_plans[True] is not plan) == reached
    placed = plan.place(group)
    step_peaks(placed, epochs=1)
    share = placed.step_inputs(next(iter(placed.steps(1))))
    kept = [vars(exchange).get("features", torch.empty(0)) for exchange in set(share.exchanges)]
    asked = [op for op in work.outline(plan.traits, training=True) if not work.is_cached(op)]
    told = max(plan.step_plans[True].feature_copy_bytes(op, group.rank) for op in asked)
    return told, sum(one.nbytes for one in kept)


@pytest.mark.parametrize(
    ("strategy", "model"),
    [
        ("tensor", "gat"),
        ("communicated", "sage"),
        pytest.param("tensor", "sage", marks=pytest.mark.slow),
        pytest.param("communicated", "gat", marks=pytest.mark.slow),
    ],
)
def test_narrow_rows_take_less(strategy: str, model: str) -> None:
    """Little more than half: the rest is sums before they are rounded."""
    told, seen = zip(*on_ranks(RANKS, step_bytes, strategy, model, torch.bfloat16), strict=True)
    _, wide = zip(*on_ranks(RANKS, step_bytes, strategy, model), strict=True)
    assert max(told) == pytest.approx(max(seen), rel=NEAR)
    assert max(seen) < 0.75 * max(wide)


CHUNKED = [("gcn", False), ("sage", True), ("gin", True), ("gat", False), ("gat", True), ("gatv2", False)]
SMALL = "rmat:vertices=600,edges=4k,features=7,classes=3"


CHUNKS = [{"chunks": 1}, {"chunks": 9}, {"chunks": 30}, {"limit": 4}, {"limit": 1000}]
QUICK = [(1, CHUNKS[1])]


@pytest.mark.parametrize(
    ("size", "asked"),
    [
        param(size, asked, name=f"P{size}-{asked}", quick=(size, asked) in QUICK)
        for size, asked in product((1, 2, 3), CHUNKS)
    ],
)
def test_chunks_are_told(size: int, asked: dict[str, int]) -> None:
    """Of sums, maxima and attention, of one step and several, what is kept and what is made again."""
    for one in on_ranks(size, chunk_ratios, asked):
        for case, (told, seen) in one.items():
            assert told == pytest.approx(seen, rel=NEAR), case


@pytest.mark.parametrize(
    ("kind", "name", "nothing", "asked"),
    [
        (PassSizes, "arrays", property(lambda _: 0), {"chunks": 9}),
        (PassSizes, "read_width", lambda *_: 0, {"limit": 1000}),
    ],
    ids=["rows", "slots"],
)
def test_a_buffer_that_is_left_out_is_seen(
    kind: type, name: str, nothing: object, asked: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the columns of all rows, or the slots of those that chunks read, attention takes too little."""
    monkeypatch.setattr(kind, name, nothing)
    told, seen = chunk_ratios(Group(), asked)["gatv2", False]
    assert told < (1 - NEAR) * seen


def chunk_ratios(group: Group, asked: dict[str, int]) -> dict[tuple[str, bool], tuple[int, int]]:
    """By model and whether it is decoupled, what is told of a step of `tensor` in chunks, and what is seen.

    What is loaded ahead is loaded here, where tensors are followed.
    """
    found = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Runtime, "_loader", AtOnce())
        for model, decoupled in [*CHUNKED, ("max", False)]:
            work = chunk_workload(model, decoupled=decoupled)
            least = TensorPlan(work, group.size).least_bytes()
            options = TensorOptions(chunks=asked.get("chunks", 0), device_memory=asked.get("limit", 0) * least or None)
            plan = TensorPlan(work, group.size, options)
            found[model, decoupled] = plan.memory(group.rank), step_peaks(plan.place(group), epochs=2)[-1][0]
    return found


def chunk_workload(model: str, *, decoupled: bool) -> Workload:
    """In float64."""
    graph = weft.load(SMALL)
    torch.manual_seed(0)
    if model == "max":
        return Workload(Case(model="pyg-sage-max").make_model(graph).double(), graph)
    made = make_model(model, graph.num_features, graph.num_classes, hidden=64, layers=3, decoupled=decoupled)
    return Workload(made.double(), graph)


class AtOnce:
    """An executor whose work is done when it is given."""

    def submit(self, work: Callable[..., Any], *arguments: Any) -> Future[Any]:
        done = Future[Any]()
        done.set_result(work(*arguments))
        return done


def test_a_limit_is_where_the_chunks_are() -> None:
    """The working set is on the device, within the limit; rows are on the host, or in files; pinned ones take more."""
    work = chunk_workload("gat", decoupled=False)
    limit = 8 * TensorPlan(work, 2).least_bytes()
    here, apart = (TensorPlan(work, 2, TensorOptions(device_memory=limit, device=one)) for one in ("", "cuda"))
    whole = TensorPlan(work, 2).peak_memory()
    assert 0 < apart.peak_memory().device == here.peak_memory().device <= limit
    assert 0 < apart.peak_memory().host < here.peak_memory().host + here.peak_memory().device
    assert 2 * here.peak_memory().disk > apart.peak_memory().disk > here.peak_memory().disk > whole.disk == 0
    assert here.memory() < TensorPlan(work, 2, TensorOptions(chunks=9)).memory()


def step_bytes(group: Group, strategy: str, model: str, rows: torch.dtype | None = None) -> tuple[int, int]:
    """Of a rank: what its plan says, and what was alive at most in a step after the first, which makes what is kept.

    rows: their type, if it is not the parameters'.
    """
    work = workload(model)
    work.model.row_dtype = rows  # type: ignore[assignment]
    plan = get_strategy(strategy)(work, group.size)
    assert isinstance(plan, ResidentPlan)
    return plan.memory(group.rank), step_peaks(plan.place(group), epochs=2)[-1][0]


def workload(model: str) -> Workload:
    graph = weft.load(GRAPH)
    torch.manual_seed(0)
    return Workload(make_model(model, graph.num_features, graph.num_classes, hidden=64, layers=3), graph)


def step_peaks(placed: Placed, *, epochs: int) -> list[tuple[int, int]]:
    """The bytes of each training step's tensors: at most, and behind it."""
    task = NodeTask(placed.graph, placed.rows, placed.group, placed.empty_rows, placed.rows_device)
    found = []
    for epoch in range(epochs):
        placed.model.zero_grad()
        (step,) = placed.steps(epoch)
        with TensorPeak() as peak:
            logits = placed.forward(step)
            placed.backward(logits, task.loss(logits, step)[1])
        found.append((peak.most, peak.alive))
    return found

"""Rows that a part fetches, and the selection of rows that it recomputes, equal those of plain Python."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.lib.graph_checks import CALM
from weft.data import Adjacency, Graph, load
from weft.partition import Caching, Dependencies, make_dependencies
from weft.partition.dependencies import choose_cached

ROW_SECONDS, EDGE_SECONDS, FETCH_SECONDS, ROW_BYTES, EDGE_BYTES = range(5)
NUM_PARTS = 4
MANY = settings(CALM, max_examples=200)
Row = tuple[int, int]
"""A vertex and a layer."""


@dataclass(kw_only=True)
class Reference:
    """Reference implementation of NeutronStar, algorithm 4, with a set of recomputed rows and a cost for each row."""

    adj: Adjacency
    part: list[int]
    rank: int
    caching: Caching
    rows: set[Row] = field(default_factory=set)
    limited: bool = False

    def __post_init__(self) -> None:
        self.costs = self.caching.costs.tolist()
        for level in range(self.caching.first, len(self.costs)):
            if not self.limited:
                self.choose(level)

    @cached_property
    def sources(self) -> list[list[int]]:
        """Return the sources of every vertex, in the order of the graph."""
        return [row.tolist() for row in self.adj.indices.split(self.adj.degree.tolist())]

    @cached_property
    def owned(self) -> list[int]:
        return [v for v, part in enumerate(self.part) if part == self.rank]

    @cached_property
    def remote_sources(self) -> list[int]:
        remote = {u for v in self.owned for u in self.sources[v] if self.part[u] != self.rank}
        return sorted(remote, key=lambda u: (self.part[u], u))

    def choose(self, level: int) -> None:
        queue, fetch, left = self.remote_sources, self.costs[level][FETCH_SECONDS], len(self.remote_sources)
        if self.caching.ratio is not None:
            fetch, left = float("inf"), int(self.caching.ratio * left + 0.5)
        queue = sorted(queue, key=lambda u: min(self.seconds(u, level), fetch))
        for u in queue:
            if left and self.seconds(u, level) < fetch:
                rows = self.rows | self.cone(u, level)
                if self.caching.max_bytes is not None and self.num_bytes(rows) > self.caching.max_bytes:
                    self.limited = True
                    return
                self.rows = rows
                left -= 1

    def cone(self, u: int, level: int) -> set[Row]:
        """Return the remote rows that computing u's row of a layer needs, including that row."""
        rows = {(u, below) for below in range(self.caching.first, level + 1)}
        if level > self.caching.first:
            for source in self.sources[u]:
                if self.part[source] != self.rank:
                    rows |= self.cone(source, level - 1)
        return rows

    def seconds(self, u: int, level: int) -> float:
        """Return the additional seconds of computing u's row of a layer, with all rows it needs, over fetching it."""
        total = 0.0
        for v, layer in self.cone(u, level) - self.rows:
            cost = self.costs[layer]
            row = cost[ROW_SECONDS] + len(self.sources[v]) * cost[EDGE_SECONDS]
            saved = cost[FETCH_SECONDS] if v in self.remote_sources and (v, layer) != (u, level) else 0.0
            total += max(0.0, row - saved)
        return total

    def num_bytes(self, rows: set[Row]) -> float:
        costs: list[list[float]] = self.costs
        return sum(costs[k][ROW_BYTES] + len(self.sources[v]) * costs[k][EDGE_BYTES] for v, k in rows)

    @property
    def last_layers(self) -> list[int]:
        return [max((k for u, k in self.rows if u == v), default=-1) for v in range(len(self.part))]


@st.composite
def problems(draw: st.DrawFn) -> tuple[Adjacency, Tensor, int, Caching]:
    """Sample a graph, the part of every vertex, a part (which may be empty), and costs without rounding errors."""
    random = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    num_vertices, num_edges = draw(st.sampled_from([14, 9, 11, 3])), draw(st.sampled_from([25, 50, 32, 12, 0]))
    source, target = torch.randint(
        0, num_vertices - 1, (2, num_edges), generator=random
    )  # The last vertex is isolated.
    weight = torch.rand(num_edges, generator=random) if draw(st.booleans()) else None
    graph = Graph.from_edges(source, target, num_vertices=num_vertices, weight=weight)
    part = torch.randint(0, draw(st.sampled_from([3, 2])), (num_vertices,), generator=random, dtype=torch.int32)
    costs = torch.randint(0, 9, (draw(st.sampled_from([3, 2, 4, 1])), 5), generator=random).double() / 4
    costs[:, FETCH_SECONDS] *= draw(st.sampled_from([16, 4, 1]))
    costs[:, ROW_BYTES] += 1
    ratio = draw(st.sampled_from([None, None, 0.4, 1.0, 0.0]))
    max_bytes = draw(st.sampled_from([None, None, 0, 20, 60]))
    caching = Caching(costs=costs, first=draw(st.sampled_from([0, 1, 0, 1, 2])), ratio=ratio, max_bytes=max_bytes)
    return graph.in_edges, part, draw(st.sampled_from([0, 1, 0, 1, 3])), caching


def selected(
    adj: Adjacency, part: Tensor, rank: int, caching: Caching, num_threads: int = 1
) -> tuple[list[int], float, bool]:
    """Return the native selection of rows to recompute for a part."""
    levels, num_bytes, limited = choose_cached(adj, part, rank, caching, num_threads)
    return levels.tolist(), num_bytes, limited


def check_rows(needed: Dependencies, reference: Reference) -> list[list[int]]:
    """Check the inputs of every hop against the reference; return them, followed by the part's vertices."""
    mine, levels, first = reference.owned, reference.last_layers, reference.caching.first
    recomputed = sorted((v for v, level in enumerate(levels) if level >= 0), key=lambda v: -levels[v])
    rows = needed.rows.tolist()
    assert rows == mine + recomputed
    assert needed.owned.tolist() == mine
    inputs = [rows[: hop.num_inputs] for hop in needed.hops]
    for hop, hop_inputs in enumerate(inputs):
        assert set(hop_inputs) == set(mine) | {v for v in recomputed if levels[v] >= max(hop, first)}
    return [*inputs, mine]


def check_hops(needed: Dependencies, rows: list[list[int]], reference: Reference) -> None:
    """Every block has all in-edges of its targets; missing sources are fetched, but never for a recomputed row."""
    adj, part = reference.adj, reference.part
    for number, (hop, inputs, targets) in enumerate(zip(needed.hops, rows[:-1], rows[1:], strict=True)):
        missing = {u for v in targets for u in reference.sources[v]} - set(inputs)
        assert hop.fetched.tolist() == sorted(missing, key=lambda u: (part[u], u))
        assert hop.received == tuple(sum(part[u] == p for u in missing) for p in range(NUM_PARTS))
        assert hop.received[reference.rank] == 0
        assert hop.block.num_sources == len(inputs) + len(missing)
        sources = torch.tensor([*inputs, *hop.fetched.tolist()], dtype=torch.int64)
        edge_ids = [edge for v in targets for edge in range(int(adj.indptr[v]), int(adj.indptr[v + 1]))]
        assert hop.edge_ids.tolist() == edge_ids
        assert hop.block.degree.tolist() == [len(reference.sources[v]) for v in targets]
        assert sources[hop.block.indices].tolist() == adj.indices[edge_ids].tolist()
        assert hop.block.indices.dtype == adj.indices.dtype
        assert (hop.block.weight is None) == (adj.weight is None)
        if adj.weight is not None and hop.block.weight is not None:
            assert torch.equal(hop.block.weight, adj.weight[edge_ids])
        if number >= reference.caching.first:
            needed_again = {u for v in targets[needed.num_own :] for u in reference.sources[v]}
            assert needed_again <= set(inputs)


@MANY
@given(problem=problems())
def test_equals_the_definition(problem: tuple[Adjacency, Tensor, int, Caching]) -> None:
    adj, part, rank, caching = problem
    needed = make_dependencies(adj, part, rank, NUM_PARTS, caching)
    reference = Reference(adj=adj, part=part.tolist(), rank=rank, caching=caching)
    check_hops(needed, check_rows(needed, reference), reference)
    assert needed.cached_bytes == int(reference.num_bytes(reference.rows))
    assert needed.limited == reference.limited


@MANY
@given(problem=problems())
def test_no_and_all_rows_recomputed(problem: tuple[Adjacency, Tensor, int, Caching]) -> None:
    """With ratio 1, every layer has the rows of the next layer and all their sources (NeutronStar, algorithm 2)."""
    adj, part, rank, caching = problem
    caching = replace(caching, max_bytes=None)
    nothing = make_dependencies(adj, part, rank, NUM_PARTS, replace(caching, ratio=0.0))
    everything = make_dependencies(adj, part, rank, NUM_PARTS, replace(caching, ratio=1.0))
    reference = Reference(adj=adj, part=part.tolist(), rank=rank, caching=replace(caching, ratio=0.0))
    rows = set(reference.owned)
    assert nothing.rows.tolist() == everything.owned.tolist() == reference.owned
    assert (nothing.cached_bytes, nothing.limited, everything.limited) == (0, False, False)
    for level in reversed(range(caching.first, len(caching.costs))):
        rows |= {u for v in rows for u in reference.sources[v]}
        hop = everything.hops[level]
        assert set(everything.rows[: hop.num_inputs].tolist()) == rows
        assert len(hop.fetched) == 0
    assert set(everything.rows.tolist()) == rows


@MANY
@given(problem=problems())
def test_selection_equals_plain_python(problem: tuple[Adjacency, Tensor, int, Caching]) -> None:
    adj, part, rank, caching = problem
    reference = Reference(adj=adj, part=part.tolist(), rank=rank, caching=caching)
    levels, num_bytes, limited = selected(adj, part, rank, caching)
    assert levels == reference.last_layers
    assert num_bytes == reference.num_bytes(reference.rows)
    assert limited == reference.limited
    assert caching.max_bytes is None or num_bytes <= caching.max_bytes


def middle_problem(seed: int, ratio: float | None, max_bytes: int | None) -> tuple[Adjacency, Tensor, Caching]:
    """Return 150 vertices in three parts, with costs that favour some recomputations and have rounding errors."""
    random = torch.Generator().manual_seed(seed)
    part = torch.randint(0, 3, (150,), generator=random, dtype=torch.int32)
    costs = torch.rand(3, 5, generator=random, dtype=torch.float64) * torch.tensor([1, 0.5, 9.0, 8, 1]) + 0.1
    return load("rmat:150,500").in_edges, part, Caching(costs=costs, ratio=ratio, max_bytes=max_bytes)


@pytest.mark.parametrize("max_bytes", [None, 100])
@pytest.mark.parametrize("ratio", [None, 0.3])
@pytest.mark.parametrize("seed", [0, 1])
def test_selection_equals_plain_python_on_a_larger_graph(seed: int, ratio: float | None, max_bytes: int | None) -> None:
    adj, part, caching = middle_problem(seed, ratio, max_bytes)
    reference = Reference(adj=adj, part=part.tolist(), rank=1, caching=caching)
    levels, num_bytes, limited = selected(adj, part, 1, caching)
    assert levels == reference.last_layers
    assert num_bytes == pytest.approx(reference.num_bytes(reference.rows))
    assert limited == reference.limited == (max_bytes is not None)
    assert 0 < len({v for v, _ in reference.rows} & set(reference.remote_sources)) < len(reference.remote_sources)


@pytest.mark.parametrize("ratio", [None, 0.3])
def test_selection_does_not_depend_on_threads(ratio: float | None) -> None:
    graph, random = load("rmat:3k,20k"), torch.Generator().manual_seed(0)
    part = torch.randint(0, 4, (graph.num_vertices,), generator=random, dtype=torch.int32)
    costs = torch.tensor([[1, 0.3, 4, 8, 1], [1.1, 0.2, 7, 8, 1], [0.9, 0.1, 30, 8, 1]], dtype=torch.float64)
    caching = Caching(costs=costs, ratio=ratio, max_bytes=60_000)
    expected = selected(graph.in_edges, part, 2, caching, num_threads=1)
    assert len(set(expected[0])) == 4
    for num_threads in (2, 5):
        assert selected(graph.in_edges, part, 2, caching, num_threads=num_threads) == expected


def select_for_vertex_0(
    edges: list[tuple[int, int]], costs: list[list[float]], **options: float
) -> tuple[list[int], float, bool]:
    """Return the selection for the part {0}; all other vertices are in part 1."""
    source, target = torch.tensor(edges).T
    graph = Graph.from_edges(source, target)
    part = (torch.arange(graph.num_vertices) > 0).int()
    caching = Caching(costs=torch.tensor(costs, dtype=torch.float64), **options)  # type: ignore[arg-type]
    return selected(graph.in_edges, part, 0, caching)


FREE_START = [1.0, 0, 0, 10, 0]
"""Costs of layer 0: a row costs a second and fetching is free, so rows are recomputed only for layer 1."""


def test_shared_rows_are_paid_once() -> None:
    """Vertices 1 and 2 have the sources 3, 4, 5. The first to be recomputed costs 5 seconds, the second one 2."""
    edges = [(1, 0), (2, 0), *[(u, v) for u in (3, 4, 5) for v in (1, 2)]]
    both = [-1, 1, 1, 0, 0, 0]
    rows = 5 * 10 + 2 * (100 + 3 * 1)
    assert select_for_vertex_0(edges, [FREE_START, [1, 0, 5.5, 100, 1]]) == (both, rows, False)
    assert select_for_vertex_0(edges, [FREE_START, [1, 0, 5, 100, 1]]) == (
        [-1] * 6,
        0,
        False,
    )  # Fetching costs as much, so rows are fetched.


def test_rows_that_would_be_fetched_cost_the_difference() -> None:
    """In layer 0, vertices 1 and 2 cost 1.0 to compute and 0.75 to fetch, so layer 1 pays 0.25 for each."""
    edges = [(1, 0), (2, 0), (2, 1)]
    costs = [[1, 0, 0.75, 1, 0], [0, 0, 0.625, 1, 0]]
    levels, num_bytes, _ = select_for_vertex_0(edges, costs)
    assert (levels, num_bytes) == ([-1, 1, 1], 4)
    costs[1][FETCH_SECONDS] = 0.25  # as much as vertex 2 costs, and at most as much as vertex 1
    assert select_for_vertex_0(edges, costs) == ([-1, -1, -1], 0, False)


def test_costs_are_updated_during_the_selection() -> None:
    """Vertex 2 costs 4 at first, and 3 after vertex 1 has paid for their common source 3."""
    edges = [(1, 0), (2, 0), (3, 1), (3, 2), (4, 2)]
    assert select_for_vertex_0(edges, [FREE_START, [1, 0, 4, 10, 0]])[0] == [-1, 1, 1, 0, 0]
    assert select_for_vertex_0(edges, [FREE_START, [1, 0, 4.5, 10, 0]])[0] == [-1, 1, 1, 0, 0]


@pytest.mark.parametrize("ratio", [-1.0, 1.0])
def test_no_memory_caches_nothing(ratio: float) -> None:
    edges, costs = [(1, 0), (2, 0)], [[1.0, 0, 5, 10, 0]]
    options = {} if ratio < 0 else {"ratio": ratio}
    assert select_for_vertex_0(edges, costs, max_bytes=0, **options) == ([-1] * 3, 0, True)
    assert select_for_vertex_0(edges, costs, max_bytes=10, **options) == ([-1, 0, -1], 10, True)
    assert select_for_vertex_0(edges, costs, max_bytes=20, **options) == ([-1, 0, 0], 20, False)


def test_the_memory_limit_ends_the_selection() -> None:
    """Vertex 1 exceeds the memory limit in layer 0, so layer 1 is skipped, although its rows are small."""
    edges, costs = [(1, 0), (2, 0), (0, 1), (0, 1)], [[1.0, 0.25, 5, 10, 5], [1.0, 0, 5, 1, 0]]
    assert select_for_vertex_0(edges, costs, max_bytes=19) == ([-1, -1, 0], 10, True)
    costs[0][EDGE_SECONDS] = 0  # With equal costs, the lowest vertex is first.
    assert select_for_vertex_0(edges, costs, max_bytes=19) == ([-1] * 3, 0, True)

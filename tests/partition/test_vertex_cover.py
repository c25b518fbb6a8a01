"""The least halo against SciPy's matchings, and what its parts do together against the whole sum."""

from __future__ import annotations

import os
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.sparse import csr_matrix
from scipy.sparse.csgraph import maximum_bipartite_matching
from torch import Tensor

from tests.lib.graph_checks import CALM
from weft.data import Adjacency, Graph, load
from weft.kernels import spmm
from weft.partition import Caching, Cover, Hop, make_book, make_dependencies

DATA = Path(os.environ.get("WEFT_DATA", "shared/data"))


def hops_of(adj: Adjacency, part: Tensor, num_parts: int, ratio: float = 0.0) -> list[Hop]:
    """The last hop of each part, of a model of two; ratio: of the remote sources, those that are computed again."""
    caching = Caching(costs=torch.ones(2, 5, dtype=torch.float64), ratio=ratio)
    return [make_dependencies(adj, part, own, num_parts, caching).hops[-1] for own in range(num_parts)]


def matched(hop: Hop, first: int, end: int) -> int:
    """The size of a maximum matching of the hop's edges from the fetched sources `first` to `end`."""
    source, target = hop.block.edges()
    here = (source >= hop.num_inputs + first) & (source < hop.num_inputs + end)
    places = source[here] - hop.num_inputs - first, target[here]
    ones = np.ones(len(places[0]), dtype=np.int8)
    edges = csr_matrix((ones, [place.numpy() for place in places]), shape=(end - first, hop.block.num_targets))
    return int((maximum_bipartite_matching(edges, perm_type="column") >= 0).sum())


def check_cover(hop: Hop) -> None:
    """As many rows as a maximum matching has edges, from each part; every edge is in the block or in what is asked."""
    cover = hop.cover
    ends = [0, *torch.tensor(hop.received).cumsum(0).tolist()]
    assert cover.received == tuple(matched(hop, *span) for span in pairwise(ends))
    sizes = torch.bincount(cover.requested.edges()[1], minlength=cover.requested.num_targets)
    assert bool((sizes > 0).all())
    assert sum(cover.summed) == int(sizes[sizes > 1].sum())  # what is a row of its own sums no edge
    assert sum(cover.requested_edges) == cover.requested.num_edges
    if sum(cover.received) == sum(hop.received):
        assert not any(cover.summed)  # of equal covers the one of sources

    # every edge, with its weight: those of the block, where each row that comes stands for what it is asked to be
    x = torch.randn(hop.block.num_sources, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    weighted = hop.block.weight is not None
    inputs, fetched = x[: hop.num_inputs], x[hop.num_inputs :]
    brought = torch.cat([inputs, spmm(cover.requested, fetched, weighted=weighted)])
    expected = spmm(hop.block, x, weighted=weighted)
    torch.testing.assert_close(spmm(cover.block, brought, weighted=weighted), expected, rtol=1e-12, atol=1e-12)
    check_owners(hop)


def check_owners(hop: Hop) -> None:
    """What is asked of a part is over its vertices alone."""
    owner, rows = (
        torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
        for counts in (hop.received, hop.cover.received)
    )
    source, row = hop.cover.requested.edges()
    assert torch.equal(owner[source], rows[row])


@st.composite
def graphs(draw: st.DrawFn) -> tuple[Adjacency, Tensor, int, float]:
    """A graph, the part of every vertex of several, some perhaps empty, and how much is computed again."""
    random = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    num_vertices, num_edges = draw(st.sampled_from([40, 9, 3, 120])), draw(st.sampled_from([150, 0, 30, 400]))
    source, target = torch.randint(0, num_vertices, (2, num_edges), generator=random)
    if draw(st.booleans()):  # hubs
        source = torch.where(torch.rand(num_edges, generator=random) < 0.4, source % 3, source)
    weight = torch.rand(num_edges, generator=random, dtype=torch.float64) if draw(st.booleans()) else None
    graph = Graph.from_edges(source, target, num_vertices=num_vertices, weight=weight)
    num_parts = draw(st.sampled_from([3, 1, 5]))
    part = torch.randint(0, max(1, num_parts - 1), (num_vertices,), generator=random, dtype=torch.int32)
    return graph.in_edges.cast(torch.float64), part, num_parts, draw(st.sampled_from([0.0, 0.5]))


@CALM
@given(graphs())
def test_a_cover_has_as_many_rows_as_a_matching_and_covers_every_edge(
    problem: tuple[Adjacency, Tensor, int, float],
) -> None:
    for hop in hops_of(*problem):
        check_cover(hop)


@pytest.mark.parametrize("threads", [1, 2])
def test_covers_of_a_larger_graph_are_least_and_the_same(threads: int) -> None:
    graph = load("rmat:vertices=3k,edges=40k,seed=2")
    part = torch.arange(graph.num_vertices, dtype=torch.int32) % 5
    for hop in hops_of(graph.in_edges, part, 5):
        check_cover(hop)
        again = Cover.of(hop.block, hop.received, num_threads=threads)
        assert torch.equal(again.block.indices, hop.cover.block.indices)
        assert torch.equal(again.requested.indices, hop.cover.requested.indices)


@pytest.mark.parametrize("name", ["tolokers", "cora", "topo_soc-Slashdot0902"])
@pytest.mark.parametrize("method", ["metis", "range"])
def test_covers_of_real_graphs_are_least(name: str, method: str) -> None:
    if not (DATA / f"{name}.npz").exists():
        pytest.skip(f"$WEFT_DATA has no {name}")
    graph = load(name)
    for hop in hops_of(graph.in_edges, make_book(graph, 4, method=method).part, 4):
        check_cover(hop)


def test_a_star_sends_one_row_either_way() -> None:
    """A source of many targets sends its row; a target of many sources is sent its partial result."""
    ends = torch.arange(1, 9)
    out = Adjacency.from_edges(torch.zeros(8, dtype=torch.int64), ends, num_sources=9, num_targets=9)
    into = Adjacency.from_edges(ends, torch.zeros(8, dtype=torch.int64), num_sources=9, num_targets=9)
    part = torch.tensor([0] + [1] * 8, dtype=torch.int32)
    fetched, summed = hops_of(out, part, 2)[1].cover, hops_of(into, part, 2)[0].cover
    assert (fetched.received, fetched.summed) == ((1, 0), (0, 0))
    assert (summed.received, summed.summed) == ((0, 1), (0, 8))


def test_a_long_path_is_no_deep_recursion() -> None:
    """Sources 2 i reach targets 2 i and 2 i + 2 of the other part: one alternating path through all of them."""
    count = 200_000
    source = torch.cat([torch.arange(count), torch.arange(count - 1)]) + count
    target = torch.cat([torch.arange(count), torch.arange(1, count)])
    adj = Adjacency.from_edges(source, target, num_sources=2 * count, num_targets=2 * count)
    part = (torch.arange(2 * count) >= count).int()
    cover = hops_of(adj, part, 2)[0].cover
    assert cover.received == (0, count)
    assert not any(cover.summed)

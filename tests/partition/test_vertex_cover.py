"""Minimum vertex covers have the size of SciPy's maximum matchings, and give the complete sums."""

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
    """Return the last hop of each part in a model of two layers.

    Args:
        adj: The in-edges of all vertices.
        part: Part of each vertex.
        num_parts: Number of parts.
        ratio: Fraction of remote sources that are recomputed.
    """
    caching = Caching(costs=torch.ones(2, 5, dtype=torch.float64), ratio=ratio)
    return [make_dependencies(adj, part, rank, num_parts, caching).hops[-1] for rank in range(num_parts)]


def matched(hop: Hop, first: int, end: int) -> int:
    """Return the size of a maximum matching of the edges from fetched sources `first` to `end`."""
    source, target = hop.block.edges()
    in_range = (source >= hop.num_inputs + first) & (source < hop.num_inputs + end)
    ids = source[in_range] - hop.num_inputs - first, target[in_range]
    ones = np.ones(len(ids[0]), dtype=np.int8)
    edges = csr_matrix((ones, [column.numpy() for column in ids]), shape=(end - first, hop.block.num_targets))
    return int((maximum_bipartite_matching(edges, perm_type="column") >= 0).sum())


def check_cover(hop: Hop) -> None:
    """Check that a cover has the size of a maximum matching with each part, and that it covers every edge once."""
    cover = hop.cover
    bounds = [0, *torch.tensor(hop.received).cumsum(0).tolist()]
    assert cover.received == tuple(matched(hop, *span) for span in pairwise(bounds))
    sizes = torch.bincount(cover.requested.edges()[1], minlength=cover.requested.num_targets)
    assert bool((sizes > 0).all())
    assert sum(cover.summed) == int(sizes[sizes > 1].sum())  # A row of one source is not a sum.
    assert sum(cover.requested_edges) == cover.requested.num_edges
    if sum(cover.received) == sum(hop.received):
        assert not any(cover.summed)  # Among covers of equal size, that of sources is used.

    # Sums over the block, with the requested sums in place of the fetched rows, equal the sums over all edges.
    x = torch.randn(hop.block.num_sources, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    weighted = hop.block.weight is not None
    inputs, fetched = x[: hop.num_inputs], x[hop.num_inputs :]
    with_sums = torch.cat([inputs, spmm(cover.requested, fetched, weighted=weighted)])
    expected = spmm(hop.block, x, weighted=weighted)
    torch.testing.assert_close(spmm(cover.block, with_sums, weighted=weighted), expected, rtol=1e-12, atol=1e-12)
    check_owners(hop)


def check_owners(hop: Hop) -> None:
    """Check that every requested sum is over vertices of a single part."""
    owner, rows = (
        torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
        for counts in (hop.received, hop.cover.received)
    )
    source, row = hop.cover.requested.edges()
    assert torch.equal(owner[source], rows[row])


@st.composite
def graphs(draw: st.DrawFn) -> tuple[Adjacency, Tensor, int, float]:
    """Sample a graph, the part of every vertex, the number of parts, and the fraction of recomputed sources."""
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
def test_covers_are_minimal(
    problem: tuple[Adjacency, Tensor, int, float],
) -> None:
    for hop in hops_of(*problem):
        check_cover(hop)


@pytest.mark.parametrize("threads", [1, 2])
def test_covers_of_a_larger_graph_are_minimal_and_reproducible(threads: int) -> None:
    graph = load("rmat:vertices=3k,edges=40k,seed=2")
    part = torch.arange(graph.num_vertices, dtype=torch.int32) % 5
    for hop in hops_of(graph.in_edges, part, 5):
        check_cover(hop)
        again = Cover.of(hop.block, hop.received, num_threads=threads)
        assert torch.equal(again.block.indices, hop.cover.block.indices)
        assert torch.equal(again.requested.indices, hop.cover.requested.indices)


@pytest.mark.parametrize("name", ["tolokers", "cora", "topo_soc-Slashdot0902"])
@pytest.mark.parametrize("method", ["metis", "range"])
def test_covers_of_real_graphs_are_minimal(name: str, method: str) -> None:
    if not (DATA / f"{name}.npz").exists():
        pytest.skip(f"$WEFT_DATA has no {name}")
    graph = load(name)
    for hop in hops_of(graph.in_edges, make_book(graph, 4, method=method).part, 4):
        check_cover(hop)


def test_a_star_sends_one_row_in_either_direction() -> None:
    """A source of many targets sends its row; a target of many sources receives a partial sum."""
    leaves = torch.arange(1, 9)
    out = Adjacency.from_edges(torch.zeros(8, dtype=torch.int64), leaves, num_sources=9, num_targets=9)
    into = Adjacency.from_edges(leaves, torch.zeros(8, dtype=torch.int64), num_sources=9, num_targets=9)
    part = torch.tensor([0] + [1] * 8, dtype=torch.int32)
    fetched, summed = hops_of(out, part, 2)[1].cover, hops_of(into, part, 2)[0].cover
    assert (fetched.received, fetched.summed) == ((1, 0), (0, 0))
    assert (summed.received, summed.summed) == ((0, 1), (0, 8))


def test_a_long_alternating_path() -> None:
    """An alternating path through all vertices is handled without deep recursion."""
    count = 200_000
    source = torch.cat([torch.arange(count), torch.arange(count - 1)]) + count
    target = torch.cat([torch.arange(count), torch.arange(1, count)])
    adj = Adjacency.from_edges(source, target, num_sources=2 * count, num_targets=2 * count)
    part = (torch.arange(2 * count) >= count).int()
    cover = hops_of(adj, part, 2)[0].cover
    assert cover.received == (0, count)
    assert not any(cover.summed)

"""Adjacency and its transpose equal plain sorts, for every integer type and number of threads."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.data.adjacency import Adjacency, Transpose
from weft.runtime import native


@st.composite
def edge_lists(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor, int, int]:
    """Sample (source, target, num_sources, num_targets), square or not, from no edges to many duplicates."""
    num_sources, num_targets = draw(st.integers(1, 40)), draw(st.integers(1, 40))
    num_edges = draw(st.sampled_from([0, 1, 7, 60, 900]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    source = torch.randint(num_sources, (num_edges,), generator=generator)
    target = torch.randint(num_targets, (num_edges,), generator=generator)
    if draw(st.booleans()):
        target[: num_edges // 2] = 0  # a hub
    return source, target, num_sources, num_targets


@given(edge_lists(), st.sampled_from([torch.int32, torch.int64]), st.sampled_from([1, 2, 5]))
@settings(deadline=None, max_examples=150)
def test_rows_are_a_stable_sort(edges, dtype, num_threads):
    source, target, num_sources, num_targets = edges
    indptr, indices, edge_ids = native.coo_to_csr(
        target.to(dtype), source.to(dtype), num_targets, num_sources, num_threads
    )
    order = torch.argsort(target * num_sources + source, stable=True)
    assert torch.equal(edge_ids.long(), order)
    assert torch.equal(indices.long(), source[order])
    counts = torch.bincount(target, minlength=num_targets)
    assert torch.equal(indptr, torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)]))
    assert indices.dtype == edge_ids.dtype == torch.int32


@given(edge_lists(), st.sampled_from([torch.int32, torch.int64]), st.sampled_from([1, 2, 5]))
@settings(deadline=None, max_examples=150)
def test_transpose_is_a_stable_sort(edges, dtype, num_threads):
    source, target, num_sources, num_targets = edges
    adj = Adjacency.from_edges(source, target, num_sources=num_sources, num_targets=num_targets)
    indptr, indices, edge_ids = native.transpose(adj.indptr, adj.indices.to(dtype), num_sources, num_threads)
    stored_source, stored_target = adj.edges()
    order = torch.argsort(stored_source, stable=True)
    assert torch.equal(edge_ids.long(), order)
    assert torch.equal(indices.long(), stored_target[order])
    assert indices.dtype == dtype
    assert torch.equal(indptr[1:] - indptr[:-1], torch.bincount(source, minlength=num_sources))


def test_many_rows_few_edges():
    """With more rows than edges, the counters of all threads must not need more memory than the result."""
    indptr, indices, edge_ids = native.coo_to_csr(torch.tensor([99_999, 5]), torch.tensor([1, 0]), 100_000, 2, 2)
    assert indptr[5:7].tolist() == [0, 1]
    assert indptr[-2:].tolist() == [1, 2]
    assert indices.tolist() == [0, 1]
    assert edge_ids.tolist() == [1, 0]


def test_int64_ids_of_large_graphs():
    indptr, indices, edge_ids = native.coo_to_csr(torch.tensor([0, 0, 0]), torch.tensor([2**40, 7, 7]), 1, 2**40 + 1)
    assert indptr.tolist() == [0, 3]
    assert indices.tolist() == [7, 7, 2**40]
    assert edge_ids.tolist() == [1, 2, 0]
    assert indices.dtype == torch.int64


def small(weight: torch.Tensor | None = None) -> Adjacency:
    source, target = torch.tensor([2, 0, 1, 3, 0]), torch.tensor([0, 1, 1, 0, 1])
    return Adjacency.from_edges(source, target, num_sources=4, num_targets=2, weight=weight)


def test_weights_follow_their_edges():
    adj = small(torch.tensor([0.2, 0.01, 1.1, 3.0, 0.02]))
    assert adj.weight.tolist() == pytest.approx([0.2, 3.0, 0.01, 0.02, 1.1])
    assert adj.transpose.weight.tolist() == pytest.approx([0.01, 0.02, 1.1, 0.2, 3.0])


def test_properties():
    adj = small()
    assert (adj.num_targets, adj.num_sources, adj.num_edges) == (2, 4, 5)
    assert adj.degree.tolist() == [2, 3]
    assert adj.has_loop.tolist() == [False, True]
    assert [column.tolist() for column in adj.edges()] == [[2, 3, 0, 0, 1], [0, 0, 1, 1, 1]]
    assert adj.to("cpu") is adj
    assert adj.cast(torch.float64) is adj


def test_transpose_is_cached_or_passed():
    adj = small(torch.ones(5))
    transpose = adj.transpose
    assert adj.transpose is transpose
    passed = Transpose(indptr=transpose.indptr, indices=transpose.indices, edge_ids=transpose.edge_ids)
    assert Adjacency(indptr=adj.indptr, indices=adj.indices, num_sources=4, known_transpose=passed).transpose is passed


def test_new_weights_share_the_topology():
    adj = small(torch.ones(5))
    transpose = adj.transpose
    double = adj.cast(torch.float64)
    assert double.indices is adj.indices
    assert double.transpose.indices is transpose.indices
    assert double.weight.dtype == double.transpose.weight.dtype == torch.float64
    weight = torch.arange(5.0)
    assert torch.equal(adj.with_weight(weight).transpose.weight, weight[transpose.edge_ids.long()])
    assert adj.with_weight(None).transpose.weight is None


@pytest.mark.parametrize(("source", "target"), [(4, 0), (-1, 0), (0, 2), (0, -1)])
def test_ids_out_of_range_are_refused(source, target):
    with pytest.raises(ValueError, match="outside"):
        Adjacency.from_edges(torch.tensor([source]), torch.tensor([target]), num_sources=4, num_targets=2)


def test_mismatched_inputs_are_refused():
    ids, more_ids = torch.zeros(1, dtype=torch.int64), torch.zeros(2, dtype=torch.int64)
    with pytest.raises(ValueError, match="one id per edge"):
        Adjacency.from_edges(ids, more_ids, num_sources=1, num_targets=1)
    with pytest.raises(ValueError, match="both be int32"):
        Adjacency.from_edges(ids, ids.int(), num_sources=1, num_targets=1)
    with pytest.raises(ValueError, match="one number per edge"):
        Adjacency.from_edges(ids, ids, num_sources=1, num_targets=1, weight=torch.ones(3))
    with pytest.raises(ValueError, match="one number per edge"):
        small().with_weight(torch.ones(4))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_moves_between_devices():
    adj = small(torch.ones(5)).to("cuda")
    assert adj.transpose.indices.is_cuda
    assert adj.has_loop.tolist() == [False, True]
    assert adj.to("cpu").transpose.edge_ids.tolist() == small().transpose.edge_ids.tolist()


@pytest.mark.parametrize(("num_sources", "share"), [(300, 300 / (1 << 14)), (1 << 14, 0.632), (10_000_000, 1.0)])
def test_fresh_share_of_random_edges(num_sources: int, share: float) -> None:
    source = torch.randint(num_sources, (400_000,), generator=torch.Generator().manual_seed(0))
    edges = Adjacency.from_edges(source, torch.arange(400_000) // 10, num_sources=num_sources, num_targets=40_000)
    assert edges.fresh_share == pytest.approx(share, rel=0.02)


def test_fresh_share_of_near_edges() -> None:
    """One of ten edges from nearby vertices reads a new source; also with a single source, and without edges."""
    target = torch.arange(400_000) // 10
    near = (target + torch.arange(400_000) % 10).clamp(max=39_999)
    graphs = [Adjacency.from_edges(ids, target, num_sources=40_000, num_targets=40_000) for ids in (near, near * 0)]
    assert graphs[0].fresh_share == pytest.approx(0.1, rel=0.02)
    assert graphs[1].fresh_share == pytest.approx(1 / (1 << 14))
    nothing = torch.empty(0, dtype=torch.int64)
    assert Adjacency.from_edges(nothing, nothing, num_sources=5, num_targets=5).fresh_share == 1


def test_fresh_share_of_more_edges_than_float32_counts() -> None:
    """The last run ends with the last edge, also where float32 would round its beginning up."""
    num_edges = (1 << 24) + 3 + (1 << 14)
    sources = torch.zeros(1, dtype=torch.int32).expand(num_edges)
    edges = Adjacency(indptr=torch.tensor([0, num_edges]), indices=sources, num_sources=1)
    assert edges.fresh_share == pytest.approx(1 / (1 << 14))

"""Partial aggregates over disjoint sets of edges combine to the aggregate over all edges, with equal gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from weft.data import Adjacency
from weft.nn import (
    Aggregate,
    Attend,
    AttendEdges,
    ByRelation,
    EdgeSubset,
    GraphView,
    LaplacianSum,
    Max,
    Rows,
    SubTopology,
    Sum,
    Topology,
    Total,
)
from weft.nn.aggregate import attention as attention_module
from weft.nn.aggregate.attention import EdgeSoftmax, MaskKey
from weft.nn.aggregate.partial import Partial
from weft.utils.errors import InputError

HEADS, WIDTH, LOGITS, FEATURES, RELATIONS = 2, 6, 4, 3, 4
CUT_HEADS = (0, 2, 6)
ATTENTION = {"bounds": CUT_HEADS, "slope": 0.2}
BY_EDGES = {**ATTENTION, "logit_bounds": (0, 1, LOGITS)}
OPS: list[Aggregate] = [
    Sum(),
    Sum(weighted=True),
    Sum(norm="mean"),
    Sum(norm="gcn", weighted=True),
    Sum(norm="symmetric", weighted=True),
    Max(),
    LaplacianSum(weighted=True),
    Attend(**ATTENTION),
    AttendEdges(**BY_EDGES),
    AttendEdges(**BY_EDGES, has_edge_map=True),
    AttendEdges(bounds=CUT_HEADS, slope=0.2, logit_bounds=CUT_HEADS, separate_left=False),
    ByRelation(),
]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda view, x: view.propagate(x, reduce="avg"), "unknown reduce 'avg': choose one of max, mean, sum"),
        (lambda view, x: view.propagate(x, reduce="Mean"), "unknown reduce 'Mean': did you mean 'mean'"),
        (lambda view, x: view.propagate(x, reduce="min"), "unknown reduce 'min'"),
        (lambda view, x: view.propagate(x, norm="GCN"), "unknown norm 'GCN'"),
        (lambda view, x: view.propagate(x, norm="mean"), "unknown norm 'mean'"),
        (lambda view, x: view.propagate(x, reduce="mean", norm="gcn"), "norm='gcn' has no effect on reduce='mean'"),
        (lambda view, x: view.propagate(x, reduce="max", norm="gcn"), "norm='gcn' has no effect on reduce='max'"),
        (lambda view, x: view.propagate(x, reduce="max", weighted=True), "weighted=True has no effect on reduce='max'"),
        (lambda view, x: view.relate(x, torch.ones(RELATIONS, 1, 6, 6), reduce="max"), "unknown reduce 'max'"),
    ],
)
def test_unknown_reductions_and_norms_are_refused(call: Callable[[GraphView, Tensor], Tensor], message: str) -> None:
    topology, x = topology_of(0, 7, 20), torch.ones(7, WIDTH, dtype=torch.float64)
    with pytest.raises(InputError, match=message):
        call(GraphView(topology), x)


def test_aggregates_refuse_unknown_reductions_and_norms() -> None:
    with pytest.raises(InputError, match="unknown reduce 'median'"):
        ByRelation.reducing("median")
    with pytest.raises(InputError, match="unknown norm 'both'"):
        Sum(norm="both")  # type: ignore[arg-type]


def topology_of(seed: int, num_vertices: int, num_edges: int) -> Topology:
    """Return random edges with weights, features and relations, with duplicates, loops and isolated vertices."""
    random = torch.Generator().manual_seed(seed)
    source, target = (torch.randint(num_vertices, (num_edges,), generator=random) for _ in range(2))
    weight = torch.rand(num_edges, generator=random, dtype=torch.float64) + 0.5
    sizes = {"num_sources": num_vertices, "num_targets": num_vertices}
    edges = Adjacency.from_edges(source, target, **sizes, weight=weight)
    features = torch.randn(num_edges, FEATURES, generator=random, dtype=torch.float64)
    types = torch.randint(RELATIONS, (num_edges,), generator=random)
    return Topology(edges, None, features, torch.float64, types, RELATIONS)


def rows_of(op: Aggregate, num_vertices: int, seed: int) -> Rows:
    """Return random inputs of an aggregate. Inputs of a maximum contain ties."""
    random = torch.Generator().manual_seed(seed)

    def sample(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random, dtype=torch.float64)

    if isinstance(op, Max):
        rows = {"x": torch.randint(3, (num_vertices, WIDTH), generator=random).double()}
    else:
        rows = {name: sample(num_vertices, WIDTH) for name in ("x", "h")}
        width = op.logit_width
        rows |= {name: sample(num_vertices, width) for name in ("logit_src", "logit_dst", "left", "right")}
        rows |= {"attention": sample(width), "edge_map": sample(FEATURES, width)}
    return {name: rows[name].requires_grad_() for name in (*op.source, *op.target, *op.shared)}


def split(topology: Topology, count: int, seed: int) -> list[EdgeSubset]:
    """Assign edges and loops at random to `count` parts. The last of several parts stays empty."""
    random, adjacency = torch.Generator().manual_seed(seed), topology.adjacency
    used = max(count - 1, 1)
    part = torch.randint(used, (adjacency.num_edges,), generator=random)
    loops = torch.randint(used, (adjacency.num_targets,), generator=random)
    return [EdgeSubset(topology, (part == number).nonzero().view(-1), loops == number) for number in range(count)]


def combined(op: Aggregate, topology: Topology, rows: Rows, count: int, seed: int) -> Tensor:
    return op.combine([op.partial(part, rows) for part in split(topology, count, seed)])


def with_gradients(y: Tensor, rows: Rows) -> list[Tensor]:
    """Return a result and the gradients of its inputs."""
    random = torch.Generator().manual_seed(0)
    grad = torch.randn(y.shape, generator=random, dtype=y.dtype)
    return [y, *torch.autograd.grad(y, list(rows.values()), grad)]


def check(op: Aggregate, num_vertices: int, num_edges: int, count: int, seed: int) -> None:
    topology, rows = topology_of(seed, num_vertices, num_edges), rows_of(op, num_vertices, seed)
    whole = with_gradients(op.apply(topology, rows), rows)
    parts = with_gradients(combined(op, topology, rows, count, seed), rows)
    for name, first, second in zip(("result", *rows), whole, parts, strict=True):
        torch.testing.assert_close(second, first, rtol=1e-12, atol=1e-12, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("op", OPS, ids=str)
@given(
    num_vertices=st.integers(1, 12),
    num_edges=st.sampled_from([0, 1, 7, 60]),
    count=st.integers(1, 4),
    seed=st.integers(0, 1000),
)
@settings(max_examples=25, deadline=None)
def test_parts_combine_to_the_whole(op: Aggregate, num_vertices: int, num_edges: int, count: int, seed: int) -> None:
    check(op, num_vertices, num_edges, count, seed)


@pytest.mark.parametrize("weighted", [False, True])
def test_a_laplacian_has_its_gradient_also_without_forward_edges(weighted: bool) -> None:
    """In a backward pass over chunks on the host, a block has only the transpose of its edges."""
    op, whole = LaplacianSum(weighted=weighted), topology_of(0, 9, 40)
    rows, edges = rows_of(op, 9, 0), whole.adjacency
    grad = torch.randn(9, WIDTH, dtype=torch.float64)
    (expected,) = torch.autograd.grad(op.apply(whole, rows), rows["x"], grad)
    only_transpose = replace(edges, indices=edges.indices[:0], weight=None, known_transpose=edges.transpose)
    for adjacency in (edges, only_transpose):
        block = SubTopology(adjacency, torch.arange(9), torch.arange(9), whole)
        torch.testing.assert_close(op.transposed(block, grad), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("op", [number for number in OPS if isinstance(number, EdgeSoftmax)], ids=str)
@pytest.mark.parametrize("count", [1, 3])
def test_parts_combine_under_dropout(op: EdgeSoftmax, count: int) -> None:
    """Partial aggregates with dropout combine if all edges between the same two vertices are in the same part."""
    topology = topology_of(2, 12, 60)
    op, rows, source = replace(op, dropout=MaskKey(0.5, 9)), rows_of(op, 12, 2), topology.adjacency.edges()[0]
    loops = torch.arange(12) % count
    parts = [
        EdgeSubset(topology, (source % count == number).nonzero().view(-1), loops == number) for number in range(count)
    ]
    whole = with_gradients(op.apply(topology, rows), rows)
    for first, second in zip(
        whole, with_gradients(op.combine([op.partial(p, rows) for p in parts]), rows), strict=True
    ):
        torch.testing.assert_close(second, first, rtol=1e-12, atol=1e-12)


def test_large_logits_do_not_overflow() -> None:
    op = Attend(**ATTENTION)
    topology, rows = topology_of(0, 9, 60), rows_of(op, 9, 0)
    rows["logit_src"] = (rows["logit_src"].detach() * 2000).requires_grad_()
    whole, parts = op.apply(topology, rows), combined(op, topology, rows, 3, 0)
    torch.testing.assert_close(parts, whole, rtol=1e-12, atol=1e-12)


def without_rescaling(partials: Sequence[Partial], bounds: Sequence[int]) -> Tensor:
    """Average the partial results with equal weights (a wrong merge of softmaxes)."""
    del bounds
    return torch.stack([partial.values for partial in partials]).mean(0)


def by_largest_logit(topology: Topology, logits: Tensor) -> Tensor:
    """Return the largest logit in place of the softmax denominator (a wrong merge of softmaxes)."""
    largest = logits.new_full((topology.adjacency.num_targets, logits.shape[1]), -torch.inf)
    rows = topology.adjacency.edges()[1][:, None].expand(-1, logits.shape[1])
    return largest.scatter_reduce(0, rows, logits[: len(rows)], "amax")


@pytest.mark.parametrize(("name", "wrong"), [("merge_softmaxes", without_rescaling), ("log_sum_exp", by_largest_logit)])
def test_a_wrong_merge_is_detected(monkeypatch: pytest.MonkeyPatch, name: str, wrong: Callable[..., Any]) -> None:
    monkeypatch.setattr(attention_module, name, wrong)
    with pytest.raises(AssertionError, match="result"):
        check(Attend(**ATTENTION), 9, 60, 3, 0)


def test_the_first_of_equal_maxima_gets_the_gradient() -> None:
    edges = Adjacency.from_edges(torch.arange(4), torch.zeros(4).long(), num_sources=4, num_targets=1)
    topology, x = Topology(edges), torch.ones(4, 1, dtype=torch.float64, requires_grad=True)
    parts = [EdgeSubset(topology, torch.tensor(ids), torch.ones(1).bool()) for ids in ([2, 3], [1], [0])]
    Max().combine([Max().partial(part, {"x": x}) for part in parts]).sum().backward()
    assert x.grad is not None
    assert x.grad.view(-1).tolist() == [1, 0, 0, 0]


@pytest.mark.parametrize("op", [op for op in OPS if op.linear], ids=str)
def test_the_transpose_is_the_gradient(op: Aggregate) -> None:
    topology, rows = topology_of(1, 9, 60), rows_of(op, 9, 1)
    y = op.apply(topology, rows)
    grad = torch.ones_like(y)
    torch.testing.assert_close(op.transposed(topology, grad), torch.autograd.grad(y, rows["x"], grad)[0])


@pytest.mark.parametrize("op", [tensor for tensor in OPS if tensor.can_save and not tensor.linear], ids=str)
def test_gradients_from_saved_tensors(op: Aggregate) -> None:
    topology, rows = topology_of(1, 9, 60), rows_of(op, 9, 1)
    result, *expected = with_gradients(op.apply(topology, rows), rows)
    y, saved = op.apply_saving(topology, rows)
    torch.testing.assert_close(y, result, rtol=0, atol=0)
    grad = torch.randn(y.shape, generator=torch.Generator().manual_seed(0), dtype=y.dtype)
    plain = {name: tensor.detach() for name, tensor in rows.items()}
    gradients = op.gradients(topology, plain, y, saved, grad, {})
    for name, gradient in zip(rows, expected, strict=True):
        torch.testing.assert_close(gradients[name], gradient)


@pytest.mark.parametrize("op", [tensor for tensor in OPS if tensor.can_save], ids=str)
def test_gradients_of_sources_are_added(op: Aggregate) -> None:
    """Gradients of sources are added to the tensors passed by name; the other gradients are returned."""
    topology, rows = topology_of(1, 9, 60), rows_of(op, 9, 1)
    _, *expected = with_gradients(op.apply(topology, rows), rows)
    y, saved = op.apply_saving(topology, rows)
    grad = torch.randn(y.shape, generator=torch.Generator().manual_seed(0), dtype=y.dtype)
    plain = {name: tensor.detach() for name, tensor in rows.items()}
    into = {name: torch.ones_like(plain[name]) for name in op.source}
    gradients = op.gradients(topology, plain, y, saved, grad, into)
    assert not {*gradients} & {*into}
    for name, gradient in zip(rows, expected, strict=True):
        torch.testing.assert_close(into[name] - 1 if name in into else gradients[name], gradient)


@pytest.mark.parametrize("op", OPS, ids=str)
def test_equal_aggregates_are_interchangeable(op: Aggregate) -> None:
    """A copy of an aggregate is equal, has the same hash, and gives the same result in a view."""
    assert replace(op) == op
    assert hash(replace(op)) == hash(op)
    topology, rows = topology_of(2, 9, 60), rows_of(op, 9, 2)
    torch.testing.assert_close(GraphView(topology).aggregate(op, rows), op.apply(topology, rows), rtol=0, atol=0)


def test_a_total_sums_all_rows() -> None:
    x = torch.arange(6.0).view(3, 2)
    assert GraphView(topology_of(0, 3, 0)).aggregate(Total(), {"x": x}).tolist() == [6, 9]


def test_gcn_refuses_negative_sums_of_weights() -> None:
    edges = Adjacency.from_dense(torch.tensor([[0.0, 2.0], [-3.0, 1.0]]))
    with pytest.raises(InputError, match=r"weights into vertex 1 sum to -2, .* give weights of at least 0"):
        Topology(edges).scale("gcn", True, torch.float64)
    assert Topology(edges).scale("gcn", False, torch.float64).source is not None

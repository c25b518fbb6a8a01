"""Properties of kernels: gradients equal finite differences, bits are reproducible, slices add up to the whole."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.lib.kernel_cases import (
    DTYPES,
    Case,
    attend_case,
    attend_edges_case,
    dot_case,
    drawn_graphs,
    graph,
    max_case,
    pair_case,
    randn,
    rounded,
    spmm_case,
)
from weft.data.adjacency import Adjacency
from weft.kernels import (
    Attention,
    AttentionInputs,
    Scale,
    SourceGrads,
    attend,
    attend_and_save,
    attend_backward,
    attend_edges,
    ops,
    pair_logits,
    reference,
    spmm,
    spmm_max,
    spmm_transposed,
    torch_sparse,
)


def cases(adj: Adjacency, width: int) -> list[Case]:
    return [
        spmm_case(adj, width, source=False, target=False, loop=False, weighted=False),
        spmm_case(adj, width, source=True, target=True, loop=True, weighted=True),
        max_case(adj, width),
        attend_case(adj, (0, width // 3, width), loop=True, steps=2),
        *edge_cases(adj, width),
    ]


def edge_cases(adj: Adjacency, width: int) -> list[Case]:
    """Return cases of attention with logits for edges."""
    bounds = (0, width // 3, width)
    return [
        pair_case(adj, bounds, loop=True),
        pair_case(adj, bounds, features=3),
        dot_case(adj, bounds),
        attend_edges_case(adj, bounds, loop=True, steps=2),
    ]


def assert_same_bits(first: list[torch.Tensor], second: list[torch.Tensor]) -> None:
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b)


def test_gradients_equal_finite_differences():
    adj = graph(6, 6, 14)
    for case in cases(adj, 5):
        inputs = [(tensor + 0.1 * randn(*tensor.shape, seed=8)).requires_grad_() for tensor in case.inputs]
        assert torch.autograd.gradcheck(lambda *args, case=case: case.call(ops, adj, list(args)), inputs)


@given(drawn_graphs(), st.integers(1, 40), st.sampled_from(DTYPES), st.integers(0, 2**31))
@settings(deadline=None, max_examples=40)
def test_edge_order_does_not_matter(adj, width, dtype, seed):
    """Shuffled edges give the same bits. Duplicate edges have equal weights, because they stay in input order."""
    source, target = adj.edges()
    weight = (source * 7 + target).double().cos()
    shuffled = torch.randperm(adj.num_edges, generator=torch.Generator().manual_seed(seed))
    original, other = (
        Adjacency.from_edges(
            source[order],
            target[order],
            num_sources=adj.num_sources,
            num_targets=adj.num_targets,
            weight=weight[order],
        )
        for order in (torch.arange(adj.num_edges), shuffled)
    )
    for case in cases(adj, width):
        assert_same_bits(case.run(ops, original, dtype), case.run(ops, other, dtype))


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("hubs", [[0], [19], [4, 5], [0, 9, 19]])
@pytest.mark.parametrize("width", [1, 7, 33, 300])
def test_hubs_whose_columns_are_split_over_threads(width, hubs):
    """Rows with more entries than many blocks equal the reference, with the same bits on one and two threads."""
    target = torch.cat([torch.arange(20).repeat(8), *(torch.full((10_000,), hub) for hub in hubs)])
    source = torch.randint(200, (len(target),), generator=torch.Generator().manual_seed(1))
    weight = torch.rand(len(target), generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    adj = Adjacency.from_edges(source, target, num_sources=200, num_targets=20, weight=weight)
    for case in (spmm_case(adj, width, source=True, target=True, loop=False, weighted=True), max_case(adj, width)):
        results = case.run(ops, adj, torch.float64)
        for ours, expected in zip(results, case.run(reference, adj, torch.float64), strict=True):
            torch.testing.assert_close(ours, expected, rtol=1e-11, atol=1e-10)
        torch.set_num_threads(1)
        assert_same_bits(results, case.run(ops, adj, torch.float64))
        torch.set_num_threads(2)


@pytest.mark.usefixtures("two_threads", "sum_backend")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_threads_do_not_matter(dtype):
    adj = graph(900, 900, 30_000, hub=True)
    for case in cases(adj, 37):
        parallel = case.run(ops, adj, dtype)
        torch.set_num_threads(1)
        serial = case.run(ops, adj, dtype)
        torch.set_num_threads(2)
        assert_same_bits(serial, parallel)
        assert_same_bits(case.run(ops, adj, dtype), parallel)


@pytest.mark.usefixtures("sum_backend")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_columns_are_independent(dtype):
    """A slice of the columns equals the slice of the whole result, which tensor parallelism relies on."""
    adj = graph(50, 50, 700)
    x = randn(50, 61, seed=1, dtype=dtype)
    for op in (spmm, spmm_max):
        whole = op(adj, x)
        for begin, end in ((0, 13), (13, 14), (14, 61)):
            torch.testing.assert_close(op(adj, x[:, begin:end]), whole[:, begin:end], rtol=0, atol=1e-6)


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("steps", [1, 3])
def test_slices_of_heads_add_up(steps):
    """Bounds may split heads: results are slices of the whole, and gradients of logits sum to those of the whole."""
    adj = graph(40, 40, 500)
    h, logit_src, logit_dst, grad = (
        randn(40, 23, seed=1),
        randn(40, 3, seed=2),
        randn(40, 3, seed=3),
        randn(40, 23, seed=4),
    )
    loop = ~adj.has_loop

    def run(begin: int, end: int) -> list[torch.Tensor]:
        inputs = [
            h[:, begin:end].clone().requires_grad_(),
            logit_src.clone().requires_grad_(),
            logit_dst.clone().requires_grad_(),
        ]
        bounds = [min(max(bound, begin), end) - begin for bound in (0, 10, 17, 23)]
        y = attend(adj, *inputs, bounds=bounds, loop=loop, steps=steps)
        return [y.detach(), *torch.autograd.grad(y, inputs, grad[:, begin:end])]

    whole = run(0, 23)
    slices = [run(begin, end) for begin, end in ((0, 4), (4, 4), (4, 12), (12, 23))]
    torch.testing.assert_close(torch.cat([part[0] for part in slices], dim=1), whole[0], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(torch.cat([part[1] for part in slices], dim=1), whole[1], rtol=1e-12, atol=1e-12)
    for logits in (2, 3):
        torch.testing.assert_close(sum(part[logits] for part in slices), whole[logits], rtol=1e-10, atol=1e-12)


@pytest.mark.usefixtures("sum_backend")
@pytest.mark.parametrize("width", [1, 5, 16, 23, 200])
def test_gradients_of_sums_are_added(width: int) -> None:
    """Gradients are added once to every column of existing rows, also of sources without edges."""
    adj = graph(40, 30, 60).with_weight(randn(60, seed=3).abs())
    scale = Scale(target=randn(30, seed=5), source=randn(40, seed=6), loop=randn(30, seed=7))
    grad, before = randn(30, width, seed=1), randn(40, width, seed=2)
    gradient = spmm_transposed(adj, grad, scale=scale, weighted=True)
    into = before.clone()
    assert spmm_transposed(adj, grad, scale=scale, weighted=True, into=into) is into
    torch.testing.assert_close(into, before + gradient, rtol=1e-12, atol=1e-12)


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("bounds", [(0, 1), (0, 5, 5, 16), (0, 200), tuple(range(0, 28, 3))], ids=str)
def test_gradients_of_attention_are_added(bounds: tuple[int, ...]) -> None:
    """Gradients are added once to every column of existing rows, also of sources without edges and of many heads."""
    adj, width, heads = graph(40, 30, 60), bounds[-1], len(bounds) - 1
    over = Attention(adj=adj, bounds=bounds, loop=~adj.has_loop, slope=0.2, steps=1)
    h, logit_src, logit_dst = randn(40, width, seed=1), randn(40, heads, seed=2), randn(30, heads, seed=3)
    y, saved = attend_and_save(over, h, logit_src, logit_dst)
    inputs, grad = AttentionInputs(h, logit_src, logit_dst, y), randn(30, width, seed=4)
    before = SourceGrads(randn(40, width, seed=5), randn(40, heads, seed=6))
    into = SourceGrads(*(rows.clone() for rows in before))  # type: ignore[union-attr]
    expected_h, expected_logits = attend_backward(over, inputs, saved, grad)
    found_h, logit_grads = attend_backward(over, inputs, saved, grad, into)
    assert (found_h, logit_grads.source) == into
    torch.testing.assert_close(found_h, before.h + expected_h, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(logit_grads.source, before.logits + expected_logits.source, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(logit_grads.target, expected_logits.target, rtol=0, atol=0)


@pytest.mark.usefixtures("backend")
def test_slices_of_pairs_add_up():
    """Logits of slices of the columns sum to those of the whole; gradients are slices of those of the whole."""
    adj = graph(40, 40, 500)
    left, right, grad = randn(40, 23, seed=1), randn(40, 23, seed=2), randn(540, 3, seed=4)
    attention = randn(23, seed=3)

    def run(begin: int, end: int) -> list[torch.Tensor]:
        inputs = [x[..., begin:end].clone().requires_grad_() for x in (left, right, attention)]
        bounds = [min(max(bound, begin), end) - begin for bound in (0, 10, 17, 23)]
        logits = pair_logits(adj, *inputs, bounds=bounds, loop=~adj.has_loop)
        return [logits.detach(), *torch.autograd.grad(logits, inputs, grad)]

    whole = run(0, 23)
    slices = [run(begin, end) for begin, end in ((0, 4), (4, 4), (4, 12), (12, 23))]
    torch.testing.assert_close(sum(part[0] for part in slices), whole[0], rtol=1e-12, atol=1e-12)
    for number in (1, 2, 3):
        parts = torch.cat([part[number] for part in slices], dim=-1)
        torch.testing.assert_close(parts, whole[number], rtol=1e-12, atol=1e-12)


@pytest.mark.usefixtures("backend")
def test_gradients_only_where_needed():
    adj = graph(20, 20, 100)
    case = attend_case(adj, (0, 4, 9), loop=True, steps=2)
    _, *whole = case.run(reference, adj, torch.float64)
    for wanted in range(3):
        inputs = [tensor.clone().requires_grad_(index == wanted) for index, tensor in enumerate(case.inputs)]
        y = case.call(ops, adj, inputs)
        (grad,) = torch.autograd.grad(y, inputs[wanted], randn(*y.shape, seed=99))
        torch.testing.assert_close(grad, whole[wanted], rtol=1e-10, atol=1e-12)


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_attention_survives_extreme_logits(dtype):
    """Large positive and negative logits are handled; -inf removes an edge, and a row without edges is zero."""
    adj = graph(30, 30, 300)
    logit_src = rounded(randn(30, 2, seed=1)).mul(3000).to(dtype)
    logit_src[::4] = -torch.inf
    logit_dst = rounded(randn(30, 2, seed=2)).mul(3000).to(dtype)
    logit_dst[5] = -torch.inf
    h = rounded(randn(30, 6, seed=3)).to(dtype)
    y = attend(adj, h, logit_src, logit_dst, bounds=[0, 3, 6])
    assert y.isfinite().all()
    assert (y[5] == 0).all()
    double = [tensor.double() for tensor in (h, logit_src, logit_dst)]
    torch.testing.assert_close(y.double(), reference.attend(adj, *double, bounds=[0, 3, 6]), rtol=1e-2, atol=1e-2)

    logits = rounded(randn(300, 2, seed=4)).mul(3000)
    logits[::4] = logits[adj.edges()[1] == 5] = -torch.inf
    y = attend_edges(adj, h, logits.to(dtype), bounds=[0, 3, 6])
    assert (y[5] == 0).all()
    wanted = reference.attend_edges(adj, h.double(), logits, bounds=[0, 3, 6])
    torch.testing.assert_close(y.double(), wanted, rtol=1e-2, atol=1e-2)


@pytest.mark.usefixtures("backend")
def test_nan_wins_a_maximum():
    adj = graph(20, 20, 200)
    x = randn(20, 5, seed=1)
    x[3, 2] = torch.nan
    torch.testing.assert_close(spmm_max(adj, x), reference.spmm_max(adj, x), equal_nan=True, rtol=0, atol=0)


@pytest.mark.usefixtures("sum_backend")
def test_rows_of_any_strides():
    adj = graph(20, 20, 90)
    x = randn(7, 20, seed=1).t()
    torch.testing.assert_close(spmm(adj, x), reference.spmm(adj, x))
    leaf = randn(20, 7, seed=2).requires_grad_()
    spmm(adj, leaf).sum().backward()  # The gradient is expanded: its strides are zero.
    assert leaf.grad.isfinite().all()


def test_reference_is_the_dense_formula():
    adj = graph(9, 9, 30)
    source, target = adj.edges()
    x, weight = randn(9, 4, seed=1), adj.weight
    dense = torch.zeros(9, 9, dtype=torch.float64).index_put((target, source), weight, accumulate=True)
    torch.testing.assert_close(reference.spmm(adj, x, weighted=True), dense @ x)
    count = torch.zeros(9, 9, dtype=torch.float64).index_put((target, source), torch.ones(30).double(), accumulate=True)
    logit_src, logit_dst = randn(9, 1, seed=2), randn(9, 1, seed=3)
    powers = count * torch.nn.functional.leaky_relu(logit_dst + logit_src.T, 0.2).exp()
    alpha = powers / powers.sum(1, keepdim=True).clamp(min=1e-300)
    torch.testing.assert_close(
        reference.attend(adj, x, logit_src, logit_dst, bounds=[0, 4], steps=2), alpha @ alpha @ x
    )
    largest = torch.where(count[:, :, None] > 0, x[None], -torch.inf).amax(1)
    torch.testing.assert_close(reference.spmm_max(adj, x), torch.where(adj.degree[:, None] > 0, largest, 0))


def test_wide_edge_ids():
    """A transpose with int64 edge ids, as for more than 2**31 edges, gives the same bits."""
    adj = graph(20, 20, 100)
    wide = replace(adj.transpose, edge_ids=adj.transpose.edge_ids.long())
    wide_adj = replace(adj, known_transpose=wide)
    for case in cases(adj, 6):
        assert_same_bits(case.run(ops, wide_adj, torch.float64), case.run(ops, adj, torch.float64))


def test_pytorch_matrices_are_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sparse matrices of edges and their transpose are created once for each dtype, with and without weights."""
    created: list[Tensor] = []

    def recording(indices: Tensor, *rest: Any, **options: Any) -> Tensor:
        created.append(indices)
        return torch_coo(indices, *rest, **options)

    torch_coo = torch.sparse_coo_tensor
    monkeypatch.setattr(torch, "sparse_coo_tensor", recording)
    monkeypatch.setattr(ops, "sum_backend_of", lambda _: torch_sparse)
    adj, before = graph(23, 23, 160, seed=2), torch.get_deterministic_debug_mode()
    x = randn(23, 7, seed=1).requires_grad_()
    for _ in range(3):
        spmm(adj, x).sum().backward()
    assert len(created) == 2
    for _ in range(2):
        heavier = spmm(adj, x, weighted=True)
    assert len(created) == 3
    twice = adj.with_weight(adj.weight * 2)
    torch.testing.assert_close(spmm(twice, x, weighted=True), 2 * heavier)
    spmm(adj, x.detach().float())
    assert len(created) == 5
    assert torch.get_deterministic_debug_mode() == before

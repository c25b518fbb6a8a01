"""Dropout of attention's weights: the mask is the one defined, forward and backward, wherever edges are."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.test_dropout import bits_of
from tests.lib.kernel_cases import DTYPES, edge_dropout, graph, randn
from weft.data import Adjacency
from weft.kernels import EdgeDropout, attend, attend_edges, reference
from weft.utils.random import mix64

BOUNDS = (0, 1, 2, 3)


def kept(key: int, target: int, source: int, copy: int, head: int, p: float) -> bool:
    """The definition, in Python's integers."""
    word = mix64(mix64(key ^ target) ^ source)
    word = mix64(word ^ copy) if copy else word
    return bits_of(word, head) >= int(p * 2**32)


@pytest.mark.usefixtures("backend")
@given(
    st.integers(0, 2**64 - 1),
    st.integers(0, 2**40),
    st.integers(0, 2**40),
    st.integers(0, 2**20),
    st.floats(0.001, 0.999),
    st.sampled_from(DTYPES),
)
@settings(deadline=None, max_examples=40)
def test_mask_is_the_one_defined(key, target, source, first_head, p, dtype):
    """Of three edges between the same ends, and another before them; of both kernels; each alone in its softmax."""
    adj = Adjacency(indptr=torch.tensor([0, 4]), indices=torch.tensor([0, 1, 1, 1]), num_sources=2)
    ids = torch.tensor([source ^ 1, source])
    dropout = EdgeDropout(p, key, first_head, ids, torch.tensor([target]))
    copies = [(source ^ 1, 0), (source, 0), (source, 1), (source, 2)]
    for head in range(3):
        expected = [kept(key, target, one, copy, first_head + head, p) for one, copy in copies]
        for edge in range(4):  # the others weigh nothing
            logits = torch.full((4, 3), -torch.inf, dtype=dtype)
            logits[edge] = 0
            h = torch.ones(2, 3, dtype=dtype)
            y = attend_edges(adj, h, logits, bounds=BOUNDS, dropout=dropout)
            assert float(y[0, head]) == pytest.approx(expected[edge] / (1 - p), rel=1e-6)
    # of attend, whose logits cannot tell copies apart: the share of those that are kept
    logit_src = torch.tensor([[-torch.inf] * 3, [0.0] * 3], dtype=dtype)
    y = attend(adj, h, logit_src, torch.zeros(1, 3, dtype=dtype), bounds=BOUNDS, dropout=dropout)
    for head in range(3):
        share = sum(kept(key, target, one, copy, first_head + head, p) for one, copy in copies[1:]) / 3
        assert float(y[0, head]) == pytest.approx(share / (1 - p), rel=1e-6)


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("make", ["attend", "attend_edges"])
def test_gradients_are_those_of_differences(make):
    adj, generator = graph(7, 7, 30, seed=8), torch.Generator().manual_seed(0)
    loop, drops = ~adj.has_loop, edge_dropout(adj, 0.5)
    edges = adj.num_edges + adj.num_targets
    shapes = {"attend": [(7, 5), (7, 2), (7, 2)], "attend_edges": [(7, 5), (edges, 2)]}[make]
    inputs = [torch.randn(*one, generator=generator, dtype=torch.float64, requires_grad=True) for one in shapes]
    kernel = {"attend": attend, "attend_edges": attend_edges}[make]
    for steps in (1, 2):
        torch.autograd.gradcheck(
            lambda *given, steps=steps: kernel(adj, *given, bounds=(0, 2, 5), loop=loop, steps=steps, dropout=drops),
            inputs,
            nondet_tol=0.0,
        )


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_some_targets_and_heads_have_the_masks_of_all(dtype):
    """Rows of a block, with sources in another order, and heads of a rank: what matters is who they are."""
    adj = graph(40, 40, 500, seed=3, hub=True)
    source, target = adj.edges()
    drops, h = edge_dropout(adj, 0.4), randn(40, 12, seed=1, dtype=dtype)
    left, right = randn(40, 4, seed=2, dtype=dtype), randn(40, 4, seed=3, dtype=dtype)
    whole = attend(adj, h, left, right, bounds=(0, 3, 6, 9, 12), loop=None, dropout=drops)
    order = torch.randperm(40, generator=torch.Generator().manual_seed(1))
    place, some = order.argsort(), (target >= 11) & (target < 25)
    block = Adjacency.from_edges(place[source[some]], target[some] - 11, num_sources=40, num_targets=14)
    theirs = EdgeDropout(0.4, drops.key, drops.first_head + 1, drops.sources[order], drops.targets[11:25])
    part = attend(
        block, h[order][:, 3:9].contiguous(), left[order][:, 1:3], right[11:25, 1:3], bounds=(0, 3, 6), dropout=theirs
    )
    torch.testing.assert_close(part, whole[11:25, 3:9], rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("backend")
def test_a_loop_that_is_added_is_the_first_copy():
    """Also behind an edge from the vertex itself."""
    adj = Adjacency(indptr=torch.tensor([0, 1]), indices=torch.tensor([0]), num_sources=1)
    heads, ids = 64, torch.tensor([5])
    h, zeros = torch.ones(1, heads, dtype=torch.float64), torch.zeros(1, heads, dtype=torch.float64)
    bounds, drops = range(heads + 1), EdgeDropout(0.5, 9, 0, ids, ids)
    both = attend(adj, h, zeros, zeros, bounds=bounds, loop=torch.tensor([True]), dropout=drops)
    assert torch.equal(both, attend(adj, h, zeros, zeros, bounds=bounds, dropout=drops))  # both are kept, or none is


@pytest.mark.parametrize("p", [0.1, 0.6])
def test_rate_and_independence(p):
    """The rate, also by edge and by head; and no tie between heads, keys, copies, ends, or the two ways of an edge."""
    n, heads = 400, 500
    forth, back = torch.arange(n), torch.arange(n).roll(1)
    source, target = torch.cat([forth, back, forth]), torch.cat([back, forth, back])
    adj = Adjacency.from_edges(source, target, num_sources=n, num_targets=n)
    one, two = (~reference.edge_mask(adj, 3 * n, heads, EdgeDropout(p, key, 0, forth, forth)) for key in (1, 2))
    spread, count = (p * (1 - p)) ** 0.5, one.numel()
    assert abs(one.float().mean() - p) < 5 * spread / count**0.5
    assert (one.float().mean(0) - p).abs().max() < 6 * spread / (3 * n) ** 0.5
    assert (one.float().mean(1) - p).abs().max() < 6 * spread / heads**0.5
    source, target = adj.edges()
    copy = ((source[1:] == source[:-1]) & (target[1:] == target[:-1])).nonzero()[:, 0] + 1
    edge = {ends: number for number, ends in enumerate(zip(source.tolist(), target.tolist(), strict=True))}
    other = torch.tensor([edge[ends[::-1]] for ends in zip(source.tolist(), target.tolist(), strict=True)])
    assert len(copy) == n
    pairs = [(one, two), (one[:, 1:], one[:, :-1]), (one[1:], one[:-1]), (one, one[other]), (one[copy], one[copy - 1])]
    for a, b in pairs:
        assert abs((a & b).float().mean() - p * p) < 6 * spread / a.numel() ** 0.5


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_any_number_of_threads_gives_the_same_bits(dtype):
    adj = graph(61, 61, 1500, seed=4, hub=True)
    h, left = randn(61, 9, seed=1, dtype=dtype), randn(61, 3, seed=2, dtype=dtype)
    found = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        inputs = [one.clone().requires_grad_() for one in (h, left, left)]
        y = attend(adj, *inputs, bounds=(0, 3, 6, 9), loop=~adj.has_loop, dropout=edge_dropout(adj, 0.3))
        found.append([y.detach(), *torch.autograd.grad(y.square().sum(), inputs)])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_what_does_not_fit_is_refused():
    adj, zeros = graph(4, 3, 9, seed=1), torch.zeros(4, 2)
    drops = edge_dropout(adj, 0.5)
    for wrong, match in (
        (drops._replace(p=1.0), "p=1.0 must be in"),
        (drops._replace(sources=drops.targets), r"sources .* must be int64 \[4\]"),
        (drops._replace(targets=drops.targets.int()), r"targets .* must be int64 \[3\]"),
    ):
        with pytest.raises(ValueError, match=match):
            attend(adj, zeros, zeros, zeros[:3], bounds=(0, 1, 2), dropout=wrong)
        with pytest.raises(ValueError, match=match):
            attend_edges(adj, zeros, torch.zeros(9, 2), bounds=(0, 1, 2), dropout=wrong)


def test_an_error_in_backward_shows():
    """With the mask of another key backward, the gradients of sources are others; of targets, forward has made them."""
    adj = graph(7, 7, 30, seed=8)
    case = [randn(7, 5, seed=1), randn(7, 2, seed=2), randn(7, 2, seed=3)]
    drops = edge_dropout(adj, 0.5)
    assert drops is not None
    grads = []
    for wrong in (drops, drops._replace(key=drops.key + 1)):
        inputs = [one.clone().requires_grad_() for one in case]
        y = attend(adj, *inputs, bounds=(0, 2, 5), dropout=drops)
        over = y.grad_fn.args[1]  # type: ignore[union-attr]
        y.grad_fn.args = y.grad_fn.args[0], replace(over, dropout=wrong)  # type: ignore[union-attr]
        grads.append(torch.autograd.grad(y.square().sum(), inputs))
    assert [bool((a - b).abs().max() > 1e-3) for a, b in zip(*grads, strict=True)] == [True, True, False]

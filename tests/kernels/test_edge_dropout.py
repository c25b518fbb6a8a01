"""Dropout of attention weights has the defined mask, forward and backward, in every block of edges."""

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


def keeps(key: int, target: int, source: int, copy: int, head: int, p: float) -> bool:
    """Return whether dropout keeps an edge, by the definition of the mask in Python integers."""
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
def test_mask_equals_its_definition(key, target, source, first_head, p, dtype):
    """The mask of both kernels is as defined, for three copies of an edge after another edge, one at a time."""
    adj = Adjacency(indptr=torch.tensor([0, 4]), indices=torch.tensor([0, 1, 1, 1]), num_sources=2)
    ids = torch.tensor([source ^ 1, source])
    dropout = EdgeDropout(p, key, first_head, ids, torch.tensor([target]))
    copies = [(source ^ 1, 0), (source, 0), (source, 1), (source, 2)]
    for head in range(3):
        expected = [keeps(key, target, vertex, copy, first_head + head, p) for vertex, copy in copies]
        for edge in range(4):  # The weights of the other edges are 0.
            logits = torch.full((4, 3), -torch.inf, dtype=dtype)
            logits[edge] = 0
            h = torch.ones(2, 3, dtype=dtype)
            y = attend_edges(adj, h, logits, bounds=BOUNDS, dropout=dropout)
            assert float(y[0, head]) == pytest.approx(expected[edge] / (1 - p), rel=1e-6)
    # attend gives copies of an edge equal logits, so its result is the fraction of copies that are kept.
    logit_src = torch.tensor([[-torch.inf] * 3, [0.0] * 3], dtype=dtype)
    y = attend(adj, h, logit_src, torch.zeros(1, 3, dtype=dtype), bounds=BOUNDS, dropout=dropout)
    for head in range(3):
        fraction = sum(keeps(key, target, vertex, copy, first_head + head, p) for vertex, copy in copies[1:]) / 3
        assert float(y[0, head]) == pytest.approx(fraction / (1 - p), rel=1e-6)


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("make", ["attend", "attend_edges"])
def test_gradients_equal_finite_differences(make):
    adj, generator = graph(7, 7, 30, seed=8), torch.Generator().manual_seed(0)
    loop, drops = ~adj.has_loop, edge_dropout(adj, 0.5)
    edges = adj.num_edges + adj.num_targets
    shapes = {"attend": [(7, 5), (7, 2), (7, 2)], "attend_edges": [(7, 5), (edges, 2)]}[make]
    inputs = [torch.randn(*shape, generator=generator, dtype=torch.float64, requires_grad=True) for shape in shapes]
    kernel = {"attend": attend, "attend_edges": attend_edges}[make]
    for steps in (1, 2):
        torch.autograd.gradcheck(
            lambda *tensors, steps=steps: kernel(
                adj, *tensors, bounds=(0, 2, 5), loop=loop, steps=steps, dropout=drops
            ),
            inputs,
            nondet_tol=0.0,
        )


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_masks_of_a_block_equal_those_of_the_whole(dtype):
    """Masks depend on ids of vertices and heads, not on their positions in the block of a rank."""
    adj = graph(40, 40, 500, seed=3, hub=True)
    source, target = adj.edges()
    drops, h = edge_dropout(adj, 0.4), randn(40, 12, seed=1, dtype=dtype)
    left, right = randn(40, 4, seed=2, dtype=dtype), randn(40, 4, seed=3, dtype=dtype)
    whole = attend(adj, h, left, right, bounds=(0, 3, 6, 9, 12), loop=None, dropout=drops)
    order = torch.randperm(40, generator=torch.Generator().manual_seed(1))
    position, selected = order.argsort(), (target >= 11) & (target < 25)
    block = Adjacency.from_edges(position[source[selected]], target[selected] - 11, num_sources=40, num_targets=14)
    block_dropout = EdgeDropout(0.4, drops.key, drops.first_head + 1, drops.sources[order], drops.targets[11:25])
    part = attend(
        block,
        h[order][:, 3:9].contiguous(),
        left[order][:, 1:3],
        right[11:25, 1:3],
        bounds=(0, 3, 6),
        dropout=block_dropout,
    )
    torch.testing.assert_close(part, whole[11:25, 3:9], rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("backend")
def test_an_added_loop_has_the_mask_of_the_first_copy():
    """An added loop has the mask of copy 0, also if the graph contains a loop of the vertex."""
    adj = Adjacency(indptr=torch.tensor([0, 1]), indices=torch.tensor([0]), num_sources=1)
    heads, ids = 64, torch.tensor([5])
    h, zeros = torch.ones(1, heads, dtype=torch.float64), torch.zeros(1, heads, dtype=torch.float64)
    bounds, drops = range(heads + 1), EdgeDropout(0.5, 9, 0, ids, ids)
    both = attend(adj, h, zeros, zeros, bounds=bounds, loop=torch.tensor([True]), dropout=drops)
    assert torch.equal(both, attend(adj, h, zeros, zeros, bounds=bounds, dropout=drops))  # Dropout keeps both or none.


@pytest.mark.parametrize("p", [0.1, 0.6])
def test_rate_and_independence(p):
    """The rate is right, also by edge and by head; heads, keys, copies, edges and directions are uncorrelated."""
    n, heads = 400, 500
    ids, neighbours = torch.arange(n), torch.arange(n).roll(1)
    source, target = torch.cat([ids, neighbours, ids]), torch.cat([neighbours, ids, neighbours])
    adj = Adjacency.from_edges(source, target, num_sources=n, num_targets=n)
    first, second = (~reference.edge_mask(adj, 3 * n, heads, EdgeDropout(p, key, 0, ids, ids)) for key in (1, 2))
    spread, count = (p * (1 - p)) ** 0.5, first.numel()
    assert abs(first.float().mean() - p) < 5 * spread / count**0.5
    assert (first.float().mean(0) - p).abs().max() < 6 * spread / (3 * n) ** 0.5
    assert (first.float().mean(1) - p).abs().max() < 6 * spread / heads**0.5
    source, target = adj.edges()
    copy = ((source[1:] == source[:-1]) & (target[1:] == target[:-1])).nonzero()[:, 0] + 1
    edge = {endpoints: number for number, endpoints in enumerate(zip(source.tolist(), target.tolist(), strict=True))}
    other = torch.tensor([edge[endpoints[::-1]] for endpoints in zip(source.tolist(), target.tolist(), strict=True)])
    assert len(copy) == n
    pairs = [
        (first, second),
        (first[:, 1:], first[:, :-1]),
        (first[1:], first[:-1]),
        (first, first[other]),
        (first[copy], first[copy - 1]),
    ]
    for a, b in pairs:
        assert abs((a & b).float().mean() - p * p) < 6 * spread / a.numel() ** 0.5


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bits_do_not_depend_on_the_number_of_threads(dtype):
    adj = graph(61, 61, 1500, seed=4, hub=True)
    h, left = randn(61, 9, seed=1, dtype=dtype), randn(61, 3, seed=2, dtype=dtype)
    runs = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        inputs = [tensor.clone().requires_grad_() for tensor in (h, left, left)]
        y = attend(adj, *inputs, bounds=(0, 3, 6, 9), loop=~adj.has_loop, dropout=edge_dropout(adj, 0.3))
        runs.append([y.detach(), *torch.autograd.grad(y.square().sum(), inputs)])
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def test_wrong_arguments_are_refused():
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


def test_a_planted_error_in_backward_is_detected():
    """A wrong mask in backward changes the gradients of sources. Those of targets are computed in forward."""
    adj = graph(7, 7, 30, seed=8)
    case = [randn(7, 5, seed=1), randn(7, 2, seed=2), randn(7, 2, seed=3)]
    drops = edge_dropout(adj, 0.5)
    assert drops is not None
    grads = []
    for wrong in (drops, drops._replace(key=drops.key + 1)):
        inputs = [tensor.clone().requires_grad_() for tensor in case]
        y = attend(adj, *inputs, bounds=(0, 2, 5), dropout=drops)
        over = y.grad_fn.args[1]  # type: ignore[union-attr]
        y.grad_fn.args = y.grad_fn.args[0], replace(over, dropout=wrong)  # type: ignore[union-attr]
        grads.append(torch.autograd.grad(y.square().sum(), inputs))
    assert [bool((a - b).abs().max() > 1e-3) for a, b in zip(*grads, strict=True)] == [True, True, False]

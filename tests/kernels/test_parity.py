"""Results and gradients of every op, backend, instruction set and dtype equal those of the reference."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.lib.kernel_cases import (
    DTYPES,
    assert_same,
    attend_case,
    attend_edges_case,
    dot_case,
    drawn_graphs,
    graph,
    graphs,
    max_case,
    pair_case,
    spmm_case,
)
from weft.data.adjacency import Adjacency

WIDTHS = [0, 1, 2, 7, 16, 33, 100]
EVERY_WIDTH = [*range(1, 40), 64, 127, 128, 129, 256, 257, 300, 513]
"""Numbers of columns that cover every split into vectors and blocks."""
BOUNDS = [(0, 0), (0, 5), (0, 16, 32), (0, 3, 3, 20), (0, 40, 41, 90, 131), (*range(0, 65, 8),), (*range(0, 31, 3),)]


@pytest.mark.usefixtures("sum_backend")
class TestSums:
    @pytest.mark.parametrize("index", [torch.int32, torch.int64], ids=str)
    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize("weighted", [False, True])
    def test_spmm(self, dtype, index, weighted):
        for adj, width in itertools.product(graphs(index), WIDTHS):
            source, target, loop = (bool(width >> bit & 1) ^ weighted for bit in range(3))
            assert_same(adj, spmm_case(adj, width, source=source, target=target, loop=loop, weighted=weighted), dtype)

    @pytest.mark.parametrize("factors", list(itertools.product([False, True], repeat=4)), ids=str)
    def test_every_combination_of_factors(self, factors):
        source, target, loop, weighted = factors
        adj = graph(30, 20, 200)
        assert_same(adj, spmm_case(adj, 9, source=source, target=target, loop=loop, weighted=weighted), torch.float64)

    @pytest.mark.parametrize("width", EVERY_WIDTH)
    def test_every_width(self, width):
        adj = graph(20, 15, 60)
        for dtype in DTYPES:
            assert_same(adj, spmm_case(adj, width, source=True, target=False, loop=True, weighted=False), dtype)

    @given(drawn_graphs(), st.integers(0, 70), st.booleans(), st.booleans())
    @settings(deadline=None, max_examples=25)
    def test_drawn_graphs(self, adj, width, weighted, loop):
        case = spmm_case(adj, width, source=True, target=True, loop=loop, weighted=weighted)
        assert_same(adj, case, torch.float64)


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("index", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
class TestParity:
    def test_spmm_max(self, dtype, index):
        for adj, width in itertools.product(graphs(index), WIDTHS):
            assert_same(adj, max_case(adj, width), dtype)

    def test_attend(self, dtype, index):
        for adj, bounds in itertools.product(graphs(index), BOUNDS):
            assert_same(adj, attend_case(adj, bounds, loop=len(bounds) % 2 == 1), dtype)

    def test_attend_steps(self, dtype, index):
        for adj in graphs(index):
            assert_same(adj, attend_case(adj, (0, 4, 21), loop=True, steps=3, slope=0.1), dtype)

    @pytest.mark.parametrize("p", [0.1, 0.4])
    def test_attend_under_dropout(self, dtype, index, p):
        for adj, bounds in itertools.product(graphs(index), BOUNDS):
            odd = len(bounds) % 2 == 1
            assert_same(adj, attend_case(adj, bounds, loop=odd, steps=2 if odd else 1, dropout=p), dtype)
            assert_same(adj, attend_edges_case(adj, bounds, loop=odd, steps=2 if odd else 1, dropout=p), dtype)

    def test_pair_logits(self, dtype, index):
        for number, (adj, bounds) in enumerate(itertools.product(graphs(index), BOUNDS)):
            assert_same(adj, pair_case(adj, bounds, features=number % 3, loop=number % 2 == 1), dtype)

    def test_dot_logits(self, dtype, index):
        for adj, bounds in itertools.product(graphs(index), BOUNDS):
            assert_same(adj, dot_case(adj, bounds), dtype)

    def test_attend_edges(self, dtype, index):
        for adj, bounds in itertools.product(graphs(index), BOUNDS):
            odd = len(bounds) % 2 == 1
            assert_same(adj, attend_edges_case(adj, bounds, loop=odd, steps=3 if odd else 1), dtype)


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("degree", [0, 1, 7, 8, 127, 128, 129, 256])
@pytest.mark.parametrize("dropout", [0.0, 0.4])
def test_a_loop_after_any_number_of_entries(degree, dropout):
    """Attention is right for every vertex with `degree` entries and a loop, which kernels process 128 at a time."""
    count = 300
    source, target = torch.arange(count).repeat_interleave(degree), torch.arange(count * degree)
    target = (source + 1 + target % max(degree, 1)) % count  # no loops
    adj = Adjacency.from_edges(source, target, num_sources=count, num_targets=count)
    for dtype in DTYPES:
        assert_same(adj, attend_case(adj, (0, 3, 12), loop=True, dropout=dropout), dtype)
        assert_same(adj, attend_edges_case(adj, (0, 3, 12), loop=True, dropout=dropout), dtype)


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("width", EVERY_WIDTH)
def test_every_width(width):
    adj = graph(20, 15, 60)
    for dtype in DTYPES:
        assert_same(adj, max_case(adj, width), dtype)
        assert_same(adj, attend_case(adj, (0, width // 3, width), loop=True), dtype)
        assert_same(adj, attend_edges_case(adj, (0, width // 3, width), loop=True), dtype)


@pytest.mark.usefixtures("backend")
@given(drawn_graphs(), st.integers(0, 70), st.booleans(), st.booleans())
@settings(deadline=None, max_examples=25)
def test_drawn_graphs(adj, width, weighted, loop):
    p = 0.4 * weighted
    assert_same(adj, max_case(adj, width), torch.float64)
    bounds = (0, width // 4, width // 2, width)
    assert_same(adj, attend_case(adj, bounds, loop=loop, steps=2, dropout=p), torch.float64)
    assert_same(adj, attend_edges_case(adj, bounds, loop=loop, steps=2, dropout=p), torch.float64)
    assert_same(adj, pair_case(adj, bounds, features=2 * weighted, loop=loop), torch.float64)
    assert_same(adj, dot_case(adj, bounds), torch.float64)

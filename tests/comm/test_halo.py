"""Halo exchange: fetched rows and aggregates over them equal those of the whole graph, with exact byte counts."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import Tensor

from tests.lib.ranks import on_ranks
from weft.comm import Group, Halo, make_route, slice_edges
from weft.data import Adjacency
from weft.kernels import Scale, spmm, spmm_transposed
from weft.partition import Caching, Dependencies, Hop, make_dependencies
from weft.runtime.meter import Counts

NUM_VERTICES, WIDTH, SIZE = 29, 3, 3
PARTS = {"all": [0, 1, 2, 1], "one of none": [2, 0, 0, 2], "all on one": [1]}
"""Ranks of the vertices, repeated until all vertices are assigned."""


def whole_graph() -> Adjacency:
    """Return a directed, weighted graph with self-loops and duplicates, whose last vertex is isolated."""
    random = torch.Generator().manual_seed(1)
    source, target = torch.randint(0, NUM_VERTICES - 1, (2, 90), generator=random)
    weight = torch.rand(90, generator=random, dtype=torch.float64)
    return Adjacency.from_edges(source, target, num_sources=NUM_VERTICES, num_targets=NUM_VERTICES, weight=weight)


def scales() -> list[tuple[Scale, bool]]:
    """Return the scales of a sum, of GCN and of a mean, each with whether edges are weighted."""
    random = torch.Generator().manual_seed(2)
    source, target, loop = torch.rand(3, NUM_VERTICES, generator=random, dtype=torch.float64) + 0.5
    gcn, mean = Scale(source, target, loop), Scale(target=target)
    return [(Scale(), False), (gcn, False), (mean, False), (gcn, True), (mean, True)]


def block_scale(scale: Scale, hop: Hop, sources: Tensor) -> Scale:
    """Return the rows of the whole graph's scale that a block needs."""
    rows = (sources, sources[: hop.block.num_targets], sources[: hop.block.num_targets])
    return Scale(*(None if vector is None else vector[ids] for vector, ids in zip(scale, rows, strict=True)))


def summed(group: Group, rows: Tensor, ids: Tensor) -> Tensor:
    """Return the sum of all ranks' rows by vertex."""
    return group.all_reduce(rows.new_zeros(NUM_VERTICES, WIDTH).index_add(0, ids, rows), tag="test")


def check_counts(counts: Counts, sent: int, received: int) -> None:
    """Check the counts of one exchange of rows in float64."""
    assert counts.collectives["halo"] == 1
    assert counts.bytes_sent["halo"] == 8 * WIDTH * sent
    assert counts.bytes_received["halo"] == 8 * WIDTH * received
    assert len(counts.durations) == 1


class Rank:
    """Block of one rank in an aggregate, and the rows of all ranks."""

    def __init__(self, group: Group, assignment: list[int], ratio: float) -> None:
        self.group, self.adj = group, whole_graph()
        part = torch.tensor(assignment, dtype=torch.int32).repeat(NUM_VERTICES)[:NUM_VERTICES]
        caching = Caching(costs=torch.ones(2, 5, dtype=torch.float64), ratio=ratio)
        self.needed: Dependencies = make_dependencies(self.adj, part, group.rank, SIZE, caching)
        self.hop = hop = self.needed.hops[0]
        self.route = make_route(hop.fetched, hop.received, self.needed.owned, hop.num_inputs, group)
        self.inputs = self.needed.rows[: hop.num_inputs]
        self.sources = torch.cat([self.inputs, hop.fetched])
        random = torch.Generator().manual_seed(3)
        self.x_NF = torch.randn(NUM_VERTICES, WIDTH, generator=random, dtype=torch.float64)
        self.grad = torch.randn(NUM_VERTICES, WIDTH, generator=random, dtype=torch.float64) * (group.rank + 1)

    def product(self, scale: Scale, weighted: bool, ring: bool, overlap: bool) -> tuple[Tensor, Tensor]:
        """Return `A x` for this rank's targets, and the gradient of its inputs."""
        hop, meter = self.hop, self.group.meter
        slices = slice_edges(
            hop.block,
            hop.num_inputs,
            hop.received,
            block_scale(scale, hop, self.sources),
            weighted=weighted,
            by_rank=[(self.group.rank - step) % SIZE for step in range(1, SIZE)] if ring else (),
        )
        halo = Halo(self.route, self.group, name="halo", ring=ring, overlap=overlap)
        x = self.x_NF[self.inputs].requires_grad_()
        meter.take("setup")
        y = halo.product(x, slices)
        check_counts(meter.take("setup"), len(self.route.rows), len(hop.fetched))
        y.backward(self.grad[: len(y)])
        check_counts(meter.take("setup"), len(hop.fetched), len(self.route.rows))
        assert x.grad is not None
        return y.detach(), x.grad

    def check_products(self) -> None:
        """Check results and gradients against those of the whole graph, with and without ring and overlap."""
        targets = self.inputs[: self.hop.block.num_targets]
        for (scale, weighted), ring in product(scales(), (True, False)):
            y, grad = self.product(scale, weighted, ring, overlap=True)
            local = spmm(
                self.hop.block,
                self.x_NF[self.sources],
                scale=block_scale(scale, self.hop, self.sources),
                weighted=weighted,
            )
            torch.testing.assert_close(y, local)
            torch.testing.assert_close(y, spmm(self.adj, self.x_NF, scale=scale, weighted=weighted)[targets])
            grad_y = summed(self.group, self.grad[: len(y)], targets)
            whole = spmm_transposed(self.adj, grad_y, scale=scale, weighted=weighted)
            torch.testing.assert_close(summed(self.group, grad, self.inputs), whole)
            if self.hop.num_inputs == self.needed.num_own:  # then a vertex has one row, whose gradient is all of it
                torch.testing.assert_close(grad, whole[self.inputs])
            plain_y, plain_grad = self.product(scale, weighted, ring, overlap=False)
            assert torch.equal(y, plain_y)
            assert torch.equal(grad, plain_grad)

    def check_fetch(self) -> None:
        """Check that fetched rows are exact, and that their owner gets the sum of all gradients."""
        for ring, overlap in product((True, False), repeat=2):
            x = self.x_NF[self.inputs].requires_grad_()
            halo = Halo(self.route, self.group, name="halo", ring=ring, overlap=overlap)
            self.group.meter.take("setup")
            fetched = halo.fetch(x)
            check_counts(self.group.meter.take("setup"), len(self.route.rows), len(self.hop.fetched))
            assert torch.equal(fetched, self.x_NF[self.hop.fetched])
            fetched.backward(self.grad[: len(fetched)])
            check_counts(self.group.meter.take("setup"), len(self.hop.fetched), len(self.route.rows))
            assert x.grad is not None
            expected = summed(self.group, self.grad[: len(fetched)], self.hop.fetched)
            torch.testing.assert_close(x.grad[: self.needed.num_own], expected[self.needed.owned])
            assert not x.grad[self.needed.num_own :].any()  # no other rank fetches recomputed rows


def check_all(group: Group) -> list[tuple[int, int, int]]:
    sizes = []
    for assignment, ratio in product(PARTS.values(), (0.0, 0.5)):
        rank = Rank(group, assignment, ratio)
        rank.check_products()
        rank.check_fetch()
        sizes.append((rank.needed.num_own, rank.hop.num_inputs, len(rank.hop.fetched)))
    return sizes


@pytest.mark.slow
def test_equals_the_whole_product() -> None:
    """Products are correct also with recomputed rows, with a rank without vertices, and without any exchange."""
    sizes = on_ranks(SIZE, check_all)
    for first, again, *_, alone, _ in sizes:
        assert first[0] == first[1] < again[1]
        assert first[2] > again[2] > 0
        assert alone[2] == 0
    assert sizes[1][2] == (0, 0, 0)

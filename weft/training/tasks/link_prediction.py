"""Link prediction: pairs assigned to the ranks, the rows that they need fetched once, and what that costs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from weft.comm import Group, Halo, make_route
from weft.config.config import Config
from weft.cost import Operation, Trace, all_reduce
from weft.data import Adjacency, Links, negative_key
from weft.kernels import spmm
from weft.nn import Decoder
from weft.strategies import CandidateLinks, Step
from weft.training.tasks.ranking import auc, filtered_ranks, rank_scores, ranking_operations
from weft.training.tasks.row_batching import add_rows, take_rows, fill_zeros

MAX_PAIRS = 1 << 16  # scored at once


@dataclass(frozen=True, kw_only=True)
class LinkAssignment:
    """Who scores which pairs: the rank that answers for a link's source has the link and its negatives.

    owner: int64 [N], the rank that answers for each vertex. num_negatives: pairs drawn for each training link.
    """

    links: Links
    owner: Tensor
    size: int
    seed: int
    num_negatives: int
    _by_rank: dict[int, Tensor] = field(default_factory=dict, init=False, repr=False, compare=False)

    def train(self, rank: int, epoch: int) -> Tensor:
        """A rank's pairs [p (1 + K), 3] of an epoch, the p links first."""
        return self.links.candidates_of(self._of_rank(rank), negative_key(self.seed, epoch), self.num_negatives)

    def _of_rank(self, rank: int) -> Tensor:
        """A rank's training links, found once."""
        if rank not in self._by_rank:
            self._by_rank[rank] = self.links.train[self.owner[self.links.train[:, 0]] == rank]
        return self._by_rank[rank]

    def held_out(self) -> Tensor:
        """All pairs [2 m, 3] that evaluations score: validation and test links, then a non-edge for each."""
        parts = (self.links.val, self.links.test)
        drawn = [self.links.non_edges(part, negative_key(self.seed, side, 0)) for side, part in enumerate(parts)]
        return torch.cat([*parts, *drawn])

    def assigned(self, pairs: Tensor, rank: int) -> Tensor:
        """The positions of a rank's pairs among those of `held_out`."""
        half = len(pairs) // 2
        return (self.owner[pairs[:half, 0]] == rank).repeat(2).nonzero()[:, 0]

    def missing(self, pairs: Tensor, rank: int) -> tuple[Tensor, list[int]]:
        """The vertices of other ranks that a rank needs for its pairs, each once, by owner, and how many each owns."""
        needed = torch.zeros(len(self.owner), dtype=torch.bool)
        needed[pairs[:, :2].reshape(-1)] = True
        vertices = (needed & (self.owner != rank)).nonzero()[:, 0]
        vertices = vertices[self.owner[vertices].argsort(stable=True)]
        return vertices, torch.bincount(self.owner[vertices], minlength=self.size).tolist()

    def trace(self, rank: int, width: int, itemsize: int, *, epoch: int | None, ranked: bool) -> Trace:
        """What a task exchanges in an epoch's training step, or, where it is None, in an evaluation.

        Beyond what the strategy's trace tells of the model, its decoder included.
        """
        if self.size == 1:
            return Trace(operations=())
        if epoch is None:
            pairs = self.held_out()
            received = [self.missing(pairs[self.assigned(pairs, one)], one)[1] for one in range(self.size)]
            made = [halo_operation(received, rank, width * itemsize), all_reduce("scores", len(pairs), itemsize, self.size)]
            for links in (self.links.val, self.links.test) if ranked else ():
                made += ranking_operations(len(links), self.links.num_vertices, width, itemsize, self.size)
            return Trace(operations=tuple(made))
        received = [self.missing(self.train(one, epoch), one)[1] for one in range(self.size)]
        counts = Operation(
            kind="collective", tag="route", bytes_sent=8 * (self.size - 1), bytes_received=8 * (self.size - 1)
        )
        ids = halo_operation(received, rank, 8, tag="route").adjoint()
        rows = halo_operation(received, rank, width * itemsize)
        return Trace(operations=(counts, ids, rows, rows.adjoint()))


def halo_operation(received: list[list[int]], rank: int, row_bytes: int, *, tag: str = "halo") -> Operation:
    """One exchange of rows; received: how many each rank gets from each."""
    sent = sum(counts[rank] for counts in received)
    return Operation(
        kind="collective", tag=tag, bytes_sent=sent * row_bytes, bytes_received=sum(received[rank]) * row_bytes
    )


class EndpointBatch(NamedTuple):
    """Some pairs as matrices [p, m] that take their sources and their targets out of m rows, and their relations.

    own, fetched: int64, ascending, which rows those are: of this rank's, then of those of other ranks.
    """

    source: Adjacency
    target: Adjacency
    relation: Tensor
    own: Tensor
    fetched: Tensor

    @classmethod
    def of(cls, places: Tensor, relation: Tensor, num_own: int, device: torch.device) -> EndpointBatch:
        """From the places [p, 2] of the ends among a rank's rows and then those of other ranks."""
        rows, inverse = places.unique(return_inverse=True)
        own, fetched = rows[rows < num_own], rows[rows >= num_own] - num_own
        source, target = (selection_matrix(side, len(rows)).to(device) for side in inverse.t().contiguous())
        return cls(source, target, relation.to(device), own.to(device), fetched.to(device))

    def rows(self, z: Tensor, fetched: Tensor) -> Tensor:
        """The m rows [m, D], from this rank's and those of other ranks."""
        own = take_rows(z, self.own)
        return torch.cat([own, fetched.index_select(0, self.fetched)]) if len(self.fetched) else own

    def add_back(self, grad: Tensor, grad_z: Tensor, grad_fetched: Tensor) -> None:
        """Adds the gradient [m, D] of the m rows to those of all rows; the adjoint of `rows`."""
        add_rows(grad_z, self.own, grad[: len(self.own)])
        if len(self.fetched):
            add_rows(grad_fetched, self.fetched, grad[len(self.own) :])

    def score(self, rows: Tensor, decoder: Decoder) -> Tensor:
        """The pairs' scores [p], from the rows [m, D]."""
        query = decoder.query(spmm(self.source, rows), self.relation)
        return (query * spmm(self.target, rows)).sum(1)


class LinkHalo:
    """The rows at the ends of a rank's pairs: those that are here, and those of other ranks, fetched once each.

    links: the pairs, and where their ends are. blocks: as many of them at a time as take little memory by the rows of
    their ends. num_own: rows of this rank. name: of the exchanges.
    """

    def __init__(self, links: CandidateLinks, num_own: int, group: Group, name: str) -> None:
        self.halo = Halo(links.route, group, name=name) if links.route else None
        self.blocks = [
            EndpointBatch.of(block[:, :2], block[:, 2], num_own, group.device) for block in links.pairs.split(MAX_PAIRS)
        ]

    def fetch(self, z: Tensor) -> Tensor:
        """The rows [h, D] of other ranks that the pairs need, from each rank's z [n, D]."""
        return self.halo.fetch(z) if self.halo else z[:0]


def locate_endpoints(assignment: LinkAssignment, pairs: Tensor, own: Tensor, group: Group) -> CandidateLinks:
    """Where the ends of a rank's pairs are; all ranks call it. own: int64 [n], the vertices of its rows."""
    fetched, received = assignment.missing(pairs, group.rank)
    route = make_route(fetched, received, own, len(own), group) if group.size > 1 else None
    place = torch.empty(len(assignment.owner), dtype=torch.int64)
    place[own] = torch.arange(len(own))
    place[fetched] = torch.arange(len(own), len(own) + len(fetched))
    return CandidateLinks(pairs=torch.cat([place[pairs[:, :2]], pairs[:, 2:]], 1), route=route)


def selection_matrix(places: Tensor, num_rows: int) -> Adjacency:
    """The matrix [p, num_rows] that takes the rows at p places: as a product, it has a fast adjoint."""
    return Adjacency(indptr=torch.arange(len(places) + 1), indices=places, num_sources=num_rows)


class LinkTask:
    """Learns to tell a graph's links from pairs drawn by chance.

    The loss is the mean of the binary cross entropy over a step's training links and their negatives: a rank's part is
    the sum over its pairs divided by the number of all. Negatives depend on seed, epoch and link, not on ranks.
    rows: the vertices this rank answers for. empty: makes memory for a gradient, like the rows that it is of.
    """

    def __init__(
        self,
        config: Config,
        links: Links,
        decoder: Decoder,
        rows: slice | Tensor,
        group: Group,
        empty: Callable[[Tensor], Tensor] = torch.empty_like,
    ) -> None:
        self.links, self.decoder, self.group, self.empty = links, decoder, group, empty
        self.ranked = "mrr" in config.metrics.split(",")
        self.own = torch.arange(links.num_vertices)[rows]
        owner = torch.zeros(links.num_vertices, dtype=torch.int64, device=group.device)
        owner[self.own] = group.rank
        owner = group.all_reduce(owner, tag="route").cpu()
        self.assignment = LinkAssignment(
            links=links, owner=owner, size=group.size, seed=config.seed, num_negatives=config.negatives
        )
        self.place = torch.full((links.num_vertices,), -1)
        self.place[self.own] = torch.arange(len(self.own))
        pairs = self.assignment.held_out()
        self.num_held_out = len(pairs)
        self.assigned = self.assignment.assigned(pairs, group.rank)
        ends = locate_endpoints(self.assignment, pairs[self.assigned], self.own, group)
        self.held_out = LinkHalo(ends, len(self.own), group, "held-out links")

    def loss(self, z: Tensor, step: Step) -> tuple[Tensor, Tensor]:
        """The rank's part of the loss, [], and its gradient [n, D] by the rows; the decoder's parameters get theirs."""
        with self.group.meter.timer("negatives"):
            links, num_links = self._links_of(step)
            reach, each = LinkHalo(links, len(z), self.group, "training links"), 1 + self.assignment.num_negatives
            labels = z.new_zeros(len(links.pairs))
            labels[: len(links.pairs) // each] = 1
        with self.group.meter.timer("decode"):
            leaf = z.detach().requires_grad_()
            coming = reach.fetch(leaf)
            z, fetched = leaf.detach(), coming.detach()
            grad_z, grad_fetched = fill_zeros(self.empty(z)), torch.zeros_like(fetched)
        total = z.new_zeros(())
        for block, label in zip(reach.blocks, labels.split(MAX_PAIRS), strict=True):
            with self.group.meter.timer("decode"):
                rows = block.rows(z, fetched).requires_grad_()
                scores = block.score(rows, self.decoder)
            logits = scores.detach().requires_grad_()
            loss = functional.binary_cross_entropy_with_logits(logits, label, reduction="sum") / (num_links * each)
            (grad,) = torch.autograd.grad(loss, logits)
            total += loss.detach()
            with self.group.meter.timer("decode"):
                scores.backward(grad)
                assert rows.grad is not None
                block.add_back(rows.grad, grad_z, grad_fetched)
        with self.group.meter.timer("decode"):
            if reach.halo:
                grad_z += torch.autograd.grad(coming, leaf, grad_fetched)[0]
        return total, grad_z

    def _links_of(self, step: Step) -> tuple[CandidateLinks, int]:
        """This rank's candidate links of a step, and how many links all ranks have in it."""
        if step.links is not None:
            return step.links, step.batch_size
        pairs = self.assignment.train(self.group.rank, step.epoch)
        return locate_endpoints(self.assignment, pairs, self.own, self.group), len(self.links.train)

    @torch.no_grad()
    def counts(self, z: Tensor, step: Step) -> dict[str, float | None]:
        """The scores, which every rank then has."""
        del step
        scores = z.new_zeros(self.num_held_out)
        fetched = self.held_out.fetch(z)
        own = torch.cat([block.score(block.rows(z, fetched), self.decoder) for block in self.held_out.blocks])
        scores[self.assigned.to(z.device)] = own
        parts = (self.links.val, self.links.test)
        sizes = [len(part) for part in parts] * 2
        by_part = self.group.all_reduce(scores, tag="scores").cpu().split(sizes)
        found: dict[str, float | None] = {}
        for side, split in enumerate(("val", "test")):
            if not len(parts[side]):
                continue
            found[f"{split}_auc"] = auc(by_part[side], by_part[2 + side])
            if self.ranked:
                ranks = filtered_ranks(z, self.links, parts[side], self.place, self.decoder, self.group)
                found |= rank_scores(split, ranks)
        return found

    def scores(self, counts: list[dict[str, float | None]]) -> dict[str, float | None]:
        """Those of an evaluation, from what every rank has."""
        return counts[0]

"""A mini-batch: its vertices or links, and the in-edges drawn, hop by hop from the last (GSplit, sections 3 and 4).

A rank draws for its own vertices alone, and tells the owners of the sources that it has not: they draw for those at the
next hop. What is drawn is keyed by seed, step, hop and vertex, so it is the same on any number of ranks.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from weft.comm import Group, Route
from weft.data import Adjacency, Graph, Links, negative_key
from weft.data.sampling import (
    ALL,
    DRAW,
    Fanout,
    KeyTransition,
    Relabeller,
    SampledEdges,
    dependent_batch_key,
    epoch_batches,
    layer_key,
    sample_layer,
)
from weft.partition import Dependencies, Hop
from weft.strategies.base import CandidateLinks

Value = TypeVar("Value")


class Requests(NamedTuple):
    """Vertices whose rows a rank asks others for, or is asked for by them."""

    vertices: Tensor
    """int64 [h], by the other rank, ascending for each."""
    counts: list[int]
    """How many of them are of each rank."""


@dataclass(frozen=True, kw_only=True)
class SampledHop(Hop):
    """A hop over some of the in-edges."""

    sample: SampledEdges
    route: Route | None
    """Which rows go where before it; None: no rank asks for any."""

    @cached_property
    def edge_ids(self) -> Tensor:
        return self.sample.edge_ids


@dataclass(frozen=True, kw_only=True)
class SampledBatch(Dependencies):
    """A rank's share of a batch."""

    hops: tuple[SampledHop, ...]
    links: CandidateLinks | None
    """What it scores, in a batch of links."""

    @property
    def level_counts(self) -> list[int]:
        """Its vertices at each level."""
        return [*(hop.num_inputs for hop in self.hops), self.num_own]

    @property
    def routes(self) -> list[Route]:
        """Which rows go where, as ranks ask for them."""
        found = [self.links.route if self.links else None, *(hop.route for hop in reversed(self.hops))]
        return [route for route in found if route]

    @property
    def counts(self) -> dict[str, int]:
        """How much it is, as the record says it."""
        edges = sum(hop.block.num_edges for hop in self.hops)
        return {"edges": edges, "vertices": sum(self.level_counts), "rows_loaded": len(self.rows)}


class RowLookup(NamedTuple):
    """Where vertices are that a rank reads."""

    inputs: Tensor
    """int64 [n]: targets, and then those that it has for itself, or for other ranks; ascending behind the targets."""
    fetched: Tensor
    """int64 [h], those that other ranks have, by owner, ascending in each."""
    received: tuple[int, ...]
    """How many of them are of each rank."""
    places: Tensor
    """int32 [E], where each that was asked for stands among the inputs and then the fetched."""
    route: Route | None
    """Which rows go where; None: no rank asks for any."""


Asking = Generator[Requests, Requests, Value]
"""Yields what a rank asks the others for, and is sent what they ask of it."""


@dataclass(frozen=True, kw_only=True)
class BatchSampler:
    """Draws mini-batches of a graph's training vertices, or of its links."""

    graph: Graph
    size: int
    """Ranks."""
    part: Tensor | None
    """int32 [N], who draws for each vertex; None: each rank for all sources of its own share of the batch."""
    fanouts: Sequence[Fanout]
    """In-edges that are drawn for a vertex, from the batch's own vertices outward."""
    batch_size: int | None
    """Vertices of a batch on all ranks, or links; None: all."""
    method: str
    seed: int
    dependency: int = 1
    """Batches over which the draws of `labor` change; 1: each draws anew."""
    links: Links | None = None
    """What batches are of; None: of vertices."""
    num_negatives: int = 1
    """Pairs drawn for each link."""

    @cached_property
    def training_vertices(self) -> Tensor:
        """Those with a label to learn from: int64, ascending."""
        labelled = self.graph.labelled("train")
        assert labelled is not None
        return labelled.nonzero().view(-1)

    @property
    def examples(self) -> Tensor:
        """What is trained: int64 [t], vertices, or [t, 3], links."""
        return self.training_vertices if self.links is None else self.links.train

    @property
    def same_every_step(self) -> bool:
        """Whether every step is on the same vertices, all that train, and whole neighbourhoods. Negatives change."""
        return self.links is None and self.batch_size is None and self.takes_all_edges

    @property
    def takes_all_edges(self) -> bool:
        """Whether neighbourhoods are whole."""
        return all(one == ALL if isinstance(one, int) else set(one) == {ALL} for one in self.fanouts)

    def batches(self, epoch: int) -> list[Tensor]:
        """The examples of each batch of an epoch, in their order."""
        return epoch_batches(self.examples, self._size, seed=self.seed, epoch=epoch, ids=self.graph.ids)

    @property
    def _size(self) -> int:
        return self.batch_size or len(self.examples)

    def rank_examples(self, examples: Tensor, rank: int) -> Tensor:
        """Those of a batch's vertices that a rank answers for, or its links whose sources it answers for."""
        first = examples if self.links is None else examples[:, 0]
        return examples[rank :: self.size] if self.part is None else examples[self.part[first] == rank]

    def sample(self, examples: Tensor, rank: int, epoch: int, number: int) -> Asking[SampledBatch]:
        """A rank's share of a batch, all of whose ranks draw at once."""
        own, links = self.rank_examples(examples, rank), None
        if self.links is not None:
            pairs = self.links.candidates_of(own, negative_key(self.seed, epoch), self.num_negatives)
            own, _, _, places, route = yield from self._find(own.new_empty(0), pairs[:, :2].reshape(-1), rank)
            links = CandidateLinks(pairs=torch.cat([places.view(-1, 2), pairs[:, 2:]], 1), route=route)
        rows, hops = own, list[SampledHop]()
        for hop, fanout in enumerate(self.fanouts):
            made, rows = yield from self._hop(rows, rank, fanout, *self._keys(epoch, number, hop))
            hops.insert(0, made)
        return SampledBatch(rows=rows, num_own=len(own), hops=tuple(hops), links=links)

    def _keys(self, epoch: int, number: int, hop: int) -> tuple[int, KeyTransition | None]:
        """What a hop's draws are keyed by, and how far dependent ones are on the way to the next key."""
        if self.dependency == 1:
            return layer_key(self.seed, epoch, number, hop), None
        batch = epoch * -(-len(self.examples) // self._size) + number
        return dependent_batch_key(self.seed, DRAW, hop, batch=batch, kappa=self.dependency)

    def _hop(
        self, targets: Tensor, rank: int, fanout: Fanout, drawn: int, transition: KeyTransition | None
    ) -> Asking[tuple[SampledHop, Tensor]]:
        """The block of one aggregate, and the vertices of its inputs."""
        graph, edges = self.graph, self.graph.in_edges
        sample = sample_layer(
            edges,
            targets,
            fanout,
            key=drawn,
            method=self.method,
            transition=transition,
            ids=graph.ids,
            edge_type=graph.edge_type,
        )
        inputs, fetched, received, places, route = yield from self._find(targets, sample.sources, rank)
        hop = SampledHop(
            block=Adjacency(
                indptr=sample.indptr,
                indices=places,
                num_sources=len(inputs) + len(fetched),
                weight=self._weight(sample),
            ),
            num_inputs=len(inputs),
            fetched=fetched,
            received=received,
            first_edges=edges.indptr[targets],
            sample=sample,
            route=route,
        )
        return hop, inputs

    def _find(self, targets: Tensor, vertices: Tensor, rank: int) -> Asking[RowLookup]:
        """Where vertices are that a rank reads: among its targets, others of its own, or with other ranks, as it asks.

        targets: int64, distinct. vertices: int32 or int64 [E].
        """
        places, found = self._relabeller.relabel(targets, vertices)
        if self.part is None:
            return RowLookup(torch.cat([targets, found]), found[:0], (0,) * self.size, places, None)
        owner = self.part[found]
        here, others = owner == rank, (owner != rank).nonzero().view(-1)
        others = others[owner[others].argsort(stable=True)]
        fetched = Requests(found[others], torch.bincount(owner[others], minlength=self.size).tolist())
        asked = yield fetched
        rows, more = self._relabeller.relabel(targets, torch.cat([found[here], asked.vertices]))
        own_rows, asked_rows = rows.split([len(found) - len(others), len(asked.vertices)])
        inputs, received = torch.cat([targets, more]), tuple(fetched.counts)
        place = torch.arange(len(targets) + len(found), dtype=torch.int32)
        place[len(targets) :][here] = own_rows
        place[len(targets) :][others] = torch.arange(len(others), dtype=torch.int32) + len(inputs)
        route = Route(rows=asked_rows.long(), sent=tuple(asked.counts), received=received, num_rows=len(inputs))
        return RowLookup(inputs, fetched.vertices, received, place[places], route)

    @cached_property
    def _relabeller(self) -> Relabeller:
        return Relabeller(self.graph.num_vertices)

    def _weight(self, sample: SampledEdges) -> Tensor | None:
        """The weights of the edges, by one over the chance of each to be drawn where that differs in a row."""
        weight = self.graph.in_edges.weight
        weight = None if weight is None else weight[sample.edge_ids]
        if sample.edge_scale is None:
            return weight
        return sample.edge_scale if weight is None else weight * sample.edge_scale.to(weight.dtype)


def exchange_requests(asking: Asking[Value], group: Group) -> Value:
    """Runs one rank's generator, whose requests go to the other ranks; all of them call it."""
    one_each = [1] * group.size
    reply: Requests | None = None
    while True:
        try:
            wanted = next(asking) if reply is None else asking.send(reply)
        except StopIteration as done:
            value: Value = done.value
            return value
        counts = group.all_to_all(torch.tensor(wanted.counts), one_each, one_each, tag="sampling").tolist()
        vertices = group.all_to_all(wanted.vertices, wanted.counts, counts, tag="sampling")
        reply = Requests(vertices, counts)


def exchange_requests_locally(asking: Sequence[Asking[Value]]) -> list[Value]:
    """Runs the generators of all ranks in one process."""
    found: dict[int, Value] = {}
    replies: list[Requests | None] = [None] * len(asking)
    while len(found) < len(asking):
        wanted = []
        for rank, (one, reply) in enumerate(zip(asking, replies, strict=True)):
            try:
                wanted.append(next(one) if reply is None else one.send(reply))
            except StopIteration as done:
                found[rank] = done.value
        replies = [_asked_of(wanted, rank) for rank in range(len(wanted))] if wanted else replies
    return [found[rank] for rank in range(len(asking))]


def _asked_of(wanted: Sequence[Requests], rank: int) -> Requests:
    parts = [one.vertices.split(one.counts)[rank] for one in wanted]
    return Requests(torch.cat(parts), [len(part) for part in parts])

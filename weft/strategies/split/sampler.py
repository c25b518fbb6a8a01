"""Mini-batch: its vertices or links, and the in-edges sampled hop by hop from the last (GSplit, sections 3 and 4).

A rank samples only for its own vertices. It sends the ids of other sources to their owners, which sample for them at
the next hop. Samples are keyed by seed, step, hop and vertex, and so are the same on any number of ranks.
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
    DRAW,
    Fanout,
    KeyTransition,
    Relabeller,
    SampledEdges,
    dependent_batch_key,
    epoch_batches,
    layer_key,
    sample_layer,
    takes_all,
)
from weft.partition import Dependencies, Hop
from weft.strategies.base import CandidateLinks

Value = TypeVar("Value")


class Requests(NamedTuple):
    """Vertices whose rows a rank requests from others, or that others request from it."""

    vertices: Tensor
    """Vertices sorted by the other rank, ascending for each, int64 [h]."""
    counts: list[int]
    """Number of vertices for each other rank."""


@dataclass(frozen=True, kw_only=True)
class SampledHop(Hop):
    """One hop over the sampled in-edges of some vertices."""

    sample: SampledEdges
    """The sampled edges."""
    route: Route | None
    """Rows that ranks exchange before the hop; None if no rank requests any."""

    @cached_property
    def edge_ids(self) -> Tensor:
        return self.sample.edge_ids


@dataclass(frozen=True, kw_only=True)
class SampledBatch(Dependencies):
    """Part of a mini-batch of one rank."""

    hops: tuple[SampledHop, ...]
    """Sampled blocks, in the order of the model's aggregates."""
    links: CandidateLinks | None
    """Links that the rank scores, in a batch of links."""

    @property
    def level_counts(self) -> list[int]:
        """Number of the rank's vertices at each layer boundary."""
        return [*(hop.num_inputs for hop in self.hops), self.num_own]

    @property
    def routes(self) -> list[Route]:
        """Rows that ranks exchange, in the order in which they request them."""
        routes = [self.links.route if self.links else None, *(hop.route for hop in reversed(self.hops))]
        return [route for route in routes if route]

    @property
    def counts(self) -> dict[str, int]:
        """Size of the batch, for the record."""
        edges = sum(hop.block.num_edges for hop in self.hops)
        return {"edges": edges, "vertices": sum(self.level_counts), "rows_loaded": len(self.rows)}


class RowLookup(NamedTuple):
    """Location of the rows of vertices that a rank reads."""

    inputs: Tensor
    """Vertices of the input rows, int64 [n].

    The targets come first, then the rank's other vertices that it or another rank reads, ascending.
    """
    fetched: Tensor
    """Vertices fetched from other ranks, int64 [h], sorted by owner and then by id."""
    received: tuple[int, ...]
    """Number of fetched vertices by owner."""
    positions: Tensor
    """Position of each source in the concatenation of `inputs` and `fetched`, int32 [E]."""
    route: Route | None
    """Rows that ranks exchange; None if no rank requests any."""


RequestGenerator = Generator[Requests, Requests, Value]
"""Generator that yields the requests of a rank to others, and is sent the requests of others to this rank."""


@dataclass(frozen=True, kw_only=True)
class BatchSampler:
    """Sampler of mini-batches of a graph's training vertices, links or labelled edges."""

    graph: Graph
    """Graph to sample from."""
    size: int
    """Number of ranks."""
    part: Tensor | None
    """Rank that samples for each vertex, int32 [N].

    None: each rank samples for all sources of its own part of the batch.
    """
    fanouts: Sequence[Fanout]
    """Number of in-edges sampled per vertex at each hop, from the batch outwards."""
    batch_size: int | None
    """Vertices (or links) of a batch on all ranks; None: all."""
    method: str
    """Method by which edges are sampled."""
    seed: int
    """Seed of all samples."""
    accumulate: int = 1
    """Number of consecutive batches of an optimizer step.

    They share random keys, so a vertex has the same sampled edges as in one batch that joins them.
    """
    dependency: int = 1
    """Number of batches over which the samples of `labor` change; 1: independent samples."""
    pairs: Tensor | None = None
    """Links or labelled edges that batches consist of, int64 [t, 3]; the first two columns are their endpoints.

    None: batches of vertices.
    """
    links: Links | None = None
    """Draws negative samples for the pairs; None: there are none."""
    num_negatives: int = 1
    """Number of negative samples for each link."""
    keep_sources: bool = False
    """True if negative samples keep the source of their link."""

    @cached_property
    def training_vertices(self) -> Tensor:
        """Labelled training vertices, int64, ascending."""
        labelled = self.graph.labelled("train")
        assert labelled is not None
        return labelled.nonzero().view(-1)

    @property
    def examples(self) -> Tensor:
        """Training examples: vertices, int64 [t], or links or labelled edges, int64 [t, 3]."""
        return self.training_vertices if self.pairs is None else self.pairs

    @property
    def same_every_step(self) -> bool:
        """True if each step has all training vertices and whole neighbourhoods, so that all steps are alike."""
        return self.pairs is None and self.batch_size is None and self.takes_all_edges

    @property
    def takes_all_edges(self) -> bool:
        """True if neighbourhoods are whole."""
        return all(map(takes_all, self.fanouts))

    def batches(self, epoch: int) -> list[Tensor]:
        """Return the examples of each batch of an epoch, in order."""
        return epoch_batches(self.examples, self._size, seed=self.seed, epoch=epoch, ids=self.graph.ids)

    @property
    def _size(self) -> int:
        return self.batch_size or len(self.examples)

    def rank_examples(self, examples: Tensor, rank: int) -> Tensor:
        """Return the vertices or links of a batch that a rank is responsible for.

        With a partition, these are its vertices, or the links whose source it owns; else every P-th one.

        Args:
            examples: Examples of the batch.
            rank: The rank.
        """
        first = examples if self.pairs is None else examples[:, 0]
        return examples[rank :: self.size] if self.part is None else examples[self.part[first] == rank]

    def sample(self, examples: Tensor, rank: int, epoch: int, number: int) -> RequestGenerator[SampledBatch]:
        """Sample a rank's part of a batch, as a generator; all ranks must run it at the same time.

        Args:
            examples: Examples of the batch on all ranks.
            rank: The rank.
            epoch: Number of the epoch.
            number: Number of the batch in the epoch.

        Yields:
            The vertices that the rank requests from others; it must be sent those that others request from it.

        Returns:
            The rank's part of the batch.
        """
        owned, links = self.rank_examples(examples, rank), None
        if self.pairs is not None:
            pairs = owned
            if self.links is not None:
                draw = negative_key(self.seed, epoch)
                pairs = self.links.candidates_of(owned, draw, self.num_negatives, keep_sources=self.keep_sources)
            owned, _, _, positions, route = yield from self._find(owned.new_empty(0), pairs[:, :2].reshape(-1), rank)
            links = CandidateLinks(pairs=torch.cat([positions.view(-1, 2), pairs[:, 2:]], 1), route=route)
        rows, hops = owned, list[SampledHop]()
        for hop, fanout in enumerate(self.fanouts):
            sampled, rows = yield from self._hop(rows, rank, fanout, *self._keys(epoch, number, hop))
            hops.insert(0, sampled)
        return SampledBatch(rows=rows, num_own=len(owned), hops=tuple(hops), links=links)

    def _keys(self, epoch: int, number: int, hop: int) -> tuple[int, KeyTransition | None]:
        """Return the random key of a hop's samples and, for dependent batches, the transition to the next key."""
        step = number // self.accumulate
        if self.dependency == 1:
            return layer_key(self.seed, epoch, step, hop), None
        batch = epoch * -(-len(self.examples) // (self._size * self.accumulate)) + step
        return dependent_batch_key(self.seed, DRAW, hop, batch=batch, kappa=self.dependency)

    def _hop(
        self, targets: Tensor, rank: int, fanout: Fanout, random_key: int, transition: KeyTransition | None
    ) -> RequestGenerator[tuple[SampledHop, Tensor]]:
        """Sample the block of one aggregate, and return it with the vertices of its inputs."""
        graph, edges = self.graph, self.graph.in_edges
        sample = sample_layer(
            edges,
            targets,
            fanout,
            key=random_key,
            method=self.method,
            transition=transition,
            ids=graph.ids,
            edge_type=graph.edge_type,
        )
        inputs, fetched, received, positions, route = yield from self._find(targets, sample.sources, rank)
        hop = SampledHop(
            block=Adjacency(
                indptr=sample.indptr,
                indices=positions,
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

    def _find(self, targets: Tensor, vertices: Tensor, rank: int) -> RequestGenerator[RowLookup]:
        """Locate the rows of vertices: among the targets, other vertices of the rank, or on other ranks.

        Args:
            targets: Distinct vertices, int64.
            vertices: Vertices that the rank reads, int32 or int64 [E].
            rank: The rank.
        """
        positions, new_vertices = self._relabeller.relabel(targets, vertices)
        if self.part is None:
            return RowLookup(torch.cat([targets, new_vertices]), new_vertices[:0], (0,) * self.size, positions, None)
        # 1. Request the vertices of other ranks from their owners; get those that the others request.
        # 2. Number the inputs: targets, own vertices, requested vertices. Fetched vertices follow.
        # 3. Translate the vertices that are read into these positions.
        owner = self.part[new_vertices]
        is_own, others = owner == rank, (owner != rank).nonzero().view(-1)
        others = others[owner[others].argsort(stable=True)]
        requests = Requests(new_vertices[others], torch.bincount(owner[others], minlength=self.size).tolist())
        requested = yield requests
        rows, more_inputs = self._relabeller.relabel(targets, torch.cat([new_vertices[is_own], requested.vertices]))
        own_rows, requested_rows = rows.split([len(new_vertices) - len(others), len(requested.vertices)])
        inputs, received = torch.cat([targets, more_inputs]), tuple(requests.counts)
        position = torch.arange(len(targets) + len(new_vertices), dtype=torch.int32)
        position[len(targets) :][is_own] = own_rows
        position[len(targets) :][others] = torch.arange(len(others), dtype=torch.int32) + len(inputs)
        route = Route(rows=requested_rows.long(), sent=tuple(requested.counts), received=received, num_rows=len(inputs))
        return RowLookup(inputs, requests.vertices, received, position[positions], route)

    @cached_property
    def _relabeller(self) -> Relabeller:
        return Relabeller(self.graph.num_vertices)

    def _weight(self, sample: SampledEdges) -> Tensor | None:
        """Return the weights of sampled edges.

        If the sampling probability differs within a row, weights are divided by it.
        """
        weight = self.graph.in_edges.weight
        weight = None if weight is None else weight[sample.edge_ids]
        if sample.edge_scale is None:
            return weight
        return sample.edge_scale if weight is None else weight * sample.edge_scale.to(weight.dtype)


def exchange_requests(generator: RequestGenerator[Value], group: Group) -> Value:
    """Run the sampling generator of this rank and exchange its requests with other ranks; all ranks must call it.

    Args:
        generator: The generator.
        group: The ranks.

    Returns:
        The result of the generator.
    """
    one_each = [1] * group.size
    reply: Requests | None = None
    while True:
        try:
            requests = next(generator) if reply is None else generator.send(reply)
        except StopIteration as done:
            value: Value = done.value
            return value
        counts = group.all_to_all(torch.tensor(requests.counts), one_each, one_each, tag="sampling").tolist()
        vertices = group.all_to_all(requests.vertices, requests.counts, counts, tag="sampling")
        reply = Requests(vertices, counts)


def exchange_requests_locally(generators: Sequence[RequestGenerator[Value]]) -> list[Value]:
    """Run the sampling generators of all ranks in one process, and return their results."""
    results: dict[int, Value] = {}
    replies: list[Requests | None] = [None] * len(generators)
    while len(results) < len(generators):
        requests = []
        for rank, (generator, reply) in enumerate(zip(generators, replies, strict=True)):
            try:
                requests.append(next(generator) if reply is None else generator.send(reply))
            except StopIteration as done:
                results[rank] = done.value
        replies = [_requests_to(requests, rank) for rank in range(len(requests))] if requests else replies
    return [results[rank] for rank in range(len(generators))]


def _requests_to(requests: Sequence[Requests], rank: int) -> Requests:
    """Return the requests of all ranks to one rank."""
    parts = [request.vertices.split(request.counts)[rank] for request in requests]
    return Requests(torch.cat(parts), [len(part) for part in parts])

"""Vertices that ranks compute and fetch at each layer in vertex parallelism, and the sizes of their blocks."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from weft.data import Adjacency
from weft.nn import (
    BlockSize,
    GraphOperation,
    TypedBlockSize,
    ViewTraits,
    Workload,
    embeddings,
    is_embedded,
)
from weft.parallel.blocks.blocks import BlockStats, is_sum
from weft.parallel.blocks.embedding_rows import recomputed_by_owner
from weft.partition import Caching, Choice, Dependencies, make_dependencies, range_parts
from weft.runtime.native import Allocate
from weft.utils.errors import InputError

MAX_LEVELS = 100
"""Limit of aggregates with caching, since a vertex's layer boundary is stored in an int8."""


class VertexBlocks:
    """Assignment of vertices, with their in-edges, to ranks, and the blocks that follow from it.

    A rank computes its own vertices, and those remote sources that it caches; it fetches all others. What a rank needs
    is computed when it is first asked for.

    Args:
        work: The workload. If it has a receptive field, blocks contain only its rows.
        size: Number of ranks.
        partition: Rank of every vertex, int32 [N]; None: contiguous ranges.
        caching: Costs and limits that decide which remote sources are cached.
        traits: Properties of the strategy's views.
        covers: True if sums over fetched rows may fetch the fewest rows that can replace these.
        allocate: Allocates the sources of edges, see `make_dependencies`.

    Raises:
        InputError: The model has too many aggregates for caching.
    """

    def __init__(
        self,
        work: Workload,
        size: int,
        partition: Tensor | None,
        caching: Caching,
        traits: ViewTraits,
        *,
        covers: bool = False,
        allocate: Allocate | None = None,
    ) -> None:
        self.work, self.size, self.caching, self.traits, self.covers = work, size, caching, traits, covers
        self.allocate = allocate
        if len(caching.costs) > MAX_LEVELS and caching.ratio != 0:
            many = f"the model has {len(caching.costs)} aggregates, but caching supports at most {MAX_LEVELS}"
            raise InputError(f"{many}: use {traits.alternative}" if traits.alternative else many)
        self._partition = partition
        self._dependencies: dict[int, Dependencies] = {}
        self._choices: dict[int, Choice] = {}

    def restrict(self, work: Workload) -> VertexBlocks:
        """Return the blocks of the same ranks, with the same cached sources, on a receptive field.

        Args:
            work: The workload with the receptive field.
        """
        traits = self.traits._replace(shrinks_rows=True)
        blocks = VertexBlocks(
            work, self.size, self.part, self.caching, traits, covers=self.covers, allocate=self.allocate
        )
        blocks._choices = self._choices
        return blocks

    @property
    def part(self) -> Tensor:
        """Rank of every vertex, int32 [N]."""
        if self._partition is not None:
            return self._partition
        if self.size == 1:  # of a large graph, better computed twice than stored
            return torch.zeros(self.work.stats.num_vertices, dtype=torch.int32)
        return self._ranges

    @cached_property
    def _ranges(self) -> Tensor:
        return range_parts(self.work.graph.in_edges, self.size)

    def dependencies(self, rank: int) -> Dependencies:
        """Return the vertices that a rank computes itself and those that it fetches, for each layer."""
        if rank not in self._dependencies:
            if rank not in self._choices:
                edges, caching = self.work.graph.in_edges, self.caching_of(rank)
                self._choices[rank] = Choice.of(edges, self.part, rank, caching)
            field = self.work.receptive_field
            last_read = None if field is None else field.last_boundary
            self._dependencies[rank] = self._dependencies_by(
                self.caching, rank, choice=self._choices[rank], last_read=last_read
            )
        return self._dependencies[rank]

    @property
    def all_dependencies(self) -> list[Dependencies]:
        """Dependencies of all ranks, from which follows what each rank sends."""
        return [self.dependencies(rank) for rank in range(self.size)]

    def caching_of(self, rank: int) -> Caching:
        """Return the costs of a rank.

        Fetching a row for a sum costs less if partial sums replace source rows: by the ratio of the rows that are sent.
        """
        caching, covered = self.caching, sorted(self.covered)
        if caching.ratio is not None or not covered:
            return caching
        (hop,) = self._dependencies_by(replace(caching, costs=caching.costs[:1], ratio=0.0), rank).hops
        costs = caching.costs.clone()
        costs[covered, 2] *= sum(hop.cover.received) / max(len(hop.fetched), 1)
        return replace(caching, costs=costs)

    def _dependencies_by(self, caching: Caching, rank: int, **options: Any) -> Dependencies:
        return make_dependencies(
            self.work.graph.in_edges, self.part, rank, self.size, caching, allocate=self.allocate, **options
        )

    def release(self) -> None:
        """Release the dependencies, which grow with the graph and can be computed again."""
        self._dependencies.clear()
        self._choices.clear()

    @cached_property
    def covered(self) -> frozenset[int]:
        """Numbers of the aggregates that are sums over fetched rows and fetch the fewest rows that can replace them."""
        if not (self.covers and self.work.optimisations.cover):
            return frozenset()
        operations = self.work.outline(self.traits, training=True)
        return frozenset(number for op in operations for number in op.hops if is_sum(op, number))

    def is_covered(self, op: GraphOperation, number: int) -> bool:
        """Return whether a step of an aggregate receives partial sums of other ranks.

        Args:
            op: The aggregate.
            number: Number of the aggregate over edges.
        """
        return number in self.covered and is_sum(op, number)

    def sizes(self, rank: int, op: GraphOperation, number: int) -> BlockStats:
        """Return the sizes of a rank's block.

        Args:
            rank: The rank.
            op: The aggregate.
            number: Number of the aggregate over edges.
        """
        hops = [needed.hops[number] for needed in self.all_dependencies]
        covers = [hop.cover for hop in hops] if self.is_covered(op, number) else []
        received = [each.received for each in covers or hops]
        block = covers[rank].block if covers else hops[rank].block
        overlap = self.work.optimisations.overlap
        return BlockStats(
            num_edges=block.num_edges + sum(cover.summed[rank] for cover in covers),
            num_local_edges=num_own_edges(block, hops[rank].num_inputs) if overlap else 0,
            num_targets=block.num_targets,
            num_sources=block.num_sources,
            fresh_share=block.fresh_share,
            num_sent=sum(counts[rank] for counts in received),
            num_received=sum(received[rank]),
            exchanged=any(len(hop.fetched) for hop in hops),
        )

    def embedding_exchange(self, rank: int) -> BlockStats:
        """Return the number of embedding rows that a rank sends and receives."""
        if not embeddings(self.work.model):
            return BlockStats(num_edges=0)
        embedded = is_embedded(self.work.graph)
        recomputed = [
            recomputed_by_owner(embedded, self.part, needed.rows, owner, self.size)[1]
            for owner, needed in enumerate(self.all_dependencies)
        ]
        return BlockStats(
            num_edges=0,
            num_sent=int(sum(counts[rank] for counts in recomputed)),
            num_received=int(recomputed[rank].sum()),
            exchanged=any(bool(counts.any()) for counts in recomputed),
        )

    def layer_rows(self, rank: int) -> Sequence[Tensor]:
        """Return the vertices whose rows a rank has before each aggregate over edges, and at the end."""
        needed = self.dependencies(rank)
        return [*(needed.rows[: hop.num_inputs] for hop in needed.hops), needed.owned]

    def layer_blocks(self, rank: int) -> Sequence[BlockSize]:
        """Return the size of each aggregate's block."""
        return [BlockSize.of(hop.block) for hop in self.dependencies(rank).hops]

    def typed_blocks(self, rank: int) -> Sequence[TypedBlockSize]:
        """Return the size of each aggregate's block by vertex type and relation."""
        needed, graph = self.dependencies(rank), self.work.graph
        sizes = []
        assert graph.edge_type is not None
        for hop in needed.hops:
            sources, edges = hop.sources(needed.rows), torch.stack(hop.block.edges())
            targets, relation = sources[: hop.block.num_targets], graph.edge_type[hop.edge_ids.long()]
            sizes.append(TypedBlockSize.of(graph, sources, targets, edges, relation))
        return sizes

    def resident_edges(self, rank: int) -> Sequence[tuple[int, Collection[int]]]:
        """Return the number of edges of each block of a rank, and the numbers of the aggregates over it.

        Sums over fetched rows have their edges a second time, sorted by the rank that sends the sources.
        """
        hops = self.dependencies(rank).hops
        blocks: dict[int, tuple[int, set[int]]] = {id(hop.block): (hop.block.num_edges, set()) for hop in hops}
        slices: dict[int, tuple[int, set[int]]] = {}
        for op in self.work.outline(self.traits, training=True):
            for number in op.hops:
                block = self.sizes(rank, op, number)
                if is_sum(op, number) and block.exchanged:
                    slices.setdefault(id(hops[number]), (block.num_edges, set()))[1].add(number)
                else:
                    blocks[id(hops[number].block)][1].add(number)
        return [*blocks.values(), *slices.values()]


def num_own_edges(block: Adjacency, num_inputs: int) -> int:
    """Return the number of edges of a block whose sources are its inputs.

    Args:
        block: The edges.
        num_inputs: Number of input rows.
    """
    return int((block.indices < num_inputs).sum())

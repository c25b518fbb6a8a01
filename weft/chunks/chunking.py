"""How the aggregates over a graph are cut into chunks, the same on every rank (NeutronTP, section 4.2.1)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from weft.chunks.bounds import Chunk, cut_evenly, cut_to_fit, make_chunks
from weft.chunks.exchange_plan import AssignedRelations, ExchangePlan
from weft.data import Adjacency
from weft.nn import RelationIndex, SubTopology, WorkingSet


class Chunking:
    """How the aggregates over a graph are cut into chunks, the same on every rank.

    limit: of bytes on the device; None: none. count: of chunks at least. pipeline: whether the rows of neighbouring
    chunks cross the network while one is worked on. edge_type: integer [E], of num_relations, for those by relation.
    """

    def __init__(
        self,
        adjacency: Adjacency,
        *,
        limit: int | None = None,
        count: int = 0,
        pipeline: bool = True,
        edge_type: Tensor | None = None,
        num_relations: int = 0,
    ) -> None:
        self.adjacency, self.limit, self.count, self.pipeline = adjacency, limit, count, pipeline
        self.edge_type, self.num_relations = edge_type, num_relations
        self._bounds: dict[WorkingSet, tuple[int, ...]] = {}
        self._chunks: dict[tuple[int, ...], tuple[Chunk, ...]] = {}
        self._relations: dict[tuple[int, int], AssignedRelations] = {}

    def chunks(self, needs: WorkingSet) -> tuple[Chunk, ...]:
        """The chunks of an aggregate: of even size where those fit, else as large as do."""
        if needs not in self._bounds:
            self._bounds[needs] = self._cut(needs)
        bounds = self._bounds[needs]
        if bounds in self._chunks:
            return self._chunks[bounds]
        chunks = make_chunks(self.adjacency, bounds)
        if self.limit is None:  # else whoever places them has copies in files
            self._chunks[bounds] = chunks
        return chunks

    def relations(self, rank: int, size: int) -> AssignedRelations:
        """The relation rows, assigned to `size` ranks."""
        if (rank, size) not in self._relations:
            assert self.edge_type is not None
            rows = RelationIndex.of(self.adjacency, self.edge_type, self.num_relations)
            home, place = rows.at_home(rank, size, self.num_relations)
            self._relations[rank, size] = AssignedRelations(rows=rows, home=home, place=place, rank=rank, size=size)
        return self._relations[rank, size]

    def exchange_plan(
        self,
        chunks: Sequence[Chunk],
        relations: AssignedRelations | None,
        rank: int,
        size: int,
        device: torch.device | str = "cpu",
    ) -> ExchangePlan:
        """What crosses with the chunks; relations: whose rows the results are, if not those of vertices."""
        return ExchangePlan.of(chunks, rank, size, device, pipeline=self.pipeline, relations=relations)

    def _cut(self, needs: WorkingSet) -> tuple[int, ...]:
        if self.limit is not None and not self.count:
            return cut_to_fit(self.adjacency, needs, self.limit)[0]
        evenly = cut_evenly(self.adjacency, self.count)
        if self.limit is None:
            return evenly
        largest = max(needs.bytes(chunk.block) for chunk in make_chunks(self.adjacency, evenly))
        return evenly if largest <= self.limit else cut_to_fit(self.adjacency, needs, self.limit)[0]


class RelationTopology(SubTopology):
    """Some in-edges of relation rows."""

    @property
    def relation_edges(self) -> Adjacency:
        return self.adjacency

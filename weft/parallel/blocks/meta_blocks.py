"""Blocks of a rank without data, on which a step runs so that the memory that it needs is known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from weft.comm import EdgeSlice, EdgeSlices, Group, Halo, Route
from weft.data import Adjacency, Graph
from weft.kernels import Scale
from weft.nn import (
    GraphOperation,
    MetaTopology,
    Sum,
    Topology,
    Workload,
    embeddings,
    is_embedded,
    meta_adjacency,
)
from weft.parallel.blocks.blocks import Block
from weft.parallel.blocks.embedding_rows import EmbeddedHalo
from weft.parallel.blocks.make_blocks import MakeHalo, halo_kinds
from weft.parallel.blocks.vertex_blocks import VertexBlocks
from weft.partition import Cover, Hop

PIECE_TARGETS = 1 << 16
"""Number of targets whose edges `sizes_by_sender` reads at once."""


@dataclass(frozen=True, eq=False)
class MetaRank:
    """A rank whose rows have no data."""

    work: Workload
    """The workload."""
    group: Group
    """The rank, on the meta device."""

    @property
    def graph(self) -> Graph:
        """The graph."""
        return self.work.graph

    @property
    def topology(self) -> Topology:
        """Topology of the whole graph, without data."""
        stats = self.work.stats
        return MetaTopology(self.work, stats.num_vertices, stats.num_vertices, stats.num_edges)

    def features(self, vertices: Tensor) -> Tensor:
        """Return new rows for the features of some vertices."""
        shape = len(vertices), self.work.stats.num_features
        return torch.empty(shape, dtype=self.work.row_dtype, device="meta")


class MetaBlock(MetaTopology, Block):
    """Block of a rank without data.

    Args:
        hop: Edges and rows of the aggregate.
        placed: The rank.
        num_relation_rows: Number of relation rows of the targets.
        halo: Exchange of missing source rows; None if there is none.
        least_halo: Exchange of the fewest rows that can replace the halo of sums; None if there is none.
    """

    def __init__(
        self, hop: Hop, placed: MetaRank, num_relation_rows: int, halo: Halo | None, least_halo: Halo | None
    ) -> None:
        sizes, relation_rows = (hop.block.num_sources, hop.block.num_targets, hop.block.num_edges), (num_relation_rows,)
        MetaTopology.__init__(self, placed.work, *sizes, relation_rows=relation_rows)
        self.hop, self.placed, self.halo, self.least_halo = hop, placed, halo, least_halo
        self.sources, self.targets = self.ids, self.target_ids
        self.features = placed.features(self.ids)
        if self.sums_need_halo:
            self._edge_slices = meta_slices(placed, hop, hop if least_halo is None else hop.cover)

    @property
    def num_product_edges(self) -> int:
        return self.adjacency.num_edges

    def slices(self, op: Sum, dtype: torch.dtype) -> EdgeSlices:
        del op, dtype
        return self._edge_slices

    def positions_in(self, other: Block) -> Tensor:
        del other
        return self.sources


def meta_blocks(
    placed: MetaRank,
    vertices: VertexBlocks,
    operations: Sequence[GraphOperation],
    relation_rows: Sequence[int],
    make_halo: MakeHalo,
) -> list[MetaBlock]:
    """Return the block of each aggregate on a rank, without data; see `make_blocks`.

    Args:
        placed: The rank.
        vertices: Vertices that each rank computes and fetches.
        operations: The model's outline.
        relation_rows: Number of relation rows of each aggregate's targets; empty if there are no relations.
        make_halo: Function that creates a halo.
    """
    group = placed.group
    ranks = [needed.hops for needed in vertices.all_dependencies]
    hops = ranks[group.rank]
    numbers = range(len(hops))
    kinds = halo_kinds(
        operations,
        exchanged=[sum(len(each[number].fetched) for each in ranks) for number in numbers],
        shared=[number > 0 and all(each[number] is each[number - 1] for each in ranks) for number in numbers],
        summed=[
            sum(sum(each[number].cover.summed) for each in ranks) if number in vertices.covered else 0
            for number in numbers
        ],
    )
    blocks: list[MetaBlock] = []
    for number, (hop, kind) in enumerate(zip(hops, kinds, strict=True)):
        if kind is None:
            blocks.append(blocks[-1])
            continue
        halo = least_halo = None
        if kind.least:
            covers = [each[number].cover for each in ranks]
            sent = tuple(cover.received[group.rank] for cover in covers)
            num_edges = sum(cover.requested_edges[group.rank] for cover in covers)
            sums = meta_adjacency(placed.work, hop.num_inputs, sum(sent), num_edges)
            route = Route.without_data(hop.num_inputs, sent, hop.cover.received, sums)
            least_halo = make_halo(route, group, f"least halo {number}")
        if kind.whole:
            sent = tuple(each[number].received[group.rank] for each in ranks)
            halo = make_halo(Route.without_data(hop.num_inputs, sent, hop.received), group, f"halo {number}")
        blocks.append(MetaBlock(hop, placed, relation_rows[number] if relation_rows else 0, halo, least_halo))
    return blocks


def meta_embedded_halo(placed: MetaRank, vertices: VertexBlocks) -> EmbeddedHalo | None:
    """Return the exchange of embedding rows on a rank, without data; see `make_embedded_halo`.

    Args:
        placed: The rank.
        vertices: Vertices that each rank computes and fetches.
    """
    work, group = placed.work, placed.group
    if not embeddings(work.model):
        return None
    embedded, part = is_embedded(work.graph), vertices.part
    stored = [((part == rank) & embedded).nonzero().view(-1) for rank in range(group.size)]
    rows = [needed.rows[embedded[needed.rows]] for needed in vertices.all_dependencies]
    if all(map(torch.equal, stored, rows)):
        return None
    sizes, (rank, others) = vertices.embedding_exchange(group.rank), (group.rank, [0] * (group.size - 1))
    halo = None
    if sizes.exchanged:
        route = Route.without_data(len(stored[rank]), (sizes.num_sent, *others), (sizes.num_received, *others))
        halo = Halo(route, group, name="embedding")
    return EmbeddedHalo(torch.empty(len(rows[rank]), dtype=torch.int64, device="meta"), halo)


def meta_slices(placed: MetaRank, hop: Hop, sums: Hop | Cover) -> EdgeSlices:
    """Return the edges of sums without data, sliced by the rank that sends their sources; see `Block.slices`.

    Args:
        placed: The rank.
        hop: The block.
        sums: The block, or its cover, whose edges and received rows the sums have.
    """
    work, by_rank = placed.work, placed.work.optimisations.ring
    counts = sums.received if by_rank else (sum(sums.received),)
    (num_local, _), *remote = sizes_by_sender(sums.block, hop.num_inputs, counts)
    slices = [
        EdgeSlice(
            adjacency=meta_adjacency(work, count, num_targets, num_edges),
            scale=Scale(),
            targets=torch.empty(num_targets, dtype=torch.int64, device="meta"),
            rank=sender if by_rank else None,
        )
        for sender, (count, (num_edges, num_targets)) in enumerate(zip(counts, remote, strict=True))
        if count
    ]
    local = meta_adjacency(work, hop.num_inputs, hop.block.num_targets, num_local)
    return EdgeSlices(local=local, scale=Scale(), remote=tuple(slices), weighted=False)


def sizes_by_sender(block: Adjacency, num_inputs: int, received: Sequence[int]) -> list[tuple[int, int]]:
    """Return the number of edges, and of their distinct targets, from a block's inputs and from each sender's rows.

    Args:
        block: The edges.
        num_inputs: Number of input rows, the first sources.
        received: Number of rows that each sender sends, the other sources.
    """
    num_senders = 1 + len(received)
    firsts = num_inputs + torch.tensor([0, *received]).cumsum(0)[:-1]  # first source of each sender but the inputs
    sizes = torch.zeros(2, num_senders, dtype=torch.int64)
    for first in range(0, block.num_targets, PIECE_TARGETS):
        degrees = block.degree[first : first + PIECE_TARGETS]
        begin, end = int(block.indptr[first]), int(block.indptr[first + len(degrees)])
        sender = torch.bucketize(block.indices[begin:end], firsts.to(block.indices.dtype), right=True)
        reached = torch.zeros(len(degrees), num_senders, dtype=torch.bool)
        reached[torch.arange(len(degrees)).repeat_interleave(degrees), sender] = True
        sizes += torch.stack([torch.bincount(sender, minlength=num_senders), reached.sum(0)])
    return [(num_edges, num_targets) for num_edges, num_targets in sizes.t().tolist()]

"""Blocks of a rank on the meta device, with which a step runs to estimate its memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

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
    """Process group of the ranks as this rank sees it, on the meta device: it sends nothing."""

    @property
    def graph(self) -> Graph:
        """The graph."""
        return self.work.graph

    @cached_property
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
        relation_rows: Number of relation rows of the targets by relation.
        halo: Exchange of missing source rows; None if there is none.
        least_halo: Exchange of the fewest rows that can replace the halo of sums; None if there is none.
        has_sums: True if the model has sums, whose edges are sliced by the rank that sends their sources.
    """

    def __init__(
        self,
        hop: Hop,
        placed: MetaRank,
        relation_rows: tuple[int, ...],
        halo: Halo | None,
        least_halo: Halo | None,
        *,
        has_sums: bool,
    ) -> None:
        sizes = hop.block.num_sources, hop.block.num_targets, hop.block.num_edges
        MetaTopology.__init__(self, placed.work, *sizes, relation_rows=(relation_rows,))
        self.hop, self.placed, self.halo, self.least_halo = hop, placed, halo, least_halo
        self.sources, self.targets = self.ids, self.target_ids
        self.features = placed.features(self.ids)
        if has_sums and self.sums_need_halo:
            sums = hop if least_halo is None else hop.cover
            self._edge_slices = meta_slices(placed.group, hop, sums, ring=placed.work.optimisations.ring)

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
    relation_rows: Sequence[tuple[int, ...]],
    make_halo: MakeHalo,
) -> list[MetaBlock]:
    """Return the block of each aggregate on a rank, without data; see `make_blocks`.

    Args:
        placed: The rank.
        vertices: Vertices that each rank computes and fetches.
        operations: The model's outline.
        relation_rows: Number of relation rows of each aggregate's targets by relation; empty: there are none.
        make_halo: Function that creates a halo.
    """
    group = placed.group
    hops_by_rank = [needed.hops for needed in vertices.all_dependencies]
    hops = hops_by_rank[group.rank]
    numbers = range(len(hops))
    kinds = halo_kinds(
        operations,
        exchanged=[sum(len(each[number].fetched) for each in hops_by_rank) for number in numbers],
        shared=[number > 0 and all(each[number] is each[number - 1] for each in hops_by_rank) for number in numbers],
        summed=[
            sum(sum(each[number].cover.summed) for each in hops_by_rank) if number in vertices.covered else 0
            for number in numbers
        ],
    )
    has_sums = any(isinstance(op.op, Sum) for op in operations)
    blocks: list[MetaBlock] = []
    for number, (hop, kind) in enumerate(zip(hops, kinds, strict=True)):
        if kind is None:
            blocks.append(blocks[-1])
            continue
        halo = least_halo = None
        if kind.least:
            covers = [each[number].cover for each in hops_by_rank]
            sent = tuple(cover.received[group.rank] for cover in covers)
            num_edges = sum(cover.requested_edges[group.rank] for cover in covers)
            sums = Adjacency.without_data(hop.num_inputs, sum(sent), num_edges)
            route = Route.without_data(hop.num_inputs, sent, hop.cover.received, sums)
            least_halo = make_halo(route, group, f"least halo {number}")
        if kind.whole:
            sent = tuple(each[number].received[group.rank] for each in hops_by_rank)
            halo = make_halo(Route.without_data(hop.num_inputs, sent, hop.received), group, f"halo {number}")
        counts = relation_rows[number] if relation_rows else ()
        blocks.append(MetaBlock(hop, placed, counts, halo, least_halo, has_sums=has_sums))
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


def meta_slices(group: Group, hop: Hop, sums: Hop | Cover, *, ring: bool) -> EdgeSlices:
    """Return the edges of sums without data, sliced by the rank that sends their sources; see `Block.slices`.

    Args:
        group: The ranks.
        hop: The block.
        sums: The block, or its cover if partial sums are received: supplies edges and received rows.
        ring: True for a slice for each sender, False for one slice.
    """
    counts = sums.received if ring else (sum(sums.received),)
    (num_local, _), *remote = sizes_by_sender(sums.block, hop.num_inputs, counts)
    senders = [(group.rank - step) % group.size for step in range(1, group.size)] if ring else [0]
    slices = []
    for sender in senders:
        if counts[sender]:
            num_edges, num_targets = remote[sender]
            adjacency = Adjacency.without_data(counts[sender], num_targets, num_edges)
            targets = torch.empty(num_targets, dtype=torch.int64, device="meta")
            rank = sender if ring else None
            slices.append(EdgeSlice(adjacency=adjacency, scale=Scale(), targets=targets, rank=rank))
    local = Adjacency.without_data(hop.num_inputs, hop.block.num_targets, num_local)
    return EdgeSlices(local=local, scale=Scale(), remote=tuple(slices), weighted=False)


def sizes_by_sender(block: Adjacency, num_inputs: int, received: Sequence[int]) -> list[tuple[int, int]]:
    """Count a block's edges and their distinct targets, by where the source's row comes from.

    Args:
        block: The edges.
        num_inputs: Number of input rows, the first sources.
        received: Number of rows that each sender sends, the other sources.

    Returns:
        Edges and targets for the input rows, then for each sender.
    """
    num_senders = 1 + len(received)  # the first are the inputs
    firsts = num_inputs + torch.tensor([0, *received]).cumsum(0)[:-1]  # first source of each sender but the inputs
    sizes, degree = torch.zeros(2, num_senders, dtype=torch.int64), block.degree
    for first in range(0, block.num_targets, PIECE_TARGETS):
        degrees = degree[first : first + PIECE_TARGETS]
        begin, end = int(block.indptr[first]), int(block.indptr[first + len(degrees)])
        sender = torch.bucketize(block.indices[begin:end], firsts.to(block.indices.dtype), right=True)
        reached = torch.zeros(len(degrees), num_senders, dtype=torch.bool)
        reached[torch.arange(len(degrees)).repeat_interleave(degrees), sender] = True
        sizes += torch.stack([torch.bincount(sender, minlength=num_senders), reached.sum(0)])
    return [(num_edges, num_targets) for num_edges, num_targets in sizes.t().tolist()]

"""Halo exchange of vertex parallelism (NeutronStar, section 2.2).

`Halos` exchanges the rows that a rank's blocks read from other ranks. `operations` returns the trace of these
exchanges, computed from the sizes of the blocks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from weft.comm import EdgeSlices, Group, Halo, slice_edges
from weft.cost import Operation
from weft.data import Graph
from weft.nn import Aggregate, GraphOperation, GraphView, Rows, SubTopology, Sum, Topology, Workload
from weft.parallel.blocks.embedding_rows import EmbeddedHalo
from weft.parallel.exchange import Exchange
from weft.parallel.operations import AggregateSize, aggregate
from weft.partition import Hop
from weft.runtime.kernel_call import KernelCall


class PlacedRows(Protocol):
    """Plan on a rank, as far as blocks need it: the whole graph on the host, and the rank's group."""

    @property
    def work(self) -> Workload:
        """The workload."""

    @property
    def group(self) -> Group:
        """The ranks."""

    @property
    def graph(self) -> Graph:
        """The graph."""

    @property
    def topology(self) -> Topology:
        """Topology of the whole graph."""

    def features(self, vertices: Tensor) -> Tensor:
        """Return the features of some vertices, on the group's device."""


class Block(SubTopology):
    """In-edges of one aggregate on this rank.

    Args:
        hop: Edges and rows of the aggregate.
        rows: Vertices of the rank's rows, int64; the first ones are the inputs of `hop`.
        placed: The plan on this rank, with topology and features of the whole graph on the host.
        halo: Exchange of missing source rows; None if no rank lacks any, or no operation needs them.
        least_halo: Exchange of the fewest rows that can replace the halo of sums; None if sums do without.
    """

    keeps_whole_scale = False
    sources: Tensor
    targets: Tensor

    def __init__(
        self, hop: Hop, rows: Tensor, placed: PlacedRows, halo: Halo | None, least_halo: Halo | None = None
    ) -> None:
        self.device = placed.group.device
        sources = hop.sources(rows)  # on the host
        adjacency = hop.block.cast(placed.work.dtype).to(self.device)
        super().__init__(adjacency, sources, sources[: adjacency.num_targets], placed.topology)
        self.hop, self.placed, self.halo, self.least_halo = hop, placed, halo, least_halo
        self._slices: dict[Sum, EdgeSlices] = {}
        self._positions: dict[Block, Tensor] = {}

    @cached_property
    def features(self) -> Tensor:
        """Features of the sources, kept for every epoch."""
        return self.placed.features(self.sources)

    @cached_property
    def edge_type(self) -> Tensor | None:
        types = self.placed.graph.edge_type
        return None if types is None else types[self.hop.edge_ids]

    @cached_property
    def edge_features(self) -> Tensor | None:
        features = self.placed.topology.edge_features_at(self.hop.edge_ids)
        return None if features is None else features.to(self.device)

    @property
    def sums_need_halo(self) -> bool:
        """True if sums over computed rows need rows of other ranks."""
        return self.least_halo is not None or self.halo is not None

    def product(self, view: GraphView, op: Sum, x: Tensor) -> Tensor:
        """Return a sum over the input rows and the rows of other ranks, and count its edges.

        Args:
            view: View that requests the sum.
            op: The sum.
            x: Input rows [n, F].
        """
        halo = self.least_halo or self.halo
        assert halo is not None
        y = halo.product(x, self.slices(op, x.dtype))
        view.count(y, self.num_product_edges)
        return y

    @property
    def num_product_edges(self) -> int:
        """Number of edges over which `product` sums, including those of partial sums for other ranks."""
        if self.least_halo is None:
            return self.adjacency.num_edges
        return self.hop.cover.block.num_edges + self.least_halo.route.num_summed

    def slices(self, op: Sum, dtype: torch.dtype) -> EdgeSlices:
        """Return the edges of a sum, sliced by the rank that has their source rows: first this rank, then each sender.

        Args:
            op: The sum.
            dtype: Data type of its scales.
        """
        if op not in self._slices:
            group, optimisations = self.placed.group, self.placed.work.optimisations
            ring = [(group.rank - step) % group.size for step in range(1, group.size)]
            block, received = self.adjacency, self.hop.received
            scale = self.scale(op.norm, op.weighted, dtype)
            if self.least_halo is not None:
                cover = self.hop.cover
                block, received = cover.block.cast(self.placed.work.dtype).to(self.device), cover.received
                if scale.source is not None:  # received rows have their sources' factors already
                    inputs = scale.source[: self.hop.num_inputs]
                    scale = scale._replace(source=torch.cat([inputs, inputs.new_ones(sum(received))]))
            self._slices[op] = slice_edges(
                block,
                self.hop.num_inputs,
                received,
                scale,
                weighted=op.weighted and self.has_weight,
                by_rank=ring if optimisations.ring else (),
            )
        return self._slices[op]

    def all_sources(self, *rows: Tensor) -> tuple[Tensor, ...]:
        """Return the rows of all sources: append the halo to the local input rows. All ranks must call it."""
        return rows if self.halo is None else self.halo.complete(*rows)

    def positions_in(self, other: Block) -> Tensor:
        """Return the position of each source among the sources of another block that has them all, int64."""
        if other not in self._positions:
            position = torch.empty(self.placed.graph.num_vertices, dtype=torch.int64)
            position[other.sources] = torch.arange(len(other.sources))
            self._positions[other] = position[self.sources].to(self.device)
        return self._positions[other]


class Halos(Exchange):
    """Exchange of vertex parallelism for one stage of the model. The first input rows of the stage are its targets.

    Args:
        blocks: Block of each step; the targets of the last one are the results.
        whole: Topology of the whole graph, for a stage without aggregates.
        row_ids: Original ids of the rank's rows, int64 [n].
        num_own: The rank is responsible for the first `num_own` rows.
        group: The ranks.
        embedded: Exchange of embedding rows; None if the rank stores all that it needs.
    """

    def __init__(
        self,
        blocks: tuple[Block, ...],
        whole: Topology,
        row_ids: Tensor,
        num_own: int,
        group: Group,
        embedded: EmbeddedHalo | None,
    ) -> None:
        super().__init__(blocks[0] if blocks else whole, row_ids, whole.adjacency.num_targets, group)
        self.blocks, self.num_own, self.embedded = blocks, num_own, embedded

    def targets(self, x: Tensor) -> Tensor:
        return x[: len(self.blocks[-1].targets)] if self.blocks else x

    def own_rows(self, x: Tensor) -> Tensor:
        return x[: self.num_own]

    def embed(self, weight: Tensor) -> Tensor:
        return self.embedded.fetch(weight) if self.embedded else weight

    def is_exchanged(self, view: GraphView, x: Tensor) -> bool:
        """Return whether source rows come over the network: those computed from constant features are local.

        Args:
            view: View that requests the aggregate.
            x: Rows that are aggregated.
        """
        return view.origin(x) == "rows"

    def block(self, view: GraphView, x: Tensor) -> tuple[Tensor, Tensor, int]:
        (block,) = self.blocks
        return self._sources(view, x, block, once=False), block.edge_index, len(block.targets)

    def aggregate(self, view: GraphView, op: Aggregate, rows: Rows, steps: int) -> Tensor:
        x = rows[op.first]
        if not op.plain:
            return self._aggregate_several(view, op, rows, steps)
        once = view.aggregates_once(x)
        for block in self.blocks[:steps]:
            if isinstance(op, Sum) and block.sums_need_halo and self.is_exchanged(view, x):
                x = block.product(view, op, x)
            else:
                x = view.run(op, {op.first: self._sources(view, x, block, once=once)}, 1, block)
        return x

    def _aggregate_several(self, view: GraphView, op: Aggregate, rows: Rows, steps: int) -> Tensor:
        """Run an aggregate that reads several tensors.

        The source rows of all tensors are exchanged together. Later steps exchange only the aggregated rows.
        """
        first_block, names = self.blocks[0], op.source
        source_rows = first_block.all_sources(*(rows[name] for name in names))
        op, rows = op.stepwise({**rows, **dict(zip(names, source_rows, strict=True))})
        x, previous, prepared = (
            rows[op.first],
            first_block,
            op.prepare(first_block, self._rows_at(first_block, op, rows)),
        )
        for step, block in enumerate(self.blocks[:steps]):
            x = block.all_sources(x)[0] if step else x
            if block is not previous:
                previous, prepared = block, op.prepare(block, self._rows_at(block, op, {**rows, op.first: x}))
            x = view.run(op, {**prepared, op.first: x}, 1, block)
        return x

    def _rows_at(self, block: Block, op: Aggregate, rows: Rows) -> Rows:
        """Select a block's rows from those of the first block.

        The rows to aggregate, `rows[op.first]`, already belong to the sources of `block` and are not selected again.
        """
        first_block, num_targets = self.blocks[0], len(block.targets)
        at_block = {name: rows[name][:num_targets] for name in op.target}
        for name in op.source:
            is_ready = block is first_block or name == op.first
            at_block[name] = rows[name] if is_ready else rows[name].index_select(0, block.positions_in(first_block))
        return {**at_block, **{name: rows[name] for name in op.shared}}

    def _sources(self, view: GraphView, x: Tensor, block: Block, *, once: bool) -> Tensor:
        """Return the rows of all sources of a block: fetch or recompute those missing in `x`, its input rows.

        With `once`, constant rows are not kept for later epochs.
        """
        if self.is_exchanged(view, x):
            return block.all_sources(x)[0]
        if not len(block.hop.fetched):
            return x
        return view.constant(x, block.placed.features(block.sources) if once else block.features, block.ids)


@dataclass(frozen=True, kw_only=True)
class BlockStats:
    """Sizes of one aggregate's block on a rank, enough for its trace."""

    num_edges: int
    """Number of edges, including those aggregated for other ranks."""
    num_local_edges: int = 0
    """Number of edges from the rank's own rows that a sum aggregates while other rows arrive."""
    num_targets: int = 0
    """Number of rows that the block aggregates."""
    num_sources: int = 0
    """Number of source rows, fetched ones included."""
    fresh_share: float = 1.0
    """Share of edges whose source row comes from memory, see `Adjacency.fresh_share`."""
    num_sent: int = 0
    """Number of rows that the rank sends."""
    num_received: int = 0
    """Number of rows that the rank receives."""
    exchanged: bool = False
    """True if any rank sends rows."""

    def fetch(self, row_bytes: int, *, whole: bool = False) -> Operation:
        """Return the operation of the exchange that brings the missing rows.

        Args:
            row_bytes: Bytes of a row.
            whole: True if the fetched rows are copied into one tensor with the rank's own rows.
        """
        sent, received = self.num_sent * row_bytes, self.num_received * row_bytes
        gather = KernelCall("gather", (self.num_sent, row_bytes))
        copy = KernelCall("pass", (2 * (received + whole * self.num_sources * row_bytes),))
        return Operation(kind="collective", tag="halo", bytes_sent=sent, bytes_received=received, calls=(gather, copy))

    def aggregate(self, op: GraphOperation, *, fetched: bool) -> list[Operation]:
        """Return the operations of one step of an aggregate.

        Args:
            op: Operation of the model's outline.
            fetched: True if an exchange precedes it, during which the local edges are aggregated.
        """
        num_local = self.num_local_edges if fetched and isinstance(op.op, Sum) else 0
        parts = (num_local, self.num_edges - num_local) if num_local else (self.num_edges,)
        size = AggregateSize(self.num_targets, self.num_sources, self.fresh_share)
        operations = [aggregate(op, edges, size) for edges in parts]
        return [replace(operation, ahead=num_local > 0 and operation is operations[0]) for operation in operations]


def operations(
    op: GraphOperation, blocks: Mapping[int, BlockStats], itemsize: int, *, constants: bool = False
) -> list[Operation]:
    """Return the forward operations of an aggregate on a rank: a halo, if rows are missing, and the edges of each step.

    Args:
        op: Operation of the model's outline.
        blocks: Block of each aggregate over edges, by number.
        itemsize: Bytes of an element.
        constants: True if constant features are fetched as well.
    """
    requested: list[Operation] = []
    for number in op.hops:
        fetched = blocks[number].exchanged and (constants or is_fetched(op, number))
        if fetched:
            whole = not isinstance(op.op, Sum)
            requested.append(blocks[number].fetch(fetched_width(op, number) * itemsize, whole=whole))
        if op.is_aggregate:
            requested += blocks[number].aggregate(op, fetched=fetched)
    return requested


def is_fetched(op: GraphOperation, hop: int) -> bool:
    """Return whether an aggregate reads sources over the network: all but constant features and what follows from them.

    Args:
        op: The aggregate.
        hop: Number of the aggregate over edges.
    """
    return hop > op.hop or op.origin == "rows"


def is_sum(op: GraphOperation, hop: int) -> bool:
    """Return whether an aggregate adds up sources that come over the network, so that partial sums may come instead.

    Args:
        op: The aggregate.
        hop: Number of the aggregate over edges.
    """
    return isinstance(op.op, Sum) and is_fetched(op, hop)


def fetched_width(op: GraphOperation, hop: int) -> int:
    """Return the numbers of a fetched row: its columns, and at the first step its columns for attention logits.

    Args:
        op: The aggregate.
        hop: Number of the aggregate over edges.
    """
    return op.width + (op.separate_logit_width if hop == op.hop else 0)

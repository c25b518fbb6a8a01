"""Layout of tensor parallelism: rows for dense layers, columns of all rows for aggregates."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, partial
from itertools import pairwise

import torch
from torch import Tensor

from weft.comm import Group, even_bounds
from weft.config.strategy_flags import ChunkFlags
from weft.cost import Operation
from weft.nn import (
    ONE_DEVICE,
    Aggregate,
    ByRelation,
    EdgeSoftmax,
    GraphOperation,
    ReceptiveField,
    Topology,
    ViewTraits,
    WorkingSet,
    Workload,
)
from weft.parallel.blocks.blocks import Block
from weft.parallel.blocks.meta_blocks import MetaRank, meta_blocks
from weft.parallel.blocks.vertex_layout import VertexLayout
from weft.parallel.columns.chunking import Chunking, by_chunk
from weft.parallel.columns.meta_rounds import MetaRounds
from weft.parallel.columns.pass_sizes import PassSizes, SetSize
from weft.parallel.exchange import Exchange
from weft.parallel.layout import Layout
from weft.parallel.operations import AggregateSize
from weft.runtime.native import count_parts
from weft.strategies.base import Options
from weft.strategies.tensor.attention_columns import AttentionPlan
from weft.strategies.tensor.column_exchange import operations
from weft.strategies.tensor.meta_exchange import MetaColumns
from weft.strategies.tensor.pruned_exchange import LayerRows, PrunedColumns

EDGE_ID_BYTES = 8
"""Bytes of an edge's position among all edges, needed if edges have types or features."""


@dataclass(frozen=True, kw_only=True)
class TensorOptions(ChunkFlags, Options):
    """Options of `tensor`: aggregates chunk by chunk."""

    device: str = ""
    """Device of the aggregates. Empty: the device of the rows."""


class TensorLayout(Layout):
    """N / P rows and all edges on each rank, which aggregates F / P columns of all rows.

    Args:
        work: The workload. If it has a receptive field, steps compute only its rows.
        size: Number of ranks.
        traits: Properties of the strategy's views on all rows.
        options: Options of the strategy.
    """

    def __init__(self, work: Workload, size: int, traits: ViewTraits, options: TensorOptions) -> None:
        super().__init__(work, size, traits)
        self.options = options
        self.chunking = self._make_chunking()
        """Chunks of aggregates; None if no option requests them."""
        self.meta_rounds: dict[int, dict[tuple[Aggregate, int], MetaRounds]] = {}
        """Rounds without data over which estimates of a rank's memory have run, by rank, by aggregate and columns."""
        self.pruned = None if work.receptive_field is None else VertexLayout.of_receptive_field(work, ONE_DEVICE)
        """Rows and blocks of the receptive field on a single rank; None: the whole graph."""

    def _make_chunking(self) -> Chunking | None:
        options = self.options
        if options.device_bytes is None and not options.chunks:
            return None
        return Chunking(
            self.work.graph,
            limit=options.device_bytes,
            count=options.chunks,
            pipeline=self.work.optimisations.pipeline,
        )

    def restrict(self, field: ReceptiveField) -> TensorLayout:
        return TensorLayout(self.work.restrict(field), self.size, self.traits, self.options)

    def release(self) -> None:
        if self.pruned is not None:
            self.pruned.release()

    def own_rows(self, rank: int) -> slice | Tensor:
        if self.chunking is None or self.size == 1:
            return super().own_rows(rank)
        num_vertices = self.work.stats.num_vertices
        return torch.arange(rank, max(rank, num_vertices), self.size)  # every chunk's rows are spread evenly

    def layer_split(self, number: int) -> LayerRows:
        """Return the distribution of the rows at a layer boundary of the receptive field."""
        assert self.work.receptive_field is not None
        return LayerRows(num_rows=self.work.receptive_field.rows[number], size=self.size)

    def layer_rows(self, rank: int) -> Sequence[slice | Tensor]:
        if self.pruned is None:
            return super().layer_rows(rank)
        rows = self.pruned.layer_rows(0)
        return [layer[rank :: self.size] for layer in rows]

    @cached_property
    def row_bounds(self) -> tuple[int, ...]:
        """Bounds of each rank's rows, if aggregates run in one piece."""
        return even_bounds(self.work.stats.num_vertices, self.size)

    def layer_bounds(self, number: int) -> tuple[int, ...]:
        """Return the bounds of each rank's rows at a layer boundary."""
        return self.row_bounds if self.pruned is None else self.layer_split(number).bounds

    def num_edges(self, hop: int) -> int:
        """Return the number of edges of an aggregate that runs in one piece."""
        if self.pruned is None:
            return self.work.stats.num_edges
        return self.pruned.blocks.dependencies(0).hops[hop].block.num_edges

    @cached_property
    def relation_rows(self) -> list[tuple[int, ...]]:
        """Number of relation rows of each rank's vertices, by relation; split evenly if there is no graph."""
        work = self.work
        if work.has_graph:
            return [work.graph.count_relation_rows(slice(*ends)) for ends in pairwise(self.row_bounds)]
        bounds = [even_bounds(count, self.size) for count in work.stats.relation_rows]
        return [tuple(each[rank + 1] - each[rank] for each in bounds) for rank in range(self.size)]

    @cached_property
    def num_remote(self) -> int:
        """Sum over ranks of the sources outside of the rank's even share of the rows; -1 if there is no graph."""
        if not self.work.has_graph:
            return -1
        edges = self.work.graph.in_edges
        part = torch.arange(self.size, dtype=torch.int32).repeat_interleave(torch.tensor(self.row_bounds).diff())
        counts, _ = count_parts(edges.indptr, edges.indices, part, self.size)
        return int(counts[2].sum())

    def chunk_working_set(self, op: Aggregate, width: int) -> WorkingSet:
        """Return the device memory of an aggregate of a chunk, on the rank that has the most columns.

        Args:
            op: The aggregate.
            width: Columns on all ranks.
        """
        work = self.work
        sizes = {"itemsize": work.itemsize, "size": self.size, "num_edge_features": work.stats.num_edge_features}
        needs = op.working_set(work.graph.in_edges, width, **sizes)
        has_ids = bool(work.graph.relations) or work.graph.edge_features is not None
        return needs._replace(per_edge=needs.per_edge + EDGE_ID_BYTES * has_ids)

    @cached_property
    def _attention(self) -> Callable[[EdgeSoftmax, int], AttentionPlan]:
        may_sum, num_edges = self.chunking is None and self.pruned is None, self.work.stats.num_edges
        return cache(
            lambda op, layer: AttentionPlan.of(op, rows=self.layer_bounds(layer), num_edges=num_edges, may_sum=may_sum)
        )

    def attention(self, op: EdgeSoftmax, layer: int = 0) -> AttentionPlan:
        """Return the distribution of an attention over the ranks, which is computed once.

        Args:
            op: The attention.
            layer: Layer boundary of its rows; it matters only on a receptive field.
        """
        return self._attention(op, layer if self.pruned else 0)

    def forward_operations(self, op: GraphOperation, rank: int) -> list[Operation]:
        if op.op == "embed":
            return []
        attention = self.attention(op.op, op.hop) if isinstance(op.op, EdgeSoftmax) else None
        explanation = attention.explain(self.work.itemsize, self.num_remote) if attention and self.size > 1 else ""
        sizes = None
        if self.chunking is not None:
            assert isinstance(op.op, Aggregate)
            sizes = self.pass_sizes(op.op, op.width, op.steps, rank, self.chunking)
        rows = self.layer_bounds(op.hop)[-1]
        whole = AggregateSize(rows, rows, self.work.stats.fresh_share)
        return operations(
            op,
            rank,
            self.size,
            whole,
            self.work.itemsize,
            self.exchange_sizes(op, rank) if sizes is None else sizes.schedule,
            attention,
            how=explanation,
            sizes=sizes,
        )

    def meta_exchanges(self, rank: int, *, training: bool) -> Sequence[Exchange]:
        del training
        work, group = self.work, Group(rank, self.size, device="meta")
        if self.chunking is not None:
            return self._meta_chunks(self.chunking, group)
        if self.pruned is None:
            num_own = self.layer_sizes(rank).rows[0]
            columns = MetaColumns(work, self.row_bounds, self.relation_rows, group, self.attention, num_own=num_own)
            return [columns] * work.num_stages
        placed = MetaRank(work, Group(device="meta"))
        blocks, whole = meta_blocks(placed, self.pruned.blocks, (), (), self.pruned.make_halo), placed.topology
        exchanges = self.pruned_exchanges(blocks, whole, whole.ids.new_empty(self.layer_sizes(rank).rows[0]), group)
        with torch.device("meta"):  # orders of rows exist before a step, as in all steps but the first
            for exchange in exchanges:
                for layer in exchange.layers:
                    layer.positions  # noqa: B018
        return exchanges

    def _meta_chunks(self, chunking: Chunking, group: Group) -> Sequence[Exchange]:
        """Return the exchange of each stage without data, for aggregates in chunks; rounds are created once."""
        work, rank = self.work, group.rank
        sizes, is_first = self.layer_sizes(rank), rank not in self.meta_rounds
        if is_first:
            operations = [op for training in (True, False) for op in work.outline(self.traits, training=training)]
            aggregates = [(op.op, op.width) for op in operations if isinstance(op.op, Aggregate) and op.is_aggregate]
            self.meta_rounds[rank] = {
                key: MetaRounds(work, chunking, group, self.pass_sizes(*key, 1, rank, chunking))
                for key in dict.fromkeys(aggregates)
            }
        rounds = self.meta_rounds[rank]
        relation_rows = [sizes.relation_rows[0] if sizes.relation_rows else ()] * self.size
        exchange = MetaColumns(
            work,
            self.row_bounds,
            relation_rows,
            group,
            self.attention,
            num_own=sizes.rows[0],
            chunked=lambda op, _, width: rounds[op, width],
        )
        exchanges = [exchange] * work.num_stages
        if is_first and chunking.limit is None:  # the first step computes what later steps reuse
            self._step_memory(rank, exchanges, training=True)
        return exchanges

    def pruned_exchanges(
        self, blocks: Sequence[Block], whole: Topology, row_ids: Tensor, group: Group
    ) -> list[PrunedColumns]:
        """Return the exchange of each stage of the model on a receptive field.

        Args:
            blocks: Block of each aggregate.
            whole: Topology of the whole graph.
            row_ids: Original ids of the rank's rows, int64 [n].
            group: The ranks.
        """
        layers = [self.layer_split(number) for number in range(len(blocks) + 1)]
        exchanges, first = [], 0
        for hops in self.work.stage_hops(self.traits):
            end, attention = first + len(hops), partial(self.attention, layer=first)
            exchanges.append(
                PrunedColumns(blocks[first:end], whole, layers[first : end + 1], row_ids, group, attention)
            )
            first = end
        return exchanges

    def feature_copy_bytes(self, op: GraphOperation, rank: int) -> int:
        """Return the bytes of this rank's columns of all features; a single rank reads all features in place.

        Args:
            op: The aggregate.
            rank: The rank.
        """
        if op.origin == "rows" or not op.hops or self.size == 1:
            return 0
        start, stop = even_bounds(op.width, self.size)[rank : rank + 2]
        return self.layer_bounds(op.hop)[-1] * (stop - start) * self.work.itemsize

    def resident_edges(self, rank: int) -> Sequence[tuple[int, Collection[int]]]:
        return self.pruned.resident_edges(0) if self.pruned else super().resident_edges(rank)

    def pass_sizes(self, op: Aggregate, width: int, steps: int, rank: int, chunking: Chunking) -> PassSizes:
        """Return the sizes of an aggregate that runs chunk by chunk.

        Args:
            op: The aggregate.
            width: Columns on all ranks.
            steps: Number of aggregate steps.
            rank: The rank.
            chunking: The chunks.
        """
        work, rank_op = self.work, op
        cut = chunking.sizes(op, self.chunk_working_set(op, width))
        results = [end - first for first, end in pairwise(cut.bounds)]
        if isinstance(op, ByRelation):
            results = by_chunk(work.graph.relations_in.degree, cut.bounds)
        columns = even_bounds(width, self.size)[rank : rank + 2]
        ports = [columns[1] - columns[0]]
        if isinstance(op, EdgeSoftmax):
            attention = self.attention(op)
            rank_op, all_columns = attention.rank_part(op, rank), range(attention.layout(sums=False).width(rank))
            ports = [len(all_columns[own_columns]) for own_columns in attention.own_columns(rank)]
        return PassSizes(
            op=rank_op,
            steps=steps,
            cut=cut,
            results=results,
            exchange=chunking.exchange_plan(op, cut.bounds, rank, self.size).without_data(),
            ports=ports,
            width=columns[1] - columns[0],
            in_memory=chunking.limit is None,
            stored_edge=work.graph.in_edges.indices.itemsize + (work.itemsize if work.stats.weighted else 0),
            separate_memory=self.options.device not in ("", "cpu") and chunking.limit is not None,
            recomputes=not (rank_op.linear or chunking.saves_results(rank_op, steps)),
            itemsize=work.itemsize,
        )

    def exchange_sizes(self, op: GraphOperation, rank: int) -> list[tuple[SetSize, int, SetSize]]:
        """Return (rows that become columns, edges of all steps, rows after the aggregate) of an aggregate in one piece.

        Args:
            op: The aggregate.
            rank: The rank.
        """
        before, after = (SetSize.between(self.layer_bounds(number), rank) for number in (op.hop, op.hop + op.steps))
        if isinstance(op.op, ByRelation):
            totals = [*map(sum, self.relation_rows)]
            after = SetSize(sum(totals), totals[rank])
        return [(before, sum(map(self.num_edges, op.hops)), after)]

"""Tensor parallelism (NeutronTP, sections 3 and 4): rows for the network's maps, columns for the graph's aggregates.

Every rank holds the whole topology, answers for N / P rows, and aggregates F / P columns of all rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from weft.chunks.chunking import Chunking, least_bytes
from weft.chunks.columns import ColumnRounds
from weft.comm import Group, column_layout, even_bounds
from weft.core.errors import InputError
from weft.core.native import count_parts
from weft.cost import Operation
from weft.nn import (
    SPREAD,
    Aggregate,
    ByRelation,
    EdgeSoftmax,
    Footprint,
    GraphOperation,
    WorkingSet,
    kernel_footprint,
)
from weft.strategies.base import Options
from weft.strategies.resident import ResidentPlaced, ResidentPlan
from weft.strategies.tensor.attention import AttentionPlan
from weft.strategies.tensor.columns import Columns, RowCounts, operations

EDGE_ID_BYTES = 8  # of an edge that has a type or features: its place among all edges


@dataclass(frozen=True, kw_only=True)
class TensorOptions(Options):
    """What can be said of aggregates chunk by chunk."""

    device_memory: int | None = None
    """Bytes that aggregates may have on the device at once; None: no limit."""
    chunks: int = 0
    """In how many chunks they are made at least; 0: as few as that allows."""
    device: str = ""
    """The device of the aggregates, if it is another than that of the rows."""


class TensorPlan(ResidentPlan):
    """One program on P ranks, exact: the ranks' loads differ by at most one row and one column."""

    name = "tensor"
    options_type = TensorOptions
    flags = ("nn_device",)
    optimisations = ("pipeline",)
    traits = SPREAD._replace(
        block_error="strategy tensor cannot run a layer that asks for whole source rows (view.block), because a rank "
        "holds only some columns of every row: use --strategy single"
    )
    options: TensorOptions

    @cached_property
    def row_bounds(self) -> tuple[int, ...]:
        """Where each rank's rows begin and end, without chunks."""
        return even_bounds(self.work.stats.num_vertices, self.size)

    @cached_property
    def chunking(self) -> Chunking | None:
        """The chunks that a person asked for, if any."""
        options = self.options
        if options.device_memory is None and not options.chunks:
            return None
        return Chunking(
            self.work.graph,
            limit=options.device_memory,
            count=options.chunks,
            pipeline=self.work.optimisations.pipeline,
        )

    @cached_property
    def relation_rows(self) -> list[int]:
        """By rank, the pairs of one of its vertices and a relation; evenly shared where the graph is not there."""
        work = self.work
        if not work.has_graph:
            return [stop - start for start, stop in pairwise(even_bounds(work.stats.num_relation_rows, self.size))]
        counts = work.graph.num_relations_in
        return [int(counts[start:stop].sum()) for start, stop in pairwise(self.row_bounds)]

    @cached_property
    def num_remote(self) -> int:
        """Sources that are not among a rank's even share of the rows, of all ranks together; -1: not known."""
        if not self.work.has_graph:
            return -1
        edges = self.work.graph.in_edges
        part = torch.arange(self.size, dtype=torch.int32).repeat_interleave(torch.tensor(self.row_bounds).diff())
        counts, _ = count_parts(edges.indptr, edges.indices, part, self.size)
        return int(counts[2].sum())

    def require(self) -> None:
        limit = self.options.device_memory
        if limit is not None and (least := self.least_bytes()) > limit:
            raise InputError(
                f"--device-memory: {limit:,} bytes are too few, since one vertex with its in-edges takes {least:,}: "
                f"give at least {least:,}, or more ranks"
            )

    def least_bytes(self) -> int:
        """What the largest aggregate has on the device of one of the ranks, a vertex at a time."""
        work = self.work
        found = {(one.op, one.width) for one in work.outline(self.traits, training=True) if one.is_aggregate}
        asked = [(op, self.needs(op, width)) for op, width in found if isinstance(op, Aggregate)]
        return max((least_bytes(work.graph.in_edges, op, needs) for op, needs in asked), default=0)

    def needs(self, op: Aggregate, width: int) -> WorkingSet:
        """What an aggregate of a chunk has on the device of the rank that holds the most columns."""
        work = self.work
        sizes = {"itemsize": work.itemsize, "size": self.size, "num_edge_features": work.stats.num_edge_features}
        needs = op.working_set(work.graph.in_edges, width, **sizes)
        has_ids = bool(work.graph.relations) or work.graph.edge_features is not None
        return needs._replace(per_edge=needs.per_edge + EDGE_ID_BYTES * has_ids)

    @cached_property
    def attention(self) -> Callable[[EdgeSoftmax], AttentionPlan]:
        """How an attention is assigned to the ranks, found once for each."""
        stats, may_sum = self.work.stats, self.chunking is None
        return cache(
            lambda op: AttentionPlan.of(
                op, num_vertices=stats.num_vertices, num_edges=stats.num_edges, size=self.size, may_sum=may_sum
            )
        )

    def lower(self, op: GraphOperation, rank: int) -> list[Operation]:
        if op.op == "embed":
            return []
        attention = self.attention(op.op) if isinstance(op.op, EdgeSoftmax) else None
        how = attention.explain(self.work.itemsize, self.num_remote) if attention and self.size > 1 else ""
        again = False
        if self.chunking is not None and isinstance(op.op, Aggregate):
            again = not op.linear and not self.chunking.keeps(op.op, op.steps)
        schedule = self.schedule(op, rank)
        return operations(op, rank, self.size, self.work.itemsize, schedule, attention, how=how, recomputed=again)

    def footprint(self, op: GraphOperation, rank: int) -> Footprint:
        """Of this rank's columns of all rows, that of the kernels; and messages on both ways."""
        if self.chunking is not None:
            raise NotImplementedError(f"strategy {self.name} does not say what {op.op} takes chunk by chunk")
        stats, size, itemsize = self.work.stats, self.size, self.work.itemsize
        assert isinstance(op.op, Aggregate)
        start, stop = even_bounds(op.width, size)[rank : rank + 2]
        done: Aggregate = op.op
        layout = column_layout(self.row_bounds, op.width)
        if isinstance(op.op, EdgeSoftmax):
            plan = self.attention(op.op)
            done, layout = plan.share(op.op, rank), plan.layout(sums=plan.sums)
        made = kernel_footprint(
            done,
            num_targets=stats.num_vertices,
            num_edges=stats.num_edges,
            width=stop - start,
            itemsize=itemsize,
            steps=op.steps,
        )
        own, crosses = self.row_bounds[rank + 1] - self.row_bounds[rank], size > 1
        columns, rows = stats.num_vertices * (stop - start) * itemsize, own * op.width * itemsize
        arrived = stats.num_vertices * layout.width(rank) * itemsize
        given = own * sum(layout.width(one) for one in range(size)) * itemsize
        kept = arrived if made.saves_rows else 0
        forward = max(2 * given + arrived * crosses, arrived + columns, columns + rows * crosses + rows) - rows
        backward = max(2 * rows + columns * crosses, columns + arrived, arrived + given * crosses + given) - given
        return replace(made, saves_rows=0, saves_result=False).moved(
            forward=max(forward - kept, 0),
            saved=kept + (columns if made.saves_result else 0),
            backward=max(backward, 0),
        )

    def schedule(self, op: GraphOperation, rank: int) -> list[tuple[RowCounts | None, int, RowCounts | None]]:
        """Chunk by chunk, the rows that are split before it, its edges, and the rows that are gathered after it."""
        chunking, size, stats = self.chunking, self.size, self.work.stats
        if chunking is None:
            own = self.row_bounds[rank + 1] - self.row_bounds[rank]
            leaving = everything = RowCounts(own, stats.num_vertices - own)
            if isinstance(op.op, ByRelation):
                leaving = RowCounts(self.relation_rows[rank], sum(self.relation_rows) - self.relation_rows[rank])
            return [(everything, stats.num_edges, leaving)]
        assert isinstance(op.op, Aggregate)
        bounds = chunking.bounds(op.op, self.needs(op.op, op.width))
        exchange_plan = chunking.exchange_plan(op.op, bounds, rank, size)
        edges = self.work.graph.in_edges.indptr[torch.tensor(bounds)].diff().tolist()
        ends = zip(exchange_plan.receives, edges, exchange_plan.sends, strict=True)
        return [(RowCounts.of(coming), num_edges, RowCounts.of(going)) for coming, num_edges, going in ends]

    def own_rows(self, rank: int) -> slice | Tensor:
        if self.chunking is None or self.size == 1:
            return super().own_rows(rank)
        return torch.arange(rank, self.work.stats.num_vertices, self.size)  # every chunk's rows are spread evenly

    def place(self, group: Group, *, seed: int = 0) -> PlacedTensor:
        return PlacedTensor(self, group, self.own_rows(group.rank), seed=seed)


class PlacedTensor(ResidentPlaced):
    """The whole topology, N / P rows, and F / P columns of all rows."""

    plan: TensorPlan

    def __init__(self, plan: TensorPlan, group: Group, rows: slice | Tensor, *, seed: int) -> None:
        super().__init__(plan, group, rows, seed=seed)
        self.topology.target_parts = plan.row_bounds, group.rank
        chunked = assigned = None
        if plan.chunking is not None:
            device = torch.device(plan.options.device) if plan.options.device else group.device
            chunked = cache(partial(ColumnRounds, plan.work, self.topology, plan.chunking, group, device))
            assigned = plan.chunking.relations(group.rank, group.size) if self.graph.relations else None
        self.columns = Columns(
            plan.work,
            self.topology,
            rows,
            plan.row_bounds,
            group,
            chunked=chunked,
            assigned=assigned,
            working_set=plan.needs,
            attention=plan.attention,
        )

    def exchange(self, stage: int) -> Columns:
        del stage
        return self.columns

    def describe(self) -> dict[str, Any]:
        plan = self.plan
        ops = self.work.outline(plan.traits, training=False) if self.group.size > 1 else ()
        found = [plan.attention(one.op) for one in ops if isinstance(one.op, EdgeSoftmax)]
        how = [one.explain(self.work.itemsize, plan.num_remote) for one in found]
        return {"attention": how} if how else {}

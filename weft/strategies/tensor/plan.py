"""Tensor parallelism (NeutronTP, sections 3 and 4): rows for the network's maps, columns for the graph's aggregates.

Every rank holds the whole topology, answers for N / P rows, and aggregates F / P columns of all rows.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from weft.comm import Group, column_layout, even_bounds
from weft.cost import Operation
from weft.nn import (
    SPREAD,
    Aggregate,
    ByRelation,
    EdgeSoftmax,
    GraphOperation,
    KernelMemory,
    WorkingSet,
    estimate_kernel_memory,
)
from weft.parallel.columns.chunking import Chunking, by_chunk, least_bytes, limit_error
from weft.parallel.columns.column_memory import ExchangeColumns, PassSizes, SetSize
from weft.parallel.columns.column_pass import ColumnRounds
from weft.partition import ReceptiveField
from weft.runtime.native import count_parts
from weft.strategies.base import MemoryUse, Options
from weft.strategies.resident import AggregateSize, ResidentPlaced, ResidentPlan, StepInputs
from weft.strategies.single import OneRankPlan
from weft.strategies.step_pruning import pruned_traits
from weft.strategies.tensor.attention_columns import AttentionPlan
from weft.strategies.tensor.column_exchange import ColumnExchange, operations
from weft.strategies.tensor.pruned_exchange import LayerRows, PrunedColumns
from weft.strategies.vertex.plan import VertexPlan
from weft.strategies.vertex.setup import make_blocks
from weft.utils.dtypes import dtype_name
from weft.utils.errors import InputError

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
    optimisations = ("reach", "pipeline")
    traits = SPREAD._replace(
        block_error="strategy tensor cannot run a layer that asks for whole source rows (view.block), because a rank "
        "holds only some columns of every row: use --strategy single"
    )
    options: TensorOptions
    pruned: VertexPlan | None = None
    """Of what its steps read, which all are blocks of one rank; None: the whole graph."""

    def solve(self, state: Any) -> None:
        if self.work.row_dtype != self.work.dtype and self.chunking is not None:
            raise InputError(
                f"--dtype {dtype_name(self.work.row_dtype)}: gradients of rows are added up chunk by chunk, and would "
                "be rounded each time: leave out --device-memory and --chunks"
            )
        super().solve(state)

    def find_receptive_field(self, *, training: bool) -> ReceptiveField | str:
        found = super().find_receptive_field(training=training)
        if isinstance(found, str):
            return found
        if self.chunking is not None:
            return "chunks are of the whole graph"
        asked = self.work.outline(self.traits, training=training)
        if any(op.op == "embed" or isinstance(op.op, ByRelation) for op in asked):
            return "rows of types are assigned by their vertices"
        return found

    def restrict_to(self, reach: ReceptiveField) -> TensorPlan:
        plan = copy.copy(self)
        plan.pruned, plan.traits = OneRankPlan(self.work).restrict_to(reach), pruned_traits(self.traits)
        plan.__dict__.pop("_attention", None)
        return plan

    def release(self) -> None:
        super().release()
        if self.pruned is not None:
            self.pruned.release()

    def make_step_inputs(self, placed: ResidentPlaced) -> StepInputs:
        assert self.pruned is not None
        group, whole, needed = placed.group, placed.topology, self.pruned.dependencies(0)
        blocks = make_blocks(placed, needed, (), (), self.pruned.make_halo)
        levels = [self.layer_split(hop) for hop in range(len(blocks) + 1)]
        rows, *_, last = self.layer_rows(group.rank)
        assert isinstance(last, Tensor)
        row_ids = whole.ids[rows].to(group.device)
        exchanges, first = [], 0
        for hops in self.work.stage_hops(self.traits):
            end = first + len(hops)
            attention = partial(self.attention, level=first)
            part = blocks[first:end], whole, levels[first : end + 1], row_ids, group, attention
            exchanges.append(PrunedColumns(*part))
            first = end
        return StepInputs(input_rows=rows, inputs=placed.make_inputs(rows), exchanges=exchanges, vertices=last)

    def layer_split(self, number: int) -> LayerRows:
        """A level of what its steps read."""
        assert self.pruned is not None
        assert self.pruned.receptive_field is not None
        return LayerRows(num_rows=self.pruned.receptive_field.rows[number], size=self.size)

    def layer_rows(self, rank: int) -> Sequence[slice | Tensor]:
        if self.pruned is None:
            return super().layer_rows(rank)
        rows = self.pruned.layer_rows(0)
        return [level[rank :: self.size] for level in rows]

    @cached_property
    def row_bounds(self) -> tuple[int, ...]:
        """Where each rank's rows begin and end, without chunks."""
        return even_bounds(self.work.stats.num_vertices, self.size)

    def layer_bounds(self, level: int) -> tuple[int, ...]:
        """The same of a level."""
        return self.row_bounds if self.pruned is None else self.layer_split(level).bounds

    def num_edges(self, hop: int) -> int:
        """How many edges an aggregate goes over, without chunks."""
        return self.pruned.dependencies(0).hops[hop].block.num_edges if self.pruned else self.work.stats.num_edges

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

    def check_fits(self) -> None:
        limit = self.options.device_memory
        if limit is not None and (least := self.least_bytes()) > limit:
            raise limit_error(limit, least)

    def least_bytes(self) -> int:
        """What the largest aggregate has on the device of one of the ranks, a vertex at a time."""
        work = self.work
        found = {(one.op, one.width) for one in work.outline(self.traits, training=True) if one.is_aggregate}
        asked = [(op, self.chunk_working_set(op, width)) for op, width in found if isinstance(op, Aggregate)]
        return max((least_bytes(work.graph.in_edges, op, needs) for op, needs in asked), default=0)

    def chunk_working_set(self, op: Aggregate, width: int) -> WorkingSet:
        """What an aggregate of a chunk has on the device of the rank that holds the most columns."""
        work = self.work
        sizes = {"itemsize": work.itemsize, "size": self.size, "num_edge_features": work.stats.num_edge_features}
        needs = op.working_set(work.graph.in_edges, width, **sizes)
        has_ids = bool(work.graph.relations) or work.graph.edge_features is not None
        return needs._replace(per_edge=needs.per_edge + EDGE_ID_BYTES * has_ids)

    @cached_property
    def _attention(self) -> Callable[[EdgeSoftmax, int], AttentionPlan]:
        may_sum, num_edges = self.chunking is None and self.pruned is None, self.work.stats.num_edges
        return cache(
            lambda op, level: AttentionPlan.of(op, rows=self.layer_bounds(level), num_edges=num_edges, may_sum=may_sum)
        )

    def attention(self, op: EdgeSoftmax, level: int = 0) -> AttentionPlan:
        """How an attention is assigned to the ranks, found once for each and, where levels differ, its rows' level."""
        return self._attention(op, level if self.pruned else 0)

    def forward_operations(self, op: GraphOperation, rank: int) -> list[Operation]:
        if op.op == "embed":
            return []
        attention = self.attention(op.op, op.hop) if isinstance(op.op, EdgeSoftmax) else None
        how = attention.explain(self.work.itemsize, self.num_remote) if attention and self.size > 1 else ""
        sizes = None if self.chunking is None else self.pass_sizes(op, rank, self.chunking)
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
            how=how,
            sizes=sizes,
        )

    def kernel_memory(self, op: GraphOperation, rank: int) -> KernelMemory:
        """Of this rank's columns of all rows, that of the kernels; and messages on both ways."""
        if self.chunking is not None:
            return self.pass_sizes(op, rank, self.chunking).footprint()
        size, itemsize = self.size, self.work.itemsize
        assert isinstance(op.op, Aggregate)
        start, stop = even_bounds(op.width, size)[rank : rank + 2]
        done: Aggregate = op.op
        coming, going = self.layer_bounds(op.hop), self.layer_bounds(op.hop + op.steps)
        layout = column_layout(coming, op.width)
        if isinstance(op.op, EdgeSoftmax):
            plan = self.attention(op.op, op.hop)
            done, layout = plan.rank_part(op.op, rank), plan.layout(sums=plan.sums)
        made = estimate_kernel_memory(
            done,
            num_targets=self.layer_bounds(op.hop + 1)[-1],
            num_edges=self.num_edges(op.hop),
            width=stop - start,
            itemsize=itemsize,
            steps=op.steps,
        )
        own, crosses = coming[rank + 1] - coming[rank], size > 1
        columns, rows = going[-1] * (stop - start) * itemsize, (going[rank + 1] - going[rank]) * op.width * itemsize
        arrived = coming[-1] * layout.width(rank) * itemsize * (op.origin != "inputs")  # which are there, see `kept`
        given = own * sum(layout.width(one) for one in range(size)) * itemsize * (op.origin == "rows")
        kept = arrived if made.saves_rows else 0
        forward = max(2 * given + arrived * crosses, arrived + columns, columns + rows * crosses + rows) - rows
        backward = max(2 * rows + columns * crosses, columns + arrived, arrived + given * crosses + given) - given
        return replace(made, saves_rows=0, saves_result=False).moved(
            forward=max(forward - kept, 0),
            saved=kept + (columns if made.saves_result else 0),
            backward=max(backward, 0),
        )

    def feature_copy_bytes(self, op: GraphOperation, rank: int) -> int:
        """This rank's columns of all features; one rank alone reads all of them in place."""
        if op.origin == "rows" or not op.hops or self.size == 1:
            return 0
        start, stop = even_bounds(op.width, self.size)[rank : rank + 2]
        return self.layer_bounds(op.hop)[-1] * (stop - start) * self.work.itemsize

    def resident_edges(self, rank: int) -> Sequence[tuple[int, Collection[int]]]:
        return self.pruned.resident_edges(0) if self.pruned else super().resident_edges(rank)

    def pass_sizes(self, op: GraphOperation, rank: int, chunking: Chunking) -> PassSizes:
        """The sizes of an aggregate that is made chunk by chunk."""
        assert isinstance(op.op, Aggregate)
        done, edges = op.op, self.work.graph.in_edges
        cut = chunking.sizes(op.op, self.chunk_working_set(op.op, op.width))
        crossing = chunking.exchange_plan(op.op, cut.bounds, rank, self.size)
        results = [end - first for first, end in pairwise(cut.bounds)]
        if isinstance(op.op, ByRelation):
            results = by_chunk(self.work.graph.num_relations_in, cut.bounds)
        going = coming = column_layout(self.row_bounds, op.width)
        ports = [coming.width(rank)]
        if isinstance(op.op, EdgeSoftmax):
            attention = self.attention(op.op, op.hop)
            done, coming = attention.rank_part(op.op, rank), attention.layout(sums=False)
            ports = [len(range(coming.width(rank))[one]) for one in attention.own_columns(rank)]
        return PassSizes(
            op=done,
            steps=op.steps,
            cut=cut,
            results=results,
            num_rows=self.work.stats.num_vertices,
            num_own=len(range(rank, self.work.stats.num_vertices, self.size)),
            num_local=sum(len(rows.positions) for rows in crossing.sends if rows is not None),
            receives=[SetSize.of(one) for one in crossing.receives],
            sends=[SetSize.of(one) for one in crossing.sends],
            inbound=ExchangeColumns.of(coming, rank),
            outbound=ExchangeColumns.of(going, rank),
            ports=ports,
            split=op.origin == "rows",
            alone=self.size == 1,
            in_memory=chunking.limit is None,
            stored_edge=edges.indices.itemsize + (self.work.itemsize if self.work.stats.weighted else 0),
            separate_memory=self.options.device not in ("", "cpu") and chunking.limit is not None,
            saves_results=chunking.saves_results(done, op.steps),
            packed=isinstance(done, EdgeSoftmax),
            itemsize=self.work.itemsize,
        )

    def peak_memory(self, rank: int = 0) -> MemoryUse:
        """Chunks have rounds besides; below a limit the device has the working set, and what they read is in files."""
        found, chunking = super().peak_memory(rank), self.chunking
        if chunking is None:
            return found
        asked = [one for one in self.work.outline(self.traits, training=True) if one.is_aggregate]
        passes = Counter((one.op, one.width) for one in asked)
        sizes = {(one.op, one.width): self.pass_sizes(one, rank, chunking) for one in asked}
        rounds = sum(one.round_bytes for one in sizes.values())
        if chunking.limit is None:
            made = sum(one.topology_bytes for one in sizes.values())
            return found._replace(device=found.device + rounds + made)
        device = max((one.cut.num_bytes for one in sizes.values()), default=0)
        apart = any(one.separate_memory for one in sizes.values())
        disk = rounds + sum(one.row_bytes(passes[which]) for which, one in sizes.items())
        return MemoryUse(device, found.device if apart else max(found.device - device, 0), disk, found.shared)

    def exchange_sizes(self, op: GraphOperation, rank: int) -> list[tuple[SetSize, int, SetSize]]:
        """Without chunks, the rows that are split, the edges of all steps, and the rows that are gathered."""
        arriving, leaving = (SetSize.between(self.layer_bounds(one), rank) for one in (op.hop, op.hop + op.steps))
        if isinstance(op.op, ByRelation):
            leaving = SetSize(sum(self.relation_rows), self.relation_rows[rank])
        return [(arriving, sum(map(self.num_edges, op.hops)), leaving)]

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
        self.columns = ColumnExchange(
            plan.work,
            self.topology,
            rows,
            plan.row_bounds,
            group,
            chunked=chunked,
            assigned=assigned,
            working_set=plan.chunk_working_set,
            attention=plan.attention,
        )

    def exchange(self, stage: int) -> ColumnExchange:
        del stage
        return self.columns

    def describe(self) -> dict[str, Any]:
        plan = self.plan.step_plans[False]
        assert isinstance(plan, TensorPlan)
        ops = self.work.outline(plan.traits, training=False) if self.group.size > 1 else ()
        found = [plan.attention(one.op, one.hop) for one in ops if isinstance(one.op, EdgeSoftmax)]
        how = [one.explain(self.work.itemsize, plan.num_remote) for one in found]
        known = super().describe() | ({"attention": how} if how else {})
        if self.group.size > 1:
            known["planned"] = {"bytes_sent": dict(self.plan.trace(self.group.rank, training=True).bytes_sent)}
        return known

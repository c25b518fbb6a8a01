"""The exchange of tensor parallelism: rows to columns before an aggregate, columns to rows behind it (NeutronTP, 3.2).

`Columns` sends; `operations` is what it sends by the paper's formulas, chunk by chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor

from weft.comm import (
    ColumnLayout,
    Group,
    cols_to_rows,
    column_layout,
    count_shared,
    even_bounds,
    rows_to_cols,
    sum_shared,
)
from weft.cost import Operation, transfer
from weft.nn import (
    Aggregate,
    ByRelation,
    EdgeSoftmax,
    GraphOperation,
    OwnRelationRows,
    Rows,
    Topology,
    WorkingSet,
    Workload,
)
from weft.parallel.chunks.run.slots import Way
from weft.parallel.columns.column_memory import PassSizes, SetSize
from weft.parallel.columns.column_pass import ColumnPass, ColumnRounds
from weft.parallel.columns.exchange_plan import AssignedRelations
from weft.runtime.kernel_call import KernelCall
from weft.strategies.placed_view import Exchange, PlacedView
from weft.strategies.resident import AggregateSize, aggregate
from weft.strategies.tensor.attention_columns import AttentionPlan


class ColumnExchange(Exchange):
    """This rank's rows become its columns of all rows, and back. The features' columns are read from the graph.

    work: whose graph has the features. topology: the whole graph's. rows: the vertices that the rank answers for.
    bounds: of every rank's rows. chunked: gives the rounds of an aggregate, if it is made chunk by chunk. assigned: of
    relation rows then. working_set, attention: of an aggregate.
    """

    def __init__(
        self,
        work: Workload,
        topology: Topology,
        rows: slice | Tensor,
        bounds: tuple[int, ...],
        group: Group,
        *,
        chunked: Callable[[Aggregate, WorkingSet], ColumnRounds] | None,
        assigned: AssignedRelations | None,
        working_set: Callable[[Aggregate, int], WorkingSet],
        attention: Callable[[EdgeSoftmax], AttentionPlan],
    ) -> None:
        super().__init__(topology, topology.ids[rows], topology.adjacency.num_targets, group)
        self.work, self.bounds, self.chunked, self.assigned = work, bounds, chunked, assigned
        self.working_set, self.attention = working_set, attention
        columns = even_bounds(work.stats.num_features, group.size)
        self.column_range = range(columns[group.rank], columns[group.rank + 1])

    @cached_property
    def features(self) -> Tensor:
        """This rank's columns [N, f] of the features, for who needs them in every epoch."""
        return self.read_features()

    def read_features(self) -> Tensor:
        """The same, read from the graph anew."""
        x = self.work.graph.x
        assert x is not None
        held = x[:, self.column_range.start : self.column_range.stop]
        return held.to(self.group.device, self.work.row_dtype).contiguous()

    @property
    def relation_rows(self) -> OwnRelationRows:
        return self.topology.relation_rows if self.assigned is None else self.assigned.local

    def aggregate(self, view: PlacedView, op: Aggregate, rows: Rows, steps: int) -> Tensor:
        if isinstance(op, EdgeSoftmax):
            return self._attend(view, op, rows, steps)
        x = rows[op.first]
        width, split = x.shape[1], view.origin(x) == "rows"
        layout = column_layout(self.bounds, width)
        if self.chunked:
            rounds, columns = self.chunked(op, self.working_set(op, width)), {op.first: slice(None)}
            run = ColumnPass(rounds, op, columns, layout if split else None, layout, steps)
            return run.run(x if split else self._columns(view, x, layout), {})
        y = view.run(op, {op.first: self._columns(view, x, layout)}, steps, self.topology)
        leaving = column_layout(self.topology.relation_rows.bounds, width) if isinstance(op, ByRelation) else layout
        return cols_to_rows(y, leaving, self.group)

    def _attend(self, view: PlacedView, op: EdgeSoftmax, rows: Rows, steps: int) -> Tensor:
        rank, width = self.group.rank, rows[op.first].shape[1]
        plan = self.attention(op)
        start, stop = plan.logit_columns(sums=plan.sums)[rank]
        shared = {name: rows[name][..., start:stop] for name in op.shared}
        mine, leaving = plan.rank_part(op, rank), column_layout(self.bounds, width)
        packed = [rows[name] for name in (*op.source, *op.target)]
        if self.chunked:
            columns = dict(zip((*mine.source, *mine.target), plan.own_columns(rank), strict=True))
            rounds = self.chunked(mine, self.working_set(op, width))
            run = ColumnPass(rounds, mine, columns, plan.layout(sums=False), leaving, steps)
            return run.run(torch.cat(packed, 1), shared)
        layout = plan.layout(sums=plan.sums)
        widths = [last - first for first, last in layout.columns[rank]]
        assigned = [
            part.contiguous() for part in rows_to_cols(torch.cat(packed, 1), layout, self.group).split(widths, 1)
        ]
        if not op.separate_logit_width:
            first, last = plan.columns[rank]
            assigned.insert(0, assigned[0][:, first - start : last - start])
        prepared = mine.prepare(self.topology, dict(zip((*mine.source, *mine.target), assigned, strict=True)) | shared)
        if plan.sums:
            prepared["logits"] = sum_shared(prepared["logits"], plan.heads_of_ranks, self.group)
        return cols_to_rows(view.run(mine, prepared, steps, self.topology), leaving, self.group)

    def _columns(self, view: PlacedView, x: Tensor, layout: ColumnLayout) -> Tensor:
        """This rank's columns of all rows, from its rows; those of features are here."""
        if view.origin(x) == "rows":
            return rows_to_cols(x, layout, self.group)
        features = self.read_features() if view.aggregates_once(x) else self.features
        return view.constant(x, features, self.topology.ids, self.column_range.start)


def operations(
    op: GraphOperation,
    rank: int,
    size: int,
    whole: AggregateSize,
    itemsize: int,
    schedule: Sequence[tuple[SetSize, int, SetSize]],
    attention: AttentionPlan | None,
    *,
    how: str,
    sizes: PassSizes | None,
) -> list[Operation]:
    """What a rank does forward for an aggregate: columns, aggregate, rows.

    whole: of all ranks. schedule: chunk by chunk, the rows that arrive before it, its edges in all steps, and the rows
    that leave behind it.
    how: the way that an attention's logits take. sizes: of chunks, if it is made chunk by chunk.
    """
    widths = [stop - start for start, stop in pairwise(even_bounds(op.width, size))]
    packed = [attention.layout(sums=attention.sums).width(one) for one in range(size)] if attention else widths
    recomputed = sizes is not None and sizes.recomputes
    made: list[Operation] = []
    for number, (arriving, num_edges, leaving) in enumerate(schedule):
        if arriving.rows and op.origin == "rows" and size > 1:
            made.append(exchanged("rows_to_cols", arriving, packed, rank, itemsize, "" if made else how))
        if attention and attention.sums:
            numbers = count_shared(attention.heads_of_ranks, attention.num_logits, rank)
            sent, received = (number * itemsize for number in numbers)
            apart = Operation(kind="collective", tag="logits", bytes_sent=sent, bytes_received=received)
            made += [apart, apart.adjoint()]
        brought, taken = ([], []) if sizes is None else moved(sizes, number)
        # Steps on a receptive field have different numbers of edges, so their sum need not be a multiple of the steps.
        edges_per_step, num_larger = divmod(num_edges, op.steps)
        steps_by_edges = {edges_per_step: op.steps - num_larger, edges_per_step + 1: num_larger}
        aggregates = [
            aggregate(op, num_edges, whole, steps=steps, width=widths[rank], recomputed=recomputed)
            for num_edges, steps in steps_by_edges.items()
            if steps
        ]
        made += [*brought, *aggregates, *taken]
        if leaving.rows and size > 1:
            made.append(exchanged("rows_to_cols", leaving, widths, rank, itemsize).adjoint())
    return made


def moved(sizes: PassSizes, number: int) -> tuple[list[Operation], list[Operation]]:
    """In all steps of a chunk, what comes from the host before it, and what goes there behind it, with its gradients.

    What is not linear reads its rows again backward, where those come into slots that leave them forward. All but the
    gradients of results is loaded ahead, of the next chunk.
    """
    steps, there = sizes.steps, not sizes.in_memory
    first, end = sizes.cut.bounds[number : number + 2]
    row = sizes.itemsize * there
    read = row * sum(map(sizes.read_width, range(steps)))
    own = row * steps * (end - first) * sizes.own_width
    results = row * steps * sizes.results[number] * sizes.going.here
    coming, leaving = sizes.cut.loads[number] * read, sizes.cut.flushes[number] * read

    def loads(way: Way, sources: int, *, first: int, rows: bool = True) -> list[Operation]:
        ahead = sizes.cut.ahead and number != first
        num_bytes, begun = there * steps * sizes.edge_bytes(number, way), KernelCall("round", (), steps)
        edges = Operation(kind="transfer", tag="edges", bytes_received=num_bytes, calls=(begun,), ahead=ahead)
        read = [("rows", own), ("sources", sources)] if rows else []
        return [edges, *(transfer(tag, to_device=some, ahead=ahead) for tag, some in read)]

    back = loads(sizes.back, leaving, first=len(sizes.cut.bounds) - 2, rows=not sizes.op.linear)
    back.append(transfer("gradients", to_device=results))
    grads = transfer("gradients", to_host=coming + own)
    edges, *rows = loads("forward", coming, first=0)
    before = [replace(edges, backward=(grads,)), *(replace(one, backward=()) for one in rows)]
    return before, [replace(transfer("rows", to_host=results), backward=tuple(back))]


def exchanged(tag: str, rows: SetSize, widths: Sequence[int], rank: int, itemsize: int, how: str = "") -> Operation:
    """A split of so many rows into `widths` columns of each rank; its mirror is the gather."""
    sent, received = rows.own * (sum(widths) - widths[rank]), (rows.rows - rows.own) * widths[rank]
    packed = 2 * itemsize * (rows.own * sum(widths) + rows.rows * widths[rank])
    return Operation(
        kind="collective",
        tag=tag,
        bytes_sent=sent * itemsize,
        bytes_received=received * itemsize,
        how=how,
        calls=(KernelCall("pass", (packed,)),),
    )

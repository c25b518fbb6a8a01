"""Exchange of tensor parallelism: rows to columns before an aggregate, columns to rows after it (NeutronTP, 3.2).

`ColumnExchange` sends; `operations` is the trace of what it sends, by the paper's formulas, chunk by chunk.
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
    GraphView,
    OwnRelationRows,
    Rows,
    Topology,
    Workload,
)
from weft.parallel.chunks.run.slots import Way
from weft.parallel.columns.column_pass import ColumnPass, ColumnRounds
from weft.parallel.columns.exchange_plan import AssignedRelations
from weft.parallel.columns.pass_sizes import PassSizes, SetSize
from weft.parallel.exchange import Exchange
from weft.parallel.operations import AggregateSize, aggregate
from weft.runtime.kernel_call import KernelCall
from weft.strategies.tensor.attention_columns import AttentionPlan


class ColumnExchange(Exchange):
    """Exchange that turns this rank's rows into its columns of all rows, and back.

    Constant features need no exchange: a rank reads its columns from the graph.

    Args:
        work: The workload.
        topology: Topology of the whole graph.
        rows: Vertices that the rank is responsible for.
        bounds: Bounds of the rows of each rank.
        group: The ranks.
        chunked: Function (op, rank_op, width) that returns the rounds of aggregate `op` of `width` columns, of which
            this rank runs `rank_op`; None if aggregates run in one piece.
        assigned: Assignment of relation rows to ranks, if aggregates run in chunks.
        attention: Function that returns the distribution of an attention.
    """

    def __init__(
        self,
        work: Workload,
        topology: Topology,
        rows: slice | Tensor,
        bounds: tuple[int, ...],
        group: Group,
        *,
        chunked: Callable[[Aggregate, Aggregate, int], ColumnRounds] | None,
        assigned: AssignedRelations | None,
        attention: Callable[[EdgeSoftmax], AttentionPlan],
    ) -> None:
        super().__init__(topology, topology.ids[rows], topology.adjacency.num_targets, group)
        self.work, self.bounds, self.chunked, self.assigned = work, bounds, chunked, assigned
        self.attention = attention
        columns = even_bounds(work.stats.num_features, group.size)
        self.column_range = range(columns[group.rank], columns[group.rank + 1])

    @cached_property
    def features(self) -> Tensor:
        """This rank's columns of the features, [N, f], kept for every epoch."""
        return self.read_features()

    def read_features(self) -> Tensor:
        """Read this rank's columns of the features from the graph, [N, f]."""
        x = self.work.graph.x
        assert x is not None
        columns = x[:, self.column_range.start : self.column_range.stop]
        return columns.to(self.group.device, self.work.row_dtype).contiguous()

    @property
    def relation_rows(self) -> OwnRelationRows:
        return self.topology.relation_rows if self.assigned is None else self.assigned.local

    def aggregate(self, view: GraphView, op: Aggregate, rows: Rows, steps: int) -> Tensor:
        if isinstance(op, EdgeSoftmax):
            return self._attend(view, op, rows, steps)
        x = rows[op.first]
        width, has_rows = x.shape[1], view.origin(x) == "rows"
        layout = column_layout(self.bounds, width)
        if self.chunked:
            rounds, columns = self.chunked(op, op, width), {op.first: slice(None)}
            column_pass = ColumnPass(rounds, op, columns, layout if has_rows else None, layout, steps)
            return column_pass.run(x if has_rows else self._columns(view, x, layout), {})
        y = view.run(op, {op.first: self._columns(view, x, layout)}, steps, self.topology)
        leaving = column_layout(self.topology.relation_rows.bounds, width) if isinstance(op, ByRelation) else layout
        return cols_to_rows(y, leaving, self.group)

    def _attend(self, view: GraphView, op: EdgeSoftmax, rows: Rows, steps: int) -> Tensor:
        """Return an attention's result for this rank's rows."""
        rank, width = self.group.rank, rows[op.first].shape[1]
        plan = self.attention(op)
        start, stop = plan.logit_columns(sums=plan.sums)[rank]
        shared = {name: rows[name][..., start:stop] for name in op.shared}
        rank_op, leaving = plan.rank_part(op, rank), column_layout(self.bounds, width)
        packed = [rows[name] for name in (*op.source, *op.target)]
        if self.chunked:
            columns = dict(zip((*rank_op.source, *rank_op.target), plan.own_columns(rank), strict=True))
            rounds = self.chunked(op, rank_op, width)
            column_pass = ColumnPass(rounds, rank_op, columns, plan.layout(sums=False), leaving, steps)
            return column_pass.run(torch.cat(packed, 1), shared)
        layout = plan.layout(sums=plan.sums)
        widths = [last - first for first, last in layout.columns[rank]]
        assigned = [
            part.contiguous() for part in rows_to_cols(torch.cat(packed, 1), layout, self.group).split(widths, 1)
        ]
        if not op.separate_logit_width:
            first, last = plan.columns[rank]
            assigned.insert(0, assigned[0][:, first - start : last - start])
        prepared = rank_op.prepare(
            self.topology, dict(zip((*rank_op.source, *rank_op.target), assigned, strict=True)) | shared
        )
        if plan.sums:
            prepared["logits"] = sum_shared(prepared["logits"], plan.heads_of_ranks, self.group)
        return cols_to_rows(view.run(rank_op, prepared, steps, self.topology), leaving, self.group)

    def _columns(self, view: GraphView, x: Tensor, layout: ColumnLayout) -> Tensor:
        """Return this rank's columns of all rows, from its rows, or from the graph for constant features."""
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
    exchange_sizes: Sequence[tuple[SetSize, int, SetSize]],
    attention: AttentionPlan | None,
    *,
    how: str,
    sizes: PassSizes | None,
) -> list[Operation]:
    """Return the forward operations of an aggregate on a rank: rows to columns, aggregate, columns to rows.

    Args:
        op: Operation of the model's outline.
        rank: The rank.
        size: Number of ranks.
        whole: Number of rows of the aggregate.
        itemsize: Bytes of an element.
        exchange_sizes: For each chunk: rows that become columns before it, its edges in all steps, rows after it.
        attention: Distribution of an attention; None for other aggregates.
        how: Text that explains the way of an attention's logits.
        sizes: Sizes of the chunks; None if the aggregate runs in one piece.
    """
    widths = [stop - start for start, stop in pairwise(even_bounds(op.width, size))]
    packed = [attention.layout(sums=attention.sums).width(other) for other in range(size)] if attention else widths
    recomputed = sizes is not None and sizes.recomputes
    requested: list[Operation] = []
    for number, (arriving, num_edges, leaving) in enumerate(exchange_sizes):
        if arriving.rows and op.origin == "rows" and size > 1:
            requested.append(
                exchange_operation("rows_to_cols", arriving, packed, rank, itemsize, "" if requested else how)
            )
        if attention and attention.sums:
            numbers = count_shared(attention.heads_of_ranks, attention.num_logits, rank)
            sent, received = (number * itemsize for number in numbers)
            logit_exchange = Operation(kind="collective", tag="logits", bytes_sent=sent, bytes_received=received)
            requested += [logit_exchange, logit_exchange.adjoint()]
        loaded, stored = ([], []) if sizes is None else chunk_transfers(sizes, number)
        # Steps on a receptive field have different numbers of edges, so their sum need not be a multiple of the steps.
        edges_per_step, num_larger = divmod(num_edges, op.steps)
        steps_by_edges = {edges_per_step: op.steps - num_larger, edges_per_step + 1: num_larger}
        aggregates = [
            aggregate(op, num_edges, whole, steps=steps, width=widths[rank], recomputed=recomputed)
            for num_edges, steps in steps_by_edges.items()
            if steps
        ]
        requested += [*loaded, *aggregates, *stored]
        if leaving.rows and size > 1:
            requested.append(exchange_operation("rows_to_cols", leaving, widths, rank, itemsize).adjoint())
    return requested


def chunk_transfers(sizes: PassSizes, number: int) -> tuple[list[Operation], list[Operation]]:
    """Return the transfers of a chunk in all steps: from the host before it, and to the host after it.

    The backward pass of an aggregate that is not linear reads its rows again. All transfers to the device are loaded
    ahead, during the previous chunk, except for gradients of results.

    Args:
        sizes: Sizes of the chunks.
        number: Number of the chunk.
    """
    steps, on_host = sizes.steps, not sizes.in_memory  # rows in memory are read where they are: 0 bytes move
    first, end = sizes.cut.bounds[number : number + 2]
    itemsize = sizes.itemsize * on_host
    read_bytes = itemsize * sum(map(sizes.read_width, range(steps)))
    target_bytes = itemsize * steps * (end - first) * sizes.target_width
    result_bytes = itemsize * steps * sizes.results[number] * sizes.width
    load_bytes, write_back_bytes = sizes.cut.loads[number] * read_bytes, sizes.cut.write_backs[number] * read_bytes

    def loads(way: Way, sources: int, *, first: int, rows: bool = True) -> list[Operation]:
        ahead = sizes.cut.ahead and number != first
        num_bytes, begun = on_host * steps * sizes.edge_bytes(number, way), KernelCall("round", (), steps)
        edges = Operation(kind="transfer", tag="edges", bytes_received=num_bytes, calls=(begun,), ahead=ahead)
        read = [("rows", target_bytes), ("sources", sources)] if rows else []
        return [edges, *(transfer(tag, to_device=row_bytes, ahead=ahead) for tag, row_bytes in read)]

    backward = loads(sizes.back, write_back_bytes, first=len(sizes.cut.bounds) - 2, rows=not sizes.op.linear)
    backward.append(transfer("gradients", to_device=result_bytes))
    grads = transfer("gradients", to_host=load_bytes + target_bytes)
    edges, *rows = loads("forward", load_bytes, first=0)
    loads_before = [replace(edges, backward=(grads,)), *(replace(operation, backward=()) for operation in rows)]
    return loads_before, [replace(transfer("rows", to_host=result_bytes), backward=tuple(backward))]


def exchange_operation(
    tag: str, rows: SetSize, widths: Sequence[int], rank: int, itemsize: int, how: str = ""
) -> Operation:
    """Return the operation that turns rows into columns; its adjoint turns columns into rows.

    Args:
        tag: Tag of the operation.
        rows: Number of rows of all ranks, and of this rank.
        widths: Columns of each rank.
        rank: The rank.
        itemsize: Bytes of an element.
        how: Text that explains the choice of columns.
    """
    sent, received = rows.num_own * (sum(widths) - widths[rank]), (rows.rows - rows.num_own) * widths[rank]
    packed = 2 * itemsize * (rows.num_own * sum(widths) + rows.rows * widths[rank])
    return Operation(
        kind="collective",
        tag=tag,
        bytes_sent=sent * itemsize,
        bytes_received=received * itemsize,
        how=how,
        calls=(KernelCall("pass", (packed,)),),
    )

"""Exchanges of tensor parallelism on the meta device, with which a step runs to estimate its memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from weft.comm import Group
from weft.nn import (
    Aggregate,
    EdgeSoftmax,
    GraphOperation,
    GraphView,
    LayerSizes,
    MetaTopology,
    Rows,
    Workload,
)
from weft.parallel.columns.kernel_memory import KernelMemory, StandIn
from weft.parallel.exchange import Exchange
from weft.strategies.tensor.attention_columns import AttentionPlan
from weft.strategies.tensor.column_exchange import ColumnExchange


class MetaColumns(ColumnExchange):
    """Exchange without data, for aggregates that run in one piece.

    Args:
        work: The workload.
        bounds: Bounds of the rows of each rank.
        relation_rows: Number of relation rows of each rank's vertices, by relation.
        group: Process group of the ranks as this rank sees it, on the meta device: it sends nothing.
        attention: Function that returns the distribution of an attention.
    """

    def __init__(
        self,
        work: Workload,
        bounds: tuple[int, ...],
        relation_rows: Sequence[tuple[int, ...]],
        group: Group,
        attention: Callable[[EdgeSoftmax], AttentionPlan],
    ) -> None:
        stats, rows = work.stats, slice(*bounds[group.rank : group.rank + 2])
        sizes, num_own = (stats.num_vertices, stats.num_vertices, stats.num_edges), rows.stop - rows.start
        topology = MetaTopology(work, *sizes, relation_rows=relation_rows, part=group.rank, num_own=num_own)
        super().__init__(work, topology, rows, bounds, group, chunked=None, assigned=None, attention=attention)
        self.features = self._new_columns()

    def read_features(self) -> Tensor:
        return self.features if self.group.size == 1 else self._new_columns()  # a single rank reads them in place

    def _new_columns(self) -> Tensor:
        return torch.empty(self.num_vertices, len(self.column_range), dtype=self.work.row_dtype, device="meta")


PassKey = tuple[Aggregate, int, int, str]
"""An aggregate with its columns, steps and the origin of its rows."""


def pass_key(op: GraphOperation) -> PassKey:
    """Return the key of an operation, which is the same for operations of equal memory."""
    assert isinstance(op.op, Aggregate)
    return op.op, op.width, op.steps, op.origin


class MetaChunks(Exchange):
    """Exchange without data, for aggregates in chunks, whose memory `PassSizes` estimates.

    Args:
        work: The workload.
        sizes: Number of rows of the rank.
        passes: Memory of each aggregate, and number of rows of its result.
        group: Process group of the ranks as this rank sees it, on the meta device: it sends nothing.
    """

    def __init__(
        self, work: Workload, sizes: LayerSizes, passes: Mapping[PassKey, tuple[KernelMemory, int]], group: Group
    ) -> None:
        stats, num_rows, relation_rows = work.stats, sizes.rows[0], sizes.relation_rows[:1] or ((),)
        whole = stats.num_vertices, stats.num_vertices, stats.num_edges
        topology = MetaTopology(work, *whole, relation_rows=relation_rows, num_own=num_rows)
        super().__init__(topology, topology.ids[:num_rows], stats.num_vertices, group)
        self._passes = passes

    def aggregate(self, view: GraphView, op: Aggregate, rows: Rows, steps: int) -> Tensor:
        x = rows[op.first]
        memory, num_results = self._passes[op, x.shape[1], steps, view.origin(x) if op.plain else "rows"]
        others = (tensor for name, tensor in rows.items() if name != op.first)
        y: Tensor = StandIn.apply(memory, num_results, x, *others)  # type: ignore[no-untyped-call]
        return y

"""Exchange of tensor parallelism on the meta device, with which a step runs to estimate its memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from weft.comm import Group
from weft.nn import Aggregate, EdgeSoftmax, MetaTopology, Workload
from weft.parallel.columns.column_pass import ColumnRounds
from weft.strategies.tensor.attention_columns import AttentionPlan
from weft.strategies.tensor.column_exchange import ColumnExchange


class MetaColumns(ColumnExchange):
    """Exchange without data.

    Args:
        work: The workload.
        bounds: Bounds of the rows of each rank, for aggregates in one piece.
        relation_rows: Number of relation rows of each rank's vertices, by relation.
        group: Process group of the ranks as this rank sees it, on the meta device: it sends nothing.
        attention: Function that returns the distribution of an attention.
        num_own: Number of rows of this rank.
        chunked: Function that returns the rounds of an aggregate without data, see `ColumnExchange`.
    """

    def __init__(
        self,
        work: Workload,
        bounds: tuple[int, ...],
        relation_rows: Sequence[tuple[int, ...]],
        group: Group,
        attention: Callable[[EdgeSoftmax], AttentionPlan],
        *,
        num_own: int,
        chunked: Callable[[Aggregate, Aggregate, int], ColumnRounds] | None = None,
    ) -> None:
        stats, rows = work.stats, slice(num_own)
        sizes = stats.num_vertices, stats.num_vertices, stats.num_edges
        topology = MetaTopology(work, *sizes, relation_rows=relation_rows, part=group.rank, num_own=num_own)
        super().__init__(work, topology, rows, bounds, group, chunked=chunked, assigned=None, attention=attention)
        self.features = self._new_columns()

    def read_features(self) -> Tensor:
        return self.features if self.group.size == 1 else self._new_columns()  # a single rank reads them in place

    def _new_columns(self) -> Tensor:
        return torch.empty(self.num_vertices, len(self.column_range), dtype=self.work.row_dtype, device="meta")

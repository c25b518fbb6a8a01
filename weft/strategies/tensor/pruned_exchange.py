"""The exchange of tensor parallelism where steps leave rows out: each hop has a block of its own.

The rows of a level stand in one order, those of the level behind it first, in columns; rank r answers for the rows
r, r + P, ... of it, so that ranks have as many at each level, and the first of theirs are those of the level behind it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from weft.comm import Group, cols_to_rows, column_layout, even_bounds, rows_to_cols
from weft.nn import Aggregate, EdgeSoftmax, Rows, Topology
from weft.strategies.placed_view import Exchange, PlacedView
from weft.strategies.tensor.attention_columns import AttentionPlan
from weft.strategies.vertex.blocks import Block


@dataclass(frozen=True, kw_only=True)
class LayerRows:
    """Who answers for which of a level's rows."""

    num_rows: int
    size: int
    """Ranks."""

    @property
    def bounds(self) -> tuple[int, ...]:
        """Where each rank's rows begin and end, rank by rank."""
        counts = [len(range(rank, self.num_rows, self.size)) for rank in range(self.size)]
        return tuple(sum(counts[:rank]) for rank in range(self.size + 1))

    @cached_property
    def by_rank(self) -> Tensor:
        """The rows, int64 [N], rank by rank."""
        return torch.cat([torch.arange(self.num_rows)[rank :: self.size] for rank in range(self.size)])

    @cached_property
    def places(self) -> Tensor:
        """Where each row, int64 [N], stands among them rank by rank."""
        return self.by_rank.argsort()


class PrunedColumns(Exchange):
    """This rank's rows become its columns of all rows of a level, and those behind the last aggregate back.

    blocks: of the stage's aggregates; whole: the graph's topology, for a stage without any. levels: of the rows before
    and behind each. row_ids: int64 [n], the original ids of the rank's rows. attention: of an aggregate.
    """

    def __init__(
        self,
        blocks: Sequence[Block],
        whole: Topology,
        levels: Sequence[LayerRows],
        row_ids: Tensor,
        group: Group,
        attention: Callable[[EdgeSoftmax], AttentionPlan],
    ) -> None:
        super().__init__(blocks[0] if blocks else whole, row_ids, whole.adjacency.num_targets, group)
        self.blocks, self.levels, self.attention = blocks, levels, attention

    def targets(self, x: Tensor) -> Tensor:
        return x[: len(range(self.group.rank, self.levels[-1].num_rows, self.group.size))] if self.blocks else x

    @cached_property
    def features(self) -> Tensor:
        """This rank's columns [N, f] of the first block's features, for who needs them in every epoch."""
        return self.read_features()

    def read_features(self) -> Tensor:
        """The same, read from the graph anew."""
        features = self.blocks[0].placed.features(self.blocks[0].sources)
        return features[:, self.columns.start : self.columns.stop].contiguous()

    @property
    def columns(self) -> range:
        """Which columns of the features are this rank's."""
        bounds = even_bounds(self.blocks[0].placed.work.stats.num_features, self.group.size)
        return range(*bounds[self.group.rank : self.group.rank + 2])

    def aggregate(self, view: PlacedView, op: Aggregate, rows: Rows, steps: int) -> Tensor:
        width, leaving = rows[op.first].shape[1], self.levels[steps]
        if isinstance(op, EdgeSoftmax):
            y = self._attend(view, op, rows, steps)
        else:
            y = self._columns(view, rows[op.first])
            for block in self.blocks[:steps]:
                y = view.run(op, {op.first: y}, 1, block)
        return cols_to_rows(self._ordered(y, leaving, back=True), column_layout(leaving.bounds, width), self.group)

    def _attend(self, view: PlacedView, op: EdgeSoftmax, rows: Rows, steps: int) -> Tensor:
        """The columns of an attention's result. Each block makes the logits of its edges."""
        rank, plan = self.group.rank, self.attention(op)
        mine, layout = plan.rank_part(op, rank), plan.layout(sums=False)
        start, stop = plan.logit_columns(sums=False)[rank]
        shared = {name: rows[name][..., start:stop] for name in op.shared}
        packed = rows_to_cols(torch.cat([rows[name] for name in (*op.source, *op.target)], 1), layout, self.group)
        packed = self._ordered(packed, self.levels[0])
        here = dict(zip((*mine.source, *mine.target), plan.own_columns(rank), strict=True))
        assigned = {name: packed[:, columns].contiguous() for name, columns in here.items()}
        x = assigned[mine.first]
        for block in self.blocks[:steps]:
            counts = {name: len(block.sources) for name in mine.source}
            counts |= {name: len(block.targets) for name in mine.target}
            brought = {name: assigned[name][:count] for name, count in counts.items()}
            x = view.run(mine, mine.prepare(block, {**brought, mine.first: x, **shared}), 1, block)
        return x

    def _columns(self, view: PlacedView, x: Tensor) -> Tensor:
        """This rank's columns of all rows, from its rows; those of features are here."""
        if view.origin(x) != "rows":
            features = self.read_features() if view.aggregates_once(x) else self.features
            return view.constant(x, features, self.blocks[0].ids, self.columns.start)
        level = self.levels[0]
        return self._ordered(rows_to_cols(x, column_layout(level.bounds, x.shape[1]), self.group), level)

    def _ordered(self, x: Tensor, level: LayerRows, *, back: bool = False) -> Tensor:
        """Rows that stand rank by rank in the order of the level, or `back`."""
        if self.group.size == 1:
            return x
        ways = level.places, level.by_rank
        taken, returned = (one.to(x.device) for one in (ways[::-1] if back else ways))
        return _Reordered.apply(x, taken, returned)  # type: ignore[no-any-return, no-untyped-call]


class _Reordered(Function):
    """Rows in another order; `back` undoes it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, back: Tensor) -> Tensor:
        ctx.back = back
        return x.index_select(0, order)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad.index_select(0, ctx.back), None, None

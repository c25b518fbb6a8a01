"""Exchange of tensor parallelism for steps on a receptive field: each aggregate has a block of its own.

The rows at a layer boundary are ordered so that those needed after the next aggregate come first. Rank r is responsible
for rows r, r + P, ... of this order. So all ranks have equally many rows at each boundary, and each rank's rows needed
after the next aggregate are its first ones.
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
from weft.nn import Aggregate, EdgeSoftmax, GraphView, Rows, Topology
from weft.parallel.blocks.blocks import Block
from weft.parallel.exchange import Exchange
from weft.strategies.tensor.attention_columns import AttentionPlan


@dataclass(frozen=True, kw_only=True)
class LayerRows:
    """Distribution of the rows at a layer boundary over the ranks."""

    num_rows: int
    """Number of rows."""
    size: int
    """Number of ranks."""

    @property
    def bounds(self) -> tuple[int, ...]:
        """Bounds of each rank's rows, if they are sorted by rank."""
        counts = [len(range(rank, self.num_rows, self.size)) for rank in range(self.size)]
        return tuple(sum(counts[:rank]) for rank in range(self.size + 1))

    @cached_property
    def by_rank(self) -> Tensor:
        """Rows sorted by rank, int64 [N]."""
        return torch.cat([torch.arange(self.num_rows)[rank :: self.size] for rank in range(self.size)])

    @cached_property
    def positions(self) -> Tensor:
        """Position of each row in the order by rank, int64 [N]."""
        return self.by_rank.argsort()


class PrunedColumns(Exchange):
    """Exchange that turns this rank's rows into its columns of all rows at a layer boundary, and results back.

    Args:
        blocks: Blocks of the stage's aggregates.
        whole: Topology of the whole graph, for a stage without aggregates.
        layers: Rows before and after each aggregate.
        row_ids: Original ids of the rank's rows, int64 [n].
        group: The ranks.
        attention: Function that returns the distribution of an attention.
    """

    def __init__(
        self,
        blocks: Sequence[Block],
        whole: Topology,
        layers: Sequence[LayerRows],
        row_ids: Tensor,
        group: Group,
        attention: Callable[[EdgeSoftmax], AttentionPlan],
    ) -> None:
        super().__init__(blocks[0] if blocks else whole, row_ids, whole.adjacency.num_targets, group)
        self.blocks, self.layers, self.attention = blocks, layers, attention

    def targets(self, x: Tensor) -> Tensor:
        return x[: len(range(self.group.rank, self.layers[-1].num_rows, self.group.size))] if self.blocks else x

    @cached_property
    def features(self) -> Tensor:
        """This rank's columns [N, f] of the first block's features, kept for every epoch."""
        return self.read_features()

    def read_features(self) -> Tensor:
        """Read this rank's columns of the first block's features from the graph, [N, f]."""
        features = self.blocks[0].placed.features(self.blocks[0].sources)
        return features[:, self.columns.start : self.columns.stop].contiguous()

    @property
    def columns(self) -> range:
        """Columns of the features that this rank has."""
        bounds = even_bounds(self.blocks[0].placed.work.stats.num_features, self.group.size)
        return range(*bounds[self.group.rank : self.group.rank + 2])

    def aggregate(self, view: GraphView, op: Aggregate, rows: Rows, steps: int) -> Tensor:
        width, leaving = rows[op.first].shape[1], self.layers[steps]
        if isinstance(op, EdgeSoftmax):
            y = self._attend(view, op, rows, steps)
        else:
            y = self._columns(view, rows[op.first])
            for block in self.blocks[:steps]:
                y = view.run(op, {op.first: y}, 1, block)
        return cols_to_rows(self._ordered(y, leaving, back=True), column_layout(leaving.bounds, width), self.group)

    def _attend(self, view: GraphView, op: EdgeSoftmax, rows: Rows, steps: int) -> Tensor:
        """Return the columns of an attention's result; each block computes the logits of its edges."""
        rank, plan = self.group.rank, self.attention(op)
        rank_op, layout = plan.rank_part(op, rank), plan.layout(sums=False)
        start, stop = plan.logit_columns(sums=False)[rank]
        shared = {name: rows[name][..., start:stop] for name in op.shared}
        packed = rows_to_cols(torch.cat([rows[name] for name in (*op.source, *op.target)], 1), layout, self.group)
        packed = self._ordered(packed, self.layers[0])
        columns_by_name = dict(zip((*rank_op.source, *rank_op.target), plan.own_columns(rank), strict=True))
        tensors = {name: packed[:, own_columns].contiguous() for name, own_columns in columns_by_name.items()}
        x = tensors[rank_op.first]
        for block in self.blocks[:steps]:
            counts = {name: len(block.sources) for name in rank_op.source}
            counts |= {name: len(block.targets) for name in rank_op.target}
            at_block = {name: tensors[name][:count] for name, count in counts.items()}
            x = view.run(rank_op, rank_op.prepare(block, {**at_block, rank_op.first: x, **shared}), 1, block)
        return x

    def _columns(self, view: GraphView, x: Tensor) -> Tensor:
        """Return this rank's columns of all rows, from its rows, or from the graph for constant features."""
        if view.origin(x) != "rows":
            features = self.read_features() if view.aggregates_once(x) else self.features
            return view.constant(x, features, self.blocks[0].ids, self.columns.start)
        layer = self.layers[0]
        return self._ordered(rows_to_cols(x, column_layout(layer.bounds, x.shape[1]), self.group), layer)

    def _ordered(self, x: Tensor, layer: LayerRows, *, back: bool = False) -> Tensor:
        """Permute rows, ordered by rank, to the order of the layer boundary; `back` is the inverse permutation."""
        if self.group.size == 1:
            return x
        orders = layer.positions, layer.by_rank
        order, inverse = (index.to(x.device) for index in (orders[::-1] if back else orders))
        return _Reordered.apply(x, order, inverse)  # type: ignore[no-any-return, no-untyped-call]


class _Reordered(Function):
    """Reordering of rows; `back` is the inverse order."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, back: Tensor) -> Tensor:
        ctx.back = back
        return x.index_select(0, order)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad.index_select(0, ctx.back), None, None

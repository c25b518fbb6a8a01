"""PyG convolutions over the edges of single relations, all of which run on one block of a heterogeneous graph."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from weft.nn.aggregate.typed_block import TypedBlock
from weft.nn.layers.pyg_conv import PyGConv
from weft.nn.view import View


class Columns(NamedTuple):
    """Range of columns of a tensor."""

    first: int
    """First column."""
    width: int
    """Number of columns."""

    def of(self, x: Tensor) -> Tensor:
        """Return these columns of x [n, .]."""
        return x.narrow(1, *self)


class RelationInput(NamedTuple):
    """Relation of a convolution, and its columns in the rows of a block."""

    relation: int
    """Number of the relation."""
    source_type: int
    """Number of the vertex type of its sources."""
    target_type: int
    """Number of the vertex type of its targets."""
    source: Columns
    """Columns of the rows of sources."""
    target: Columns
    """Columns of the rows of targets."""


class RelationBlock:
    """View of the edges of one relation, for a `RelationConv`.

    Args:
        view: View of the edges of all relations.
        edge_index: Source and target of the edges of the relation, int64 [2, .].
        num_targets: Number of targets.
        target_rows: Rows [n, .] of the targets; None: they are the first rows of the sources.
        relation: The relation.
    """

    edge_features = edge_weight = edge_type = None

    def __init__(
        self, view: View, edge_index: Tensor, num_targets: int, target_rows: Tensor | None, relation: RelationInput
    ) -> None:
        self._view, self._edge_index, self._num_targets, self.target_rows = view, edge_index, num_targets, target_rows
        self._relation = relation

    def block(self, x: Tensor) -> tuple[Tensor, Tensor, int]:
        """Return (rows x of the sources, edge_index, number of targets)."""
        return x, self._edge_index, self._num_targets

    @property
    def block_size(self) -> Any:
        """Size of the block, in an `OutlineView`."""
        view: Any = self._view
        return view.size_of_relation(*self._relation[:3])


class RelationConv(PyGConv):
    """Layer that calls a PyG convolution on the edges of one relation. Arguments are those of `PyGConv`."""

    def _rows(self, view: Any, sources: Tensor, num_targets: int) -> Any:
        return super()._rows(view, sources, num_targets) if view.target_rows is None else (sources, view.target_rows)


class RelationConvs(nn.Module):
    """Layer that calls several convolutions on a block, without owning them.

    The first column of its rows is the number of the vertex's type. The results of convolutions with the same type of
    targets are side by side; types share columns.

    Args:
        convs: The convolutions.
        inputs: Relation and columns of each.
        num_types: Number of vertex types.
    """

    def __init__(self, convs: Sequence[RelationConv], inputs: Sequence[RelationInput], num_types: int) -> None:
        super().__init__()
        self.__dict__["convs"] = convs
        self.inputs, self.num_types = inputs, num_types

    def forward(self, view: View, x: Tensor) -> Tensor:
        sources, _, num_targets = view.block(x)
        vertex_type = sources[:, :1]
        block: TypedBlock = view.typed_block(vertex_type, num_targets, self.num_types)
        rows, results = dict[tuple[int, Columns], Tensor](), defaultdict[int, list[Tensor]](list)
        for conv, relation in zip(self.__dict__["convs"], self.inputs, strict=True):
            source, target = (relation.source_type, relation.source), (relation.target_type, relation.target)
            for number, columns in (source, target):
                if (number, columns) not in rows:  # relations share the rows of their types
                    rows[number, columns] = block.sources_of(columns.of(sources), number)
            count = block.num_targets_of(relation.target_type)
            targets = None if source == target else rows[target][:count]
            part = RelationBlock(view, block.edges[relation.relation], count, targets, relation)
            results[relation.target_type].append(conv(part, rows[source]))
        return block.join(vertex_type, {number: torch.cat(parts, 1) for number, parts in results.items()})

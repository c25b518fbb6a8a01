"""PyG convolutions over the edges of single relations, all of which run on one block of a heterogeneous graph."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

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
    source: Columns
    """Columns with the rows of the sources."""
    target: Columns
    """Columns with the rows of the targets."""


class RelationBlock:
    """View of the edges of one relation, for a `RelationConv`.

    Args:
        view: View of the edges of all relations.
        relation: Number of the relation.
        num_targets: Number of targets.
        source_width: Number of columns of the rows of sources, if those of the targets are other columns.
    """

    edge_features = edge_weight = None

    def __init__(self, view: View, relation: int, num_targets: int, source_width: int | None) -> None:
        self._view, self._relation, self._num_targets = view, relation, num_targets
        self.source_width = source_width

    def block(self, x: Tensor) -> tuple[Tensor, Tensor, int]:
        """Return (rows x of the sources, edge_index, number of targets)."""
        return x, self._view.edge_index_by_relation[self._relation], self._num_targets

    @property
    def block_size(self) -> Any:
        """Size of the block, in an `OutlineView`."""
        view: Any = self._view
        return view.block_size_of(self._relation)


class RelationConv(PyGConv):
    """Layer that calls a PyG convolution on the edges of one relation.

    Its rows x [s, F] are those of the sources; if the convolution gets other rows of the targets, these are the last
    columns. Arguments are those of `PyGConv`.
    """

    def _rows(self, view: Any, sources: Tensor, num_targets: int) -> Any:
        if view.source_width is None:
            return super()._rows(view, sources, num_targets)
        return sources[:, : view.source_width], sources[:num_targets, view.source_width :]


class RelationConvs(nn.Module):
    """Layer that calls several convolutions on a block, without owning them, and concatenates their results.

    Args:
        convs: The convolutions.
        inputs: Relation and columns of each.
    """

    def __init__(self, convs: Sequence[RelationConv], inputs: Sequence[RelationInput]) -> None:
        super().__init__()
        self.__dict__["convs"] = convs
        self.inputs = inputs
        self.out_width = sum(conv.out_width for conv in convs)

    def forward(self, view: View, x: Tensor) -> Tensor:
        sources, _, num_targets = view.block(x)
        results = []
        for conv, (relation, source, target) in zip(self.__dict__["convs"], self.inputs, strict=True):
            differ = source != target
            rows = torch.cat([source.of(sources), target.of(sources)], 1) if differ else source.of(sources)
            results.append(conv(RelationBlock(view, relation, num_targets, source.width if differ else None), rows))
        return torch.cat(results, 1)

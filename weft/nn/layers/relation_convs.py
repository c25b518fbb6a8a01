"""PyG convolutions over the edges of single relations, all of which run on one block of a heterogeneous graph."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from weft.data import Adjacency
from weft.nn.aggregate.typed_block import Place, RelationEdges, TypedBlock
from weft.nn.layers.pyg_conv import PyGConv
from weft.nn.layers.relation_attention import native_attention
from weft.nn.view import View


class RelationInput(NamedTuple):
    """Relation of a convolution, and the places of its rows among those of a block."""

    relation: int
    """Number of the relation."""
    source: Place
    """Place of the rows of its sources."""
    target: Place
    """Place of the rows of its targets."""


class RelationBlock:
    """View of the edges of one relation, for a `RelationConv`.

    Args:
        view: View of the edges of all relations.
        edges: The edges of the relation.
        num_targets: Number of targets.
        target_rows: Rows [n, .] of the targets; None: they are the first rows of the sources.
        relation: The relation.
    """

    edge_features = edge_weight = edge_type = None

    def __init__(
        self, view: View, edges: RelationEdges, num_targets: int, target_rows: Tensor | None, relation: RelationInput
    ) -> None:
        self._view, self._edges, self._num_targets, self.target_rows = view, edges, num_targets, target_rows
        self._relation = relation

    def block(self, x: Tensor) -> tuple[Tensor, Tensor, int]:
        """Return (rows x of the sources, edge_index, number of targets)."""
        return x, self._edges.index, self._num_targets

    def adjacency(self, num_sources: int) -> Adjacency:
        """Return the edges in compressed rows."""
        return self._edges.adjacency(num_sources, self._num_targets)

    @property
    def block_size(self) -> Any:
        """Size of the block, in an `OutlineView`."""
        view: Any = self._view
        relation, source, target = self._relation
        return view.size_of_relation(relation, source.of_type, target.of_type)


class RelationConv(PyGConv):
    """Layer that computes a PyG convolution on the edges of one relation, by a kernel of weft if there is one.

    Arguments are those of `PyGConv`.
    """

    def __init__(self, conv: Any, out_width: int) -> None:
        super().__init__(conv, out_width)
        self.attention = native_attention(conv)

    def forward(self, view: Any, x: Tensor) -> Tensor:
        if self.attention is None or x.device.type == "meta":
            return super().forward(view, x)
        adjacency = view.adjacency(len(x))
        targets = x[: adjacency.num_targets] if view.target_rows is None else view.target_rows
        return self.attention(self.conv, adjacency, x, targets)

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
        places = [*dict.fromkeys(place for _, *ends in self.inputs for place in ends)]  # relations share rows
        rows = dict(zip(places, block.split(sources, places), strict=True))
        results = []
        for conv, relation in zip(self.__dict__["convs"], self.inputs, strict=True):
            number, source, target = relation
            count = block.num_targets_of(target.of_type)
            targets = None if source == target else rows[target][:count]
            results.append(conv(RelationBlock(view, block.edges[number], count, targets, relation), rows[source]))
        return block.join(vertex_type, [relation.target.of_type for relation in self.inputs], results)

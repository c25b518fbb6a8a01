"""PyG convolutions over the edges of single relations, all of which run on one block of a heterogeneous graph."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

from torch import Tensor, nn

from weft.data import Adjacency
from weft.nn.aggregate.typed_block import Place, RelationEdges, TypedBlock
from weft.nn.layers.pyg_conv import PyGConv
from weft.nn.layers.relation_attention import AttentionCall, han_attention, native_attention, relation_attention
from weft.nn.view import View


class RelationInput(NamedTuple):
    """Relation of a convolution, and the rows that it reads."""

    relation: int
    """Number of the relation."""
    source: int
    """Position of the rows of its sources among the arguments."""
    target: int
    """Position of the rows of its targets."""


class RelationBlock:
    """View of the edges of one relation, for a `RelationConv`.

    Args:
        view: View of the edges of all relations.
        edges: The edges of the relation.
        num_targets: Number of targets.
        target_rows: Rows [n, .] of the targets; None: they are the first rows of the sources.
        relation: Number of the relation, and of the vertex types of its sources and targets.
    """

    edge_weight = edge_type = None

    def __init__(
        self,
        view: View,
        edges: RelationEdges,
        num_targets: int,
        target_rows: Tensor | None,
        relation: tuple[int, int, int],
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
    def relation(self) -> int:
        """Number of the relation."""
        return self._relation[0]

    @property
    def edge_features(self) -> Tensor | None:
        """Features of the edges, [E, K], in their order; None if the graph has none."""
        features = self._view.edge_features
        if features is None or features.device.type == "meta":  # meta tensors have no values to compare
            return features
        if self._edges.features is None:  # kept, so that a step does not copy them again
            self._edges.features = features[self._view.edge_type == self._relation[0]]
        return self._edges.features

    @property
    def block_size(self) -> Any:
        """Size of the block, in an `OutlineView`."""
        view: Any = self._view
        return view.size_of_relation(*self._relation)


class RelationConv(PyGConv):
    """Layer that computes a PyG convolution on the edges of one relation, by a kernel of weft if there is one.

    Arguments are those of `PyGConv`; a convolution gets edge features only if `reads_edge_attr`.
    """

    needs_contiguous: ClassVar[bool] = False
    """True if rows should be contiguous, since a kernel would copy them for each relation otherwise."""

    def __init__(self, conv: Any, out_width: int, *, reads_edge_attr: bool = False) -> None:
        super().__init__(conv, out_width, reads_edge_attr=reads_edge_attr)
        self.takes &= {"edge_attr"} if reads_edge_attr else set()
        self.has_kernel = native_attention(conv)

    def forward(self, view: Any, x: Tensor) -> Tensor:
        if not self.has_kernel or x.device.type == "meta":
            return super().forward(view, x)
        return relation_attention(AttentionCall(self.conv, *self._endpoints(view, x)))

    def _endpoints(self, view: RelationBlock, x: Tensor) -> tuple[Adjacency, Tensor, Tensor]:
        """Return the edges of the relation, and the rows of their sources and targets."""
        adjacency = view.adjacency(len(x))
        targets = view.target_rows
        if targets is None:
            targets = x if adjacency.num_targets == len(x) else x[: adjacency.num_targets]
        return adjacency, x, targets

    def _rows(self, view: Any, sources: Tensor, num_targets: int) -> tuple[Any, dict[str, Tensor]]:
        if view.target_rows is None:
            return super()._rows(view, sources, num_targets)
        return (sources, view.target_rows), {}


class HanAttention(RelationConv):
    """Layer that computes the attention of PyG's HANConv on the edges of one of its relations, by weft's kernel.

    Args:
        conv: The convolution.
        relations: Name of its parameters for each relation of the graph.
    """

    needs_contiguous = True

    def __init__(self, conv: Any, relations: Sequence[str]) -> None:
        super().__init__(conv, conv.out_channels)
        self.relations = relations

    def forward(self, view: Any, x: Tensor) -> Tensor:
        if x.device.type == "meta":
            return super().forward(view, x)
        of_graph = isinstance(view, RelationBlock)  # not a block by which its cost is counted
        relation = self.relations[view.relation] if of_graph else next(iter(self.conv.lin_src))
        return han_attention(self.conv, relation, *self._endpoints(view, x))


class RelationConvs(nn.Module):
    """Layer that calls several convolutions on a block, without owning them.

    The first column of its rows is the number of the vertex's type. The results of convolutions with the same type of
    targets are side by side; types share columns.

    Args:
        convs: The convolutions.
        inputs: Relation and rows of each.
        places: Place of each argument among the rows of a block.
        num_types: Number of vertex types.
    """

    def __init__(
        self, convs: Sequence[RelationConv], inputs: Sequence[RelationInput], places: Sequence[Place], num_types: int
    ) -> None:
        super().__init__()
        self.__dict__["convs"] = convs
        self.inputs, self.places, self.num_types = inputs, places, num_types

    def forward(self, view: View, x: Tensor) -> Tensor:
        sources, _, num_targets = view.block(x)
        vertex_type = sources[:, :1]
        block: TypedBlock = view.typed_block(vertex_type, num_targets, self.num_types)
        results = self.on_block(view, block, block.split(sources, self.places))
        return block.join(vertex_type, [self.places[target].of_type for _, _, target in self.inputs], results)

    def on_block(self, view: View, block: TypedBlock, rows: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return the result of each convolution, [n_t, .].

        Args:
            view: View of the edges of all relations.
            block: The edges by relation.
            rows: Rows of the sources, for each argument.
        """
        convs: Sequence[RelationConv] = self.__dict__["convs"]
        if any(conv.needs_contiguous for conv in convs):
            rows = [x.contiguous() for x in rows]
        counts = [block.num_targets_of(place.of_type) for place in self.places]
        # All rows as they are, not as a slice: constant features keep their nonzeros.
        targets = [x if count == len(x) else x[:count] for x, count in zip(rows, counts, strict=True)]
        parts = [
            RelationBlock(
                view,
                block.edges[number],
                counts[target],
                None if source == target else targets[target],
                (number, self.places[source].of_type, self.places[target].of_type),
            )
            for number, source, target in self.inputs
        ]
        return [conv(part, rows[each.source]) for conv, part, each in zip(convs, parts, self.inputs, strict=True)]

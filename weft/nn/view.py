"""The `View` protocol: all that a layer can read and compute on the graph."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from torch import Tensor

from weft.nn.aggregate.aggregate import Aggregate, Rows
from weft.nn.aggregate.attention import Attend, AttendEdges, MaskKey
from weft.nn.aggregate.reduce import ByRelation, Max, Sum
from weft.nn.aggregate.relations import ColumnTransform, OwnRelationRows
from weft.nn.aggregate.typed_block import TypedBlock, TypeOrder
from weft.utils.errors import InputError, check_word


@dataclass(frozen=True, kw_only=True)
class TypedRows:
    """Features of a rank's n rows, sorted by vertex type, for a graph whose types have different features."""

    features: tuple[Tensor, ...]
    """Features [k, F_t] of the k rows of each type with features."""
    num_embedded: int
    """Number of rows of types without features, which have trained embeddings."""
    order: Tensor | None = None
    """Position of each row in the concatenation of `features` and the embedded rows, int64 [n]; None: 0 to n - 1."""


class View(Protocol):
    """The graph as a layer sees it: message passing over in-edges, and all else that couples rows. Rows are [n, F].

    Each strategy implements this protocol. `propagate`, `attend`, `attend_edges` and `relate` are forms of `aggregate`.
    """

    def aggregate(self, op: Aggregate, rows: Rows, steps: int = 1) -> Tensor:
        """Return the result [n, F] of an aggregate.

        Args:
            op: The aggregate.
            rows: The tensors that it reads, by name. Rows have one entry for each vertex.
            steps: Number of times that it is applied.
        """
        ...

    @property
    def relation_rows(self) -> OwnRelationRows:
        """Relation rows of this rank's vertices: one for each pair of a vertex and a relation of its in-edges."""
        ...

    def propagate(
        self,
        x: Tensor,
        *,
        reduce: Literal["sum", "mean", "max"] = "sum",
        norm: Literal["gcn"] | None = None,
        weighted: bool = False,
        steps: int = 1,
    ) -> Tensor:
        """Return `A^steps x` [n, F]: the sum, mean or maximum over in-neighbours; zero for vertices without in-edges.

        Args:
            x: Rows [n, F].
            reduce: 'sum', 'mean' or 'max'.
            norm: 'gcn' replaces A by D^-1/2 (A + I) D^-1/2 (Kipf and Welling 2017, eq. 2); only with a sum.
            weighted: True to multiply by the graph's edge weights; not with a maximum.
            steps: Number of times that it is applied.

        Raises:
            InputError: `reduce` or `norm` is unknown, or `reduce` does not use a norm or weights.
        """
        check_word("reduce", reduce, ("sum", "mean", "max"))
        if norm is not None:
            check_word("norm", norm, ("gcn",))
            if reduce != "sum":
                raise InputError(f"norm='{norm}' has no effect on reduce='{reduce}': leave it out, or use reduce='sum'")
        if reduce != "max":
            return self.aggregate(Sum(norm="mean" if reduce == "mean" else norm, weighted=weighted), {"x": x}, steps)
        if weighted:
            raise InputError("weighted=True has no effect on reduce='max': leave it out, or use 'sum' or 'mean'")
        return self.aggregate(Max(), {"x": x}, steps)

    def attend(
        self, h: Tensor, logit_src: Tensor, logit_dst: Tensor, *, slope: float, steps: int = 1, dropout: float = 0.0
    ) -> Tensor:
        """Return the attention output [n, H D]: the sum over in-neighbours and v itself, weighted by softmax, by head.

        The logit of an edge u -> v is leaky_relu(logit_src_u + logit_dst_v).

        Args:
            h: Rows [n, H D].
            logit_src: Source part of the logits, [n, H].
            logit_dst: Target part of the logits, [n, H].
            slope: Slope of the leaky ReLU for negative arguments.
            steps: Number of times that the sum is applied, with the same weights.
            dropout: Dropout probability of the weights (see `mask_key`).
        """
        mask_key = self.mask_key(dropout)
        return self.aggregate(*Attend.of(h, logit_src, logit_dst, slope=slope, dropout=mask_key), steps)

    def attend_edges(
        self,
        h: Tensor,
        left: Tensor | None,
        right: Tensor,
        attention: Tensor,
        *,
        edge_map: Tensor | None = None,
        slope: float,
        steps: int = 1,
        dropout: float = 0.0,
    ) -> Tensor:
        """Return the attention output [n, H D] for logits that need both endpoints of an edge, or its features.

        The logit of an edge u -> v is `attention . leaky_relu(left_u + right_v + f_uv edge_map)`, by head, where f_uv
        are the edge's features, if edge_map is given. A self-loop that is added has the mean features of v's in-edges.

        Args:
            h: Rows [n, H D].
            left: Source part of the argument, [n, H C]; None: h.
            right: Target part of the argument, [n, H C].
            attention: Attention vectors [H, C].
            edge_map: Weights [K, H C] of the edge features; None: logits do not depend on these.
            slope: Slope of the leaky ReLU for negative arguments.
            steps: Number of times that the sum is applied, with the same weights.
            dropout: Dropout probability of the weights (see `mask_key`).
        """
        mask_key = self.mask_key(dropout)
        request = AttendEdges.of(h, left, right, attention, edge_map=edge_map, slope=slope, dropout=mask_key)
        return self.aggregate(*request, steps)

    def relate(
        self, x: Tensor, weight: Tensor | Sequence[ColumnTransform], *, reduce: Literal["sum", "mean"] = "mean"
    ) -> Tensor:
        """Return the sum over relations r of `W_r` times the mean or sum of the in-neighbours by r: [n, .].

        Args:
            x: Rows [n, .].
            weight: Either [R, B, i, o]: for each relation r, a block-diagonal matrix W_r with B blocks of i x o. Or
                blocks of the W_r by their columns; outside of these, W_r is zero, which weft skips.
            reduce: 'mean' or 'sum' over the in-neighbours by a relation.

        Raises:
            InputError: `reduce` is another word.
        """
        return self.relation_rows.transform(self.aggregate(ByRelation.reducing(reduce), {"x": x}), weight)

    @property
    def typed_rows(self) -> TypedRows:
        """Features of this rank's rows by vertex type, in a graph whose types have different features."""
        ...

    def embed(self, weight: Tensor) -> Tensor:
        """Return the embedding of each of this rank's vertices without features. `weight`: its rows of the table."""
        ...

    def targets(self, x: Tensor) -> Tensor:
        """Return the target rows of source rows x: the first ones. A rank may compute fewer rows than it reads."""
        ...

    def block(self, x: Tensor) -> tuple[Tensor, Tensor, int]:
        """Return (source rows, edge_index [2, E], number of targets), for a layer that reads the edges itself."""
        ...

    @property
    def has_all_sources(self) -> bool:
        """True if this rank has the rows of all sources: `block` returns the rows that it gets."""
        ...

    @property
    def edge_features(self) -> Tensor | None:
        """Features of the edges that `block` returned, [E, K], in their order, constant; None if they have none."""
        ...

    @property
    def edge_weight(self) -> Tensor | None:
        """Weights of the edges that `block` returned, [E], in their order, constant; None if they have none."""
        ...

    @property
    def edge_type(self) -> Tensor | None:
        """Relation of the edges that `block` returned, int64 [E], in their order; None if they have none."""
        ...

    def typed_block(self, vertex_type: Tensor, num_targets: int, num_types: int) -> TypedBlock:
        """Return what `block` returned, by relation and vertex type.

        Args:
            vertex_type: Number of each source's vertex type, [s, 1].
            num_targets: Number of targets.
            num_types: Number of vertex types.
        """
        ...

    def type_order(self, vertex_type: Tensor, num_types: int) -> TypeOrder:
        """Return the order by vertex type of this rank's rows, before or after an aggregate.

        Args:
            vertex_type: Number of each row's vertex type, [n, 1].
            num_types: Number of vertex types.
        """
        ...

    def total(self, x: Tensor) -> Tensor:
        """Return the sum [F] of the rows of all vertices, on all ranks."""
        ...

    @property
    def num_vertices(self) -> int:
        """Number of vertices of the graph, whose rows `total` sums."""
        ...

    def dropout(self, x: Tensor, p: float, *, relu: bool = False, rows: slice | Tensor = slice(None)) -> Tensor:
        """Return x after dropout with a keyed mask, which is the same on any number of ranks.

        The mask depends on (seed, epoch, stage, call, vertex, column) alone.

        Args:
            x: Rows [n, F].
            p: Probability that a number becomes zero; 0 in evaluation.
            relu: True to apply ReLU to x first.
            rows: Positions of x among this rank's rows, a range or int64 [n].
        """
        ...

    def mask_key(self, p: float) -> MaskKey | None:
        """Return the key of a dropout mask over edges with probability p; None if p is 0, as in evaluation.

        The mask depends on (seed, epoch, stage, call, target, source, head) alone. Parallel edges (of the same source
        and target) are numbered in their order.
        """
        ...

    def linear(self, x: Tensor, weight: Tensor, added: Tensor | None = None, *, summed: bool = False) -> Tensor:
        """Return `x W + added` [n, out_width], like weft.nn.linear; faster if x are constant sparse features.

        Args:
            x: Rows [n, in_width].
            weight: W, [in_width, out_width].
            added: Rows [n, out_width], or a bias [out_width]; None: nothing is added.
            summed: True if the layer only sums the result over edges; its memory layout may then have padding.
        """
        ...

    def transform_first(self, x: Tensor, out_width: int) -> bool:
        """Return whether a linear transform before the aggregate makes a training step cheaper than one after it.

        Args:
            x: Rows [n, in_width] that the layer transforms and aggregates.
            out_width: Number of columns after the transform.
        """
        ...

"""What a layer sees of the graph."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

from torch import Tensor

from weft.nn.aggregate.aggregate import Aggregate, Rows
from weft.nn.aggregate.attention import Attend, AttendEdges, MaskKey
from weft.nn.aggregate.reduce import ByRelation, Max, Sum
from weft.nn.aggregate.relations import OwnRelationRows
from weft.utils.errors import InputError, check_word


@dataclass(frozen=True, kw_only=True)
class TypedRows:
    """A rank's rows by vertex type, where types differ in their features.

    features: [k, F_t] of the rows of each type that has some. num_embedded: the rows of the other types.
    order: int64 [n], where each of the rank's rows stands among those of features[0], features[1] and so on, and the
    embedded ones last; None: they stand in order.
    """

    features: tuple[Tensor, ...]
    num_embedded: int
    order: Tensor | None = None


class View(Protocol):
    """A layer's middle phase, over in-edges, and what else couples rows or names them. Rows are [n, F].

    Layers are written in the words `propagate`, `attend`, `attend_edges` and `relate`, which are `aggregate`.
    """

    def aggregate(self, op: Aggregate, rows: Rows, steps: int = 1) -> Tensor:
        """What an aggregate makes of these rows, of which there is one for each vertex; `steps` times."""
        ...

    @property
    def relation_rows(self) -> OwnRelationRows:
        """The rows of vertices and relations that are this rank's."""
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
        """`A^steps x`: the sum, mean or maximum over in-neighbours, zero where there are none.

        norm 'gcn' is D^-1/2 (A + I) D^-1/2 (Kipf and Welling 2017, eq. 2). weighted uses the graph's edge weights.

        Raises:
            InputError: an unknown word, or a norm or weights that `reduce` does not use.
        """
        check_word("reduce", reduce, ("sum", "mean", "max"))
        if norm is not None:
            check_word("norm", norm, ("gcn",))
            if reduce != "sum":
                raise InputError(f"norm='{norm}' has no effect on reduce='{reduce}': leave it out, or take a sum")
        if reduce != "max":
            return self.aggregate(Sum(norm="mean" if reduce == "mean" else norm, weighted=weighted), {"x": x}, steps)
        if weighted:
            raise InputError("weighted=True has no effect on reduce='max': leave it out, or take a sum or mean")
        return self.aggregate(Max(), {"x": x}, steps)

    def attend(
        self, h: Tensor, logit_src: Tensor, logit_dst: Tensor, *, slope: float, steps: int = 1, dropout: float = 0.0
    ) -> Tensor:
        """The sum of h [n, H D] over in-edges and v itself, weighted by edge softmax; the weights serve all steps.

        The softmax is of leaky_relu(logit_src_u + logit_dst_v), logits [n, H], both of all rows of h. dropout: of the
        weights, for which see `mask_key`.
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
        """As `attend`, by logits that need both ends of an edge: `attention . leaky_relu(left_u + right_v)`, by head.

        left, right [n, H C], of all rows of h, and attention [H, C]; left None: h itself. With edge_map [K, H C], the
        argument has the graph's edge features times it besides; v's own edge, where the graph has none, has the mean of
        those of v's in-edges.
        """
        mask_key = self.mask_key(dropout)
        request = AttendEdges.of(h, left, right, attention, edge_map=edge_map, slope=slope, dropout=mask_key)
        return self.aggregate(*request, steps)

    def relate(self, x: Tensor, weight: Tensor, *, reduce: Literal["sum", "mean"] = "mean") -> Tensor:
        """Over relations r, the sum of `W_r` times the mean, or sum, of x [n, B i] over in-neighbours by r: [n, B o].

        weight: [R, B, i, o], for each relation a block-diagonal matrix with B blocks.

        Raises:
            InputError: an unknown word for `reduce`.
        """
        return self.relation_rows.map(self.aggregate(ByRelation.reducing(reduce), {"x": x}), weight)

    @property
    def typed_rows(self) -> TypedRows:
        """What is known of this rank's rows in a graph whose vertices have no features of one width."""
        ...

    def embed(self, weight: Tensor) -> Tensor:
        """A row for each of this rank's vertices without features, from the rows that it keeps of an embedding."""
        ...

    def targets(self, x: Tensor) -> Tensor:
        """The destination rows of a source tensor: its first ones. A rank may compute fewer rows than it reads."""
        ...

    def block(self, x: Tensor) -> tuple[Tensor, Tensor, int]:
        """(source rows, edge_index [2, E], number of targets), for a layer that wants the edges themselves."""
        ...

    @property
    def edge_features(self) -> Tensor | None:
        """What is known of the edges that `block` gave, in their order: [E, K], constant; None if nothing is."""
        ...

    @property
    def edge_weight(self) -> Tensor | None:
        """The weights of the edges that `block` gave, in their order: [E], constant; None if they have none."""
        ...

    def total(self, x: Tensor) -> Tensor:
        """The sum [F] of the rows, every vertex counted once."""
        ...

    @property
    def num_vertices(self) -> int:
        """The number of rows that `total` sums."""
        ...

    def dropout(self, x: Tensor, p: float, *, relu: bool = False) -> Tensor:
        """Dropout whose mask depends on (seed, epoch, stage, call, vertex, column) alone; with relu, of max(x, 0)."""
        ...

    def mask_key(self, p: float) -> MaskKey | None:
        """What names the dropout mask of an aggregate over edges; None where p is 0, as it is to be in evaluation.

        The mask depends on (seed, epoch, stage, call, target, source, head) alone, and of edges that join the same ends
        on how many come before.
        """
        ...

    def linear(self, x: Tensor, weight: Tensor, added: Tensor | None = None, *, summed: bool = False) -> Tensor:
        """`x W` and what is added to it, rows or one bias, as weft.nn.linear; constant features may be sparse.

        summed: the layer asks for a sum over edges of the result, and does nothing else with it.
        """
        ...

    def transform_first(self, x: Tensor, out_width: int) -> bool:
        """Whether mapping x to `out_width` columns before their aggregate costs a training step less than after it."""
        ...

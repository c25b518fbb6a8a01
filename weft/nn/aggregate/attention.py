"""Aggregates weighted by the softmax of logits over in-edges."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, NamedTuple

from torch import Tensor

from weft.data import Adjacency
from weft.kernels import (
    Attention,
    AttentionInputs,
    EdgeDropout,
    SourceGrads,
    attend,
    attend_and_save,
    attend_backward,
    attend_edges,
    pair_logits,
)
from weft.nn.aggregate.aggregate import SLOT_BYTES, TARGET_BYTES, Aggregate, Request, Rows, WorkingSet
from weft.nn.aggregate.partial import Partial, log_sum_exp, merge_softmaxes
from weft.nn.aggregate.topology import EdgeSubset, Topology
from weft.runtime import native
from weft.utils.random import RandomKey

ID_BYTES = 8
"""Bytes of the original id of an endpoint, which keys attention dropout."""


class MaskKey(NamedTuple):
    """Key of a dropout mask over edges and heads; `View.mask_key` returns one."""

    p: float
    """Probability that a weight becomes zero."""
    key: RandomKey
    """Key from which the mask is computed."""
    first_head: int = 0
    """Index, among all heads of the layer, of the first head in these tensors."""


@dataclass(frozen=True)
class EdgeSoftmax(Aggregate):
    """Attention: the sum of h over in-neighbours and the target itself, weighted by the softmax of logits, by head."""

    bounds: tuple[int, ...]
    """Head j has the columns bounds[j]:bounds[j + 1] of h."""
    slope: float
    """Slope of the logits' leaky ReLU for negative arguments."""
    dropout: MaskKey | None = field(default=None, compare=False, kw_only=True)
    """Dropout of the attention weights, the same in all steps. Not compared: it changes in every training step."""
    first = "h"
    by_edge: ClassVar[bool]
    """True if the kernel reads logits [E, H] of edges, False if it computes them from logits of vertices."""

    @property
    def loops(self) -> bool:
        return True

    @property
    def heads(self) -> int:
        return len(self.bounds) - 1

    def edge_logits(self, topology: Topology, rows: Rows) -> Tensor:
        """Return the logits [E, H] of a block's edges, or [E + n, H] if self-loops are added.

        Args:
            topology: The edges.
            rows: The tensors that the aggregate reads, by name.
        """
        raise NotImplementedError

    def edge_dropout(self, topology: Topology) -> EdgeDropout | None:
        """Return the dropout of a block's attention weights, keyed by original vertex ids; None: no dropout."""
        return None if self.dropout is None else EdgeDropout(*self.dropout, topology.ids, topology.target_ids)

    def working_set(
        self, adjacency: Adjacency, width: int, *, itemsize: int, size: int = 1, num_edge_features: int = 0
    ) -> WorkingSet:
        columns, edge_id = -(-width // size), native.id_dtype(adjacency.num_edges).itemsize
        heads = min(self.heads, (columns - 1) // (width // self.heads) + 2)  # columns may begin and end within a head
        row, logits, inputs = columns * itemsize, heads * itemsize, self.logit_width // self.heads * heads * itemsize
        weight = itemsize if adjacency.weight is not None else 0
        edge = 2 * (adjacency.indices.itemsize + weight) + edge_id
        if self.by_edge:
            edge += 5 * logits + (2 * num_edge_features * itemsize + 8 if num_edge_features else 0)
        # Target: ids, a self-loop flag, rows and results with gradients, logits and their inputs, a self-loop.
        # Source: ids, rows with gradients, inputs of logits with gradients and their summands.
        return WorkingSet(
            TARGET_BYTES + ID_BYTES + 1 + 3 * row + 5 * logits + 2 * inputs + edge,
            SLOT_BYTES + ID_BYTES + 3 * row + 8 * inputs,
            edge,
        )

    def partial(self, part: EdgeSubset, rows: Rows) -> Partial:
        logits = self.edge_logits(part, rows)
        dropout = self.edge_dropout(part)
        y = attend_edges(part.adjacency, rows["h"], logits, bounds=self.bounds, loop=part.loop, dropout=dropout)
        return Partial(y, log_sum_exp(part, logits))

    def combine(self, partials: Sequence[Partial]) -> Tensor:
        return merge_softmaxes(partials, self.bounds)


@dataclass(frozen=True)
class Attend(EdgeSoftmax):
    """Attention of GAT, with logits leaky_relu(logit_src_u + logit_dst_v) [., H].

    Source: Velickovic et al. 2018, eqs. 3 and 4.
    """

    can_save = True
    by_edge = False

    @classmethod
    def of(
        cls, h: Tensor, logit_src: Tensor, logit_dst: Tensor, *, slope: float, dropout: MaskKey | None = None
    ) -> Request:
        """Return a request for this aggregate, with all columns of each head.

        Args:
            h: Rows [s, H D] that are summed.
            logit_src: Part [s, H] of the logits that depends on the source.
            logit_dst: Part [n, H] of the logits that depends on the target.
            slope: Slope of the leaky ReLU for negative arguments.
            dropout: Dropout of the attention weights.
        """
        op = cls(even_heads(h.shape[1], logit_src.shape[1]), slope, dropout=dropout)
        return Request(op, {"h": h, "logit_src": logit_src, "logit_dst": logit_dst})

    @property
    def source(self) -> tuple[str, ...]:
        return "h", "logit_src"

    @property
    def target(self) -> tuple[str, ...]:
        return ("logit_dst",)

    @property
    def logit_width(self) -> int:
        return self.heads

    def run(self, topology: Topology, prepared: Rows, steps: int = 1) -> Tensor:
        return attend(
            topology.adjacency,
            *(prepared[name] for name in (*self.source, *self.target)),
            bounds=self.bounds,
            loop=topology.loop,
            slope=self.slope,
            steps=steps,
            dropout=self.edge_dropout(topology),
        )

    def apply_saving(self, topology: Topology, rows: Rows) -> tuple[Tensor, tuple[Tensor, ...]]:
        return attend_and_save(self._over(topology), rows["h"], rows["logit_src"], rows["logit_dst"])

    def gradients(
        self,
        topology: Topology,
        rows: Rows,
        result: Tensor,
        saved: Sequence[Tensor],
        grad: Tensor,
        into: Rows,
    ) -> Rows:
        inputs = AttentionInputs(rows["h"], rows["logit_src"], rows["logit_dst"], result)
        accumulated = SourceGrads(into.get("h"), into.get("logit_src"))
        grad_h, logits = attend_backward(self._over(topology), inputs, saved, grad, accumulated)
        grads = {"h": grad_h, "logit_src": logits.source, "logit_dst": logits.target}
        return {name: value for name, value in grads.items() if name not in into}

    def edge_logits(self, topology: Topology, rows: Rows) -> Tensor:
        left, right, bounds = rows["logit_src"], rows["logit_dst"], range(self.heads + 1)
        ones, loop = left.new_ones(self.heads), topology.loop
        return pair_logits(topology.adjacency, left, right, ones, bounds=bounds, loop=loop, slope=self.slope)

    def _over(self, topology: Topology) -> Attention:
        return Attention(
            adj=topology.adjacency,
            bounds=self.bounds,
            loop=topology.loop,
            slope=self.slope,
            steps=1,
            dropout=self.edge_dropout(topology),
        )


@dataclass(frozen=True, kw_only=True)
class AttendEdges(EdgeSoftmax):
    """Attention of GATv2, with logits attention . leaky_relu(left_u + right_v), which need both endpoints of an edge.

    With edge features f_e [K], the argument of leaky_relu is left_u + right_v + f_e edge_map. Shapes: left and right
    [., H C], attention [H C], edge_map [K, H C]. Source: Brody et al. 2022, eq. 7.
    """

    logit_bounds: tuple[int, ...]
    """Head j has the columns logit_bounds[j]:logit_bounds[j + 1] of left and right."""
    separate_left: bool = True
    """True if left is a tensor of its own, False if it is h."""
    has_edge_map: bool = False
    """True if logits depend on edge features."""
    by_edge = True

    @classmethod
    def of(
        cls,
        h: Tensor,
        left: Tensor | None,
        right: Tensor,
        attention: Tensor,
        *,
        edge_map: Tensor | None,
        slope: float,
        dropout: MaskKey | None = None,
    ) -> Request:
        """Return a request for this aggregate, with all columns of each head.

        Args:
            h: Rows [s, H D] that are summed.
            left: Source part [s, H C] of the logits' argument; None: h.
            right: Target part [n, H C] of the logits' argument.
            attention: Attention vectors [H, C].
            edge_map: Weights [K, H C] of edge features; None: logits do not depend on these.
            slope: Slope of the leaky ReLU for negative arguments.
            dropout: Dropout of the attention weights.
        """
        heads = len(attention)
        rows = {"h": h, "left": left, "right": right, "attention": attention.reshape(-1), "edge_map": edge_map}
        op = cls(
            bounds=even_heads(h.shape[1], heads),
            slope=slope,
            logit_bounds=even_heads(right.shape[1], heads),
            separate_left=left is not None,
            has_edge_map=edge_map is not None,
            dropout=dropout,
        )
        return Request(op, {name: value for name, value in rows.items() if value is not None})

    @property
    def source(self) -> tuple[str, ...]:
        return ("h", "left") if self.separate_left else ("h",)

    @property
    def target(self) -> tuple[str, ...]:
        return ("right",)

    @property
    def shared(self) -> tuple[str, ...]:
        return ("attention", "edge_map") if self.has_edge_map else ("attention",)

    @property
    def logit_width(self) -> int:
        return self.logit_bounds[-1]

    @property
    def separate_logit_width(self) -> int:
        return self.logit_width if self.separate_left else 0

    def stepwise(self, rows: Rows) -> Request:
        return (
            Request(self, rows)
            if self.separate_left
            else Request(replace(self, separate_left=True), {**rows, "left": rows["h"]})
        )

    def prepare(self, topology: Topology, rows: Rows) -> Rows:
        return {"h": rows["h"], "logits": self.edge_logits(topology, rows)}

    def run(self, topology: Topology, prepared: Rows, steps: int = 1) -> Tensor:
        return attend_edges(
            topology.adjacency,
            prepared["h"],
            prepared["logits"],
            bounds=self.bounds,
            loop=topology.loop,
            steps=steps,
            dropout=self.edge_dropout(topology),
        )

    def edge_logits(self, topology: Topology, rows: Rows) -> Tensor:
        return pair_logits(
            topology.adjacency,
            rows["left" if self.separate_left else "h"],
            rows["right"],
            rows["attention"],
            rows.get("edge_map"),
            bounds=self.logit_bounds,
            loop=topology.loop,
            slope=self.slope,
            features=topology.features_with_loops if self.has_edge_map else None,
        )


def even_heads(width: int, heads: int) -> tuple[int, ...]:
    """Return the bounds of the columns of each head, for heads of equal width.

    Args:
        width: Number of columns of all heads.
        heads: Number of heads.
    """
    return tuple(width // heads * head for head in range(heads + 1))

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
    attend_edges,
    attend_and_save,
    attend_backward,
    pair_logits,
)
from weft.nn.aggregate.aggregate import SLOT_BYTES, TARGET_BYTES, Aggregate, Request, Rows, WorkingSet
from weft.nn.aggregate.partial import Partial, log_sum_exp, merge_softmaxes
from weft.nn.aggregate.topology import EdgeSubset, Topology
from weft.runtime import native
from weft.utils.random import RandomKey

ID_BYTES = 8
"""Of the original id of each end, by which dropout goes."""


class MaskKey(NamedTuple):
    """Dropout of the weights of edges by head; `View.mask_key` gives one."""

    p: float
    key: RandomKey
    first_head: int = 0
    """Which of all heads is the first at hand."""


@dataclass(frozen=True)
class EdgeSoftmax(Aggregate):
    """The sum of h over in-edges and v itself, weighted by the softmax of logits by head.

    bounds: head j has the columns bounds[j]:bounds[j + 1] of the h at hand. slope: of the logits' leaky ReLU.
    dropout: of the weights, in all steps the same; it is another in every step of training and no part of what the
    aggregate is: two that differ in it alone are equal.
    """

    bounds: tuple[int, ...]
    slope: float
    dropout: MaskKey | None = field(default=None, compare=False, kw_only=True)
    first = "h"
    by_edge: ClassVar[bool]
    """Whether the logits are numbers by edge."""

    @property
    def loops(self) -> bool:
        return True

    @property
    def heads(self) -> int:
        return len(self.bounds) - 1

    def edge_logits(self, topology: Topology, rows: Rows) -> Tensor:
        """The logits [E, H] of a block's edges, or [E + n, H] where v may have a loop besides."""
        raise NotImplementedError

    def edge_dropout(self, topology: Topology) -> EdgeDropout | None:
        """The dropout of a block's weights, which knows whose they are."""
        return None if self.dropout is None else EdgeDropout(*self.dropout, topology.ids, topology.target_ids)

    def working_set(
        self, adjacency: Adjacency, width: int, *, itemsize: int, size: int = 1, num_edge_features: int = 0
    ) -> WorkingSet:
        share, edge_id = -(-width // size), native.id_dtype(adjacency.num_edges).itemsize
        heads = min(self.heads, (share - 1) // (width // self.heads) + 2)  # it may begin and end within heads
        row, logits, ends = share * itemsize, heads * itemsize, self.logit_width // self.heads * heads * itemsize
        weight = itemsize if adjacency.weight is not None else 0
        edge = 2 * (adjacency.indices.itemsize + weight) + edge_id
        if self.by_edge:
            edge += 5 * logits + (2 * num_edge_features * itemsize + 8 if num_edge_features else 0)
        return WorkingSet(
            TARGET_BYTES + ID_BYTES + 1 + 3 * row + 5 * logits + 2 * ends + edge,
            SLOT_BYTES + ID_BYTES + 3 * row + 8 * ends,
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
    """By logits leaky_relu(logit_src_u + logit_dst_v) [., H] (Velickovic et al. 2018, eqs. 3 and 4)."""

    can_save = True
    by_edge = False

    @classmethod
    def of(
        cls, h: Tensor, logit_src: Tensor, logit_dst: Tensor, *, slope: float, dropout: MaskKey | None = None
    ) -> Request:
        """As `View.attend` takes it."""
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
        there = SourceGrads(into.get("h"), into.get("logit_src"))
        grad_h, logits = attend_backward(self._over(topology), inputs, saved, grad, there)
        found = {"h": grad_h, "logit_src": logits.source, "logit_dst": logits.target}
        return {name: value for name, value in found.items() if name not in into}

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
    """By logits that need both ends of an edge, attention . leaky_relu(left_u + right_v) by head.

    (Brody et al. 2022, eq. 7.) left, right [., H C], attention [H C]; with edge_map [K, H C], the argument has the
    edge's features times it besides.

    logit_bounds: of the heads in left and right. apart: whether left comes beside h, or is h itself. has_edge_map:
    whether edge features take part.
    """

    logit_bounds: tuple[int, ...]
    separate_left: bool = True
    has_edge_map: bool = False
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
        """As `View.attend_edges` takes it."""
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
        return Request(self, rows) if self.separate_left else Request(replace(self, separate_left=True), {**rows, "left": rows["h"]})

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
    """Bounds of the columns of each head, where all of them are here."""
    return tuple(width // heads * head for head in range(heads + 1))

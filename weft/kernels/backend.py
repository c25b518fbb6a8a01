"""Interface of a kernel backend: operations and their adjoints on plain tensors, without autograd and checks.

Shapes: n targets, s sources, E edges, F columns, f columns of this rank, H heads, K edge features, W columns of all
heads (`docs/glossary.md`). All tensors are contiguous, except for the rows of sums, which may be padded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from weft.data.adjacency import Adjacency
from weft.utils.random import RandomKey


class Scale(NamedTuple):
    """Constant factors of a sum: `y_v = target_v * sum_e w_e source_u x_u + loop_v x_v`. None: no factor or loop."""

    source: Tensor | None = None
    """Factor of each source row, [s]."""
    target: Tensor | None = None
    """Factor of each sum, [n]."""
    loop: Tensor | None = None
    """Factor of each target's own row, [n]; targets must be the first n sources."""


class EdgeDropout(NamedTuple):
    """Dropout of attention weights after the softmax: 0 with probability p, else the weight times `1 / (1 - p)`.

    The mask depends only on (key, target, source, copy, first_head + head), so it is the same on any number of ranks.
    Duplicate edges are next to each other in a row; `copy` numbers them from 0. An added self-loop is copy 0.
    """

    p: float
    """Probability that a weight is dropped."""
    key: RandomKey
    """Random key of the mask."""
    first_head: int
    """Global number of the first head."""
    sources: Tensor
    """Global vertex id of each source, int64 [s]."""
    targets: Tensor
    """Global vertex id of each target, int64 [n]."""

    @property
    def scale(self) -> float:
        """Factor of weights that are not dropped."""
        return 1 / (1 - self.p)


@dataclass(frozen=True, kw_only=True)
class Attention:
    """Specification of an attention: everything except for its rows and logits."""

    adj: Adjacency
    """In-edges of the targets."""
    bounds: Sequence[int]
    """Column range of each head: head j has columns `bounds[j]:bounds[j + 1]` of h."""
    loop: Tensor | None
    """Mask of targets that get a self-loop in addition to their edges, bool [n]; None: no target."""
    slope: float
    """Negative slope of leaky_relu."""
    steps: int
    """Number of times that the weighted sum is applied, with the same weights."""
    dropout: EdgeDropout | None = None
    """Dropout of the weights."""

    @property
    def scale(self) -> float:
        """Factor of the weights that dropout does not drop."""
        return 1.0 if self.dropout is None else self.dropout.scale


class EdgeFeatures(NamedTuple):
    """Constant features of the edges, and of the self-loop that each target may get."""

    edges: Tensor
    """Features of the edges, [E, K]."""
    loops: Tensor | None = None
    """Features of the self-loops, [n, K]."""

    def rows(self, *, loops: bool) -> Tensor:
        """Return the features of the edges, [E, K], or of the edges and then the self-loops, [E + n, K]."""
        return torch.cat([self.edges, self.loops]) if loops and self.loops is not None else self.edges


@dataclass(frozen=True, kw_only=True)
class Pairs:
    """Specification of logits that need the rows of both endpoints: everything except for tensors with gradients."""

    adj: Adjacency
    """In-edges of the targets."""
    bounds: Sequence[int]
    """Column range of each head: head j has columns `bounds[j]:bounds[j + 1]` of left and right."""
    loop: Tensor | None
    """Mask of targets that get a self-loop in addition to their edges, bool [n]; None: no target."""
    slope: float
    """Negative slope of leaky_relu."""
    features: EdgeFeatures | None
    """Features of the edges, or None."""


class PairGrads(NamedTuple):
    """Gradients of the inputs of `pair_logits`."""

    left: Tensor
    """Gradient of the source rows, [s, W]."""
    right: Tensor
    """Gradient of the target rows, [n, W]."""
    attention: Tensor
    """Gradient of the attention vector, [W]."""
    edge_map: Tensor | None
    """Gradient of the linear transform of edge features, [K, W]; None without features."""


class AttentionInputs(NamedTuple):
    """Inputs and result of an attention, for its backward pass."""

    h: Tensor | None
    """Source rows, [s, f]; needed for the gradients of logits only."""
    logit_src: Tensor
    """Logits of sources, [s, H]."""
    logit_dst: Tensor
    """Logits of targets, [n, H]."""
    y: Tensor | None
    """Result, [n, f]; needed for the gradients of logits only."""

    def between(self, rows: Sequence[Tensor]) -> list[Tensor]:
        """Return a list of h, the given rows, and y."""
        assert self.h is not None
        assert self.y is not None
        return [self.h, *rows, self.y]


class LogitGrads(NamedTuple):
    """Gradients of the logits of sources and targets."""

    source: Tensor
    """Gradient of logit_src, [s, H]."""
    target: Tensor
    """Gradient of logit_dst, [n, H]."""


class SourceGrads(NamedTuple):
    """Gradients of an attention's source tensors to which a backward pass adds. None: start from zero."""

    h: Tensor | None = None
    """Gradient of h, [s, f]."""
    logits: Tensor | None = None
    """Gradient of logit_src, [s, H]."""


class SumBackend(Protocol):
    """Kernels for sums over in-edges and their adjoints."""

    def spmm(self, adj: Adjacency, x: Tensor, scale: Scale, weighted: bool, in_sum_dtype: bool = False) -> Tensor:
        """Return the sums over in-edges, [n, F]; see `Scale` for the formula.

        Args:
            adj: The edges.
            x: Source rows, [s, F].
            scale: Constant factors.
            weighted: True to multiply by the edge weights.
            in_sum_dtype: True for a result in the dtype of sums (float32 for bfloat16 rows), False in that of x.
        """
        ...

    def spmm_transposed(
        self,
        adj: Adjacency,
        grad_y: Tensor,
        scale: Scale,
        weighted: bool,
        into: Tensor | None = None,
        in_sum_dtype: bool = False,
    ) -> Tensor:
        """Return the gradient of x, [s, F]. Adjoint of `spmm`.

        Args:
            adj: The edges.
            grad_y: Gradient of the result, [n, F].
            scale: Constant factors.
            weighted: True to multiply by the edge weights.
            into: Tensor [s, F] to which the gradient is added, and which is returned; None: a new tensor.
            in_sum_dtype: True for a new tensor in the dtype of sums, False in that of grad_y.
        """
        ...


class Backend(SumBackend, Protocol):
    """Kernels for all operations."""

    def spmm_max(self, adj: Adjacency, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the maximum over in-edges by column, and its position among the row's in-edges, both [n, F].

        Args:
            adj: The edges.
            x: Source rows, [s, F].
        """
        ...

    def spmm_max_backward(self, adj: Adjacency, position: Tensor, grad_y: Tensor) -> Tensor:
        """Return the gradient of x, [s, F].

        Args:
            adj: The edges.
            position: Positions of the maxima, [n, F], as `spmm_max` returns them.
            grad_y: Gradient of the maxima, [n, F].
        """
        ...

    def attend(
        self, spec: Attention, h: Tensor, logit_src: Tensor, logit_dst: Tensor, *, needs_logits: bool
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return the weighted sums of an additive attention, [n, f], and tensors [n, .] for `attend_backward`.

        Args:
            spec: Edges, heads and options.
            h: Source rows, [s, f].
            logit_src: Logits of sources, [s, H].
            logit_dst: Logits of targets, [n, H].
            needs_logits: True if the logits need a gradient, for which more tensors are saved.
        """
        ...

    def attend_backward(
        self,
        spec: Attention,
        inputs: AttentionInputs,
        saved: Sequence[Tensor],
        grad_y: Tensor,
        *,
        needs_h: bool,
        needs_logits: bool,
        into: SourceGrads = SourceGrads(),  # noqa: B008
    ) -> tuple[Tensor | None, LogitGrads | None]:
        """Return the gradient of h, [s, f], and those of the logits; None if not needed.

        Args:
            spec: Edges, heads and options.
            inputs: Inputs and result of `attend`.
            saved: Tensors that `attend` returned for this function.
            grad_y: Gradient of the result, [n, f].
            needs_h: True if h needs a gradient.
            needs_logits: True if the logits need a gradient.
            into: Gradients to which those of source tensors are added.
        """
        ...

    def pair_logits(
        self, spec: Pairs, left: Tensor, right: Tensor, attention: Tensor, edge_map: Tensor | None
    ) -> Tensor:
        """Return the logits of edges, [E, H], or of edges and then self-loops, [E + n, H].

        Args:
            spec: Edges, heads and options.
            left: Source rows, [s, W].
            right: Target rows, [n, W].
            attention: Attention vector, [W].
            edge_map: Linear transform of the edge features, [K, W], or None.
        """
        ...

    def pair_backward(
        self,
        spec: Pairs,
        left: Tensor,
        right: Tensor,
        attention: Tensor,
        edge_map: Tensor | None,
        grad_logits: Tensor,
    ) -> PairGrads:
        """Return the gradients of all inputs of `pair_logits`.

        Args:
            spec: Edges, heads and options.
            left: Source rows, [s, W].
            right: Target rows, [n, W].
            attention: Attention vector, [W].
            edge_map: Linear transform of the edge features, [K, W], or None.
            grad_logits: Gradient of the logits, [E, H] or [E + n, H].
        """
        ...

    def dot_logits(self, spec: Attention, left: Tensor, right: Tensor) -> Tensor:
        """Return the dot products `right_v . left_u` by edge and head, [E, H].

        Args:
            spec: Edges and heads.
            left: Source rows, [s, W].
            right: Target rows, [n, W].
        """
        ...

    def dot_backward(self, spec: Attention, left: Tensor, right: Tensor, grad_logits: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gradients of left and right.

        Args:
            spec: Edges and heads.
            left: Source rows, [s, W].
            right: Target rows, [n, W].
            grad_logits: Gradient of the logits, [E, H].
        """
        ...

    def attend_edges(self, spec: Attention, h: Tensor, logits: Tensor) -> tuple[Tensor, Tensor, list[Tensor]]:
        """Return the weighted sums of an attention with given logits, and tensors for the backward pass.

        Args:
            spec: Edges, heads and options.
            h: Source rows, [s, f].
            logits: Logits of edges, [E, H], or of edges and then self-loops, [E + n, H].

        Returns:
            The result, [n, f]; the softmax of the logits, negated where dropout drops it; the input rows of each step.
        """
        ...

    def attend_edges_backward(
        self, spec: Attention, alpha: Tensor, steps: Sequence[Tensor], grad_y: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the gradients of h, [s, f], and of the logits.

        Args:
            spec: Edges, heads and options.
            alpha: Softmax of the logits, negated where dropout drops it.
            steps: Input rows of each step.
            grad_y: Gradient of the result, [n, f].
        """
        ...

    def keyed_dropout(self, x: Tensor, rows: Tensor, key: RandomKey, p: float, first_column: int, relu: bool) -> Tensor:
        """Return x, or max(x, 0), after dropout, [n, F]. Without relu, this is also the backward pass.

        Args:
            x: Rows, [n, F].
            rows: Global vertex id of each row, int64 [n].
            key: Random key of the mask.
            p: Probability that an element is dropped.
            first_column: Global number of the first column.
            relu: True for dropout of max(x, 0).
        """
        ...

    def relu_dropout_backward(self, y: Tensor, grad_y: Tensor, p: float) -> Tensor:
        """Return the gradient of x for dropout with relu, [n, F].

        Args:
            y: Result of the dropout, [n, F].
            grad_y: Gradient of the result, [n, F].
            p: Probability that an element is dropped.
        """
        ...

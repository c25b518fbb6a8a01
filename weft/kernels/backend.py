"""What a backend offers to `ops`: products and their adjoints on plain tensors, without autograd and without checks.

n targets, s sources, E edges, F columns, H heads, as in `docs/glossary.md`. Tensors arrive contiguous, but for
the rows of sums.
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
    """Constant factors by row: `y_v = target_v * sum_e w_e source_u x_u + loop_v x_v`; None is no factor, no loop."""

    source: Tensor | None = None  # [s]
    target: Tensor | None = None  # [n]
    loop: Tensor | None = None  # [n]; uses row v of x, so targets must be the first n sources


class EdgeDropout(NamedTuple):
    """Dropout of weights by edge and head, behind their softmax: `keep / (1 - p)`, or 0 with probability p.

    The mask depends on (key, target, source, copy, first_head + head) alone, where copies are the edges that join the
    same ends and stand side by side, counted from 0; a loop that is added is the first.
    """

    p: float
    key: RandomKey
    first_head: int
    sources: Tensor  # int64 [s], global vertices
    targets: Tensor  # int64 [n]

    @property
    def scale(self) -> float:
        """What is kept is multiplied by it."""
        return 1 / (1 - self.p)


@dataclass(frozen=True, kw_only=True)
class Attention:
    """What an attention is over, besides its tensors.

    Head j owns columns bounds[j]:bounds[j + 1] of h. Where `loop` [n] is true, v has one more edge, from itself.
    """

    adj: Adjacency
    bounds: Sequence[int]
    loop: Tensor | None
    slope: float
    steps: int
    dropout: EdgeDropout | None = None

    @property
    def scale(self) -> float:
        """What the weights that dropout keeps are multiplied by."""
        return 1.0 if self.dropout is None else self.dropout.scale


class EdgeFeatures(NamedTuple):
    """What is known of the edges, constant: of those there are, and of the loop that each target may have besides."""

    edges: Tensor  # [E, K]
    loops: Tensor | None = None  # [n, K]

    def rows(self, *, loops: bool) -> Tensor:
        """Of the edges, and then of the loops: [E + n, K]."""
        return torch.cat([self.edges, self.loops]) if loops and self.loops is not None else self.edges


@dataclass(frozen=True, kw_only=True)
class Pairs:
    """What logits of pairs are over, besides their tensors; head j owns columns bounds[j]:bounds[j + 1] of left."""

    adj: Adjacency
    bounds: Sequence[int]
    loop: Tensor | None
    slope: float
    features: EdgeFeatures | None


class PairGrads(NamedTuple):
    left: Tensor  # [s, W]
    right: Tensor  # [n, W]
    attention: Tensor  # [W]
    edge_map: Tensor | None  # [K, W]


class AttentionInputs(NamedTuple):
    """What an attention read and made; h and y are asked for only where the logits need a gradient."""

    h: Tensor | None  # [s, f]
    logit_src: Tensor  # [s, H]
    logit_dst: Tensor  # [n, H]
    y: Tensor | None  # [n, f]

    def between(self, rows: Sequence[Tensor]) -> list[Tensor]:
        """h, some rows, y."""
        assert self.h is not None
        assert self.y is not None
        return [self.h, *rows, self.y]


class LogitGrads(NamedTuple):
    source: Tensor  # [s, H]
    target: Tensor  # [n, H]


class SourceGrads(NamedTuple):
    """Gradients of what an attention read at sources, to which more are added; None: there are none yet."""

    h: Tensor | None = None  # [s, f]
    logits: Tensor | None = None  # [s, H]


class SumBackend(Protocol):
    """Plain sums over in-edges, and their adjoints."""

    def spmm(self, adj: Adjacency, x: Tensor, scale: Scale, weighted: bool, wide: bool = False) -> Tensor:
        """x [s, F] -> y [n, F]; wide: in the type that rows are summed in."""
        ...

    def spmm_transposed(
        self,
        adj: Adjacency,
        grad_y: Tensor,
        scale: Scale,
        weighted: bool,
        into: Tensor | None = None,
        wide: bool = False,
    ) -> Tensor:
        """The adjoint: grad_y [n, F] -> grad_x [s, F], which is added to `into`, where that is given."""
        ...


class Backend(SumBackend, Protocol):
    """All operations."""

    def spmm_max(self, adj: Adjacency, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [s, F] -> y [n, F] and the place [n, F] of each maximum in its row, the first of equals."""
        ...

    def spmm_max_backward(self, adj: Adjacency, position: Tensor, grad_y: Tensor) -> Tensor:
        """grad_y [n, F] -> grad_x [s, F]."""
        ...

    def attend(
        self, over: Attention, h: Tensor, logit_src: Tensor, logit_dst: Tensor, *, needs_logits: bool
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """h [s, f] -> y [n, f], and rows [n, .] for `attend_backward`; more of them if the logits need a gradient."""
        ...

    def attend_backward(
        self,
        over: Attention,
        inputs: AttentionInputs,
        kept: Sequence[Tensor],
        grad_y: Tensor,
        *,
        needs_h: bool,
        needs_logits: bool,
        into: SourceGrads = SourceGrads(),  # noqa: B008
    ) -> tuple[Tensor | None, LogitGrads | None]:
        """Gradients of h [s, f] and of the logits, None where not needed, or `into` what is there.

        kept: as `attend` gave it.
        """
        ...

    def pair_logits(
        self, over: Pairs, left: Tensor, right: Tensor, attention: Tensor, edge_map: Tensor | None
    ) -> Tensor:
        """left [s, W], right [n, W], attention [W], edge_map [K, W] -> logits [E, H], or [E + n, H] with loops."""
        ...

    def pair_backward(
        self,
        over: Pairs,
        left: Tensor,
        right: Tensor,
        attention: Tensor,
        edge_map: Tensor | None,
        grad_logits: Tensor,
    ) -> PairGrads:
        """Gradients of all that made the logits."""
        ...

    def attend_edges(self, over: Attention, h: Tensor, logits: Tensor) -> tuple[Tensor, Tensor, list[Tensor]]:
        """h [s, f], logits as of `pair_logits` -> y [n, f], their softmax, negative where it is dropped, and the h of
        every step."""
        ...

    def attend_edges_backward(
        self, over: Attention, alpha: Tensor, steps: Sequence[Tensor], grad_y: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Gradients of h [s, f] and of the logits."""
        ...

    def keyed_dropout(self, x: Tensor, rows: Tensor, key: RandomKey, p: float, first_column: int, relu: bool) -> Tensor:
        """x [n, F], rows int64 [n] -> [n, F]; its own adjoint without relu."""
        ...

    def relu_dropout_backward(self, y: Tensor, grad_y: Tensor, p: float) -> Tensor:
        """The result [n, F] of dropout with relu, and its gradient -> [n, F]."""
        ...

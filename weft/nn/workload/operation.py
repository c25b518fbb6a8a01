"""What a model asks of a view once, without data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from weft.nn.aggregate.aggregate import Aggregate
from weft.nn.graph_view import Origin


@dataclass(frozen=True, kw_only=True)
class GraphOperation:
    """One call of a view."""

    op: Aggregate | Literal["block", "embed"]
    """An aggregate; or a layer's own over the edges, which it asks for ('block'); or embedded rows are fetched."""
    width: int
    """Columns of what is aggregated, or of the rows."""
    steps: int = 1
    stage: int = 0
    hop: int = 0
    """How many aggregates of earlier stages lead to its rows."""
    origin: Origin = "rows"
    """Where its rows come from: constant features, those under dropout, or any rows."""
    backward: bool
    """Whether a gradient flows back through it."""
    flops: float = 0
    """Of the maps of one row, forward, since the last aggregate or block."""
    weighted: bool = False
    """Whether it uses the weights of the edges."""
    layer: str = ""
    """The kind of the layer that asked."""
    share: float = 1.0
    """Of the vertices, those whose rows it concerns."""

    @property
    def is_aggregate(self) -> bool:
        """Whether it is an aggregate over edges."""
        return isinstance(self.op, Aggregate) and self.op.over_edges

    @property
    def linear(self) -> bool:
        """Whether its gradient does not depend on the rows."""
        return isinstance(self.op, Aggregate) and self.op.linear

    @property
    def logit_width(self) -> int:
        """Numbers of a source that logits are made of; 0 where there are none."""
        return self.op.logit_width if isinstance(self.op, Aggregate) else 0

    @property
    def separate_logit_width(self) -> int:
        """Those of them that come beside a source's row, and are not the row itself."""
        return self.op.separate_logit_width if isinstance(self.op, Aggregate) else 0

    @property
    def reads_edges(self) -> bool:
        """Whether it goes over the edges, by an aggregate or by the layer itself."""
        return self.is_aggregate or self.op == "block"

    @property
    def hops(self) -> range:
        """The aggregates that it makes, or its layer of a block: one; none of a total or of embeddings."""
        return range(self.hop, self.hop + (self.steps if self.reads_edges else 0))

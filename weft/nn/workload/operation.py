"""Description of one call of a view by a model, without data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from weft.nn.aggregate.aggregate import Aggregate
from weft.nn.graph_view import Origin


@dataclass(frozen=True, kw_only=True)
class GraphOperation:
    """One call of a view: an aggregate, the edges of a block, or embeddings."""

    op: Aggregate | Literal["block", "embed"]
    """The aggregate; "block" for a layer that reads the edges itself; "embed" for fetching embeddings."""
    width: int
    """Number of columns of the rows that the operation reads."""
    steps: int = 1
    """Number of times that the aggregate is applied."""
    stage: int = 0
    """Number of the stage whose view was called."""
    hop: int = 0
    """Number of layers of message passing in earlier stages; each step of an aggregate is a layer."""
    origin: Origin = "rows"
    """Origin of the rows: constant features, constant features after dropout, or any other rows."""
    backward: bool
    """True if a gradient flows back through the operation."""
    flops: float = 0
    """Forward FLOPs per row of the dense layers between the previous aggregate or block and this operation."""
    weighted: bool = False
    """True if the operation uses edge weights."""
    layer: str = ""
    """Class of the layer that called the view."""
    vertex_fraction: float = 1.0
    """Fraction of the vertices whose rows the operation reads."""

    @property
    def is_aggregate(self) -> bool:
        """True for an aggregate over edges."""
        return isinstance(self.op, Aggregate) and self.op.over_edges

    @property
    def linear(self) -> bool:
        """True for an aggregate whose gradient does not depend on the rows."""
        return isinstance(self.op, Aggregate) and self.op.linear

    @property
    def logit_width(self) -> int:
        """Number of columns of a source from which attention logits are computed; 0 without attention."""
        return self.op.logit_width if isinstance(self.op, Aggregate) else 0

    @property
    def separate_logit_width(self) -> int:
        """Number of columns that logits read of a source in addition to the row that is aggregated."""
        return self.op.separate_logit_width if isinstance(self.op, Aggregate) else 0

    @property
    def reads_edges(self) -> bool:
        """True if the operation goes over edges, in an aggregate or in the layer itself."""
        return self.is_aggregate or self.op == "block"

    @property
    def hops(self) -> range:
        """Numbers of the operation's layers of message passing, one for each step; empty for totals and embeddings."""
        return range(self.hop, self.hop + (self.steps if self.reads_edges else 0))

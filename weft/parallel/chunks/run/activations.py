"""What a pass of offload has on the host: the rows that boundaries left, and their gradients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from weft.nn import Aggregate
from weft.parallel.chunks.program.chunk_program import Segment
from weft.storage.host_rows import HostRows, MemoryRows

Rows = HostRows | MemoryRows


@dataclass(kw_only=True)
class BoundaryRows:
    """What a boundary left on the host, and what its results are."""

    segment: Segment
    arrays: dict[int, Rows] = field(default_factory=dict)
    """By port."""
    shared: dict[str, Tensor] = field(default_factory=dict)
    """The boundary's, as are the next three."""
    op: Aggregate | None = None
    context: Any = None
    on_result: Callable[[Tensor], None] | None = None
    result: Rows | None = None
    """The result's rows, where they are kept."""
    kept: list[Rows] = field(default_factory=list)
    """What else is kept of them."""
    total: Tensor | None = None
    """The one result for all."""
    between: list[Rows] = field(default_factory=list)
    """Of several steps, what each but the last one made."""


@dataclass(kw_only=True)
class Grads:
    """The gradients of what a boundary left: of its ports, of what all rows share, and of its total."""

    live: dict[int, Any] = field(default_factory=dict)
    shared: dict[str, Tensor] = field(default_factory=dict)
    total: Tensor | None = None

    def add_shared(self, name: str, grad: Tensor | None) -> None:
        """Adds to the gradient of a tensor that all rows share."""
        if grad is not None:
            self.shared[name] = self.shared[name] + grad if name in self.shared else grad

    def add_total(self, grad: Tensor | None) -> None:
        """Adds to the gradient of the total."""
        if grad is not None:
            self.total = grad if self.total is None else self.total + grad

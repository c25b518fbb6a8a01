"""Activations and gradients that a pass stores on the host at the layer boundaries of a model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from weft.nn import Aggregate
from weft.parallel.chunks.program.chunk_program import Segment
from weft.storage.host_rows import HostRows, MemoryRows

StoredRows = HostRows | MemoryRows
"""Rows [n, F] that a pass stores outside of the device, in files or in memory."""


@dataclass(kw_only=True)
class Activations:
    """Rows that a segment leaves on the host at its boundary, and the result of the boundary."""

    segment: Segment
    """Segment that ends at the boundary."""
    arrays: dict[int, StoredRows] = field(default_factory=dict)
    """Rows that the segment leaves, by port."""
    shared: dict[str, Tensor] = field(default_factory=dict)
    """Parameters of the boundary's aggregate that all rows share, by name."""
    op: Aggregate | None = None
    """Aggregate that the boundary requests."""
    context: Any = None
    """Other values that the next segment gets, the same for all rows."""
    on_result: Callable[[Tensor], None] | None = None
    """Callback that gets the result once per forward pass."""
    result: StoredRows | None = None
    """Rows of the boundary's result, if they are saved for the backward pass."""
    saved: list[StoredRows] = field(default_factory=list)
    """Further rows that are saved with the result."""
    total: Tensor | None = None
    """Result of a sum over all rows (`Total`), one for all."""
    intermediates: list[StoredRows] = field(default_factory=list)
    """Results of all steps but the last, where one aggregate follows another."""


@dataclass(kw_only=True)
class Gradients:
    """Gradients of the outputs of a segment: of its rows, of shared tensors, and of the sum over all rows."""

    live: dict[int, Any] = field(default_factory=dict)
    """Gradient rows, by port; for the logits, a tensor."""
    shared: dict[str, Tensor] = field(default_factory=dict)
    """Gradients of the parameters that all rows share, by name."""
    total: Tensor | None = None
    """Gradient of the sum over all rows."""

    def add_shared(self, name: str, grad: Tensor | None) -> None:
        """Add to the gradient of a tensor that all rows share.

        Args:
            name: Name of the tensor.
            grad: Gradient to add; None adds nothing.
        """
        if grad is not None:
            self.shared[name] = self.shared[name] + grad if name in self.shared else grad

    def add_total(self, grad: Tensor | None) -> None:
        """Add to the gradient of the sum over all rows; None adds nothing."""
        if grad is not None:
            self.total = grad if self.total is None else self.total + grad

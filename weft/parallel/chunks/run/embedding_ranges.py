"""Embedded rows in a pass by ranges: each range has some of them, and gives their gradients back."""

from __future__ import annotations

import torch
from torch import Tensor

from weft.nn import embeddings
from weft.parallel.chunks.run.chunk_runtime import PlacedChunks


class EmbeddedRows:
    """The rows of a model's embedding that this rank's vertices have, those of other ranks fetched once a pass."""

    def __init__(self, runtime: PlacedChunks, *, training: bool) -> None:
        self.runtime = runtime
        self.rows: Tensor | None = None
        self.grads: Tensor | None = None
        self._leaves: dict[tuple[int, int], Tensor] = {}
        """By first and last row, of the ranges whose gradients are to come."""
        found = list(embeddings(runtime.model).values())
        assert len(found) <= 1, "a model has one TypedInput"
        for weight in found:
            with torch.set_grad_enabled(training):
                self.rows = runtime.embedded_halo.fetch(weight) if runtime.embedded_halo else weight
            self.grads = torch.zeros_like(self.rows) if training and self.rows.requires_grad else None

    def of(self, span: slice, weight: Tensor) -> Tensor:
        """Those of a range of this rank's rows."""
        del weight
        assert self.rows is not None
        rows = self.rows.detach()[self.runtime.embedded_in(span)]
        if torch.is_grad_enabled():
            self._leaves[span.start, span.stop] = rows.requires_grad_()
        return rows

    def collect(self, span: slice) -> None:
        """Takes the gradients of those that a range has had."""
        leaf = self._leaves.pop((span.start, span.stop), None)
        if leaf is not None and leaf.grad is not None and self.grads is not None:
            self.grads[self.runtime.embedded_in(span)] += leaf.grad

    def backward(self) -> None:
        """Sends all gradients to where the rows are kept."""
        if self.rows is not None and self.grads is not None:
            self.rows.backward(self.grads)

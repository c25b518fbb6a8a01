"""Execution of the segments of a model on ranges of a rank's rows, forward and backward.

Source: HongTu, section 4.3, algorithm 1.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import NamedTuple, cast

import torch
from torch import Tensor

from weft.nn import Inputs, Total, embeddings
from weft.nn.layers.phases import Boundary, BoundaryState, PhasedModel
from weft.parallel.chunks.program.chunk_program import Segment, rows_by_port
from weft.parallel.chunks.run.activations import Activations, Gradients
from weft.parallel.chunks.run.chunk_runtime import PlacedChunks
from weft.parallel.chunks.run.chunk_views import RowsView
from weft.storage.unnamed_files import release

PortRows = dict[int, Tensor]
"""Rows of a range, by port."""


class SegmentRun(NamedTuple):
    """A segment that was run on a range of rows with autograd: its leaves, and where it stopped."""

    port_rows: PortRows
    """Rows that the segment read, by port; leaves of the autograd graph."""
    result: Tensor | None
    """Result of the boundary before the segment; a leaf."""
    shared: dict[str, Tensor]
    """Shared tensors of that boundary; leaves."""
    reached: Boundary | Tensor
    """Next boundary, or the logits."""


class SegmentRuns:
    """Runs the segments of a pass, each on one range of rows after the other.

    Args:
        runtime: Rows and rounds of this rank.
        segments: Segments of the program.
        keys: Random keys of dropout, one for each model stage.
        activations: What each segment has left so far; the pass extends the list.
        training: A backward pass follows.
    """

    def __init__(
        self,
        runtime: PlacedChunks,
        segments: Sequence[Segment],
        keys: Sequence[int],
        activations: list[Activations],
        *,
        training: bool,
    ) -> None:
        self.runtime, self.segments, self.keys, self.activations = runtime, segments, keys, activations
        self.model, self.embedded = cast(PhasedModel, runtime.model), EmbeddedRows(runtime, training=training)
        self.retains = training and runtime.in_memory
        """True if autograd graphs of segments stay in memory, so the backward pass need not recompute them."""
        self._retained: dict[tuple[int, int], SegmentRun] = {}
        """Runs with an autograd graph, by segment and chunk."""

    def forward(
        self, number: int, chunk: int, span: slice, port_rows: PortRows, result: Tensor | None
    ) -> Boundary | Tensor:
        """Run a segment on a range of rows, and return the boundary or the logits that it reaches.

        Args:
            number: Number of the segment.
            chunk: Number of the range.
            span: Range of rows.
            port_rows: Rows that the previous boundary passed on, by port.
            result: Result of the previous boundary: rows of the range, or one sum for all; None for the first segment.
        """
        if not self.retains:
            return self._resume(number, span, port_rows, result, self._shared_before(number))
        run = self._retained[number, chunk] = self._run_on(number, span, port_rows, result)
        return run.reached

    def backward(
        self,
        number: int,
        chunk: int,
        span: slice,
        port_rows: PortRows,
        result: Tensor | None,
        out: Gradients,
        into: Gradients,
        *,
        last: bool,
    ) -> Tensor | None:
        """Backpropagate through a segment on a range of rows, and return the gradient of `result`.

        The segment is run again if its autograd graph was not kept.

        Args:
            number: Number of the segment.
            chunk: Number of the range.
            span: Range of rows.
            port_rows: Rows that the previous boundary passed on, by port.
            result: Result of the previous boundary.
            out: Gradients of what the segment left.
            into: Gradients of what the segment read; the function adds to them.
            last: This is the last range; it takes the gradients of what all ranges share.
        """
        retained = self._retained.pop((number, chunk)) if self.retains else None
        run = retained or self._run_on(number, span, port_rows, result)
        results = list(self._results(run.reached, self.segments[number], span, out, last=last))
        if not results:
            return None
        torch.autograd.backward([result for result, _ in results], [grad for _, grad in results])
        if number == 0:
            self.embedded.collect(span)
        for port, rows in run.port_rows.items():
            if rows.grad is not None:
                self.runtime.accumulate(into.live[port], span, rows.grad)
        for name, value in run.shared.items():
            into.add_shared(name, value.grad)
        return None if run.result is None else run.result.grad

    def end(self) -> None:
        """Release the autograd graphs."""
        self._retained.clear()

    def num_own(self, span: slice) -> int:
        """Return the number of rows in a range whose vertices this rank owns; a sum over all rows counts only these."""
        num_own: int = min(span.stop, self.runtime.num_own) - span.start
        return max(0, num_own)

    def _shared_before(self, number: int) -> dict[str, Tensor]:
        """Return the tensors that all rows share at the boundary before a segment."""
        return self.activations[number - 1].shared if number else {}

    def _resume(
        self, number: int, span: slice, port_rows: PortRows, result: Tensor | None, shared: dict[str, Tensor]
    ) -> Boundary | Tensor:
        runtime, segment = self.runtime, self.segments[number]
        inputs = runtime.inputs_of(span) if number == 0 else Inputs(optimisations=runtime.optimisations)
        make = partial(
            RowsView, runtime.topology, runtime.row_ids[span], runtime.graph.num_vertices, meter=runtime.meter
        )
        calls, embedded = zip(self.keys, segment.calls, strict=True), partial(self.embedded.of, span)
        views = [make(key=key, calls=c, inputs=inputs, embedded=embedded) for key, c in calls]
        if number == 0:
            return self.model.begin(views, cast(Tensor, inputs.rows))
        before = self.activations[number - 1]
        rows = {name: port_rows[port] for name, port in before.segment.rows.items()}
        state = BoundaryState(result=cast(Tensor, result), rows=rows, shared=shared, context=before.context)
        return self.model.resume(views, state)

    def _run_on(self, number: int, span: slice, port_rows: PortRows, result: Tensor | None) -> SegmentRun:
        """Run a segment on a range of rows with autograd."""
        shared = self._shared_before(number)
        if number:
            before = self.segments[number - 1]
            port_rows = {port: leaf(rows, before.live[port].differentiable) for port, rows in port_rows.items()}
            result = leaf(cast(Tensor, result), before.differentiable)
            named = before.boundary.shared if before.boundary else {}
            shared = {name: leaf(shared[name], before.shared[name]) for name in named}
        with torch.enable_grad():
            return SegmentRun(port_rows, result, shared, self._resume(number, span, port_rows, result, shared))

    def _results(
        self, reached: Boundary | Tensor, segment: Segment, span: slice, out: Gradients, *, last: bool
    ) -> Iterable[tuple[Tensor, Tensor]]:
        """Yield each output of a segment that has a gradient, with the gradient."""
        if not isinstance(reached, Boundary):
            if reached.requires_grad:
                # The copy may go on: the gradient changes only after the next logits, which come after this.
                grad = self.runtime.to_device(out.live[0][span])
                release(out.live[0])
                self.runtime.transfer("gradients", grad.nbytes, 0)
                yield reached, grad.to(reached.dtype)
            return
        for port, rows in rows_by_port(reached, segment).items():
            if port in out.live and rows.requires_grad:
                yield rows, self.runtime.read_grads(out.live[port], span)
        if out.total is not None:
            assert isinstance(reached.request.op, Total)
            grad = torch.zeros_like(reached.request.rows["x"])
            grad[: self.num_own(span)] = out.total
            yield reached.request.rows["x"], grad
        named = {**reached.request.shared, **reached.shared}
        for name, grad in out.shared.items() if last else ():
            yield named[name], grad


class EmbeddedRows:
    """Rows of the model's embedding for this rank's vertices, handed out by range; collects their gradients.

    Rows that other ranks own are fetched once per pass.

    Args:
        runtime: Rows and rounds of this rank.
        training: A backward pass follows.
    """

    def __init__(self, runtime: PlacedChunks, *, training: bool) -> None:
        self.runtime = runtime
        self.rows: Tensor | None = None
        self.grads: Tensor | None = None
        self._leaves: dict[tuple[int, int], Tensor] = {}
        """Embedded rows of ranges whose gradients are still to come, by first and last row of the range."""
        weights = list(embeddings(runtime.model).values())
        assert len(weights) <= 1, "a model has one TypedInput"
        for weight in weights:
            with torch.set_grad_enabled(training):
                self.rows = runtime.embedded_halo.fetch(weight) if runtime.embedded_halo else weight
            self.grads = torch.zeros_like(self.rows) if training and self.rows.requires_grad else None

    def of(self, span: slice, weight: Tensor) -> Tensor:
        """Return the embedded rows of a range of this rank's rows.

        Args:
            span: Range of rows.
            weight: Ignored; the rows were fetched at the start of the pass.
        """
        del weight
        assert self.rows is not None
        rows = self.rows.detach()[self.runtime.embedded_in(span)]
        if torch.is_grad_enabled():
            self._leaves[span.start, span.stop] = rows.requires_grad_()
        return rows

    def collect(self, span: slice) -> None:
        """Add the gradients of a range's embedded rows to those of all ranges."""
        leaf = self._leaves.pop((span.start, span.stop), None)
        if leaf is not None and leaf.grad is not None and self.grads is not None:
            self.grads[self.runtime.embedded_in(span)] += leaf.grad

    def backward(self) -> None:
        """Send all gradients to the ranks that own the rows."""
        if self.rows is not None and self.grads is not None:
            self.rows.backward(self.grads)


def leaf(value: Tensor, differentiable: bool) -> Tensor:
    """Return the same values as a leaf of a new autograd graph.

    The leaf has a version counter of its own: other rows of its storage may change in place.

    Args:
        value: Tensor to start from.
        differentiable: The leaf requires a gradient.
    """
    return value.data.requires_grad_(differentiable)

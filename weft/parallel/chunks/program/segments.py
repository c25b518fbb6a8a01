"""Segments of a rank's model, run on ranges of its rows, and back (HongTu, section 4.3, algorithm 1)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import NamedTuple, cast

import torch
from torch import Tensor

from weft.nn import Inputs, Total
from weft.nn.layers.phases import Boundary, BoundaryState, PhasedModel
from weft.parallel.chunks.program.chunk_program import Segment, left_by
from weft.parallel.chunks.run.activations import BoundaryRows, Grads
from weft.parallel.chunks.run.chunk_runtime import PlacedChunks
from weft.parallel.chunks.run.chunk_views import RowsView
from weft.parallel.chunks.run.embedding_ranges import EmbeddedRows
from weft.storage.unnamed_files import release

Own = dict[int, Tensor]
"""Rows of a range by their port."""


class SegmentRun(NamedTuple):
    """A segment that was run on a range of rows: the leaves that it began with, and what it reached."""

    own: Own
    result: Tensor | None
    shared: dict[str, Tensor]
    reached: Boundary | Tensor


class SegmentRuns:
    """The segments of a pass, each run on one range of rows after the other.

    keys: of each stage's dropout. tables: what segments have left, as the pass makes them. training: whether a backward
    pass follows.
    """

    def __init__(
        self,
        runtime: PlacedChunks,
        segments: Sequence[Segment],
        keys: Sequence[int],
        tables: list[BoundaryRows],
        *,
        training: bool,
    ) -> None:
        self.runtime, self.segments, self.keys, self.tables = runtime, segments, keys, tables
        self.model, self.embedded = cast(PhasedModel, runtime.model), EmbeddedRows(runtime, training=training)
        self.retains = training and runtime.in_memory
        """Whether segments stay as they were run, so that the backward pass need not run them again."""
        self._retained: dict[tuple[int, int], SegmentRun] = {}
        """By segment and range."""

    def forward(self, number: int, chunk: int, span: slice, own: Own, result: Tensor | None) -> Boundary | Tensor:
        """What segment `number` reaches on a range of rows, the chunk-th one."""
        if not self.retains:
            return self._resume(number, span, own, result, self._shared_before(number))
        run = self._retained[number, chunk] = self._run_on(number, span, own, result)
        return run.reached

    def backward(
        self,
        number: int,
        chunk: int,
        span: slice,
        own: Own,
        result: Tensor | None,
        out: Grads,
        into: Grads,
        *,
        last: bool,
    ) -> Tensor | None:
        """Runs a segment on a range of rows again if it did not stay, and back; the gradient of the result.

        out: the gradients of what it left. into: those of what it read. last: whether it is the last range, which takes
        the gradients of what all ranges share.
        """
        stayed = self._retained.pop((number, chunk)) if self.retains else None
        run = stayed or self._run_on(number, span, own, result)
        results = list(self._results(run.reached, self.segments[number], span, out, last=last))
        if not results:
            return None
        torch.autograd.backward([result for result, _ in results], [grad for _, grad in results])
        if number == 0:
            self.embedded.collect(span)
        for port, rows in run.own.items():
            if rows.grad is not None:
                self.runtime.deposit(into.live[port], span, rows.grad)
        for name, value in run.shared.items():
            into.add_shared(name, value.grad)
        return None if run.result is None else run.result.grad

    def end(self) -> None:
        """Lets go of what stayed."""
        self._retained.clear()

    def num_own(self, span: slice) -> int:
        """How many of a range of rows belong to vertices that this rank results for: a total counts them once."""
        num_own: int = min(span.stop, self.runtime.num_own) - span.start
        return max(0, num_own)

    def _shared_before(self, number: int) -> dict[str, Tensor]:
        """What all rows share at the boundary before a segment."""
        return self.tables[number - 1].shared if number else {}

    def _resume(
        self, number: int, span: slice, own: Own, result: Tensor | None, shared: dict[str, Tensor]
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
        before = self.tables[number - 1]
        rows = {name: own[port] for name, port in before.segment.rows.items()}
        state = BoundaryState(result=cast(Tensor, result), rows=rows, shared=shared, context=before.context)
        return self.model.resume(views, state)

    def _run_on(self, number: int, span: slice, own: Own, result: Tensor | None) -> SegmentRun:
        """Runs a segment on a range of rows so that gradients can go back."""
        shared = self._shared_before(number)
        if number:
            before = self.segments[number - 1]
            own = {port: leaf(rows, before.live[port].differentiable) for port, rows in own.items()}
            result = leaf(cast(Tensor, result), before.differentiable)
            named = before.boundary.shared if before.boundary else {}
            shared = {name: leaf(shared[name], before.shared[name]) for name in named}
        with torch.enable_grad():
            return SegmentRun(own, result, shared, self._resume(number, span, own, result, shared))

    def _results(
        self, reached: Boundary | Tensor, segment: Segment, span: slice, out: Grads, *, last: bool
    ) -> Iterable[tuple[Tensor, Tensor]]:
        """What a segment gave for a range of rows that has a gradient, and that."""
        if not isinstance(reached, Boundary):
            if reached.requires_grad:
                grad = self.runtime.to_device(
                    out.live[0][span]
                )  # changed behind the next logits, which come behind this
                release(out.live[0])
                self.runtime.transfer("gradients", grad.nbytes, 0)
                yield reached, grad
            return
        for port, rows in left_by(reached, segment).items():
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


def leaf(value: Tensor, differentiable: bool) -> Tensor:
    """The same numbers, from which a gradient can begin; with a version of their own, since others' rows are beside."""
    return value.data.requires_grad_(differentiable)

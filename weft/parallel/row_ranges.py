"""A model run on one range of rows after the other between two sums over edges, so that hidden rows are never stored.

Forward: the rows of a range are computed, added to the sums of all their targets, and discarded. Backward: the gradient
of a row is a sum of the gradients of its targets. The range is computed again with autograd, which carries that
gradient on to the parameters and to the rows before (gradient checkpointing, Chen et al. 2016). Only sums and their
gradients stay in memory; in a receptive field, these are fewer rows than those that are summed. The autograd graphs of
some ranges may stay as well; these are not computed again. After the last sum, the logits of a range, their loss and
its gradients follow each other, so that no step has the logits of all rows.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.autograd.graph import GradientEdge, get_gradient_edge

from weft.data import Adjacency, Transpose
from weft.kernels import Scale, spmm
from weft.kernels.cpu import spmm_scatter
from weft.nn import GraphView, Inputs, Sum, Topology
from weft.nn.layers.phases import Boundary, BoundaryState, PhasedModel
from weft.nn.workload.outline_view import OutlineView
from weft.parallel.chunks.program.chunk_program import Segment
from weft.parallel.chunks.program.segment_flops import ShapedRows
from weft.parallel.chunks.run.chunk_views import RowsView, refused
from weft.parallel.exchange import PlacedView
from weft.runtime.memory.heap import release_pages_of
from weft.utils.dtypes import sum_dtype

RANGE_BYTES = 1 << 25
"""Bytes of a range of rows, counted in the columns that are summed before it."""
FILE_TAG = "features"
"""Tag of the bytes of aggregated features that a step reads in mapped files."""
SUMMED = ""
"""Name of the rows that a boundary sums, among those that it passes on."""
RangeLoss = Callable[[Tensor, slice | None], tuple[Tensor, Tensor]]
"""Function of logits [m, C] and their range of rows (None: all) that returns their loss, [], and its gradient."""


def row_ranges(num_rows: int, row_bytes: int, num_first: int = 0) -> Iterator[slice]:
    """Yield ranges of rows that take about RANGE_BYTES bytes; at least one range, which may be empty.

    Args:
        num_rows: Number of rows.
        row_bytes: Bytes of a row.
        num_first: Number of rows after which a range ends.
    """
    step = max(1, RANGE_BYTES // max(1, row_bytes))
    for first in (*range(0, num_first, step), *range(num_first, num_rows or 1, step)):
        yield slice(first, min(first + step, num_first if first < num_first else num_rows))


def num_retained(num_rows: int, share: float) -> int:
    """Return the number of rows, the first ones, whose autograd graph stays until the backward pass.

    Args:
        num_rows: Number of rows.
        share: Share of the rows.
    """
    return int(share * num_rows)


def supports_ranges(segments: Sequence[Segment]) -> bool:
    """Return whether a model can run range by range: its aggregates are sums, the first one of constant features.

    Args:
        segments: Segments of the model.
    """
    sums = (isinstance(each.op, Sum) and each.steps == 1 and not each.shared for each in segments[:-1])
    return len(segments) > 2 and segments[0].constant and all(sums)


class RangedRun(NamedTuple):
    """How a step runs a model range by range; see `supports_ranges`."""

    needs_grad: Sequence[bool]
    """For each aggregate, whether the rows that it sums need a gradient."""
    num_logits: int
    """Number of columns of the logits, C, which limits the rows of a range whose logits are computed; 0: unknown."""
    retained_share: float = 0.0
    """Share of the rows between two aggregates whose autograd graph stays until the backward pass."""
    reads_files: bool = False
    """The rows between the first two aggregates are in mapped files, of which each read is counted."""

    def logits(self, model: nn.Module, views: Sequence[GraphView], x: Tensor) -> Tensor:
        """Return the logits [n, C] of all rows.

        Args:
            model: The model.
            views: View of each stage, of a single rank: `PlacedView`, or `OutlineView` for an estimate of memory.
            x: Constant features [n, F].
        """
        logits = cast(PhasedModel, model).resume(views, self._sums(model, views, x))
        assert isinstance(logits, Tensor)
        return logits

    def loss(self, loss: RangeLoss, model: nn.Module, views: Sequence[GraphView], x: Tensor) -> Tensor:
        """Return the loss [] of all rows. The gradients of parameters after the last aggregate are added at once.

        Args:
            loss: Loss of a range of rows.
            model: The model.
            views: View of each stage; see `logits`.
            x: Constant features [n, F].
        """
        state, anchor = self._sums(model, views, x), x.new_empty(0, requires_grad=True)
        last = RangedLoss(cast(PhasedModel, model), views, state, loss, self.num_logits)
        total: Tensor = LossFunction.apply(last, anchor, state.result, *state.rows.values())  # type: ignore[no-untyped-call]
        return total

    @torch.no_grad()
    def logit_ranges(
        self, model: nn.Module, views: Sequence[GraphView], x: Tensor
    ) -> Generator[tuple[slice, Tensor], None, None]:
        """Yield ranges of rows with their logits [m, C].

        Args:
            model: The model.
            views: View of each stage; see `logits`.
            x: Constant features [n, F].
        """
        state = self._sums(model, views, x)
        part, read = RangedPart(cast(PhasedModel, model), views, state), [state.result, *state.rows.values()]
        for span in part.logit_spans(state.result, self.num_logits):
            logits, _ = part.resume(span, [each[span] for each in read])
            assert isinstance(logits, Tensor)
            yield span, logits

    def dropped_logits(self, model: nn.Module, views: Sequence[GraphView], x: Tensor) -> Tensor:
        """Compute and drop the logits of each range, for an estimate of memory, and return no rows.

        Args:
            model: The model.
            views: View of each stage; see `logits`.
            x: Constant features [n, F].
        """
        for _ in self.logit_ranges(model, views, x):
            pass
        return x.new_empty(0)

    def _sums(self, model: nn.Module, views: Sequence[GraphView], x: Tensor) -> BoundaryState:
        """Return the state after the last aggregate."""
        phased = cast(PhasedModel, model)
        reached = phased.begin(views, x)
        assert isinstance(reached, Boundary)
        state = reached.cross(views[reached.stage])
        for number, needed in enumerate(self.needs_grad[1:]):
            anchor = torch.empty(0, device=x.device, requires_grad=needed)  # so that the result needs a gradient
            share, in_files = self.retained_share if needed else 0, self.reads_files and number == 0
            segment = RangedSegment(phased, views, state, share, in_files=in_files)
            result, *rows = SegmentFunction.apply(segment, anchor, state.result, *state.rows.values())  # type: ignore[no-untyped-call]
            state = segment.state_after(result, rows)
        return state


@dataclass(frozen=True, kw_only=True, eq=False)
class RangedSum:
    """A sum over edges, computed for one range of sources or of targets after the other."""

    op: Sum
    """The sum."""
    topology: Topology
    """The edges."""

    @property
    def num_targets(self) -> int:
        """Number of rows of the result."""
        return self.topology.adjacency.num_targets

    def add(self, rows: slice, x: Tensor, sums: Tensor) -> None:
        """Add a range of source rows to the sums of their targets.

        Args:
            rows: The range.
            x: Its rows [m, F].
            sums: Sums [n, F] in the type of sums.
        """
        edges, scale = self._edges(rows), self._scale(rows, x.dtype)
        spmm_scatter(edges, x, scale, self._weighted, sums)
        if scale.loop is not None:
            sums[rows.start : rows.start + len(scale.loop)] += scale.loop[:, None] * x[: len(scale.loop)]

    def of_targets(self, rows: slice, x: Tensor) -> Tensor:
        """Return the sums [m, F] of a range of targets.

        Args:
            rows: The range.
            x: Rows [s, F] of all sources.
        """
        adjacency = self.topology.adjacency
        edges = edges_of(adjacency, rows, adjacency.num_sources)
        source, target, loop = self.topology.scale(self.op.norm, self.op.weighted, x.dtype)
        scale = Scale(source, None if target is None else target[rows])
        sums = spmm(edges, x, scale=scale, weighted=self._weighted, in_sum_dtype=loop is not None)
        if loop is not None:
            sums += loop[rows, None] * x[rows]
        return sums.to(x.dtype)

    def gradient(self, rows: slice, grad: Tensor) -> Tensor:
        """Return the gradient [m, F] of a range of source rows.

        Args:
            rows: The range.
            grad: Gradient [n, F] of the result.
        """
        scale = self._scale(rows, grad.dtype)
        grad_x = spmm(
            self._edges(rows),
            grad,
            scale=scale._replace(loop=None),
            weighted=self._weighted,
            in_sum_dtype=scale.loop is not None,
        )
        if scale.loop is not None:
            grad_x[: len(scale.loop)] += scale.loop[:, None] * grad[rows.start : rows.start + len(scale.loop)]
        return grad_x.to(grad.dtype)

    @property
    def _weighted(self) -> bool:
        return self.op.weighted and self.topology.has_weight

    def _scale(self, rows: slice, dtype: torch.dtype) -> Scale:
        """Return the factors of the transposed edges of a range; `loop` for the sources that are targets too."""
        source, target, loop = self.topology.scale(self.op.norm, self.op.weighted, dtype)
        of_range = slice(rows.start, min(rows.stop, self.num_targets))
        return Scale(
            source=target,
            target=None if source is None else source[rows],
            loop=None if loop is None or rows.start >= self.num_targets else loop[of_range],
        )

    def _edges(self, rows: slice) -> Adjacency:
        """Return the edges that leave a range of sources, as an adjacency whose targets are these sources."""
        adjacency = self.topology.adjacency
        if adjacency.indptr.is_meta:
            num_edges = adjacency.num_edges * (rows.stop - rows.start) // max(adjacency.num_sources, 1)
            indptr = adjacency.indptr.new_empty(rows.stop - rows.start + 1)
            return Adjacency(indptr=indptr, indices=indptr.new_empty(num_edges), num_sources=self.num_targets)
        return edges_of(adjacency.transpose, rows, self.num_targets)


def edges_of(matrix: Adjacency | Transpose, rows: slice, num_columns: int) -> Adjacency:
    """Return the edges of a range of rows of a CSR matrix.

    Args:
        matrix: The edges, by target or by source.
        rows: The range.
        num_columns: Number of columns of the matrix.
    """
    indptr = matrix.indptr[rows.start : rows.stop + 1]
    edges = slice(int(indptr[0]), int(indptr[-1]))
    return Adjacency(
        indptr=indptr - edges.start,
        indices=matrix.indices[edges],
        num_sources=num_columns,
        weight=None if matrix.weight is None else matrix.weight[edges],
    )


class RangedPart:
    """A part of a model after an aggregate, computed range by range of the rows.

    Args:
        model: The model.
        views: View of each stage.
        state: State after the aggregate before it.
    """

    def __init__(self, model: PhasedModel, views: Sequence[GraphView], state: BoundaryState) -> None:
        self.model, self.views, self.names = model, views, list(state.rows)
        self._context = state.context
        self._calls = [view._calls for view in views]

    def logit_spans(self, result: Tensor, num_logits: int) -> Iterator[slice]:
        """Yield the ranges of the rows whose logits are computed.

        Args:
            result: Result of the aggregate before [m, .].
            num_logits: Number of columns of the logits.
        """
        logit_bytes = num_logits * sum_dtype(result.dtype).itemsize  # in which losses are computed
        return row_ranges(len(result), max(result.shape[1] * result.itemsize, logit_bytes))

    def resume(self, span: slice, read: Sequence[Tensor]) -> tuple[Boundary | Tensor, list[RowsView]]:
        """Run the part on a range of rows; return the next boundary or the logits, and the views.

        Args:
            span: The range.
            read: Result of the aggregate before, and the rows that its boundary passed on, in this range.
        """
        result, *rows = read
        views = [range_view(view, span, calls) for view, calls in zip(self.views, self._calls, strict=True)]
        named = dict(zip(self.names, rows, strict=True))
        state = BoundaryState(result=result, rows=named, shared={}, context=self._context)
        return self.model.resume(views, state), views


class RangedSegment(RangedPart):
    """The part of a model between two aggregates, and the sum after it, computed range by range of the rows.

    Args:
        model: The model.
        views: View of each stage.
        state: State after the aggregate before it.
        retained_share: Share of the rows whose autograd graph stays until the backward pass.
        in_files: The rows that the segment reads are in mapped files.
    """

    def __init__(
        self,
        model: PhasedModel,
        views: Sequence[GraphView],
        state: BoundaryState,
        retained_share: float,
        *,
        in_files: bool,
    ) -> None:
        super().__init__(model, views, state)
        self.retained_share, self._in_files = retained_share, in_files
        self._retained: dict[int, ComputedRange] = {}
        """Ranges with their autograd graphs, by their first rows."""
        self._passed: list[str] = []
        """Names of the rows that the next boundary passes on."""

    def state_after(self, result: Tensor, rows: Sequence[Tensor]) -> BoundaryState:
        """Return the state after the sum.

        Args:
            result: The sum [n, F].
            rows: Rows [n, .] that the boundary passes on.
        """
        named = dict(zip(self._passed, rows, strict=True))
        return BoundaryState(result=result, rows=named, shared={}, context=self._next_context)

    def forward(self, result: Tensor, rows: Sequence[Tensor], needed: Sequence[bool]) -> tuple[Tensor, ...]:
        """Return the sum [n, F], and the rows [n, .] of its targets that the boundary passes on.

        Args:
            result: Result of the aggregate before [m, .].
            rows: Rows [m, .] that its boundary passed on.
            needed: True for each of these tensors that needs a gradient.
        """
        sums, passed = torch.empty(0), dict[str, Tensor]()
        for span in self._spans(result):
            retains = span.start < num_retained(len(result), self.retained_share)
            read = leaves_of(span, [result, *rows], needed)
            with torch.set_grad_enabled(retains):
                reached, ranged_views = self.resume(span, read)
            assert isinstance(reached, Boundary)
            x = reached.request.rows[reached.request.op.first]
            if not span.start:
                self._prepare(reached, ranged_views)
                sums = x.new_zeros(self._sum.num_targets, x.shape[1], dtype=sum_dtype(x.dtype))
                passed = {name: each.new_empty(len(sums), each.shape[1]) for name, each in reached.rows.items()}
            self._sum.add(span, x.detach(), sums)
            for name, targets in self._targets(span, passed).items():
                targets.copy_(reached.rows[name][: len(targets)].detach())
            if retains:
                self._retained[span.start] = self._computed(span, read, reached)
        self._count(sums.shape[1], [result, *rows])
        return (rounded(sums, result.dtype), *passed.values())

    def _spans(self, result: Tensor) -> Iterator[slice]:
        """Return the ranges of the rows of the aggregate before the segment."""
        retained = num_retained(len(result), self.retained_share)
        return row_ranges(len(result), result.shape[1] * result.itemsize, retained)

    def _computed(self, span: slice, leaves: list[Tensor], reached: Boundary) -> ComputedRange:
        """Return the autograd graph of a range of rows.

        Args:
            span: The range.
            leaves: Rows that the segment reads.
            reached: The boundary after it, computed with autograd.
        """
        num_targets = max(min(span.stop, self._sum.num_targets) - span.start, 0)
        with torch.enable_grad():
            outputs = {name: reached.rows[name][:num_targets] for name in self._passed} if num_targets else {}
        outputs[SUMMED] = reached.request.rows[self._sum.op.first]
        edges = {name: get_gradient_edge(output) for name, output in outputs.items() if output.requires_grad}
        return ComputedRange(leaves, edges)

    def _prepare(self, reached: Boundary, ranged_views: Sequence[RowsView]) -> None:
        """Note what the boundary after the segment is, which is the same for all ranges."""
        view, op = self.views[reached.stage], reached.request.op
        assert isinstance(op, Sum)
        self._sum, self._meter = RangedSum(op=op, topology=topology_of(view)), view.meter
        self._passed, self._next_context = list(reached.rows), reached.context
        for each, ranged in zip(self.views, ranged_views, strict=True):  # as if the segment had run on all rows
            each._calls = ranged.calls

    def _count(self, width: int, read: Sequence[Tensor]) -> None:
        """Count the edges of the sum, or of its gradient, and the bytes of the rows that are read in files.

        Args:
            width: Number of columns of the sum.
            read: Rows that the segment reads.
        """
        self._meter.aggregate(self._sum.topology.adjacency.num_edges, width)
        if self._in_files:
            self._meter.transfer(FILE_TAG, sum(each.nbytes for each in read), 0)

    def backward(
        self, result: Tensor, rows: Sequence[Tensor], needed: Sequence[bool], grads: Sequence[Tensor | None]
    ) -> list[Tensor | None]:
        """Add the gradients of the parameters, and return those of `result` and `rows`.

        Args:
            result: Result of the aggregate before [m, .]. Its memory becomes that of its gradient.
            rows: Rows [m, .] that its boundary passed on.
            needed: True for each of these tensors that needs a gradient.
            grads: Gradients of what `forward` returned.
        """
        read, (grad, *grads_passed), grads_read = [result, *rows], grads, gradient_tables(result, rows, needed)
        passed = {name: each for name, each in zip(self._passed, grads_passed, strict=True) if each is not None}
        for span in self._spans(result):
            computed = self._retained.pop(span.start, None)
            if computed is None:
                leaves = leaves_of(span, read, needed)
                with torch.enable_grad():
                    reached, _ = self.resume(span, leaves)
                assert isinstance(reached, Boundary)
                computed = self._computed(span, leaves, reached)
                del reached
            grads_of = self._targets(span, passed) | ({} if grad is None else {SUMMED: self._sum.gradient(span, grad)})
            outputs = [(edge, grads_of[name]) for name, edge in computed.edges.items() if name in grads_of]
            torch.autograd.backward([edge for edge, _ in outputs], [each for _, each in outputs])
            write_gradients(span, computed.leaves, grads_read)
            del computed, grads_of, outputs  # before the next range is computed
        if grad is not None:
            self._count(grad.shape[1], read)
        return grads_read

    def _targets(self, span: slice, tables: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the rows of a range in tables [n, .] of the targets, which are the first rows; nothing if none are."""
        if span.start >= self._sum.num_targets:
            return {}
        return {name: table[span.start : span.stop] for name, table in tables.items()}


class RangedLoss(RangedPart):
    """The part of a model after its last aggregate and the loss of its logits, with all gradients at once.

    Args:
        model: The model.
        views: View of each stage.
        state: State after the last aggregate.
        loss: Loss of a range of rows.
        num_logits: Number of columns of the logits.
    """

    def __init__(
        self, model: PhasedModel, views: Sequence[GraphView], state: BoundaryState, loss: RangeLoss, num_logits: int
    ) -> None:
        super().__init__(model, views, state)
        self._loss, self._num_logits = loss, num_logits

    def run(self, result: Tensor, rows: Sequence[Tensor], needed: Sequence[bool]) -> tuple[Tensor, list[Tensor | None]]:
        """Add the gradients of the parameters; return the loss, [], and the gradients of `result` and `rows`.

        Args:
            result: Result of the aggregate before [m, .]. Its memory becomes that of its gradient.
            rows: Rows [m, .] that its boundary passed on.
            needed: True for each of these tensors that needs a gradient.
        """
        read, grads, total = [result, *rows], gradient_tables(result, rows, needed), result.new_zeros(())
        dtype = sum_dtype(result.dtype)
        for span in self.logit_spans(result, self._num_logits):
            leaves = leaves_of(span, read, needed)
            with torch.enable_grad():
                logits, _ = self.resume(span, leaves)
                assert isinstance(logits, Tensor)
                loss, grad = self._loss(logits.detach().to(dtype), span)
            total = total + loss
            if logits.requires_grad:
                logits.backward(grad.to(logits.dtype))
            write_gradients(span, leaves, grads)
            del leaves, logits, grad  # before the next range is computed
        return total, grads


class ComputedRange(NamedTuple):
    """The autograd graph of a range of rows, without its results, which nobody reads again."""

    leaves: list[Tensor]
    """Rows that the segment reads; those that need gradients are leaves of the graph."""
    edges: dict[str, GradientEdge]
    """Begin of the graph of each row that the next boundary passes on, by name, and of those that it sums (SUMMED)."""


class SegmentFunction(torch.autograd.Function):
    """A `RangedSegment` as a function of the rows that it reads; its backward also adds the gradients of parameters."""

    @staticmethod
    def forward(ctx: Any, segment: RangedSegment, anchor: Tensor, result: Tensor, *rows: Tensor) -> tuple[Tensor, ...]:
        del anchor
        ctx.set_materialize_grads(False)
        ctx.segment = segment
        ctx.save_for_backward(result, *rows)
        return segment.forward(result, rows, ctx.needs_input_grad[2:])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        result, *rows = ctx.saved_tensors
        return None, None, *ctx.segment.backward(result, rows, ctx.needs_input_grad[2:], grads)


class LossFunction(torch.autograd.Function):
    """A `RangedLoss` as a function of the rows that it reads. The gradient of its result must be 1, and is ignored."""

    @staticmethod
    def forward(ctx: Any, part: RangedLoss, anchor: Tensor, result: Tensor, *rows: Tensor) -> Tensor:
        del anchor
        total, ctx.grads = part.run(result, rows, ctx.needs_input_grad[2:])
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        grads, ctx.grads = ctx.grads, None  # freed before the end of the step
        return None, None, *grads


def leaves_of(span: slice, read: Sequence[Tensor], needed: Sequence[bool]) -> list[Tensor]:
    """Return a range of rows of some tensors, as leaves of an autograd graph.

    Args:
        span: The range.
        read: The tensors [m, .].
        needed: True for each of them that needs a gradient.
    """
    return [each[span].detach().requires_grad_(wanted) for each, wanted in zip(read, needed, strict=True)]


def rounded(sums: Tensor, dtype: torch.dtype) -> Tensor:
    """Return sums [n, F] in the type of rows. Pages of the sums are freed as they are read, so that both never coexist.

    Args:
        sums: The sums, which nobody reads afterwards.
        dtype: Type of rows: that of the sums, or one of lower precision.
    """
    if sums.dtype == dtype:
        return sums
    result = torch.empty_like(sums, dtype=dtype)
    for rows in row_ranges(len(sums), sums.shape[1] * sums.itemsize):
        result[rows] = sums[rows]
        if not sums.is_meta:
            release_pages_of(sums[rows].data_ptr(), sums[rows].nbytes)
    return result


def gradient_tables(result: Tensor, rows: Sequence[Tensor], needed: Sequence[bool]) -> list[Tensor | None]:
    """Return a table for the gradient of each tensor that a part of a model reads; None for those that need none.

    Args:
        result: Result of the aggregate before [m, .]. Its memory becomes that of its gradient.
        rows: Rows [m, .] that its boundary passed on.
        needed: True for each of these tensors that needs a gradient.
    """
    # Only this part of the model reads the result, and each range a last time before its gradient is written. `data`
    # has no part in autograd's check that saved tensors do not change.
    of_rows = (torch.zeros_like(each) if wanted else None for each, wanted in zip(rows, needed[1:], strict=True))
    return [result.data if needed[0] else None, *of_rows]


def write_gradients(span: slice, leaves: Sequence[Tensor], grads: Sequence[Tensor | None]) -> None:
    """Write the gradients of a range of rows to the tables of `gradient_tables`.

    Args:
        span: The range.
        leaves: The rows of the range, leaves of an autograd graph that was run backward.
        grads: Table for each of them; None: no gradient.
    """
    for leaf, whole in zip(leaves, grads, strict=True):
        if whole is not None:
            whole[span] = 0 if leaf.grad is None else leaf.grad


def topology_of(view: GraphView) -> Topology:
    """Return the edges over which a view aggregates."""
    exchange = view.state.exchanges[view.stage] if isinstance(view, OutlineView) else cast(PlacedView, view).exchange
    return exchange.topology


def range_view(view: GraphView, rows: slice, calls: int) -> RowsView:
    """Return a view of a range of rows, with the dropout masks that these rows have under a view of all rows.

    Args:
        view: View of all rows.
        rows: The range.
        calls: Number of dropout masks that the view has drawn before.
    """
    inputs = Inputs(optimisations=view.inputs.optimisations)
    kind = ShapedRows if isinstance(view, OutlineView) else RowsView
    ids, key = view.row_ids[rows], view._key
    ranged = kind(view.topology, ids, view.num_vertices, key=key, calls=calls, inputs=inputs, embedded=refused)
    ranged.traits = view.traits
    if isinstance(ranged, ShapedRows) and isinstance(view, OutlineView):
        ranged.counter = view.state.counter
    return ranged

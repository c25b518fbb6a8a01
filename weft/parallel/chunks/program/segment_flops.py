"""The flops of a program's segments chunk by chunk: linear in the rows, and so much for each time that one is run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from functools import partial
from itertools import chain
from typing import cast

import torch
from torch import Tensor

from weft.nn import SPREAD, BlockSize, Inputs, LayerSizes, DenseFlops, Total, WholeLayer, Workload
from weft.nn.layers.phases import Boundary, BoundaryState, PhasedModel
from weft.nn.workload.dense_cost import backward_flops, make_counting_model
from weft.nn.workload.flops import FlopCounter, FlopPosition
from weft.nn.workload.outline import typed_rows_of
from weft.nn.workload.outline_view import OutlineState, OutlineView, counted_dropout
from weft.parallel.chunks.program.chunk_program import ChunkProgram, Segment, differentiable, left_by
from weft.parallel.chunks.program.segments import leaf
from weft.parallel.chunks.run.chunk_views import RowsView
from weft.runtime.kernel_call import KernelCall, merged
from weft.utils.random import RandomKey

CHUNK = SPREAD._replace(shrinks_rows=True)
"""The traits of a chunk's view: fewer rows come out than go in."""
NO_ROWS = LayerSizes(rows=(0, 0), relation_rows=(0,), blocks=(BlockSize(0, 0, 0, 0),))


class ShapedRows(RowsView):
    """The view of some rows without data."""

    counter: FlopCounter

    def _drop(self, x: Tensor, key: RandomKey, p: float, relu: bool) -> Tensor:
        del key, p
        return counted_dropout(self.counter, x, relu)


class SegmentFlops:
    """Counts those of a program's segments on a rank that has so much of everything, all of its chunks together."""

    def __init__(self, work: Workload, program: ChunkProgram, levels: LayerSizes, *, training: bool) -> None:
        self.work, self.segments, self.levels, self.training = work, program.segments, levels, training
        self.counter = FlopCounter()
        self.twin = make_counting_model(work, self.counter, training=training)
        self._known: dict[tuple[int, ...], DenseFlops] = {}

    def segment(self, number: int, calls: int) -> DenseFlops:
        """Those of a segment that is run in so many calls."""
        if (number, calls) not in self._known:
            rows = self.levels.rows[self.segments[number].hop]
            whole, none = self._segment(number, rows, shared=True), self._segment(number, 0, shared=False)
            self._known[number, calls] = repeated(whole, none, calls)
        return self._known[number, calls]

    def layer(self, number: int, num_sources: int, calls: int) -> DenseFlops:
        """Those of the whole layer that a segment requests, on so many chunks that read so many sources together."""
        if (known := (number, num_sources, calls)) not in self._known:
            self._known[known] = self._calls(number, num_sources, calls)
        return self._known[known]

    def _calls(self, number: int, num_sources: int, calls: int) -> DenseFlops:
        segment, levels, hop = self.segments[number], self.levels, self.segments[number].hop
        op = cast(Boundary, self._reach(number, 0)[0]).request.op
        assert isinstance(op, WholeLayer)
        size = LayerSizes(
            rows=(num_sources, levels.rows[hop + 1]),
            relation_rows=(levels.relation_rows[hop],),
            blocks=tuple(one._replace(sources=num_sources) for one in levels.blocks[hop : hop + 1]),
        )
        return repeated(self._layer(op, segment, size), self._layer(op, segment, NO_ROWS), calls)

    def _segment(self, number: int, num_rows: int, *, shared: bool) -> DenseFlops:
        """Those of one call; shared: whether it takes the gradients of what all rows share."""
        segment = self.segments[number]
        reached, start = self._reach(number, num_rows)
        forward, results = self.counter.total - start, [reached] if isinstance(reached, Tensor) else []
        if isinstance(reached, Boundary):
            wanted, request = differentiable(segment), reached.request
            results = [rows for port, rows in left_by(reached, segment).items() if port in wanted]
            results += [request.rows["x"]] if isinstance(request.op, Total) else []
            named = {**request.shared, **reached.shared}
            results += [one for name, one in named.items() if shared and segment.shared[name]]
        return self._with_backward(start, forward, results)

    def _reach(self, number: int, num_rows: int) -> tuple[Boundary | Tensor, int]:
        """What a segment gives for so many rows, and what had been counted before."""
        work, model, typed = self.work, cast(PhasedModel, self.twin.model), self.work.stats.typed
        rows = None
        if not number and typed.has_input:
            featured = self.levels.featured if num_rows else [0] * len(typed.featured)
            rows = typed_rows_of(typed, featured, self.levels.num_embedded if num_rows else 0, self.twin.dtype)
        inputs = self.twin.inputs(num_rows, rows, optimisations=work.optimisations)
        ids = torch.empty(num_rows, dtype=torch.int64, device="meta")
        make = partial(ShapedRows, self.twin.topology, ids, work.stats.num_vertices, key=0, calls=0, inputs=inputs)
        count = rows.num_embedded if rows else 0
        embedded = lambda weight: leaf(weight.new_empty(count, weight.shape[1]), differentiable=True)  # noqa: E731
        views = [make(embedded=embedded) for _ in range(model.num_stages)]
        for view in views:
            view.counter = self.counter
        start = self._start()
        with torch.enable_grad(), torch.device("meta"), self.counter:
            if not number:
                return model.begin(views, cast(Tensor, inputs.rows)), start
            return model.resume(views, self._state(self.segments[number - 1], num_rows)), start

    def _state(self, before: Segment, num_rows: int) -> BoundaryState:
        """What a model goes on with behind a segment's boundary, of so many rows."""
        boundary, dtype = cast(Boundary, before.boundary), self.twin.dtype
        shape = (before.width,) if isinstance(before.op, Total) else (num_rows, before.width)
        live = [leaf(torch.empty(num_rows, one.width, dtype=dtype), one.differentiable) for one in before.live]
        return BoundaryState(
            result=leaf(torch.empty(shape, dtype=dtype), before.differentiable),
            rows={name: live[port] for name, port in before.rows.items()},
            shared={name: leaf(one.to("meta"), before.shared[name]) for name, one in boundary.shared.items()},
            context=boundary.context,
        )

    def _layer(self, op: WholeLayer, segment: Segment, levels: LayerSizes) -> DenseFlops:
        """Those of one call on a block of these sizes."""
        notes = OutlineState(
            levels.rows[1],
            Counter({0: 1}),
            True,
            self.counter,
            [type(op.layer).__name__],
            num_relations=self.work.stats.typed.num_relations,
            levels=levels,
        )
        view = OutlineView(CHUNK, 0, notes, self.twin.topology, Inputs())
        read = [segment.live[port] for port in (*segment.sources.values(), *segment.targets.values())]
        start = self._start()
        with torch.enable_grad(), torch.device("meta"), self.counter:
            x = torch.empty(levels.rows[0], read[0].width, dtype=self.twin.dtype)
            y = op.layer(view, x.requires_grad_(any(rows.differentiable for rows in read)))
        forward = self.counter.total - start
        return self._with_backward(start, forward, [y])

    def _with_backward(self, start: int, forward: int, results: list[Tensor]) -> DenseFlops:
        """Those of a call, in a training step with those of its backward pass from some results."""
        if self.training:
            backward_flops(self.counter, 0, results)
        noted = [(place.backward, calls) for place, calls in self.counter.calls.items()]
        both = (merged(chain(*(calls for back, calls in noted if back == backward))) for backward in (False, True))
        return DenseFlops(forward, self.counter.total - start - forward, *both)

    def _start(self) -> int:
        """Begins to note calls anew; the flops counted before."""
        self.counter.place = FlopPosition()
        self.counter.calls.clear()
        return self.counter.total


def repeated(whole: DenseFlops, none: DenseFlops, calls: int) -> DenseFlops:
    """Those of so many calls, from those of one which has all of their rows and of one which has none."""
    forward, backward = (one + (calls - 1) * least for one, least in zip(whole[:2], none[:2], strict=True))
    noted = (shared_out(one, least, calls) for one, least in zip(whole[2:], none[2:], strict=True))
    return DenseFlops(forward, backward, *noted)


def shared_out(made: Iterable[KernelCall], always: Collection[KernelCall], calls: int) -> tuple[KernelCall, ...]:
    """What is done in so many calls on a share of the rows each, some on one more; always: also without rows."""
    found = []
    for one in made:
        if one in always:
            found.append(one._replace(number=one.number * calls))
            continue
        some, more = divmod(one.sizes[0], calls)
        for share, number in ((some, calls - more), (some + 1, more)):
            found += [KernelCall(one.kernel, (share, *one.sizes[1:]), one.number * number)] if share and number else []
    return tuple(found)

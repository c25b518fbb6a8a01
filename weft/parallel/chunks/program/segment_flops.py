"""Dense FLOPs of the segments of a program when they run chunk by chunk.

The FLOPs of a segment are linear in the rows, plus a constant for each time that it runs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from functools import partial
from itertools import chain
from typing import cast

import torch
from torch import Tensor

from weft.nn import SPREAD, BlockSize, DenseFlops, Inputs, LayerSizes, Total, WholeLayer, Workload
from weft.nn.aggregate.typed_block import TypeOrder
from weft.nn.layers.phases import Boundary, BoundaryState, PhasedModel
from weft.nn.workload.dense_cost import backward_flops, make_counting_model
from weft.nn.workload.flops import FlopCounter, FlopPosition
from weft.nn.workload.layer_sizes import TypeCounts
from weft.nn.workload.outline import typed_rows_of
from weft.nn.workload.outline_view import OutlineState, OutlineView, counted_dropout
from weft.parallel.chunks.program.chunk_program import ChunkProgram, Segment, differentiable_ports, rows_by_port
from weft.parallel.chunks.program.segments import leaf
from weft.parallel.chunks.run.chunk_views import RowsView
from weft.runtime.kernel_call import KernelCall, merged
from weft.utils.random import RandomKey

CHUNK = SPREAD._replace(shrinks_rows=True)
"""Cost hints of a chunk's view: an aggregate returns fewer rows than it reads."""


class ShapedRows(RowsView):
    """View of a range of rows that have shapes but no data."""

    counter: FlopCounter
    """Counts the FLOPs of dropout."""
    types: TypeCounts
    """Number of rows of each vertex type; only in a graph without x."""

    def type_order(self, vertex_type: Tensor, num_types: int) -> TypeOrder:
        del num_types
        return self.types.order(vertex_type)

    def _drop(self, x: Tensor, key: RandomKey, p: float, relu: bool, rows: slice | Tensor) -> Tensor:
        del key, p, rows
        return counted_dropout(self.counter, x, relu)


class SegmentFlops:
    """Counts the FLOPs of the segments of a program on one rank, summed over all of its chunks.

    Args:
        work: The model and the graph.
        program: The model cut into segments.
        levels: Numbers of rows and edges of the rank at each layer boundary.
        training: Count the backward pass too.
    """

    def __init__(self, work: Workload, program: ChunkProgram, levels: LayerSizes, *, training: bool) -> None:
        self.work, self.segments, self.levels, self.training = work, program.segments, levels, training
        self.counter = FlopCounter()
        self.twin = make_counting_model(work, self.counter, training=training)
        self._cache: dict[tuple[int, ...], DenseFlops] = {}

    def segment(self, number: int, calls: int) -> DenseFlops:
        """Return the FLOPs of a segment, all chunks together.

        Args:
            number: Number of the segment.
            calls: Number of chunks, for each of which the segment runs once.
        """
        if (number, calls) not in self._cache:
            rows = self.levels.rows[self.segments[number].hop]
            whole, none = self._segment(number, rows, shared=True), self._segment(number, 0, shared=False)
            self._cache[number, calls] = repeated(whole, none, calls)
        return self._cache[number, calls]

    def layer(self, number: int, num_sources: int, calls: int) -> DenseFlops:
        """Return the FLOPs of the whole layer that a segment requests as an aggregate, all chunks together.

        Args:
            number: Number of the segment.
            num_sources: Number of source rows of all chunks; a row counts once for each chunk that reads it.
            calls: Number of chunks.
        """
        if (key := (number, num_sources, calls)) not in self._cache:
            self._cache[key] = self._calls(number, num_sources, calls)
        return self._cache[key]

    def _calls(self, number: int, num_sources: int, calls: int) -> DenseFlops:
        """Return the FLOPs of a whole layer that runs once per chunk."""
        segment, levels, hop = self.segments[number], self.levels, self.segments[number].hop
        op = cast(Boundary, self._reach(number, 0)[0]).request.op
        assert isinstance(op, WholeLayer)
        typed = levels.typed_blocks[hop : hop + 1]
        size = LayerSizes(
            rows=(num_sources, levels.rows[hop + 1]),
            relation_rows=(levels.relation_rows[hop],),
            blocks=tuple(block._replace(sources=num_sources) for block in levels.blocks[hop : hop + 1]),
            typed_blocks=tuple(block.with_all_rows(num_sources, levels.rows[hop + 1]) for block in typed),
        )
        none = LayerSizes(
            rows=(0, 0),
            relation_rows=((0,) * len(levels.relation_rows[hop]),),
            blocks=(BlockSize(0, 0, 0, 0),),
            typed_blocks=tuple(block.without_rows() for block in typed),
        )
        return repeated(self._layer(op, segment, size), self._layer(op, segment, none), calls)

    def _segment(self, number: int, num_rows: int, *, shared: bool) -> DenseFlops:
        """Return the FLOPs of one run of a segment.

        Args:
            number: Number of the segment.
            num_rows: Number of rows.
            shared: Count the gradients of shared tensors, which only one chunk computes.
        """
        segment = self.segments[number]
        reached, start = self._reach(number, num_rows)
        forward, results = self.counter.total - start, [reached] if isinstance(reached, Tensor) else []
        if isinstance(reached, Boundary):
            wanted, request = differentiable_ports(segment), reached.request
            results = [rows for port, rows in rows_by_port(reached, segment).items() if port in wanted]
            results += [request.rows["x"]] if isinstance(request.op, Total) else []
            named = {**request.shared, **reached.shared}
            results += [tensor for name, tensor in named.items() if shared and segment.shared[name]]
        return self._with_backward(start, forward, results)

    def _reach(self, number: int, num_rows: int) -> tuple[Boundary | Tensor, int]:
        """Run a segment on rows without data.

        Args:
            number: Number of the segment.
            num_rows: Number of rows.

        Returns:
            The boundary or the logits, and the FLOPs counted before.
        """
        work, model, typed = self.work, cast(PhasedModel, self.twin.model), self.work.stats.typed
        types = self.levels.types[self.segments[number].hop] if typed.has_input else TypeCounts(())
        types = types if num_rows else types.none()
        rows = None
        if not number and typed.has_input:
            rows = typed_rows_of(typed, types.counts, self.twin.dtype)
        inputs = Inputs(rows=self.twin.features(num_rows), typed=rows, optimisations=work.optimisations)
        ids = torch.empty(num_rows, dtype=torch.int64, device="meta")
        make = partial(ShapedRows, self.twin.topology, ids, work.stats.num_vertices, key=0, calls=0, inputs=inputs)
        count = rows.num_embedded if rows else 0
        embedded = lambda weight: leaf(weight.new_empty(count, weight.shape[1]), differentiable=True)  # noqa: E731
        views = [make(embedded=embedded) for _ in range(model.num_stages)]
        for view in views:
            view.counter, view.types = self.counter, types
        start = self._start()
        with torch.enable_grad(), torch.device("meta"), self.counter:
            if not number:
                return model.begin(views, cast(Tensor, inputs.rows)), start
            return model.resume(views, self._state(self.segments[number - 1], num_rows)), start

    def _state(self, before: Segment, num_rows: int) -> BoundaryState:
        """Return the inputs, without data, with which a model resumes after the boundary of a segment."""
        boundary, dtype = cast(Boundary, before.boundary), self.work.row_dtype
        shape = (before.width,) if isinstance(before.op, Total) else (num_rows, before.width)
        live = [leaf(torch.empty(num_rows, rows.width, dtype=dtype), rows.differentiable) for rows in before.live]
        return BoundaryState(
            result=leaf(torch.empty(shape, dtype=dtype), before.differentiable),
            rows={name: live[port] for name, port in before.rows.items()},
            shared={name: leaf(tensor.to("meta"), before.shared[name]) for name, tensor in boundary.shared.items()},
            context=boundary.context,
        )

    def _layer(self, op: WholeLayer, segment: Segment, levels: LayerSizes) -> DenseFlops:
        """Return the FLOPs of one run of a whole layer on a block of the given sizes."""
        notes = OutlineState(
            levels.rows[1],
            Counter({0: 1}),
            True,
            self.counter,
            [type(op.layer).__name__],
            num_relations=self.work.stats.typed.num_relations,
            sizes=levels,
        )
        view = OutlineView(CHUNK, 0, notes, self.twin.topology, Inputs())
        read = [segment.live[port] for port in (*segment.sources.values(), *segment.targets.values())]
        start = self._start()
        with torch.enable_grad(), torch.device("meta"), self.counter:
            x = torch.empty(levels.rows[0], read[0].width, dtype=self.work.row_dtype)
            y = op.layer(view, x.requires_grad_(any(rows.differentiable for rows in read)))
        forward = self.counter.total - start
        return self._with_backward(start, forward, [y])

    def _with_backward(self, start: int, forward: int, results: list[Tensor]) -> DenseFlops:
        """Return the FLOPs of one run; in training, those of its backward pass from `results` too.

        Args:
            start: FLOPs counted before the run.
            forward: FLOPs of the forward pass.
            results: Outputs from which to backpropagate.
        """
        if self.training:
            backward_flops(self.counter, 0, results)
        by_position = [(position.backward, calls) for position, calls in self.counter.calls.items()]
        both = (
            merged(chain(*(calls for back, calls in by_position if back == backward))) for backward in (False, True)
        )
        return DenseFlops(forward, self.counter.total - start - forward, *both)

    def _start(self) -> int:
        """Start a new list of kernel calls, and return the FLOPs counted so far."""
        self.counter.position = FlopPosition()
        self.counter.calls.clear()
        return self.counter.total


def repeated(whole: DenseFlops, none: DenseFlops, calls: int) -> DenseFlops:
    """Return the FLOPs of several runs that share the rows evenly.

    Args:
        whole: FLOPs of one run with all rows.
        none: FLOPs of one run without rows, which every run needs in addition.
        calls: Number of runs.
    """
    forward, backward = (total + (calls - 1) * constant for total, constant in zip(whole[:2], none[:2], strict=True))
    noted = (shared_out(kernels, constant, calls) for kernels, constant in zip(whole[2:], none[2:], strict=True))
    return DenseFlops(forward, backward, *noted)


def shared_out(kernels: Iterable[KernelCall], always: Collection[KernelCall], calls: int) -> tuple[KernelCall, ...]:
    """Return the kernel calls of several runs that share the rows evenly.

    Some runs have one row more than the others.

    Args:
        kernels: Kernel calls of one run with all rows.
        always: Kernel calls of a run without rows; every run repeats them unchanged.
        calls: Number of runs.
    """
    result = []
    for call in kernels:
        if call in always:
            result.append(call._replace(number=call.number * calls))
            continue
        fewest, num_larger = divmod(call.sizes[0], calls)
        for share, number in ((fewest, calls - num_larger), (fewest + 1, num_larger)):
            result += (
                [KernelCall(call.kernel, (share, *call.sizes[1:]), call.number * number)] if share and number else []
            )
    return tuple(result)

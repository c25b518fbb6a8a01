"""Layout: the rows and edges that each rank has on its device in a type of step, and what it does with them.

Trace and memory of a step follow from the layout and the model's outline. `EvenLayout` is the simplest one;
`weft.parallel.blocks.vertex_layout` has blocks of in-edges.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from weft.comm import Group, even_bounds
from weft.cost import MemoryUse, Operation, Trace, all_reduce, transfer
from weft.nn import (
    BlockSize,
    DenseFlops,
    GraphOperation,
    Inputs,
    LayerSizes,
    ReceptiveField,
    RunModel,
    Total,
    TypedBlockSize,
    ViewTraits,
    Workload,
    dense_flops,
    make_layer_sizes,
    preparation_memory,
    run_whole,
    step_memory,
)
from weft.parallel.blocks.caching_costs import BACK_BYTES, EDGE_BYTES
from weft.parallel.exchange import Exchange
from weft.parallel.gathered_rows import GatheredRows
from weft.parallel.operations import backward_operations, dense_operations
from weft.parallel.row_ranges import FILE_TAG, RangedRun, num_retained
from weft.runtime.memory.tensor_peak import TensorPeak
from weft.storage.host_rows import keeps_in_file

NONZERO_BYTES = 20
"""Bytes of a nonzero feature: column and value; in the transpose row, position and value."""
ROW_BYTES = 56
"""Bytes of every row that a rank stores.

Begin of its edges in both directions, vertex, label, position among the labelled rows, and factors by degree.
"""


@dataclass(frozen=True, kw_only=True, eq=False)
class StepInputs:
    """Rows, inputs and exchanges of a rank for a type of step."""

    input_rows: slice | Tensor
    """Vertices whose rows the model begins with: a range, or int64."""
    inputs: Inputs
    """Rows that the model begins with."""
    exchanges: Sequence[Exchange]
    """Exchange of each stage of the model."""
    vertices: Tensor | None = None
    """Vertices that the rank is responsible for, int64 [n], ascending; None: all of its rows."""


class Layout(ABC):
    """Rows and edges of each rank in a type of step. By default, the ranks have even ranges of rows, and all edges.

    Attributes: `in_ranges` is True if steps run the model by a `RangedRun`; training steps then keep the autograd
    graphs of `retained_share` of the rows.

    Args:
        work: The workload. If it has a receptive field, steps compute only its rows.
        size: Number of ranks.
        traits: Properties of the strategy's views on all rows.
    """

    def __init__(self, work: Workload, size: int, traits: ViewTraits) -> None:
        self.work, self.size = work, size
        self.traits = traits if work.receptive_field is None else traits._replace(shrinks_rows=True)
        self.in_ranges, self.retained_share = False, 0.0

    @property
    def part(self) -> Tensor | None:
        """Rank of every vertex, int32 [N], if vertices are partitioned with their in-edges; else None."""
        return None

    def release(self) -> None:  # noqa: B027
        """Free the cached tensors whose size grows with the graph. A later use computes them again."""

    def restrict(self, field: ReceptiveField) -> Layout:
        """Return the layout of steps that read only a receptive field."""
        raise NotImplementedError(f"{type(self).__name__} lacks restrict, which `reach` needs for {field.rows} rows")

    def own_rows(self, rank: int) -> slice | Tensor:
        """Return the vertices that a rank is responsible for: a range, or int64."""
        first, end = even_bounds(self.work.stats.num_vertices, self.size)[rank : rank + 2]
        return slice(first, end)

    def layer_rows(self, rank: int) -> Sequence[slice | Tensor]:
        """Return the vertices whose rows a rank has before each aggregate over edges, and at the end."""
        return [self.own_rows(rank)] * (self.num_hops + 1)

    def layer_blocks(self, rank: int) -> Sequence[BlockSize]:
        """Return the size of each aggregate's block, for a layer that reads the edges itself."""
        return [BlockSize.of_targets(self.work.graph.in_edges, self.own_rows(rank))] * self.num_hops

    def typed_blocks(self, rank: int) -> Sequence[TypedBlockSize]:
        """Return the size of each aggregate's block by vertex type and relation."""
        graph = self.work.graph
        vertices, edges = torch.arange(graph.num_vertices), torch.stack(graph.in_edges.edges())
        targets, is_target = vertices[self.own_rows(rank)], torch.zeros(graph.num_vertices, dtype=torch.bool)
        is_target[targets] = True
        in_block = is_target[edges[1]]
        assert graph.edge_type is not None
        size = TypedBlockSize.of(graph, vertices, targets, edges[:, in_block], graph.edge_type[in_block])
        return [size] * self.num_hops

    @property
    def num_hops(self) -> int:
        """Number of successive aggregates over edges in the model."""
        return max((op.hops.stop for op in self.work.outline(self.traits, training=True)), default=0)

    def layer_sizes(self, rank: int) -> LayerSizes:
        """Return the number of rows and edges that a rank has at each layer boundary."""
        blocks = self.layer_blocks(rank) if self.work.reads_edges(self.traits) else ()
        typed_blocks = self.typed_blocks(rank) if blocks and self.work.calls_by_relation else ()
        rows, stored, is_alone = self.layer_rows(rank), self.own_rows(rank), self.size == 1
        return make_layer_sizes(self.work, rows, blocks, typed_blocks, stored, has_all_sources=is_alone)

    @abstractmethod
    def forward_operations(self, op: GraphOperation, rank: int) -> list[Operation]:
        """Return the operations of a rank in the forward pass for one operation of the model.

        `trace` adds totals, which are the same for all strategies, and leaves out cached aggregates of constant
        features. Neither is passed to this method.

        Args:
            op: An aggregate, a layer that reads the edges itself ('block'), or the input of embedding rows ('embed').
            rank: The rank.
        """

    @abstractmethod
    def meta_exchanges(self, rank: int, *, training: bool) -> Sequence[Exchange]:
        """Return the exchange of each stage of the model on the meta device, for estimates of a rank's memory.

        Args:
            rank: The rank.
            training: True for training steps, False for evaluations.
        """

    def resident_memory(self, rank: int, *, trains: bool = True) -> MemoryUse:
        """Return the bytes that a rank keeps for steps: features, cached aggregates, edges.

        Args:
            rank: The rank.
            trains: True if some of these steps train, and so need the transposed edges for gradients.
        """
        work, stats, rows, sizes = self.work, self.work.stats, self.layer_rows(rank)[0], self.layer_sizes(rank)
        features = sizes.rows[0] * stats.num_features * work.itemsize
        operations = work.outline(self.traits, training=True)
        transposed = {hop for op in operations if trains and op.backward for hop in op.hops}
        weight_bytes = work.dtype.itemsize if stats.weighted else 0
        in_edges = sum(
            num_edges * (EDGE_BYTES + weight_bytes + (BACK_BYTES + weight_bytes) * (not transposed.isdisjoint(hops)))
            for num_edges, hops in self.resident_edges(rank)
        )
        aggregates = sum(sizes.rows[op.hop + op.steps] * op.width for op in operations if work.is_cached(op))
        copied = max((self.feature_copy_bytes(op, rank) for op in operations if not work.is_cached(op)), default=0)
        dense = dense_flops(work, self.traits, sizes, training=True)
        sparse = {call.sizes[:3] for flops in dense for call in flops.calls if call.kernel == "sparse"}
        # Features whose nonzeros are read: those of vertex types, one by one, since equal sizes have equal calls; or x.
        counts = sizes.types[0].counts if sizes.types else ()
        densities = work.typed_densities or [1.0] * len(counts)
        of_types = list(zip(densities, counts, stats.typed.featured, strict=False))
        typed = [(round(density * n * width), n, width) for density, n, (_, width) in of_types]
        nonzeros = sum(call[0] for call in typed or sparse if call in sparse)
        read_whole = sum(n * width for density, n, (_, width) in of_types if density == 1) * work.dtype.itemsize
        rest = aggregates * work.itemsize + copied + nonzeros * NONZERO_BYTES + read_whole + ROW_BYTES * sizes.rows[0]
        # A range of rows is read where the graph stores it, which all ranks of a host share, if it has the rows' type.
        copies_features = stats.feature_dtype != work.row_dtype or not isinstance(rows, slice)
        shared = (0 if copies_features else features) + (in_edges if isinstance(rows, slice) else 0)
        in_file = features if copies_features and keeps_in_file(features) else 0
        return MemoryUse(features + in_edges + rest, 0, 0, shared, in_file)

    def feature_copy_bytes(self, op: GraphOperation, rank: int) -> int:
        """Return the bytes of the copy of constant features that an aggregate reads; 0 if it reads them in place.

        Args:
            op: The aggregate.
            rank: The rank.
        """
        del op, rank
        return 0

    def resident_edges(self, rank: int) -> Sequence[tuple[int, Collection[int]]]:
        """Return the number of edges of each block of a rank, and the numbers of the aggregates over it."""
        del rank
        return [(self.work.stats.num_edges, range(self.num_hops))]

    def step_memory(self, rank: int, *, training: bool) -> TensorPeak:
        """Return the allocations of a training step or an evaluation.

        Args:
            rank: The rank.
            training: True for a training step.
        """
        return self._step_memory(rank, self.meta_exchanges(rank, training=training), training=training)

    def _step_memory(self, rank: int, exchanges: Sequence[Exchange], *, training: bool) -> TensorPeak:
        sizes = self.layer_sizes(rank)
        return step_memory(
            self.work,
            self.traits,
            sizes,
            exchanges,
            training=training,
            sums_gradients=self.size > 1,
            run_model=self._run_model(training=training),
        )

    @property
    def logits_in_ranges(self) -> bool:
        """True if steps compute the logits of a range of rows, and their loss or scores, before those of the next."""
        return self.in_ranges and self.work.losses_by_row

    def ranged_run(self, *, training: bool) -> RangedRun:
        """Return how steps run the model, see `in_ranges`.

        Args:
            training: True for a training step.
        """
        return RangedRun(
            needs_grad=[op.backward for op in self.work.outline(self.traits, training=training)],
            num_logits=self.work.num_classes or 0,
            retained_share=self.retained_share if training else 0.0,
            reads_files=self.file_row_bytes > 0,
        )

    def _run_model(self, *, training: bool) -> RunModel:
        """Return the function that runs the model in a step, for an estimate of memory."""
        if not self.in_ranges:
            return run_whole
        ranged = self.ranged_run(training=training)
        if not self.logits_in_ranges:
            return ranged.logits
        return partial(ranged.loss, meta_loss) if training else ranged.dropped_logits

    @property
    def file_row_bytes(self) -> int:
        """Bytes of a row in mapped files that the layers after the first aggregate read; 0: none are in files."""
        return 0

    def temporary_memory(self, rank: int, *, training: bool) -> list[int]:
        """Return the peak bytes that a step allocates, and those of its preparation.

        Args:
            rank: The rank.
            training: True for a training step.
        """
        exchanges = self.meta_exchanges(rank, training=training)
        preparation = preparation_memory(self.work, self.traits, self.layer_sizes(rank), exchanges, training=training)
        step = self._step_memory(rank, exchanges, training=training)
        del exchanges  # with rows that they keep for later steps
        return [step.room, preparation]

    def trace(self, rank: int, *, training: bool) -> Trace:
        """Return the operations of a training step or an evaluation.

        Args:
            rank: The rank.
            training: True for a training step.
        """
        work = self.work
        operations = work.outline(self.traits, training=training)
        # Forward: dense layers, then operation by operation its exchange and aggregate and the dense layers after it.
        # Backward: the same in reverse order. In ranges, rows that an aggregate sums are computed again for their
        # gradient, from rows that may be in files.
        sizes = self.layer_sizes(rank)
        computed_again = [self.in_ranges and training and op.backward for op in operations[1:]] + [False]
        first, *rest = dense_flops(work, self.traits, sizes, training=training)
        forward, backward = (
            dense_operations(first.forward, first.calls),
            dense_operations(first.backward, first.backward_calls),
        )
        for op, dense, again in zip(operations, rest, computed_again, strict=True):
            operations_of_rank = [] if work.is_cached(op) else self._operations_or_total(op, rank)
            num_rows = sizes.rows[op.hop + op.steps]
            read = self._file_reads(num_rows) if op is operations[0] else []
            forward += operations_of_rank + read + dense_operations(dense.forward, dense.calls)
            adjoint = backward_operations(operations_of_rank) if op.backward else []
            backward = dense_operations(dense.backward, dense.backward_calls) + adjoint + backward
            backward = ([*read, *self._computed_again(dense, num_rows)] if again else []) + backward
        if training and self.size > 1 and work.num_summed:
            backward.append(all_reduce("gradients", work.num_summed, work.dtype.itemsize, self.size))
        return Trace(operations=(*forward, *backward))

    def _file_reads(self, num_rows: int) -> list[Operation]:
        """Return the reads of rows in mapped files, before the layers after the first aggregate."""
        num_bytes = num_rows * self.file_row_bytes if self.in_ranges else 0
        return [transfer(FILE_TAG, to_device=num_bytes, calls=())] if num_bytes else []

    def _computed_again(self, dense: DenseFlops, num_rows: int) -> list[Operation]:
        """Return the dense layers that the backward pass computes again for some of their rows."""
        share = 1 - num_retained(num_rows, self.retained_share) / max(num_rows, 1)
        calls = [call._replace(sizes=(round(share * call.sizes[0]), *call.sizes[1:])) for call in dense.calls]
        return dense_operations(round(share * dense.forward), tuple(calls))

    def _operations_or_total(self, op: GraphOperation, rank: int) -> list[Operation]:
        """Return the forward operations of one operation of the model, totals included."""
        if not isinstance(op.op, Total):
            return self.forward_operations(op, rank)
        return [all_reduce("statistics", op.width, self.work.dtype.itemsize, self.size)] if self.size > 1 else []


def meta_loss(logits: Tensor, _: slice | None) -> tuple[Tensor, Tensor]:
    """Allocate loss and gradient of a range of rows for an estimate of memory; see `RangeLoss`.

    Args:
        logits: Logits [m, C] on the meta device.
    """
    return logits.new_empty(()), torch.empty_like(logits)


class EvenLayout(Layout):
    """Even ranges of rows, and all edges on every rank, with operations that a function states.

    Args:
        work: The workload.
        size: Number of ranks.
        traits: Properties of the strategy's views.
        operations: `forward_operations` of the layout.
    """

    def __init__(
        self,
        work: Workload,
        size: int,
        traits: ViewTraits,
        operations: Callable[[GraphOperation, int], list[Operation]],
    ) -> None:
        super().__init__(work, size, traits)
        self._operations = operations

    def forward_operations(self, op: GraphOperation, rank: int) -> list[Operation]:
        return self._operations(op, rank)

    def meta_exchanges(self, rank: int, *, training: bool) -> Sequence[Exchange]:
        del training
        return [GatheredRows(self.work, Group(rank, self.size, device="meta"))] * self.work.num_stages

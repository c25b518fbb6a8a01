"""Strategies whose rows stay on the device: one trace for all of them, and a model that runs under views.

Reading order: ResidentPlan (rows and edges of each rank, and its operations for each operation of the model),
StepInputs (what a rank has for a step), ResidentPlaced (the views).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, ClassVar, cast

import torch
from torch import Tensor

from weft.comm import Group, even_bounds, sum_gradients
from weft.cost import Operation, Trace, all_reduce
from weft.nn import (
    BlockSize,
    GraphOperation,
    Inputs,
    KernelMemory,
    LayerSizes,
    ReceptiveField,
    Topology,
    Total,
    dense_flops,
    make_layer_sizes,
    shared_parameters,
    step_memory,
    typed_rows,
)
from weft.parallel.blocks.caching_costs import BACK_BYTES, EDGE_BYTES
from weft.parallel.exchange import Exchange, PlacedView
from weft.parallel.operations import backward_operations, dense_operations
from weft.runtime.memory.tensor_peak import TensorPeak
from weft.strategies.base import CHECKPOINT_COPIES, PARAMETER_COPIES, MemoryUse, Placed, Plan, Step, whole_topology
from weft.strategies.step_pruning import describe_receptive_fields, find_receptive_field
from weft.utils.random import key

NONZERO_BYTES = 20
"""Bytes of a nonzero feature: column and value; in the transpose row, position and value."""
VERTEX_BYTES, ROW_BYTES = 32, 56
"""Bytes of every vertex, and of every row that a rank stores.

A vertex: its id, its scales and its splits. A row: begin of its edges in both directions, its vertex, its label, its
position among the labelled rows, and its scales.
"""


class ResidentPlan(Plan):
    """Plan whose ranks store all their rows on the device, so that its steps follow from the model's outline."""

    low_precision_rows = True
    whole_graph: ClassVar[tuple[bool, ...]] = (True, False)
    """Kinds of steps on the whole graph that the strategy has: True for training steps, False for evaluations."""

    @cached_property
    def receptive_fields(self) -> dict[bool, ReceptiveField | str]:
        """Receptive field of training steps (True) and evaluations (False), or the reason why they read all rows."""
        return {training: self.find_receptive_field(training=training) for training in self.whole_graph}

    def find_receptive_field(self, *, training: bool) -> ReceptiveField | str:
        """Return the receptive field of a step, see `weft.strategies.step_pruning.find_receptive_field`."""
        return find_receptive_field(self.work, self.traits, training=training) if "reach" in self.optimisations else ""

    @cached_property
    def step_plans(self) -> dict[bool, ResidentPlan]:
        """Plan of training steps (True) and evaluations (False): this one, or one restricted to the receptive field."""
        return {
            training: self.restrict_to(field) if isinstance(field, ReceptiveField) else self
            for training, field in self.receptive_fields.items()
        }

    def restrict_to(self, field: ReceptiveField) -> ResidentPlan:
        """Return the same plan for steps that read only a receptive field."""
        raise NotImplementedError(f"strategy {self.name} reads all rows, not {field.rows}")

    def make_step_inputs(self, placed: ResidentPlaced) -> StepInputs:
        """Create a rank's rows, blocks and exchanges for steps on a receptive field; all ranks must call it."""
        raise NotImplementedError(f"strategy {self.name} reads all rows on rank {placed.group.rank}")

    def release(self) -> None:
        """Free the cached tensors whose size grows with the graph, also in the plans of steps on receptive fields."""
        for plan in vars(self).get("step_plans", {}).values():
            if plan is not self:
                plan.release()

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

    @property
    def num_hops(self) -> int:
        """Number of successive aggregates over edges in the model."""
        return max((op.hops.stop for op in self.work.outline(self.traits, training=True)), default=0)

    def layer_sizes(self, rank: int) -> LayerSizes:
        """Return the number of rows and edges that a rank has at each layer boundary."""
        blocks = self.layer_blocks(rank) if self.work.reads_edges(self.traits) else ()
        return make_layer_sizes(self.work, self.layer_rows(rank), blocks)

    @abstractmethod
    def forward_operations(self, op: GraphOperation, rank: int) -> list[Operation]:
        """Return the operations of a rank in the forward pass for one operation of the model, which is no total.

        Args:
            op: Operation of the model's outline.
            rank: The rank.
        """

    def kernel_memory(self, op: GraphOperation, rank: int) -> KernelMemory:
        """Return the memory of an aggregate over edges on a rank, without its result and the gradients of its rows.

        Args:
            op: The aggregate.
            rank: The rank.
        """
        raise NotImplementedError(f"strategy {self.name} does not estimate the memory of {op.op} on rank {rank}")

    def peak_memory(self, rank: int = 0) -> MemoryUse:
        """Return the resident bytes of a rank plus the most that a step, or its preparation, allocates."""
        plans = {
            id(plan): (plan, trains) for trains, plan in sorted(self.step_plans.items())
        }  # a plan of both kinds of steps trains
        resident = [plan.resident_memory(rank, trains=trains) for plan, trains in plans.values()]
        temporary = self.temporary_memory(rank)
        vertices = VERTEX_BYTES * self.work.stats.num_vertices
        parameters = self.work.num_shared * self.work.dtype.itemsize
        temporary.append(CHECKPOINT_COPIES * parameters)
        device = sum(use.device for use in resident) + max(temporary) + vertices + PARAMETER_COPIES * parameters
        return MemoryUse(device, 0, 0, sum(use.shared for use in resident))

    def temporary_memory(self, rank: int) -> list[int]:
        """Return the peak bytes that each type of step allocates, and those of its preparation."""
        return [
            num_bytes
            for training, plan in self.step_plans.items()
            for peak in [plan.step_memory(rank, training=training)]
            for num_bytes in (peak.room, plan.constant_aggregate_memory(rank, training=training))
        ]

    def resident_memory(self, rank: int, *, trains: bool = True) -> MemoryUse:
        """Return the bytes that a rank keeps for steps on the rows of this plan: features, cached aggregates, edges.

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
        nonzeros = max((call.sizes[0] for flops in dense for call in flops.calls if call.kernel == "sparse"), default=0)
        rest = aggregates * work.itemsize + copied + nonzeros * NONZERO_BYTES + ROW_BYTES * sizes.rows[0]
        shared = features + in_edges if isinstance(rows, slice) else 0
        return MemoryUse(features + in_edges + rest, 0, 0, shared)

    def constant_aggregate_memory(self, rank: int, *, training: bool) -> int:
        """Return the temporary bytes of the largest aggregate of constant features that is computed only once.

        Args:
            rank: The rank.
            training: True for the aggregates of training steps.
        """
        work = self.work
        cached = [op for op in work.outline(self.traits, training=training) if work.is_cached(op)]
        return max(
            (self.feature_copy_bytes(op, rank) + self.kernel_memory(op, rank).forward for op in cached), default=0
        )

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

    def memory(self, rank: int = 0) -> int:
        """Return the peak bytes that a training step allocates on the device before the optimizer's step.

        Gradients of parameters count; what stays from epoch to epoch does not.
        """
        return self.step_plans.get(True, self).step_memory(rank, training=True).most

    def step_memory(self, rank: int, *, training: bool) -> TensorPeak:
        """Return the allocations of a training step or an evaluation on the rows of this plan.

        Args:
            rank: The rank.
            training: True for a training step.
        """
        operations = self.work.outline(self.traits, training=training)
        kernels = [self.kernel_memory(op, rank) if op.is_aggregate else KernelMemory() for op in operations]
        return step_memory(self.work, self.traits, self.layer_sizes(rank), kernels, training=training)

    def trace(self, rank: int = 0, *, training: bool) -> Trace:
        return self.step_plans[training].step_trace(rank, training=training)

    def step_trace(self, rank: int, *, training: bool) -> Trace:
        """Return the operations of a step on the rows of this plan.

        Args:
            rank: The rank.
            training: True for a training step.
        """
        work = self.work
        operations = work.outline(self.traits, training=training)
        # Forward: dense layers, then operation by operation its exchange and aggregate and the dense layers after it.
        # Backward: the same in reverse order.
        first, *rest = dense_flops(work, self.traits, self.layer_sizes(rank), training=training)
        forward, backward = (
            dense_operations(first.forward, first.calls),
            dense_operations(first.backward, first.backward_calls),
        )
        for op, dense in zip(operations, rest, strict=True):
            requested = [] if work.is_cached(op) else self._forward_operations(op, rank)
            forward += requested + dense_operations(dense.forward, dense.calls)
            adjoint = backward_operations(requested) if op.backward else []
            backward = dense_operations(dense.backward, dense.backward_calls) + adjoint + backward
        if training and self.size > 1:
            backward.append(all_reduce("gradients", work.num_shared, work.dtype.itemsize, self.size))
        return Trace(operations=(*forward, *backward))

    def _forward_operations(self, op: GraphOperation, rank: int) -> list[Operation]:
        """Return the forward operations of one operation of the model, totals included."""
        if not isinstance(op.op, Total):
            return self.forward_operations(op, rank)
        return [all_reduce("statistics", op.width, self.work.dtype.itemsize, self.size)] if self.size > 1 else []


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


class ResidentPlaced(Placed):
    """Plan placed on a rank, where each stage of the model runs on all rows at once, instead of chunk by chunk.

    Args:
        plan: The plan.
        group: The ranks.
        rows: Vertices that the rank is responsible for: a range or int64 [n].
        seed: Seed of dropout.
    """

    def __init__(self, plan: ResidentPlan, group: Group, rows: slice | Tensor, *, seed: int) -> None:
        super().__init__(plan.work, group, rows, seed=seed)
        self.work, self.plan = plan.work, plan
        self.pruned_inputs = {
            training: step_plan.make_step_inputs(self)
            for training, step_plan in plan.step_plans.items()
            if step_plan is not plan
        }
        """Inputs of training steps (True) and evaluations (False) that read only a receptive field."""

    @cached_property
    def whole(self) -> StepInputs:
        """Step inputs of a step on the whole graph."""
        exchanges = [self.exchange(stage) for stage in self.stages]
        return StepInputs(input_rows=self.rows, inputs=self.make_inputs(self.rows), exchanges=exchanges)

    def step_inputs(self, step: Step) -> StepInputs:
        """Return the rows, inputs and exchanges of this rank for a step."""
        return self.whole if step.vertices is None else self.pruned_inputs[step.training]

    def steps(self, epoch: int) -> Iterable[Step]:
        return [self._step(epoch, training=True)]

    def evaluation(self, epoch: int) -> Step:
        return self._step(epoch, training=False)

    def _step(self, epoch: int, *, training: bool) -> Step:
        if training not in self.pruned_inputs:
            return Step(epoch=epoch, training=training)
        field = self.plan.receptive_fields[training]
        assert isinstance(field, ReceptiveField)
        vertices = self.pruned_inputs[training].vertices
        return Step(epoch=epoch, training=training, vertices=vertices, batch_size=len(field.vertices))

    def describe(self) -> dict[str, Any]:
        """Return the receptive fields of steps, or why steps read all rows, for the record."""
        names = {True: "training", False: "evaluation"}
        fields = {names[training]: field for training, field in self.plan.receptive_fields.items()}
        return describe_receptive_fields(fields)

    def make_inputs(self, vertices: slice | Tensor) -> Inputs:
        """Return the constant features of some vertices, and a cache for results that are computed from them once."""
        work = self.work
        return Inputs(
            rows=self.features(vertices),
            optimisations=work.optimisations,
            sparse=work.sparse,
            sparse_first=work.sparse_first,
            typed=typed_rows(self.graph, vertices, self.group.device, work.dtype),
        )

    @property
    def shrinks_rows(self) -> bool:
        """True if an aggregate may have fewer rows after it than before."""
        return self.plan.traits.shrinks_rows

    @cached_property
    def topology(self) -> Topology:
        """Topology of the whole graph, on the group's device."""
        return whole_topology(self.work, self.group.device)

    def features(self, vertices: slice | Tensor) -> Tensor:
        """Return the features of some vertices, on the group's device."""
        return self.work.features(vertices, self.group.device)

    @property
    def stages(self) -> range:
        """Numbers of the model's stages, each of which gets a view."""
        return range(cast(int, self.model.num_stages))

    @abstractmethod
    def exchange(self, stage: int) -> Exchange:
        """Return the exchange of a stage of the model."""

    def views(self, step: Step) -> list[PlacedView]:
        """Return the view of each stage for a step; dropout masks depend on stage and step."""
        inputs, traits = self.step_inputs(step), self.plan.traits
        return [
            PlacedView(
                exchange,
                traits,
                key=key(self.seed, *step.key, stage),
                masks=None if step.masks is None else partial(step.masks.at, stage),
                inputs=inputs.inputs,
            )
            for stage, exchange in enumerate(inputs.exchanges)
        ]

    def forward(self, step: Step) -> Tensor:
        self.model.train(step.training)
        views = self.views(step)
        with torch.set_grad_enabled(step.training):
            logits: Tensor = self.model(views, views[0].inputs.rows)
        return logits.to(self.work.dtype)

    def backward(self, logits: Tensor, grad: Tensor) -> None:
        logits.backward(grad)
        sum_gradients(shared_parameters(self.model), self.group)

"""Strategies whose rows stay on the device: one trace for all of them, and a model that runs under views.

Reading order: ResidentPlan (which rows and edges a rank has, and what an operation of the model makes of them), Share
(what a rank has of them for a step), ResidentPlaced (the views).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, ClassVar, NamedTuple, cast

import torch
from torch import Tensor

from weft.comm import Group, even_bounds, sum_gradients
from weft.cost import Operation, Trace, all_reduce
from weft.data import GraphStats
from weft.nn import (
    Aggregate,
    BlockSize,
    GraphOperation,
    Inputs,
    KernelMemory,
    LayerSizes,
    Topology,
    Total,
    dense_flops,
    make_layer_sizes,
    shared_parameters,
    step_memory,
    typed_rows,
)
from weft.partition import ReceptiveField
from weft.runtime.kernel_call import KernelCall
from weft.runtime.tensor_peak import TensorPeak
from weft.strategies.base import CHECKPOINT_COPIES, PARAMETER_COPIES, MemoryUse, Placed, Plan, Step, whole_topology
from weft.strategies.placed_view import Exchange, PlacedView
from weft.strategies.step_pruning import describe_receptive_fields, find_receptive_field
from weft.utils.random import key

EDGE_BYTES, BACK_BYTES = 4, 8
"""Of an edge: its source; in the transpose, by which gradients go back, its target and its position there."""
NONZERO_BYTES = 20
"""Of one of sparse features: its column and value, in the transpose its row, its position and its value."""
VERTEX_BYTES, ROW_BYTES = 32, 56
"""Of every vertex: its number, its scalings and whether it is in a split. Of a row: where its edges begin, both ways,
its number among all, its label, its place among the labelled, and its scalings."""


class ResidentPlan(Plan):
    """A plan whose ranks have all their rows on the device, so that an operation of the model tells what they do."""

    low_precision_rows = True
    whole_graph: ClassVar[tuple[bool, ...]] = (True, False)
    """Whether steps on the whole graph train, where it has such steps."""

    @cached_property
    def receptive_fields(self) -> dict[bool, ReceptiveField | str]:
        """What training steps, and evaluations, on the whole graph read of it, or why that is all."""
        return {training: self.find_receptive_field(training=training) for training in self.whole_graph}

    def find_receptive_field(self, *, training: bool) -> ReceptiveField | str:
        """See `weft.strategies.step_pruning.find_reach`."""
        return find_receptive_field(self.work, self.traits, training=training) if "reach" in self.optimisations else ""

    @cached_property
    def step_plans(self) -> dict[bool, ResidentPlan]:
        """The plan of such a step: this one, or that of the rows which are reached."""
        return {
            training: self.restrict_to(found) if isinstance(found, ReceptiveField) else self
            for training, found in self.receptive_fields.items()
        }

    def restrict_to(self, reach: ReceptiveField) -> ResidentPlan:
        """The same plan for steps that read no more than this."""
        raise NotImplementedError(f"strategy {self.name} reads all rows, not {reach.rows}")

    def make_step_inputs(self, placed: ResidentPlaced) -> StepInputs:
        """What a rank has for the steps of such a plan; all ranks call it."""
        raise NotImplementedError(f"strategy {self.name} reads all rows on rank {placed.group.rank}")

    def release(self) -> None:
        """And what the plans of steps on fewer rows hold."""
        for plan in vars(self).get("step_plans", {}).values():
            if plan is not self:
                plan.release()

    def own_rows(self, rank: int) -> slice | Tensor:
        """The vertices that a rank answers for: a range, or int64."""
        first, end = even_bounds(self.work.stats.num_vertices, self.size)[rank : rank + 2]
        return slice(first, end)

    def layer_rows(self, rank: int) -> Sequence[slice | Tensor]:
        """The vertices whose rows a rank has before each aggregate over edges, and in the end."""
        return [self.own_rows(rank)] * (self.num_hops + 1)

    def layer_blocks(self, rank: int) -> Sequence[BlockSize]:
        """The block of each aggregate, for a layer that asks for its edges."""
        return [BlockSize.of_targets(self.work.graph.in_edges, self.own_rows(rank))] * self.num_hops

    @property
    def num_hops(self) -> int:
        """The model's aggregates over edges, one after the other."""
        return max((op.hops.stop for op in self.work.outline(self.traits, training=True)), default=0)

    def layer_sizes(self, rank: int) -> LayerSizes:
        """How much of everything a rank has at each aggregate."""
        asked = any(op.op == "block" for op in self.work.outline(self.traits, training=True))
        return make_layer_sizes(self.work, self.layer_rows(rank), self.layer_blocks(rank) if asked else ())

    @abstractmethod
    def forward_operations(self, op: GraphOperation, rank: int) -> list[Operation]:
        """What a rank does forward for one thing that the model asks of its views, but for totals."""

    def kernel_memory(self, op: GraphOperation, rank: int) -> KernelMemory:
        """What an aggregate over edges takes on a rank, beside its result and gradients."""
        raise NotImplementedError(f"strategy {self.name} does not say what {op.op} takes on rank {rank}")

    def peak_memory(self, rank: int = 0) -> MemoryUse:
        """What is there from epoch to epoch, and the most of what is made beside it by a step or before the first."""
        plans = {id(plan): (plan, trains) for trains, plan in sorted(self.step_plans.items())}  # of both kinds: trains
        kept = [plan.resident_memory(rank, trains=trains) for plan, trains in plans.values()]
        made = self.temporary_memory(rank)
        whole = VERTEX_BYTES * self.work.stats.num_vertices
        parameters = self.work.num_shared * self.work.dtype.itemsize
        made.append(CHECKPOINT_COPIES * parameters)
        held = sum(one.device for one in kept) + max(made) + whole + PARAMETER_COPIES * parameters
        return MemoryUse(held, 0, 0, sum(one.shared for one in kept))

    def temporary_memory(self, rank: int) -> list[int]:
        """Bytes of what each kind of step makes at most, and what is made before the first of it."""
        return [
            most
            for training, plan in self.step_plans.items()
            for step in [plan.step_memory(rank, training=training)]
            for most in (step.room, plan.constant_aggregate_memory(rank, training=training))
        ]

    def resident_memory(self, rank: int, *, trains: bool = True) -> MemoryUse:
        """What a rank keeps for steps on the rows of this plan: features, aggregates of them, edges.

        trains: whether there are training steps among these, whose gradients take edges the other way.
        """
        work, stats, rows, levels = self.work, self.work.stats, self.layer_rows(rank)[0], self.layer_sizes(rank)
        features = levels.rows[0] * stats.num_features * work.itemsize
        asked = work.outline(self.traits, training=True)
        back = {hop for op in asked if trains and op.backward for hop in op.hops}
        weight = work.dtype.itemsize if stats.weighted else 0
        in_edges = sum(
            num_edges * (EDGE_BYTES + weight + (BACK_BYTES + weight) * (not back.isdisjoint(hops)))
            for num_edges, hops in self.resident_edges(rank)
        )
        aggregates = sum(levels.rows[op.hop + op.steps] * op.width for op in asked if work.is_cached(op))
        again = max((self.feature_copy_bytes(op, rank) for op in asked if not work.is_cached(op)), default=0)
        maps = dense_flops(work, self.traits, levels, training=True)
        nonzeros = max((call.sizes[0] for one in maps for call in one.calls if call.kernel == "sparse"), default=0)
        made = aggregates * work.itemsize + again + nonzeros * NONZERO_BYTES + ROW_BYTES * levels.rows[0]
        shared = features + in_edges if isinstance(rows, slice) else 0
        return MemoryUse(features + in_edges + made, 0, 0, shared)

    def constant_aggregate_memory(self, rank: int, *, training: bool) -> int:
        """Bytes of what a rank makes for a moment for the largest aggregate of constant features, made only once."""
        work = self.work
        once = [op for op in work.outline(self.traits, training=training) if work.is_cached(op)]
        return max((self.feature_copy_bytes(op, rank) + self.kernel_memory(op, rank).forward for op in once), default=0)

    def feature_copy_bytes(self, op: GraphOperation, rank: int) -> int:
        """Bytes of the copy of constant features that an aggregate of them reads, if it does not read them there."""
        del op, rank
        return 0

    def resident_edges(self, rank: int) -> Sequence[tuple[int, Collection[int]]]:
        """The edges of each block that a rank has, and the hops that go over them."""
        del rank
        return [(self.work.stats.num_edges, range(self.num_hops))]

    def memory(self, rank: int = 0) -> int:
        """Bytes on the device of all that a training step makes, at most at once, until Adam's step.

        Its gradients are among them; what is there from epoch to epoch is not.
        """
        return self.step_plans.get(True, self).step_memory(rank, training=True).most

    def step_memory(self, rank: int, *, training: bool) -> TensorPeak:
        """That of a step, or of an evaluation, on the rows of this plan."""
        asked = self.work.outline(self.traits, training=training)
        footprints = [self.kernel_memory(op, rank) if op.is_aggregate else KernelMemory() for op in asked]
        return step_memory(self.work, self.traits, self.layer_sizes(rank), footprints, training=training)

    def trace(self, rank: int = 0, *, training: bool) -> Trace:
        return self.step_plans[training].step_trace(rank, training=training)

    def step_trace(self, rank: int, *, training: bool) -> Trace:
        """The same of a step on the rows of this plan."""
        work = self.work
        asked = work.outline(self.traits, training=training)
        first, *maps = dense_flops(work, self.traits, self.layer_sizes(rank), training=training)
        forward, backward = mapped(first.forward, first.calls), mapped(first.backward, first.backward_calls)
        for op, then in zip(asked, maps, strict=True):
            made = [] if work.is_cached(op) else self._forward_operations(op, rank)
            forward += made + mapped(then.forward, then.calls)
            mirror = backward_operations(made) if op.backward else []
            backward = mapped(then.backward, then.backward_calls) + mirror + backward
        if training and self.size > 1:
            backward.append(all_reduce("gradients", work.num_shared, work.dtype.itemsize, self.size))
        return Trace(operations=(*forward, *backward))

    def _forward_operations(self, op: GraphOperation, rank: int) -> list[Operation]:
        """As `lower`, and totals."""
        if not isinstance(op.op, Total):
            return self.forward_operations(op, rank)
        return [all_reduce("statistics", op.width, self.work.dtype.itemsize, self.size)] if self.size > 1 else []


def backward_operations(made: Iterable[Operation]) -> list[Operation]:
    """The backward pass of operations, last first; what is done while rows come is while their gradients go."""
    found: list[Operation] = []
    for operation in reversed([*made]):
        before = len(found) - bool(operation.kind == "collective" and found and found[-1].ahead)
        found[before:before] = [operation.adjoint()] if operation.backward is None else operation.backward
    return found


def mapped(flops: int, calls: tuple[KernelCall, ...]) -> list[Operation]:
    """The dense maps between two graph operations, and passes over rows, if there are any."""
    return [Operation(kind="dense", flops=flops, calls=calls)] if flops or calls else []


class AggregateSize(NamedTuple):
    """What an aggregate takes beside its edges."""

    targets: int
    sources: int
    fresh_share: float = 1.0
    """See `Adjacency.fresh_share`."""

    @classmethod
    def whole(cls, stats: GraphStats) -> AggregateSize:
        """That of one over a whole graph."""
        return cls(stats.num_vertices, stats.num_vertices, stats.fresh_share)


def aggregate(
    op: GraphOperation,
    edges: int,
    size: AggregateSize,
    *,
    steps: int = 1,
    width: int | None = None,
    recomputed: bool = False,
) -> Operation:
    """So many steps of an aggregate over as many edges each; width: the columns, by default `op.width`."""
    assert isinstance(op.op, Aggregate)
    width = op.width if width is None else width
    fresh = round(size.fresh_share * edges)
    sizes = edges, size.targets, size.sources, fresh, width, op.op.heads
    call = KernelCall(type(op.op).__name__, sizes, steps)
    return Operation(kind="aggregate", edges=steps * edges * width, recomputed=recomputed, calls=(call,))


@dataclass(frozen=True, kw_only=True, eq=False)
class StepInputs:
    """What a rank has for a step."""

    input_rows: slice | Tensor
    """The vertices whose rows the model begins with: a range, or int64."""
    inputs: Inputs
    """These rows."""
    exchanges: Sequence[Exchange]
    """Of each of the model's stages."""
    vertices: Tensor | None = None
    """int64 [n], ascending: those that the rank answers for; None: all of its rows."""


class ResidentPlaced(Placed):
    """A plan on its rank, where the model runs as a whole, each of its stages under a view.

    shares: by whether a step trains, where it reads less than the whole graph.
    """

    def __init__(self, plan: ResidentPlan, group: Group, rows: slice | Tensor, *, seed: int) -> None:
        super().__init__(plan.work, group, rows, seed=seed)
        self.work, self.plan = plan.work, plan
        self.pruned_inputs = {
            training: one.make_step_inputs(self) for training, one in plan.step_plans.items() if one is not plan
        }

    @cached_property
    def whole(self) -> StepInputs:
        """What the rank has for a step on the whole graph."""
        exchanges = [self.exchange(stage) for stage in self.stages]
        return StepInputs(input_rows=self.rows, inputs=self.make_inputs(self.rows), exchanges=exchanges)

    def step_inputs(self, step: Step) -> StepInputs:
        """What the rank has for a step."""
        return self.whole if step.vertices is None else self.pruned_inputs[step.training]

    def steps(self, epoch: int) -> Iterable[Step]:
        return [self._step(epoch, training=True)]

    def evaluation(self, epoch: int) -> Step:
        return self._step(epoch, training=False)

    def _step(self, epoch: int, *, training: bool) -> Step:
        if training not in self.pruned_inputs:
            return Step(epoch=epoch, training=training)
        reach = self.plan.receptive_fields[training]
        assert isinstance(reach, ReceptiveField)
        vertices = self.pruned_inputs[training].vertices
        return Step(epoch=epoch, training=training, vertices=vertices, batch_size=len(reach.vertices))

    def describe(self) -> dict[str, Any]:
        """What steps reach, where they leave rows out, or why they do not, where a person may wonder."""
        names = {True: "training", False: "evaluation"}
        known = {names[training]: found for training, found in self.plan.receptive_fields.items()}
        return describe_receptive_fields(known)

    def make_inputs(self, vertices: slice | Tensor) -> Inputs:
        """The constant features of some vertices, and what is made of them only once."""
        work = self.work
        return Inputs(
            rows=self.features(vertices),
            optimisations=work.optimisations,
            sparse=work.sparse,
            sparse_first=work.sparse_first,
            typed=typed_rows(self.graph, vertices, self.group.device, work.dtype),
        )

    @cached_property
    def topology(self) -> Topology:
        """The whole graph's, on the group's device."""
        return whole_topology(self.work, self.group.device)

    def features(self, vertices: slice | Tensor) -> Tensor:
        """The features of some vertices, on the group's device."""
        return self.work.features(vertices, self.group.device)

    @property
    def stages(self) -> range:
        """The model's stages, each of which gets a view."""
        return range(cast(int, self.model.num_stages))

    @abstractmethod
    def exchange(self, stage: int) -> Exchange:
        """What brings the rows of one of the model's stages to the edges, and the results back."""

    def views(self, step: Step) -> list[PlacedView]:
        """The views of a step's stages, which share their inputs; their dropout masks depend on stage and step."""
        share, traits = self.step_inputs(step), self.plan.traits
        return [
            PlacedView(
                exchange,
                traits,
                key=key(self.seed, *step.key, stage),
                masks=None if step.masks is None else partial(step.masks.at, stage),
                inputs=share.inputs,
            )
            for stage, exchange in enumerate(share.exchanges)
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

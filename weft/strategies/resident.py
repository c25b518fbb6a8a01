"""Base classes of strategies whose rows stay on the device: the model runs under a view for each of its stages.

Reading order: ResidentPlan (the layouts of its steps, `weft.parallel.layout`), ResidentPlaced (the views).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator
from functools import cached_property, partial
from typing import Any, ClassVar, cast

import torch
from torch import Tensor

from weft.comm import Group, sum_gradients
from weft.cost import MemoryUse, Operation, Trace
from weft.nn import GraphOperation, Inputs, ReceptiveField, Topology, shared_parameters, typed_rows
from weft.nn.sparse_rows import SparseRows
from weft.parallel.exchange import Exchange, PlacedView
from weft.parallel.layout import EvenLayout, Layout, StepInputs
from weft.parallel.row_ranges import RangedRun, RangeLoss
from weft.strategies.base import CHECKPOINT_COPIES, PARAMETER_COPIES, Placed, Plan, Step, whole_topology
from weft.strategies.step_pruning import describe_receptive_fields, find_receptive_field
from weft.utils.random import key

VERTEX_BYTES = 32
"""Bytes of every vertex: its id, its scales and its splits."""
SHARED_SHARE = 0.75
"""Training steps compute the rows of evaluations if their own are at least this share of them."""


class ResidentPlan(Plan):
    """Plan whose ranks store all their rows on the device, so that its steps follow from its layout and the model.

    A strategy either returns a layout of its own, or has even ranges of rows and states its `forward_operations`.
    """

    planned_steps: tuple[bool, ...] = (True, False)
    """Types of full-graph steps that the plan has: True for training steps, False for evaluations."""
    placed_type: ClassVar[type[ResidentPlaced]]
    """Type of the plan on a rank."""

    def solve(self, state: Any) -> None:
        super().solve(state)
        self.layout = self.make_layout()
        """Rows and edges of each rank in a step on the whole graph."""

    def make_layout(self) -> Layout:
        """Return the layout of a step on the whole graph."""
        return EvenLayout(self.work, self.size, self.traits, self.forward_operations)

    def forward_operations(self, op: GraphOperation, rank: int) -> list[Operation]:
        """Return the operations of a rank in the forward pass for one operation of the model.

        See `Layout.forward_operations`. Only a strategy without a layout of its own states them here.

        Args:
            op: Operation of the model's outline.
            rank: The rank.
        """
        raise NotImplementedError(
            f"strategy {self.name} has neither forward_operations nor make_layout ({op.op}, rank {rank})"
        )

    @cached_property
    def receptive_fields(self) -> dict[bool, ReceptiveField | str]:
        """Receptive field of training steps (True) and evaluations (False), or the reason why they read all rows.

        They share that of evaluations if that of training is not much smaller: rows and edges then exist once.
        """
        fields = {training: self.find_receptive_field(training=training) for training in self.planned_steps}
        of_training, of_evaluation = fields.get(True), fields.get(False)
        if (
            isinstance(of_training, ReceptiveField)
            and isinstance(of_evaluation, ReceptiveField)
            and sum(of_training.rows[1:]) >= SHARED_SHARE * sum(of_evaluation.rows[1:])
        ):
            fields[True] = of_evaluation
        return fields

    def find_receptive_field(self, *, training: bool) -> ReceptiveField | str:
        """Return the receptive field of a step, see `weft.strategies.step_pruning.find_receptive_field`."""
        return find_receptive_field(self.work, self.traits, training=training) if "reach" in self.optimisations else ""

    @cached_property
    def layouts(self) -> dict[bool, Layout]:
        """Layout of training steps (True) and evaluations (False): `layout`, or its part for a receptive field."""
        return self.make_layouts()

    def make_layouts(self) -> dict[bool, Layout]:
        """Return the layout of each type of step, see `layouts`."""
        fields = self.receptive_fields
        restricted = {
            field: self.layout.restrict(field) for field in set(fields.values()) if isinstance(field, ReceptiveField)
        }
        return {
            training: restricted[field] if isinstance(field, ReceptiveField) else self.layout
            for training, field in fields.items()
        }

    @property
    def part(self) -> Tensor | None:
        return self.layout.part

    def own_rows(self, rank: int, *, training: bool) -> slice | Tensor:
        layout = self.layouts.get(training, self.layout)
        return layout.own_rows(rank) if layout.work.receptive_field is None else layout.layer_rows(rank)[-1]

    def release(self) -> None:
        for layout in (self.layout, *vars(self).get("layouts", {}).values()):
            layout.release()

    def peak_memory(self, rank: int = 0) -> MemoryUse:
        """Return the bytes that a rank keeps, plus the most that a step, its preparation or a checkpoint allocates."""
        # If both types of steps share a layout, it counts once, as one that trains: True comes last.
        trains = {layout: training for training, layout in sorted(self.layouts.items())}
        resident = [layout.resident_memory(rank, trains=training) for layout, training in trains.items()]
        parameters = self.work.num_shared * self.work.dtype.itemsize
        temporary = max(*self.temporary_memory(rank), CHECKPOINT_COPIES * parameters)
        lasting = VERTEX_BYTES * self.work.stats.num_vertices + PARAMETER_COPIES * parameters + self.extra_memory(rank)
        device = sum(use.device for use in resident) + lasting + temporary
        return MemoryUse(device, 0, 0, sum(use.shared for use in resident), sum(use.in_file for use in resident))

    def extra_memory(self, rank: int) -> int:
        """Return the bytes that a rank keeps for steps in addition to the rows, edges and aggregates of its layouts.

        Args:
            rank: The rank.
        """
        del rank
        return 0

    def temporary_memory(self, rank: int) -> list[int]:
        """Return the peak bytes that each type of step allocates, and those of its preparation."""
        return [
            num_bytes
            for training, layout in self.layouts.items()
            for num_bytes in layout.temporary_memory(rank, training=training)
        ]

    def memory(self, rank: int = 0) -> int:
        """Return the peak bytes that a training step allocates on the device before the optimizer's step.

        Gradients of parameters count; what stays from epoch to epoch does not.
        """
        return self.layouts.get(True, self.layout).step_memory(rank, training=True).most

    def trace(self, rank: int = 0, *, training: bool) -> Trace:
        return self.layouts[training].trace(rank, training=training)

    def place(self, group: Group, *, seed: int = 0) -> ResidentPlaced:
        return self.placed_type(self, group, seed=seed)


class ResidentPlaced(Placed):
    """Plan placed on a rank, where each stage of the model runs on all rows at once, instead of chunk by chunk.

    Args:
        plan: The plan.
        group: The ranks.
        seed: Seed of dropout.
    """

    def __init__(self, plan: ResidentPlan, group: Group, *, seed: int) -> None:
        super().__init__(plan.work, group, plan.layout.own_rows(group.rank), seed=seed)
        self.plan = plan
        pruned = dict.fromkeys(layout for layout in plan.layouts.values() if layout is not plan.layout)
        step_inputs = {layout: self.make_step_inputs(layout) for layout in pruned}
        self.pruned_inputs = {
            training: step_inputs[layout] for training, layout in plan.layouts.items() if layout in step_inputs
        }
        """Inputs of training steps (True) and evaluations (False) that read only a receptive field."""

    def make_step_inputs(self, layout: Layout) -> StepInputs:
        """Create this rank's rows, blocks and exchanges for steps on a receptive field; all ranks must call it.

        Args:
            layout: Layout of these steps.
        """
        raise NotImplementedError(
            f"{type(self).__name__} lacks make_step_inputs, which `reach` needs for {type(layout).__name__}"
        )

    @cached_property
    def whole(self) -> StepInputs:
        """Step inputs of a step on the whole graph."""
        exchanges = [self.exchange(stage) for stage in self.stages]
        return StepInputs(input_rows=self.rows, inputs=self.make_inputs(self.rows), exchanges=exchanges)

    def step_inputs(self, step: Step) -> StepInputs:
        """Return the rows, inputs and exchanges of this rank for a step."""
        return self.whole if step.vertices is None else self.pruned_inputs[step.training]

    def layout_of(self, step: Step) -> Layout:
        """Return the layout of a step on the whole graph or on a receptive field; a mini-batch has others."""
        return self.plan.layout if step.vertices is None else self.plan.layouts.get(step.training, self.plan.layout)

    def steps(self, epoch: int) -> Iterable[Step]:
        return [self._step(epoch, training=True)]

    def evaluation(self, epoch: int) -> Step:
        return self._step(epoch, training=False)

    def _step(self, epoch: int, *, training: bool) -> Step:
        if training not in self.pruned_inputs:
            return Step(epoch=epoch, training=training)
        return Step(epoch=epoch, training=training, vertices=self.pruned_inputs[training].vertices)

    def describe(self) -> dict[str, Any]:
        """Return the receptive fields of steps, or why steps read all rows, for the record."""
        names = {True: "training", False: "evaluation"}
        fields = {names[training]: field for training, field in self.plan.receptive_fields.items()}
        return describe_receptive_fields(fields)

    def describe_planned_bytes(self) -> dict[str, Any]:
        """Return the bytes of a training step by tag for the record, as in the trace; {} if there are none."""
        trace = self.plan.trace(self.group.rank, training=True)
        planned = {name: dict(getattr(trace, name)) for name in ("bytes_sent", "to_device") if getattr(trace, name)}
        return {"planned": planned} if planned else {}

    def make_inputs(self, vertices: slice | Tensor) -> Inputs:
        """Return the constant features of some vertices, and a cache for results that are computed from them once."""
        work = self.work
        return Inputs(
            rows=SparseRows.of(self.features(vertices), work.density),
            optimisations=work.optimisations,
            sparse_first=work.sparse_first,
            typed=typed_rows(self.graph, vertices, self.group.device, work.dtype, densities=work.typed_densities),
        )

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
        inputs, layout = self.step_inputs(step), self.layout_of(step)
        return [
            PlacedView(
                exchange,
                layout.traits,
                key=key(self.seed, *step.key, stage),
                masks=None if step.masks is None else partial(step.masks.at, stage),
                inputs=inputs.inputs,
            )
            for stage, exchange in enumerate(inputs.exchanges)
        ]

    def forward(self, step: Step) -> Tensor:
        run, views, x = self.begin(step)
        with torch.set_grad_enabled(step.training):
            logits: Tensor = self.model(views, x) if run is None else run.logits(self.model, views, x)
        return logits.to(self.work.dtype)

    def begin(self, step: Step) -> tuple[RangedRun | None, list[PlacedView], Tensor]:
        """Return how a step runs the model (None: on all rows at once), the views, and the constant features."""
        self.model.train(step.training)
        views, layout = self.views(step), self.layout_of(step)
        run = layout.ranged_run(training=step.training) if layout.in_ranges else None
        return run, views, cast(Tensor, views[0].inputs.rows)

    def logit_ranges(self, step: Step) -> Iterator[tuple[slice, Tensor]]:
        if not self.layout_of(step).logits_in_ranges:
            yield from super().logit_ranges(step)
            return
        run, views, x = self.begin(step)
        assert run is not None
        ranges, timer = run.logit_ranges(self.model, views, x), self.group.meter.timer
        while True:
            with timer("encode"):
                span, logits = next(ranges, (None, x))
            if span is None:
                return
            yield span, logits.to(self.work.dtype)

    def train(self, step: Step, loss: RangeLoss) -> Tensor:
        if not self.layout_of(step).logits_in_ranges:
            return super().train(step, loss)
        with self.group.meter.timer("encode"):
            run, views, x = self.begin(step)
            assert run is not None
            total = run.loss(loss, self.model, views, x)
            total.backward()
            sum_gradients(shared_parameters(self.model), self.group)
        return total.detach()

    def backward(self, logits: Tensor, grad: Tensor) -> None:
        logits.backward(grad)
        sum_gradients(shared_parameters(self.model), self.group)

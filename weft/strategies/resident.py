"""Strategies whose rows stay on the device: one trace for all of them, and a model that runs under views.

Reading order: ResidentPlan (which rows and edges a rank has, and what an operation of the model makes of them),
ResidentPlaced (the views).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from functools import cached_property
from typing import cast

import torch
from torch import Tensor

from weft.comm import Group, even_bounds, sum_gradients
from weft.core.random import key
from weft.cost import Operation, Trace, all_reduce
from weft.nn import (
    BlockSize,
    Footprint,
    GraphOperation,
    Inputs,
    Levels,
    Topology,
    Total,
    make_levels,
    map_flops,
    shared_parameters,
    step_memory,
    typed_rows,
)
from weft.strategies.base import Placed, Plan, Step, whole_topology
from weft.strategies.view import Exchange, PlacedView


class ResidentPlan(Plan):
    """A plan whose ranks have all their rows on the device, so that an operation of the model tells what they do."""

    def own_rows(self, rank: int) -> slice | Tensor:
        """The vertices that a rank answers for: a range, or int64."""
        first, end = even_bounds(self.work.stats.num_vertices, self.size)[rank : rank + 2]
        return slice(first, end)

    def level_rows(self, rank: int) -> Sequence[slice | Tensor]:
        """The vertices whose rows a rank has before each aggregate over edges, and in the end."""
        return [self.own_rows(rank)] * (self.num_hops + 1)

    def level_blocks(self, rank: int) -> Sequence[BlockSize]:
        """The block of each aggregate, for a layer that asks for its edges."""
        return [BlockSize.of_targets(self.work.graph.in_edges, self.own_rows(rank))] * self.num_hops

    @property
    def num_hops(self) -> int:
        """The model's aggregates over edges, one after the other."""
        return max((op.hops.stop for op in self.work.outline(self.traits, training=True)), default=0)

    def levels(self, rank: int) -> Levels:
        """How much of everything a rank has at each aggregate."""
        asked = any(op.op == "block" for op in self.work.outline(self.traits, training=True))
        return make_levels(self.work, self.level_rows(rank), self.level_blocks(rank) if asked else ())

    @abstractmethod
    def lower(self, op: GraphOperation, rank: int) -> list[Operation]:
        """What a rank does forward for one thing that the model asks of its views, but for totals."""

    def footprint(self, op: GraphOperation, rank: int) -> Footprint:
        """What an aggregate over edges takes on a rank, beside its result and gradients."""
        raise NotImplementedError(f"strategy {self.name} does not say what {op.op} takes on rank {rank}")

    def memory(self, rank: int = 0) -> int:
        """Bytes on the device of all that a training step makes, at most at once, until Adam's step.

        Its gradients are among them; what is there from epoch to epoch is not.
        """
        asked = self.work.outline(self.traits, training=True)
        footprints = [self.footprint(op, rank) if op.is_aggregate else Footprint() for op in asked]
        return step_memory(self.work, self.traits, self.levels(rank), footprints)

    def trace(self, rank: int = 0, *, training: bool) -> Trace:
        work = self.work
        asked = work.outline(self.traits, training=training)
        first, *maps = map_flops(work, self.traits, self.levels(rank), training=training)
        forward, backward = mapped(first.forward), mapped(first.backward)
        for op, then in zip(asked, maps, strict=True):
            made = [] if work.is_cached(op) else self._lower(op, rank)
            forward += made + mapped(then.forward)
            mirror = [operation.mirrored() for operation in reversed(made)] if op.backward else []
            backward = mapped(then.backward) + mirror + backward
        if training and self.size > 1:
            backward.append(all_reduce("gradients", work.num_shared, work.itemsize, self.size))
        return Trace(operations=(*forward, *backward))

    def _lower(self, op: GraphOperation, rank: int) -> list[Operation]:
        """As `lower`, and totals."""
        if not isinstance(op.op, Total):
            return self.lower(op, rank)
        return [all_reduce("statistics", op.width, self.work.itemsize, self.size)] if self.size > 1 else []


def mapped(flops: int) -> list[Operation]:
    """The dense maps between two graph operations, if there are any."""
    return [Operation(kind="map", flops=flops)] if flops else []


class ResidentPlaced(Placed):
    """A plan on its rank, where the model runs as a whole, each of its stages under a view.

    input_rows: the vertices whose features the model reads here, if others than the rank answers for.
    """

    def __init__(
        self, plan: Plan, group: Group, rows: slice | Tensor, *, seed: int, input_rows: Tensor | None = None
    ) -> None:
        super().__init__(plan.work, group, rows, seed=seed)
        work, self.plan = plan.work, plan
        self.input_rows = rows if input_rows is None else input_rows
        self.inputs = Inputs(
            rows=self.features(self.input_rows),
            optimisations=work.optimisations,
            sparse=work.sparse,
            sparse_first=work.sparse_first,
            typed=typed_rows(self.graph, self.input_rows, group.device, work.dtype),
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

    def view(self, stage: int, view_key: int) -> PlacedView:
        """The view of one stage, whose dropout masks depend on `view_key`."""
        return PlacedView(self.exchange(stage), self.plan.traits, key=view_key, inputs=self.inputs)

    def views(self, step: Step) -> list[PlacedView]:
        """The views of a step's stages, which share their inputs."""
        return [self.view(stage, key(self.seed, *step.key, stage)) for stage in self.stages]

    def forward(self, step: Step) -> Tensor:
        self.model.train(step.training)
        views = self.views(step)
        with torch.set_grad_enabled(step.training):
            logits: Tensor = self.model(views, views[0].inputs.rows)
        return logits

    def backward(self, logits: Tensor, grad: Tensor) -> None:
        logits.backward(grad)
        sum_gradients(shared_parameters(self.model), self.group)

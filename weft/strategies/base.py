"""A strategy decides where rows, columns and edges live: its plan is made without ranks, then placed on each of them.

Reading order: Plan (what was decided, and the trace of what it does), Placed (that on a rank: all that the trainer
knows), Step.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from weft.comm import Group, even_bounds, sum_gradients
from weft.core.errors import InputError
from weft.core.random import key
from weft.cost import Machine, Operation, Trace, all_reduce
from weft.data import Graph
from weft.nn import (
    SPREAD,
    BlockSize,
    Footprint,
    GraphOperation,
    Inputs,
    Levels,
    Topology,
    Total,
    ViewTraits,
    Workload,
    make_levels,
    shared_parameters,
    step_costs,
    typed_rows,
    with_own_rows,
)
from weft.strategies.view import Exchange, PlacedView


@dataclass(frozen=True, kw_only=True)
class Options:
    """What a person may say to a strategy: a field for each of its flags, which no other strategy accepts."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Step:
    """One forward pass, with a backward pass where it trains."""

    epoch: int
    number: int = 0
    """Which step of the epoch this is."""
    rows: Tensor | None = None
    """int64, ascending: which of the rows that the rank answers for the loss or the scores read; None: all."""
    training: bool

    @property
    def key(self) -> tuple[int, ...]:
        """What the step adds to the keys of what is drawn in it; the first step of an epoch is told by the epoch."""
        return (self.epoch, self.number) if self.number else (self.epoch,)


class Plan(ABC):
    """What a strategy does with a workload on `size` ranks: the same value on every rank, made without a process group.

    machine: what costs are decided by; None: nominal ones. decisions: those of the same plan in another process, which
    are then not searched for again.
    InputError for a number of ranks, options or a model that the strategy cannot serve.
    """

    name: ClassVar[str]
    """What the command line calls it."""
    options_type: ClassVar[type[Options]] = Options
    flags: ClassVar[tuple[str, ...]] = ()
    """Its flags that are no options, since they are read before there is a plan."""
    exact: ClassVar[bool] = True
    """Whether it gives the numbers of `single`."""
    optimisations: ClassVar[tuple[str, ...]] = ()
    """The optimisations that it has besides those of all strategies."""
    traits: ClassVar[ViewTraits] = SPREAD
    """How its views weigh one order of map and aggregate against the other, and what they refuse."""
    max_ranks: ClassVar[int | None] = None

    def __init__(
        self,
        work: Workload,
        size: int = 1,
        options: Any = None,
        machine: Machine | None = None,
        decisions: Any = None,
    ) -> None:
        self.check_size(size)
        self.work, self.size, self.machine = work, size, machine
        self.options = self.options_type() if options is None else options
        self.decide(decisions)

    @classmethod
    def check_size(cls, size: int) -> None:
        """InputError for more ranks than the strategy can use."""
        if cls.max_ranks is not None and size > cls.max_ranks:
            raise InputError(f"strategy {cls.name} runs on one rank: give --workers 1, or --strategy tensor for {size}")

    def decide(self, decisions: Any) -> None:
        """Makes the choices that the plan consists of, or takes those given. InputError for what cannot be."""
        del decisions
        self.work.outline(self.traits, training=True)

    def decisions(self) -> Any:
        """The choices that take a search: small, for another process to make the same plan of."""
        return None

    @property
    def wants_machine(self) -> bool:
        """Whether it decides by what the machine costs, and nobody has measured that."""
        return False

    def require(self) -> None:  # noqa: B027
        """InputError with the remedy where memory or disk is too little, before anything large is allocated."""

    def forget(self) -> None:  # noqa: B027
        """Lets go of what grows with the graph and can be made again."""

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
        return step_costs(self.work, self.traits, self.levels(rank), footprints, training=True).memory

    def trace(self, rank: int = 0, *, training: bool) -> Trace:
        """What one training step, or one evaluation, does on a rank."""
        work = self.work
        asked = work.outline(self.traits, training=training)
        no_memory = [Footprint()] * len(asked)
        first, *maps = step_costs(work, self.traits, self.levels(rank), no_memory, training=training).maps
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

    @abstractmethod
    def place(self, group: Group, *, seed: int = 0) -> Placed:
        """The plan on this rank of a group of `size` ranks; all ranks call it."""


def mapped(flops: int) -> list[Operation]:
    """The dense maps between two graph operations, if there are any."""
    return [Operation(kind="map", flops=flops)] if flops else []


class Placed(ABC):
    """A plan on its rank. The model is the rank's own: the workload's stays as it is.

    rows: the vertices that the rank answers for, a range or int64 [n]. input_rows: those whose features the model reads
    here, if others than these.
    """

    def __init__(
        self, plan: Plan, group: Group, rows: slice | Tensor, *, seed: int, input_rows: Tensor | None = None
    ) -> None:
        work = plan.work
        self.plan, self.work, self.group, self.seed, self.rows = plan, work, group, seed, rows
        self.graph: Graph = work.graph
        self.model: nn.Module
        self.model, self.embedded = with_own_rows(work.model, self.graph, rows)
        self.model.to(group.device)
        self.input_rows = rows if input_rows is None else input_rows
        self.inputs = self.make_inputs()

    def make_inputs(self) -> Inputs:
        """What the model reads on this rank."""
        work = self.work
        return Inputs(
            rows=self.features(self.input_rows),
            optimisations=work.optimisations,
            sparse=work.sparse,
            sparse_first=work.sparse_first,
            typed=typed_rows(self.graph, self.input_rows, self.group.device, work.dtype),
        )

    @cached_property
    def topology(self) -> Topology:
        """The whole graph's, on the group's device."""
        return whole_topology(self.work, self.group.device)

    def features(self, vertices: slice | Tensor) -> Tensor:
        """The features of some vertices, on the group's device and in the model's type; [n, 0] without x."""
        x = torch.empty(self.graph.num_vertices, 0) if self.graph.x is None else self.graph.x
        return x[vertices].to(self.group.device, self.work.dtype)

    @property
    def stages(self) -> range:
        """The model's stages, each of which gets a view."""
        return range(cast(int, self.model.num_stages))

    def describe(self) -> dict[str, Any]:
        """What of this rank's placement is worth a record; `summary` in it is a line for a person."""
        return {}

    @abstractmethod
    def exchange(self, stage: int) -> Exchange:
        """What brings the rows of one of the model's stages to the edges, and the results back."""

    def view(self, stage: int, view_key: int) -> PlacedView:
        """The view of one stage, whose dropout masks depend on `view_key`."""
        return PlacedView(self.exchange(stage), self.plan.traits, key=view_key, inputs=self.inputs)

    def steps(self, epoch: int) -> Sequence[Step]:
        """The training steps of an epoch."""
        return [Step(epoch=epoch, training=True)]

    def evaluation(self, epoch: int) -> Step:
        """The step that gives the logits of every vertex, without dropout."""
        return Step(epoch=epoch, training=False)

    def forward(self, step: Step) -> Tensor:
        """Logits [n, C] of the rows this rank answers for."""
        self.model.train(step.training)
        views = [self.view(stage, key(self.seed, *step.key, stage)) for stage in self.stages]
        with torch.set_grad_enabled(step.training):
            logits: Tensor = self.model(views, self.inputs.rows)
        return logits

    @property
    def rows_device(self) -> torch.device:
        """Where the logits, their gradients and the labels are."""
        return self.group.device

    def empty_rows(self, rows: Tensor) -> Tensor:
        """Memory for the gradient of the rows that `forward` gives, like them."""
        return torch.empty_like(rows)

    def backward(self, logits: Tensor, grad: Tensor) -> None:
        """Leaves every parameter's gradient, summed over the ranks, from the gradient [n, C] of the logits.

        The gradient of an embedded row is on the rank that keeps the row.
        """
        logits.backward(grad)
        sum_gradients(shared_parameters(self.model), self.group)


def whole_topology(work: Workload, device: torch.device | str) -> Topology:
    """The whole graph's edges in the model's type, on a device."""
    graph = work.graph
    ids = None if graph.ids is None else graph.ids.to(device)
    in_edges = graph.in_edges.cast(work.dtype).to(device)
    return Topology(in_edges, ids, graph.edge_features, work.dtype, graph.edge_type, len(graph.relations))

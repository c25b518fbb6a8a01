"""A strategy decides where rows, columns and edges live: its plan is made without ranks, then placed on each of them.

Reading order: Plan (what was decided, and the trace of what it does), Placed (that on a rank: all that the trainer
knows), Step.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from weft.comm import Group, Route
from weft.cost import Machine, Steps, Trace
from weft.data import Graph, Links
from weft.nn import SPREAD, Topology, ViewTraits, Workload, with_own_rows
from weft.runtime.alignment import empty_aligned
from weft.utils.dtypes import dtype_name
from weft.utils.errors import InputError
from weft.utils.random import KeyTable

PARAMETER_COPIES = 5
"""In a run: a parameter, its gradient, Adam's two moments, and the best so far."""
CHECKPOINT_COPIES = 8
"""While a checkpoint is written, of all of these but gradients: a copy, and that as bytes."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """What a person may say to a strategy: a field for each of its flags, which no other strategy accepts."""


@dataclass(frozen=True, kw_only=True, eq=False)
class CandidateLinks:
    """The candidate links that a rank scores in a step on a mini-batch of links."""

    pairs: Tensor
    """int64 [p (1 + K), 3], the p links first: where source and target stand among the rank's rows and then those that
    other ranks send; the relation."""
    route: Route | None
    """Which rows go where for that; None: each rank has those of all its ends."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Step:
    """One forward pass, with a backward pass where it trains."""

    epoch: int
    number: int = 0
    """Which step of the epoch this is."""
    vertices: Tensor | None = None
    """int64 [n], ascending: those that the rank answers for in this step, if not for all of its rows."""
    links: CandidateLinks | None = None
    """What the rank scores in this step, of a mini-batch of links."""
    batch_size: int = 0
    """How many vertices these are on all ranks, each of which the loss, or a score, reads; or the batch's links."""
    training: bool
    masks: KeyTable | None = None
    """Where kernels find the keys of dropout's masks, of a step that is recorded to be repeated; None: by `key`."""

    @property
    def key(self) -> tuple[int, ...]:
        """What the step adds to the keys of what is drawn in it; the first step of an epoch is told by the epoch."""
        return (self.epoch, self.number) if self.number else (self.epoch,)


class MemoryUse(NamedTuple):
    """Bytes of a rank, or of several, by where they are."""

    device: int
    """On the device; also where that is the host's processor."""
    host: int
    """In the host's memory beside it."""
    disk: int
    shared: int = 0
    """What of these is the graph's own, in memory once for all ranks of a host."""


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
    evaluates_as: ClassVar[str] = ""
    """The strategy whose evaluation its own is, and which prepares nothing else; '': none."""
    optimisations: ClassVar[tuple[str, ...]] = ()
    """The optimisations that it has besides those of all strategies."""
    traits: ViewTraits = SPREAD
    """How its views weigh one order of map and aggregate against the other, and what they refuse."""
    partition: ClassVar[str] = ""
    """The method by which vertices are divided where nobody says another; '': the plan divides them by itself."""
    max_ranks: ClassVar[int | None] = None
    low_precision_rows: ClassVar[bool] = False
    """Whether rows may be narrower than the parameters."""
    variants: ClassVar[Sequence[Mapping[str, Any]]] = ({},)
    """The options that a planner tries, as fields of a configuration that are not as by default."""

    def __init__(
        self,
        work: Workload,
        size: int = 1,
        options: Any = None,
        machine: Machine | None = None,
        decisions: Any = None,
    ) -> None:
        self.check_size(size)
        self.check_rows(work)
        self.work, self.size, self.machine = work, size, machine
        self.options = self.options_type() if options is None else options
        self.solve(decisions)

    @classmethod
    def check_size(cls, size: int) -> None:
        """InputError for more ranks than the strategy can use."""
        if cls.max_ranks is not None and size > cls.max_ranks:
            raise InputError(f"strategy {cls.name} runs on one rank: give --workers 1, or --strategy tensor for {size}")

    @classmethod
    def check_rows(cls, work: Workload) -> None:
        """InputError for rows of a type that the strategy does not have."""
        if work.row_dtype != work.dtype and not cls.low_precision_rows:
            raise InputError(
                f"--dtype {dtype_name(work.row_dtype)}: strategy {cls.name} has rows of the parameters' type alone: "
                "leave it out, or give --strategy single, tensor, communicated, cached or hybrid"
            )

    def solve(self, decisions: Any) -> None:
        """Makes the choices that the plan consists of, or takes those given. InputError for what cannot be."""
        del decisions
        self.work.outline(self.traits, training=True)

    def state(self) -> Any:
        """The choices that take a search: small, for another process to make the same plan of."""
        return None

    @property
    def part(self) -> Tensor | None:
        """The rank of every vertex, int32 [N], where vertices are divided with their edges; None: they are not."""
        return None

    def check_fits(self) -> None:  # noqa: B027
        """InputError with the remedy where memory or disk is too little, before anything large is allocated."""

    def release(self) -> None:  # noqa: B027
        """Lets go of what grows with the graph and can be made again."""

    @abstractmethod
    def trace(self, rank: int = 0, *, training: bool) -> Trace:
        """What one training step, or one evaluation, does on a rank."""

    def epoch_steps(self, rank: int = 0) -> Sequence[Steps]:
        """What the training steps of an epoch do on a rank, by some of them, which are the same on every rank."""
        return [Steps(self.trace(rank, training=True), 1)]

    @property
    def step_rows(self) -> tuple[int, int]:
        """The rows of a rank in a training step, and those of them that the loss reads: means over ranks and steps."""
        mask, rows = self.work.graph.train_mask, self.work.stats.num_vertices // self.size
        return rows, round(rows * (1.0 if mask is None else float(mask.float().mean())))

    @abstractmethod
    def peak_memory(self, rank: int = 0) -> MemoryUse:
        """The bytes that a rank holds at most in a run, beside those of its process."""

    @abstractmethod
    def place(self, group: Group, *, seed: int = 0) -> Placed:
        """The plan on this rank of a group of `size` ranks; all ranks call it."""


class Placed(ABC):
    """A plan on its rank, as the trainer knows it. The model is the rank's own: the workload's stays as it is.

    rows: the vertices that the rank answers for, a range or int64 [n].
    """

    def __init__(self, work: Workload, group: Group, rows: slice | Tensor, *, seed: int) -> None:
        self.work, self.group, self.seed, self.rows = work, group, seed, rows
        self.graph: Graph = work.graph
        self.model: nn.Module
        self.model, self.embedded = with_own_rows(work.model, self.graph, rows)
        self.model.to(group.device)

    def describe(self) -> dict[str, Any]:
        """What of this rank's placement is worth a record; `summary` in it is a line for a person."""
        return {}

    def steps(self, epoch: int) -> Iterable[Step]:
        """The training steps of an epoch."""
        return [Step(epoch=epoch, training=True)]

    def evaluation(self, epoch: int) -> Step:
        """The step that gives the logits of every vertex that is scored, without dropout."""
        return Step(epoch=epoch, training=False)

    @property
    def links(self) -> Links:
        """The links of a graph that has held-out ones."""
        return Links.of(self.graph)

    @abstractmethod
    def forward(self, step: Step) -> Tensor:
        """Logits [n, C] of the rows this rank answers for, in this step."""

    @property
    def rows_device(self) -> torch.device:
        """Where the logits, their gradients and the labels are."""
        return self.group.device

    def empty_rows(self, rows: Tensor) -> Tensor:
        """Memory for the gradient of the rows that `forward` gives, like them."""
        lines = self.work.optimisations.lines
        return empty_aligned(rows, *rows.shape) if lines else torch.empty_like(rows)

    @abstractmethod
    def backward(self, logits: Tensor, grad: Tensor) -> None:
        """Leaves every parameter's gradient, summed over the ranks, from the gradient [n, C] of the logits.

        The gradient of an embedded row is on the rank that keeps the row.
        """


def whole_topology(work: Workload, device: torch.device | str) -> Topology:
    """The whole graph's edges in the model's type, on a device."""
    graph = work.graph
    ids = None if graph.ids is None else graph.ids.to(device)
    in_edges = graph.in_edges.cast(work.dtype).to(device)
    return Topology(in_edges, ids, graph.edge_features, work.dtype, graph.edge_type, len(graph.relations))

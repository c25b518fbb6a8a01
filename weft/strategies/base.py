"""Base classes of strategies, which decide where rows, columns and edges are stored.

Reading order: Plan (what a strategy decided for a workload, without ranks, and the trace of its steps), Placed (a plan
on a rank: all that the training loop sees), Step.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from weft.comm import Group, Route
from weft.config.strategy_flags import CachingFlags
from weft.cost import Machine, MemoryUse, Steps, Trace
from weft.data import Graph, Links
from weft.nn import SPREAD, Topology, ViewTraits, Workload, with_own_rows
from weft.parallel.row_ranges import RangeLoss
from weft.runtime.memory.alignment import empty_aligned
from weft.utils.errors import InputError
from weft.utils.random import KeyTable

PARAMETER_COPIES = 5
"""Copies of each parameter during a run: value, gradient, Adam's two moments, and the best value so far."""
CHECKPOINT_COPIES = 8
"""Copies made while a checkpoint is written: each of the above but the gradient, as tensors and as bytes."""
CHECKED_SHARE = 0.1
"""Memory is estimated before a run if the graph and its rows roughly take at least this share of it."""
RECOMPUTING = SPREAD._replace(shrinks_rows=True, alternative="--strategy communicated")
"""Properties of views on ranks that recompute remote rows: an aggregate has fewer rows after it than before."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of a strategy: a field for each of its flags, which other strategies do not accept."""


@dataclass(frozen=True, kw_only=True)
class VertexOptions(Options):
    """Options of vertex parallelism."""

    partition: Tensor | None = field(default=None, repr=False, compare=False)
    """Rank of every vertex, int32 [N]; None: contiguous ranges."""


@dataclass(frozen=True, kw_only=True)
class HybridOptions(CachingFlags, VertexOptions):
    """Options of `hybrid`: which remote sources are cached."""


@dataclass(frozen=True, kw_only=True, eq=False)
class CandidateLinks:
    """Candidate links that a rank scores in a step on a mini-batch of links."""

    pairs: Tensor
    """Position of the source, position of the target, and relation of each: int64 [p (1 + K), 3], the p links first.

    Positions count the rank's rows and then the rows that other ranks send.
    """
    route: Route | None
    """Rows that ranks exchange to score the links; None if each rank has the rows of all endpoints."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Step:
    """One forward pass, with a backward pass if it trains."""

    epoch: int
    """Number of the epoch."""
    number: int = 0
    """Number of the optimizer step in its epoch. Mini-batches whose gradients are accumulated share it."""
    updates: bool = True
    """True if the optimizer's step follows; False if gradients of the next mini-batch are added first."""
    vertices: Tensor | None = None
    """Vertices that the rank is responsible for in this step, int64 [n], ascending; None: all vertices of its rows."""
    links: CandidateLinks | None = None
    """Links that the rank scores in this step, if the step is on a mini-batch of links."""
    batch_size: int = 0
    """Number of vertices (or links) of all ranks in the mini-batches of the optimizer step, which divides the loss.

    0: all labelled ones of the split.
    """
    training: bool
    """True if the step trains; then dropout is active and `backward` follows."""
    masks: KeyTable | None = None
    """Keys of dropout masks for a step that is recorded and replayed (a CUDA graph).

    None: keys are derived from `key`.
    """

    @property
    def key(self) -> tuple[int, ...]:
        """Numbers that the step adds to the keys of its random draws: its epoch, and its number unless that is 0."""
        return (self.epoch, self.number) if self.number else (self.epoch,)


class Plan(ABC):
    """Decisions of a strategy for a workload on `size` ranks: the same on every rank, made without a process group.

    Args:
        work: The model, its graph and the optimisations.
        size: Number of ranks.
        options: Options of the strategy, of type `options_type`; None: defaults.
        machine: Cost factors for decisions by cost; None: nominal ones.
        state: Result of `state()` of the same plan in another process, which saves the search.

    Raises:
        InputError: The strategy cannot run with this number of ranks, these options or this model.
    """

    name: ClassVar[str]
    """Name of the strategy on the command line."""
    options_type: ClassVar[type[Options]] = Options
    """Type of the strategy's options."""
    flags: ClassVar[tuple[str, ...]] = ()
    """Flags of the strategy that are read before a plan exists, and so are no options."""
    exact: ClassVar[bool] = True
    """True if the strategy computes the same numbers as `single`."""
    evaluates_as: ClassVar[str] = ""
    """Name of the strategy that evaluates. Empty: this strategy. It must need no extra preprocessing."""
    optimisations: ClassVar[tuple[str, ...]] = ()
    """Optimisations of the strategy that can be switched off, in addition to those of all strategies."""
    traits: ViewTraits = SPREAD
    """Properties of the strategy's views: whether dense layers run before aggregates, and what is refused.

    On a receptive field, they also shrink rows.
    """
    partition: ClassVar[str] = ""
    """Default method that partitions the vertices; '' if the plan itself divides them."""
    max_ranks: ClassVar[int | None] = None
    """Largest number of ranks; None: any number."""
    variants: ClassVar[Sequence[Mapping[str, Any]]] = ({},)
    """Changes of the default configuration that the planner tries, each as fields and values."""

    def __init__(
        self,
        work: Workload,
        size: int = 1,
        options: Any = None,
        machine: Machine | None = None,
        state: Any = None,
    ) -> None:
        self.check_size(size)
        self.check_rows(work)
        self.work, self.size, self.machine = work, size, machine
        self.options = self.options_type() if options is None else options
        self.solve(state)

    @classmethod
    def check_size(cls, size: int) -> None:
        """Check that the strategy can use this number of ranks.

        Raises:
            InputError: The number is too large.
        """
        if cls.max_ranks is not None and size > cls.max_ranks:
            raise InputError(f"strategy {cls.name} runs on one rank: give --workers 1, or --strategy tensor for {size}")

    @classmethod
    def check_rows(cls, work: Workload) -> None:
        """Check that the strategy supports the data type of the workload's rows.

        Raises:
            InputError: It does not.
        """
        del work

    def solve(self, state: Any) -> None:
        """Make the decisions of the plan.

        Args:
            state: Decisions of the same plan in another process, which are used instead of a search; None: search.

        Raises:
            InputError: No decision is possible.
        """
        del state
        self.work.outline(self.traits, training=True)

    def state(self) -> Any:
        """Return the decisions that take a search: a small value from which another process makes the same plan."""
        return None

    @property
    def part(self) -> Tensor | None:
        """Rank of every vertex, int32 [N], if vertices are partitioned with their in-edges; else None."""
        return None

    def own_rows(self, rank: int, *, training: bool) -> slice | Tensor:
        """Return the vertices that a rank is responsible for in a step on the whole graph: a range, or int64.

        Args:
            rank: The rank.
            training: True for a training step.
        """
        del training
        assert self.part is not None
        return (self.part == rank).nonzero().view(-1)

    def check_fits(self) -> None:  # noqa: B027
        """Check memory and disk before anything large is allocated.

        Raises:
            InputError: There is too little; the message says what to change.
        """

    def release(self) -> None:  # noqa: B027
        """Free the cached tensors whose size grows with the graph. A later use computes them again."""

    @abstractmethod
    def trace(self, rank: int = 0, *, training: bool) -> Trace:
        """Return the operations of one training step or one evaluation.

        Args:
            rank: The rank.
            training: True for a training step.
        """

    @property
    def streams(self) -> bool:
        """True if `Placed.logit_ranges` needs little memory, however many rows the graph has."""
        return False

    def epoch_steps(self, rank: int = 0) -> Sequence[Steps]:
        """Return traces of representative training steps of an epoch, the same steps on every rank."""
        return [Steps(self.trace(rank, training=True), 1)]

    def scored_links(self, rank: int = 0) -> Sequence[CandidateLinks | None]:
        """Return the links that a rank scores in each step of `epoch_steps`; None: all that it is responsible for.

        Args:
            rank: The rank.
        """
        del rank
        return [None]

    @property
    def step_rows(self) -> tuple[int, int]:
        """Mean number of rows of a rank in a training step, and of those that the loss reads."""
        mask, rows = self.work.graph.train_mask, self.work.stats.num_vertices // self.size
        return rows, round(rows * (1.0 if mask is None else float(mask.float().mean())))

    @abstractmethod
    def peak_memory(self, rank: int = 0) -> MemoryUse:
        """Return the peak bytes of a rank in a run, without those of its process."""

    @abstractmethod
    def place(self, group: Group, *, seed: int = 0) -> Placed:
        """Place the plan on this rank of a group of `size` ranks; all ranks must call it.

        Args:
            group: The ranks.
            seed: Seed of dropout.
        """


class Placed(ABC):
    """Plan placed on a rank, with the interface that the training loop uses.

    The model is a copy with the embedding rows of this rank; the workload's model stays as it is.

    Args:
        work: The workload.
        group: The ranks.
        rows: Vertices that the rank is responsible for: a range or int64 [n].
        seed: Seed of dropout.
    """

    capturable: ClassVar[bool] = False
    """True if every training step launches the same kernels on the same memory, so that it can be recorded in a CUDA
    graph."""

    def __init__(self, work: Workload, group: Group, rows: slice | Tensor, *, seed: int) -> None:
        self.work, self.group, self.seed, self.rows = work, group, seed, rows
        self.graph: Graph = work.graph
        self.model: nn.Module
        self.model, self.embedded = with_own_rows(work.model, self.graph, rows)
        self.model.to(group.device)

    def describe(self) -> dict[str, Any]:
        """Return facts about this rank's placement for the record; the key `summary` has a line for people."""
        return {}

    def steps(self, epoch: int) -> Iterable[Step]:
        """Return the training steps of an epoch."""
        return [Step(epoch=epoch, training=True)]

    def evaluation(self, epoch: int) -> Step:
        """Return the step that computes the logits of all scored vertices, without dropout."""
        return Step(epoch=epoch, training=False)

    @property
    def links(self) -> Links:
        """Links of the graph: training links and held-out links."""
        return Links.of(self.graph)

    @abstractmethod
    def forward(self, step: Step) -> Tensor:
        """Return the logits [n, C] of the rows that this rank is responsible for in the step."""

    def logit_ranges(self, step: Step) -> Iterator[tuple[slice, Tensor]]:
        """Yield ranges of the rows that this rank is responsible for, with their logits [m, C]: results of `forward`.

        Args:
            step: An evaluation.
        """
        with self.group.meter.timer("encode"):
            logits = self.forward(step)
        yield slice(0, len(logits)), logits

    def train(self, step: Step, loss: RangeLoss) -> Tensor:
        """Run a training step: set the gradient of every parameter, and return this rank's part of the loss, [].

        Args:
            step: The step.
            loss: Loss of the rows that this rank is responsible for. A strategy that computes them range by range calls
                it for each range; then neither `forward` nor `backward` is called.
        """
        timer = self.group.meter.timer
        with timer("encode"):
            rows = self.forward(step)
        with timer("loss"):
            total, grad = loss(rows, None)
        with timer("encode"):
            self.backward(rows, grad)
        return total

    @property
    def rows_device(self) -> torch.device:
        """Device of the logits, their gradients and the labels."""
        return self.group.device

    def empty_rows(self, rows: Tensor) -> Tensor:
        """Allocate memory for the gradient of the rows that `forward` returned."""
        aligned = self.work.optimisations.lines
        return empty_aligned(rows, *rows.shape) if aligned else torch.empty_like(rows)

    @abstractmethod
    def backward(self, logits: Tensor, grad: Tensor) -> None:
        """Compute the gradient of every parameter, summed over the ranks.

        The gradient of an embedding row is on the rank that stores the row.

        Args:
            logits: Result of `forward`.
            grad: Gradient [n, C] of the logits.
        """


def whole_topology(work: Workload, device: torch.device | str) -> Topology:
    """Return the topology of the whole graph, with weights in the model's data type.

    Args:
        work: The workload.
        device: Device of the edges.
    """
    graph = work.graph
    ids = None if graph.ids is None else graph.ids.to(device)
    in_edges = graph.in_edges.cast(work.dtype).to(device)
    return Topology(in_edges, ids, graph.edge_features, work.dtype, graph.edge_type, len(graph.relations))

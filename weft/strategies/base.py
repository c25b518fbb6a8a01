"""A strategy places a graph and a model on the ranks and runs them; the trainer knows only this."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, cast

import torch
from torch import Tensor, nn

from weft.comm import Group, sum_gradients
from weft.core.errors import InputError
from weft.core.random import key
from weft.core.savings import ALL_SAVINGS, Savings
from weft.cost import Operation, Trace, all_reduce
from weft.data import Graph
from weft.nn import GraphOperation, GraphView, Inputs, Topology, outline

SAMPLE = 1 << 16  # vertices whose features are looked at, the same on every rank
NONZERO_COST = 8  # a map pays as much for a nonzero of sparse features as for this many entries (measured: 2 to 5)


class HaloShape(NamedTuple):
    """As much of a rank's block as a trace needs: its in-edges, and the rows that it sends and receives for a halo."""

    num_edges: int
    num_sent: int
    num_received: int


class GraphShape(NamedTuple):
    """As much of a graph as a trace needs.

    density: the share of the features that are not zero. halo: a rank's, where ranks hold blocks of the graph.
    num_edge_features: 0 for none. weighted: whether the edges have weights.
    """

    num_vertices: int
    num_edges: int
    num_features: int
    density: float = 1.0
    halo: HaloShape | None = None
    num_edge_features: int = 0
    weighted: bool = False

    @classmethod
    def of(cls, graph: Graph) -> GraphShape:
        """The shape of a graph that is there; the density is that of the first vertices."""
        sample = graph.x[:SAMPLE] if graph.x is not None else torch.empty(0)
        density = int(sample.count_nonzero()) / max(sample.numel(), 1)
        return cls(
            num_vertices=graph.num_vertices,
            num_edges=graph.num_edges,
            num_features=graph.num_features,
            density=density,
            num_edge_features=graph.num_edge_features,
            weighted=graph.in_edges.weight is not None,
        )

    @property
    def sparse(self) -> bool:
        """Whether the features are mapped faster by their nonzeros."""
        return NONZERO_COST * self.density < 1

    @property
    def sparse_first(self) -> bool:
        """Whether mapping sparse features and aggregating the result costs less than mapping a dense aggregate."""
        nonzeros = self.density * self.num_features + self.num_edges / max(self.num_vertices, 1)
        return NONZERO_COST * nonzeros < self.num_features


@dataclass(frozen=True, kw_only=True)
class Step:
    """One forward pass, with a backward pass where it trains."""

    epoch: int
    training: bool


class Strategy(ABC):
    """A full-graph placement. Subclasses say which rows a rank answers for and what view it has.

    graph: the whole graph. model: on the group's device. Both are the same on every rank.
    InputError if the strategy cannot serve the number of ranks.
    """

    view_type: ClassVar[type[GraphView]] = GraphView
    only_one_rank: ClassVar[bool] = False

    def __init__(
        self,
        graph: Graph,
        model: nn.Module,
        group: Group,
        *,
        seed: int = 0,
        savings: Savings = ALL_SAVINGS,
    ) -> None:
        self.graph, self.model, self.group, self.seed = graph, model, group, seed
        self.dtype = dtype_of(model)
        self.check_size(group.size)
        self.rows = self.place()
        ids = None if graph.ids is None else graph.ids.to(group.device)
        in_edges = graph.in_edges.cast(self.dtype).to(group.device)
        self.topology = Topology(in_edges, ids, graph.edge_features, self.dtype)
        assert graph.x is not None
        features = graph.x[self.rows.start : self.rows.stop].to(group.device, self.dtype)
        shape = GraphShape.of(graph)
        self.inputs = Inputs(
            rows=features,
            savings=savings,
            sparse=savings.sparse and shape.sparse,
            sparse_first=savings.sparse and shape.sparse_first,
        )

    @abstractmethod
    def place(self) -> range:
        """The vertices this rank answers for."""

    @abstractmethod
    def view(self, view_key: int) -> GraphView:
        """The view of one stage, whose dropout masks depend on `view_key`."""

    @classmethod
    def shape(cls, graph: Graph, *, rank: int, size: int) -> GraphShape:  # noqa: ARG003
        """What `trace` needs to know of a graph and its placement on `rank` of `size`."""
        return GraphShape.of(graph)

    @classmethod
    def trace(
        cls,
        model: nn.Module,
        shape: GraphShape,
        *,
        rank: int = 0,
        size: int = 1,
        training: bool,
        savings: Savings = ALL_SAVINGS,
    ) -> Trace:
        """What one training step, or one evaluation, of `model` does on `rank` of `size`.

        InputError, from the model, for a layer that the strategy cannot run, or for a number of ranks that it cannot.
        """
        cls.check_size(size)
        itemsize = dtype_of(model).itemsize
        forward: list[Operation] = []
        backward: list[Operation] = []
        for asked in cls.operations(model, shape, training, savings):
            made = cls.carry_out(asked, shape, rank, size, itemsize)
            forward += made
            if asked.backward:
                backward = [operation.mirrored() for operation in reversed(made)] + backward
        if training and size > 1:
            numbers = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
            backward.append(all_reduce("gradients", numbers, itemsize, size))
        return Trace(operations=(*forward, *backward))

    @classmethod
    @abstractmethod
    def carry_out(
        cls, asked: GraphOperation, shape: GraphShape, rank: int, size: int, itemsize: int
    ) -> list[Operation]:
        """What a rank does forward for one thing that a model asks of its views; a number takes `itemsize` bytes."""

    @classmethod
    def check_size(cls, size: int) -> None:
        """InputError for a number of ranks that the strategy cannot serve."""
        if cls.only_one_rank and size > 1:
            name = cls.__name__.lower()
            raise InputError(f"strategy {name} runs on one rank: give --workers 1, or --strategy tensor for {size}")

    @classmethod
    def operations(cls, model: nn.Module, shape: GraphShape, training: bool, savings: Savings) -> list[GraphOperation]:
        """What `model` asks of this strategy's views in one forward pass, without what is computed only once."""
        asked = outline(
            model,
            num_vertices=shape.num_vertices,
            num_features=shape.num_features,
            num_edge_features=shape.num_edge_features,
            weighted=shape.weighted,
            training=training,
            view_type=cls.view_type,
            savings=savings,
            sparse_first=savings.sparse and shape.sparse_first,
        )
        return [one for one in asked if not (savings.reuse and one.origin == "inputs")]

    def steps(self, epoch: int) -> Sequence[Step]:
        """The training steps of an epoch."""
        return [Step(epoch=epoch, training=True)]

    def evaluation(self, epoch: int) -> Step:
        """The step that gives the logits of every vertex, without dropout."""
        return Step(epoch=epoch, training=False)

    def forward(self, step: Step) -> Tensor:
        """Logits [n, C] of the rows this rank answers for."""
        self.model.train(step.training)
        stages = range(cast(int, self.model.num_stages))
        views = [self.view(key(self.seed, step.epoch, stage)) for stage in stages]
        with torch.set_grad_enabled(step.training):
            logits: Tensor = self.model(views, self.inputs.rows)
        return logits

    def backward(self, logits: Tensor, grad: Tensor) -> None:
        """Leaves every parameter's gradient, summed over the ranks, from the gradient [n, C] of the logits."""
        logits.backward(grad)
        sum_gradients(list(self.model.parameters()), self.group)


def dtype_of(model: nn.Module) -> torch.dtype:
    """The floating-point type of a model's parameters."""
    return next((parameter.dtype for parameter in model.parameters()), torch.float32)

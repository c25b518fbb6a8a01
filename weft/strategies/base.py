"""A strategy places a graph and a model on the ranks and runs them; the trainer knows only this."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, cast

import torch
from torch import Tensor, nn

from weft.chunks.columns import Chunking
from weft.chunks.schedule import Rates
from weft.comm import Group, sum_gradients
from weft.core.errors import InputError
from weft.core.random import key
from weft.core.savings import ALL_SAVINGS, Savings
from weft.cost import Factors, Operation, Trace, all_reduce
from weft.data import UNTYPED, Graph, TypedShape
from weft.nn import (
    GraphOperation,
    GraphView,
    Inputs,
    Topology,
    embedding_rows,
    keep_rows,
    outline,
    shared_parameters,
    typed_rows,
)

NONZERO_COST = 8  # a map pays as much for a nonzero of sparse features as for this many entries (measured: 2 to 5)


class HopShape(NamedTuple):
    """As much of one product's block on a rank as a trace needs: its edges, and the rows that it sends and receives.

    exchanged: whether any rank sends any.
    """

    num_edges: int
    num_sent: int = 0
    num_received: int = 0
    exchanged: bool = False


class GraphShape(NamedTuple):
    """As much of a graph as a trace needs.

    density: the share of the features that are not zero. hops: a rank's blocks, product by product, where ranks hold
    blocks of the graph.
    num_edge_features: 0 for none. weighted: whether the edges have weights. chunking: of the products, if any.
    num_remote: sources that are not among a rank's even share of the rows, of all ranks together; -1: not counted.
    typed: what types the graph has. pairs: of a vertex and a relation by which it has an in-edge, by the rank that
    answers for the vertex; not known: one rank, or as many as edges. embedded: rows of embeddings that a rank sends and
    receives. plan: what offload does, and what its formulas need besides.
    """

    num_vertices: int
    num_edges: int
    num_features: int
    density: float = 1.0
    hops: tuple[HopShape, ...] = ()
    num_edge_features: int = 0
    weighted: bool = False
    chunking: Chunking | None = None
    num_remote: int = -1
    typed: TypedShape = UNTYPED
    pairs: tuple[int, ...] = ()
    embedded: HopShape = HopShape(0)
    plan: Any = None

    @classmethod
    def of(cls, graph: Graph) -> GraphShape:
        """The shape of a graph that is there."""
        return cls(
            num_vertices=graph.num_vertices,
            num_edges=graph.num_edges,
            num_features=graph.num_features,
            density=graph.density,
            num_edge_features=graph.num_edge_features,
            weighted=graph.in_edges.weight is not None,
            typed=graph.typed,
        )

    @property
    def sparse(self) -> bool:
        """Whether the features are mapped faster by their nonzeros."""
        return self.map_share < 1

    @property
    def map_share(self) -> float:
        """What a map by nonzeros costs, as a share of a dense one."""
        return NONZERO_COST * self.density

    @property
    def sparse_first(self) -> bool:
        """Whether mapping sparse features and aggregating the result costs less than mapping a dense aggregate."""
        nonzeros = self.density * self.num_features + self.num_edges / max(self.num_vertices, 1)
        return NONZERO_COST * nonzeros < self.num_features


@dataclass(frozen=True, kw_only=True)
class Placement:
    """What a person may say of where vertices live; each strategy reads what concerns it.

    part: int32 [N], the rank of every vertex; None: contiguous ranges.
    cache_ratio: the share of remote sources to cache at each layer; None: by cost. cache_bytes: a rank's limit of it.
    factors: what the costs are; None: a probe finds out.
    device_bytes: what products may have on the device at once; None: no limit. chunks: as how many they are made; 0: as
    few as that allows. device: on which, if on another than the rows.
    intermediates: under offload, what the backward pass has of a product: see weft.core.config. scratch: the folder of
    rows on the host; None: that for temporary files. rates: how fast rows move, in rows a second; None: measured.
    refresh_every: training steps between two exchanges of old halos. staleness: the change of rows, as a share, that is
    exchanged before that; 0: none.
    """

    part: Tensor | None = None
    cache_ratio: float | None = None
    cache_bytes: int | None = None
    factors: Factors | None = None
    refresh_every: int = 4
    staleness: float = 0.0
    device_bytes: int | None = None
    chunks: int = 0
    device: str = ""
    intermediates: str = "auto"
    scratch: Path | None = None
    rates: Rates | None = None


ANYWHERE = Placement()


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
    takes_parts: ClassVar[bool] = False
    """Whether a rank may have any set of vertices."""
    takes_factors: ClassVar[bool] = False
    """Whether it decides by what the machine and the network cost."""

    def __init__(
        self,
        graph: Graph,
        model: nn.Module,
        group: Group,
        *,
        seed: int = 0,
        savings: Savings = ALL_SAVINGS,
        placement: Placement = ANYWHERE,
    ) -> None:
        self.graph, self.model, self.group, self.seed = graph, model, group, seed
        self.savings, self.placement = savings, placement
        self.dtype = dtype_of(model)
        self.check_size(group.size)
        self.rows = self.place()
        self.embedded = embedding_rows(graph, self.rows)
        keep_rows(model, self.embedded, graph.typed.num_embedded)
        self.inputs = self.make_inputs()

    @abstractmethod
    def place(self) -> slice | Tensor:
        """The vertices this rank answers for: a range, or int64 [n]."""

    def make_inputs(self) -> Inputs:
        """What the model reads on this rank."""
        shape, savings = GraphShape.of(self.graph), self.savings
        return Inputs(
            rows=self.features(self.input_rows),
            savings=savings,
            sparse=savings.sparse and shape.sparse,
            sparse_first=savings.sparse and shape.sparse_first,
            typed=typed_rows(self.graph, self.input_rows, self.group.device, self.dtype),
        )

    @property
    def input_rows(self) -> slice | Tensor:
        """The vertices whose features the model reads on this rank: those it answers for, and then perhaps others."""
        return self.rows

    @property
    def stages(self) -> range:
        """The model's stages, each of which gets a view."""
        return range(cast(int, self.model.num_stages))

    def facts(self) -> dict[str, Any]:
        """What of this rank's placement is worth a record."""
        return {}

    @cached_property
    def topology(self) -> Topology:
        """The whole graph's, on the group's device."""
        ids = None if self.graph.ids is None else self.graph.ids.to(self.group.device)
        in_edges = self.graph.in_edges.cast(self.dtype).to(self.group.device)
        graph = self.graph
        return Topology(in_edges, ids, graph.edge_features, self.dtype, graph.edge_type, len(graph.relations))

    def features(self, vertices: slice | Tensor) -> Tensor:
        """The features of some vertices, on the group's device and in the model's type; [n, 0] without x."""
        x = torch.empty(self.graph.num_vertices, 0) if self.graph.x is None else self.graph.x
        return x[vertices].to(self.group.device, self.dtype)

    @abstractmethod
    def view(self, stage: int, view_key: int) -> GraphView:
        """The view of one stage, whose dropout masks depend on `view_key`."""

    @classmethod
    def shape(
        cls,
        graph: Graph,
        model: nn.Module,  # noqa: ARG003
        *,
        rank: int,  # noqa: ARG003
        size: int,  # noqa: ARG003
        placement: Placement = ANYWHERE,  # noqa: ARG003
        savings: Savings = ALL_SAVINGS,  # noqa: ARG003
    ) -> GraphShape:
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
            if is_kept(asked, savings):
                continue
            made = cls.carry_out(asked, shape, rank, size, itemsize)
            forward += made
            if asked.backward:
                backward = [operation.mirrored() for operation in reversed(made)] + backward
        if training and size > 1:
            numbers = sum(parameter.numel() for parameter in shared_parameters(model) if parameter.requires_grad)
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
    def check_fits(
        cls,
        graph: Graph,  # noqa: ARG003
        model: nn.Module,  # noqa: ARG003
        *,
        size: int,  # noqa: ARG003
        placement: Placement,
        savings: Savings = ALL_SAVINGS,  # noqa: ARG003
    ) -> None:
        """InputError where `placement` limits the device's memory to less than what `size` ranks need at least."""
        if placement.device_bytes is not None or placement.chunks:
            raise InputError(
                "--device-memory and --chunks are kept by strategies tensor and offload: give --strategy offload"
            )

    @classmethod
    def operations(
        cls, model: nn.Module, shape: GraphShape, training: bool, savings: Savings, *, count_flops: bool = False
    ) -> list[GraphOperation]:
        """What `model` asks of this strategy's views in one forward pass."""
        return outline(
            model,
            num_vertices=shape.num_vertices,
            num_features=shape.num_features,
            num_edge_features=shape.num_edge_features,
            weighted=shape.weighted,
            training=training,
            view_type=cls.view_type,
            savings=savings,
            sparse_first=savings.sparse and shape.sparse_first,
            map_share=min(shape.map_share, 1.0) if savings.sparse else 1.0,
            count_flops=count_flops,
            typed=shape.typed,
            num_relation_rows=sum(shape.pairs),
        )

    def steps(self, epoch: int) -> Sequence[Step]:
        """The training steps of an epoch."""
        return [Step(epoch=epoch, training=True)]

    def evaluation(self, epoch: int) -> Step:
        """The step that gives the logits of every vertex, without dropout."""
        return Step(epoch=epoch, training=False)

    def forward(self, step: Step) -> Tensor:
        """Logits [n, C] of the rows this rank answers for."""
        self.model.train(step.training)
        views = [self.view(stage, key(self.seed, step.epoch, stage)) for stage in self.stages]
        with torch.set_grad_enabled(step.training):
            logits: Tensor = self.model(views, self.inputs.rows)
        return logits

    def empty_rows(self, rows: Tensor) -> Tensor:
        """Memory for the gradient of the rows that `forward` gives, like them: where they are, that can be too."""
        return torch.empty_like(rows)

    def backward(self, logits: Tensor, grad: Tensor) -> None:
        """Leaves every parameter's gradient, summed over the ranks, from the gradient [n, C] of the logits.

        That of an embedded row arises where the row is kept.
        """
        logits.backward(grad)
        sum_gradients(shared_parameters(self.model), self.group)


def is_kept(asked: GraphOperation, savings: Savings) -> bool:
    """Whether a result is computed only once: constant features are always aggregated to the same."""
    return savings.reuse and asked.origin == "inputs" and asked.is_aggregate


def dtype_of(model: nn.Module) -> torch.dtype:
    """The floating-point type of a model's parameters."""
    return next((parameter.dtype for parameter in model.parameters()), torch.float32)

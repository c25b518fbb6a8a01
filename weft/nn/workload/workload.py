"""Workload of a run: a model on a graph. It knows no strategy and no ranks."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from weft.config.optimisations import ALL_OPTIMISATIONS, Optimisations
from weft.data import Graph, GraphStats
from weft.nn.convert.unconverted import WholeModel
from weft.nn.graph_view import ONE_DEVICE, ViewTraits
from weft.nn.layers.phases import parameter_dtype, row_dtype
from weft.nn.layers.pyg_conv import PyGConv
from weft.nn.layers.relation_convs import RelationConv
from weft.nn.layers.typed_conv import CalledTypes, TypedConv
from weft.nn.layers.typed_input import shared_parameters
from weft.nn.sparse_rows import NONZERO_COST
from weft.nn.workload.flops import (
    SMALL_SIZE,
    SMALL_SIZE_WITHOUT_EDGES,
    BlockCostModel,
    DenseFlops,
    RowKind,
    SmallBlock,
)
from weft.nn.workload.layer_sizes import LayerSizes
from weft.nn.workload.operation import GraphOperation
from weft.nn.workload.outline import outline
from weft.nn.workload.receptive_field import ReceptiveField
from weft.storage.host_rows import keeps_in_file, rows_in_file
from weft.utils.errors import InputError


class OutlineKey(NamedTuple):
    """Arguments that determine the outline of a workload, as a dictionary key."""

    traits: ViewTraits
    """Traits of the strategy's views."""
    training: bool
    """True for a training step, False for an evaluation."""


class DenseFlopsKey(NamedTuple):
    """Arguments that determine the FLOPs of a workload's dense layers, as a dictionary key."""

    traits: ViewTraits
    """Traits of the strategy's views."""
    training: bool
    """True for a training step, False for an evaluation."""
    sizes: LayerSizes
    """Number of rows of a rank at each layer."""


Outlines = Mapping[OutlineKey, tuple[GraphOperation, ...]]
"""Operations of each outline of a workload."""


class Workload:
    """Model on a graph. Estimates need only the statistics of the graph. Outlines are computed once.

    Args:
        model: The model, on any device.
        graph: The graph, or the statistics of a graph that is not in memory.
        optimisations: Optimisations that are on.
        num_classes: Number of logits that the model must return; None: any number.
        outlines: Outlines of the same workload, from another process.
    """

    receptive_field: ReceptiveField | None = None
    """The only rows that the steps of this workload compute; None: all rows."""

    def __init__(
        self,
        model: nn.Module,
        graph: Graph | GraphStats,
        optimisations: Optimisations = ALL_OPTIMISATIONS,
        *,
        num_classes: int | None = None,
        outlines: Outlines | None = None,
    ) -> None:
        self.model, self.optimisations, self.num_classes = model, optimisations, num_classes
        self.stats = graph if isinstance(graph, GraphStats) else GraphStats.of(graph)
        self.outlines = dict(outlines or {})
        self.dense_flops: dict[DenseFlopsKey, tuple[DenseFlops, ...]] = {}
        self._graph = graph if isinstance(graph, Graph) else None
        self._block_costs: dict[tuple[object, ...], BlockCostModel] = {}
        self._num_outputs: int | None = None

    def restrict(self, field: ReceptiveField) -> Workload:
        """Return the workload of steps that compute only a receptive field.

        It shares outlines and FLOPs with this one.

        Args:
            field: The rows.
        """
        work = Workload(self.model, self.stats, self.optimisations, num_classes=self.num_classes)
        work._graph, work.receptive_field = self._graph, field
        work.outlines, work.dense_flops, work._block_costs = self.outlines, self.dense_flops, self._block_costs
        return work

    @property
    def graph(self) -> Graph:
        """The graph; InputError if only its statistics are known."""
        if self._graph is None:
            raise InputError("this needs the graph itself, not only its statistics: pass a Graph")
        return self._graph

    @property
    def has_graph(self) -> bool:
        """True if the graph itself is known, and not only its statistics."""
        return self._graph is not None

    @property
    def dtype(self) -> torch.dtype:
        """Floating-point type of the model's parameters, and of the factors of sums over rows."""
        return parameter_dtype(self.model)

    @property
    def row_dtype(self) -> torch.dtype:
        """Floating-point type of rows: that of the parameters, or one of lower precision."""
        return row_dtype(self.model)

    @property
    def losses_by_row(self) -> bool:
        """True if weft computes the loss of each row, so that not all rows must exist at once.

        `weft.place` leaves the loss to the user's loop; it switches `reach` off, since the loop may use any row.
        """
        return self.num_classes is not None and self.optimisations.reach

    @property
    def rough_bytes(self) -> int:
        """Rough number of bytes of the graph and of a step's rows: a row for each vertex and matrix of the model."""
        count = self.stats.num_vertices
        sizes = ([size for size in matrix.shape if size < count] for matrix in self.model.parameters())
        width = sum(max(each) for each in sizes if len(each) > 1)
        return self.stats.num_bytes + count * width * self.itemsize

    @property
    def itemsize(self) -> int:
        """Bytes of a number in a row."""
        return self.row_dtype.itemsize

    @property
    def num_shared(self) -> int:
        """Number of elements of the gradients that are summed over ranks."""
        return sum(parameter.numel() for parameter in shared_parameters(self.model) if parameter.requires_grad)

    @property
    def num_summed(self) -> int:
        """Number of elements that ranks sum: the shared gradients, and for each parameter whether it has one."""
        return self.num_shared + sum(parameter.requires_grad for parameter in shared_parameters(self.model))

    @property
    def num_stages(self) -> int:
        """Number of stages of the model, each of which gets a view."""
        return cast(int, self.model.num_stages)

    @property
    def density(self) -> float:
        """Fraction of the features that are not zero; 1 if linear transforms read all of them."""
        return self._density_read(self.stats.density)

    @property
    def typed_densities(self) -> tuple[float, ...]:
        """Fraction of nonzero features by vertex type with features; 1 where linear transforms read all of them."""
        return tuple(map(self._density_read, self.stats.typed_densities))

    def _density_read(self, density: float) -> float:
        return density if self.optimisations.sparse and NONZERO_COST * density < 1 else 1.0

    @property
    def sparse_first(self) -> bool:
        """True if transforming sparse features before their aggregate is cheaper than after it."""
        stats = self.stats
        # Nonzeros per row of the features, and of the adjacency, by which each transformed column is aggregated.
        nonzeros = stats.density * stats.num_features + stats.num_edges / max(stats.num_vertices, 1)
        return self.optimisations.sparse and NONZERO_COST * nonzeros < stats.num_features

    def features(self, vertices: slice | Tensor, device: torch.device) -> Tensor:
        """Return features of vertices, [n, F], in the type of the model's rows; [n, 0] if the graph has no x.

        On the CPU, a copy that takes much of the memory is in a mapped file (`keeps_features_in_file`).

        Args:
            vertices: The vertices, a range or int64.
            device: Device of the result.
        """
        x = torch.empty(self.graph.num_vertices, 0) if self.graph.x is None else self.graph.x
        copies = isinstance(vertices, Tensor) or x.dtype != self.row_dtype
        if copies and device.type == "cpu":
            num_rows = len(vertices) if isinstance(vertices, Tensor) else len(range(len(x))[vertices])
            if self.keeps_features_in_file(num_rows):
                ids = vertices if isinstance(vertices, Tensor) else torch.arange(len(x))[vertices]
                return rows_in_file(x, ids, self.row_dtype)
        return x[vertices].to(device, self.row_dtype)

    def keeps_features_in_file(self, num_rows: int) -> bool:
        """Return whether a copy of the features of some vertices is in a mapped file on the CPU, see `keeps_in_file`.

        Args:
            num_rows: Number of vertices.
        """
        return keeps_in_file(num_rows * self.stats.num_features * self.itemsize)

    def outline(self, traits: ViewTraits = ONE_DEVICE, *, training: bool) -> tuple[GraphOperation, ...]:
        """Return the graph operations of one forward pass (see `weft.nn.workload.outline`).

        Args:
            traits: Traits of the strategy's views.
            training: True for a training step, False for an evaluation.

        Raises:
            InputError: The model does not fit the graph or the views.
        """
        key = OutlineKey(traits, training)
        if key not in self.outlines:
            self.outlines[key] = self._outline(key)
        return self.outlines[key]

    def _outline(self, key: OutlineKey) -> tuple[GraphOperation, ...]:
        stats = self.stats
        operations, self._num_outputs = outline(
            self.model,
            num_vertices=stats.num_vertices,
            num_features=stats.num_features,
            num_edge_features=stats.num_edge_features,
            weighted=stats.weighted,
            training=key.training,
            traits=key.traits,
            optimisations=self.optimisations,
            num_classes=self.num_classes,
            sparse_first=self.sparse_first,
            density=self.density,
            typed=stats.typed,
            typed_densities=self.typed_densities,
            relation_rows=stats.relation_rows,
        )
        return tuple(operations)

    @property
    def num_outputs(self) -> int:
        """Number of columns of the model's result."""
        if self._num_outputs is None:  # the outlines are from another process
            self._outline(OutlineKey(ONE_DEVICE, training=False))
        assert self._num_outputs is not None
        return self._num_outputs

    def reads_edges(self, traits: ViewTraits) -> bool:
        """Return whether a layer reads the edges itself, and not by an aggregate."""
        return any(op.op == "block" for op in self.outline(traits, training=True))

    @property
    def calls_by_relation(self) -> bool:
        """True if the model calls convolutions by vertex type and relation."""
        return any(isinstance(part, RelationConv | TypedConv) for part in self.model.modules())

    def stage_hops(self, traits: ViewTraits) -> list[list[int]]:
        """Return the numbers of the layers of message passing in each stage of the model."""
        spans = [set[int]() for _ in range(cast(int, self.model.num_stages))]
        for op in self.outline(traits, training=True):
            spans[op.stage] |= set(op.hops)
        return [sorted(span) for span in spans]

    def block_cost(
        self,
        name: str,
        rows: tuple[RowKind, ...],
        *,
        target_rows: RowKind | None = None,
        types: CalledTypes | None = None,
        has_edges: bool = True,
        training: bool,
    ) -> BlockCostModel:
        """Return FLOPs, traffic and memory of a PyG convolution of the model, as functions of the size of its block.

        Args:
            name: Path of the layer in the model.
            rows: Properties of the rows of its sources, or of those of each type.
            target_rows: Properties of the rows of its targets, if they are not the first sources.
            types: Types and relations of a `TypedConv`.
            has_edges: False for blocks without edges; ignored with `types`.
            training: True for a training step, False for an evaluation.
        """
        conv, stats = cast(PyGConv | WholeModel, self.model.get_submodule(name)), self.stats
        key = conv.cost_key, rows, target_rows, types, has_edges, training
        if key not in self._block_costs:
            make_block, small = (
                (types.small_block, types.small_size)
                if types
                else (
                    partial(
                        SmallBlock,
                        num_edge_features=stats.num_edge_features,
                        weighted=stats.weighted,
                        target_rows=target_rows,
                    ),
                    SMALL_SIZE if has_edges else SMALL_SIZE_WITHOUT_EDGES,
                )
            )
            self._block_costs[key] = BlockCostModel.of(conv, rows, make_block, small, training=training)
        return self._block_costs[key]

    def is_cached(self, op: GraphOperation) -> bool:
        """Return whether the result of an operation is computed only once: an aggregate of constant features."""
        return self.optimisations.reuse and op.origin == "inputs" and op.is_aggregate

"""What a run is asked to do: a model on a graph. It knows no strategy and no ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from weft.config.optimisations import ALL_OPTIMISATIONS, Optimisations
from weft.data import Graph, GraphStats
from weft.nn.graph_view import ONE_DEVICE, ViewTraits
from weft.nn.layers.phases import parameter_dtype, row_dtype
from weft.nn.layers.pyg_conv import PyGConv
from weft.nn.layers.typed_input import shared_parameters
from weft.nn.workload.flops import BlockFlops, DenseFlops
from weft.nn.workload.layer_sizes import LayerSizes
from weft.nn.workload.operation import GraphOperation
from weft.nn.workload.outline import outline
from weft.utils.errors import InputError

NONZERO_COST = 8  # a map pays as much for a nonzero of sparse features as for this many entries (measured: 2 to 5)


class OutlineKey(NamedTuple):
    """What an outline depends on besides the workload."""

    traits: ViewTraits
    training: bool


class DenseFlopsKey(NamedTuple):
    """What the flops of a rank's maps depend on besides the workload."""

    traits: ViewTraits
    training: bool
    levels: LayerSizes


Outlines = Mapping[OutlineKey, tuple[GraphOperation, ...]]


class Workload:
    """A model on a graph, of which the statistics are enough for a forecast; what it asks of views is found out once.

    graph: a Graph, or the GraphStats of one that is not there. model: on any device. num_classes: the logits that the
    model must give a vertex; None: any number. outlines: those of the same workload in another process.
    InputError where the graph itself is needed and is not there.
    """

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
        self.maps: dict[DenseFlopsKey, tuple[DenseFlops, ...]] = {}
        self._graph = graph if isinstance(graph, Graph) else None
        self._block_flops: dict[tuple[str, int, bool, bool], BlockFlops] = {}

    @property
    def graph(self) -> Graph:
        """The graph itself."""
        if self._graph is None:
            raise InputError("the graph's statistics are not enough here: give the graph")
        return self._graph

    @property
    def has_graph(self) -> bool:
        """Whether the graph itself is there."""
        return self._graph is not None

    @property
    def dtype(self) -> torch.dtype:
        """The floating-point type of the model's parameters, and of what sums over rows are multiplied by."""
        return parameter_dtype(self.model)

    @property
    def row_dtype(self) -> torch.dtype:
        """That of rows: the same, or a narrower one."""
        return row_dtype(self.model)

    @property
    def itemsize(self) -> int:
        """Bytes of a number of a row."""
        return self.row_dtype.itemsize

    @property
    def num_shared(self) -> int:
        """Numbers of the gradients that are summed over the ranks."""
        return sum(one.numel() for one in shared_parameters(self.model) if one.requires_grad)

    @property
    def transform_share(self) -> float:
        """What a map of the features by their nonzeros costs, as a share of a dense one."""
        return NONZERO_COST * self.stats.density

    @property
    def sparse(self) -> bool:
        """Whether the features are mapped by their nonzeros."""
        return self.optimisations.sparse and self.transform_share < 1

    @property
    def sparse_first(self) -> bool:
        """Whether mapping sparse features and aggregating the result costs less than mapping a dense aggregate."""
        stats = self.stats
        nonzeros = stats.density * stats.num_features + stats.num_edges / max(stats.num_vertices, 1)
        return self.optimisations.sparse and NONZERO_COST * nonzeros < stats.num_features

    def features(self, vertices: slice | Tensor, device: torch.device) -> Tensor:
        """The features of some vertices, on a device and in the type of rows; [n, 0] without x."""
        x = torch.empty(self.graph.num_vertices, 0) if self.graph.x is None else self.graph.x
        return x[vertices].to(device, self.row_dtype)

    def outline(self, traits: ViewTraits = ONE_DEVICE, *, training: bool) -> tuple[GraphOperation, ...]:
        """What the model asks of views with these traits in one forward pass. InputError, see `weft.nn.workload.outline`."""
        found = OutlineKey(traits, training)
        if found not in self.outlines:
            self.outlines[found] = self._outline(found)
        return self.outlines[found]

    def _outline(self, key: OutlineKey) -> tuple[GraphOperation, ...]:
        stats = self.stats
        made = outline(
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
            transform_share=min(self.transform_share, 1.0) if self.optimisations.sparse else 1.0,
            typed=stats.typed,
            num_relation_rows=stats.num_relation_rows,
        )
        return tuple(made)

    def stage_hops(self, traits: ViewTraits) -> list[list[int]]:
        """The aggregates of each of the model's stages, by their numbers."""
        spans = [set[int]() for _ in range(cast(int, self.model.num_stages))]
        for op in self.outline(traits, training=True):
            spans[op.stage] |= set(op.hops)
        return [sorted(span) for span in spans]

    def block_flops(self, name: str, width: int, *, training: bool, gradient: bool) -> BlockFlops:
        """Those of the PyG convolution of that name on rows of this width; gradient: whether these want one."""
        key = name, width, training, gradient
        if key not in self._block_flops:
            conv, stats = cast(PyGConv, self.model.get_submodule(name)), self.stats
            self._block_flops[key] = BlockFlops.of(
                conv, width, stats.num_edge_features, weighted=stats.weighted, training=training, gradient=gradient
            )
        return self._block_flops[key]

    def is_cached(self, op: GraphOperation) -> bool:
        """Whether a result is computed only once: constant features are always aggregated to the same."""
        return self.optimisations.reuse and op.origin == "inputs" and op.is_aggregate

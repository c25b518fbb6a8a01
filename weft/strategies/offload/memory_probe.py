"""Device memory of a chunk, measured on small chunks by following their tensors."""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Iterable, Sequence
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from weft.data import Adjacency, Graph
from weft.nn import embeddings
from weft.parallel.chunks.cut.rank_chunks import ChunkShape
from weft.runtime.memory.tensor_peak import TensorPeak
from weft.strategies.base import Step
from weft.strategies.offload.placed import PlacedOffload

PlaceAt = Callable[[Graph, nn.Module, Sequence[int], bool], PlacedOffload]
SMALL = ChunkShape(751, 1501, 3001)
"""Shape of the measured chunk: odd numbers, because kernels process remainders separately."""
MIN_SHARE = 0.01
"""Smallest ratio of a small chunk's sizes to its largest size."""

_growth_by_model: WeakKeyDictionary[nn.Module, dict[Hashable, Tensor]] = WeakKeyDictionary()
"""Measured growth for each model; plans for other numbers of ranks and chunks need it again."""


class MemoryProbe:
    """Measurement of a model's memory on small graphs that have one chunk of a given shape.

    At each moment of a step, the bytes in use are a linear function of a chunk's sizes. Four chunks determine it, and
    so the moment at which a chunk of any other shape needs most. If edges have types, or are fewer than slots, this
    holds only for similar proportions, because the rows of a type grow more slowly than its edges.

    Args:
        graph: Graph whose types, widths of features, and presence of weights the small graphs have.
        model: The model.
        place_at: Function that places a model on a graph with given bounds of chunks, which are read in place or in
            slots.
        retains: True if segments keep their autograd graphs until their backward pass.
        like: Key that identifies probes with the same result for a model.
    """

    def __init__(
        self, graph: Graph, model: nn.Module, place_at: PlaceAt, *, retains: bool = False, like: Hashable = None
    ) -> None:
        self.graph, self.model, self._place_at, self.retains, self._like = graph, model, place_at, retains, like

    def peak(self, schedules: Iterable[Sequence[tuple[ChunkShape, int]]], *, in_place: bool = False) -> int:
        """Return the peak bytes of any chunk of some schedules.

        If segments keep their autograd graphs, those of the other chunks of the schedule count as well.

        Args:
            schedules: The chunks of each schedule, as shape and bytes next to it.
            in_place: True if chunks read rows in place, and not in slots.
        """
        schedule_shapes = [
            torch.tensor([(*shape, extra) for shape, extra in each], dtype=torch.float64) for each in schedules
        ]
        shapes, extra = torch.cat(schedule_shapes).split([3, 1], 1)
        others = torch.cat([each.sum(0) - each for each in schedule_shapes])
        peak, sparse = extra.flatten(), shapes[:, 2] < shapes[:, 1]
        for kind in filter(torch.any, (sparse, ~sparse)):
            growth = self._moments(shapes[kind], in_place)
            peak[kind] += (_sizes(shapes[kind]) @ growth).amax(1)
            if self.retains:  # kept autograd graphs grow with targets and edges
                peak[kind] += others[kind][:, [0, 2]] @ growth[[1, 3], 0]
        return round(float(peak.max()))

    def peak_of_shape(self, shape: ChunkShape) -> int:
        """Return the peak bytes on the device of a training step or evaluation with chunks of one shape."""
        return self.peak([[(shape, 0)]])

    def _moments(self, shapes: Tensor, in_place: bool) -> Tensor:
        """Return the bytes in use at each moment: constant, and per target, slot and edge, [4, moments].

        The first moment is the one before the backward pass.
        """
        dense = not self.graph.relations and bool((shapes[:, 2] >= shapes[:, 1]).all())
        small = SMALL if dense else self._small(shapes)
        growths = _growth_by_model.setdefault(self.model, {})
        if (self._like, in_place, small) not in growths:
            growths[self._like, in_place, small] = self._growth([small, *larger(small)], in_place)
        return growths[self._like, in_place, small]

    def _small(self, shapes: Tensor) -> ChunkShape:
        """Return a small chunk with about the proportions of the largest of some chunks."""
        largest = shapes.amax(0)
        shares = (largest / largest.max()).clamp(min=MIN_SHARE)
        return ChunkShape(*((shares * max(SMALL)).int() | 1).tolist())

    def _growth(self, shapes: Sequence[ChunkShape], in_place: bool) -> Tensor:
        """Fit the bytes in use as a linear function of a chunk's sizes, by running chunks of four shapes.

        Args:
            shapes: Four chunk shapes, with linearly independent rows in `_sizes`.
            in_place: True if chunks read rows in place.

        Returns:
            Coefficients float64 [4, m]: a column for each moment of a step; its rows are the constant bytes, and the
            bytes per target, slot and edge.
        """
        alive = [self._work_on(shape, in_place) for shape in shapes]
        if len({*map(len, alive)}) > 1:  # a custom layer that runs more operations on a larger chunk
            alive = [[moments[0], max(moments)] for moments in alive]
        sizes = _sizes(torch.tensor(shapes, dtype=torch.float64))
        growth = torch.linalg.solve(sizes, torch.tensor(alive, dtype=torch.float64))
        return torch.cat([growth[:, :1], growth[:, 1:].unique(dim=1)], 1)

    def _work_on(self, shape: ChunkShape, in_place: bool) -> list[int]:
        """Return the bytes in use before backward, and after each operation of a training step and an evaluation."""
        placed = self._place(shape, in_place)
        for training in (True, False):  # allocate what stays: rows on the host, scalings
            self._step(placed, training)
        placed.release_constant()
        placed.model.zero_grad()
        with TensorPeak() as peak:
            # The second training step adds gradients to present ones, like all chunks but the first.
            alive = [self._step(placed, training, peak) for training in (True, True, False)]
        return [alive[1], *peak.moments]

    def _step(self, placed: PlacedOffload, training: bool, peak: TensorPeak | None = None) -> int:
        """Run a step, and return the bytes in use between forward and backward, if they are followed."""
        logits = placed.forward(Step(epoch=0, training=training))
        alive = peak.alive if peak else 0
        if training:
            placed.backward(logits, placed.empty_rows(logits).zero_())
        return alive

    def _place(self, shape: ChunkShape, in_place: bool) -> PlacedOffload:
        graph, twin = self._graph(shape), copy.deepcopy(self.model)
        for parameter in embeddings(twin).values():
            parameter.data = parameter.data.new_zeros(graph.typed.num_embedded, parameter.shape[1])
        bounds = [0, max(shape.targets, 1), graph.num_vertices]
        return self._place_at(graph, twin, bounds, in_place)

    def _graph(self, shape: ChunkShape) -> Graph:
        """Return a graph with as many vertices as slots, whose edges are all in the first chunk."""
        graph, random = self.graph, torch.Generator().manual_seed(0)
        count = max(shape.slots, shape.targets, 2)
        target = torch.randint(max(shape.targets, 1), (shape.edges,), generator=random)
        source = torch.arange(shape.edges) % count  # all of them
        offsets = tuple(count * offset // graph.num_vertices for offset in graph.type_offsets)
        features = {
            name: graph.features[name].new_zeros(offsets[number + 1] - offsets[number], graph.features[name].shape[1])
            for number, name in enumerate(graph.vertex_types)
            if name in graph.features
        }
        weight = None if graph.in_edges.weight is None else torch.ones(shape.edges)
        relations = max(len(graph.relations), 1)
        return Graph(
            in_edges=Adjacency.from_edges(source, target, num_sources=count, num_targets=count, weight=weight),
            x=None if graph.x is None else graph.x.new_zeros(count, graph.num_features),
            edge_type=torch.arange(shape.edges) % relations if graph.relations else None,
            relations=graph.relations,
            edge_features=torch.zeros(shape.edges, graph.num_edge_features) if graph.num_edge_features else None,
            vertex_types=graph.vertex_types,
            type_offsets=offsets,
            features=features,
            trusted=True,
        )


def _sizes(shapes: Tensor) -> Tensor:
    """Return the matrix [n, 4] of a linear fit: a column of ones for the constant bytes, then the shapes [n, 3]."""
    return torch.cat([shapes.new_ones(len(shapes), 1), shapes], 1)


def larger(shape: ChunkShape) -> tuple[ChunkShape, ChunkShape, ChunkShape]:
    """Return three larger shapes: all sizes doubled, more slots, and more edges (slots keep their order to edges)."""
    targets, slots, edges = shape
    dense = edges >= slots
    return (
        ChunkShape(2 * targets + 1, 2 * slots + 1, 2 * edges + 1),
        ChunkShape(targets, 2 * slots + 1, edges + dense * (slots + 1)),
        ChunkShape(targets, slots + (not dense) * (edges + 1), 2 * edges + 1),
    )

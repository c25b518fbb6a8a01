"""How much a chunk takes on the device: found by working on one of its shape scaled down, and following the tensors."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor, nn

from weft.chunks.rank import ChunkShape
from weft.core.tensor_peak import TensorPeak
from weft.data import Adjacency, Graph
from weft.nn import embeddings
from weft.strategies.base import Placed, Step

PlaceAt = Callable[[Graph, nn.Module, Sequence[int]], Placed]
NEAR = 1.001  # times what a chunk takes may be told, where others would have to be worked on to tell
SCALED_SLOTS = 1500  # rows in slots, and twice as many, of the chunks that are worked on


class Line(NamedTuple):
    """What a shape takes, and how that changes with all of its sizes."""

    num_bytes: float
    more: float
    """At `times` its sizes it takes at most `times - 1` of this more."""
    less: float
    """And below them at least `1 - times` of this less."""


class MemoryProbe:
    """A model on small graphs that have one chunk of a given shape.

    graph: whose features, weights and types they have, a few of each. place_at: places a model on a graph whose chunks
    have given bounds.
    """

    def __init__(self, graph: Graph, model: nn.Module, place_at: PlaceAt) -> None:
        self.graph, self.model, self._place_at = graph, model, place_at
        self._known: dict[ChunkShape, float] = {}
        self._told: dict[ChunkShape, Line] = {}

    def most(self, schedules: Iterable[Sequence[tuple[ChunkShape, int]]]) -> int:
        """The most of any chunk of some schedules, each with what is loaded beside it; or up to NEAR times that.

        The one that may take most, by what is known of others, is worked on, until none may take much more than those.
        """
        shapes, beside = (torch.tensor(each, dtype=torch.float64) for each in zip(*chain(*schedules), strict=True))
        found, worked_on = 0.0, set[int]()
        while True:
            bounds = self._bounds(shapes) + beside
            number = int(bounds.argmax())
            if number in worked_on or bounds[number] <= NEAR * found:
                return round(max(found, float(bounds[number])))
            worked_on.add(number)
            found = max(found, self.bytes(ChunkShape(*map(int, shapes[number]))) + float(beside[number]))

    def _bounds(self, shapes: Tensor) -> Tensor:
        """What each of some shapes [n, 3] takes at most [n]: no more than a known one that is as large in every way."""
        least = torch.full((len(shapes),), math.inf, dtype=torch.float64)
        for shape, line in self._told.items():
            times = (shapes / torch.tensor(shape, dtype=torch.float64).clamp(min=1)).amax(1)
            at_most = line.num_bytes + torch.where(times > 1, line.more, line.less) * (times - 1)
            least = torch.minimum(least, at_most)
        return least

    def bytes(self, shape: ChunkShape) -> int:
        """The most that a training step or an evaluation has on the device at once, with chunks of this shape.

        What it takes grows with the shape, beside what does not depend on it; two sizes tell the one from the other.
        """
        if shape not in self._told:
            self._told[shape] = self._line(shape)
        return round(self._told[shape].num_bytes)

    def _line(self, shape: ChunkShape) -> Line:
        largest = max(shape)
        if largest <= 2 * SCALED_SLOTS:
            num_bytes = self._most(shape)
            return Line(num_bytes, num_bytes, 0.0)
        small, large = (self._most(shape.scaled(times * SCALED_SLOTS / largest)) for times in (1, 2))
        slope = max(large - small, 0) / SCALED_SLOTS
        return Line(large + slope * (largest - 2 * SCALED_SLOTS), slope * largest, slope * largest)

    def _most(self, shape: ChunkShape) -> float:
        if shape not in self._known:
            self._known[shape] = self._work_on(shape)
        return self._known[shape]

    def _work_on(self, shape: ChunkShape) -> float:
        placed = self._place(shape)
        for training in (True, False):  # what is made once: constants, scalings
            self._step(placed, training)
        placed.model.zero_grad()
        with TensorPeak() as peak:
            for training in (True, False):
                self._step(placed, training)
        return float(peak.most)

    def _step(self, placed: Placed, training: bool) -> None:
        logits = placed.forward(Step(epoch=0, training=training))
        if training:
            placed.backward(logits, placed.empty_rows(logits).zero_())

    def _place(self, shape: ChunkShape) -> Placed:
        graph, twin = self._graph(shape), copy.deepcopy(self.model)
        for parameter in embeddings(twin).values():
            parameter.data = parameter.data.new_zeros(graph.typed.num_embedded, parameter.shape[1])
        bounds = [0, max(shape.targets, 1), graph.num_vertices]
        return self._place_at(graph, twin, bounds)

    def _graph(self, shape: ChunkShape) -> Graph:
        """A graph with as many vertices as slots, whose edges are all in the first chunk's."""
        graph, random = self.graph, torch.Generator().manual_seed(0)
        count = max(shape.slots, shape.targets, 2)
        target = torch.randint(max(shape.targets, 1), (shape.edges,), generator=random)
        source = torch.arange(shape.edges) % count  # all of them
        offsets = tuple(count * offset // graph.num_vertices for offset in graph.type_offsets)
        features = {
            name: torch.zeros(offsets[number + 1] - offsets[number], graph.features[name].shape[1])
            for number, name in enumerate(graph.vertex_types)
            if name in graph.features
        }
        weight = None if graph.in_edges.weight is None else torch.ones(shape.edges)
        relations = max(len(graph.relations), 1)
        return Graph(
            in_edges=Adjacency.from_edges(source, target, num_sources=count, num_targets=count, weight=weight),
            x=None if graph.x is None else torch.zeros(count, graph.num_features),
            edge_type=torch.arange(shape.edges) % relations if graph.relations else None,
            relations=graph.relations,
            edge_features=torch.zeros(shape.edges, graph.num_edge_features) if graph.num_edge_features else None,
            vertex_types=graph.vertex_types,
            type_offsets=offsets,
            features=features,
            trusted=True,
        )

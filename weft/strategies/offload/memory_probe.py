"""How much a chunk takes on the device: found by working on one of its shape scaled down, and following the tensors."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import torch
from torch import nn

from weft.chunks.rank import ChunkShape
from weft.core.tensor_peak import TensorPeak
from weft.data import Adjacency, Graph
from weft.nn import embeddings
from weft.strategies.base import Placed, Step

PlaceAt = Callable[[Graph, nn.Module, Sequence[int]], Placed]
CANDIDATES = 3  # for the chunk that takes most with what is loaded beside it, besides the largest chunks
SCALED_SLOTS = 1500  # rows in slots, and twice as many, of the chunks that are worked on


class MemoryProbe:
    """A model on small graphs that have one chunk of a given shape.

    graph: whose features, weights and types they have, a few of each. place_at: places a model on a graph whose chunks
    have given bounds.
    """

    def __init__(self, graph: Graph, model: nn.Module, place_at: PlaceAt) -> None:
        self.graph, self.model, self._place_at = graph, model, place_at
        self._known: dict[ChunkShape, float] = {}

    def most(self, schedules: Sequence[Sequence[tuple[ChunkShape, int]]]) -> int:
        """The most of any chunk of some schedules, each with what is loaded beside it.

        Only the largest ones are worked on, and a few of which these say that they take about as much.
        """
        return max(map(self._most_of, schedules))

    def _most_of(self, chunks: Sequence[tuple[ChunkShape, int]]) -> int:
        about = self._about([shape for shape, _ in chunks])
        order = sorted(range(len(chunks)), key=lambda number: about[number] + chunks[number][1])
        tried = {*order[-CANDIDATES:], *largest([shape for shape, _ in chunks])}
        return max(self.bytes(chunks[number][0]) + chunks[number][1] for number in tried)

    def bytes(self, shape: ChunkShape) -> int:
        """The most that a training step or an evaluation has on the device at once, with chunks of this shape.

        What it takes grows with the shape, beside what does not depend on it; two sizes tell the one from the other.
        """
        largest = max(shape)
        if largest <= 2 * SCALED_SLOTS:
            return round(self._most(shape))
        small, large = (self._most(shape.scaled(times * SCALED_SLOTS / largest)) for times in (1, 2))
        slope = (large - small) / SCALED_SLOTS
        return round(large + slope * (largest - 2 * SCALED_SLOTS))

    def _about(self, shapes: Sequence[ChunkShape]) -> list[float]:
        """`bytes` of many shapes with as many slots, linear between those of the largest."""
        known = [shapes[number] for number in largest(shapes)]
        terms = torch.tensor([[1.0, one.targets, one.edges] for one in (*known, *shapes)], dtype=torch.float64)
        found = torch.tensor([[float(self.bytes(one))] for one in known], dtype=torch.float64)
        weights = torch.linalg.lstsq(terms[: len(known)], found, driver="gelsd").solution
        rows: list[float] = (terms[len(known) :] @ weights).view(-1).tolist()
        return rows

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


def largest(shapes: Sequence[ChunkShape]) -> set[int]:
    """Which of some chunks may take most: with most rows, with most edges, and with many of both."""
    rows, edges = (max(max(each), 1) for each in (zip(*((one.targets, one.edges) for one in shapes), strict=True)))
    measures = (
        lambda number: shapes[number].targets,
        lambda number: shapes[number].edges,
        lambda number: shapes[number].targets / rows + shapes[number].edges / edges,
        lambda number: min(shapes[number].targets / rows, shapes[number].edges / edges),
    )
    return {max(range(len(shapes)), key=measure) for measure in measures}

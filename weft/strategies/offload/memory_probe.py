"""How much a chunk takes on the device: found by working on small ones, and following the tensors."""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Iterable, Sequence
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from weft.data import Adjacency, Graph
from weft.nn import embeddings
from weft.parallel.chunks.cut.rank_chunks import ChunkShape
from weft.runtime.tensor_peak import TensorPeak
from weft.strategies.base import Step
from weft.strategies.offload.placed import PlacedOffload

PlaceAt = Callable[[Graph, nn.Module, Sequence[int], bool], PlacedOffload]
SMALL = ChunkShape(751, 1501, 3001)
"""A chunk that is worked on: odd numbers, since kernels do rows that are left over apart."""
LEAST_SHARE = 0.01
"""Of a chunk's largest size, what the others have at least in the small one of its kind."""

_found: WeakKeyDictionary[nn.Module, dict[Hashable, Tensor]] = WeakKeyDictionary()
"""What was found of a model, which plans for other ranks and counts of chunks ask for again."""


class MemoryProbe:
    """A model on small graphs that have one chunk of a given shape.

    At any moment of a step, the bytes alive grow in proportion to a chunk's sizes: four chunks tell by how much, and so
    the moment at which a chunk of any other shape takes most. Where edges have types, or are fewer than slots, this
    holds only among about the same proportions: the rows that a type makes grow more slowly than its edges.

    graph: whose features, weights and types the small ones have, a few of each. place_at: places a model on a graph
    whose chunks have given bounds, and read rows where they are, or in slots. retains: whether segments stay as they
    were run, until they go back. like: what all probes have that find the same of this model.
    """

    def __init__(
        self, graph: Graph, model: nn.Module, place_at: PlaceAt, *, retains: bool = False, like: Hashable = None
    ) -> None:
        self.graph, self.model, self._place_at, self.retains, self._like = graph, model, place_at, retains, like
        self._in_place = False

    @property
    def in_place(self) -> MemoryProbe:
        """The same of chunks that read rows where they are."""
        made = copy.copy(self)
        made._in_place = True
        return made

    def peak(self, schedules: Iterable[Sequence[tuple[ChunkShape, int]]]) -> int:
        """The most of any chunk of some schedules, each with what is loaded beside it.

        Where segments stay, beside what stays of the other chunks of its schedule.
        """
        found = [torch.tensor([(*shape, beside) for shape, beside in each], dtype=torch.float64) for each in schedules]
        shapes, beside = torch.cat(found).split([3, 1], 1)
        others = torch.cat([each.sum(0) - each for each in found])
        most, sparse = beside.flatten(), shapes[:, 2] < shapes[:, 1]
        for some in filter(torch.any, (sparse, ~sparse)):
            growth = self._moments(shapes[some])
            most[some] += (_sizes(shapes[some]) @ growth).amax(1)
            if self.retains:  # what stays grows with targets and edges
                most[some] += others[some][:, [0, 2]] @ growth[[1, 3], 0]
        return round(float(most.max()))

    def peak_of_shape(self, shape: ChunkShape) -> int:
        """The most that a training step or an evaluation has on the device at once, with chunks of this shape."""
        return self.peak([[(shape, 0)]])

    def _moments(self, shapes: Tensor) -> Tensor:
        """Of each moment, the bytes alive whatever the shape, and by target, slot and edge [4, moments].

        The first one is that before the backward pass.
        """
        dense = not self.graph.relations and bool((shapes[:, 2] >= shapes[:, 1]).all())
        small = SMALL if dense else self._small(shapes)
        known = _found.setdefault(self.model, {})
        if (self._like, self._in_place, small) not in known:
            known[self._like, self._in_place, small] = self._growth([small, *larger(small)])
        return known[self._like, self._in_place, small]

    def _small(self, shapes: Tensor) -> ChunkShape:
        """A small chunk that is to the sizes of the largest of some as these are to each other."""
        largest = shapes.amax(0)
        shares = (largest / largest.max()).clamp(min=LEAST_SHARE)
        return ChunkShape(*((shares * max(SMALL)).int() | 1).tolist())

    def _growth(self, shapes: Sequence[ChunkShape]) -> Tensor:
        """How the bytes alive at each moment grow with the sizes, by four shapes."""
        alive = [self._work_on(shape) for shape in shapes]
        if len({*map(len, alive)}) > 1:  # a layer of one's own that does more on a larger chunk
            alive = [[one[0], max(one)] for one in alive]
        sizes = _sizes(torch.tensor(shapes, dtype=torch.float64))
        growth = torch.linalg.solve(sizes, torch.tensor(alive, dtype=torch.float64))
        return torch.cat([growth[:, :1], growth[:, 1:].unique(dim=1)], 1)

    def _work_on(self, shape: ChunkShape) -> list[int]:
        """The bytes alive before the backward pass, and after each operation of a training step and an evaluation."""
        placed = self._place(shape)
        for training in (True, False):  # what is made for good: rows on the host, scalings
            self._step(placed, training)
        placed.release_constant()
        placed.model.zero_grad()
        with TensorPeak() as peak:
            # the second as a later chunk, whose gradients add to others
            alive = [self._step(placed, training, peak) for training in (True, True, False)]
        return [alive[1], *peak.moments]

    def _step(self, placed: PlacedOffload, training: bool, peak: TensorPeak | None = None) -> int:
        """A step; the bytes alive between forward and backward, where they are followed."""
        logits = placed.forward(Step(epoch=0, training=training))
        alive = peak.alive if peak else 0
        if training:
            placed.backward(logits, placed.empty_rows(logits).zero_())
        return alive

    def _place(self, shape: ChunkShape) -> PlacedOffload:
        graph, twin = self._graph(shape), copy.deepcopy(self.model)
        for parameter in embeddings(twin).values():
            parameter.data = parameter.data.new_zeros(graph.typed.num_embedded, parameter.shape[1])
        bounds = [0, max(shape.targets, 1), graph.num_vertices]
        return self._place_at(graph, twin, bounds, self._in_place)

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


def _sizes(shapes: Tensor) -> Tensor:
    """Shapes [n, 3] with a 1 before them, for what does not grow."""
    return torch.cat([shapes.new_ones(len(shapes), 1), shapes], 1)


def larger(one: ChunkShape) -> tuple[ChunkShape, ChunkShape, ChunkShape]:
    """With twice of all, and with more slots and more edges, where fewer of these than of those stay fewer."""
    targets, slots, edges = one
    dense = edges >= slots
    return (
        ChunkShape(2 * targets + 1, 2 * slots + 1, 2 * edges + 1),
        ChunkShape(targets, 2 * slots + 1, edges + dense * (slots + 1)),
        ChunkShape(targets, slots + (not dense) * (edges + 1), 2 * edges + 1),
    )

"""Link prediction's data: a graph of training edges, the edges held out of it, and pairs that are no edges.

A link is a row (source, target, relation) of an int64 [m, 3]; the relation is 0 in a graph without relations. What is
drawn is keyed by original ids, so that it does not depend on `--order`, on ranks or on batches.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from weft.data.adjacency import Adjacency
from weft.data.graph import Graph
from weft.data.inverse_relations import forward_relations
from weft.data.tensor_checks import DataWarning
from weft.utils.errors import InputError
from weft.utils.random import key, keyed_integers, keyed_words

VAL_SHARE, TEST_SHARE = 0.05, 0.1
MAX_DRAWS = 100  # for a pair that is no edge; a graph that has all edges has none

# What a random word is for: part of its key.
HOLD_OUT, DIRECTION, NEGATIVE = range(1, 4)


@dataclass(frozen=True, kw_only=True)
class Links:
    """The training, validation and test links of a graph, and what is needed to draw and to rank others."""

    train: Tensor
    """int64 [m, 3]: the graph's edges, each once; no loops without relations; one direction if `symmetric`."""
    val: Tensor
    """int64 [m, 3]: edges held out for validation."""
    test: Tensor
    """int64 [m, 3]: edges held out for the test."""
    edges: Tensor
    """int64 [m, 3]: the graph's edges in stored order, without those of inverse relations."""
    num_vertices: int
    """N."""
    num_relations: int
    """R, without inverse ones; 1 in a graph without relations."""
    num_types: int
    """The number of vertex types, at least 1."""
    symmetric: bool
    """Whether every edge is stored both ways, so that each pair of vertices is one link."""
    typed: bool
    """Whether the graph has relations."""
    candidates: Tensor
    """int64 [R, 2, 2]: by relation and end (source, target), the first vertex that may stand there, and the stop."""
    ids: Tensor | None
    """int64 [N]: the vertices' original ids; None: the same."""

    @classmethod
    def of(cls, graph: Graph) -> Links:
        """The links of a graph that has held-out ones; its own edges are the training links.

        Without relations, loops are none, and each link is there once; where the graph is symmetric, in one direction,
        drawn by chance, so that ranks that own the sources have as many.
        """
        relations = forward_relations(graph)
        edges, size = triples(graph), (graph.num_vertices, max(len(relations), 1))
        train = decoded(coded(edges, *size).unique(), *size)
        symmetric = is_symmetric(graph)
        if not relations:
            train = train[train[:, 0] != train[:, 1]]
        if symmetric:
            first = train if graph.ids is None else named(train, graph.ids)
            falling = keyed_words(key(DIRECTION), first[:, :2].amin(1), first[:, :2].amax(1)) < 0
            train = train[(first[:, 0] > first[:, 1]) == falling]
        none = edges[:0]
        types = {name: graph.type_range(name) for name in graph.vertex_types}
        ends = [[types[end] for end in name.split("|")[::2]] for name in relations]
        ranges = ends or [[range(graph.num_vertices)] * 2]
        return cls(
            train=train,
            val=none if graph.val_links is None else graph.val_links,
            test=none if graph.test_links is None else graph.test_links,
            edges=edges,
            num_vertices=graph.num_vertices,
            num_relations=len(ranges),
            num_types=max(len(types), 1),
            symmetric=symmetric,
            typed=bool(relations),
            candidates=torch.tensor([[(span.start, span.stop) for span in pair] for pair in ranges]),
            ids=graph.ids,
        )

    @cached_property
    def known(self) -> Tensor:
        """All true links as ascending `codes`."""
        known: Tensor = self.codes(self._all).unique()
        return known

    @cached_property
    def known_turned(self) -> Tensor:
        """The same, each from target to source."""
        known: Tensor = self.codes(turned(self._all)).unique()
        return known

    @property
    def _all(self) -> Tensor:
        links = torch.cat([self.edges, self.val, self.test])
        return torch.cat([links, turned(links)]) if self.symmetric else links

    def codes(self, links: Tensor) -> Tensor:
        """One number for each link, int64 [m], ascending by source, relation and then target."""
        return coded(links, self.num_vertices, self.num_relations)

    def known_ends(self, links: Tensor, side: int) -> tuple[Tensor, Tensor]:
        """What else could stand at one side (0: source, 1: target) of each link and be true: (link, vertex) pairs.

        Int64 [k] each, ascending by link. The link's own end is among them.
        """
        known = self.known if side else self.known_turned
        asked = links if side else turned(links)
        lowest = self.codes(asked) - asked[:, 1]
        begin = torch.searchsorted(known, lowest)
        count = torch.searchsorted(known, lowest + self.num_vertices) - begin
        link = torch.arange(len(links)).repeat_interleave(count)
        offset = torch.arange(len(link)) - (count.cumsum(0) - count)[link]
        return link, known[begin[link] + offset] % self.num_vertices

    def negatives(self, links: Tensor, draw: int, number: int) -> Tensor:
        """A pair [m, 3] drawn by chance for each link: both ends, or, where there are relations, one of the two.

        By the key (draw, link, number) alone. It may be an edge; `non_edges` are none.
        """
        named_links = links if self.ids is None else named(links, self.ids)
        word = keyed_words(draw, *named_links.unbind(1), number)
        ends = [self._drawn(keyed_words(key(draw, side), word), links[:, 2], side) for side in (0, 1)]
        if self.typed:
            ends = [torch.where((word < 0) == bool(side), ends[side], links[:, side]) for side in (0, 1)]
        return torch.stack([*ends, links[:, 2]], 1)

    def candidates_of(self, links: Tensor, draw: int, count: int) -> Tensor:
        """The candidate links [p (1 + K), 3] of p links: these, and then K = `count` pairs drawn for each."""
        return torch.cat([links, *(self.negatives(links, draw, number) for number in range(count))])

    def non_edges(self, links: Tensor, draw: int) -> Tensor:
        """A pair [m, 3] for each link as `negatives`, that is no known link and no loop."""
        drawn = self.negatives(links, draw, 0)
        for number in range(1, MAX_DRAWS):
            codes = self.codes(drawn)
            place = torch.searchsorted(self.known, codes).clamp(max=len(self.known) - 1)
            wrong = ((self.known[place] == codes) | (drawn[:, 0] == drawn[:, 1])).nonzero()[:, 0]
            if not len(wrong):
                return drawn
            drawn[wrong] = self.negatives(links[wrong], draw, number)
        raise InputError("the graph has nearly every edge that it can have: there is nothing to tell links from")

    def _drawn(self, words: Tensor, relation: Tensor, side: int) -> Tensor:
        """Vertices that may stand at a side of these relations."""
        first, stop = self.candidates[relation, side].unbind(1)
        drawn = first + keyed_integers(words, stop - first)
        return drawn if self.ids is None else self._places[drawn]

    @cached_property
    def _places(self) -> Tensor:
        assert self.ids is not None
        return self.ids.argsort()


def negative_key(seed: int, *purpose: int) -> int:
    """The key of the negatives of an epoch, or of a split."""
    return key(seed, NEGATIVE, *purpose)


def coded(links: Tensor, num_vertices: int, num_relations: int) -> Tensor:
    """One number for each link, int64 [m], ascending by source, relation and then target."""
    return (links[:, 0] * num_relations + links[:, 2]) * num_vertices + links[:, 1]


def decoded(codes: Tensor, num_vertices: int, num_relations: int) -> Tensor:
    """The links [m, 3] of the numbers that `coded` gives them."""
    source, target = codes // num_vertices // num_relations, codes % num_vertices
    return torch.stack([source, target, codes // num_vertices % num_relations], 1)


def triples(graph: Graph) -> Tensor:
    """The graph's edges as links, int64 [m, 3], in stored order, without those of inverse relations."""
    links = all_triples(graph)
    return links[links[:, 2] < max(len(forward_relations(graph)), 1)]


def all_triples(graph: Graph) -> Tensor:
    """The graph's edges as links, int64 [E, 3], in stored order."""
    source, target = graph.in_edges.edges()
    relation = torch.zeros_like(target) if graph.edge_type is None else graph.edge_type
    return torch.stack([source.long(), target.long(), relation.long()], 1)


def is_symmetric(graph: Graph) -> bool:
    """Whether a graph without relations has every edge both ways."""
    edges, back = graph.in_edges, graph.in_edges.transpose
    return not graph.relations and torch.equal(edges.indptr, back.indptr) and torch.equal(edges.indices, back.indices)


def turned(links: Tensor) -> Tensor:
    """The links from target to source."""
    return links[:, [1, 0, 2]]


def named(links: Tensor, ids: Tensor) -> Tensor:
    """The links [m, 3] with vertex v called ids[v]."""
    return torch.cat([ids[links[:, :2]], links[:, 2:]], 1)


def with_held_out_links(graph: Graph, seed: int) -> Graph:
    """The graph without a random 5 and 10 per cent of its edges, which are its validation and test links.

    All edges between two vertices, in both directions, go to the same side; loops stay. A symmetric graph's held-out
    links are in one direction. InputError where so few edges leave a side empty.
    """
    links = all_triples(graph)
    first = links if graph.ids is None else named(links, graph.ids)
    low, high = first[:, :2].amin(1), first[:, :2].amax(1)
    pairs, pair_of_edge = (low * graph.num_vertices + high).unique(return_inverse=True)
    low, high = pairs // graph.num_vertices, pairs % graph.num_vertices
    eligible = (low != high).nonzero()[:, 0]
    order = keyed_words(key(seed, HOLD_OUT), low[eligible], high[eligible]).argsort(stable=True)
    num_val, num_test = round(VAL_SHARE * len(order)), round(TEST_SHARE * len(order))
    if not num_val or num_val + num_test == len(order):
        raise InputError(f"{graph.name} has {len(order)} links, too few to hold out 5 % of them: give a larger graph")
    side = torch.zeros(len(pairs), dtype=torch.int8)
    side[eligible[order[:num_val]]] = 1
    side[eligible[order[num_val : num_val + num_test]]] = 2
    side_of_edge = side[pair_of_edge]
    listed = links[:, 2] < max(len(forward_relations(graph)), 1)
    if is_symmetric(graph):
        listed = first[:, 0] < first[:, 1]
    val, test = (links[(side_of_edge == number) & listed].unique(dim=0) for number in (1, 2))
    kept = side_of_edge == 0
    return replace(
        graph,
        in_edges=subset(graph.in_edges, kept),
        edge_type=None if graph.edge_type is None else graph.edge_type[kept],
        edge_features=None if graph.edge_features is None else graph.edge_features[kept],
        val_links=val,
        test_links=test,
        trusted=True,
    )


def subset(in_edges: Adjacency, kept: Tensor) -> Adjacency:
    """The edges where `kept`, bool [E], holds."""
    before = torch.zeros(in_edges.num_edges + 1, dtype=torch.int64)
    torch.cumsum(kept, 0, out=before[1:])
    return Adjacency(
        indptr=before[in_edges.indptr],
        indices=in_edges.indices[kept],
        num_sources=in_edges.num_sources,
        weight=None if in_edges.weight is None else in_edges.weight[kept],
    )


def require_links(graph: Graph) -> None:
    """Raises InputError unless a link predictor can be trained and tested: edges, and links held out of them.

    Warns (DataWarning) of given ones that are edges all the same: they carry messages.
    """
    if not graph.num_edges:
        raise InputError(f"{graph.name} has no edge to learn from: --task link wants some")
    if graph.test_links is None or not len(graph.test_links):
        raise InputError(f"{graph.name} has no test_links: give some, or no val_links either to have a seeded split")
    if max(len(graph.relations), 1) * graph.num_vertices**2 >= 1 << 63:
        raise InputError(f"{graph.name} has too many vertices and relations to number its possible links in 63 bits")
    relations = forward_relations(graph)
    size = (graph.num_vertices, max(len(relations), 1))
    links = triples(graph)
    if not relations and not (links[:, 0] != links[:, 1]).any():
        raise InputError(f"{graph.name} has no edge but loops to learn from: --task link wants some")
    edges = coded(links if relations else torch.cat([links, turned(links)]), *size)
    held_out = [links for links in (graph.val_links, graph.test_links) if links is not None]
    leaked = int(torch.isin(coded(torch.cat(held_out), *size), edges).sum())
    if leaked:
        warnings.warn(
            f"{graph.name}: {leaked} held-out links are edges too, so scores are too high: take these edges out",
            DataWarning,
            stacklevel=4,
        )

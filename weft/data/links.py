"""Data of link prediction: training edges, held-out edges, and negative samples.

A link is a row (source, target, relation) of an int64 tensor [m, 3]; the relation is 0 in a graph without relations.
Random choices are keyed by original ids, so they do not depend on `--order`, on ranks or on batches.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from weft.data.adjacency import Adjacency
from weft.data.checks.tensor_checks import DataWarning
from weft.data.fields import EdgeLabels
from weft.data.graph import Graph
from weft.data.inverse_relations import forward_relations
from weft.utils.errors import InputError
from weft.utils.random import key, keyed_integers, keyed_words

VAL_SHARE, TEST_SHARE = 0.05, 0.1
"""Fractions of a graph's edges that are held out for validation and for the test."""
MAX_DRAWS = 100
"""Number of attempts to draw a pair that is no edge; a complete graph has none."""

# The purpose of a random word is part of its key, so that two purposes never share a word.
HOLD_OUT, DIRECTION, NEGATIVE = range(1, 4)


@dataclass(frozen=True, kw_only=True)
class Links:
    """Training, validation and test links of a graph, with what negative sampling and ranking need."""

    train: Tensor
    """int64 [m, 3]: distinct edges of the graph; one direction if `symmetric`; without self-loops unless `typed`."""
    val: Tensor
    """int64 [m, 3]: edges held out for validation."""
    test: Tensor
    """int64 [m, 3]: edges held out for the test."""
    edges: Tensor
    """int64 [m, 3]: the graph's edges in stored order, without those of inverse relations."""
    num_vertices: int
    """Number of vertices, N."""
    num_relations: int
    """Number of relations, R, not counting inverse relations; 1 in a graph without relations."""
    num_types: int
    """Number of vertex types, at least 1."""
    symmetric: bool
    """True if every edge is stored in both directions; each pair of vertices is one link then."""
    typed: bool
    """True if the graph has relations."""
    candidates: Tensor
    """int64 [R, 2, 2]: range (first, last + 1) of possible endpoints by relation and side (source, target)."""
    ids: Tensor | None
    """int64 [N]: original id of each vertex; None: the graph was not reordered."""

    @classmethod
    def of(cls, graph: Graph) -> Links:
        """Return the links of a graph: its edges are the training links, next to its held-out links.

        Duplicate edges are one link. Without relations, self-loops are left out. In a symmetric graph each link keeps
        one direction, chosen at random, so that ranks that own the sources get equal numbers of links.
        """
        relations = forward_relations(graph)
        edges, size = triples(graph), (graph.num_vertices, max(len(relations), 1))
        train = decode_links(encode_links(edges, *size).unique(), *size)
        symmetric = is_symmetric(graph)
        if not relations:
            train = train[train[:, 0] != train[:, 1]]
        if symmetric:
            original = train if graph.ids is None else with_original_ids(train, graph.ids)
            descending = keyed_words(key(DIRECTION), original[:, :2].amin(1), original[:, :2].amax(1)) < 0
            train = train[(original[:, 0] > original[:, 1]) == descending]
        none = edges[:0]
        candidates = endpoint_ranges(graph)
        return cls(
            train=train,
            val=none if graph.val_links is None else graph.val_links,
            test=none if graph.test_links is None else graph.test_links,
            edges=edges,
            num_vertices=graph.num_vertices,
            num_relations=len(candidates),
            num_types=max(len(graph.vertex_types), 1),
            symmetric=symmetric,
            typed=bool(relations),
            candidates=candidates,
            ids=graph.ids,
        )

    @cached_property
    def true_codes(self) -> Tensor:
        """Codes of all true links (see `codes`), ascending."""
        codes: Tensor = self.codes(self._all).unique()
        return codes

    @cached_property
    def reversed_true_codes(self) -> Tensor:
        """Codes of all true links with source and target exchanged, ascending."""
        codes: Tensor = self.codes(reversed_links(self._all)).unique()
        return codes

    @cached_property
    def edge_codes(self) -> Tensor:
        """Codes of the graph's edges, ascending."""
        codes: Tensor = self.codes(self.edges).unique()
        return codes

    @property
    def _all(self) -> Tensor:
        """All true links, int64 [m, 3]: edges and held-out links, in both directions if `symmetric`."""
        return self.directed(torch.cat([self.edges, self.val, self.test]))

    def codes(self, links: Tensor) -> Tensor:
        """Return a number for each link, int64 [m], ascending by source, relation and then target."""
        return encode_links(links, self.num_vertices, self.num_relations)

    def true_endpoints(self, links: Tensor, side: int) -> tuple[Tensor, Tensor]:
        """Return all vertices that make a true link if they replace one endpoint of a link, including its own endpoint.

        Args:
            links: int64 [m, 3].
            side: Endpoint to replace, 0: source, 1: target.

        Returns:
            Positions in `links` and vertices, int64 [k] each, ascending by link.
        """
        if side:
            return self.matching_targets(links, self.true_codes)
        return self.matching_targets(reversed_links(links), self.reversed_true_codes)

    def matching_targets(self, links: Tensor, codes: Tensor) -> tuple[Tensor, Tensor]:
        """Return the targets of all links that have the source and the relation of a link.

        Args:
            links: int64 [m, 3].
            codes: Codes of the links to search, ascending; see `codes`.

        Returns:
            Positions in `links` and targets, int64 [k] each, ascending by link.
        """
        # The codes of links with equal source and relation are consecutive: find their range by binary search.
        lowest = self.codes(links) - links[:, 1]
        begin = torch.searchsorted(codes, lowest)
        count = torch.searchsorted(codes, lowest + self.num_vertices) - begin
        link = torch.arange(len(links)).repeat_interleave(count)
        offset = torch.arange(len(link)) - (count.cumsum(0) - count)[link]
        return link, codes[begin[link] + offset] % self.num_vertices

    def queries(self, links: Tensor) -> Tensor:
        """Return the distinct sources and relations of links, int64 [q, 3], with target 0, ascending by relation.

        Args:
            links: int64 [m, 3].
        """
        codes = self.codes(links) - links[:, 1]
        queries = decode_links(codes.unique(), self.num_vertices, self.num_relations)
        return queries[queries[:, 2].argsort(stable=True)]

    def position_of_query(self, queries: Tensor, links: Tensor) -> Tensor:
        """Return the position of the source and relation of each link among queries, int64 [m].

        Args:
            queries: Distinct sources and relations, from `queries`.
            links: int64 [m, 3].
        """
        order = (queries[:, 0] * self.num_relations + queries[:, 2]).sort()
        return order.indices[torch.searchsorted(order.values, links[:, 0] * self.num_relations + links[:, 2])]

    def directed(self, links: Tensor) -> Tensor:
        """Return links in both directions if the graph is symmetric, otherwise the links themselves."""
        return torch.cat([links, reversed_links(links)]) if self.symmetric else links

    def negatives(self, links: Tensor, draw: int, number: int, *, keep_sources: bool = False) -> Tensor:
        """Draw a random pair for each link: both endpoints, or with relations one of the two. It can be a true link.

        Depends on the key (draw, link, number) only. `non_edges` returns pairs that are no true links.

        Args:
            links: int64 [m, 3].
            draw: Key of this epoch's or split's negatives; see `negative_key`.
            number: Number of the sample, if a link gets several.
            keep_sources: True to replace only the target of each link.

        Returns:
            int64 [m, 3], with the relations of `links`.
        """
        original = links if self.ids is None else with_original_ids(links, self.ids)
        word = keyed_words(draw, *original.unbind(1), number)
        endpoints = [self._draw_endpoints(keyed_words(key(draw, side), word), links[:, 2], side) for side in (0, 1)]
        if keep_sources:
            endpoints[0] = links[:, 0]
        elif self.typed:  # the sign of the random word decides which endpoint is replaced
            endpoints = [torch.where((word < 0) == bool(side), endpoints[side], links[:, side]) for side in (0, 1)]
        return torch.stack([*endpoints, links[:, 2]], 1)

    def candidates_of(self, links: Tensor, draw: int, count: int, *, keep_sources: bool = False) -> Tensor:
        """Return links followed by their negative samples.

        Args:
            links: int64 [p, 3].
            draw: Key of this epoch's or split's negatives.
            count: Number of negatives for each link, K.
            keep_sources: True if negatives keep the source of their link.

        Returns:
            Candidate links [p (1 + K), 3]: the links, then one negative of each, then the next, and so on.
        """
        numbers = range(count)
        return torch.cat([links, *(self.negatives(links, draw, n, keep_sources=keep_sources) for n in numbers)])

    def non_edges(self, links: Tensor, draw: int, *, keep_sources: bool = False) -> Tensor:
        """Draw a random pair for each link that is neither a true link nor a self-loop.

        Args:
            links: int64 [m, 3].
            draw: Key of this epoch's or split's negatives.
            keep_sources: True to replace only the target of each link.

        Returns:
            int64 [m, 3], as from `negatives`.

        Raises:
            InputError: If MAX_DRAWS attempts find no such pair.
        """
        # Draw for all links, then draw again for those that got a true link or a self-loop.
        pairs = self.negatives(links, draw, 0, keep_sources=keep_sources)
        for number in range(1, MAX_DRAWS):
            codes = self.codes(pairs)
            position = torch.searchsorted(self.true_codes, codes).clamp(max=len(self.true_codes) - 1)
            wrong = ((self.true_codes[position] == codes) | (pairs[:, 0] == pairs[:, 1])).nonzero()[:, 0]
            if not len(wrong):
                return pairs
            pairs[wrong] = self.negatives(links[wrong], draw, number, keep_sources=keep_sources)
        raise InputError(
            "cannot draw negative links, since nearly every edge between the vertices exists: give a sparser graph"
        )

    def _draw_endpoints(self, words: Tensor, relation: Tensor, side: int) -> Tensor:
        """Return a random vertex for each word, int64 [m], among those that a relation allows at a side."""
        first, stop = self.candidates[relation, side].unbind(1)
        original = first + keyed_integers(words, stop - first)
        return original if self.ids is None else self.vertex_of_id[original]

    @cached_property
    def vertex_of_id(self) -> Tensor:
        """Vertex with each original id, int64 [N]."""
        return torch.arange(self.num_vertices) if self.ids is None else self.ids.argsort()


def endpoint_ranges(graph: Graph) -> Tensor:
    """Return the ranges (first, last + 1) of possible endpoints, int64 [R, 2, 2], by relation and side.

    A graph without relations counts as one relation between all vertices.
    """
    types = {name: graph.type_range(name) for name in graph.vertex_types}
    ranges = [[types[side] for side in name.split("|")[::2]] for name in forward_relations(graph)]
    whole = [[range(graph.num_vertices)] * 2]
    return torch.tensor([[(span.start, span.stop) for span in pair] for pair in ranges or whole])


def keeps_sources(loss: str) -> bool:
    """Return whether the negatives of a loss have the source of their link: those of BPR, which ranks targets."""
    return loss == "bpr"


def negative_key(seed: int, *purpose: int) -> int:
    """Return the key of the negatives of an epoch or a split.

    Args:
        seed: Seed of the run.
        purpose: Numbers that identify the epoch or the split.
    """
    return key(seed, NEGATIVE, *purpose)


def encode_links(links: Tensor, num_vertices: int, num_relations: int) -> Tensor:
    """Return a number for each link, int64 [m], ascending by source, relation and then target.

    Args:
        links: int64 [m, 3].
        num_vertices: Number of vertices.
        num_relations: Number of relations, at least 1.
    """
    return (links[:, 0] * num_relations + links[:, 2]) * num_vertices + links[:, 1]


def decode_links(codes: Tensor, num_vertices: int, num_relations: int) -> Tensor:
    """Return the links [m, 3] that have these codes; the inverse of `encode_links`.

    Args:
        codes: int64 [m].
        num_vertices: Number of vertices.
        num_relations: Number of relations, at least 1.
    """
    source, target = codes // num_vertices // num_relations, codes % num_vertices
    return torch.stack([source, target, codes // num_vertices % num_relations], 1)


def triples(graph: Graph) -> Tensor:
    """Return the graph's edges as links, int64 [m, 3], in stored order, without those of inverse relations."""
    links = all_triples(graph)
    return links[links[:, 2] < max(len(forward_relations(graph)), 1)]


def all_triples(graph: Graph) -> Tensor:
    """Return the graph's edges as links, int64 [E, 3], in stored order."""
    source, target = graph.in_edges.edges()
    relation = torch.zeros_like(target) if graph.edge_type is None else graph.edge_type
    return torch.stack([source.long(), target.long(), relation.long()], 1)


def is_symmetric(graph: Graph) -> bool:
    """Return whether a graph without relations has every edge in both directions."""
    edges, back = graph.in_edges, graph.in_edges.transpose
    return not graph.relations and torch.equal(edges.indptr, back.indptr) and torch.equal(edges.indices, back.indices)


def reversed_links(links: Tensor) -> Tensor:
    """Return the links with source and target exchanged."""
    return links[:, [1, 0, 2]]


def with_original_ids(links: Tensor, ids: Tensor) -> Tensor:
    """Return the links with vertex v replaced by ids[v].

    Args:
        links: int64 [m, 3].
        ids: Original id of each vertex, int64 [N].
    """
    return torch.cat([ids[links[:, :2]], links[:, 2:]], 1)


def with_held_out_links(graph: Graph, seed: int) -> Graph:
    """Return the graph without a random 15 % of its edges, which become validation (5 %) and test links (10 %).

    All edges between two vertices, in both directions, are held out together; self-loops stay. The held-out links of a
    symmetric graph have one direction.

    Args:
        graph: The graph.
        seed: Seed of the random choice.

    Raises:
        InputError: If the graph has so few edges that a split would be empty.
    """
    # 1. Number the unordered pairs of vertices that edges join; self-loops are not eligible.
    # 2. Order the eligible pairs by a random word keyed by their original ids: the first are held out to validate, the
    #    next to test.
    # 3. Drop all edges of the held-out pairs, and list them as links.
    links = all_triples(graph)
    original = links if graph.ids is None else with_original_ids(links, graph.ids)
    low, high = original[:, :2].amin(1), original[:, :2].amax(1)
    pairs, pair_of_edge = (low * graph.num_vertices + high).unique(return_inverse=True)
    low, high = pairs // graph.num_vertices, pairs % graph.num_vertices
    eligible = (low != high).nonzero()[:, 0]
    order = keyed_words(key(seed, HOLD_OUT), low[eligible], high[eligible]).argsort(stable=True)
    num_val, num_test = round(VAL_SHARE * len(order)), round(TEST_SHARE * len(order))
    if not num_val or num_val + num_test == len(order):
        raise InputError(f"{graph.name} has {len(order)} links, too few to hold out 5 % of them: give a larger graph")
    split_of_pair = torch.zeros(len(pairs), dtype=torch.int8)
    split_of_pair[eligible[order[:num_val]]] = 1
    split_of_pair[eligible[order[num_val : num_val + num_test]]] = 2
    split_of_edge = split_of_pair[pair_of_edge]
    listed = links[:, 2] < max(len(forward_relations(graph)), 1)
    if is_symmetric(graph):
        listed = original[:, 0] < original[:, 1]
    val, test = (links[(split_of_edge == number) & listed].unique(dim=0) for number in (1, 2))
    remains = split_of_edge == 0
    return replace(
        graph,
        in_edges=keep_edges(graph.in_edges, remains),
        edge_type=None if graph.edge_type is None else graph.edge_type[remains],
        edge_features=None if graph.edge_features is None else graph.edge_features[remains],
        val_links=val,
        test_links=test,
        trusted=True,
    )


def keep_edges(in_edges: Adjacency, mask: Tensor) -> Adjacency:
    """Return the edges that a mask selects.

    Args:
        in_edges: Edges, with weights if there are any.
        mask: bool [E].
    """
    num_before = torch.zeros(in_edges.num_edges + 1, dtype=torch.int64)
    torch.cumsum(mask, 0, out=num_before[1:])
    return Adjacency(
        indptr=num_before[in_edges.indptr],
        indices=in_edges.indices[mask],
        num_sources=in_edges.num_sources,
        weight=None if in_edges.weight is None else in_edges.weight[mask],
    )


def require_links(graph: Graph) -> None:
    """Check that a link predictor can be trained and tested: the graph has edges, and links held out of them.

    Warns (DataWarning) if held-out links that the data set states are edges too, because edges carry messages.

    Raises:
        InputError: If edges or held-out links are missing.
    """
    if not graph.num_edges:
        raise InputError(f"{graph.name} has no edges: --task link trains on edges, give a graph with some")
    if graph.test_links is None or not len(graph.test_links):
        raise InputError(
            f"{graph.name} has no test_links: add some, or leave val_links out too, and weft holds out random edges"
        )
    if max(len(graph.relations), 1) * graph.num_vertices**2 >= 1 << 63:
        raise InputError(
            f"{graph.name} is too large for --task link: vertices^2 x relations must be below 2^63, use a smaller graph"
        )
    relations = forward_relations(graph)
    size = (graph.num_vertices, max(len(relations), 1))
    links = triples(graph)
    if not relations and not (links[:, 0] != links[:, 1]).any():
        raise InputError(f"{graph.name} has self-loops only: --task link trains on edges between different vertices")
    edges = encode_links(links if relations else torch.cat([links, reversed_links(links)]), *size)
    held_out = [links for links in (graph.val_links, graph.test_links) if links is not None]
    leaked = int(torch.isin(encode_links(torch.cat(held_out), *size), edges).sum())
    if leaked:
        warnings.warn(
            f"{graph.name}: {leaked} held-out links are edges too, so scores are too high: remove them from the edges",
            DataWarning,
            stacklevel=4,
        )


def require_edge_labels(graph: Graph) -> None:
    """Check that a model of labels of edges can be trained: at least one labelled edge trains.

    Warns (DataWarning) if all edges to validate or test on are edges of the graph too, because edges carry messages. A
    few may be, if there are several edges between two vertices.

    Raises:
        InputError: If there are no labels of edges, or none to train on.
    """
    labels = graph.labels("edge")
    assert isinstance(labels, EdgeLabels)
    if not len(labels.training_pairs()):
        raise InputError(f"{graph.name} has no labelled edge to train on: set some of edge_split to 0 (train)")
    size = (graph.num_vertices, max(len(graph.relations), 1))
    edges = encode_links(all_triples(graph), *size)
    for name, mask in (("val_mask", labels.val_mask), ("test_mask", labels.test_mask)):
        if mask.any() and torch.isin(encode_links(labels.edges[mask], *size), edges).all():
            warnings.warn(
                f"{graph.name}: all edges of edge_labels.{name} are edges of the graph too, so scores are too high: "
                "remove them from the edges",
                DataWarning,
                stacklevel=4,
            )

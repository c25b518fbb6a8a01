"""Small graphs with everything that a real graph may have: loops, duplicate edges, isolated vertices, types."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from weft.data import Graph, with_inverse_relations

NUM_FEATURES, NUM_FEATURES_SPARSE, NUM_CLASSES = 7, 300, 5


def make_graph(
    num_vertices: int,
    *,
    weighted: bool = False,
    edge_features: int = 0,
    multilabel: bool = False,
    sparse: bool = False,
) -> Graph:
    """Return a directed graph with self-loops, duplicate edges and, if it has several vertices, an isolated one.

    sparse: each vertex has many features, of which at most 5 are not zero.
    """
    random = torch.Generator().manual_seed(3)
    linked = max(num_vertices - 1, 1)
    source = torch.randint(0, linked, (5 * num_vertices,), generator=random)
    target = torch.randint(0, linked, (5 * num_vertices,), generator=random)
    source = torch.cat([source, torch.tensor([0, 1, 1]), source[:3]])
    target = torch.cat([target, torch.tensor([0, 1, 1]), target[:3]])
    y = torch.randint(0, NUM_CLASSES, (num_vertices,), generator=random)
    y[0] = NUM_CLASSES - 1
    labels = (
        torch.nn.functional.one_hot(y, NUM_CLASSES) | torch.nn.functional.one_hot(y.flip(0), NUM_CLASSES)
        if multilabel
        else y
    )
    train = torch.arange(num_vertices) % 3 != 1
    return Graph.from_edges(
        source,
        target,
        num_vertices=num_vertices,
        weight=torch.rand(len(source), generator=random) + 0.1 if weighted else None,
        edge_features=torch.randn(len(source), edge_features, generator=random) if edge_features else None,
        x=torch.randn(num_vertices, NUM_FEATURES, generator=random)
        if not sparse
        else sparse_features(num_vertices, random),
        y=labels.float() if multilabel else labels,
        train_mask=train,
        val_mask=~train,
    )


def with_few_labels(graph: Graph, number: int, num_scored: int = 0) -> Graph:
    """Return the graph with only `number` training vertices and `num_scored` (0: as many) validation vertices."""
    assert graph.train_mask is not None
    vertices, masks = graph.train_mask.nonzero().view(-1), torch.zeros(2, graph.num_vertices, dtype=torch.bool)
    for side, (mask, count) in enumerate(zip(masks, (number, num_scored or number), strict=True)):
        mask[vertices[side + torch.arange(count) * len(vertices) // count]] = True
    return replace(graph, train_mask=masks[0], val_mask=masks[1])


def sparse_features(num_vertices: int, random: torch.Generator) -> Tensor:
    columns = torch.randint(0, NUM_FEATURES_SPARSE, (num_vertices, 5), generator=random)
    return torch.zeros(num_vertices, NUM_FEATURES_SPARSE).scatter_(
        1, columns, torch.randn(columns.shape, generator=random)
    )


def make_typed_graph(num_vertices: int, kind: str, *, sparse: bool = False) -> Graph:
    """Return a graph of three vertex types, the second without in-edges, and five relations, one without edges.

    kind: 'x': all types have features of one width; 'some': two types have features, of different widths; 'none': no
    features; 'one': a single vertex type, no features. Some edges are duplicates, also between relations, and one
    relation has self-loops. sparse: most features are zero.
    """

    def make_features(count: int, width: int) -> Tensor:
        x = torch.randn(count, width, generator=random)
        return x * (torch.rand(x.shape, generator=random) < 0.08) if sparse else x

    random = torch.Generator().manual_seed(4)
    offsets = (0, num_vertices // 2, 2 * num_vertices // 3, num_vertices)
    names, endpoints = ("a", "b", "c"), ((0, 0), (1, 0), (2, 0), (0, 2), (1, 2))
    edges = []
    for number, (start, end) in enumerate(endpoints[:-1]):
        size = 2 * num_vertices
        source, target = (torch.randint(offsets[i], offsets[i + 1], (size,), generator=random) for i in (start, end))
        edges.append(torch.stack([source, target, torch.full((size,), number)]))
    merged = torch.cat([*edges, edges[0][:, :5]], 1)
    y = torch.randint(0, NUM_CLASSES, (num_vertices,), generator=random)
    y[0], y[offsets[1] :] = NUM_CLASSES - 1, -1
    widths = (4, 3) if kind == "some" else ()
    types = (names, offsets) if kind != "one" else (("a",), (0, num_vertices))
    type_names = dict(enumerate(names)) if kind != "one" else dict.fromkeys(range(3), "a")
    train = (torch.arange(num_vertices) % 3 != 1) & (y >= 0)
    return Graph.from_edges(
        merged[0],
        merged[1],
        num_vertices=num_vertices,
        x=make_features(num_vertices, NUM_FEATURES) if kind == "x" else None,
        y=y,
        train_mask=train,
        val_mask=~train & (y >= 0),
        edge_type=merged[2],
        relations=tuple(
            f"{type_names[start]}|r{number}|{type_names[end]}" for number, (start, end) in enumerate(endpoints)
        ),
        vertex_types=types[0],
        type_offsets=types[1],
        features={
            name: make_features(offsets[i + 1] - offsets[i], width)
            for i, (name, width) in enumerate(zip(names, widths, strict=False))
        },
    )


def make_named_relations(graph: Graph) -> Graph:
    """Return the graph with inverse relations, named by Python identifiers, as `to_hetero` requires."""
    both = with_inverse_relations(graph)
    return replace(both, relations=tuple(name.replace("inverse of ", "rev_") for name in both.relations))

"""Graphs drawn by hypothesis, and assertions that two graphs are equal or that an error message is one line."""

from __future__ import annotations

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from torch import Tensor

from weft.data import Graph
from weft.data.checks.tensor_checks import LINKS, MASKS
from weft.utils.errors import InputError

# Saving flushes to disk, and other programs share the machine: no deadline, and not too many graphs.
CALM = settings(deadline=None, max_examples=50)


def same_tensor(field: str, left: Tensor | None, right: Tensor | None) -> None:
    assert (left is None) == (right is None), field
    if left is not None and right is not None:
        assert left.dtype == right.dtype, field
        assert torch.equal(left, right), field


def same_graph(left: Graph, right: Graph) -> None:
    """Assert that two graphs agree in every value, dtype and name, whether in memory or in files."""
    for field in ("x", "y", *MASKS, *LINKS, "edge_type", "edge_features", "ids"):
        same_tensor(field, getattr(left, field), getattr(right, field))
    for field in ("indptr", "indices", "weight"):
        same_tensor(field, getattr(left.in_edges, field), getattr(right.in_edges, field))
        same_tensor(field, getattr(left.in_edges.transpose, field), getattr(right.in_edges.transpose, field))
    same_tensor("edge_ids", left.in_edges.transposed_edge_ids, right.in_edges.transposed_edge_ids)
    assert left.in_edges.num_sources == right.in_edges.num_sources
    for field in ("name", "relations", "vertex_types", "type_offsets", "fingerprint", "num_classes"):
        assert getattr(left, field) == getattr(right, field), field
    assert left.features.keys() == right.features.keys()
    for name, tensor in left.features.items():
        same_tensor(name, tensor, right.features[name])


def assert_one_line(error: pytest.ExceptionInfo[InputError], *parts: object) -> None:
    """Assert that an error message is one line, not too long, that contains all parts."""
    text = str(error.value)
    assert "\n" not in text
    for part in parts:
        assert str(part) in text, f"{part!r} is not in: {text}"
    assert len(text) < 480, text


@st.composite
def graphs(draw: st.DrawFn) -> Graph:
    """Draw small graphs: directed, with loops, duplicates, isolated vertices, or nothing at all; half of them typed."""
    counts = draw(st.lists(st.integers(0, 6), min_size=2, max_size=3)) if draw(st.booleans()) else []
    num_vertices = sum(counts) if counts else draw(st.integers(0, 12))
    seed = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    edges, edge_type, relations, types, offsets = drawn_edges(draw, seed, counts, num_vertices)

    def some(tensor: Tensor) -> Tensor | None:
        return tensor if draw(st.booleans()) else None

    part = torch.randint(0, 4, (num_vertices,), generator=seed)
    multilabel = draw(st.booleans())
    y = torch.randint(0, 2, (num_vertices, 3), generator=seed) if multilabel else part - 1
    x = some(torch.randn(num_vertices, 3, generator=seed))
    features = {}
    if x is None and types and counts[0]:
        features = {types[0]: torch.randn(counts[0], 2, generator=seed)}
    return Graph.from_edges(
        edges[0],
        edges[1],
        num_vertices=num_vertices,
        weight=some(torch.rand(edges.shape[1], generator=seed)),
        edge_features=some(torch.randn(edges.shape[1], 2, generator=seed)),
        x=x,
        y=some(y),
        train_mask=some(part == 1),
        val_mask=some(part == 2),
        test_mask=some(part == 3),
        name="drawn",
        edge_type=edge_type,
        relations=relations,
        vertex_types=types,
        type_offsets=offsets,
        features=features,
    )


def drawn_edges(
    draw: st.DrawFn, seed: torch.Generator, counts: list[int], num_vertices: int
) -> tuple[Tensor, Tensor | None, tuple[str, ...], tuple[str, ...], tuple[int, ...]]:
    """Draw (edges [2, E], edge types, relations, vertex types, offsets); an untyped graph has edges only."""
    if not counts:
        num_edges = draw(st.integers(0, 30)) if num_vertices else 0
        return torch.randint(0, max(num_vertices, 1), (2, num_edges), generator=seed), None, (), (), ()
    types = tuple("abc"[: len(counts)])
    offsets = (0, *torch.tensor(counts).cumsum(0).tolist())
    relations = tuple(f"{types[i]}|r{k}|{types[j]}" for k, (i, j) in enumerate([(0, 1), (0, 0), (1, 0)]))
    parts = []
    for k, (i, j) in enumerate([(0, 1), (0, 0), (1, 0)]):
        size = draw(st.integers(0, 8)) if counts[i] and counts[j] else 0
        source = offsets[i] + torch.randint(0, max(counts[i], 1), (size,), generator=seed)
        target = offsets[j] + torch.randint(0, max(counts[j], 1), (size,), generator=seed)
        parts.append(torch.stack([source, target, torch.full((size,), k)]))
    merged = torch.cat(parts, 1)
    merged = merged[:, torch.randperm(merged.shape[1], generator=seed)]
    return merged[:2], merged[2], relations, types, offsets

"""Vertex types: one range of ids for all of them, labels and features placed in it, and what a model asks of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

# The type of all vertices in a graph that has relations and no vertex types.
VERTEX = "vertex"


class TypedShape(NamedTuple):
    """As much of a graph's types as a model needs.

    num_relations: 0 of a graph whose edges have no types.
    featured, num_embedded: of a graph without x, (vertices, features) of each type that has some, in the order of the
    types, and the number of the other vertices, which a model learns a row each for.
    """

    num_relations: int = 0
    featured: tuple[tuple[int, int], ...] = ()
    num_embedded: int = 0

    @property
    def has_input(self) -> bool:
        """Whether a model has to make rows of one width first."""
        return bool(self.featured or self.num_embedded)

    @property
    def mean_width(self) -> float:
        """Features of a vertex of a graph without x, on average."""
        count = self.num_embedded + sum(count for count, _ in self.featured)
        return sum(count * width for count, width in self.featured) / max(count, 1)


UNTYPED = TypedShape()
"""Of a graph with x and without relations."""


def vertex_relations(names: Sequence[str]) -> tuple[str, ...]:
    """Relation names of a graph with one kind of vertices."""
    return tuple(f"{VERTEX}|{name.replace('|', '/')}|{VERTEX}" for name in names)


def put_rows(parts: Mapping[int, Tensor], num_rows: int, fill: int) -> Tensor:
    """A tensor of `num_rows` rows that holds each part from its first row on, and `fill` elsewhere."""
    some = next(iter(parts.values()))
    result = torch.full((num_rows, *some.shape[1:]), fill, dtype=some.dtype)
    for first, part in parts.items():
        result[first : first + len(part)] = part
    return result


def merge_features(vertex_types: Sequence[str], found: Mapping[str, Tensor]) -> tuple[Tensor | None, dict[str, Tensor]]:
    """(x, features): one matrix where every type has features of one width, else the features per type."""
    widths = {part.shape[1:] for part in found.values()}
    if vertex_types and len(found) == len(vertex_types) and len(widths) == 1:
        return torch.cat([found[name] for name in vertex_types]), {}
    return None, dict(found)

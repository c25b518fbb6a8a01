"""What readers of typed graphs share: one range of ids for all vertex types, and labels and features placed in it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

# The type of all vertices in a graph that has relations and no vertex types.
VERTEX = "vertex"


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

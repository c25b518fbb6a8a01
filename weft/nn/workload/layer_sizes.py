"""How much of everything a rank has, aggregate by aggregate: what the costs of a model's maps depend on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from weft.data import Adjacency


class BlockSize(NamedTuple):
    """The size of an aggregate's block, for a layer that asks for its edges."""

    sources: int
    targets: int
    edges: int
    loops: int
    """Those of the edges that lead from a vertex to itself."""

    @classmethod
    def of(cls, block: Adjacency) -> BlockSize:
        """That of edges whose targets are the first of their sources."""
        source, target = block.edges()
        return cls(block.num_sources, block.num_targets, block.num_edges, int((source == target).sum()))

    @classmethod
    def of_targets(cls, in_edges: Adjacency, targets: slice | Tensor) -> BlockSize:
        """That of a graph's edges into some vertices, a range or int64, with the rows of all vertices as sources."""
        source, target = in_edges.edges()
        chosen = target.new_zeros(in_edges.num_targets, dtype=torch.bool)
        chosen[targets] = True
        here = chosen[target]
        loops = here & (source == target)
        return cls(in_edges.num_sources, int(chosen.sum()), int(here.sum()), int(loops.sum()))


@dataclass(frozen=True, kw_only=True)
class LayerSizes:
    """The sizes of one rank's share of the work."""

    rows: tuple[int, ...]
    """The rows before each aggregate, and in the end those of the result."""
    featured: tuple[int, ...] = ()
    """In a graph without x, of the first rows those of each vertex type that has features."""
    num_embedded: int = 0
    """And those of the types that have none."""
    relation_rows: tuple[int, ...] = ()
    """In a graph with relations, by aggregate: pairs of a target and a relation by which it has an in-edge."""
    blocks: tuple[BlockSize, ...] = ()
    """By aggregate, for layers that ask for the edges."""

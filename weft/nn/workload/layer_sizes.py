"""Sizes of each layer on a rank, on which the costs of a model's dense layers depend."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from weft.data import Adjacency

TARGETS_AT_ONCE = 1 << 17
"""Number of vertices whose self-loops are counted at once."""


class BlockSize(NamedTuple):
    """Size of the block of one aggregate, for a layer that reads the edges itself."""

    sources: int
    """Number of source vertices."""
    targets: int
    """Number of target vertices."""
    edges: int
    """Number of edges."""
    loops: int
    """Number of self-loops among the edges."""

    @classmethod
    def of(cls, block: Adjacency) -> BlockSize:
        """Return the size of a block whose targets are its first sources."""
        source, target = block.edges()
        return cls(block.num_sources, block.num_targets, block.num_edges, int((source == target).sum()))

    @classmethod
    def of_targets(cls, in_edges: Adjacency, targets: slice | Tensor) -> BlockSize:
        """Return the size of the block of all in-edges of some vertices, with all vertices as sources.

        Args:
            in_edges: In-edges of the graph.
            targets: The vertices, a range or int64.
        """
        is_target = torch.zeros(in_edges.num_targets, dtype=torch.bool)
        is_target[targets] = True
        num_loops = 0
        for vertices in torch.arange(in_edges.num_targets).split(TARGETS_AT_ONCE):  # 16 bytes for each of their edges
            target = vertices.repeat_interleave(in_edges.degree[vertices])
            first = int(in_edges.indptr[vertices[0]])
            num_loops += int((is_target[target] & (in_edges.indices[first : first + len(target)] == target)).sum())
        num_edges = int(in_edges.degree[is_target].sum())
        return cls(in_edges.num_sources, int(is_target.sum()), num_edges, num_loops)

    def by_relation(self, relation: Tensor, is_loop: Tensor, num_relations: int) -> tuple[BlockSize, ...]:
        """Return the size of the edges of each relation, with all sources and targets of the block.

        Args:
            relation: Relation of each edge, integer [E].
            is_loop: Mask of the self-loops among the edges, bool [E].
            num_relations: Number of relations.
        """
        edges, loops = (torch.bincount(types, minlength=num_relations) for types in (relation, relation[is_loop]))
        counts = zip(edges.tolist(), loops.tolist(), strict=True)
        return tuple(self._replace(edges=num_edges, loops=num_loops) for num_edges, num_loops in counts)


@dataclass(frozen=True, kw_only=True)
class LayerSizes:
    """Number of rows of a rank before and after each aggregate."""

    rows: tuple[int, ...]
    """Number of rows before each aggregate, and number of rows of the result."""
    featured: tuple[int, ...] = ()
    """Number of first rows of each vertex type with features, in a graph without x."""
    num_embedded: int = 0
    """Number of first rows of the vertex types without features, in a graph without x."""
    num_stored: int = 0
    """Number of embedding rows that the rank stores."""
    relation_rows: tuple[int, ...] = ()
    """Number of relation rows of each aggregate (pairs of a target and a relation of its in-edges), in a graph with
    relations."""
    blocks: tuple[BlockSize, ...] = ()
    """Size of the block of each aggregate; empty if no layer reads the edges itself."""
    relation_blocks: tuple[tuple[BlockSize, ...], ...] = ()
    """Size of the edges of each relation in these blocks, in a graph with relations."""

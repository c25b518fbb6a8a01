"""Pairs (vertex, relation): the rows that typed edges are aggregated to, and their way back to the vertices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from weft.data import Adjacency
from weft.kernels import Scale, spmm
from weft.nn.dense import linear


@dataclass(frozen=True, kw_only=True)
class Pairs:
    """The M pairs of a vertex and a relation by which it has an in-edge: by part of the vertices, relation, vertex.

    Each part is a range of the targets; one of them is at home here, with m pairs. So there are never more rows than
    edges, those of a relation lie side by side, and those of a part do.

    in_edges: of all pairs, from s sources to M targets. bounds: where the pairs of each part begin.
    counts: how many pairs of each relation are at home. sums: the edges from these pairs, m sources, to the n targets.
    """

    in_edges: Adjacency
    bounds: tuple[int, ...]
    counts: tuple[int, ...]
    sums: Adjacency

    @classmethod
    def of(
        cls, adjacency: Adjacency, edge_type: Tensor, num_relations: int, bounds: Sequence[int] = (), home: int = 0
    ) -> Pairs:
        """The pairs of edges [E] with these types [E]; bounds: of the parts of the targets; none: all are one part."""
        device, num_targets = adjacency.device, adjacency.num_targets
        ends = torch.tensor(bounds[1:] or [num_targets])
        target = torch.arange(num_targets).repeat_interleave(adjacency.degree.cpu(), output_size=adjacency.num_edges)
        group = torch.searchsorted(ends, target, right=True) * num_relations + edge_type.cpu()
        key, order = (group * num_targets + target).sort(stable=True)
        key, num_edges = key.unique_consecutive(return_counts=True)
        in_edges = Adjacency(
            indptr=torch.cat([num_edges.new_zeros(1), num_edges.cumsum(0)]),
            indices=adjacency.indices.cpu()[order],
            num_sources=adjacency.num_sources,
        )
        counts = torch.bincount(key // max(num_targets, 1), minlength=len(ends) * num_relations)
        counts = counts.view(len(ends), num_relations)
        starts = (0, *counts.sum(1).cumsum(0).tolist())
        first, last = starts[home : home + 2]
        begin = bounds[home] if bounds else 0
        sums = Adjacency.from_edges(
            torch.arange(last - first),
            key[first:last] % max(num_targets, 1) - begin,
            num_sources=last - first,
            num_targets=int(ends[home]) - begin,
        )
        return cls(
            in_edges=in_edges.to(device),
            bounds=starts,
            counts=tuple(counts[home].tolist()),
            sums=sums.to(device),
        )

    @cached_property
    def targets(self) -> Tensor:
        """The vertex of each pair at home: int64 [m]."""
        source, target = self.sums.edges()
        return target[source.argsort()]

    def mean(self, x: Tensor) -> Tensor:
        """The mean of x [s, F] over the in-edges of every pair: [M, F]."""
        return spmm(self.in_edges, x, scale=Scale(target=self.in_edges.degree.to(x.dtype).reciprocal()))

    def map(self, z: Tensor, weight: Tensor) -> Tensor:
        """The sum over a vertex's pairs of `z_(v,r) W_r`: z [m, B i], weight [R, B, i, o] -> [n, B o].

        W_r is block-diagonal, with B blocks of i x o.
        """
        parts = zip(z.split(self.counts), weight.unbind(0), strict=True)
        return spmm(self.sums, torch.cat([map_blocks(rows, blocks) for rows, blocks in parts]))


def map_blocks(rows: Tensor, blocks: Tensor) -> Tensor:
    """Rows [m, B i] times the block-diagonal matrix of blocks [B, i, o]: [m, B o]."""
    num_blocks, height, width = blocks.shape
    if num_blocks == 1:
        return linear(rows, blocks[0])
    parts = rows.view(len(rows), num_blocks, height).transpose(0, 1)
    return torch.bmm(parts, blocks).transpose(0, 1).reshape(len(rows), num_blocks * width)

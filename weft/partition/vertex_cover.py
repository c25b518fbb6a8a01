"""The least halo: the fewest rows that cover the edges between parts, each its source's row or a partial result.

An edge u -> v from another part is covered by u's row, or by v's partial result over the sources that the other part
has. The fewest rows are a least vertex cover of the bipartite graph of the edges between the two parts, which a maximum
matching gives (Koenig 1931; by Hopcroft and Karp 1973, csrc/cover.h). Source rows alone are NeutronStar's halo, partial
results alone GSplit's pre-aggregation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from weft.data import Adjacency
from weft.runtime.native import _native


@dataclass(frozen=True, kw_only=True)
class Cover:
    """A sum's in-edges on one part, over its inputs and the fewest rows that other parts send.

    block: the edges; its sources are the inputs and then those rows, by part: sources' rows, then partial results, each
    by vertex. A partial result is an edge of weight 1.
    asked: what those rows are, as targets: each has one of the fetched vertices as its source, or is the sum over
    several, by the edges' weights. received: how many rows of each part. summed: how many edges each part sums up.
    """

    block: Adjacency
    asked: Adjacency
    received: tuple[int, ...]
    summed: tuple[int, ...]

    @property
    def edges_asked(self) -> tuple[int, ...]:
        """The edges of `asked`, by part."""
        ends = torch.tensor([0, *self.received]).cumsum(0)
        return tuple(self.asked.indptr[ends].diff().tolist())

    @classmethod
    def of(cls, block: Adjacency, received: Sequence[int], num_threads: int | None = None) -> Cover:
        """The least cover of a block whose last sources are fetched, `received` of them from each part."""
        num_parts, num_inputs = len(received), block.num_sources - sum(received)
        taken = least_cover(block.indptr, block.indices, num_inputs, received, num_threads)
        owner = torch.arange(num_parts).repeat_interleave(torch.tensor(received))
        source, target = block.edges()
        summed = (source >= num_inputs).nonzero().view(-1)
        summed = summed[~taken[source[summed] - num_inputs]]
        vertex = source[summed] - num_inputs
        partials, partial = (owner[vertex] * block.num_targets + target[summed]).unique(return_inverse=True)
        by_part = torch.bincount(owner[taken], minlength=num_parts)
        partials_by_part = torch.bincount(partials // max(block.num_targets, 1), minlength=num_parts)

        # places among the rows received: a source's follows the partial results of the parts before, and the reverse
        place = taken.cumsum(0) - 1 + (partials_by_part.cumsum(0) - partials_by_part)[owner]
        partial_part = partials // max(block.num_targets, 1)
        partial_place = torch.arange(len(partials)) + by_part.cumsum(0)[partial_part]

        kept = torch.ones(block.num_edges, dtype=torch.bool)
        kept[summed] = False
        source, target = source[kept], target[kept]
        fetched = source >= num_inputs
        source[fetched] = num_inputs + place[source[fetched] - num_inputs]
        num_rows, weight = int(taken.sum()) + len(partials), block.weight
        taken_vertices = taken.nonzero().view(-1)
        return cls(
            block=Adjacency.from_edges(
                torch.cat([source, num_inputs + partial_place]),
                torch.cat([target, partials % max(block.num_targets, 1)]),
                num_sources=num_inputs + num_rows,
                num_targets=block.num_targets,
                weight=None if weight is None else torch.cat([weight[kept], weight.new_ones(len(partials))]),
            ),
            asked=Adjacency.from_edges(
                torch.cat([taken_vertices, vertex]),
                torch.cat([place[taken], partial_place[partial]]),
                num_sources=len(owner),
                num_targets=num_rows,
                weight=None if weight is None else torch.cat([weight.new_ones(len(taken_vertices)), weight[summed]]),
            ),
            received=tuple((by_part + partials_by_part).tolist()),
            summed=tuple(torch.bincount(owner[vertex], minlength=num_parts).tolist()),
        )


def least_cover(
    indptr: Tensor, indices: Tensor, first: int, received: Sequence[int], num_threads: int | None = None
) -> Tensor:
    """Which sources of other parts send their rows in the least cover of the edges from each part, bool [h].

    The edges of all others are left to partial results. Rows hold the sources of a target; those from `first` on belong
    to other parts, `received` to each. Of all least covers it is the one with most source rows. Tensors on the CPU.
    """
    bounds = torch.tensor([0, *received]).cumsum(0)
    taken = torch.empty(int(bounds[-1]), dtype=torch.uint8)
    threads = min(num_threads or torch.get_num_threads(), max(len(received), 1))
    _native.least_cover(indptr.contiguous(), indices.contiguous(), first, bounds, taken, threads)
    return taken.bool()

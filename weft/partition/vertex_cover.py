"""Partial aggregation by minimum vertex cover ("least halo"): the fewest rows that cover the edges between parts.

An edge u -> v from another part is covered by u's row, or by v's partial result over the sources that the other part
owns. The fewest rows are a minimum vertex cover of the bipartite graph of the edges between the two parts, which a
maximum matching gives (Koenig 1931; matching by Hopcroft and Karp 1973, csrc/cover.h). Sending only source rows is
NeutronStar's halo; sending only partial results is GSplit's pre-aggregation.
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
    """In-edges of a sum on one part, over its inputs and the fewest rows that other parts can send."""

    block: Adjacency
    """Edges over the inputs and then the received rows: by part, first source rows, then partial results.

    Both are sorted by vertex. The edge from a partial result has weight 1.
    """
    requested: Adjacency
    """Edges that define the received rows: sources are the fetched vertices, targets the received rows.

    A row has one source, whose row is sent, or several, whose weighted sum is sent.
    """
    received: tuple[int, ...]
    """Number of received rows from each part."""
    summed: tuple[int, ...]
    """Number of edges that each part sums into partial results."""

    @property
    def requested_edges(self) -> tuple[int, ...]:
        """Number of edges in `requested` to the rows that are received from each part."""
        bounds = torch.tensor([0, *self.received]).cumsum(0)
        return tuple(self.requested.indptr[bounds].diff().tolist())

    @classmethod
    def of(cls, block: Adjacency, received: Sequence[int], num_threads: int | None = None) -> Cover:
        """Return the minimum cover of a block whose last sources are fetched.

        Args:
            block: In-edges over inputs and fetched vertices.
            received: Number of fetched vertices from each part.
            num_threads: Number of threads. Default: PyTorch's.
        """
        # 1. Choose the fetched vertices whose own rows are sent.
        # 2. The edges from other fetched vertices are summed by the sources' part; each pair of part and target is one
        #    partial result.
        # 3. Number the received rows by part: source rows, then partial results.
        # 4. Build the block over these rows, and the definition of the rows.
        num_parts, num_inputs = len(received), block.num_sources - sum(received)
        is_sent = least_cover(block.indptr, block.indices, num_inputs, received, num_threads)
        owner = torch.arange(num_parts).repeat_interleave(torch.tensor(received))
        source, target = block.edges()
        summed = (source >= num_inputs).nonzero().view(-1)
        summed = summed[~is_sent[source[summed] - num_inputs]]
        vertex = source[summed] - num_inputs
        partial_keys, partial_of_edge = (owner[vertex] * block.num_targets + target[summed]).unique(return_inverse=True)
        sent_by_part = torch.bincount(owner[is_sent], minlength=num_parts)
        partials_by_part = torch.bincount(partial_keys // max(block.num_targets, 1), minlength=num_parts)

        # Position among the received rows: a source row follows the partial results of all parts before its own part; a
        # partial result follows the source rows of all parts up to its own.
        position = is_sent.cumsum(0) - 1 + (partials_by_part.cumsum(0) - partials_by_part)[owner]
        partial_part = partial_keys // max(block.num_targets, 1)
        partial_position = torch.arange(len(partial_keys)) + sent_by_part.cumsum(0)[partial_part]

        direct = torch.ones(block.num_edges, dtype=torch.bool)
        direct[summed] = False
        source, target = source[direct], target[direct]
        fetched = source >= num_inputs
        source[fetched] = num_inputs + position[source[fetched] - num_inputs]
        num_rows, weight = int(is_sent.sum()) + len(partial_keys), block.weight
        sent_vertices = is_sent.nonzero().view(-1)
        return cls(
            block=Adjacency.from_edges(
                torch.cat([source, num_inputs + partial_position]),
                torch.cat([target, partial_keys % max(block.num_targets, 1)]),
                num_sources=num_inputs + num_rows,
                num_targets=block.num_targets,
                weight=None if weight is None else torch.cat([weight[direct], weight.new_ones(len(partial_keys))]),
            ),
            requested=Adjacency.from_edges(
                torch.cat([sent_vertices, vertex]),
                torch.cat([position[is_sent], partial_position[partial_of_edge]]),
                num_sources=len(owner),
                num_targets=num_rows,
                weight=None if weight is None else torch.cat([weight.new_ones(len(sent_vertices)), weight[summed]]),
            ),
            received=tuple((sent_by_part + partials_by_part).tolist()),
            summed=tuple(torch.bincount(owner[vertex], minlength=num_parts).tolist()),
        )


def least_cover(
    indptr: Tensor, indices: Tensor, first: int, received: Sequence[int], num_threads: int | None = None
) -> Tensor:
    """Return the fetched vertices whose rows are sent in the minimum cover, bool [h]; other edges need partial results.

    Among all minimum covers, this is the one with the most source rows. All tensors are on the CPU.

    Args:
        indptr: Row pointers of the block.
        indices: Sources of the block.
        first: First source that is fetched.
        received: Number of fetched vertices from each part.
        num_threads: Number of threads. Default: PyTorch's.
    """
    bounds = torch.tensor([0, *received]).cumsum(0)
    is_sent = torch.empty(int(bounds[-1]), dtype=torch.uint8)
    threads = min(num_threads or torch.get_num_threads(), max(len(received), 1))
    _native.least_cover(indptr.contiguous(), indices.contiguous(), first, bounds, is_sent, threads)
    return is_sent.bool()

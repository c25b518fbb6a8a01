"""Pre-sampling: batches that are sampled before training, to estimate its accesses (as in GNNLab, Yang et al. 2022).

The weights of a partition and the rows of a cache then follow the actual sampling: fanouts, method, batch size.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from weft.strategies.split.sampler import BatchSampler, exchange_requests_locally

EPOCH = -1
"""Epoch of the random keys, which no training has."""
MAX_BATCHES = 10
"""Number of batches.

With batches of 1,024 vertices, a single one balances the ranks as well, and more than 10 do not reduce cache misses.
"""


@dataclass(frozen=True, kw_only=True)
class PreSampling:
    """Number of accesses to each vertex."""

    reads: Tensor
    """Number of times that a rank's part of a batch began with the vertex's features, int64 [N]."""
    edges: Tensor
    """Number of in-edges sampled for the vertex at all hops, int64 [N]."""

    @property
    def weights(self) -> Tensor:
        """Weights of the vertices for a partition with an even number of sampled edges, int64 [N], at least 1.

        Vertices without samples count for up to a hundredth of the sum, because evaluations compute them as well.
        """
        return self.edges * (100 * len(self.edges) // max(int(self.edges.sum()), 1) + 1) + 1


def pre_sample(sampler: BatchSampler) -> PreSampling:
    """Sample the first batches of an epoch for all ranks in one process, each independently of the one before."""
    sampler = replace(sampler, dependency=1)
    num_vertices = sampler.graph.num_vertices
    reads, edges = torch.zeros(num_vertices, dtype=torch.int64), torch.zeros(num_vertices, dtype=torch.int64)
    for number, vertices in enumerate(sampler.batches(EPOCH)[:MAX_BATCHES]):
        for batch in exchange_requests_locally(
            [sampler.sample(vertices, rank, EPOCH, number) for rank in range(sampler.size)]
        ):
            reads[batch.rows] += 1
            for hop in batch.hops:
                edges[batch.rows[: hop.block.num_targets]] += hop.block.degree
    return PreSampling(reads=reads, edges=edges)

"""What a training is going to draw, by some batches drawn before it that no epoch has (as in GNNLab, Yang et al. 2022).

So weights of a partition and the rows of a cache follow the sampling that there is: fanouts, method, batch size.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from weft.strategies.split.sampler import BatchSampler, exchange_requests_locally

EPOCH = -1  # keys its draws apart from those of every epoch of a training
MAX_BATCHES = 10  # of 1,024 vertices: with one the loads of ranks are as even, and more make caches miss no less


@dataclass(frozen=True, kw_only=True)
class PreSampling:
    """How often vertices are drawn, by number."""

    reads: Tensor
    """int64 [N]: how often a rank's share of a batch begins with the vertex's features."""
    edges: Tensor
    """int64 [N]: in-edges drawn for the vertex in all hops."""

    @property
    def weights(self) -> Tensor:
        """What vertices are to weigh in a partition, so that edges drawn are even: int64 [N], from 1.

        Those for which nothing is drawn count for up to a hundredth of the sum: evaluations compute them as well.
        """
        return self.edges * (100 * len(self.edges) // max(int(self.edges.sum()), 1) + 1) + 1


def pre_sample(sampler: BatchSampler) -> PreSampling:
    """Draws an epoch's first batches on all ranks, in one process; each anew, so that they show more."""
    sampler = replace(sampler, dependency=1)
    num_vertices = sampler.graph.num_vertices
    reads, edges = torch.zeros(num_vertices, dtype=torch.int64), torch.zeros(num_vertices, dtype=torch.int64)
    for number, vertices in enumerate(sampler.batches(EPOCH)[:MAX_BATCHES]):
        for drawn in exchange_requests_locally(
            [sampler.sample(vertices, rank, EPOCH, number) for rank in range(sampler.size)]
        ):
            reads[drawn.rows] += 1
            for hop in drawn.hops:
                edges[drawn.rows[: hop.block.num_targets]] += hop.block.degree
    return PreSampling(reads=reads, edges=edges)

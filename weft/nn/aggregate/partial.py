"""Merge the results of an aggregate over disjoint sets of edges into the result over all edges."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from weft.nn.aggregate.topology import Topology


class Partial(NamedTuple):
    """Result of an aggregate over a subset of the edges, with the data that merging it needs."""

    values: Tensor
    """Result [n, F]; 0 for targets that have no edge in the subset."""
    merge_state: Tensor | None = None
    """Depends on the aggregate. Maximum: id [n, F] of the edge that has it, -1 without an edge. Attention: log-sum-exp
    [n, H] of the logits, -inf without an edge. Mean: number of edges [n, 1]. Sum: None."""


def add(partials: Sequence[Partial]) -> Tensor:
    """Return the sum [n, F] of partial sums."""
    return torch.stack([partial.values for partial in partials]).sum(0)


def merge_maxima(partials: Sequence[Partial]) -> Tensor:
    """Return the maximum [n, F] of partial maxima; among equal values, the first edge gets the gradient."""
    values, edges = (torch.stack([partial[field] for partial in partials]) for field in (0, 1))  # type: ignore[misc]
    missing = edges < 0
    # Among the parts that reach the maximum, select the one whose edge comes first, as a kernel over all edges does.
    rivals = values.detach().masked_fill(missing, -torch.inf)
    losing = missing | (rivals < rivals.amax(0))
    winner = edges.masked_fill(losing, torch.iinfo(edges.dtype).max).argmin(0, keepdim=True)
    return values.gather(0, winner)[0]


def merge_softmaxes(partials: Sequence[Partial], bounds: Sequence[int]) -> Tensor:
    """Return the attention output [n, F] over all edges from its outputs over disjoint subsets.

    Each subset i contributes with the weight `exp(s_i) / sum_j exp(s_j)`, where s_i is its log-sum-exp.

    Args:
        partials: Results of the subsets, with their log-sum-exp [n, H].
        bounds: Head j has the columns bounds[j]:bounds[j + 1].
    """
    values, log_sums = (torch.stack([partial[field] for partial in partials]) for field in (0, 1))  # type: ignore[misc]
    largest = log_sums.detach().amax(0)
    # Subtract the largest, so that exp does not overflow; a target without edges (-inf everywhere) gets zeros.
    weights = (log_sums - largest.masked_fill(largest == -torch.inf, 0)).exp()
    sums = weights.sum(0)
    weights = weights / torch.where(sums == 0, 1, sums)
    widths = torch.tensor(bounds, device=values.device).diff()
    return (values * weights.repeat_interleave(widths, 2)).sum(0)


def log_sum_exp(topology: Topology, logits: Tensor) -> Tensor:
    """Return the log-sum-exp [n, H] of each target's logits; -inf, without a gradient, for targets without an edge.

    Args:
        topology: The edges.
        logits: [E, H], or [E + n, H] if the topology adds self-loops.
    """
    adjacency = topology.adjacency
    rows = adjacency.edges()[1]
    if topology.loop is not None:
        looped = topology.loop.nonzero().view(-1)
        logits = torch.cat([logits[: len(rows)], logits[len(rows) + looped]])
        rows = torch.cat([rows, looped])
    largest = logits.new_full((adjacency.num_targets, logits.shape[1]), -torch.inf)
    largest.scatter_reduce_(0, rows[:, None].expand_as(logits), logits.detach(), "amax")
    sums = torch.zeros_like(largest).index_add(0, rows, (logits - largest[rows]).exp())
    has_edge = sums > 0
    return torch.where(has_edge, torch.where(has_edge, sums, 1).log() + largest, -torch.inf)

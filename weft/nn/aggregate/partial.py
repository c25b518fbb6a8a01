"""How results of an aggregate over disjoint sets of edges combine to that over all of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from weft.nn.aggregate.topology import Topology


class Partial(NamedTuple):
    """A result over some edges, and what combining it needs besides."""

    values: Tensor
    """[n, F], 0 where a target has none of the edges."""
    beside: Tensor | None = None
    """Of a maximum, the edge [n, F] that has it, -1: none; of attention, the logits' log-sum-exp [n, H], -inf: none; of
    means, how many edges a row [n, 1] is of."""


def add(partials: Sequence[Partial]) -> Tensor:
    """Sums add."""
    return torch.stack([one.values for one in partials]).sum(0)


def merge_maxima(partials: Sequence[Partial]) -> Tensor:
    """Maxima compare; of equal ones the edge that comes first has the gradient, as over all edges."""
    values, edges = (torch.stack([one[field] for one in partials]) for field in (0, 1))  # type: ignore[misc]
    missing = edges < 0
    rivals = values.detach().masked_fill(missing, -torch.inf)
    losing = missing | (rivals < rivals.amax(0))
    winner = edges.masked_fill(losing, torch.iinfo(edges.dtype).max).argmin(0, keepdim=True)
    return values.gather(0, winner)[0]


def merge_softmaxes(partials: Sequence[Partial], bounds: Sequence[int]) -> Tensor:
    """Softmaxes merge by their largest logits and denominators; head j has columns bounds[j]:bounds[j + 1]."""
    values, logs = (torch.stack([one[field] for one in partials]) for field in (0, 1))  # type: ignore[misc]
    largest = logs.detach().amax(0)
    shares = (logs - largest.masked_fill(largest == -torch.inf, 0)).exp()
    sums = shares.sum(0)
    shares = shares / torch.where(sums == 0, 1, sums)
    widths = torch.tensor(bounds, device=values.device).diff()
    return (values * shares.repeat_interleave(widths, 2)).sum(0)


def log_sum_exp(topology: Topology, logits: Tensor) -> Tensor:
    """That of the logits [E, H] or [E + n, H] by target, [n, H]; -inf, without a gradient, where it has no edge."""
    adjacency = topology.adjacency
    rows = adjacency.edges()[1]
    if topology.loop is not None:
        looped = topology.loop.nonzero().view(-1)
        logits = torch.cat([logits[: len(rows)], logits[len(rows) + looped]])
        rows = torch.cat([rows, looped])
    largest = logits.new_full((adjacency.num_targets, logits.shape[1]), -torch.inf)
    largest.scatter_reduce_(0, rows[:, None].expand_as(logits), logits.detach(), "amax")
    sums = torch.zeros_like(largest).index_add(0, rows, (logits - largest[rows]).exp())
    found = sums > 0
    return torch.where(found, torch.where(found, sums, 1).log() + largest, -torch.inf)

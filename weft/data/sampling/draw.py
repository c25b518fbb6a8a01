"""Sampling of in-edges, with keys that make a sample independent of the number of ranks and threads."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from weft.data.adjacency import Adjacency
from weft.data.sampling.fanouts import Fanout
from weft.runtime.native import _native, id_dtype
from weft.utils.errors import unknown
from weft.utils.random import MASK64, key

METHODS = {"uniform": 0, "labor": 1, "weighted": 2}
"""Number of each sampling method in csrc/sampling.h."""


MaybeTensor = Tensor | None
SampleArguments = tuple[
    Tensor, Tensor, MaybeTensor, MaybeTensor, MaybeTensor, MaybeTensor, MaybeTensor, Tensor, int, int, int, float
]


@dataclass(frozen=True, kw_only=True, eq=False)
class SampledEdges:
    """Sampled in-edges of n targets, row by row, with the scales that make sums over them unbiased.

    The sum of scale times value over a row's sampled edges estimates the sum of values over all edges of the row.
    """

    indptr: Tensor
    """int64 [n + 1]: position of each target's first sampled edge."""
    edge_ids: Tensor
    """int32, or int64 in a graph of 2**31 edges or more, [E]: positions in the graph, ascending in each row."""
    sources: Tensor
    """int32 or int64 like the graph's indices, [E]: source of each sampled edge."""
    row_scale: Tensor | None
    """float64 [n]: 1 / inclusion probability, if it is equal for all edges of a row; else None."""
    edge_scale: Tensor | None
    """float64 [E]: 1 / inclusion probability by edge, if it differs within rows (`weighted`, fanouts by relation)."""

    @property
    def num_edges(self) -> int:
        return len(self.edge_ids)

    def scale(self) -> Tensor:
        """Return 1 / inclusion probability of each sampled edge, float64 [E]."""
        if self.edge_scale is not None:
            return self.edge_scale
        assert self.row_scale is not None
        return self.row_scale.repeat_interleave(self.indptr.diff(), output_size=self.num_edges)


@dataclass(frozen=True, kw_only=True)
class KeyTransition:
    """Progress from one random key to the next: LABOR's variates change gradually over dependent batches."""

    next_key: int
    """Random key of the next period."""
    share: float
    """Fraction of the way to the next key, in [0, 1)."""


def dependent_batch_key(*parts: int, batch: int, kappa: int) -> tuple[int, KeyTransition]:
    """Return the key of a batch among dependent ones, and its transition to the next key.

    The variates change gradually from one key's to the next key's within kappa batches. Source: "Cooperative
    minibatching in graph neural networks", Balin et al. 2023, section 3.2.

    Args:
        parts: Other numbers that key the sampling, such as seed and hop.
        batch: Number of the batch, counted through all epochs.
        kappa: Length of a period in batches; 1: batches are independent.

    Raises:
        ValueError: If kappa is below 1.
    """
    if kappa < 1:
        raise ValueError(f"kappa is {kappa}: give 1, for independent batches, or more")
    period = batch // kappa
    return key(*parts, period), KeyTransition(next_key=key(*parts, period + 1), share=batch % kappa / kappa)


def sample_layer(
    in_edges: Adjacency,
    targets: Tensor,
    fanout: Fanout,
    *,
    key: int,
    method: str = "uniform",
    transition: KeyTransition | None = None,
    ids: Tensor | None = None,
    edge_type: Tensor | None = None,
    num_threads: int | None = None,
) -> SampledEdges:
    """Sample in-edges of targets without replacement; all d in-edges if d is at most the fanout k, or k is ALL.

    - `uniform`: exactly k edges, every set of k with equal probability. O(k) per target for any d, except with fanouts
      by relation.
    - `labor`: edge u -> v if the variate of u, which all targets share, is below k / d: k edges on average, and about
      half as many distinct sources as `uniform`. LABOR-0 of "Layer-neighbor sampling", Balin and Catalyurek 2023. O(d).
      With a transition, batches depend on each other (see `dependent_batch_key`), which costs a logarithm and more per
      edge.
    - `weighted`: Poisson sampling: each edge independently with probability min(1, c w), where c makes the expected
      number k. An edge of weight 0 is sampled only if all d are. O(d).

    The sample of `uniform` and `weighted` depends on key, the target's id, its relation and positions in the whole row;
    that of `labor` on key, the source's id and d. So it does not depend on the other targets, or on which rank samples.

    Args:
        in_edges: In-edges of the whole graph, on the CPU; only `weighted` reads their weights.
        targets: Vertices, int64 [n].
        fanout: k from 0 on, or ALL; or one for each relation.
        key: 64 bits for one hop of one batch, from weft.utils.random.key (see `layer_key`). Do not use small numbers:
            vertex 1 under key 0 would get the random numbers of vertex 0 under key 1.
        method: A method of METHODS.
        transition: Transition to the next key, for `labor` only.
        ids: Original ids, int64 [N] (Graph.ids); None: the vertices' numbers.
        edge_type: Relation of each edge of the graph, int16 or int32; only fanouts by relation need and read it.
        num_threads: Number of threads. Default: PyTorch's.

    Raises:
        ValueError: If a target or relation is out of range, a relevant weight is negative or not finite, or an argument
            that the method needs is missing.
    """
    # Two native passes: the first counts the sampled edges of each row, the second writes them.
    typed = isinstance(fanout, tuple)
    arguments = _sample_arguments(in_edges, fanout, edge_type, key, method, transition, ids)
    targets, threads = targets.contiguous(), num_threads or torch.get_num_threads()
    rows = torch.empty(len(targets), 3, dtype=torch.int64)
    indptr = torch.empty(len(targets) + 1, dtype=torch.int64)
    by_edge = typed or method == "weighted"
    row_scale = None if by_edge else torch.empty(len(targets), dtype=torch.float64)
    _native.count_sample(*arguments, targets, rows, indptr, row_scale, threads)
    num_edges = int(indptr[-1])
    edge_ids = torch.empty(num_edges, dtype=id_dtype(in_edges.num_edges))
    sources = torch.empty(num_edges, dtype=in_edges.indices.dtype)
    edge_scale = torch.empty(num_edges, dtype=torch.float64) if by_edge else None
    _native.fill_sample(*arguments, rows, indptr, edge_ids, sources, edge_scale, threads)
    return SampledEdges(indptr=indptr, edge_ids=edge_ids, sources=sources, row_scale=row_scale, edge_scale=edge_scale)


def _sample_arguments(
    in_edges: Adjacency,
    fanout: Fanout,
    edge_type: Tensor | None,
    key: int,
    method: str,
    transition: KeyTransition | None,
    ids: Tensor | None,
) -> SampleArguments:
    """Check the arguments of `sample_layer`, and return those that both native passes take (csrc/sampling.h)."""
    if method not in METHODS:
        raise unknown("sampling method", method, METHODS)
    if transition is not None and method != "labor":
        raise ValueError(f"dependent batches need method labor, not {method}: leave transition out, or use labor")
    typed = isinstance(fanout, tuple)
    if typed and edge_type is None:
        raise ValueError("fanouts by relation need edge_type: pass the graph's, or one fanout for all edges")
    fanouts = torch.tensor(fanout if isinstance(fanout, tuple) else (fanout,), dtype=torch.int64)
    if not len(fanouts) or int(fanouts.min()) < -1:
        raise ValueError(f"fanout is {fanout}: give 0 or more, or ALL")
    weight = in_edges.weight if method == "weighted" else None
    if method == "weighted" and weight is None:
        raise ValueError("sampling by weight needs edge weights: use uniform or labor")
    weight = None if weight is None else weight.contiguous()
    kinds = edge_type.contiguous() if typed and edge_type is not None else None
    return (
        in_edges.indptr.contiguous(),
        in_edges.indices.contiguous(),
        weight if weight is not None and weight.dtype == torch.float32 else None,
        weight if weight is not None and weight.dtype == torch.float64 else None,
        kinds if kinds is not None and kinds.dtype == torch.int16 else None,
        kinds if kinds is not None and kinds.dtype == torch.int32 else None,
        None if ids is None else ids.contiguous(),
        fanouts,
        METHODS[method],
        key & MASK64,
        0 if transition is None else transition.next_key & MASK64,
        -1.0 if transition is None else transition.share,
    )

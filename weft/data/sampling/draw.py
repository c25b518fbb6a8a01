"""Drawing in-edges of targets, by keys that make a sample the same on any number of ranks and threads."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from weft.data.adjacency import Adjacency
from weft.data.sampling.fanouts import Fanout
from weft.runtime.native import _native, id_dtype
from weft.utils.errors import unknown
from weft.utils.random import MASK64, key

METHODS = {"uniform": 0, "labor": 1, "weighted": 2}  # as csrc/sampling.h numbers them


MaybeTensor = Tensor | None
Given = tuple[
    Tensor, Tensor, MaybeTensor, MaybeTensor, MaybeTensor, MaybeTensor, MaybeTensor, Tensor, int, int, int, float
]


@dataclass(frozen=True, kw_only=True, eq=False)
class SampledEdges:
    """Sampled in-edges of n targets, row by row, and what makes sums over them unbiased.

    The sum over a row's sampled edges of scale times value estimates the sum of values over all edges of the row.
    """

    indptr: Tensor
    """int64 [n + 1]: where each target's sampled edges begin."""
    edge_ids: Tensor
    """int32, or int64 where the graph has 2**31 edges or more, [E]: positions in the graph, ascending in each row."""
    sources: Tensor
    """int32 or int64, as the graph's indices, [E]: the vertex that each edge comes from."""
    row_scale: Tensor | None
    """float64 [n]: one over the probability that an edge of the row was taken, which is the same for all; else None."""
    edge_scale: Tensor | None
    """float64 [E]: the same by edge where edges of a row differ (`weighted`, or fanouts by relation); else None."""

    @property
    def num_edges(self) -> int:
        return len(self.edge_ids)

    def scale(self) -> Tensor:
        """One over the probability that each edge was taken, float64 [E]."""
        if self.edge_scale is not None:
            return self.edge_scale
        assert self.row_scale is not None
        return self.row_scale.repeat_interleave(self.indptr.diff(), output_size=self.num_edges)


@dataclass(frozen=True, kw_only=True)
class Turn:
    """How far LABOR's variates are on the way from one key's to the next key's."""

    next_key: int
    share: float
    """In [0, 1)."""


def turning(*parts: int, batch: int, kappa: int) -> tuple[int, Turn]:
    """The key of a batch among dependent ones, whose variates change over within kappa batches, and the turn.

    Of kappa 1, batches are independent. `parts` are what else keys the draws, such as seed and hop; `batch` counts
    through all epochs. "Cooperative minibatching in graph neural networks", Balin et al. 2023, section 3.2.
    """
    if kappa < 1:
        raise ValueError(f"kappa is {kappa}: give 1, for independent batches, or more")
    period = batch // kappa
    return key(*parts, period), Turn(next_key=key(*parts, period + 1), share=batch % kappa / kappa)


def sample_layer(
    in_edges: Adjacency,
    targets: Tensor,
    fanout: Fanout,
    *,
    key: int,
    method: str = "uniform",
    turn: Turn | None = None,
    ids: Tensor | None = None,
    edge_type: Tensor | None = None,
    num_threads: int | None = None,
) -> SampledEdges:
    """Draws in-edges of targets without replacement; all of a target's d where d is at most the fanout k, or it is ALL.

    - `uniform`: exactly k, each set of k alike. O(k) a target, whatever d is, but for fanouts by relation.
    - `labor`: edge u -> v where the variate of u, which all targets share, is below k / d: k on the mean, and about
      half the sources of `uniform`. LABOR-0 of "Layer-neighbor sampling", Balin and Catalyurek 2023. O(d) by nature.
      With a turn, batches depend on each other (see `turning`); a logarithm and more per edge.
    - `weighted`: Poisson sampling: each edge by itself, with probability min(1, c w) where c makes k edges the mean. An
      edge of weight 0 is not taken, unless all d are. O(d).

    Draws of uniform and weighted depend on key, the target's id, its relation and on positions in the whole row; those
    of labor on key, the source's id and d. All are free of the other targets, and so of who samples which.

    Args:
        in_edges: the whole graph's, on the CPU; its weights are read by `weighted` alone.
        targets: int64 [n], vertices.
        fanout: k, from 0, or ALL; or one for each relation.
        key: 64 bits, of one hop of one batch, as weft.utils.random.key mixes them (see `layer_key`): of small numbers,
            key 1 would draw for vertex 0 what key 0 draws for vertex 1.
        ids: int64 [N], original ids (Graph.ids); None: the vertices' own numbers.
        edge_type: int16 or int32 [E_graph], each edge's relation; needed, and read, by fanouts by relation alone.

    Raises ValueError where a target or relation is out of range, a weight that counts is negative or not finite, or
    what a method needs is missing.
    """
    typed = isinstance(fanout, tuple)
    given = _given(in_edges, fanout, edge_type, key, method, turn, ids)
    targets, threads = targets.contiguous(), num_threads or torch.get_num_threads()
    rows = torch.empty(len(targets), 3, dtype=torch.int64)
    indptr = torch.empty(len(targets) + 1, dtype=torch.int64)
    by_edge = typed or method == "weighted"
    row_scale = None if by_edge else torch.empty(len(targets), dtype=torch.float64)
    _native.count_sample(*given, targets, rows, indptr, row_scale, threads)
    num_edges = int(indptr[-1])
    edge_ids = torch.empty(num_edges, dtype=id_dtype(in_edges.num_edges))
    sources = torch.empty(num_edges, dtype=in_edges.indices.dtype)
    edge_scale = torch.empty(num_edges, dtype=torch.float64) if by_edge else None
    _native.fill_sample(*given, rows, indptr, edge_ids, sources, edge_scale, threads)
    return SampledEdges(indptr=indptr, edge_ids=edge_ids, sources=sources, row_scale=row_scale, edge_scale=edge_scale)


def _given(
    in_edges: Adjacency,
    fanout: Fanout,
    edge_type: Tensor | None,
    key: int,
    method: str,
    turn: Turn | None,
    ids: Tensor | None,
) -> Given:
    """What both passes read, as csrc/sampling.h has it."""
    if method not in METHODS:
        raise unknown("sampling method", method, METHODS)
    if turn is not None and method != "labor":
        raise ValueError(f"dependent batches are drawn by labor, not by {method}: leave the turn out, or use labor")
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
        0 if turn is None else turn.next_key & MASK64,
        -1.0 if turn is None else turn.share,
    )

"""The methods: each gives the part of every vertex, int32 [N]. The result depends on graph, parts and options alone."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from weft.config.config import PartitionOptions
from weft.data import Adjacency, Graph
from weft.partition.dependencies import range_parts
from weft.runtime import native
from weft.utils.errors import InputError

# How far the remote vertices of a balanced part may be from their mean: least/most is then above 0.96.
REMOTE_SLACK = 0.02

# Of each stage of balanced; bounds the time where no partition keeps to the slack.
MAX_PASSES = 60


def by_range(graph: Graph, num_parts: int, options: PartitionOptions) -> Tensor:
    """Contiguous ids, with about the same sum of in-edges and weighted vertices in each part (NeutronStar, Gemini)."""
    return range_parts(graph.in_edges, num_parts, options.vertex_weight)


def at_random(graph: Graph, num_parts: int, options: PartitionOptions) -> Tensor:
    """Each vertex anywhere; the parts' vertices differ by at most one."""
    return shuffled(graph, options.seed).to(torch.int32) % num_parts


def by_metis(graph: Graph, num_parts: int, options: PartitionOptions) -> Tensor:
    """Few cut edges and even vertices (Karypis and Kumar 1998), on the graph without directions, loops, duplicates.

    Raises InputError where pymetis is missing or the graph exceeds its integers.
    """
    return metis(graph, num_parts, options.seed)


def by_fennel(graph: Graph, num_parts: int, options: PartitionOptions) -> Tensor:
    """One pass over the vertices, each to where most of its neighbours are (Tsourakakis et al. 2014, gamma = 1.5)."""
    by_id = torch.arange(graph.num_vertices)
    order = by_id if options.stream == "id" else shuffled(graph, options.seed)
    out = graph.in_edges.transpose
    most = math.ceil(graph.num_vertices / num_parts * (1 + min(options.slack, num_parts)))
    return native.fennel(graph.in_edges.indptr, graph.in_edges.indices, out.indptr, out.indices, order, num_parts, most)


def balanced(graph: Graph, num_parts: int, options: PartitionOptions) -> Tensor:
    """Even vertices, in-edges and remote vertices, with few of the last (G3, section 4.2).

    Starts from METIS by in-edges, since it knows one weight and those are the hardest to even out afterwards. Stage 1
    moves vertices until their number is even too, stage 2 until the remote vertices are.
    """
    part, _, _ = native.refine(
        graph.in_edges.indptr,
        graph.in_edges.indices,
        metis(graph, num_parts, options.seed, graph.in_edges.degree),
        num_parts,
        shuffled(graph, options.seed),
        vertex_slack=options.slack,
        edge_slack=options.slack,
        remote_slack=REMOTE_SLACK,
        max_passes=MAX_PASSES,
    )
    return part


METHODS: dict[str, Callable[[Graph, int, PartitionOptions], Tensor]] = {
    "range": by_range,
    "random": at_random,
    "metis": by_metis,
    "fennel": by_fennel,
    "balanced": balanced,
}


def shuffled(graph: Graph, seed: int) -> Tensor:
    """The vertices in a random order, int64 [N]."""
    return torch.randperm(graph.num_vertices, generator=torch.Generator().manual_seed(seed))


def metis(graph: Graph, num_parts: int, seed: int, weight: Tensor | None = None) -> Tensor:
    """METIS's parts, with even sums of weights, int64 [N] (None: even vertices). By ids where no edge is to be cut.

    Raises InputError where pymetis is missing or the graph exceeds its integers.
    """
    try:
        import pymetis
    except ImportError:
        raise InputError("pymetis is missing: pip install pymetis, or choose another method, such as fennel") from None
    indptr, indices = neighbours(graph.in_edges)
    if num_parts == 1 or not len(indices):
        return by_range(graph, num_parts, PartitionOptions())
    dtype = pymetis.zero_copy_dtype()
    if len(indices) >= 2 ** (8 * dtype.itemsize - 1):
        raise InputError(f"{graph.name} has too many edges for this pymetis ({dtype}): choose fennel, range or random")
    adjacency = pymetis.CSRAdjacency(indptr.numpy().astype(dtype), indices.numpy().astype(dtype))
    weights = None if weight is None else weight.numpy().astype(dtype)
    settings = pymetis.Options(seed=seed % 2**31)
    _, part = pymetis.part_graph(num_parts, adjacency, vweights=weights, options=settings)
    return torch.tensor(part, dtype=torch.int32)


def neighbours(in_edges: Adjacency) -> tuple[Tensor, Tensor]:
    """Each vertex's distinct neighbours other than itself, in or out, ascending: indptr int64 [N + 1], indices."""
    num_vertices = in_edges.num_targets
    ids = torch.arange(num_vertices, dtype=in_edges.indices.dtype)
    target = ids.repeat_interleave(in_edges.degree, output_size=in_edges.num_edges)
    rows, cols = torch.cat([target, in_edges.indices]), torch.cat([in_edges.indices, target])
    indptr, cols, _ = native.coo_to_csr(rows, cols, num_vertices, num_vertices)
    rows = ids.repeat_interleave(indptr.diff(), output_size=len(cols))
    kept = rows != cols
    kept[1:] &= (rows[1:] != rows[:-1]) | (cols[1:] != cols[:-1])
    before = torch.zeros(len(cols) + 1, dtype=torch.int64)
    torch.cumsum(kept, 0, out=before[1:])
    return before[indptr], cols[kept]

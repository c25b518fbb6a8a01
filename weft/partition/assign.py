"""Partition methods.

Each returns the part of every vertex, int32 [N], which depends on graph, parts and options only.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from weft.config.config import PartitionOptions
from weft.data import Adjacency, Graph
from weft.partition.dependencies import range_parts
from weft.runtime import native
from weft.runtime.processes.forked_call import call_in_fork
from weft.utils.errors import InputError

REMOTE_SLACK = 0.02
"""Largest deviation of a balanced part's remote vertices from their mean, so that min / max is above 0.96."""

OTHER_METHODS = "choose fennel, range or random"
"""Advice for a graph that is too large for METIS."""

MAX_PASSES = 60
"""Largest number of passes of each stage of `balanced`, which may find no partition within the slack."""


def by_range(graph: Graph, num_parts: int, options: PartitionOptions) -> Tensor:
    """Partition into contiguous ids with similar sums of in-edges and weighted vertices (NeutronStar, Gemini).

    Args:
        graph: The graph.
        num_parts: Number of parts.
        options: `vertex_weight` is used.
    """
    return range_parts(graph.in_edges, num_parts, options.vertex_weight)


def at_random(graph: Graph, num_parts: int, options: PartitionOptions) -> Tensor:
    """Assign vertices to parts at random; the sizes of the parts differ by at most one.

    Args:
        graph: The graph.
        num_parts: Number of parts.
        options: `seed` is used.
    """
    return shuffled(graph, options.seed).to(torch.int32) % num_parts


def by_metis(graph: Graph, num_parts: int, options: PartitionOptions) -> Tensor:
    """Partition with METIS (Karypis and Kumar 1998): few cut edges, equal numbers of vertices.

    METIS sees the graph without directions, self-loops and duplicate edges.

    Args:
        graph: The graph.
        num_parts: Number of parts.
        options: `seed` is used.

    Raises:
        InputError: If pymetis is missing, or the graph has too many edges for it.
        RunError: METIS failed, or was killed.
    """
    return metis(graph, num_parts, options.seed)


def by_fennel(graph: Graph, num_parts: int, options: PartitionOptions) -> Tensor:
    """Partition with FENNEL (Tsourakakis et al. 2014, gamma = 1.5): one pass in which a vertex joins its neighbours.

    Args:
        graph: The graph.
        num_parts: Number of parts.
        options: `stream` (order of the pass), `seed` and `slack` are used.
    """
    by_id = torch.arange(graph.num_vertices)
    order = by_id if options.stream == "id" else shuffled(graph, options.seed)
    out = graph.in_edges.transpose
    max_vertices = math.ceil(graph.num_vertices / num_parts * (1 + min(options.slack, num_parts)))
    return native.fennel(
        graph.in_edges.indptr, graph.in_edges.indices, out.indptr, out.indices, order, num_parts, max_vertices
    )


def balanced(graph: Graph, num_parts: int, options: PartitionOptions) -> Tensor:
    """Partition with equal numbers of vertices, in-edges and remote vertices, and few remote ones (G3, section 4.2).

    1. METIS balances in-edges, which are the hardest to balance later; it takes one weight only.
    2. Vertices are moved until their numbers are balanced too.
    3. Vertices are moved until the remote vertices are balanced too.

    Args:
        graph: The graph.
        num_parts: Number of parts.
        options: `seed` and `slack` are used.

    Raises:
        InputError: As from `by_metis`.
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


Method = Callable[[Graph, int, PartitionOptions], Tensor]
"""Function that returns the part of each vertex, int32 [N], from a graph, the number of parts and options."""
METHODS: dict[str, Method] = {
    "range": by_range,
    "random": at_random,
    "metis": by_metis,
    "fennel": by_fennel,
    "balanced": balanced,
}
"""Partition methods by name."""


def shuffled(graph: Graph, seed: int) -> Tensor:
    """Return the vertices in a random order, int64 [N].

    Args:
        graph: The graph.
        seed: Seed of the order.
    """
    return torch.randperm(graph.num_vertices, generator=torch.Generator().manual_seed(seed))


def metis(graph: Graph, num_parts: int, seed: int, weight: Tensor | None = None) -> Tensor:
    """Return METIS's parts; parts of `by_range` if there is nothing to cut.

    Args:
        graph: The graph.
        num_parts: Number of parts.
        seed: Seed of METIS.
        weight: Weights whose sums are balanced, int64 [N]; None: numbers of vertices are balanced.

    Raises:
        InputError: If pymetis is missing, or the graph has too many edges for it.
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
        raise InputError(f"{graph.name} has too many edges for pymetis, which uses {dtype} here: {OTHER_METHODS}")
    adjacency = pymetis.CSRAdjacency(indptr.numpy().astype(dtype), indices.numpy().astype(dtype))
    weights = None if weight is None else weight.numpy().astype(dtype)
    settings = pymetis.Options(seed=seed % 2**31)

    def part_graph() -> bytes:
        _, part = pymetis.part_graph(num_parts, adjacency, vweights=weights, options=settings)
        return np.asarray(part, dtype=np.int32).tobytes()

    # METIS leaves its functions by a jump if SIGTERM arrives, also with a lock of the C library: the next call would
    # wait for it forever. And it holds Python's lock, so Ctrl-C would wait for its end.
    return torch.frombuffer(bytearray(call_in_fork(part_graph, "METIS", OTHER_METHODS)), dtype=torch.int32)


def neighbours(in_edges: Adjacency) -> tuple[Tensor, Tensor]:
    """Return the distinct in- and out-neighbours of each vertex, ascending, without itself, as CSR.

    Returns:
        Row pointers, int64 [N + 1], and neighbours.
    """
    num_vertices = in_edges.num_targets
    ids = torch.arange(num_vertices, dtype=in_edges.indices.dtype)
    target = ids.repeat_interleave(in_edges.degree, output_size=in_edges.num_edges)
    rows, cols = torch.cat([target, in_edges.indices]), torch.cat([in_edges.indices, target])
    indptr, cols, _ = native.coo_to_csr(rows, cols, num_vertices, num_vertices)
    rows = ids.repeat_interleave(indptr.diff(), output_size=len(cols))
    is_new = rows != cols
    is_new[1:] &= (rows[1:] != rows[:-1]) | (cols[1:] != cols[:-1])
    num_before = torch.zeros(len(cols) + 1, dtype=torch.int64)
    torch.cumsum(is_new, 0, out=num_before[1:])
    return num_before[indptr], cols[is_new]

"""Quality of a partition: balance of the parts, and number of edges and vertices between them."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor

from weft.data import Graph
from weft.runtime import native


@dataclass(frozen=True, kw_only=True)
class Quality:
    """Loads of P parts, with one entry per part, and totals."""

    vertices: tuple[int, ...]
    """Number of vertices of each part."""
    in_edges: tuple[int, ...]
    """Number of edges into the vertices of each part."""
    remote: tuple[int, ...]
    """Number of distinct vertices in other parts that have edges into each part."""
    cut: int
    """Number of edges between parts."""
    replication: float
    """Vertices that the parts need, own and remote ones, divided by N: 1 at best, 0 for an empty graph."""
    seconds: float
    """Seconds that the partition method took, without measuring the quality."""

    @classmethod
    def measure(cls, graph: Graph, part: Tensor, num_parts: int, seconds: float) -> Quality:
        """Count the loads of a partition.

        Args:
            graph: The graph.
            part: Part of each vertex, int32 [N].
            num_parts: Number of parts.
            seconds: Seconds that the partition method took.
        """
        counts, cut = native.count_parts(graph.in_edges.indptr, graph.in_edges.indices, part, num_parts)
        vertices, in_edges, remote = (tuple(row) for row in counts.tolist())
        return cls(
            vertices=vertices,
            in_edges=in_edges,
            remote=remote,
            cut=cut,
            replication=(graph.num_vertices + sum(remote)) / max(graph.num_vertices, 1),
            seconds=seconds,
        )

    @classmethod
    def from_record(cls, record: dict[str, Any]) -> Quality:
        """Return the quality from a dict that `record` has returned, also after a round trip through JSON."""
        loads = {name: tuple(record[name]) for name in ("vertices", "in_edges", "remote")}
        return cls(**(record | loads))

    def record(self) -> dict[str, Any]:
        """Return the fields as a dict, for JSON and for reports."""
        return asdict(self)

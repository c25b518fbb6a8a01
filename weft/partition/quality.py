"""What a partition is worth: how even the loads of its parts are, and how much lies between them."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor

from weft.data import Graph
from weft.runtime import native


@dataclass(frozen=True, kw_only=True)
class Quality:
    """The loads of P parts, one entry a part each, and what they are together.

    in_edges: edges into the part's vertices. remote: distinct sources of these that lie in other parts.
    cut: edges between parts. replication: vertices that a part needs, its own and remote ones, summed over the parts
    and divided by N (1 at best; 0 of an empty graph). seconds: what finding the parts took, the measuring not counted.
    """

    vertices: tuple[int, ...]
    in_edges: tuple[int, ...]
    remote: tuple[int, ...]
    cut: int
    replication: float
    seconds: float

    @classmethod
    def measure(cls, graph: Graph, part: Tensor, num_parts: int, seconds: float) -> Quality:
        """Counts a partition, int32 [N], anew."""
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
        """The inverse of `record`, after a trip through JSON."""
        loads = {name: tuple(record[name]) for name in ("vertices", "in_edges", "remote")}
        return cls(**(record | loads))

    def record(self) -> dict[str, Any]:
        """These figures by name, for JSON and for weft.reporting."""
        return asdict(self)

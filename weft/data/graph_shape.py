"""Widths and types of a graph: enough to build a model without the graph's arrays."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from weft.data.graph import Graph
from weft.data.inverse_relations import forward_relations
from weft.data.vertex_types import UNTYPED, TypedShape


@dataclass(frozen=True, kw_only=True)
class GraphShape:
    """Widths and types of a graph, on which a model's structure depends."""

    num_features: int
    """Number of columns of x; 0 without x."""
    num_edge_features: int = 0
    """Number of columns of edge_features; 0 without them."""
    weighted: bool = False
    """True if edges have weights."""
    num_classes: int = 0
    """Number of classes; see `Graph.num_classes`."""
    label_kind: str = ""
    """Kind of the labels; see `Graph.label_kind`."""
    typed: TypedShape = UNTYPED
    """Relations and vertex types; see `Graph.typed`."""
    num_forward_relations: int = 0
    """Number of relations, without the inverse relations that weft added."""
    relations: tuple[str, ...] = ()
    """Names of all relations."""
    featured_types: tuple[str, ...] = ()
    """Names of the vertex types that have features, in the order of `typed.featured`."""

    @classmethod
    def of(cls, graph: Graph) -> GraphShape:
        """Return the shape of a graph."""
        return cls(
            num_features=graph.num_features,
            num_edge_features=graph.num_edge_features,
            weighted=graph.in_edges.weight is not None,
            num_classes=graph.num_classes,
            label_kind=graph.label_kind,
            typed=graph.typed,
            num_forward_relations=len(forward_relations(graph)),
            relations=graph.relations,
            featured_types=tuple(name for name in graph.vertex_types if name in graph.features),
        )

    def record(self) -> dict[str, Any]:
        """Return the fields as a dict of JSON values."""
        return asdict(self) | {"typed": self.typed._asdict()}

    @classmethod
    def from_record(cls, values: dict[str, Any]) -> GraphShape:
        """Return the shape from a dict that `record` has returned."""
        typed = dict(values["typed"])
        featured = tuple((int(count), int(width)) for count, width in typed.pop("featured"))
        names = {name: tuple(values[name]) for name in ("relations", "featured_types")}
        return cls(**values | names | {"typed": TypedShape(featured=featured, **typed)})

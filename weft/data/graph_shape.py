"""Widths and types of a graph: enough to build a model without the graph's arrays."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from weft.data.fields import EdgeLabels
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
    """Number of classes to learn; see `Labels.num_classes`."""
    label_kind: str = ""
    """Kind of the labels to learn; see `Labels.label_kind`."""
    num_label_features: int = 0
    """Number of columns of the features of labelled edges, for a task on edges; 0 without them."""
    typed: TypedShape = UNTYPED
    """Relations and vertex types; see `Graph.typed`."""
    num_forward_relations: int = 0
    """Number of relations, without the inverse relations that weft added."""
    relations: tuple[str, ...] = ()
    """Names of all relations."""
    featured_types: tuple[str, ...] = ()
    """Names of the vertex types that have features, in the order of `typed.featured`."""

    @classmethod
    def of(cls, graph: Graph, task: str = "node") -> GraphShape:
        """Return the shape of a graph.

        Args:
            graph: The graph.
            task: The task, which decides whether labels are those of vertices or of edges.
        """
        labels = graph.labels(task)
        return cls(
            num_features=graph.num_features,
            num_edge_features=graph.num_edge_features,
            weighted=graph.in_edges.weight is not None,
            num_classes=labels.num_classes,
            label_kind=labels.label_kind,
            num_label_features=labels.num_features if isinstance(labels, EdgeLabels) else 0,
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

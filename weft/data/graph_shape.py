"""What of a graph decides a model's structure: enough to make the model where the graph is not there."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from weft.data.graph import Graph
from weft.data.inverse_relations import forward_relations
from weft.data.vertex_types import UNTYPED, TypedShape


@dataclass(frozen=True, kw_only=True)
class GraphShape:
    """The widths and types of a graph."""

    num_features: int
    num_edge_features: int = 0
    weighted: bool = False
    """Whether its edges have weights."""
    num_classes: int = 0
    label_kind: str = ""
    """See Graph.label_kind."""
    typed: TypedShape = UNTYPED
    num_forward_relations: int = 0
    """Relations without those that were made against another's edges."""
    relations: tuple[str, ...] = ()
    """Names of all of them."""
    featured_types: tuple[str, ...] = ()
    """Names of the vertex types that have features of their own, as `typed.featured` has them."""

    @classmethod
    def of(cls, graph: Graph) -> GraphShape:
        """That of a graph."""
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
        """In values that JSON knows."""
        return asdict(self) | {"typed": self.typed._asdict()}

    @classmethod
    def from_record(cls, values: dict[str, Any]) -> GraphShape:
        """What `record` has said."""
        typed = dict(values["typed"])
        featured = tuple((int(count), int(width)) for count, width in typed.pop("featured"))
        names = {name: tuple(values[name]) for name in ("relations", "featured_types")}
        return cls(**values | names | {"typed": TypedShape(featured=featured, **typed)})

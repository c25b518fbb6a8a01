"""Random graphs on which a PyG model and its converted form are compared."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from types import SimpleNamespace

import torch
from torch import Tensor, nn

from weft.data import Adjacency, GraphShape
from weft.nn.aggregate.topology import Topology
from weft.nn.convert.comparison_view import ComparisonView, Dropped
from weft.nn.convert.hetero import GraphTypes
from weft.nn.convert.traced_model import Converted
from weft.nn.convert.tracing import call_pyg, parameters_of
from weft.nn.graph_view import Inputs
from weft.nn.view import TypedRows
from weft.utils.errors import InputError

NUM_VERTICES, NUM_ISOLATED = 24, 2
"""Number of vertices of a random graph, and how many of these, the last ones, have no edges."""
VERTICES_OF_TYPE, EDGES_OF_RELATION = 8, 20
"""Number of vertices of each type, and of edges of each relation, of a heterogeneous random graph."""


@dataclass(frozen=True, kw_only=True)
class RandomGraph:
    """Random graph in float64, on which a model and its converted form run."""

    x: Tensor
    """Rows [n, F]."""
    topology: Topology
    """The edges."""
    edge_inputs: frozenset[str] = frozenset()
    """Optional arguments of the model's forward that the graph has."""

    @classmethod
    def of(cls, model: nn.Module, edge_inputs: frozenset[str], shape: GraphShape | None) -> RandomGraph:
        """Return a graph on which a model runs.

        Args:
            model: The model.
            edge_inputs: Optional arguments of its forward that the graph has.
            shape: Shape of the graph; None: sizes at which the model runs are found from its parameters.

        Raises:
            Exception: The model fails at every size; the error of the first.
        """
        if shape is not None:
            edges = random_edges(shape.weighted, shape.num_edge_features, shape.typed.num_relations)
            return cls(x=random_rows(NUM_VERTICES, shape.num_features), topology=edges, edge_inputs=edge_inputs)
        required = {parameter.name for parameter in parameters_of(model) if parameter.default is parameter.empty}
        has = {name: name in edge_inputs | required for name in ("edge_weight", "edge_attr", "edge_type")}
        num_relations = max([getattr(module, "num_relations", 0) for module in model.modules()]) or 1
        channels = [getattr(module, "in_channels", 0) for module in model.modules()]
        dims = [dim for parameter in model.parameters() for dim in reversed(parameter.shape)]
        dims += [dim // parts for parts in (2, 3) for dim in dims]  # a layer may read both endpoints of an edge
        widths = [*dict.fromkeys(dim for dim in (*channels, *dims) if isinstance(dim, int) and dim > 0)] or [1]
        first_error: Exception | None = None
        reference = copy.deepcopy(model).double().eval()
        for edge_width in dict.fromkeys([1, *widths]) if has["edge_attr"] else [0]:
            topology = random_edges(has["edge_weight"], edge_width, num_relations if has["edge_type"] else 0)
            for width in widths:
                graph = cls(x=random_rows(NUM_VERTICES, width), topology=topology, edge_inputs=edge_inputs)
                try:
                    with torch.no_grad():
                        if len(graph.call_original(reference, graph.x)) == NUM_VERTICES:
                            return graph
                except Exception as error:
                    first_error = first_error or error
        raise first_error or InputError(f"{type(model).__name__} returns no row for each vertex")

    def with_dtype(self, dtype: torch.dtype) -> RandomGraph:
        """Return the graph with rows, weights and features of another type."""
        edges, weight, features = self.topology, self.topology.adjacency.weight, self.topology.edge_features
        topology = Topology(
            edges.adjacency.with_weight(None if weight is None else weight.to(dtype)),
            edge_features=None if features is None else features.to(dtype),
            edge_type=edges.edge_type,
            num_relations=edges.num_relations,
        )
        return replace(self, x=self.x.to(dtype), topology=topology)

    def call_original(self, model: nn.Module, x: Tensor) -> Tensor:
        """Return the logits of an original, which is called with those of the edges' tensors that it takes.

        Args:
            model: The model.
            x: Rows [n, F].
        """
        edges = self.topology
        weight, features = edges.adjacency.weight, edges.edge_features
        return call_pyg(model, self.edge_inputs, x, edges.edge_index, weight, features, edges.edge_type)

    def call_converted(self, model: Converted, x: Tensor, dropped: list[Dropped]) -> Tensor:
        """Return the logits of a converted model.

        Args:
            model: The model.
            x: Rows [n, F].
            dropped: Receives the calls of dropout.
        """
        inputs = Inputs(typed=self.typed_rows(x))
        views = [ComparisonView(self.topology, dropped, inputs=inputs) for _ in range(model.num_stages)]
        logits: Tensor = model(views, x)
        return logits

    def typed_rows(self, x: Tensor) -> TypedRows | None:
        """Return the features of each vertex type in the rows x [n, F]; None if vertices have no types."""
        del x
        return None

    def comparable(self, dropped: list[Dropped]) -> list[Dropped]:
        """Return what must be equal of the calls of dropout of an original and a converted model, sorted."""
        return sorted(dropped)


@dataclass(frozen=True, kw_only=True)
class RandomTypedGraph(RandomGraph):
    """Heterogeneous random graph. Vertices of a type follow each other, and a type uses the first columns of x."""

    types: GraphTypes
    """Types of the graph."""

    @classmethod
    def of_types(cls, types: GraphTypes, num_edge_features: int) -> RandomTypedGraph:
        """Return a graph with these types; vertices of types without features have no edges.

        Args:
            types: The types.
            num_edge_features: Number of edge features; 0: none.
        """
        random, num_types = torch.Generator().manual_seed(0), len(types.names)
        num_vertices = VERTICES_OF_TYPE * num_types + min(types.typed.num_embedded, VERTICES_OF_TYPE)
        edges = [torch.empty(3, 0, dtype=torch.int64)]
        for number, (source, _, target) in enumerate(name.split("|") for name in types.relations):
            if source in types.names and target in types.names:
                ends = torch.randint(VERTICES_OF_TYPE, (2, EDGES_OF_RELATION), generator=random)
                first = torch.tensor([types.names.index(source), types.names.index(target)]) * VERTICES_OF_TYPE
                relation = torch.full((1, EDGES_OF_RELATION), number)
                edges.append(torch.cat([ends + first[:, None], relation]))
        sources, targets, relations = torch.cat(edges, 1)
        adjacency = Adjacency.from_edges(  # sorts the edges, and the relations with them
            sources, targets, num_sources=num_vertices, num_targets=num_vertices, weight=relations.double()
        )
        assert adjacency.weight is not None
        topology = Topology(
            adjacency.with_weight(None),
            edge_type=adjacency.weight.long(),
            num_relations=len(types.relations),
            edge_features=random_rows(len(relations), num_edge_features) if num_edge_features else None,
        )
        x = random_rows(num_vertices, max(types.widths.values()))
        return cls(x=x, topology=topology, types=types)

    def call_original(self, model: nn.Module, x: Tensor) -> Tensor:
        rows = self._rows_by_type(x)
        (source, target), features = self.topology.edge_index, self.topology.edge_features
        edges, edge_attr = dict[tuple[str, ...], Tensor](), dict[tuple[str, ...], Tensor]()
        for number, name in enumerate(self.types.relations):
            ends = tuple(name.split("|"))
            if ends[0] in rows and ends[2] in rows:
                mask = self.topology.edge_type == number
                first = [self.types.names.index(end) * VERTICES_OF_TYPE for end in (ends[0], ends[2])]
                edges[ends] = torch.stack([source[mask] - first[0], target[mask] - first[1]])
                edge_attr |= {} if features is None else {ends: features[mask].to(x.dtype)}
        names = [parameter.name for parameter in parameters_of(model)]
        values = {"edge_attr_dict": edge_attr} if edge_attr else {}
        if names[0] == "data":
            result = model(SimpleNamespace(x_dict=rows, edge_index_dict=edges, **values))
        else:
            result = model(rows, edges, **{name: value for name, value in values.items() if name in names})
        if isinstance(result, Tensor):
            return result
        width = next(value.shape[1] for value in result.values() if value is not None)
        parts = [result.get(name) for name in self.types.names]
        empty = x.new_zeros(VERTICES_OF_TYPE, width)
        return torch.cat([empty if part is None else part for part in parts])

    def call_converted(self, model: Converted, x: Tensor, dropped: list[Dropped]) -> Tensor:
        logits = super().call_converted(model, x, dropped)
        if len(model.output_types) == 1:
            first = self.types.names.index(model.output_types[0]) * VERTICES_OF_TYPE
            return logits[first : first + VERTICES_OF_TYPE]
        return logits[: VERTICES_OF_TYPE * len(self.types.names)]

    def comparable(self, dropped: list[Dropped]) -> list[Dropped]:
        # A converted model drops values of a type in the rows of all types, unless no result depends on them.
        return sorted({call._replace(num_values=-1) for call in dropped})

    def typed_rows(self, x: Tensor) -> TypedRows:
        num_featured = VERTICES_OF_TYPE * len(self.types.names)
        return TypedRows(features=tuple(self._rows_by_type(x).values()), num_embedded=len(x) - num_featured)

    def _rows_by_type(self, x: Tensor) -> dict[str, Tensor]:
        return {
            name: x[number * VERTICES_OF_TYPE : (number + 1) * VERTICES_OF_TYPE, :width]
            for number, (name, width) in enumerate(self.types.widths.items())
        }


def random_edges(weighted: bool, num_features: int, num_relations: int) -> Topology:
    """Return random edges with self-loops, repeated edges, and isolated vertices.

    Args:
        weighted: True if edges have weights.
        num_features: Number of columns of the edge features; 0: none.
        num_relations: Number of edge types; 0: none.
    """
    random, connected = torch.Generator().manual_seed(0), NUM_VERTICES - NUM_ISOLATED
    edges = torch.randint(connected, (2, 3 * NUM_VERTICES), generator=random)
    edges = edges[:, edges[0] != edges[1]]
    loops = torch.arange(0, connected, 5)
    source, target = torch.cat([edges, edges[:, :6], torch.stack([loops, loops])], dim=1)
    count = len(source)
    return Topology(
        Adjacency.from_edges(
            source,
            target,
            num_sources=NUM_VERTICES,
            num_targets=NUM_VERTICES,
            weight=0.5 + torch.rand(count, generator=random).double() if weighted else None,
        ),
        edge_features=torch.randn(count, num_features, generator=random).double() if num_features else None,
        edge_type=torch.randint(num_relations, (count,), generator=random) if num_relations else None,
        num_relations=num_relations,
    )


def random_rows(num_rows: int, width: int) -> Tensor:
    """Return random rows in float64, always the same.

    Args:
        num_rows: Number of rows.
        width: Number of columns.
    """
    return torch.randn(num_rows, width, generator=torch.Generator().manual_seed(1)).double()

"""Graphs from objects of other libraries: SciPy sparse matrices, NetworkX and DGL graphs. None is imported here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from weft.data.checks.tensor_checks import MASKS
from weft.utils.errors import InputError

NODE, SOURCE, TARGET = "node", "source", "target"


def matrix_edges(matrix: Any) -> dict[str, Any]:
    """Return the edges of a SciPy sparse matrix [N, N] as arguments of Graph.from_edges.

    Entry [u, v] is an edge u -> v. Entries are weights, unless all are 1.

    Raises:
        InputError: If it is no square sparse matrix.
    """
    if not hasattr(matrix, "tocoo"):
        raise InputError(f"matrix is of type {type(matrix).__name__}: give a sparse matrix of SciPy")
    entries = matrix.tocoo()
    if len(entries.shape) != 2 or entries.shape[0] != entries.shape[1]:
        raise InputError(f"matrix has shape {list(entries.shape)}: give one row and one column for each vertex")
    weight = None if (entries.data == 1).all() else entries.data
    return {"source": entries.row, "target": entries.col, "weight": weight, "num_vertices": entries.shape[0]}


def network_tables(graph: Any, node_attributes: Sequence[str], edge_attributes: Sequence[str]) -> tuple[Any, Any]:
    """Return nodes and edges of a NetworkX graph as tables; an undirected edge becomes two edges.

    Args:
        graph: The NetworkX graph.
        node_attributes: Attributes of nodes to include.
        edge_attributes: Attributes of edges to include.

    Raises:
        InputError: If it is no NetworkX graph.
    """
    if not hasattr(graph, "is_directed"):
        raise InputError(f"graph is of type {type(graph).__name__}: give a graph of NetworkX")
    directed = graph if graph.is_directed() else graph.to_directed(as_view=True)
    nodes = dict(graph.nodes(data=True))
    edges = list(directed.edges(data=True))
    vertices = {NODE: list(nodes)} | {name: [data.get(name) for data in nodes.values()] for name in node_attributes}
    endpoints = {SOURCE: [edge[0] for edge in edges], TARGET: [edge[1] for edge in edges]}
    return vertices, endpoints | {name: [edge[2].get(name) for edge in edges] for name in edge_attributes}


def dgl_fields(graph: Any, features: str, label: str, weight: str | None, edge_features: str | None) -> dict[str, Any]:
    """Return the data of a DGL graph with one type of nodes and of edges as arguments of Graph.from_edges.

    Features and labels are left out if the graph has none with these names.

    Args:
        graph: The DGL graph.
        features: Name of the features in ndata.
        label: Name of the labels in ndata.
        weight: Name of the edge weights in edata, or None.
        edge_features: Name of the edge features in edata, or None.

    Raises:
        InputError: If there are several types, or requested edge data is missing.
    """
    if not hasattr(graph, "ndata") or not hasattr(graph, "etypes"):
        raise InputError(f"graph is of type {type(graph).__name__}: give a graph of DGL")
    if len(graph.ntypes) > 1 or len(graph.etypes) > 1:
        raise InputError(
            "graph has several types of nodes or edges: give dgl.to_homogeneous(graph), or use Graph.from_pyg"
        )
    source, target = graph.edges(order="eid")
    fields = {"source": source, "target": target, "num_vertices": graph.num_nodes()}
    names_in_ndata = {"x": features, "y": label} | dict(zip(MASKS, MASKS, strict=True))
    fields |= {field: graph.ndata[name] for field, name in names_in_ndata.items() if name in graph.ndata}
    for field, name in (("weight", weight), ("edge_features", edge_features)):
        if name is not None:
            fields[field] = edge_data(graph.edata, name)
    return fields


def edge_data(data: Mapping[str, Any], name: str) -> Any:
    """Return an array of a DGL graph's edges.

    Args:
        data: The graph's edata.
        name: Name of the array.

    Raises:
        InputError: If it is missing.
    """
    if name not in data:
        raise InputError(f"graph.edata has no '{name}': it has {', '.join(sorted(data)) or 'nothing'}")
    return data[name]

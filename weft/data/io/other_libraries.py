"""Graphs from other libraries' objects: SciPy's sparse matrices, NetworkX and DGL. None of them is imported here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from weft.data.tensor_checks import MASKS
from weft.utils.errors import InputError

NODE, SOURCE, TARGET = "node", "source", "target"


def matrix_edges(matrix: Any) -> dict[str, Any]:
    """The edges of a sparse matrix [N, N], as Graph.from_edges takes them: entry [u, v] leads from u to v.

    Entries are weights, unless all are 1. InputError for what is no square sparse matrix.
    """
    if not hasattr(matrix, "tocoo"):
        raise InputError(f"matrix is of type {type(matrix).__name__}: give a sparse matrix of SciPy")
    entries = matrix.tocoo()
    if len(entries.shape) != 2 or entries.shape[0] != entries.shape[1]:
        raise InputError(f"matrix has shape {list(entries.shape)}: give one row and one column for each vertex")
    weight = None if (entries.data == 1).all() else entries.data
    return {"source": entries.row, "target": entries.col, "weight": weight, "num_vertices": entries.shape[0]}


def network_tables(graph: Any, of_nodes: Sequence[str], of_edges: Sequence[str]) -> tuple[Any, Any]:
    """The nodes and edges of a NetworkX graph as tables, with some attributes; an undirected edge leads both ways."""
    if not hasattr(graph, "is_directed"):
        raise InputError(f"graph is of type {type(graph).__name__}: give a graph of NetworkX")
    directed = graph if graph.is_directed() else graph.to_directed(as_view=True)
    nodes = dict(graph.nodes(data=True))
    edges = list(directed.edges(data=True))
    vertices = {NODE: list(nodes)} | {name: [known.get(name) for known in nodes.values()] for name in of_nodes}
    ends = {SOURCE: [edge[0] for edge in edges], TARGET: [edge[1] for edge in edges]}
    return vertices, ends | {name: [edge[2].get(name) for edge in edges] for name in of_edges}


def dgl_fields(graph: Any, features: str, label: str, weight: str | None, edge_features: str | None) -> dict[str, Any]:
    """What a DGL graph with one type of nodes and of edges holds, as Graph.from_edges takes it.

    features and label are left out where it has no such data. InputError for several types, and for other data that it
    does not have.
    """
    if not hasattr(graph, "ndata") or not hasattr(graph, "etypes"):
        raise InputError(f"graph is of type {type(graph).__name__}: give a graph of DGL")
    if len(graph.ntypes) > 1 or len(graph.etypes) > 1:
        raise InputError("graph has several types of nodes or edges: give dgl.to_homogeneous(graph), or from_pyg's")
    source, target = graph.edges(order="eid")
    found = {"source": source, "target": target, "num_vertices": graph.num_nodes()}
    known = {"x": features, "y": label} | dict(zip(MASKS, MASKS, strict=True))
    found |= {field: graph.ndata[name] for field, name in known.items() if name in graph.ndata}
    for field, name in (("weight", weight), ("edge_features", edge_features)):
        if name is not None:
            found[field] = needed(graph.edata, name)
    return found


def needed(data: Mapping[str, Any], name: str) -> Any:
    """What a graph's edges have by a name; InputError if they have none."""
    if name not in data:
        raise InputError(f"graph.edata has no '{name}': it has {', '.join(sorted(data)) or 'nothing'}")
    return data[name]

"""Input rows of vertices of several types: transformed features, or trained embeddings for types without features."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from weft.data import Graph, TypedShape
from weft.nn.layers.linear_transform import Linear
from weft.nn.sparse_rows import SparseRows
from weft.nn.view import TypedRows, View
from weft.utils.errors import InputError

INITIAL_STD = 0.02
"""Standard deviation of initial embeddings; small, so that little of the random values remains after training."""


class RowTable(Protocol):
    """Rows [m, F] that can be read by index: a tensor, or a cache in front of one."""

    def __getitem__(self, wanted: Tensor, /) -> Tensor: ...


class FeatureTables(NamedTuple):
    """Tables from which the features of a graph's vertices are read."""

    x: RowTable | None
    """Features by vertex; None if vertex types have different features."""
    features: Mapping[str, RowTable]
    """Features by vertex type, with a row for each vertex of the type."""


class Embedding(nn.Module):
    """Embedding table [num_embedded, width] with a trained row for each vertex without features.

    Under a strategy, each rank stores the rows of its vertices. Checkpoints contain the whole table.

    Args:
        num_embedded: Number of vertices without features.
        width: Number of columns.
    """

    def __init__(self, num_embedded: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(nn.init.normal_(torch.empty(num_embedded, width), std=INITIAL_STD))

    def forward(self, view: View) -> Tensor:
        return view.embed(self.weight)


class TypedInput(nn.Module):
    """Input layer for typed vertices: `x_v W_t + b_t` by type t, or an embedding if the type has no features.

    Called as `input(view)`; returns rows [n, width].

    Args:
        typed: Types of the graph (`Graph.typed`).
        width: Number of columns of the result.
    """

    def __init__(self, typed: TypedShape, width: int) -> None:
        super().__init__()
        self.typed, self.out_width = typed, width
        self.maps = nn.ModuleList(Linear(num_features, width) for _, num_features in typed.featured)
        self.embedding = Embedding(typed.num_embedded, width) if typed.num_embedded else None

    def forward(self, view: View) -> Tensor:
        typed = view.typed_rows
        parts: list[Tensor] = [part(x) for x, part in zip(typed.features, self.maps, strict=True)]
        if self.embedding is not None:
            parts.append(self.embedding(view))
        rows = torch.cat(parts)
        return rows if typed.order is None else rows.index_select(0, typed.order)


def embeddings(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the embedding tables of a model, which are split over ranks by row, by parameter name."""
    modules = {name: module for name, module in model.named_modules() if isinstance(module, Embedding)}
    return {f"{name}.weight".removeprefix("."): module.weight for name, module in modules.items()}


def shared_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Return the replicated parameters of a model, whose gradients are summed over the ranks."""
    sharded = set(embeddings(model).values())
    return [parameter for parameter in model.parameters() if parameter not in sharded]


def with_own_rows(model: nn.Module, graph: Graph, vertices: slice | Tensor) -> tuple[nn.Module, Tensor]:
    """Copy a model, with only the embedding rows of some vertices.

    Args:
        model: The model, which is not changed.
        graph: The graph.
        vertices: The vertices, a range or int64.

    Returns:
        The copy, and the position of its k embedding rows in the whole table: int64 [k].

    Raises:
        InputError: The number of rows of an embedding is not the number of vertices without features.
    """
    rows, num_embedded = embedding_rows(graph, vertices), graph.typed.num_embedded
    copied: dict[int, nn.Parameter] = {}
    for name, parameter in embeddings(model).items():
        if len(parameter) != num_embedded:
            raise InputError(
                f"{name} has {len(parameter)} rows, but the graph has {num_embedded} vertices without features: build "
                "the model with typed=graph.typed of this graph"
            )
        local = parameter.detach().index_select(0, rows.to(parameter.device))
        copied[id(parameter)] = nn.Parameter(local, requires_grad=parameter.requires_grad)
    return copy.deepcopy(model, dict(copied)), rows


def is_embedded(graph: Graph) -> Tensor:
    """Return a mask of the vertices without features, for which a model trains embeddings: bool [N]."""
    embedded = torch.full((graph.num_vertices,), graph.x is None)
    for name in graph.features:
        span = graph.type_range(name)
        embedded[span.start : span.stop] = False
    return embedded


def embedding_rows(graph: Graph, vertices: slice | Tensor) -> Tensor:
    """Return the rows of the embedding table that belong to some vertices: int64 [k].

    The table is sorted by original vertex id, so renumbering the graph does not change it.

    Args:
        graph: The graph.
        vertices: The vertices, a range or int64; those with features are skipped.
    """
    if graph.x is not None:
        return torch.empty(0, dtype=torch.int64)
    embedded = is_embedded(graph)
    order = torch.arange(graph.num_vertices) if graph.ids is None else graph.ids.argsort()
    row = torch.empty_like(order)
    row[order] = embedded[order].cumsum(0) - 1
    return row[vertices][embedded[vertices]]


def typed_rows(
    graph: Graph,
    vertices: slice | Tensor,
    device: torch.device | str,
    dtype: torch.dtype,
    tables: Mapping[str, RowTable] | None = None,
    densities: Sequence[float] = (),
) -> TypedRows | None:
    """Return the features by type of some vertices; None if the graph has x.

    Args:
        graph: The graph.
        vertices: The vertices, a range or int64 [n].
        device: Device of the result.
        dtype: Type of the features in the result.
        tables: Tables of the features of each vertex type; None: those of the graph.
        densities: See `Workload.typed_densities`; empty: linear transforms read all features.
    """
    if graph.x is not None:
        return None
    ids = torch.arange(*vertices.indices(graph.num_vertices)) if isinstance(vertices, slice) else vertices
    features, positions, tables = list[Tensor](), [], graph.features if tables is None else tables
    for name in graph.vertex_types:
        if name in graph.features:
            span = graph.type_range(name)
            position = ((ids >= span.start) & (ids < span.stop)).nonzero().view(-1)
            features.append(tables[name][ids[position] - span.start].to(device, dtype))
            positions.append(position)
    has_features = torch.zeros(len(ids), dtype=torch.bool)
    has_features[torch.cat([ids[:0], *positions])] = True
    positions.append((~has_features).nonzero().view(-1))
    if densities:
        features = [SparseRows.of(x, density) for x, density in zip(features, densities, strict=True)]
    order = torch.cat(positions).argsort()
    in_order = torch.equal(order, torch.arange(len(order)))
    return TypedRows(
        features=tuple(features), num_embedded=len(positions[-1]), order=None if in_order else order.to(device)
    )

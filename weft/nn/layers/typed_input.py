"""The first rows of vertices of several types: features of any width are mapped, rows without any are trained."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from weft.data import Graph, TypedShape
from weft.nn.layers.linear_transform import Linear
from weft.nn.view import TypedRows, View
from weft.utils.errors import InputError

INITIAL_SPREAD = 0.02  # of trained rows: what they are to be is learned, and little of chance stays in them


class RowTable(Protocol):
    """Rows [m, F] that can be taken by number: a tensor, or a cache before one."""

    def __getitem__(self, wanted: Tensor, /) -> Tensor: ...


class FeatureTables(NamedTuple):
    """Where the features of a graph's vertices are read."""

    x: RowTable | None
    """By vertex; None where they have no features of one width."""
    features: Mapping[str, RowTable]
    """By vertex type, and place among its vertices."""


class Embedding(nn.Module):
    """A row to train for each vertex without features: [num_embedded, width], drawn whole, then placed.

    A rank keeps those of the vertices that it answers for; the rows of all ranks together are in checkpoints.
    """

    def __init__(self, num_embedded: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(nn.init.normal_(torch.empty(num_embedded, width), std=INITIAL_SPREAD))

    def forward(self, view: View) -> Tensor:
        return view.embed(self.weight)


class TypedInput(nn.Module):
    """Rows [n, width] of all vertices: `x_v W_t + b_t` by v's type t, or a trained row where the type has no features.

    typed: that of the graph (`Graph.typed`).
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
    """The model's parameters of which a rank keeps only some rows, by name."""
    modules = {name: module for name, module in model.named_modules() if isinstance(module, Embedding)}
    return {f"{name}.weight".removeprefix("."): module.weight for name, module in modules.items()}


def shared_parameters(model: nn.Module) -> list[nn.Parameter]:
    """The parameters that every rank has whole, and whose gradients are summed over the ranks."""
    apart = set(embeddings(model).values())
    return [parameter for parameter in model.parameters() if parameter not in apart]


def with_own_rows(model: nn.Module, graph: Graph, vertices: slice | Tensor) -> tuple[nn.Module, Tensor]:
    """A copy of a model whose embeddings have the rows of some vertices alone, and which rows those are: int64 [k].

    The model itself stays as it is. InputError where an embedding has not one row for each of the graph's vertices
    without features.
    """
    rows, num_embedded = embedding_rows(graph, vertices), graph.typed.num_embedded
    copied: dict[int, nn.Parameter] = {}
    for name, parameter in embeddings(model).items():
        if len(parameter) != num_embedded:
            raise InputError(
                f"{name} has {len(parameter)} rows, and the graph has {num_embedded} vertices without features: make "
                "the model anew with the graph's graph.typed"
            )
        own = parameter.detach().index_select(0, rows.to(parameter.device))
        copied[id(parameter)] = nn.Parameter(own, requires_grad=parameter.requires_grad)
    return copy.deepcopy(model, dict(copied)), rows


def is_embedded(graph: Graph) -> Tensor:
    """The vertices that a model learns a row each for, because they have no features: bool [N]."""
    found = torch.full((graph.num_vertices,), graph.x is None)
    for name in graph.features:
        span = graph.type_range(name)
        found[span.start : span.stop] = False
    return found


def embedding_rows(graph: Graph, vertices: slice | Tensor) -> Tensor:
    """Which rows of an embedding belong to those of the vertices that are embedded: int64 [k].

    By original ids, so that another order of them changes no number.
    """
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
) -> TypedRows | None:
    """What is known of some vertices of a graph without x; None for one with x.

    tables: where the features of its vertex types are read; None: in the graph.
    """
    if graph.x is not None:
        return None
    ids = torch.arange(*vertices.indices(graph.num_vertices)) if isinstance(vertices, slice) else vertices
    features, places, tables = [], [], graph.features if tables is None else tables
    for name in graph.vertex_types:
        if name in graph.features:
            span = graph.type_range(name)
            place = ((ids >= span.start) & (ids < span.stop)).nonzero().view(-1)
            features.append(tables[name][ids[place] - span.start].to(device, dtype))
            places.append(place)
    has_features = torch.zeros(len(ids), dtype=torch.bool)
    has_features[torch.cat([ids[:0], *places])] = True
    places.append((~has_features).nonzero().view(-1))
    order = torch.cat(places).argsort()
    in_order = torch.equal(order, torch.arange(len(order)))
    return TypedRows(
        features=tuple(features), num_embedded=len(places[-1]), order=None if in_order else order.to(device)
    )

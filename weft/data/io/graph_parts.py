"""A graph whose edges and features come in parts, to be gathered in memory or written part by part."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace

import torch
from torch import Tensor

from weft.data.checks.tensor_checks import DataWarning, cast
from weft.data.edges import build
from weft.data.fields import EdgeLabels, GraphFields
from weft.data.splits import Masks
from weft.data.tables.schema import Schema
from weft.data.vertex_names import VertexNames
from weft.storage.quantized_table import FeatureTable, QuantizedTable
from weft.storage.unnamed_files import release
from weft.utils.errors import InputError

MAX_QUANTIZED = 127
"""Largest absolute value of features in int8, so that their range is symmetric."""
MIN_STEPS = 16
"""Number of steps of int8 between the least and the largest value of a column below which a warning names it."""
BLOCK_ENTRIES = 1 << 20
"""Number of entries of features that are read at once."""


@dataclass(frozen=True, kw_only=True, eq=False)
class EdgesOfPart:
    """Some edges between vertex numbers, checked."""

    source: Tensor
    """int32 or int64 [e]: source of each edge."""
    target: Tensor
    """int32 or int64 [e]: target of each edge."""
    weight: Tensor | None = None
    """float32 [e]: edge weights."""
    features: Tensor | None = None
    """float32 [e, K]: edge features."""
    relation: Tensor | None = None
    """int16 [e]: position of each edge's relation in GraphParts.relations."""

    def rows(self, first: int, last: int) -> EdgesOfPart:
        """Return a range of the edges.

        Args:
            first: Position of the first edge.
            last: Position after the last edge.
        """
        return self.select(slice(first, last))

    def select(self, chosen: slice | Tensor) -> EdgesOfPart:
        """Return some of the edges, by a range or by flags, bool [e]."""
        tensors = {f.name: getattr(self, f.name) for f in fields(self)}
        return EdgesOfPart(**{name: rows[chosen] for name, rows in tensors.items() if rows is not None})


@dataclass(frozen=True, kw_only=True, eq=False)
class GraphParts:
    """A graph of N vertices whose edges and features are read on request, each time from the start."""

    name: str
    """Name of the graph."""
    edges: Callable[[], Iterator[EdgesOfPart]]
    """Function that yields the edges in parts.

    All parts have weights or none; all have features of one width or none; all have relations, in ascending order, or
    none.
    """
    place: str = "edges"
    """Name of the edges in errors, such as the path of their file."""
    num_vertices: int | None = None
    """N; None: one more than the largest id in the edges."""
    generated: bool = False
    """True if the edges are generated: they are valid, and cheaper to generate again than to keep in a file."""
    x: Callable[[], Iterator[FeatureTable]] | None = None
    """Function that yields the features in parts, [n, F] for the next n vertices each; None: no features.

    All parts have the same type, one of FEATURE_DTYPES, or are quantized with the same scales.
    """
    y: Tensor | None = None
    """Labels as in GraphFields."""
    masks: Masks = field(default_factory=Masks)
    """Vertices to train, validate and test on."""
    vertex_names: VertexNames | None = None
    """Names of the vertices, if they have any."""
    vertex_types: tuple[str, ...] = ()
    """Names of the vertex types, as in GraphFields."""
    type_offsets: tuple[int, ...] = ()
    """Id ranges of the vertex types, as in GraphFields."""
    relations: tuple[str, ...] = ()
    """Names of the relations, as in GraphFields."""
    edge_labels: Callable[[], EdgeLabels] | None = None
    """Function that reads the labelled edges, whose endpoints are checked; None: no edge has a label."""
    features: Mapping[str, Callable[[], Iterator[FeatureTable]]] = field(default_factory=dict)
    """Functions that yield the features of the types that have some, in parts, if there is no `x`."""
    schema: Schema | None = None
    """Tables that the graph comes from, as in GraphFields."""
    undirected: bool = False
    """If True, the reverse of each edge is added and duplicates are merged.

    The first of several equal edges is kept; an edge as given wins over a reversed one.
    """


def with_feature_dtype(parts: GraphParts, dtype: torch.dtype) -> GraphParts:
    """Return the graph with features that are rounded to a dtype when they are read, see `converted`.

    Args:
        parts: The graph.
        dtype: One of FEATURE_DTYPES, or int8.

    Raises:
        InputError: If the graph has no features.
    """
    if parts.x is None and not parts.features:
        raise InputError(f"{parts.name} has no features, so they have no type: add some first")

    def rounded(read: Callable[[], Iterator[FeatureTable]]) -> Callable[[], Iterator[FeatureTable]]:
        return lambda: converted("features", read, dtype)

    features = {name: rounded(read) for name, read in parts.features.items()}
    return replace(parts, x=None if parts.x is None else rounded(parts.x), features=features)


def converted(field: str, read: Callable[[], Iterable[FeatureTable]], dtype: torch.dtype) -> Iterator[FeatureTable]:
    """Yield features rounded to a dtype, in parts.

    In int8, a feature is a whole number times the scale of its column, which is the largest absolute value of the
    column divided by 127, or 1 if that is below the smallest normal float32. So the error is at most half a scale. The
    features are read twice: first for the scales. A column whose values then differ by few scales is named by a warning
    (DataWarning).

    Args:
        field: Name of the features in errors.
        read: Function that returns the features in parts, each time from the start.
        dtype: One of FEATURE_DTYPES, or int8.

    Raises:
        InputError: At the first feature, or in int8 the first column, that is beyond the range of the dtype.
    """
    if dtype != torch.int8:
        yield from (cast(field, part[:], dtype) for part in read())
        return
    scale = quantization_scale(field, float_blocks(read()))
    for block in float_blocks(read()):
        yield QuantizedTable((block / scale).round().to(torch.int8), scale)


def quantization_scale(field: str, blocks: Iterable[Tensor]) -> Tensor:
    """Return the scale of each column in int8, float32 [F], as `converted` describes it; [0] without rows.

    Args:
        field: Name of the features in errors.
        blocks: The features in parts, float32 [n, F].

    Raises:
        InputError: At the first column that is beyond the range of int8.
    """
    bounds = [torch.stack([block.amin(0), block.amax(0)]) for block in blocks if len(block)]
    if not bounds:
        return torch.ones(0)
    least, most = torch.stack(bounds)[:, 0].amin(0), torch.stack(bounds)[:, 1].amax(0)
    largest = torch.maximum(-least, most)
    if len(columns := (~(2 * largest).isfinite()).nonzero()):
        column = int(columns[0])
        raise InputError(
            f"{field}[:, {column}] has {largest[column]:g}, which int8 cannot hold: scale the column, or use float32"
        )
    scale = largest / MAX_QUANTIZED
    scale[scale < torch.finfo(scale.dtype).tiny] = 1
    if len(columns := ((most > least) & (most - least < MIN_STEPS * scale)).nonzero()):
        column, others = int(columns[0]), f" (and {len(columns) - 1} other columns)" if len(columns) > 1 else ""
        warnings.warn(
            f"{field}[:, {column}]{others}: int8 has few numbers between {least[column]:g} and {most[column]:g}: "
            "subtract an offset from the column, or store the features in float16",
            DataWarning,
            stacklevel=2,
        )
    return scale


def float_blocks(parts: Iterable[FeatureTable]) -> Iterator[Tensor]:
    """Yield features in float32, a few rows at a time."""
    for part in parts:
        step = max(1, BLOCK_ENTRIES // max(1, part.shape[1]))
        for first in range(0, max(len(part), 1), step):
            yield part[first : first + step].float()
            release(part)


def gather_parts(parts: GraphParts) -> GraphFields:
    """Return the fields of the whole graph in memory."""
    pieces, none = list(parts.edges()), torch.empty(0, dtype=torch.int64)
    endpoints = (concatenate_parts(getattr(part, side) for part in pieces) for side in ("source", "target"))
    source, target = (none if ids is None else ids for ids in endpoints)
    weight, features, relation = (
        concatenate_parts(getattr(part, name) for part in pieces) for name in ("weight", "features", "relation")
    )
    edges = build(
        source,
        target,
        num_vertices=parts.num_vertices,
        weight=weight,
        edge_features=features,
        edge_type=relation,
        undirected=parts.undirected,
    )
    rows_of_type = {name: concatenate_tables(read()) for name, read in parts.features.items()}
    return replace(
        edges,
        name=parts.name,
        x=None if parts.x is None else concatenate_tables(parts.x()),
        y=parts.y,
        vertex_names=parts.vertex_names,
        vertex_types=parts.vertex_types,
        type_offsets=parts.type_offsets,
        relations=parts.relations,
        features={name: rows for name, rows in rows_of_type.items() if rows is not None},
        edge_labels=None if parts.edge_labels is None else parts.edge_labels(),
        schema=parts.schema,
        **parts.masks._asdict(),
    )


def concatenate_parts(parts: Iterable[Tensor | None]) -> Tensor | None:
    """Return the rows of all parts that are not None, concatenated; None if there are none."""
    present = [part for part in parts if part is not None]
    return (present[0] if len(present) == 1 else torch.cat(present)) if present else None


def concatenate_tables(parts: Iterable[FeatureTable]) -> FeatureTable | None:
    """Return features in parts, of one type, as one table; None if there are none."""
    tables = list(parts)
    quantized = [table for table in tables if isinstance(table, QuantizedTable)]
    if quantized:
        return QuantizedTable(torch.cat([table.values for table in quantized]), quantized[0].scale)
    return concatenate_parts(table for table in tables if isinstance(table, Tensor))


def require_rows(field: str, num_rows: int, num_vertices: int) -> None:
    """Check that there is a row for each vertex.

    Args:
        field: Name of the rows in errors.
        num_rows: Number of rows.
        num_vertices: Number of vertices.

    Raises:
        InputError: If there is not.
    """
    if num_rows != num_vertices:
        raise InputError(
            f"{field} has {num_rows} rows, but the graph has {num_vertices} vertices: give one row per vertex"
        )

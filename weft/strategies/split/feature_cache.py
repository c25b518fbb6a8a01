"""Cache of the feature rows that a rank's mini-batches read most often (GSplit, section 4.3)."""

from __future__ import annotations

import torch
from torch import Tensor

from weft.comm import Group
from weft.data import Graph
from weft.nn import FeatureTables
from weft.storage.quantized_table import FeatureTable


def feature_bytes(graph: Graph, itemsize: int) -> Tensor:
    """Return the bytes of each vertex's features, int64 [N]; 0 if it has none.

    Args:
        graph: The graph.
        itemsize: Bytes of an element.
    """
    num_bytes = torch.full((graph.num_vertices,), graph.num_features * itemsize)
    for name, table in graph.features.items():
        span = graph.type_range(name)
        num_bytes[span.start : span.stop] = table.shape[1] * itemsize
    return num_bytes


def most_read(vertices: Tensor, reads: Tensor, row_bytes: Tensor, limit: int) -> Tensor:
    """Return the vertices that are read most often and fit in a limit, int64, ascending.

    Args:
        vertices: Candidate vertices, int64 [n].
        reads: Number of reads of each vertex, int64 [N].
        row_bytes: Bytes of each vertex's features, int64 [N]; 0 if it has none.
        limit: Bytes of the cache.
    """
    order = vertices[row_bytes[vertices] > 0]
    order = order[reads[order].argsort(descending=True, stable=True)]
    return order[row_bytes[order].cumsum(0) <= limit].sort().values


class FeatureCache:
    """Rows of a table [m, F], some of which are cached on a device; the others are read from the table each time.

    Args:
        table: All rows.
        cached: Cached rows, int64, ascending.
        device: Device of the cache and of the results.
        dtype: Data type of the results.
        counted: Group whose meter counts cached rows (`cache_hits`) and rows read from the table (`cache_misses`).
    """

    def __init__(
        self, table: FeatureTable, cached: Tensor, device: torch.device, dtype: torch.dtype, counted: Group
    ) -> None:
        self.table, self.device, self.dtype, self.counted = table, device, dtype, counted
        self.rows = self._read(cached)
        self.position = torch.full((len(table),), -1, dtype=torch.int32)
        """Position of each row in the cache; -1 if it is not cached."""
        self.position[cached] = torch.arange(len(cached), dtype=torch.int32)

    def __getitem__(self, row_ids: Tensor) -> Tensor:
        """Return rows [n, F] of the table by their ids, int64 [n]."""
        position = self.position[row_ids]
        hits, misses = (position >= 0).nonzero().view(-1), (position < 0).nonzero().view(-1)
        rows = self.rows.new_empty(len(row_ids), self.rows.shape[1])
        rows[hits.to(self.device)] = self.rows[position[hits].to(self.device)]
        rows[misses.to(self.device)] = self._read(row_ids[misses])
        self.counted.meter.counts.sampled.update(cache_hits=len(hits), cache_misses=len(misses))
        return rows

    def _read(self, row_ids: Tensor) -> Tensor:
        return self.table[row_ids].to(self.device, self.dtype)


def cached_tables(
    graph: Graph, cached: Tensor, device: torch.device, dtype: torch.dtype, counted: Group
) -> FeatureTables:
    """Return the features of a graph, with those of some vertices cached.

    Args:
        graph: The graph.
        cached: Vertices whose features are cached, int64, ascending.
        device: Device of the cache and of the results.
        dtype: Data type of the results.
        counted: Group whose meter counts hits and misses.
    """

    def make_cache(table: FeatureTable, span: range) -> FeatureCache:
        of_table = cached[(cached >= span.start) & (cached < span.stop)] - span.start
        return FeatureCache(table, of_table, device, dtype, counted)

    return FeatureTables(
        x=None if graph.x is None else make_cache(graph.x, range(graph.num_vertices)),
        features={name: make_cache(table, graph.type_range(name)) for name, table in graph.features.items()},
    )

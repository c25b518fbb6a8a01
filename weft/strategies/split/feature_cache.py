"""Rows of features that a rank holds for its mini-batches: those that are read most often (GSplit, section 4.3)."""

from __future__ import annotations

import torch
from torch import Tensor

from weft.comm import Group
from weft.data import Graph
from weft.nn import FeatureTables


def feature_bytes(graph: Graph, itemsize: int) -> Tensor:
    """What each vertex's features take, at so many bytes a number: int64 [N]; 0 where it has none."""
    found = torch.full((graph.num_vertices,), graph.num_features * itemsize)
    for name, table in graph.features.items():
        span = graph.type_range(name)
        found[span.start : span.stop] = table.shape[1] * itemsize
    return found


def most_read(vertices: Tensor, reads: Tensor, row_bytes: Tensor, limit: int) -> Tensor:
    """Those of some vertices, int64 [n], that are read most often and fit in so many bytes: int64, ascending.

    reads: int64 [N], how often each is. row_bytes: int64 [N], what it takes; 0 where there is nothing to hold.
    """
    order = vertices[row_bytes[vertices] > 0]
    order = order[reads[order].argsort(descending=True, stable=True)]
    return order[row_bytes[order].cumsum(0) <= limit].sort().values


class FeatureCache:
    """The rows of a table [m, F], of which some are held on a device, and the others are read from it each time.

    held: int64, ascending, which. counted: its meter counts the rows found (`cache_hits`) and read (`cache_misses`).
    """

    def __init__(self, table: Tensor, held: Tensor, device: torch.device, dtype: torch.dtype, counted: Group) -> None:
        self.table, self.device, self.dtype, self.counted = table, device, dtype, counted
        self.rows = self._read(held)
        self.place = torch.full((len(table),), -1, dtype=torch.int32)
        """Where a row is held; -1: nowhere."""
        self.place[held] = torch.arange(len(held), dtype=torch.int32)

    def __getitem__(self, wanted: Tensor) -> Tensor:
        """Some rows, int64 [n], of the table: [n, F]."""
        place = self.place[wanted]
        found, missing = (place >= 0).nonzero().view(-1), (place < 0).nonzero().view(-1)
        rows = self.rows.new_empty(len(wanted), self.rows.shape[1])
        rows[found.to(self.device)] = self.rows[place[found].to(self.device)]
        rows[missing.to(self.device)] = self._read(wanted[missing])
        self.counted.meter.counts.sampled.update(cache_hits=len(found), cache_misses=len(missing))
        return rows

    def _read(self, wanted: Tensor) -> Tensor:
        return self.table[wanted].to(self.device, self.dtype)


def cached_tables(
    graph: Graph, held: Tensor, device: torch.device, dtype: torch.dtype, counted: Group
) -> FeatureTables:
    """A graph's features, of which those of some vertices are held; as for `CachedRows`."""

    def cached(table: Tensor, span: range) -> FeatureCache:
        here = held[(held >= span.start) & (held < span.stop)] - span.start
        return FeatureCache(table, here, device, dtype, counted)

    return FeatureTables(
        x=None if graph.x is None else cached(graph.x, range(graph.num_vertices)),
        features={name: cached(table, graph.type_range(name)) for name, table in graph.features.items()},
    )

"""The views of a range of rows, and of a chunk, where a strategy makes the aggregates itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from weft.nn import SPREAD, GraphView, Inputs, Topology
from weft.runtime.meter import Meter
from weft.utils.errors import InputError


def refused(*_: Any, **__: Any) -> Any:
    """In place of what no range of rows has, where somebody's own layer, norm or activation asks for it."""
    raise InputError(
        "strategy offload: an aggregate, edges or the sum of all rows is asked for where only some rows are at hand: "
        "leave that to weft's own layers and BatchNorm, or take another strategy"
    )


class RowsView(GraphView):
    """The view of some rows while no aggregate is made; what couples rows is asked at boundaries.

    ids: int64 [n], original ids. embedded: gives those of an embedding's rows that are theirs.
    """

    traits = SPREAD

    def __init__(
        self,
        topology: Topology,
        ids: Tensor,
        num_vertices: int,
        *,
        key: int,
        calls: int,
        inputs: Inputs,
        embedded: Callable[[Tensor], Tensor],
        meter: Meter | None = None,
    ) -> None:
        super().__init__(topology, key=key, inputs=inputs, meter=meter)
        self._ids, self._num_vertices, self._calls, self._embedded = ids, num_vertices, calls, embedded

    @property
    def row_ids(self) -> Tensor:
        return self._ids

    @property
    def num_vertices(self) -> int:
        return self._num_vertices

    @property
    def calls(self) -> int:
        """How many dropout masks it has drawn."""
        return self._calls

    def embed(self, weight: Tensor) -> Tensor:
        return self._embedded(weight)

    aggregate = block = total = refused


class ChunkView(GraphView):
    """The view of a whole layer on a chunk: its targets' rows stand first, those in slots behind them."""

    def __init__(self, topology: Topology, num_vertices: int, *, key: int, calls: int) -> None:
        super().__init__(topology, key=key)
        self._num_vertices, self._calls = num_vertices, calls

    @property
    def num_vertices(self) -> int:
        return self._num_vertices

    def targets(self, x: Tensor) -> Tensor:
        return x[: self.topology.adjacency.num_targets]

    def block(self, x: Tensor) -> tuple[Tensor, Tensor, int]:
        return x, self.topology.edge_index, self.topology.adjacency.num_targets

    total = refused

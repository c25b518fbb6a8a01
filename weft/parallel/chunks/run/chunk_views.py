"""Views that a layer gets when it runs on a range of rows, or on one chunk of the graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from weft.nn import SPREAD, GraphView, Inputs, Topology, TypedBlock
from weft.nn.aggregate.typed_block import TypeOrder
from weft.runtime.meter import Meter
from weft.utils.errors import InputError


def refused(*_: Any, **__: Any) -> Any:
    """Raise the error for operations that need more rows than a range has."""
    raise InputError(
        "a custom layer, norm or activation requests an aggregate, the edges or the sum of all rows, but gets only "
        "some rows at a time: use a layer of weft.nn or BatchNorm for this, or another strategy"
    )


class RowsView(GraphView):
    """View of a range of rows without edges; aggregates and sums are requested at boundaries instead.

    Args:
        topology: Topology of the whole graph.
        ids: Original ids of the rows, int64 [n].
        num_vertices: Number of vertices of the whole graph.
        key: Random key of dropout.
        calls: Number of dropout masks that were drawn before.
        inputs: Features of the rows.
        embedded: Returns the rows of an embedding that belong to this range.
        meter: Counts operations; None: not counted.
    """

    traits, has_all_sources = SPREAD, False

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
        """Number of dropout masks that were drawn so far."""
        return self._calls

    def type_order(self, vertex_type: Tensor, num_types: int) -> TypeOrder:
        return TypeOrder.of(vertex_type, num_types)  # not the topology's, which belongs to other rows

    def embed(self, weight: Tensor) -> Tensor:
        return self._embedded(weight)

    aggregate = block = total = refused


class ChunkView(GraphView):
    """View of a chunk for a layer that runs as a whole.

    The rows are those of the targets, followed by those in the slots of the buffer.

    Args:
        topology: Edges of the chunk, in the layout "whole".
        num_vertices: Number of vertices of the whole graph.
        key: Random key of dropout.
        calls: Number of dropout masks that were drawn before.
    """

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

    def typed_block(self, vertex_type: Tensor, num_targets: int, num_types: int) -> TypedBlock:
        # Not divided by type: some slots have rows of no vertex.
        return self.topology.typed_block(vertex_type, num_targets, num_types, divided=False)

    total = refused

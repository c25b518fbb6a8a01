"""One view for every rank, composed of an exchange: it brings the rows, the aggregate runs on the block, it settles.

An exchange is an adjoint pair: what it moves forward, the gradients move back. Its byte formula stands beside it, apart
from the code that sends, so that what is counted can be held against what was foreseen.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

from torch import Tensor

from weft.comm import Group, sum_over_ranks
from weft.nn import Aggregate, GraphView, Inputs, OwnRelationRows, Rows, Topology, ViewTraits, sum_rows
from weft.utils.random import RandomKey


class Exchange(ABC):
    """How a rank's rows get to the edges that it has, and results back to its rows.

    topology: of the edges that come first. row_ids: int64 [n], the original ids of the rank's rows.
    """

    def __init__(self, topology: Topology, row_ids: Tensor, num_vertices: int, group: Group) -> None:
        self.topology, self.row_ids, self.num_vertices, self.group = topology, row_ids, num_vertices, group

    @abstractmethod
    def aggregate(self, view: PlacedView, op: Aggregate, rows: Rows, steps: int) -> Tensor:
        """Brings the rows, aggregates them on the block at hand, and settles the result: [n, F] of this rank's rows."""

    @property
    def relation_rows(self) -> OwnRelationRows:
        """The pairs of one of this rank's vertices and a relation."""
        return self.topology.relation_rows

    def targets(self, x: Tensor) -> Tensor:
        """The rows of x that have results."""
        return x

    def own_rows(self, x: Tensor) -> Tensor:
        """The rows of x that this rank answers for."""
        return x

    def embed(self, weight: Tensor) -> Tensor:
        """The rows of embedded vertices that the rank computes with, from those that it keeps."""
        return weight

    def block(self, view: PlacedView, x: Tensor) -> tuple[Tensor, Tensor, int]:
        """(source rows, edge_index [2, E], number of targets), for a layer that wants the edges themselves."""
        del view
        return x, self.topology.edge_index, self.num_vertices


class Identity(Exchange):
    """One rank: every row and every edge is here."""

    def aggregate(self, view: PlacedView, op: Aggregate, rows: Rows, steps: int) -> Tensor:
        return view.run(op, op.prepare(self.topology, rows), steps, self.topology)


class PlacedView(GraphView):
    """What a layer sees of the graph on a rank.

    traits: as the outline of its plan was found with. masks: where the key of a call that draws is, if not by `key`.
    """

    def __init__(
        self,
        exchange: Exchange,
        traits: ViewTraits,
        *,
        key: int,
        inputs: Inputs,
        masks: Callable[[int], Tensor] | None = None,
    ) -> None:
        super().__init__(exchange.topology, key=key, inputs=inputs, meter=exchange.group.meter)
        self.exchange, self.traits, self._masks = exchange, traits, masks

    @property
    def num_vertices(self) -> int:
        return self.exchange.num_vertices

    @property
    def row_ids(self) -> Tensor:
        return self.exchange.row_ids

    @property
    def relation_rows(self) -> OwnRelationRows:
        return self.exchange.relation_rows

    def targets(self, x: Tensor) -> Tensor:
        return self.exchange.targets(x)

    def embed(self, weight: Tensor) -> Tensor:
        return self.exchange.embed(weight)

    def block(self, x: Tensor) -> tuple[Tensor, Tensor, int]:
        self.check_block()
        return self.exchange.block(self, x)

    def total(self, x: Tensor) -> Tensor:
        own = sum_rows(self.exchange.own_rows(x))
        return sum_over_ranks(own, self.exchange.group, tag="statistics")

    def _next_key(self) -> RandomKey:
        key = super()._next_key()
        return key if self._masks is None else self._masks(self._calls)

    def _aggregate(self, op: Aggregate, rows: Rows, steps: int) -> Tensor:
        return self.exchange.aggregate(self, op, rows, steps)

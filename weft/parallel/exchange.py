"""The view that a layer sees on a rank, composed of a topology and an exchange.

An exchange moves rows before and after an aggregate, and its adjoint moves gradients the other way. Each exchange has
its byte formula next to it, separate from the code that sends, so that tests compare counted with estimated bytes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

from torch import Tensor

from weft.comm import Group, sum_over_ranks
from weft.nn import Aggregate, GraphView, Inputs, OwnRelationRows, Rows, Topology, ViewTraits, sum_rows
from weft.utils.random import RandomKey


class Exchange(ABC):
    """Movement of a rank's rows to the edges that it aggregates, and of the results back.

    Args:
        topology: Topology of the first aggregate.
        row_ids: Original ids of the rank's rows, int64 [n].
        num_vertices: Number of vertices of all ranks whose rows the stage has.
        group: The ranks.
    """

    def __init__(self, topology: Topology, row_ids: Tensor, num_vertices: int, group: Group) -> None:
        self.topology, self.row_ids, self.num_vertices, self.group = topology, row_ids, num_vertices, group

    @abstractmethod
    def aggregate(self, view: GraphView, op: Aggregate, rows: Rows, steps: int) -> Tensor:
        """Return the result [n, F] of an aggregate for this rank's rows.

        Exchanges rows between ranks before the aggregate, and its results after it, as the strategy requires.

        Args:
            view: View that requests the aggregate.
            op: The aggregate.
            rows: Input rows of the aggregate, by name.
            steps: Number of times that the aggregate is applied.
        """

    @property
    def relation_rows(self) -> OwnRelationRows:
        """Pairs of a relation and a vertex of this rank."""
        return self.topology.relation_rows

    @property
    def has_all_sources(self) -> bool:
        """True if `block` returns the rows that it gets: there is no other rank."""
        return self.group.size == 1

    def targets(self, x: Tensor) -> Tensor:
        """Return the rows of `x` for which the aggregate has results, if these may be fewer (`ViewTraits`)."""
        return x

    def own_rows(self, x: Tensor) -> Tensor:
        """Return the rows of `x` that this rank is responsible for."""
        return x

    def embed(self, weight: Tensor) -> Tensor:
        """Return the embedding rows that the rank computes with, from those that it stores."""
        return weight

    def block(self, view: GraphView, x: Tensor) -> tuple[Tensor, Tensor, int]:
        """Return (source rows, edge_index [2, E], number of targets) for a layer that reads the edges itself.

        Args:
            view: View that requests the block.
            x: The rank's rows [n, F].
        """
        del view
        return x.as_subclass(Tensor), self.topology.edge_index, self.num_vertices  # all features, also zeros


class Identity(Exchange):
    """Exchange of a single rank, which has every row and every edge."""

    def aggregate(self, view: GraphView, op: Aggregate, rows: Rows, steps: int) -> Tensor:
        return view.run(op, op.prepare(self.topology, rows), steps, self.topology)


class PlacedView(GraphView):
    """View of the graph for a layer on a rank.

    Args:
        exchange: Exchange of the model's stage.
        traits: The `ViewTraits` with which the plan's outline was computed.
        key: Random key of the stage in this step.
        inputs: Input rows of the model.
        masks: Function from a dropout call's number to its random key; None: keys are derived from `key`.
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
        # Slicing would hide from the view that rows are the constant features, so it must do what the outline did.
        return self.exchange.targets(x) if self.traits.shrinks_rows else x

    def embed(self, weight: Tensor) -> Tensor:
        return self.exchange.embed(weight)

    def block(self, x: Tensor) -> tuple[Tensor, Tensor, int]:
        self.check_block()
        return self.exchange.block(self, x)

    def total(self, x: Tensor) -> Tensor:
        total = sum_rows(self.exchange.own_rows(x))
        return sum_over_ranks(total, self.exchange.group, tag="statistics")

    @property
    def has_all_sources(self) -> bool:
        return self.exchange.has_all_sources

    def _next_key(self) -> RandomKey:
        key = super()._next_key()
        return key if self._masks is None else self._masks(self._calls)

    def _aggregate(self, op: Aggregate, rows: Rows, steps: int) -> Tensor:
        return self.exchange.aggregate(self, op, rows, steps)

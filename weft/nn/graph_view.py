"""The view of a device that stores all rows and edges; the views of strategies derive from it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from weft.config.optimisations import ALL_OPTIMISATIONS, Optimisations
from weft.data import Adjacency
from weft.kernels import keyed_dropout
from weft.nn.aggregate.aggregate import Aggregate, Rows, Total, WholeLayer
from weft.nn.aggregate.attention import MaskKey
from weft.nn.aggregate.relations import OwnRelationRows
from weft.nn.aggregate.topology import Topology
from weft.nn.aggregate.typed_block import TypedBlock, TypeOrder
from weft.nn.layers.linear_transform import linear, sum_rows
from weft.nn.view import TypedRows, View
from weft.runtime.meter import Meter
from weft.utils.errors import InputError
from weft.utils.random import RandomKey
from weft.utils.random import key as make_key


class CostHints(NamedTuple):
    """Relative cost of aggregating one column in a training step, by the origin of the rows.

    Unit: passes over the edges or over the network, forward and backward together.
    """

    inputs: float
    """Cost for constant features."""
    dropped: float
    """Cost for constant features under dropout."""
    rows: float
    """Cost for rows that a layer computed, which have a gradient."""


Origin = Literal["inputs", "dropped", "rows"]
"""Origin of rows: constant features, constant features under dropout, or any other rows."""


class ViewTraits(NamedTuple):
    """Properties of a strategy's views: whether layers transform before they aggregate, and which calls fail."""

    cost_hints: CostHints
    """Costs by which `View.transform_first` decides."""
    sparse_first: bool = False
    """True if sparse constant features may be transformed before their aggregate, which is then not cached."""
    block_error: str = ""
    """Message of the error if a layer calls `View.block`. Empty: the call is allowed."""
    shrinks_rows: bool = False
    """True if a stage may have fewer rows after its aggregate than before."""
    alternative: str = ""
    """Other strategy to use, for the error if `shrinks_rows` makes a stage impossible. Empty: none."""


ONE_DEVICE = ViewTraits(CostHints(inputs=1, dropped=1, rows=2), sparse_first=True)
"""Traits of a view that stores all rows and edges."""
SPREAD = ViewTraits(CostHints(inputs=1, dropped=1, rows=4))
"""Traits of a view whose rows cross a network, or are copied from the host, forward and backward."""


@dataclass(kw_only=True)
class Inputs:
    """Constant features of a run, with the results that are computed from them only once."""

    rows: Tensor | None = None
    """Features [n, F]; [n, 0] if the vertices have no features of one width."""
    optimisations: Optimisations = ALL_OPTIMISATIONS
    """Optimisations that are on."""
    sparse_first: bool = False
    """True if transforming sparse features before their aggregate is cheaper than after it."""
    cached: dict[tuple[Aggregate, int], Tensor] = field(default_factory=dict)
    """Aggregates of the features, by aggregate and number of steps."""
    typed: TypedRows | None = None
    """Features by vertex type, if the vertices have no features of one width."""


class GraphView(View):
    """View of a device that stores all rows and edges.

    Args:
        topology: The edges.
        key: Key of the dropout masks.
        inputs: Constant features; None: there are none.
        meter: Counts aggregated edges; None: a new one.
    """

    traits = ONE_DEVICE

    def __init__(
        self, topology: Topology, *, key: int = 0, inputs: Inputs | None = None, meter: Meter | None = None
    ) -> None:
        self.topology = topology
        self.inputs = inputs or Inputs()
        self.meter = meter or Meter()
        self._key = key
        self._calls = 0
        self._dropped: Tensor | None = None
        self._mask: tuple[RandomKey, float] = (0, 0.0)

    @classmethod
    def of(
        cls,
        adjacency: Adjacency,
        *,
        edge_features: Tensor | None = None,
        edge_type: Tensor | None = None,
        num_relations: int = 0,
        key: int = 0,
    ) -> GraphView:
        """Return a view of a graph, for calling layers without `weft.train`.

        Args:
            adjacency: The E in-edges.
            edge_features: [E, K], in the order of the edges.
            edge_type: Relation of each edge, integer [E].
            num_relations: Number of relations.
            key: Key of the dropout masks.
        """
        topology = Topology(adjacency, edge_features=edge_features, edge_type=edge_type, num_relations=num_relations)
        return cls(topology, key=key)

    @property
    def num_vertices(self) -> int:
        return self.topology.adjacency.num_targets

    @property
    def row_ids(self) -> Tensor:
        """Original ids of the rows, int64 [n], which key dropout masks."""
        return self.topology.ids

    def aggregate(self, op: Aggregate, rows: Rows, steps: int = 1) -> Tensor:
        x = rows[op.first]
        if isinstance(op, WholeLayer):
            y: Tensor = op.layer(self, x) if steps == 1 else op.layer(self, x, steps)
            return y
        if isinstance(op, Total):
            return self.total(x)
        if op.plain and self.aggregates_once(x):
            return self._aggregate_once(op, rows, steps)
        return self._aggregate(op, rows, steps)

    @property
    def relation_rows(self) -> OwnRelationRows:
        return self.topology.relation_rows

    @property
    def typed_rows(self) -> TypedRows:
        if self.inputs.typed is None:
            raise InputError("the model has a TypedInput, but this graph has x: build the model without typed=")
        return self.inputs.typed

    def embed(self, weight: Tensor) -> Tensor:
        return weight

    def targets(self, x: Tensor) -> Tensor:
        return x

    def check_block(self) -> None:
        """Raise InputError if this strategy does not let a layer read the edges."""
        if self.traits.block_error:
            raise InputError(self.traits.block_error)

    def block(self, x: Tensor) -> tuple[Tensor, Tensor, int]:
        self.check_block()
        return x, self.topology.edge_index, self.num_vertices

    @property
    def has_all_sources(self) -> bool:
        return True

    @property
    def edge_features(self) -> Tensor | None:
        self.check_block()
        return self.topology.edge_features

    @property
    def edge_weight(self) -> Tensor | None:
        self.check_block()
        return self.topology.adjacency.weight

    @property
    def edge_type(self) -> Tensor | None:
        self.check_block()
        types = self.topology.edge_type
        return None if types is None else types.to(self.topology.adjacency.device, torch.int64)

    def typed_block(self, vertex_type: Tensor, num_targets: int, num_types: int) -> TypedBlock:
        return self.topology.typed_block(vertex_type, num_targets, num_types)

    def type_order(self, vertex_type: Tensor, num_types: int) -> TypeOrder:
        return self.topology.type_order(vertex_type, num_types)

    def total(self, x: Tensor) -> Tensor:
        return sum_rows(x)

    def dropout(self, x: Tensor, p: float, *, relu: bool = False, rows: slice | Tensor = slice(None)) -> Tensor:
        if relu and (p == 0 or not self.inputs.optimisations.fuse):
            x, relu = torch.relu(x), False
        if p == 0:
            return x
        key = self._next_key()
        dropped = self._drop(x, key, p, relu, rows)
        if self.origin(x) == "inputs":
            self._dropped, self._mask = dropped, (key, p)
        return dropped

    def mask_key(self, p: float) -> MaskKey | None:
        return None if p == 0 else MaskKey(p, self._next_key())

    def linear(self, x: Tensor, weight: Tensor, added: Tensor | None = None, *, summed: bool = False) -> Tensor:
        return linear(x, weight, added, summed=summed and self.inputs.optimisations.lines)

    def transform_first(self, x: Tensor, out_width: int) -> bool:
        origin, inputs = self.origin(x), self.inputs
        if not inputs.optimisations.swap:
            return False
        if origin == "inputs" and inputs.optimisations.reuse:
            return self.traits.sparse_first and inputs.sparse_first
        # Transformed first, the aggregated columns have a gradient whatever their origin: they cost as much as `rows`.
        unit: float = getattr(self.traits.cost_hints, origin)
        return out_width * self.traits.cost_hints.rows < x.shape[1] * unit

    def origin(self, x: Tensor) -> Origin:
        """Return whether x are the run's constant features, these under dropout, or rows that a layer computed."""
        if x is self.inputs.rows:
            return "inputs"
        return "dropped" if x is self._dropped else "rows"

    def aggregates_once(self, x: Tensor) -> bool:
        """Return whether plain aggregates of x are computed only once, because x is constant."""
        return self.inputs.optimisations.reuse and self.origin(x) == "inputs"

    def _aggregate_once(self, op: Aggregate, rows: Rows, steps: int) -> Tensor:
        """Return an aggregate of constant features, computed at the first call."""
        if (op, steps) not in self.inputs.cached:
            with self.meter.during("setup"), torch.no_grad():
                self.inputs.cached[op, steps] = self._aggregate(op, rows, steps)
        return self.inputs.cached[op, steps]

    def _aggregate(self, op: Aggregate, rows: Rows, steps: int) -> Tensor:
        """Return an aggregate over edges of this rank's rows."""
        return self.run(op, op.prepare(self.topology, rows), steps, self.topology)

    def _next_key(self) -> RandomKey:
        """Return the key of the next dropout mask."""
        self._calls += 1
        return make_key(self._key, self._calls)

    def _drop(self, x: Tensor, key: RandomKey, p: float, relu: bool, rows: slice | Tensor) -> Tensor:
        return keyed_dropout(x, self.row_ids[rows][: len(x)], key=key, p=p, relu=relu)

    def constant(self, x: Tensor, features: Tensor, ids: Tensor, first_column: int = 0) -> Tensor:
        """Return other rows or columns of the constant features, under the dropout that x went through.

        A rank that stores these features can compute them itself, without the network.

        Args:
            x: The constant features, or these under dropout.
            features: The rows or columns, [k, f].
            ids: Original ids of the rows, int64 [k].
            first_column: Number of the first of these columns.
        """
        if self.origin(x) == "inputs":
            return features
        key, p = self._mask
        return keyed_dropout(features, ids, key=key, p=p, first_column=first_column)

    def run(self, op: Aggregate, prepared: Rows, steps: int, topology: Topology) -> Tensor:
        """Return an aggregate of prepared rows; the meter counts its edges, forward and backward.

        Args:
            op: The aggregate.
            prepared: The tensors that `Aggregate.prepare` returned.
            steps: Number of times that it is applied.
            topology: The edges.
        """
        y = op.run(topology, prepared, steps)
        self.count(y, topology.adjacency.num_edges * steps)
        return y

    def count(self, y: Tensor, edges: int) -> None:
        """Count an aggregate now, and its transpose when the gradient of the result arrives.

        Args:
            y: The result [n, F].
            edges: Number of edges over which it was computed.
        """
        meter, width = self.meter, y.shape[1]
        meter.aggregate(edges, width)
        if y.requires_grad:
            y.register_hook(lambda _: meter.aggregate(edges, width))

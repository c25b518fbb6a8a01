"""The view of one device that holds every row and every edge, on which those of strategies are built."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from weft.config.optimisations import ALL_OPTIMISATIONS, Optimisations
from weft.data import Adjacency
from weft.kernels import keyed_dropout, spmm
from weft.nn.aggregate.aggregate import Aggregate, Rows, Total, WholeLayer
from weft.nn.aggregate.attention import MaskKey
from weft.nn.aggregate.relations import OwnRelationRows
from weft.nn.aggregate.topology import Topology
from weft.nn.layers.linear_transform import linear, sum_rows
from weft.nn.view import TypedRows, View
from weft.runtime.meter import Meter
from weft.utils.dtypes import sum_dtype
from weft.utils.errors import InputError
from weft.utils.random import RandomKey
from weft.utils.random import key as make_key


class CostHints(NamedTuple):
    """Passes over the edges, or over the network, that one column costs a training step, by where it comes from."""

    inputs: float
    dropped: float
    rows: float


Origin = Literal["inputs", "dropped", "rows"]


class ViewTraits(NamedTuple):
    """How a strategy's views weigh one order of map and aggregate against the other, and what they refuse."""

    cost_hints: CostHints
    sparse_first: bool = False
    """Whether the kept aggregate of constant features may be given up for maps by their nonzeros."""
    block_error: str = ""
    """Why a layer cannot have the edges themselves, where it cannot."""
    shrinks_rows: bool = False
    """Whether a stage may have fewer rows after its aggregate than before it."""


ONE_DEVICE = ViewTraits(CostHints(inputs=1, dropped=1, rows=2), sparse_first=True)
"""Of a view that has every row and every edge."""
SPREAD = ViewTraits(CostHints(inputs=1, dropped=1, rows=4))
"""Of a view whose rows cross a network, or come from the host, each way."""


@dataclass(kw_only=True)
class Inputs:
    """The constant features of a run, and what of them needs to be computed only once.

    sparse: so few are not zero that maps go by those. sparse_first: and are dearer after an aggregate.
    kept: aggregates of the rows, by what they are and their steps.
    typed: what there is instead, where the vertices have no features of one width; rows is [n, 0] then.
    """

    rows: Tensor | None = None
    optimisations: Optimisations = ALL_OPTIMISATIONS
    sparse: bool = False
    sparse_first: bool = False
    kept: dict[tuple[Aggregate, int], Tensor] = field(default_factory=dict)
    typed: TypedRows | None = None

    @cached_property
    def nonzeros(self) -> Adjacency:
        """The rows as a sparse matrix, of the type that they are summed in."""
        assert self.rows is not None
        return Adjacency.from_dense(self.rows).cast(sum_dtype(self.rows.dtype))


class GraphView(View):
    """The view of one device that holds every row and every edge."""

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
        """The view that a plain script hands to a layer; edge_features [E, K] and edge_type [E] are in edge order."""
        topology = Topology(adjacency, edge_features=edge_features, edge_type=edge_type, num_relations=num_relations)
        return cls(topology, key=key)

    @property
    def num_vertices(self) -> int:
        return self.topology.adjacency.num_targets

    @property
    def row_ids(self) -> Tensor:
        """original ids, int64 [n]: dropout's masks go by it."""
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
            raise InputError("a TypedInput is for a graph without x: leave it out")
        return self.inputs.typed

    def embed(self, weight: Tensor) -> Tensor:
        return weight

    def targets(self, x: Tensor) -> Tensor:
        return x

    def check_block(self) -> None:
        """InputError where a layer cannot have the edges themselves."""
        if self.traits.block_error:
            raise InputError(self.traits.block_error)

    def block(self, x: Tensor) -> tuple[Tensor, Tensor, int]:
        self.check_block()
        return x, self.topology.edge_index, self.num_vertices

    @property
    def edge_features(self) -> Tensor | None:
        self.check_block()
        return self.topology.edge_features

    @property
    def edge_weight(self) -> Tensor | None:
        self.check_block()
        return self.topology.adjacency.weight

    def total(self, x: Tensor) -> Tensor:
        return sum_rows(x)

    def dropout(self, x: Tensor, p: float, *, relu: bool = False) -> Tensor:
        if relu and (p == 0 or not self.inputs.optimisations.fuse):
            x, relu = torch.relu(x), False
        if p == 0:
            return x
        key = self._next_key()
        dropped = self._drop(x, key, p, relu)
        if self.origin(x) == "inputs":
            self._dropped, self._mask = dropped, (key, p)
        return dropped

    def mask_key(self, p: float) -> MaskKey | None:
        return None if p == 0 else MaskKey(p, self._next_key())

    def linear(self, x: Tensor, weight: Tensor, added: Tensor | None = None, *, summed: bool = False) -> Tensor:
        inputs = self.inputs
        if not (inputs.sparse and self.origin(x) == "inputs"):
            return linear(x, weight, added, summed=summed and inputs.optimisations.lines)
        y = spmm(inputs.nonzeros, weight, weighted=True)
        return (y if added is None else y.add_(added)).to(x.dtype)

    def transform_first(self, x: Tensor, out_width: int) -> bool:
        origin, inputs = self.origin(x), self.inputs
        if not inputs.optimisations.swap:
            return False
        if origin == "inputs" and inputs.optimisations.reuse:
            return self.traits.sparse_first and inputs.sparse_first
        unit: float = getattr(self.traits.cost_hints, origin)
        return out_width * self.traits.cost_hints.rows < x.shape[1] * unit

    def origin(self, x: Tensor) -> Origin:
        """Whether x is the run's constant features, those features under dropout, or rows that a layer computed."""
        if x is self.inputs.rows:
            return "inputs"
        return "dropped" if x is self._dropped else "rows"

    def aggregates_once(self, x: Tensor) -> bool:
        """Whether plain aggregates of x are made only once, since x is constant."""
        return self.inputs.optimisations.reuse and self.origin(x) == "inputs"

    def _aggregate_once(self, op: Aggregate, rows: Rows, steps: int) -> Tensor:
        """The aggregate of constant features, made when first asked for."""
        if (op, steps) not in self.inputs.kept:
            with self.meter.during("setup"), torch.no_grad():
                self.inputs.kept[op, steps] = self._aggregate(op, rows, steps)
        return self.inputs.kept[op, steps]

    def _aggregate(self, op: Aggregate, rows: Rows, steps: int) -> Tensor:
        """An aggregate over edges of this rank's rows."""
        return self.run(op, op.prepare(self.topology, rows), steps, self.topology)

    def _next_key(self) -> RandomKey:
        """That of the next mask."""
        self._calls += 1
        return make_key(self._key, self._calls)

    def _drop(self, x: Tensor, key: RandomKey, p: float, relu: bool) -> Tensor:
        return keyed_dropout(x, self.row_ids[: len(x)], key=key, p=p, relu=relu)

    def constant(self, x: Tensor, features: Tensor, ids: Tensor, first_column: int = 0) -> Tensor:
        """Other rows or columns of the features, under the dropout that made x of them: no byte on the network."""
        if self.origin(x) == "inputs":
            return features
        key, p = self._mask
        return keyed_dropout(features, ids, key=key, p=p, first_column=first_column)

    def run(self, op: Aggregate, prepared: Rows, steps: int, topology: Topology) -> Tensor:
        """An aggregate of prepared rows on the columns at hand, counted forward and backward."""
        y = op.run(topology, prepared, steps)
        self.count(y, topology.adjacency.num_edges * steps)
        return y

    def count(self, y: Tensor, edges: int) -> None:
        """Counts an aggregate of y's columns over `edges` now, and the transposed one when y's gradient arrives."""
        meter, width = self.meter, y.shape[1]
        meter.aggregate(edges, width)
        if y.requires_grad:
            y.register_hook(lambda _: meter.aggregate(edges, width))

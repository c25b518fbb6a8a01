"""A view that computes nothing and records its calls, under which a model runs on meta tensors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from weft.data import Adjacency
from weft.nn.aggregate.aggregate import Aggregate, Rows, Total
from weft.nn.aggregate.attention import AttendEdges
from weft.nn.aggregate.reduce import ByRelation
from weft.nn.aggregate.relations import ColumnTransform, OwnRelationRows
from weft.nn.aggregate.topology import Topology
from weft.nn.aggregate.typed_block import RelationEdges, TypedBlock, TypeOrder
from weft.nn.graph_view import GraphView, Inputs, Origin, ViewTraits
from weft.nn.layers.linear_transform import linear, sum_rows
from weft.nn.workload.flops import FlopCounter, FlopPosition
from weft.nn.workload.layer_sizes import BlockSize, LayerSizes, TypeCounts, TypedBlockSize
from weft.nn.workload.operation import GraphOperation
from weft.utils.errors import InputError
from weft.utils.random import RandomKey


class MetaExchange(Protocol):
    """Exchange of a stage that runs aggregates on meta tensors, and so allocates what a rank allocates."""

    @property
    def topology(self) -> Topology:
        """Topology of the stage's first aggregate."""

    @property
    def relation_rows(self) -> OwnRelationRows:
        """Relation rows of the rank's vertices."""

    def aggregate(self, view: GraphView, op: Aggregate, rows: Rows, steps: int) -> Tensor:
        """Return the result of an aggregate for the rank's rows.

        Args:
            view: View that requests the aggregate.
            op: The aggregate.
            rows: Input rows of the aggregate, by name.
            steps: Number of times that the aggregate is applied.
        """

    def block(self, view: GraphView, x: Tensor) -> tuple[Tensor, Tensor, int]:
        """Return (source rows, edge_index [2, E], number of targets) of the rank's block.

        Args:
            view: View that requests the block.
            x: The rank's rows [n, F].
        """

    def embed(self, weight: Tensor) -> Tensor:
        """Return the embedding rows that the rank computes with, from those that it stores."""


@dataclass
class OutlineState:
    """State that the views of one run share: its settings, and the operations recorded so far."""

    num_rows: int
    """Number of rows of the result. If `nested`, a model reads one more row for each aggregate."""
    steps: Counter[int]
    """Number of layers of message passing of each stage; in a second run, it is known from the first."""
    nested: bool
    """True if an aggregate has fewer rows after it than before."""
    counter: FlopCounter
    """Counts FLOPs and kernel calls."""
    running: list[str]
    """Classes of the modules that are running, innermost last."""
    num_relations: int = 0
    """Number of relations of the graph."""
    relation_rows: tuple[int, ...] = ()
    """Number of relation rows of the graph by relation, for a run on all vertices."""
    sizes: LayerSizes | None = None
    """Number of rows at each layer, for the run of one rank; None: `num_rows` applies."""
    exchanges: Sequence[MetaExchange] = ()
    """Exchange of each stage, for a run that allocates what one rank allocates; empty: aggregates only have a shape."""
    operations: list[GraphOperation] = field(default_factory=list)
    """Recorded operations."""
    flops: int = 0
    """FLOPs that had been counted at the last aggregate or block."""

    def rows_at(self, hop: int) -> int:
        """Return the number of rows before layer `hop` of message passing."""
        if self.sizes:
            return self.sizes.rows[hop]
        return self.num_rows + (self.steps.total() - hop if self.nested else 0)

    def mark(self, result: Tensor, number: int) -> Tensor:
        """Return the result of an operation, with a hook: FLOPs after its gradient count before the operation.

        Args:
            result: The result.
            number: Number of the operation.
        """
        if result.requires_grad:
            result.register_hook(lambda _: setattr(self.counter, "position", FlopPosition(number, backward=True)))
        return result


class OutlineView(GraphView):
    """View of a stage that computes nothing and records its calls, with the traits of another view.

    Args:
        traits: Traits of the strategy's views.
        stage: Number of the stage.
        state: State that the views of the run share.
        topology: Edges without data.
        inputs: Constant features without data.
    """

    def __init__(self, traits: ViewTraits, stage: int, state: OutlineState, topology: Topology, inputs: Inputs) -> None:
        super().__init__(topology, inputs=inputs)
        self.traits, self.stage, self.state = traits, stage, state

    @property
    def num_vertices(self) -> int:
        return self.state.num_rows

    @property
    def hop(self) -> int:
        """Number of layers of message passing in earlier stages."""
        return sum(self.state.steps[stage] for stage in range(self.stage))

    def _aggregate_once(self, op: Aggregate, rows: Rows, steps: int) -> Tensor:
        return self._aggregate(op, rows, steps)

    def _aggregate(self, op: Aggregate, rows: Rows, steps: int) -> Tensor:
        x = rows[op.first]
        others = [tensor for name, tensor in rows.items() if name != op.first]
        if isinstance(op, AttendEdges) and op.has_edge_map:
            self._check_edge_features(len(rows["edge_map"]))
        origin = self.origin(x) if op.plain else "rows"
        number = self._record(x, op, *others, steps=steps, origin=origin, weighted=op.reads_weight)
        by_relation = isinstance(op, ByRelation)
        num_rows = sum(self.relation_rows.counts) if by_relation else self.state.rows_at(self.hop + steps)
        if not self.state.exchanges:
            return self._result(num_rows, x, *others)
        if op.plain and self.aggregates_once(x):
            # Kept from before the step, so it must not count: one row, expanded. Its strides tell it from a transpose.
            return x.new_empty(1, x.shape[1]).expand(num_rows, -1)  # strides tell rows from columns
        return self.state.mark(self.state.exchanges[self.stage].aggregate(self, op, rows, steps), number)

    def _check_edge_features(self, wanted: int) -> None:
        features, layer = self.topology.edge_features, self.state.running[-1]
        if features is None:
            raise InputError(
                f"{layer} attends by edge features, and the graph has none: give the graph edge_features "
                "[edges, features], or leave out --edge-attention (edge_width)"
            )
        if features.shape[1] != wanted:
            raise InputError(
                f"{layer} takes {wanted} edge features, and the graph has {features.shape[1]}: create it with "
                f"edge_width={features.shape[1]}"
            )

    def relate(
        self, x: Tensor, weight: Tensor | Sequence[ColumnTransform], *, reduce: Literal["sum", "mean"] = "mean"
    ) -> Tensor:
        if isinstance(weight, Tensor) and len(weight) != self.state.num_relations:
            raise InputError(
                f"the model has weights for {len(weight)} relations, but the graph has {self.state.num_relations}: "
                "build it with typed=graph.typed of this graph"
            )
        return super().relate(x, weight, reduce=reduce)

    @property
    def relation_rows(self) -> OwnRelationRows:
        state, hop = self.state, self.hop
        if state.exchanges:
            return state.exchanges[self.stage].relation_rows
        counts = state.sizes.relation_rows[hop] if state.sizes else state.relation_rows
        num_rows = sum(counts)
        sums = Adjacency.without_data(num_rows, state.rows_at(hop + 1), num_rows)
        return OwnRelationRows(counts=counts, sums=sums)

    def embed(self, weight: Tensor) -> Tensor:
        number, num_rows = self._record(weight, "embed"), self.typed_rows.num_embedded
        if self.state.exchanges:
            return self.state.mark(self.state.exchanges[self.stage].embed(weight), number)
        recorded = self.state.mark(weight.view_as(weight), number)
        operations = self.state.operations
        operations[-1] = replace(operations[-1], vertex_fraction=num_rows / max(self.state.rows_at(0), 1))
        return weight.new_empty(num_rows, weight.shape[1]) + recorded.sum()

    def targets(self, x: Tensor) -> Tensor:
        num_targets = self.state.rows_at(self.hop + self.state.steps[self.stage])
        return x[:num_targets] if self.traits.shrinks_rows else x

    def total(self, x: Tensor) -> Tensor:
        return sum_rows(self.state.mark(x.view_as(x), self._record(x, Total())))

    def block(self, x: Tensor) -> tuple[Tensor, Tensor, int]:
        self.check_block()
        number = self._record(x, "block", origin=self.origin(x))
        if self.state.exchanges:
            sources, edge_index, num_targets = self.state.exchanges[self.stage].block(self, x)
            return self.state.mark(sources.view_as(sources), number), edge_index, num_targets
        targets, size = self._result(self.state.rows_at(self.hop + 1), x), self.block_size
        if size is None:
            return x.clone(), self.topology.edge_index, len(targets)
        edges = self.topology.edge_index.new_empty(2, size.edges)
        return x.new_empty(size.sources, x.shape[1]) + x.sum(), edges, size.targets

    @property
    def has_all_sources(self) -> bool:
        return self.state.sizes is not None and self.state.sizes.has_all_sources

    @property
    def block_size(self) -> BlockSize | None:
        """Size of the block of the last operation; None if it is unknown."""
        sizes, operations = self.state.sizes, self.state.operations
        return sizes.blocks[operations[-1].hop] if sizes and sizes.blocks and operations else None

    @property
    def typed_size(self) -> TypedBlockSize | None:
        """Size of the block of the last operation by type and relation; None if it is unknown."""
        sizes, operations = self.state.sizes, self.state.operations
        return sizes.typed_blocks[operations[-1].hop] if sizes and sizes.typed_blocks and operations else None

    def size_of_relation(self, relation: int, source: int, target: int) -> BlockSize | None:
        """Return the size of the edges of a relation and of the rows of its types; None if it is unknown.

        Args:
            relation: Number of the relation.
            source: Number of the vertex type of its sources.
            target: Number of the vertex type of its targets.
        """
        return self.typed_size and self.typed_size.of_relation(relation, source, target)

    def typed_block(self, vertex_type: Tensor, num_targets: int, num_types: int) -> TypedBlock:
        del num_types
        size = self.typed_size
        edges = (RelationEdges(vertex_type.new_empty(2, 0, dtype=torch.int64)),) * self.state.num_relations
        if size is None or not size.is_divided:
            return TypedBlock(edges, num_targets)
        return TypedBlock(edges, num_targets, size.sources.order(vertex_type), size.targets.order(vertex_type))

    def type_order(self, vertex_type: Tensor, num_types: int) -> TypeOrder:
        del num_types
        sizes, operations = self.state.sizes, self.state.operations
        if sizes and sizes.types:
            over_edges = (op for op in reversed(operations) if op.op != "embed" and not isinstance(op.op, Total))
            last = next(over_edges, None)
            return sizes.types[last.hop + last.steps if last else 0].order(vertex_type)
        of_types = (*map(len, self.typed_rows.features), self.typed_rows.num_embedded)
        return TypeCounts.spread(len(vertex_type), of_types).order(vertex_type)

    @property
    def edge_features(self) -> Tensor | None:
        features, size = super().edge_features, self.block_size
        return (
            features
            if features is None or size is None
            else features.new_empty(1, features.shape[1]).expand(size.edges, -1)
        )

    @property
    def edge_weight(self) -> Tensor | None:
        operations = self.state.operations
        if operations and operations[-1].op == "block":
            operations[-1] = replace(operations[-1], weighted=True)
        weight, size = super().edge_weight, self.block_size
        return weight if weight is None or size is None else weight.new_empty(1).expand(size.edges)

    def linear(self, x: Tensor, weight: Tensor, added: Tensor | None = None, *, summed: bool = False) -> Tensor:
        del summed
        return linear(x, weight, added)

    def _drop(self, x: Tensor, key: RandomKey, p: float, relu: bool, rows: slice | Tensor) -> Tensor:
        del key, p, rows
        return counted_dropout(self.state.counter, x, relu)

    def _record(
        self,
        x: Tensor,
        op: Aggregate | Literal["block", "embed"],
        *others: Tensor,
        steps: int = 1,
        origin: Origin = "rows",
        weighted: bool = False,
    ) -> int:
        """Record a call, and return its number.

        Args:
            x: Rows that the operation reads.
            op: The aggregate, or the kind of operation.
            *others: Further tensors that it reads.
            steps: Number of times that the aggregate is applied.
            origin: Origin of the rows.
            weighted: True if it uses edge weights.
        """
        state, number = self.state, len(self.state.operations)
        flops_before = state.counter.total
        state.operations.append(
            GraphOperation(
                op=op,
                width=x.shape[1],
                steps=steps,
                stage=self.stage,
                hop=self.hop,
                origin=origin,
                backward=any(tensor.requires_grad for tensor in (x, *others)) and torch.is_grad_enabled(),
                flops=(flops_before - state.flops) / max(state.num_rows, 1),
                weighted=weighted,
                layer=state.running[-1],
            )
        )
        state.counter.position = FlopPosition(number + 1)
        if op == "embed" or isinstance(op, Total):
            return number
        state.flops = flops_before
        if (
            self.traits.shrinks_rows
            and state.nested
            and (len(x) != state.rows_at(self.hop) or steps != state.steps[self.stage])
        ):
            alternative = f", or use {self.traits.alternative}" if self.traits.alternative else ""
            raise InputError(
                f"stage {self.stage} has aggregates one after another, or with different numbers of steps, so weft "
                f"cannot tell which rows a rank recomputes: give each its own stage{alternative}"
            )
        state.steps[self.stage] = max(state.steps[self.stage], steps)
        return number

    def _result(self, num_rows: int, x: Tensor, *others: Tensor) -> Tensor:
        """Return rows for the result of the last call, through which gradients reach the tensors that it reads.

        Args:
            num_rows: Number of rows of the result.
            x: Rows that the operation reads.
            *others: Further tensors that it reads.
        """
        result: Tensor = ResultStandIn.apply(num_rows, x, *others)  # type: ignore[no-untyped-call]
        return self.state.mark(result, len(self.state.operations) - 1)


class ResultStandIn(torch.autograd.Function):
    """Stand-in for an aggregate on meta tensors: it has the shapes of the result and of the gradients.

    It runs no operation that `FlopCounter` would record: the plan prices the aggregate itself.
    """

    @staticmethod
    def forward(ctx: Any, num_rows: int, *inputs: Tensor) -> Tensor:
        ctx.inputs = [(tensor.shape, tensor.dtype) for tensor in inputs]
        return inputs[0].new_empty(num_rows, *inputs[0].shape[1:])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return (None, *(grad.new_empty(shape, dtype=dtype) for shape, dtype in ctx.inputs))


class DropoutStandIn(torch.autograd.Function):
    """Function on meta tensors with the memory use of keyed dropout; with relu, it saves its result for backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, relu: bool) -> Tensor:
        y = torch.empty_like(x)
        if relu:
            ctx.save_for_backward(y)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # noqa: ARG004
        return torch.empty_like(grad), None


def counted_dropout(counter: FlopCounter, x: Tensor, relu: bool) -> Tensor:
    """Return meta rows after dropout, which is recorded forward and backward.

    Args:
        counter: Records the calls.
        x: Rows on the meta device.
        relu: True if dropout applies ReLU first.
    """
    counter.record("dropout", x.numel())
    counter.record("dropout", x.numel(), backward=True)
    y: Tensor = DropoutStandIn.apply(x, relu)  # type: ignore[no-untyped-call]
    return y

"""The view that computes nothing and notes what it is asked for, under which a model runs on tensors without data."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor

from weft.nn.aggregate.aggregate import Aggregate, Rows, Total
from weft.nn.aggregate.attention import AttendEdges
from weft.nn.aggregate.kernel_memory import DropoutStandIn, KernelMemory, StandIn
from weft.nn.aggregate.reduce import ByRelation
from weft.nn.aggregate.relations import multiply_block_diagonal
from weft.nn.aggregate.topology import Topology
from weft.nn.graph_view import GraphView, Inputs, Origin, ViewTraits
from weft.nn.layers.linear_transform import linear, sum_rows
from weft.nn.workload.flops import FlopCounter, FlopPosition
from weft.nn.workload.layer_sizes import BlockSize, LayerSizes
from weft.nn.workload.operation import GraphOperation
from weft.utils.errors import InputError
from weft.utils.random import RandomKey


@dataclass
class OutlineState:
    """What the views of one run have noted."""

    num_rows: int
    """Those of the result; where rows are nested, a model reads one more for each aggregate."""
    steps: Counter[int]
    """The aggregates of each stage, known from the start in a second run."""
    nested: bool
    """Whether fewer rows come out of an aggregate than go in."""
    counter: FlopCounter
    running: list[str]
    """The kinds of the modules that are running, innermost last."""
    transform_share: float = 1.0
    """What a map of constant features costs, as a share of one of dense features."""
    num_relations: int = 0
    """Of the graph."""
    rows_per_vertex: float = 1.0
    """How many rows a relational layer maps for one of the result."""
    levels: LayerSizes | None = None
    """How many rows there really are, where the run is of one rank."""
    footprints: Sequence[KernelMemory] = ()
    """In a run of one rank, what each operation takes; of a layer of its own, none."""
    operations: list[GraphOperation] = field(default_factory=list)
    density: float = 1.0
    """The share of the constant features that are not zero."""
    flops: int = 0
    """Those counted up to the last aggregate or block."""

    def rows_at(self, hop: int) -> int:
        """The rows that aggregate `hop` reads."""
        if self.levels:
            return self.levels.rows[hop]
        return self.num_rows + (self.steps.total() - hop if self.nested else 0)

    def mark(self, result: Tensor, number: int) -> Tensor:
        """The result of operation `number`: once its gradient is there, what follows belongs before the operation."""
        if result.requires_grad:
            result.register_hook(lambda _: setattr(self.counter, "place", FlopPosition(number, backward=True)))
        return result


class OutlineView(GraphView):
    """A view that computes nothing and notes what it is asked for; it weighs and refuses by the traits of another."""

    def __init__(self, traits: ViewTraits, stage: int, notes: OutlineState, topology: Topology, inputs: Inputs) -> None:
        super().__init__(topology, inputs=inputs)
        self.traits, self.stage, self.notes = traits, stage, notes

    @property
    def num_vertices(self) -> int:
        return self.notes.num_rows

    @property
    def hop(self) -> int:
        """The first aggregate of this stage."""
        return sum(self.notes.steps[stage] for stage in range(self.stage))

    def _aggregate_once(self, op: Aggregate, rows: Rows, steps: int) -> Tensor:
        return self._aggregate(op, rows, steps)

    def _aggregate(self, op: Aggregate, rows: Rows, steps: int) -> Tensor:
        x = rows[op.first]
        y = x
        beside = [one for name, one in rows.items() if name != op.first]
        for one in beside if self.notes.levels is None else ():
            y = y + one.sum()  # a shape, and what gradients flow to
        if isinstance(op, AttendEdges) and op.has_edge_map:
            self._check_edge_features(len(rows["edge_map"]))
        origin = self.origin(x) if op.plain else "rows"
        return self._note(y, op, *beside, steps=steps, origin=origin, weighted=op.reads_weight)

    def _check_edge_features(self, wanted: int) -> None:
        features, layer = self.topology.edge_features, self.notes.running[-1]
        if features is None:
            raise InputError(
                f"{layer} attends by edge features, and the graph has none: give the graph edge_features "
                "[edges, features], or leave out --edge-attention (edge_width)"
            )
        if features.shape[1] != wanted:
            raise InputError(
                f"{layer} takes {wanted} edge features, and the graph has {features.shape[1]}: make it with "
                f"edge_width={features.shape[1]}"
            )

    def relate(self, x: Tensor, weight: Tensor, *, reduce: Literal["sum", "mean"] = "mean") -> Tensor:
        if len(weight) != self.notes.num_relations:
            raise InputError(
                f"the model has maps for {len(weight)} relations, and the graph has {self.notes.num_relations}: "
                "make it with the graph's graph.typed"
            )
        rows = self.aggregate(ByRelation.reducing(reduce), {"x": x})
        levels, hop = self.notes.levels, self.notes.operations[-1].hop
        num_related = levels.relation_rows[hop] if levels else max(1, round(self.notes.rows_per_vertex * len(rows)))
        related = rows.new_empty(num_related, rows.shape[1])
        y = multiply_block_diagonal(related + rows.sum(), weight.sum(0))
        return y.new_empty(len(rows), y.shape[1]) + y.sum()

    def embed(self, weight: Tensor) -> Tensor:
        noted, num_rows = self._note(weight, "embed"), self.typed_rows.num_embedded
        operations = self.notes.operations
        operations[-1] = replace(operations[-1], share=num_rows / max(self.notes.rows_at(0), 1))
        return weight.new_empty(num_rows, weight.shape[1]) + noted.sum()

    def targets(self, x: Tensor) -> Tensor:
        num_targets = self.notes.rows_at(self.hop + self.notes.steps[self.stage])
        same = self.notes.levels is not None and len(x) == num_targets  # a rank's inputs, all of which are targets
        return x[:num_targets] if self.traits.shrinks_rows and not same else x

    def total(self, x: Tensor) -> Tensor:
        return sum_rows(self._note(x, Total()))

    def block(self, x: Tensor) -> tuple[Tensor, Tensor, int]:
        self.check_block()
        targets = self._note(x, "block", origin=self.origin(x))
        size = self.block_size
        if size is None:
            return x.clone(), self.topology.edge_index, len(targets)
        edges = self.topology.edge_index.new_empty(2, size.edges)
        return x.new_empty(size.sources, x.shape[1]) + x.sum(), edges, size.targets

    @property
    def block_size(self) -> BlockSize | None:
        """The size of the block that was asked for last; None where it is not known."""
        levels, operations = self.notes.levels, self.notes.operations
        return levels.blocks[operations[-1].hop] if levels and levels.blocks and operations else None

    @property
    def edge_features(self) -> Tensor | None:
        features, size = super().edge_features, self.block_size
        return features if features is None or size is None else features.new_empty(size.edges, features.shape[1])

    @property
    def edge_weight(self) -> Tensor | None:
        operations = self.notes.operations
        if operations and operations[-1].op == "block":
            operations[-1] = replace(operations[-1], weighted=True)
        weight, size = super().edge_weight, self.block_size
        return weight if weight is None or size is None else weight.new_empty(size.edges)

    def linear(self, x: Tensor, weight: Tensor, added: Tensor | None = None, *, summed: bool = False) -> Tensor:
        del summed
        share = self.notes.transform_share
        if self.inputs.sparse and self.origin(x) == "inputs":  # by the nonzeros, which is no dense map
            self._note_sparse(x, weight)
            y: Tensor = StandIn.apply(KernelMemory(), len(x), x[:, :1].expand(-1, weight.shape[1]), weight)  # type: ignore[no-untyped-call]
            return y if added is None else (y + added).to(x.dtype)
        if share < 1 and self.origin(x) == "inputs" and len(weight) == x.shape[1]:
            width = max(1, round(share * len(weight)))  # as many flops as the map by nonzeros is worth
            x, weight = x[:, :width], weight[:width]
        return linear(x, weight, added)

    def _note_sparse(self, x: Tensor, weight: Tensor) -> None:
        """Notes a map by nonzeros, of which the weights alone have a gradient."""
        counter, nonzeros = self.notes.counter, round(self.notes.density * x.numel())
        counter.note("sparse", nonzeros, len(x), *weight.shape)
        counter.note("sparse_backward", nonzeros, len(x), *weight.shape, backward=True)

    def _drop(self, x: Tensor, key: RandomKey, p: float, relu: bool) -> Tensor:
        del key, p
        return counted_dropout(self.notes.counter, x, relu)

    def _note(
        self,
        x: Tensor,
        op: Aggregate | Literal["block", "embed"],
        *beside: Tensor,
        steps: int = 1,
        origin: Origin = "rows",
        weighted: bool = False,
    ) -> Tensor:
        """Notes a call; the rows that come of it."""
        notes, number = self.notes, len(self.notes.operations)
        made = notes.counter.total
        notes.operations.append(
            GraphOperation(
                op=op,
                width=x.shape[1],
                steps=steps,
                stage=self.stage,
                hop=self.hop,
                origin=origin,
                backward=any(one.requires_grad for one in (x, *beside)) and torch.is_grad_enabled(),
                flops=(made - notes.flops) / max(notes.num_rows, 1),
                weighted=weighted,
                layer=notes.running[-1],
            )
        )
        notes.counter.place = FlopPosition(number + 1)
        if op == "embed" or isinstance(op, Total):
            return notes.mark(x.view_as(x), number)
        notes.flops = made
        if (
            self.traits.shrinks_rows
            and notes.nested
            and (len(x) != notes.rows_at(self.hop) or steps != notes.steps[self.stage])
        ):
            raise InputError(
                f"stage {self.stage} has aggregates one after another, or of different steps, and so cannot tell which "
                "rows a rank computes again: give each its own stage, or use --strategy communicated"
            )
        notes.steps[self.stage] = max(notes.steps[self.stage], steps)
        num_rows = notes.rows_at(self.hop + steps)
        if not notes.footprints or op == "block":
            return notes.mark(x[:num_rows].clone(), number)
        if origin == "inputs" and self.inputs.optimisations.reuse:  # it was there before
            return x.new_empty(1, x.shape[1]).expand(num_rows, -1)  # strides tell rows from columns
        y: Tensor = StandIn.apply(notes.footprints[number], num_rows, x, *beside)  # type: ignore[no-untyped-call]
        return notes.mark(y, number)


def counted_dropout(counter: FlopCounter, x: Tensor, relu: bool) -> Tensor:
    """Rows without data behind dropout, which is noted both ways."""
    counter.note("dropout", x.numel())
    counter.note("dropout", x.numel(), backward=True)
    y: Tensor = DropoutStandIn.apply(x, relu)  # type: ignore[no-untyped-call]
    return y

"""What a model asks of its views, found by running it on tensors that have a shape and no data."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Literal, cast

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from weft.core.errors import InputError
from weft.core.optimisations import ALL_OPTIMISATIONS, Optimisations
from weft.data import UNTYPED, Adjacency, TypedShape
from weft.nn.aggregate import Aggregate, Rows, Total
from weft.nn.attention import AttendEdges
from weft.nn.dense import linear
from weft.nn.graph_view import ONE_DEVICE, GraphView, Inputs, Origin, ViewTraits
from weft.nn.operation import GraphOperation
from weft.nn.pyg import PyGConv
from weft.nn.reduce import ByRelation
from weft.nn.relations import map_blocks
from weft.nn.topology import Topology
from weft.nn.view import TypedRows


@dataclass
class Notes:
    """What the views of one run have noted. steps: aggregates of each stage, known from the start in a second run.

    num_rows: those of the result; a model reads one more for each aggregate where rows are nested.
    map_share: what a map of constant features costs, as a share of one of dense features. num_relations: of the graph.
    rows_per_vertex: how many rows a relational layer maps for one of the result.
    """

    num_rows: int
    steps: Counter[int]
    nested: bool
    counter: FlopCounterMode | None
    running: list[str]
    transform_share: float = 1.0
    num_relations: int = 0
    rows_per_vertex: float = 1.0
    operations: list[GraphOperation] = field(default_factory=list)
    flops: int = 0

    def rows_at(self, hop: int) -> int:
        """The rows that aggregate `hop` reads."""
        return self.num_rows + (self.steps.total() - hop if self.nested else 0)


class OutlineView(GraphView):
    """A view that computes nothing and notes what it is asked for; it weighs and refuses by the traits of another."""

    def __init__(self, traits: ViewTraits, stage: int, notes: Notes, topology: Topology, inputs: Inputs) -> None:
        self.traits = traits
        self.stage, self.notes = stage, notes
        self.topology, self.inputs = topology, inputs
        self._key = self._calls = 0
        self._dropped = None

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
        for name, beside in rows.items():
            y = y if name == op.first else y + beside.sum()  # a shape, and what gradients flow to
        if isinstance(op, AttendEdges) and op.has_edge_map:
            self._check_edge_features(len(rows["edge_map"]))
        return self._note(y, op, steps=steps, origin=self.origin(x) if op.plain else "rows", weighted=op.reads_weight)

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

    def relate(self, x: Tensor, weight: Tensor) -> Tensor:
        if len(weight) != self.notes.num_relations:
            raise InputError(
                f"the model has maps for {len(weight)} relations, and the graph has {self.notes.num_relations}: "
                "make it with the graph's graph.typed"
            )
        rows = self.aggregate(ByRelation(), {"x": x})
        related = rows.new_empty(max(1, round(self.notes.rows_per_vertex * len(rows))), rows.shape[1])
        y = map_blocks(related + rows.sum(), weight.sum(0))
        return y.new_empty(len(rows), y.shape[1]) + y.sum()

    def embed(self, weight: Tensor) -> Tensor:
        noted, num_rows = self._note(weight, "embed"), self.typed_rows.num_embedded
        operations = self.notes.operations
        operations[-1] = replace(operations[-1], share=num_rows / max(self.notes.rows_at(0), 1))
        return weight.new_empty(num_rows, weight.shape[1]) + noted.sum()

    def targets(self, x: Tensor) -> Tensor:
        return x[: self.notes.rows_at(self.hop + self.notes.steps[self.stage])] if self.traits.shrinks_rows else x

    def total(self, x: Tensor) -> Tensor:
        return self._note(x, Total()).sum(0)

    def block(self, x: Tensor) -> tuple[Tensor, Tensor, int]:
        self.check_block()
        targets = self._note(x, "block", origin=self.origin(x))
        return x.clone(), self.topology.edge_index, len(targets)

    @property
    def edge_weight(self) -> Tensor | None:
        operations = self.notes.operations
        if operations and operations[-1].op == "block":
            operations[-1] = replace(operations[-1], weighted=True)
        return super().edge_weight

    def linear(self, x: Tensor, weight: Tensor, added: Tensor | None = None) -> Tensor:
        share = self.notes.transform_share
        if share < 1 and self.origin(x) == "inputs" and len(weight) == x.shape[1]:
            width = max(1, round(share * len(weight)))  # as many flops as the map by nonzeros is worth
            x, weight = x[:, :width], weight[:width]
        return linear(x, weight, added)

    def _drop(self, x: Tensor, key: int, p: float, relu: bool) -> Tensor:
        del key, p, relu
        return x.clone()

    def _note(
        self,
        x: Tensor,
        op: Aggregate | Literal["block", "embed"],
        *,
        steps: int = 1,
        origin: Origin = "rows",
        weighted: bool = False,
    ) -> Tensor:
        """Notes a call; the rows that come of it."""
        notes = self.notes
        made = notes.counter.get_total_flops() if notes.counter else 0
        notes.operations.append(
            GraphOperation(
                op=op,
                width=x.shape[1],
                steps=steps,
                stage=self.stage,
                hop=self.hop,
                origin=origin,
                backward=x.requires_grad and torch.is_grad_enabled(),
                flops=(made - notes.flops) / max(notes.num_rows, 1),
                weighted=weighted,
                layer=notes.running[-1],
            )
        )
        if op == "embed" or isinstance(op, Total):
            return x.clone()
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
        return x[: notes.rows_at(self.hop + steps)].clone()


def outline(
    model: nn.Module,
    *,
    num_vertices: int,
    num_features: int,
    num_edge_features: int = 0,
    weighted: bool = False,
    training: bool,
    traits: ViewTraits = ONE_DEVICE,
    optimisations: Optimisations = ALL_OPTIMISATIONS,
    sparse_first: bool = False,
    transform_share: float = 1.0,
    num_classes: int | None = None,
    count_flops: bool = False,
    typed: TypedShape = UNTYPED,
    num_relation_rows: int = 0,
) -> list[GraphOperation]:
    """The graph operations of one forward pass of `model` under views with these traits, in order.

    weighted: whether the graph has edge weights. map_share: what a map of constant features costs against one of dense
    features. count_flops: of the maps as well, for which PyTorch loads its compiler (1 s). typed: what types the graph
    has. num_relation_rows: of the graph, where flops are counted.

    InputError for a model that is none, that cannot take rows of num_features, that does not give num_classes logits,
    or that asks for what the view refuses or the graph lacks.
    """
    if not isinstance(getattr(model, "num_stages", None), int):
        raise InputError("the model does not say how many views it takes: set its num_stages, or use weft.nn.Stack")
    dtype = next((p.dtype for p in model.parameters()), torch.float32)
    twin = copy.deepcopy(model).to("meta").train(training)

    def run(notes: Notes, what: str) -> Tensor:
        x = torch.empty(notes.rows_at(0), num_features, dtype=dtype, device="meta")
        rows = no_rows(typed, notes.rows_at(0) - num_vertices, dtype) if typed.has_input else None
        inputs = Inputs(rows=x, optimisations=optimisations, sparse_first=sparse_first, typed=rows)
        views = [OutlineView(traits, stage, notes, topology, inputs) for stage in range(cast(int, model.num_stages))]
        try:
            with torch.set_grad_enabled(training), torch.device("meta"), notes.counter or nullcontext():
                logits: Tensor = twin(views, x)
        except (RuntimeError, TypeError, IndexError) as error:
            raise InputError(what.format(str(error).splitlines()[0])) from error
        return logits

    topology, running = no_edges(num_edge_features, weighted, dtype), name_running(twin)
    counter = FlopCounterMode(display=False) if count_flops else None
    relating = typed.num_relations, num_relation_rows / max(num_vertices, 1)
    notes = Notes(num_vertices, Counter(), False, counter, running, transform_share, *relating)
    logits = run(notes, f"the model cannot take rows of {num_features} features ({{}}): mend its widths")
    if traits.shrinks_rows:
        again = Notes(num_vertices, notes.steps, True, None, running, 1.0, *relating)
        run(again, "a layer adds rows of its input to fewer rows of its result ({}): use view.targets(x) for them")
    if num_classes is not None and logits.shape[1:] != (num_classes,):
        raise InputError(
            f"the model gives {list(logits.shape[1:])} logits a vertex, the graph has {num_classes} classes"
        )
    return notes.operations


def no_edges(num_edge_features: int, weighted: bool, dtype: torch.dtype) -> Topology:
    """A topology without data that has the features and weights that a graph has."""
    none = torch.empty(0, dtype=torch.int64, device="meta")
    weight = torch.empty(0, dtype=dtype, device="meta") if weighted else None
    features = torch.empty(0, num_edge_features, dtype=dtype, device="meta") if num_edge_features else None
    return Topology(Adjacency(indptr=none.new_empty(1), indices=none, num_sources=0, weight=weight), None, features)


def no_rows(typed: TypedShape, num_more: int, dtype: torch.dtype) -> TypedRows:
    """Rows without data of every vertex, and so many more of the last kind, as a rank may have some again."""
    counts = [count for count, _ in typed.featured]
    num_embedded = typed.num_embedded
    if num_embedded:
        num_embedded += num_more
    else:
        counts[-1] += num_more
    widths = (width for _, width in typed.featured)
    features = (torch.empty(n, width, dtype=dtype, device="meta") for n, width in zip(counts, widths, strict=True))
    return TypedRows(features=tuple(features), num_embedded=num_embedded)


def name_running(model: nn.Module) -> list[str]:
    """The kinds of the model's modules that are running, innermost last; changes as they do.

    Hooks tell, also of modules in phases, since what has hooks runs as a whole (weft.nn.phases.phases_of).
    """
    running: list[str] = []

    def enter(kind: str) -> Callable[..., None]:
        return lambda *_: running.append(kind)

    def leave(*_: object) -> None:
        running.pop()

    for part in model.modules():
        part.register_forward_pre_hook(enter(type(part.conv if isinstance(part, PyGConv) else part).__name__))
        part.register_forward_hook(leave)
    return running

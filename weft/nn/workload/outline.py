"""What a model asks of its views, found by running it on tensors that have a shape and no data."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, cast

import torch
from torch import Tensor, nn

from weft.config.optimisations import ALL_OPTIMISATIONS, Optimisations
from weft.data import UNTYPED, Adjacency, TypedShape
from weft.nn.aggregate.topology import Topology
from weft.nn.graph_view import ONE_DEVICE, Inputs, ViewTraits
from weft.nn.layers.phases import parameter_dtype, row_dtype
from weft.nn.layers.pyg_conv import PyGConv
from weft.nn.view import TypedRows
from weft.nn.workload.flops import FlopCounter
from weft.nn.workload.operation import GraphOperation
from weft.nn.workload.outline_view import OutlineState, OutlineView
from weft.utils.errors import InputError


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
    typed: TypedShape = UNTYPED,
    num_relation_rows: int = 0,
) -> list[GraphOperation]:
    """The graph operations of one forward pass of `model` under views with these traits, in order.

    weighted: whether the graph has edge weights. transform_share: what a map of constant features costs against one of
    dense features. typed: what types the graph has. num_relation_rows: of the graph.

    InputError for a model that is none, that cannot take rows of num_features, that does not give num_classes logits,
    or that asks for what the view refuses or the graph lacks.
    """
    twin = MetaModel(model, num_features, num_edge_features, typed, weighted=weighted, training=training)
    relating = typed.num_relations, num_relation_rows / max(num_vertices, 1)

    def run(notes: OutlineState, what: str) -> Tensor:
        num_rows = notes.rows_at(0)
        rows = no_rows(typed, num_rows - num_vertices, twin.dtype) if typed.has_input else None
        inputs = twin.inputs(num_rows, rows, optimisations=optimisations, sparse_first=sparse_first)
        return twin.run(traits, notes, inputs, what)

    notes = OutlineState(num_vertices, Counter(), False, FlopCounter(), twin.running, transform_share, *relating)
    logits = run(notes, f"the model cannot take rows of {num_features} features ({{}}): mend its widths")
    if traits.shrinks_rows:
        again = OutlineState(num_vertices, notes.steps, True, FlopCounter(), twin.running, 1.0, *relating)
        run(again, "a layer adds rows of its input to fewer rows of its result ({}): use view.targets(x) for them")
    if num_classes is not None and logits.shape[1:] != (num_classes,):
        raise InputError(
            f"the model gives {list(logits.shape[1:])} logits a vertex, the graph has {num_classes} classes"
        )
    return notes.operations


class MetaModel:
    """A copy of a model whose tensors have a shape and no data. InputError for a model that is none."""

    def __init__(
        self,
        model: nn.Module,
        num_features: int,
        num_edge_features: int,
        typed: TypedShape,
        *,
        weighted: bool,
        training: bool,
    ) -> None:
        if not isinstance(getattr(model, "num_stages", None), int):
            raise InputError("the model does not say how many views it takes: set its num_stages, or use weft.nn.Stack")
        self.dtype = row_dtype(model)
        self.num_features, self.typed, self.training = num_features, typed, training
        self.model = copy.deepcopy(model).to("meta").train(training)
        self.topology = no_edges(num_edge_features, weighted, parameter_dtype(model))

    @cached_property
    def running(self) -> list[str]:
        """The kinds of the modules that are running, see `name_running`."""
        return name_running(self.model)

    def inputs(self, num_rows: int, typed: TypedRows | None, **said: Any) -> Inputs:
        """Features of so many rows; said: what else there is to Inputs."""
        rows = torch.empty(num_rows, self.num_features, dtype=self.dtype, device="meta")
        return Inputs(rows=rows, typed=typed, **said)

    def run(self, traits: ViewTraits, notes: OutlineState, inputs: Inputs, what: str) -> Tensor:
        """One forward pass under views that take notes; what: is wrong with the model where it cannot run."""
        stages = range(cast(int, self.model.num_stages))
        views = [OutlineView(traits, stage, notes, self.topology, inputs) for stage in stages]
        try:
            with torch.set_grad_enabled(self.training), torch.device("meta"), notes.counter:
                logits: Tensor = self.model(views, inputs.rows)
        except (RuntimeError, TypeError, IndexError) as error:
            raise InputError(what.format(str(error).splitlines()[0])) from error
        return logits


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
    return typed_rows_of(typed, counts, num_embedded, dtype)


def typed_rows_of(typed: TypedShape, counts: Sequence[int], num_embedded: int, dtype: torch.dtype) -> TypedRows:
    """Rows without data, so many of each type with features."""
    widths = (width for _, width in typed.featured)
    features = (torch.empty(n, width, dtype=dtype, device="meta") for n, width in zip(counts, widths, strict=True))
    return TypedRows(features=tuple(features), num_embedded=num_embedded)


def name_running(model: nn.Module) -> list[str]:
    """The kinds of the model's modules that are running, innermost last; changes as they do.

    Hooks tell, also of modules in phases, since what has hooks runs as a whole (weft.nn.layers.phases.phases_of).
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

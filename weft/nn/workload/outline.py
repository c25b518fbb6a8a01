"""Outline of a model: the calls that it makes to its views, recorded by running it on meta tensors."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import cast

import torch
from torch import Tensor, nn

from weft.config.optimisations import ALL_OPTIMISATIONS, Optimisations
from weft.data import UNTYPED, Adjacency, TypedShape
from weft.nn.aggregate.topology import Topology
from weft.nn.graph_view import ONE_DEVICE, GraphView, Inputs, ViewTraits
from weft.nn.layers.phases import parameter_dtype, row_dtype
from weft.nn.layers.pyg_conv import PyGConv
from weft.nn.sparse_rows import NONZERO_COST, SparseRows
from weft.nn.view import TypedRows
from weft.nn.workload.flops import FlopCounter
from weft.nn.workload.operation import GraphOperation
from weft.nn.workload.outline_view import OutlineState, OutlineView
from weft.utils.errors import InputError

RunModel = Callable[[nn.Module, Sequence[GraphView], Tensor], Tensor]
"""Function that runs a model under the view of each of its stages, on constant features."""


def run_whole(model: nn.Module, views: Sequence[GraphView], x: Tensor) -> Tensor:
    """Run a model on all rows at once.

    Args:
        model: The model.
        views: View of each stage.
        x: Constant features [n, F].
    """
    logits: Tensor = model(views, x)
    return logits


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
    density: float = 1.0,
    num_classes: int | None = None,
    typed: TypedShape = UNTYPED,
    typed_densities: Sequence[float] = (),
    relation_rows: tuple[int, ...] = (),
) -> tuple[list[GraphOperation], int]:
    """Return the graph operations of one forward pass of a model, in order, and the number of columns of its result.

    Args:
        model: The model, which is not changed.
        num_vertices: Number of vertices of the graph.
        num_features: Number of features of a vertex.
        num_edge_features: Number of features of an edge.
        weighted: True if the graph has edge weights.
        training: True for training mode.
        traits: Traits of the strategy's views.
        optimisations: Optimisations that are on.
        sparse_first: True if transforming sparse features before their aggregate is cheaper than after it.
        density: See `Workload.density`.
        num_classes: Number of logits that the model must return; None: any number.
        typed: Types of the graph.
        typed_densities: See `Workload.typed_densities`; empty: linear transforms read all features.
        relation_rows: Number of relation rows of the graph by relation.

    Raises:
        InputError: The model has no `num_stages`, does not fit the graph, or calls what the view does not support.
    """
    # If stages shrink rows, a second run gives each aggregate one row less than the one before it, so that an operation
    # on rows from before and after an aggregate fails.
    meta_model = MetaModel(model, num_features, num_edge_features, typed, weighted=weighted, training=training)
    relation_sizes = typed.num_relations, relation_rows

    def run(state: OutlineState, message: str) -> Tensor:
        def on_product(x: SparseRows, width: int) -> None:
            state.counter.add(2 * NONZERO_COST * x.num_nonzeros * width)  # FLOPs of a dense product of the same cost

        num_rows, typed_rows = state.rows_at(0), None
        if typed.has_input:
            num_more, dtype = num_rows - num_vertices, meta_model.dtype
            typed_rows = typed_rows_of_all(typed, num_more, dtype, typed_densities, on_product)
        rows = SparseRows.of(meta_model.features(num_rows), density, on_product)
        inputs = Inputs(rows=rows, typed=typed_rows, optimisations=optimisations, sparse_first=sparse_first)
        return meta_model.run(traits, state, inputs, message)

    state = OutlineState(num_vertices, Counter(), False, FlopCounter(), meta_model.running, *relation_sizes)
    logits = run(state, f"the model cannot take rows of {num_features} features ({{}}): correct its widths")
    if traits.shrinks_rows:
        second = OutlineState(num_vertices, state.steps, True, FlopCounter(), meta_model.running, *relation_sizes)
        run(
            second, "a layer adds rows of its input to fewer rows of its result ({}): use view.targets(x) for the input"
        )
    if num_classes is not None and logits.shape[1:] != (num_classes,):
        raise InputError(
            f"the model returns {list(logits.shape[1:])} logits per vertex, but the graph has {num_classes} classes"
        )
    return state.operations, logits.shape[-1]


class MetaModel:
    """Copy of a model on the meta device, with shapes and without data.

    Args:
        model: The model.
        num_features: Number of features of a vertex.
        num_edge_features: Number of features of an edge.
        typed: Types of the graph.
        weighted: True if the graph has edge weights.
        training: True for training mode.

    Raises:
        InputError: The model has no `num_stages`.
    """

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
            raise InputError(
                "the model has no num_stages, the number of views that it takes: set it, or use weft.nn.Stack"
            )
        self.dtype = row_dtype(model)
        self.num_features, self.typed, self.training = num_features, typed, training
        self.model = copy.deepcopy(model).to("meta").train(training)
        self.topology = topology_without_data(num_edge_features, weighted, parameter_dtype(model))

    @cached_property
    def running(self) -> list[str]:
        """Classes of the modules that are running (see `name_running`)."""
        return name_running(self.model)

    def features(self, num_rows: int) -> Tensor:
        """Return constant features [num_rows, F] without data."""
        return torch.empty(num_rows, self.num_features, dtype=self.dtype, device="meta")

    def run(
        self,
        traits: ViewTraits,
        state: OutlineState,
        inputs: Inputs,
        message: str,
        run_model: RunModel = run_whole,
    ) -> Tensor:
        """Run one forward pass under views that record their calls, and return the logits.

        Args:
            traits: Traits of the views.
            state: State that the views share.
            inputs: Constant features without data.
            message: Message of the error if the model cannot run; {} is replaced by its cause.
            run_model: Function that runs the model.
        """
        stages = range(cast(int, self.model.num_stages))
        views = [OutlineView(traits, stage, state, self.topology, inputs) for stage in stages]
        try:
            with torch.set_grad_enabled(self.training), torch.device("meta"), state.counter:
                logits = run_model(self.model, views, cast(Tensor, inputs.rows))
        except (RuntimeError, TypeError, IndexError) as error:
            raise InputError(message.format(str(error).splitlines()[0])) from error
        return logits


def topology_without_data(num_edge_features: int, weighted: bool, dtype: torch.dtype) -> Topology:
    """Return a topology without data, with edge features and weights if the graph has them.

    Args:
        num_edge_features: Number of features of an edge.
        weighted: True if the graph has edge weights.
        dtype: Type of these.
    """
    none = torch.empty(0, dtype=torch.int64, device="meta")
    weight = torch.empty(0, dtype=dtype, device="meta") if weighted else None
    features = torch.empty(0, num_edge_features, dtype=dtype, device="meta") if num_edge_features else None
    return Topology(Adjacency(indptr=none.new_empty(1), indices=none, num_sources=0, weight=weight), None, features)


def typed_rows_of_all(
    typed: TypedShape,
    num_more: int,
    dtype: torch.dtype,
    densities: Sequence[float],
    on_product: Callable[[SparseRows, int], None],
) -> TypedRows:
    """Return features by type without data, of all vertices and `num_more` further ones of the last type.

    Args:
        typed: Types of the graph.
        num_more: Number of rows that a rank stores in addition.
        dtype: Type of the rows.
        densities: See `typed_rows_of`, also for `on_product`.
        on_product: Function that counts linear transforms of nonzeros.
    """
    counts = [*(count for count, _ in typed.featured), typed.num_embedded]
    counts[-1 if typed.num_embedded else -2] += num_more
    return typed_rows_of(typed, counts, dtype, densities, on_product)


def typed_rows_of(
    typed: TypedShape,
    counts: Sequence[int],
    dtype: torch.dtype,
    densities: Sequence[float] = (),
    on_product: Callable[[SparseRows, int], None] | None = None,
) -> TypedRows:
    """Return features by type without data.

    Args:
        typed: Types of the graph.
        counts: Number of rows of each type with features, and of all types without features.
        dtype: Type of the rows.
        densities: See `Workload.typed_densities`; empty: linear transforms read all features.
        on_product: Function that counts linear transforms of nonzeros.
    """
    *featured, num_embedded = counts
    features = []
    for number, (count, (_, width)) in enumerate(zip(featured, typed.featured, strict=True)):
        x = torch.empty(count, width, dtype=dtype, device="meta")
        features.append(SparseRows.of(x, densities[number], on_product) if densities else x)
    return TypedRows(features=tuple(features), num_embedded=num_embedded)


def name_running(model: nn.Module) -> list[str]:
    """Return a list that always contains the classes of the model's modules that are running, innermost last.

    Forward hooks update it. They see modules in phases too, since a module with hooks runs as a whole
    (weft.nn.layers.phases.phases_of).
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

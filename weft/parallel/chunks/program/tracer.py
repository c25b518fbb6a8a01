"""Traces the segments of a model by running it on a few rows and edges."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from weft.config.optimisations import Optimisations
from weft.data import Adjacency, Graph
from weft.nn import (
    GraphView,
    Inputs,
    LinkModel,
    Request,
    Topology,
    Total,
    WholeLayer,
    is_embedded,
    row_dtype,
    typed_rows,
)
from weft.nn.layers.phases import Boundary, BoundaryState, PhasedModel, phases_of
from weft.parallel.chunks.program.chunk_program import ChunkProgram, LiveRows, Segment, ports_by_name, stepwise
from weft.parallel.chunks.run.chunk_views import ChunkView, RowsView
from weft.parallel.chunks.run.slots import SlotTopology
from weft.utils.errors import InputError

NUM_PROBE_ROWS = 5  # rows with which a model is traced


class ProgramTracer:
    """Runs a model on the first few vertices of a graph, with edges between them, to trace its segments.

    Args:
        graph: Graph whose features, weights and types the few vertices have.
        model: Model to trace.
        optimisations: Optimisations that are on.

    Raises:
        InputError: If the model cannot be run segment by segment.
    """

    def __init__(self, graph: Graph, model: nn.Module, optimisations: Optimisations) -> None:
        for module in (model, *([model.encoder] if isinstance(model, LinkModel) else [])):
            if phases_of(module) is None:
                raise InputError(
                    f"the model must run segment by segment, but {type(module).__name__} runs as a whole: make it a "
                    "weft.nn.Stack of its layers, without hooks"
                )
        self.graph, self.model, self.optimisations = graph, model, optimisations
        parameter = next(model.parameters(), torch.empty(0))
        self.device, self.dtype = parameter.device, parameter.dtype
        count = min(NUM_PROBE_ROWS, graph.num_vertices)
        vertices = torch.arange(count)
        x = torch.empty(count, 0) if graph.x is None else graph.x[:count]
        self.x = x.to(self.device, row_dtype(model))
        self.typed = typed_rows(graph, vertices, self.device, self.dtype)
        self.num_embedded = int(is_embedded(graph)[:count].sum()) if graph.typed.num_embedded else 0
        self.topology = ring(graph, count, self.device, self.dtype)

    def program(self, *, training: bool) -> ChunkProgram:
        """Return the segments of the model in a training step, or in an evaluation."""
        model, before = self.model, self.model.training
        model.train(training)
        try:
            with torch.enable_grad():
                return self._run()
        finally:
            model.train(before)

    def _run(self) -> ChunkProgram:
        """Trace the model from boundary to boundary.

        Steps:

        1. Run the model to its next boundary, and note whether autograd saves activations for that.
        2. Compute the result of the boundary on the few rows; note rows, widths and gradients.
        3. Resume the model with the result, until it returns the logits.
        """
        model = cast(PhasedModel, self.model)
        inputs = Inputs(rows=self.x, optimisations=self.optimisations, typed=self.typed)
        ids = torch.arange(len(self.x), device=self.device)
        make = partial(RowsView, self.topology, ids, self.graph.num_vertices, key=0, calls=0, inputs=inputs)
        views = [make(embedded=self._embedded) for _ in range(model.num_stages)]
        segments: list[Segment] = []
        state: BoundaryState | None = None
        hop, constant = 0, self.optimisations.reuse
        while True:
            calls, saves = tuple(view.calls for view in views), SavesActivations(self.model)
            with saves:
                reached = model.begin(views, self.x) if state is None else model.resume(views, state)
            if segments:
                segments[-1] = replace(segments[-1], needs_result=saves.any)
            constant = constant and calls == tuple(view.calls for view in views)
            if not isinstance(reached, Boundary):
                segments.append(last_segment(reached, calls, hop))
                return ChunkProgram(segments=tuple(segments), num_hops=hop)
            segment, state = self._cross(stepwise(reached), calls, hop, views, constant=constant and not segments)
            constant = segment.constant
            segments.append(segment)
            hop += segment.steps if segment.aggregates else 0

    def _embedded(self, weight: Tensor) -> Tensor:
        return weight.new_zeros(self.num_embedded, weight.shape[1]) + weight.sum()

    def _cross(
        self, boundary: Boundary, calls: tuple[int, ...], hop: int, views: Sequence[RowsView], *, constant: bool
    ) -> tuple[Segment, BoundaryState]:
        """Compute the result of a boundary on the few rows.

        Args:
            boundary: The boundary that the model reached.
            calls: Number of dropout masks that each view has drawn.
            hop: Number of the first aggregate of the boundary.
            views: Views of the stages.
            constant: Everything before the boundary is constant.

        Returns:
            The segment that ends at the boundary, and the state with which the model resumes.
        """
        request = boundary.request
        sources, targets = request.source, request.target
        target_tensors = {} if isinstance(request.op, Total) else targets
        tensors: list[Tensor] = []
        for tensor in (*sources.values(), *target_tensors.values(), *boundary.rows.values()):
            if not any(tensor is other for other in tensors):
                tensors.append(tensor)
        graph_view = GraphView(self.topology)
        view = views[boundary.stage]
        calls_before = graph_view._calls = view.calls
        result = self._result(request, boundary.steps, graph_view)
        view._calls = graph_view._calls
        shared = {**request.shared, **boundary.shared}
        constant = constant and request.op.plain and all(tensor is self.x for tensor in tensors)
        segment = Segment(
            boundary=without_graph(boundary),
            calls=calls,
            live=tuple(LiveRows(tensor.shape[1], tensor.requires_grad, tensor is self.x) for tensor in tensors),
            sources=ports_by_name(sources, tensors),
            targets=ports_by_name(targets, tensors),
            rows=ports_by_name(boundary.rows, tensors),
            shared={name: tensor.requires_grad for name, tensor in shared.items()},
            width=result.shape[-1],
            saved_widths=tuple(rows.shape[1] for rows in self._saved(request)),
            differentiable=result.requires_grad,
            constant=constant,
            hop=hop,
            calls_before=calls_before,
        )
        rows = {name: tensor.detach().requires_grad_(tensor.requires_grad) for name, tensor in boundary.rows.items()}
        shared_leaves = {
            name: tensor.detach().requires_grad_(tensor.requires_grad) for name, tensor in boundary.shared.items()
        }
        result = result.detach().requires_grad_(result.requires_grad)
        return segment, BoundaryState(result=result, rows=rows, shared=shared_leaves, context=boundary.context)

    def _saved(self, request: Request) -> tuple[Tensor, ...]:
        """Return the tensors that the aggregate saves with its result, if it can save any."""
        return request.op.apply_saving(self.topology, request.rows)[1] if request.op.can_save else ()

    def _result(self, request: Request, steps: int, graph_view: GraphView) -> Tensor:
        """Return the result of a request.

        A whole layer runs on a chunk whose sources are not its targets, so that a layer which cannot do this fails
        here.
        """
        op, rows = request
        if not isinstance(op, WholeLayer):
            return graph_view.aggregate(op, rows)
        name, target_rows = type(op.layer).__name__, rows["own"]
        if steps > 1:
            raise InputError(f"{name} cannot repeat its aggregate {steps} times: propagate by a layer of weft.nn")
        ids, edges = torch.arange(len(target_rows)), self.topology.adjacency
        block = replace(
            edges, indices=edges.indices + len(target_rows), num_sources=2 * len(target_rows), known_transpose=None
        )
        chunk = SlotTopology(block, torch.cat([ids, ids]), ids, self.topology, ids[: edges.num_edges], None)
        view = ChunkView(chunk, self.graph.num_vertices, key=0, calls=graph_view._calls)
        try:
            result = view.aggregate(op, {"x": torch.cat([target_rows, rows["x"]])})
        except InputError:
            raise
        except (RuntimeError, ValueError) as error:
            raise InputError(
                f"{name} cannot run on a chunk ({str(error).splitlines()[0]}): use view.targets(x) for the rows of its "
                "result, and one aggregate"
            ) from error
        if len(result) != len(target_rows):
            raise InputError(f"{name} returns more rows than targets: use view.targets(x)")
        graph_view._calls = view._calls
        return result


class SavesActivations:
    """Context that checks if autograd saves anything but the model's parameters."""

    def __init__(self, model: nn.Module) -> None:
        self.any = False
        """True once another tensor was saved."""
        self._parameters = {parameter.data_ptr() for parameter in model.parameters()}
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._note, lambda tensor: tensor)

    def __enter__(self) -> None:
        self._hooks.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._hooks.__exit__(*error)

    def _note(self, tensor: Tensor) -> Tensor:
        self.any = self.any or tensor.data_ptr() not in self._parameters
        return tensor.detach()  # the tensor itself would create a reference cycle with its graph


def last_segment(logits: Tensor, calls: tuple[int, ...], hop: int) -> Segment:
    """Return the segment that ends with the logits, which are its only port.

    Args:
        logits: Logits of the few rows.
        calls: Number of dropout masks that each view has drawn.
        hop: Number of aggregates of the model.
    """
    return Segment(
        boundary=None,
        calls=calls,
        live=(LiveRows(logits.shape[1], logits.requires_grad),),
        sources={},
        targets={},
        rows={},
        shared={},
        width=0,
        differentiable=False,
        constant=False,
        hop=hop,
    )


def without_graph(boundary: Boundary) -> Boundary:
    """Return the boundary without references to the autograd graph."""
    rows = {name: value.detach() for name, value in boundary.request.rows.items()}
    shared = {name: value.detach() for name, value in boundary.shared.items()}
    return replace(boundary, request=Request(boundary.request.op, rows), rows={}, shared=shared, on_result=None)


def ring(graph: Graph, count: int, device: torch.device, dtype: torch.dtype) -> Topology:
    """Return edges around a ring of a few vertices, with features, weights and relations like those of a graph.

    Args:
        graph: The graph to imitate.
        count: Number of vertices.
        device: Device of the edges.
        dtype: Type of weights and features.
    """
    source = torch.arange(count, dtype=torch.int32)
    weight = torch.ones(count, dtype=dtype) if graph.in_edges.weight is not None else None
    edges = Adjacency.from_edges(source, source.roll(1), num_sources=count, num_targets=count, weight=weight)
    features = torch.zeros(count, graph.num_edge_features) if graph.num_edge_features else None
    types = torch.zeros(count, dtype=torch.int32) if graph.relations else None
    return Topology(edges.to(device), None, features, dtype, types, len(graph.relations))

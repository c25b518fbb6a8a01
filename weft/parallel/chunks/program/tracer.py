"""Finds out what a model does between its aggregates, by running it on a few rows and the edges between them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from weft.config.optimisations import Optimisations
from weft.data import Adjacency, Graph
from weft.nn import GraphView, Inputs, LinkModel, Request, Topology, Total, WholeLayer, is_embedded, typed_rows
from weft.nn.layers.phases import Boundary, BoundaryState, PhasedModel, phases_of
from weft.parallel.chunks.program.chunk_program import ChunkProgram, LiveRows, Segment, places, stepwise
from weft.parallel.chunks.run.chunk_views import ChunkView, RowsView
from weft.parallel.chunks.run.slots import SlotTopology
from weft.utils.errors import InputError

FEW = 5  # rows that a program is found out with


class ProgramTracer:
    """Runs a model on the first few vertices of a graph, and on edges between them, to see what it does.

    InputError for a model that cannot be run segment by segment.
    """

    def __init__(self, graph: Graph, model: nn.Module, optimisations: Optimisations) -> None:
        for one in (model, *([model.encoder] if isinstance(model, LinkModel) else [])):
            if phases_of(one) is None:
                raise InputError(
                    f"strategy offload runs a model segment by segment, and {type(one).__name__} runs as a whole: make "
                    "it a weft.nn.Stack of its layers, without hooks"
                )
        self.graph, self.model, self.optimisations = graph, model, optimisations
        parameter = next(model.parameters(), torch.empty(0))
        self.device, self.dtype = parameter.device, parameter.dtype
        count = min(FEW, graph.num_vertices)
        vertices = torch.arange(count)
        x = torch.empty(count, 0) if graph.x is None else graph.x[:count]
        self.x = x.to(self.device, self.dtype)
        self.typed = typed_rows(graph, vertices, self.device, self.dtype)
        self.num_embedded = int(is_embedded(graph)[:count].sum()) if graph.typed.num_embedded else 0
        self.topology = ring(graph, count, self.device, self.dtype)

    def program(self, *, training: bool) -> ChunkProgram:
        """What the model does in a training step, or in an evaluation."""
        model, before = self.model, self.model.training
        model.train(training)
        try:
            with torch.enable_grad():
                return self._run()
        finally:
            model.train(before)

    def _run(self) -> ChunkProgram:
        model = cast(PhasedModel, self.model)
        inputs = Inputs(rows=self.x, optimisations=self.optimisations, typed=self.typed)
        ids = torch.arange(len(self.x), device=self.device)
        make = partial(RowsView, self.topology, ids, self.graph.num_vertices, key=0, calls=0, inputs=inputs)
        views = [make(embedded=self._embedded) for _ in range(model.num_stages)]
        segments: list[Segment] = []
        state: BoundaryState | None = None
        hop, still = 0, self.optimisations.reuse
        while True:
            calls, kept = tuple(view.calls for view in views), SavesActivations(self.model)
            with kept:
                reached = model.begin(views, self.x) if state is None else model.resume(views, state)
            if segments:
                segments[-1] = replace(segments[-1], needs_result=kept.any)
            still = still and calls == tuple(view.calls for view in views)
            if not isinstance(reached, Boundary):
                segments.append(last_segment(reached, calls, hop))
                return ChunkProgram(segments=tuple(segments), num_hops=hop)
            segment, state = self._cross(stepwise(reached), calls, hop, views, constant=still and not segments)
            still = segment.constant
            segments.append(segment)
            hop += segment.steps if segment.aggregates else 0

    def _embedded(self, weight: Tensor) -> Tensor:
        return weight.new_zeros(self.num_embedded, weight.shape[1]) + weight.sum()

    def _cross(
        self, boundary: Boundary, calls: tuple[int, ...], hop: int, views: Sequence[RowsView], *, constant: bool
    ) -> tuple[Segment, BoundaryState]:
        request = boundary.request
        sources, targets = request.source, request.target
        left = {} if isinstance(request.op, Total) else targets
        found: list[Tensor] = []
        for tensor in (*sources.values(), *left.values(), *boundary.rows.values()):
            if not any(tensor is one for one in found):
                found.append(tensor)
        asked = GraphView(self.topology)
        view = views[boundary.stage]
        calls_before = asked._calls = view.calls
        result = self._result(request, boundary.steps, asked)
        view._calls = asked._calls
        shared = {**request.shared, **boundary.shared}
        constant = constant and request.op.plain and all(one is self.x for one in found)
        segment = Segment(
            boundary=without_graph(boundary),
            calls=calls,
            live=tuple(LiveRows(one.shape[1], one.requires_grad, one is self.x) for one in found),
            sources=places(sources, found),
            targets=places(targets, found),
            rows=places(boundary.rows, found),
            shared={name: one.requires_grad for name, one in shared.items()},
            width=result.shape[-1],
            kept_widths=tuple(rows.shape[1] for rows in self._saved(request)),
            differentiable=result.requires_grad,
            constant=constant,
            hop=hop,
            calls_before=calls_before,
        )
        kept = {name: one.detach().requires_grad_(one.requires_grad) for name, one in boundary.rows.items()}
        also = {name: one.detach().requires_grad_(one.requires_grad) for name, one in boundary.shared.items()}
        result = result.detach().requires_grad_(result.requires_grad)
        return segment, BoundaryState(result=result, rows=kept, shared=also, context=boundary.context)

    def _saved(self, request: Request) -> tuple[Tensor, ...]:
        """What is kept beside the result, where it can be."""
        return request.op.apply_saving(self.topology, request.rows)[1] if request.op.can_save else ()

    def _result(self, request: Request, steps: int, asked: GraphView) -> Tensor:
        """The result; that of a layer which runs as a whole on a chunk whose sources are not its targets."""
        op, rows = request
        if not isinstance(op, WholeLayer):
            return asked.aggregate(op, rows)
        name, own = type(op.layer).__name__, rows["own"]
        if steps > 1:
            raise InputError(
                f"strategy offload: {name} is to make {steps} aggregates of each other: propagate by a layer of weft.nn"
            )
        ids, edges = torch.arange(len(own)), self.topology.adjacency
        block = replace(edges, indices=edges.indices + len(own), num_sources=2 * len(own), known_transpose=None)
        apart = SlotTopology(block, torch.cat([ids, ids]), ids, self.topology, ids[: edges.num_edges], None)
        view = ChunkView(apart, self.graph.num_vertices, key=0, calls=asked._calls)
        try:
            result = view.aggregate(op, {"x": torch.cat([own, rows["x"]])})
        except InputError:
            raise
        except (RuntimeError, ValueError) as error:
            raise InputError(
                f"strategy offload: {name} cannot run on a chunk ({str(error).splitlines()[0]}): use view.targets(x) "
                "for the rows of its result, and one aggregate"
            ) from error
        if len(result) != len(own):
            raise InputError(f"strategy offload: {name} gives more rows than it has targets: use view.targets(x)")
        asked._calls = view._calls
        return result


class SavesActivations:
    """Sees whether anything but the model's parameters is kept for the backward pass of what runs inside."""

    def __init__(self, model: nn.Module) -> None:
        self.any = False
        self._parameters = {parameter.data_ptr() for parameter in model.parameters()}
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._note, lambda tensor: tensor)

    def __enter__(self) -> None:
        self._hooks.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._hooks.__exit__(*error)

    def _note(self, tensor: Tensor) -> Tensor:
        self.any = self.any or tensor.data_ptr() not in self._parameters
        return tensor.detach()  # itself, it would keep the graph that keeps it


def last_segment(logits: Tensor, calls: tuple[int, ...], hop: int) -> Segment:
    """The part that ends with the logits, which are its port."""
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
    """The same boundary, of which nothing leads back to the parameters."""
    rows = {name: value.detach() for name, value in boundary.request.rows.items()}
    shared = {name: value.detach() for name, value in boundary.shared.items()}
    return replace(boundary, request=Request(boundary.request.op, rows), rows={}, shared=shared, on_result=None)


def ring(graph: Graph, count: int, device: torch.device, dtype: torch.dtype) -> Topology:
    """Edges around a few vertices, with as many features, weights and relations as a graph's."""
    source = torch.arange(count, dtype=torch.int32)
    weight = torch.ones(count, dtype=dtype) if graph.in_edges.weight is not None else None
    edges = Adjacency.from_edges(source, source.roll(1), num_sources=count, num_targets=count, weight=weight)
    features = torch.zeros(count, graph.num_edge_features) if graph.num_edge_features else None
    types = torch.zeros(count, dtype=torch.int32) if graph.relations else None
    return Topology(edges.to(device), None, features, dtype, types, len(graph.relations))

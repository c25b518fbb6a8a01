"""What a model does between its aggregates, found by running it on a few rows: which rows it leaves, of what width.

(HongTu, section 4.2.) Segment k of a program goes from the result at boundary k - 1 to boundary k, or to the logits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from weft.chunks.slots import SlotTopology
from weft.core.errors import InputError
from weft.core.meter import Meter
from weft.core.optimisations import Optimisations
from weft.data import Adjacency, Graph
from weft.nn import (
    SPREAD,
    Aggregate,
    GraphView,
    Inputs,
    LinkModel,
    Request,
    Topology,
    Total,
    WholeLayer,
    is_embedded,
    typed_rows,
)
from weft.nn.phases import Boundary, BoundaryState, PhasedModel, phases_of

FEW = 5  # rows that a program is found out with


def refused(*_: Any, **__: Any) -> Any:
    """In place of what no range of rows has, where somebody's own layer, norm or activation asks for it."""
    raise InputError(
        "strategy offload: an aggregate, edges or the sum of all rows is asked for where only some rows are at hand: "
        "leave that to weft's own layers and BatchNorm, or take another strategy"
    )


class RowsView(GraphView):
    """The view of some rows while no aggregate is made; what couples rows is asked at boundaries.

    ids: int64 [n], original ids. embedded: gives those of an embedding's rows that are theirs.
    """

    traits = SPREAD

    def __init__(
        self,
        topology: Topology,
        ids: Tensor,
        num_vertices: int,
        *,
        key: int,
        calls: int,
        inputs: Inputs,
        embedded: Callable[[Tensor], Tensor],
        meter: Meter | None = None,
    ) -> None:
        super().__init__(topology, key=key, inputs=inputs, meter=meter)
        self._ids, self._num_vertices, self._calls, self._embedded = ids, num_vertices, calls, embedded

    @property
    def row_ids(self) -> Tensor:
        return self._ids

    @property
    def num_vertices(self) -> int:
        return self._num_vertices

    @property
    def calls(self) -> int:
        """How many dropout masks it has drawn."""
        return self._calls

    def embed(self, weight: Tensor) -> Tensor:
        return self._embedded(weight)

    aggregate = block = total = refused


class ChunkView(GraphView):
    """The view of a whole layer on a chunk: its targets' rows stand first, those in slots behind them."""

    def __init__(self, topology: Topology, num_vertices: int, *, key: int, calls: int) -> None:
        super().__init__(topology, key=key)
        self._num_vertices, self._calls = num_vertices, calls

    @property
    def num_vertices(self) -> int:
        return self._num_vertices

    def targets(self, x: Tensor) -> Tensor:
        return x[: self.topology.adjacency.num_targets]

    def block(self, x: Tensor) -> tuple[Tensor, Tensor, int]:
        return x, self.topology.edge_index, self.topology.adjacency.num_targets

    total = refused


class LiveRows(NamedTuple):
    """Rows that a boundary leaves on the host: their width, and whether they want a gradient."""

    width: int
    differentiable: bool


@dataclass(frozen=True, kw_only=True)
class Segment:
    """One part of a program, and the boundary that ends it."""

    boundary: Boundary | None
    """As found with a few rows; None after the last segment."""
    calls: tuple[int, ...]
    """Dropout masks that each stage's view has drawn before the segment."""
    live: tuple[LiveRows, ...] = ()
    """The different rows that the boundary leaves."""
    sources: dict[str, int]
    """The port of each of the aggregate's rows of sources, by name."""
    targets: dict[str, int]
    """The port of each of its rows of targets; a total's need none."""
    rows: dict[str, int]
    """The port of each of the rows that go on with the result."""
    shared: dict[str, bool]
    """Whether each tensor that all rows share, of the aggregate and of the boundary, wants a gradient."""
    width: int
    """Columns of the result."""
    kept_widths: tuple[int, ...] = ()
    """Columns of what is kept besides the result, where it is."""
    differentiable: bool
    """Whether the result has a gradient."""
    constant: bool
    """Whether nothing of it depends on the epoch."""
    hop: int
    """The number of its first aggregate."""
    calls_before: int = 0
    """Dropout masks that the view which aggregates has drawn before that."""
    needs_result: bool = True
    """Whether the gradient of the next segment depends on the numbers of the result."""

    @property
    def op(self) -> Aggregate:
        """What the boundary asks for."""
        assert self.boundary is not None
        return self.boundary.request.op

    @property
    def aggregates(self) -> bool:
        """Whether the boundary asks for an aggregate over edges."""
        return self.boundary is not None and self.op.over_edges

    @property
    def aggregated(self) -> LiveRows:
        """What the aggregate's first step reads of a source and aggregates."""
        return self.live[self.sources[self.op.first]]

    @property
    def kept_width(self) -> int:
        """Columns of all that is kept of the result, if it is."""
        return self.width + sum(self.kept_widths)

    @property
    def steps(self) -> int:
        """How many aggregates follow each other."""
        return self.boundary.steps if self.boundary else 0


@dataclass(frozen=True, kw_only=True)
class Program:
    """A model's segments in training or in an evaluation; num_hops: its aggregates."""

    segments: tuple[Segment, ...]
    num_hops: int


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

    def program(self, *, training: bool) -> Program:
        """What the model does in a training step, or in an evaluation."""
        model, before = self.model, self.model.training
        model.train(training)
        try:
            with torch.enable_grad():
                return self._run()
        finally:
            model.train(before)

    def _run(self) -> Program:
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
                return Program(segments=tuple(segments), num_hops=hop)
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
            live=tuple(LiveRows(one.shape[1], one.requires_grad) for one in found),
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


def places(named: dict[str, Tensor], found: Sequence[Tensor]) -> dict[str, int]:
    """Which of some tensors each named one is, by name, of those that are one of them."""
    return {name: i for name, value in named.items() for i, one in enumerate(found) if one is value}


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


def differentiable(segment: Segment) -> list[int]:
    """The ports that want a gradient."""
    return [number for number, port in enumerate(segment.live) if port.differentiable]


def left_by(boundary: Boundary, segment: Segment) -> dict[int, Tensor]:
    """The rows that a boundary leaves, by port."""
    named = (
        (boundary.request.source, segment.sources),
        (boundary.request.target, segment.targets),
        (boundary.rows, segment.rows),
    )
    return {live[name]: rows for found, live in named for name, rows in found.items() if name in live}


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


def stepwise(boundary: Boundary) -> Boundary:
    """The same boundary, which of several steps says what stays for all of them."""
    return (
        replace(boundary, request=boundary.request.op.stepwise(boundary.request.rows))
        if boundary.steps > 1
        else boundary
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

"""Aggregates over rows on the host, computed round by round, forward and backward.

Source: HongTu, algorithms 2 and 3. Rows stay in their slots while later rounds need them; rows of other ranks come from
the slots of their owners. In the backward pass, gradients are added up in the slots, sent to the ranks that own the
rows, and added to those on the host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import torch
from torch import Tensor

from weft.nn import Aggregate, ByRelation, WholeLayer
from weft.nn import Rows as Tensors
from weft.parallel.chunks.program.stages import AggregateStep
from weft.parallel.chunks.run.activations import Activations, Gradients, StoredRows
from weft.parallel.chunks.run.chunk_runtime import Runtime
from weft.parallel.chunks.run.chunk_sources import SlotExchange, Source
from weft.parallel.chunks.run.chunk_views import ChunkView
from weft.parallel.chunks.run.slots import BACKWARD_FIELDS, FORWARD_FIELDS, PlacedRound, SlotLayout, SlotTopology


@dataclass(kw_only=True)
class Loaded:
    """Data of a round that is loaded to the device before the round runs."""

    index: dict[str, Tensor]
    """Index tensors of the round, by field name of `Round`."""
    topology: SlotTopology
    """Edges of the round."""
    target_rows: dict[int, Tensor]
    """Rows of the targets, by port."""
    saved: tuple[Tensor, ...] = ()
    """Result of the aggregate, and further rows that the forward pass saved with it; empty if not needed."""


@dataclass(kw_only=True)
class RoundBackward:
    """Result of a round in the backward pass, with the function that backpropagates through the round."""

    result: Tensor
    """Result [n, F]; zeros if no later computation reads it."""
    back: Callable[[Tensor | None], None]
    """Takes the gradient of the result (or None) and adds the gradients of the rows that the round read."""


def layout_of(op: Aggregate) -> SlotLayout:
    """Return the layout of edges that an aggregate needs."""
    if isinstance(op, WholeLayer):
        return "whole"
    if isinstance(op, ByRelation):
        return "relations"
    return "looped" if op.loops else "plain"


class ChunkAggregates:
    """Computes all steps of the aggregate that a segment requests at its boundary.

    Args:
        runtime: Rows and rounds of this rank.
        activations: Rows that the segment has left; complete before the aggregate starts.
        view_key: Random key of dropout for the model stage that aggregates.
    """

    def __init__(self, runtime: Runtime, activations: Activations, view_key: int) -> None:
        self.runtime, self.activations, self.view_key = runtime, activations, view_key
        self.segment, self.device, self.meter = activations.segment, runtime.device, runtime.meter
        self.exchange = SlotExchange(runtime, activations.segment.hop)

    @cached_property
    def op(self) -> Aggregate:
        """The requested aggregate; a whole layer is the one of this rank's model."""
        assert self.activations.op is not None
        return self.activations.op

    @cached_property
    def layout(self) -> SlotLayout:
        """Layout of the edges that the aggregate needs."""
        return layout_of(self.op)

    def results(
        self,
        step: AggregateStep,
        *,
        ready: Callable[[int], bool] | None = None,
        arrive: Callable[[], None] | None = None,
    ) -> Iterator[tuple[PlacedRound, Loaded, Tensor]]:
        """Yield each round with its loaded data and its results [n, F] for one step.

        Args:
            step: The aggregate step.
            ready: Returns True if all rows that a round (by number) reads are available; None: always.
            arrive: Called before each round is loaded, to store rows that arrive from other ranks.
        """
        rounds, sources = self.runtime.rounds(self.segment.hop + step.step), self._sources(step)
        self._make_slots(rounds, sources)

        def load(round_: PlacedRound) -> Loaded:
            if arrive is not None:
                arrive()
            return self._load(round_, sources, step)

        for round_, loaded in self.runtime.load_ahead(rounds, load, ready):
            self._count(round_, loaded, sources, step)
            self.exchange.fetch(round_, loaded.index, sources)
            rows = self._aggregate_inputs(
                {**self._source_tensors(sources), **self._target_tensors(loaded)}, self.activations.shared
            )
            yield round_, loaded, self._compute(round_, loaded, rows, keep=step.is_last)
            del loaded, rows

    def backward(
        self, step: AggregateStep, grads: Gradients, *, into: StoredRows | None = None
    ) -> Iterator[tuple[PlacedRound, Loaded, RoundBackward]]:
        """Yield each round in backward order; the caller must backpropagate through it before advancing the generator.

        Args:
            step: The aggregate step.
            grads: Gradients of the activations; the rounds add to them.
            into: Gradients of an earlier step's result, for a step that reads it; the rounds add to them.
        """
        rounds, sources = self.runtime.rounds(self.segment.hop + step.step, back=True), self._sources(step, grads, into)
        if step.values:
            self._make_slots(rounds, sources)
        for source in sources:
            if source.into is not None:
                in_place = rounds[0].in_place
                source.grads = source.into.tensor() if in_place else self._zeros(rounds, source, self.runtime.sum_dtype)
        load = lambda round_: self._load(round_, sources, step)  # noqa: E731
        for round_, loaded in self.runtime.load_ahead(rounds, load):
            self._count(round_, loaded, sources, step)
            if step.values:
                self.exchange.fetch(round_, loaded.index, sources)
            yield round_, loaded, self._round_backward(round_, loaded, sources, grads, values=step.values)
            del loaded

    def _compute(self, round_: PlacedRound, loaded: Loaded, tensors: Tensors, *, keep: bool) -> Tensor:
        """Return a round's result [n, F].

        With `keep`, write the result and the rows saved with it to the host, if the plan saves them.
        """
        activations, saved = self.activations, tuple[Tensor, ...]()
        self.meter.aggregate(round_.num_edges, self._read_width)
        if keep and activations.result is not None and self.op.can_save and not self.segment.constant:
            result, saved = self.op.apply_saving(loaded.topology, tensors)
            num_rows = activations.result.num_rows
            activations.saved = activations.saved or [
                self.runtime.pool.alloc(num_rows, rows.shape[1]) for rows in saved
            ]
        else:
            result = self._result(loaded, tensors)
        if keep and activations.result is not None:
            for rows, values in zip((activations.result, *activations.saved), (result, *saved), strict=True):
                self.runtime.write(rows, round_.targets, values)
        return result

    def _round_backward(
        self, round_: PlacedRound, loaded: Loaded, sources: list[Source], grads: Gradients, *, values: bool
    ) -> RoundBackward:
        # With a saved result, or a sum whose result is not read, the aggregate's own gradient function suffices.
        # Otherwise the aggregate is computed again with autograd, from leaves for everything that needs a gradient.
        segment, source_rows = self.segment, self._source_tensors(sources) if values else {}
        if loaded.saved or (self.op.linear and not values):
            tensors, result = {**source_rows, **self._target_tensors(loaded)}, self._saved_result(loaded)
            into = {name: source.grads for source in sources for name in source.names if source.grads is not None}
            back = partial(self._backward_from_saved, round_, loaded, tensors, result, into)
            return RoundBackward(
                result=result, back=lambda grad: self._accumulate(round_, loaded, sources, grads, back(grad))
            )
        leaves = {
            name: source.values.data.requires_grad_()  # a version counter of its own: the loader writes to other slots
            for source in sources
            if source.into is not None
            for name in source.names
        }
        targets = self._target_tensors(loaded)
        for name, port in segment.targets.items():
            if port in grads.live:
                leaves[name] = targets[name] = targets[name].detach().requires_grad_()
        shared = dict(self.activations.shared)
        for name in self.op.shared:
            if segment.shared[name]:
                leaves[name] = shared[name] = shared[name].detach().requires_grad_()
        self.meter.aggregate(round_.num_edges, self._read_width)
        with torch.enable_grad():
            y = self._result(loaded, self._aggregate_inputs({**source_rows, **leaves, **targets}, shared))
        back = partial(self._backward_through_graph, round_, y, leaves)
        return RoundBackward(
            result=y.detach(), back=lambda grad: self._accumulate(round_, loaded, sources, grads, back(grad))
        )

    def _saved_result(self, loaded: Loaded) -> Tensor:
        """Return the saved result, or zeros if no later computation reads it."""
        if loaded.saved:
            return loaded.saved[0]
        num_targets = loaded.topology.adjacency.num_targets
        return torch.zeros(1, 1, dtype=self.runtime.dtype, device=self.device).expand(num_targets, self.segment.width)

    def _backward_from_saved(
        self,
        round_: PlacedRound,
        loaded: Loaded,
        tensors: Tensors,
        result: Tensor,
        into: Tensors,
        grad: Tensor | None,
    ) -> Tensors:
        """Return the gradients of the rows that a round read, by name, computed from the saved result.

        Args:
            round_: The round.
            loaded: Its loaded data.
            tensors: Rows that the aggregate read, by name.
            result: Result of the forward pass.
            into: Gradients in the slots, by name: those of sources are added there and not returned.
            grad: Gradient of the result; None if there is none.
        """
        if grad is None or not self.segment.differentiable:
            return {}
        self.meter.aggregate(round_.num_edges, self._read_width)
        return self.op.gradients(loaded.topology, tensors, result, loaded.saved[1:], grad, into)

    def _backward_through_graph(self, round_: PlacedRound, y: Tensor, leaves: Tensors, grad: Tensor | None) -> Tensors:
        """Return the gradients of the rows that a round read, by name, through a recomputed result.

        Args:
            round_: The round.
            y: Recomputed result.
            leaves: Leaves of its autograd graph, by name.
            grad: Gradient of the result; None if there is none.
        """
        if grad is None or not y.requires_grad:
            return {}
        self.meter.aggregate(round_.num_edges, self._read_width)
        torch.autograd.backward(y, grad)  # also accumulates the gradients of a whole layer's parameters
        return {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}

    def _accumulate(
        self, round_: PlacedRound, loaded: Loaded, sources: list[Source], grads: Gradients, computed: Tensors
    ) -> None:
        """Add the gradients of the rows that a round read.

        Gradients of sources are added in the slots, those of targets on the host, those of shared tensors in `grads`.
        Gradients of rows that leave the buffer are sent away or written back.

        Args:
            round_: The round.
            loaded: Its loaded data.
            sources: Rows that the aggregate read at sources.
            grads: Gradients of the activations.
            computed: Gradients by name of the aggregate's tensors.
        """
        for source in sources:
            for name in source.names:
                if source.grads is not None and name in computed:
                    source.grads += computed[name]
        for name, port in self.segment.targets.items():
            if name in computed and port in grads.live:
                self.runtime.accumulate(grads.live[port], round_.targets, computed[name])
        for name in self.op.shared:
            grads.add_shared(name, computed.get(name))
        self.exchange.return_grads(round_, loaded.index, sources)

    def _sources(
        self, step: AggregateStep, grads: Gradients | None = None, into: StoredRows | None = None
    ) -> list[Source]:
        """Return the rows that a step reads at sources, each once; the result of an earlier step comes first."""
        result = []
        if step.step:
            result.append(Source(names=(self.op.first,), rows=self.activations.intermediates[step.step - 1], into=into))
        for port, names in step.source_ports.items():
            destination = grads.live.get(port) if grads else None
            result.append(Source(names=tuple(names), rows=self.activations.arrays[port], into=destination))
        return result

    def _make_slots(self, rounds: Sequence[PlacedRound], sources: list[Source]) -> None:
        """Allocate the buffer of each source, or use the rows themselves if they are read in place."""
        for source in sources:
            in_place = rounds[0].in_place
            source.buffer = source.rows.tensor() if in_place else self._zeros(rounds, source, self.runtime.dtype)

    def _zeros(self, rounds: Sequence[PlacedRound], source: Source, dtype: torch.dtype) -> Tensor:
        """Return a buffer [slots, F] of zeros.

        Free slots must not contain NaN: a kernel may multiply them by 0, and 0 times NaN is NaN.
        """
        return torch.zeros(rounds[0].num_slots, source.rows.width, dtype=dtype, device=self.device)

    def _load(self, round_: PlacedRound, sources: list[Source], step: AggregateStep) -> Loaded:
        """Load to the device all that a round reads, except for rows of other ranks."""
        is_backward = step.edges != "forward"
        names, in_reverse = (*(FORWARD_FIELDS * step.values), *(BACKWARD_FIELDS * is_backward)), self.runtime.in_reverse
        index = {name: round_.index(name, in_reverse=in_reverse and is_backward) for name in names}
        for source in sources if step.values and not round_.in_place else ():
            source.rows.gather(index["load"], source.values, index["load_slots"])
        slots = (
            "recv_row_slots",
            "send_grad_slots",
            "write_back_slots",
            *(("send_rows", "recv_grads") * self.runtime.optimisations.share),
        )
        index |= {name: self.runtime.to_device(index[name]) for name in slots if name in index}
        read, span = self.runtime.read, round_.targets
        target_rows = {port: read(self.activations.arrays[port], span) for port in step.target_ports}
        saved_rows = (self.activations.result, *self.activations.saved) if step.saved else ()
        saved = tuple(read(rows, span) for rows in saved_rows if rows is not None)
        topology = round_.topology(self.layout, self.runtime.to_device, step.edges)
        return Loaded(index=index, topology=topology, target_rows=target_rows, saved=saved)

    def _count(self, round_: PlacedRound, loaded: Loaded, sources: list[Source], step: AggregateStep) -> None:
        """Count the bytes that `_load` has copied."""
        rows = sum(tensor.nbytes for tensor in (*loaded.target_rows.values(), *loaded.saved))
        self.runtime.transfer("rows", rows, 0)
        self.runtime.transfer("edges", round_.edge_bytes(self.layout, step.edges), 0)
        if step.values:
            width = sum(source.rows.width for source in sources)
            self.runtime.transfer("sources", len(loaded.index["load"]) * width * self.runtime.dtype.itemsize, 0)

    def _source_tensors(self, sources: list[Source]) -> Tensors:
        """Return the rows in the slots, by name of the aggregate's tensors."""
        return {name: source.values for source in sources for name in source.names}

    def _target_tensors(self, loaded: Loaded) -> Tensors:
        return {name: loaded.target_rows[port] for name, port in self.segment.targets.items()}

    @property
    def _read_width(self) -> int:
        """Number of columns that the aggregate sums per edge."""
        return self.segment.aggregated.width

    def _aggregate_inputs(self, tensors: Tensors, shared: Tensors) -> Tensors:
        """Return the tensors of a round by name, with the shared ones.

        A whole layer gets one tensor: the rows of its targets, followed by those in the slots.
        """
        inputs = {**tensors, **{name: shared[name] for name in self.op.shared}}
        if isinstance(self.op, WholeLayer):
            inputs["x"] = torch.cat([tensors["own"], tensors["x"]])
        return inputs

    def _result(self, loaded: Loaded, tensors: Tensors) -> Tensor:
        """Return a round's result [n, F]."""
        topology = loaded.topology
        if isinstance(self.op, WholeLayer):
            calls, count = self.segment.calls_before, self.runtime.graph.num_vertices
            return ChunkView(topology, count, key=self.view_key, calls=calls).aggregate(self.op, tensors)
        return self.op.apply(topology, tensors)

"""The aggregates that a boundary asks for, round by round, of rows that are on the host (HongTu, algorithms 2 and 3).

A round's rows stay in their slots for the next one; rows of other ranks come from the slots of those that have them.
Backward, gradients are added up in the slots, go back to the ranks that own the rows, and from there to the host.
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
from weft.parallel.chunks.run.activations import BoundaryRows, Grads, Rows
from weft.parallel.chunks.run.chunk_runtime import Runtime
from weft.parallel.chunks.run.chunk_sources import SlotExchange, Source
from weft.parallel.chunks.run.chunk_views import ChunkView
from weft.parallel.chunks.run.slots import BACKWARD, FORWARD, PlacedRound, SlotLayout, SlotTopology


@dataclass(kw_only=True)
class Loaded:
    """What of a round is brought to the device before it is worked on.

    own: by port. kept: the result, and what else is kept of it, if they are there.
    """

    index: dict[str, Tensor]
    topology: SlotTopology
    own: dict[int, Tensor]
    kept: tuple[Tensor, ...] = ()


@dataclass(kw_only=True)
class RoundBackward:
    """A round's result in the backward pass, as far as anyone reads it, and the way of its gradient."""

    result: Tensor
    back: Callable[[Tensor | None], None]


def layout_of(op: Aggregate) -> SlotLayout:
    """How a round's edges are to stand for an aggregate."""
    if isinstance(op, WholeLayer):
        return "whole"
    if isinstance(op, ByRelation):
        return "relations"
    return "looped" if op.loops else "plain"


class ChunkAggregates:
    """All steps of the aggregate that a table's boundary asks for, once the table is made. view_key: of its stage."""

    def __init__(self, runtime: Runtime, table: BoundaryRows, view_key: int) -> None:
        self.runtime, self.table, self.segment, self.view_key = runtime, table, table.segment, view_key
        self.device, self.meter, self.exchange = runtime.device, runtime.meter, SlotExchange(runtime, table.segment.hop)

    @cached_property
    def op(self) -> Aggregate:
        """The aggregate: of the rank's own model, where it is one of its layers."""
        assert self.table.op is not None
        return self.table.op

    @cached_property
    def layout(self) -> SlotLayout:
        """How its edges stand."""
        return layout_of(self.op)

    def results(
        self,
        step: AggregateStep,
        *,
        ready: Callable[[int], bool] | None = None,
        arrive: Callable[[], None] | None = None,
    ) -> Iterator[tuple[PlacedRound, Loaded, Tensor]]:
        """Round by round, what is loaded and the results [n, F] of a step.

        ready: whether what a round reads is there; None: it is. arrive: brings it before a round is loaded.
        """
        rounds, sources = self.runtime.rounds(self.segment.hop + step.step), self._sources(step)
        self._make_slots(rounds, sources)

        def load(round_: PlacedRound) -> Loaded:
            if arrive is not None:
                arrive()
            return self._load(round_, sources, step)

        for round_, loaded in self.runtime.ahead(rounds, load, ready):
            self._count(round_, loaded, sources, step)
            self.exchange.fetch(round_, loaded.index, sources)
            rows = self._about({**self._at(sources), **self._targets(loaded)}, self.table.shared)
            yield round_, loaded, self._made(round_, loaded, rows, keep=step.is_last)
            del loaded, rows

    def backward(
        self, step: AggregateStep, grads: Grads, *, into: Rows | None = None
    ) -> Iterator[tuple[PlacedRound, Loaded, RoundBackward]]:
        """As `results` in the backward pass: whoever is given one sends its gradient back before asking for the next.

        grads: those that a boundary left. into: where those go of what an earlier step made.
        """
        rounds, sources = self.runtime.rounds(self.segment.hop + step.step, back=True), self._sources(step, grads, into)
        if step.values:
            self._make_slots(rounds, sources)
        for source in sources:
            if source.into is not None:
                source.grads = source.into.tensor() if rounds[0].in_place else self._zeros(rounds, source)
        load = lambda round_: self._load(round_, sources, step)  # noqa: E731
        for round_, loaded in self.runtime.ahead(rounds, load):
            self._count(round_, loaded, sources, step)
            if step.values:
                self.exchange.fetch(round_, loaded.index, sources)
            yield round_, loaded, self._round_backward(round_, loaded, sources, grads, values=step.values)
            del loaded

    def _made(self, round_: PlacedRound, loaded: Loaded, tensors: Tensors, *, keep: bool) -> Tensor:
        """A round's result [n, F]; keep: on the host, with what else is kept of it, if it is to be."""
        table, kept = self.table, tuple[Tensor, ...]()
        self.meter.aggregate(round_.num_edges, self._read_width)
        if keep and table.result is not None and self.op.can_save and not self.segment.constant:
            result, kept = self.op.apply_saving(loaded.topology, tensors)
            num_rows = table.result.num_rows
            table.kept = table.kept or [self.runtime.pool.alloc(num_rows, rows.shape[1]) for rows in kept]
        else:
            result = self._result(loaded, tensors)
        if keep and table.result is not None:
            for rows, values in zip((table.result, *table.kept), (result, *kept), strict=True):
                self.runtime.store(rows, round_.targets, values)
        return result

    def _round_backward(
        self, round_: PlacedRound, loaded: Loaded, sources: list[Source], grads: Grads, *, values: bool
    ) -> RoundBackward:
        segment, at = self.segment, self._at(sources) if values else {}
        if loaded.kept or (self.op.linear and not values):
            tensors, result = {**at, **self._targets(loaded)}, self._known(loaded)
            into = {name: one.grads for one in sources for name in one.names if one.grads is not None}
            back = partial(self._back_kept, round_, loaded, tensors, result, into)
            return RoundBackward(
                result=result, back=lambda grad: self._spread(round_, loaded, sources, grads, back(grad))
            )
        wanted = {
            name: source.values.data.requires_grad_()  # its own version: the loader writes to slots not used here
            for source in sources
            if source.into is not None
            for name in source.names
        }
        targets = self._targets(loaded)
        for name, port in segment.targets.items():
            if port in grads.live:
                wanted[name] = targets[name] = targets[name].detach().requires_grad_()
        shared = dict(self.table.shared)
        for name in self.op.shared:
            if segment.shared[name]:
                wanted[name] = shared[name] = shared[name].detach().requires_grad_()
        self.meter.aggregate(round_.num_edges, self._read_width)
        with torch.enable_grad():
            y = self._result(loaded, self._about({**at, **wanted, **targets}, shared))
        back = partial(self._back_again, round_, y, wanted)
        return RoundBackward(
            result=y.detach(), back=lambda grad: self._spread(round_, loaded, sources, grads, back(grad))
        )

    def _known(self, loaded: Loaded) -> Tensor:
        """The result that was kept, or zeros where nobody reads it."""
        if loaded.kept:
            return loaded.kept[0]
        num_targets = loaded.topology.adjacency.num_targets
        return torch.zeros(1, 1, dtype=self.runtime.dtype, device=self.device).expand(num_targets, self.segment.width)

    def _back_kept(
        self,
        round_: PlacedRound,
        loaded: Loaded,
        tensors: Tensors,
        result: Tensor,
        into: Tensors,
        grad: Tensor | None,
    ) -> Tensors:
        """The gradients of what a round read, by name, from that of its result; those of `into` are added there."""
        if grad is None or not self.segment.differentiable:
            return {}
        self.meter.aggregate(round_.num_edges, self._read_width)
        return self.op.gradients(loaded.topology, tensors, result, loaded.kept[1:], grad, into)

    def _back_again(self, round_: PlacedRound, y: Tensor, wanted: Tensors, grad: Tensor | None) -> Tensors:
        """The same through a result that was made again."""
        if grad is None or not y.requires_grad:
            return {}
        self.meter.aggregate(round_.num_edges, self._read_width)
        torch.autograd.backward(y, grad)  # leaves the gradients of a whole layer's parameters, too
        return {name: leaf.grad for name, leaf in wanted.items() if leaf.grad is not None}

    def _spread(self, round_: PlacedRound, loaded: Loaded, sources: list[Source], grads: Grads, found: Tensors) -> None:
        """Adds the gradients of what a round read to those in slots, on the host, and of what all rows share.

        Those of rows that the next round does not hold leave.
        """
        for source in sources:
            for name in source.names:
                if source.grads is not None and name in found:
                    source.grads += found[name]
        for name, port in self.segment.targets.items():
            if name in found and port in grads.live:
                self.runtime.deposit(grads.live[port], round_.targets, found[name])
        for name in self.op.shared:
            grads.add_shared(name, found.get(name))
        self.exchange.leave(round_, loaded.index, sources)

    def _sources(self, step: AggregateStep, grads: Grads | None = None, into: Rows | None = None) -> list[Source]:
        """What a step reads at sources, each rows once; what an earlier step made is apart."""
        found = []
        if step.step:
            found.append(Source(names=(self.op.first,), rows=self.table.between[step.step - 1], into=into))
        for port, names in step.source_ports.items():
            to = grads.live.get(port) if grads else None
            found.append(Source(names=tuple(names), rows=self.table.arrays[port], into=to))
        return found

    def _make_slots(self, rounds: Sequence[PlacedRound], sources: list[Source]) -> None:
        for source in sources:
            source.buffer = source.rows.tensor() if rounds[0].in_place else self._zeros(rounds, source)

    def _zeros(self, rounds: Sequence[PlacedRound], source: Source) -> Tensor:
        """Zeros, since what a free slot holds is multiplied by nothing, and nothing is no number times NaN."""
        return torch.zeros(rounds[0].num_slots, source.rows.width, dtype=self.runtime.dtype, device=self.device)

    def _load(self, round_: PlacedRound, sources: list[Source], step: AggregateStep) -> Loaded:
        """Brings to the device what a round reads, except what comes from other ranks."""
        backward = step.edges != "forward"
        index = {name: round_.index(name) for name in (*(FORWARD * step.values), *(BACKWARD * backward))}
        for source in sources if step.values and not round_.in_place else ():
            source.rows.gather(index["load"], source.values, index["load_slots"])
        slots = ("fetch_slots", "give_slots", "flush_slots", *(("serve", "take") * self.runtime.optimisations.share))
        index |= {name: self.runtime.to_device(index[name]) for name in slots if name in index}
        read, span = self.runtime.read, round_.targets
        own = {port: read(self.table.arrays[port], span) for port in step.own_ports}
        wanted = (self.table.result, *self.table.kept) if step.kept else ()
        found = tuple(read(rows, span) for rows in wanted if rows is not None)
        topology = round_.topology(self.layout, self.runtime.to_device, step.edges)
        return Loaded(index=index, topology=topology, own=own, kept=found)

    def _count(self, round_: PlacedRound, loaded: Loaded, sources: list[Source], step: AggregateStep) -> None:
        """Notes what `_load` has brought."""
        rows = sum(one.nbytes for one in (*loaded.own.values(), *loaded.kept))
        self.runtime.transfer("rows", rows, 0)
        self.runtime.transfer("edges", round_.edge_bytes(self.layout, step.edges), 0)
        if step.values:
            width = sum(source.rows.width for source in sources)
            self.runtime.transfer("sources", round_.num_loaded * width * self.runtime.dtype.itemsize, 0)

    def _at(self, sources: list[Source]) -> Tensors:
        """The rows in slots, by name."""
        return {name: source.values for source in sources for name in source.names}

    def _targets(self, loaded: Loaded) -> Tensors:
        return {name: loaded.own[port] for name, port in self.segment.targets.items()}

    @property
    def _read_width(self) -> int:
        """The columns of what the aggregates aggregate."""
        return self.segment.aggregated.width

    def _about(self, tensors: Tensors, shared: Tensors) -> Tensors:
        """The aggregate's tensors of a round; the rows of a whole layer's targets are the first of its sources'."""
        found = {**tensors, **{name: shared[name] for name in self.op.shared}}
        if isinstance(self.op, WholeLayer):
            found["x"] = torch.cat([tensors["own"], tensors["x"]])
        return found

    def _result(self, loaded: Loaded, tensors: Tensors) -> Tensor:
        """A round's result [n, F]."""
        topology = loaded.topology
        if isinstance(self.op, WholeLayer):
            calls, count = self.segment.calls_before, self.runtime.graph.num_vertices
            return ChunkView(topology, count, key=self.view_key, calls=calls).aggregate(self.op, tensors)
        return self.op.apply(topology, tensors)

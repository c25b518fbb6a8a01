"""Training beyond the device's memory (HongTu): rows live on the host, chunks of the graph are worked on in turn."""

from __future__ import annotations

import os
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from weft.comm import Group, sum_gradients
from weft.core.errors import InputError
from weft.core.host import Spool, free_bytes, host_rows, release
from weft.core.memory import give_back_pages
from weft.core.savings import ALL_SAVINGS, Savings
from weft.core.units import format_bytes
from weft.cost import Trace, all_reduce
from weft.data import Graph
from weft.nn import GraphView, Inputs, embeddings, shared_parameters
from weft.strategies.base import ANYWHERE, GraphShape, Placement, Step, dtype_of
from weft.strategies.blocks import SameRowsView
from weft.strategies.forecast import forecast
from weft.strategies.hybrid import VertexParallel, embedded_shape, part_of
from weft.strategies.miniature import ChunkShape
from weft.strategies.moves import Facts, Moves
from weft.strategies.passes import Pass
from weft.strategies.plan import MARGIN, Plan, Planned, Planner
from weft.strategies.program import Part
from weft.strategies.rates import measured_rates
from weft.strategies.slots import PlacedBatch
from weft.strategies.tables import Rows, Table
from weft.strategies.typed import is_embedded, typed_rows

Item = TypeVar("Item")
Brought = TypeVar("Brought")
SOME_CHUNKS = 64  # whose memory is named where a limit is below what any chunk takes


class Offload(VertexParallel):
    """Rows, and what their gradients need, on the host; on the device, one chunk of the edges at a time, exact."""

    view_type = SameRowsView
    takes_factors = True

    def __init__(
        self,
        graph: Graph,
        model: nn.Module,
        group: Group,
        *,
        seed: int = 0,
        savings: Savings = ALL_SAVINGS,
        placement: Placement = ANYWHERE,
        plan: Plan | None = None,
    ) -> None:
        self._given = plan
        super().__init__(graph, model, group, seed=seed, savings=savings, placement=placement)

    def place(self) -> Tensor:
        group, placement = self.group, self.placement
        if group.size > 1 and placement.rates is None:
            self.placement = placement = replace(placement, rates=measured_rates(group, placement.scratch))
        plan = self._given
        if plan is None:
            planner = self.planner(self.graph, self.model, group.size, placement, self.savings)
            plan = planner.plan(group.rank)
            self._foresee(planner, plan)
        self.settled = self._placed(plan)
        self.dependencies = needed = self.settled.dependencies
        self._free: dict[tuple[int, int], list[Rows]] = defaultdict(list)
        self._lent: list[Rows] = []
        self.constant: Table | None = None
        self.row_ids = self.topology.ids[needed.rows].to(group.device)
        self.embedded_halo = self._make_embedded_halo()
        self._pass: Pass | None = None
        self._logits: Rows | None = None
        self._planning = True
        self._release()
        return needed.own

    def _release(self) -> None:
        """Gives back the pages of a graph that is mapped: what is resident is to be what the device may have."""
        graph, edges = self.graph, self.graph.in_edges
        known = (graph.x, graph.edge_features, graph.edge_type, *graph.features.values())
        for one in (*known, edges.indptr, edges.indices, edges.weight):
            if one is not None:
                release(one)

    def _placed(self, plan: Plan) -> Plan:
        """Puts the plan's batches into a spool, and leaves out of it what grows with the graph."""
        needed, self.spool = plan.dependencies, Spool(self.placement.scratch)
        self._rows_at = [hop.num_inputs for hop in needed.hops]
        self._batches: list[list[PlacedBatch]] = []
        for planned in plan.schedules:
            hop, vertices = planned.hop, torch.cat([needed.rows[: planned.hop.num_inputs], planned.hop.fetched])
            placed = (
                PlacedBatch(batch, hop, vertices, self.topology, planned.layouts, self.spool)
                for batch in planned.schedule.batches
            )
            self._batches.append(list(placed))
        return replace(plan, schedules=(), dependencies=replace(needed, hops=()))

    def _foresee(self, planner: Planner, plan: Plan) -> None:
        """Notes what a person wants to know before a run, and what a record keeps."""
        facts = self.facts_of(planner, plan, self.group.rank)
        trace = self.trace_of(self.model, plan, facts, training=True)
        self._miniature, self._forecast = planner.miniature, forecast(self.graph, self.model, plan, facts, trace)
        self._volumes = [{"given": asdict(one.given), "chosen": asdict(one.schedule.volumes)} for one in plan.schedules]

    def facts(self) -> dict[str, Any]:
        foreseen = replace(self._forecast, device=self._miniature.most(self.settled.chunks))
        return {"forecast": asdict(foreseen), "says": str(foreseen), "volumes": self._volumes}

    def make_inputs(self) -> Inputs:
        """Nothing: features are read range by range."""
        return Inputs(rows=torch.empty(0, self.graph.num_features, dtype=self.dtype), savings=self.savings)

    def view(self, stage: int, view_key: int) -> GraphView:
        raise NotImplementedError(f"stage {stage} has no view of all rows (key {view_key})")

    def forward(self, step: Step) -> Tensor:
        self.model.train(step.training)
        self._end()
        if self._planning:
            self._planning = False
            give_back_pages()  # planning took more than the device may have
        made = Pass(self, self.settled.programs[step.training], step)
        logits = made.forward()
        if step.training:
            self._pass = made
        else:  # nothing follows but the next pass
            made.end(but=logits)
            self._logits = logits
        return logits.tensor()

    def backward(self, logits: Tensor, grad: Tensor) -> None:
        del logits
        assert self._pass is not None
        self._pass.backward(grad)
        self._end()
        sum_gradients(shared_parameters(self.model), self.group)

    def _end(self) -> None:
        """Takes back what the last pass has on the host."""
        if self._pass is not None:
            self._pass.end()
        self.give(*self._lent, self._logits)
        self._lent, self._logits, self._pass = [], None, None

    def empty_rows(self, rows: Tensor) -> Tensor:
        made = self.take(*rows.shape)
        self._lent.append(made)
        return made.tensor()

    def batches(self, hop: int) -> Sequence[PlacedBatch]:
        """The batches of a product."""
        return self._batches[self.settled.schedule_of[hop]]

    def spans(self, num_rows: int) -> Sequence[slice]:
        """Ranges of rows that are worked on one after the other; one at least, so that ranks do the same."""
        step = self.settled.span
        return [slice(first, min(first + step, num_rows)) for first in range(0, max(num_rows, 1), step)]

    def num_rows(self, hop: int) -> int:
        """How many rows this rank has before a product, or, behind the last one, in the end."""
        return self._rows_at[hop] if hop < len(self._rows_at) else self.dependencies.num_own

    def take(self, num_rows: int, width: int) -> Rows:
        """Memory of the host for rows."""
        free = self._free[num_rows, width]
        device, folder = self.group.device, self.placement.scratch
        return free.pop() if free else host_rows(num_rows, width, self.dtype, device=device, folder=folder)

    def give(self, *rows: Rows | None) -> None:
        """Takes memory back, for whoever asks next."""
        for one in rows:
            if one is not None:
                self._free[one.num_rows, one.width].append(one)

    def keeps(self, part: Part) -> bool:
        """Whether the answers of a product are kept for the backward pass."""
        return self.model.training and part.hop in self.settled.kept

    def ahead(self, items: Iterable[Item], load: Callable[[Item], Brought]) -> Iterator[tuple[Item, Brought]]:
        """Each item with what is loaded for it, the next one's while the caller works on this one's."""
        items = list(items)
        if not self.savings.prefetch:
            yield from ((item, load(item)) for item in items)
            return  # whoever is given something lets go of it before it asks for the next
        coming = self._loader.submit(load, items[0])
        for number, item in enumerate(items):
            loaded = coming.result()
            if number + 1 < len(items):
                coming = self._loader.submit(load, items[number + 1])
            yield item, loaded
            del loaded

    @cached_property
    def _loader(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(1, thread_name_prefix="weft-loader")

    def inputs_of(self, span: slice) -> Inputs:
        """The features of a range of rows."""
        vertices = self.dependencies.rows[span]
        typed = typed_rows(self.graph, vertices, self.group.device, self.dtype)
        inputs = Inputs(rows=self.features(vertices), savings=self.savings, typed=typed)
        self._release()
        return inputs

    def embedded_in(self, span: slice) -> slice:
        """Which of this rank's embedded rows belong to a range of its rows."""
        before = self._embedded_before
        return slice(int(before[span.start]), int(before[span.stop]))

    @cached_property
    def _embedded_before(self) -> Tensor:
        found = is_embedded(self.graph)[self.dependencies.rows].cumsum(0)
        return torch.cat([found.new_zeros(1), found])

    @classmethod
    def planner(cls, graph: Graph, model: nn.Module, size: int, placement: Placement, savings: Savings) -> Planner:
        """Who plans a run; what chunks take is found on graphs of which one is worked on in little."""
        little = Placement(intermediates=placement.intermediates, rates=placement.rates, scratch=placement.scratch)
        plainly = replace(savings, prefetch=False, reorder=False)

        def place_at(graph: Graph, model: nn.Module, bounds: Sequence[int], *, kept: frozenset[int]) -> Offload:
            planner = Planner(graph, model, 1, little, plainly, place_at)
            plan = planner.cut_at(0, [[bounds] * planner.programs[True].num_hops])
            plan = replace(plan, span=bounds[1], kept=kept)
            device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
            return FirstChunk(graph, model, Group(device=str(device)), savings=plainly, placement=little, plan=plan)

        return Planner(graph, model, size, placement, savings, place_at)

    @classmethod
    def shape(
        cls,
        graph: Graph,
        model: nn.Module,
        *,
        rank: int,
        size: int,
        placement: Placement = ANYWHERE,
        savings: Savings = ALL_SAVINGS,
    ) -> GraphShape:
        planner = cls.planner(graph, model, size, placement, savings)
        plan = planner.plan(rank)
        return GraphShape.of(graph)._replace(plan=(plan, cls.facts_of(planner, plan, rank)))

    @classmethod
    def trace(
        cls,
        model: nn.Module,
        shape: GraphShape,
        *,
        rank: int = 0,
        size: int = 1,
        training: bool,
        savings: Savings = ALL_SAVINGS,
    ) -> Trace:
        """By formulas over the plan in `shape`; without one, nothing is known yet."""
        del rank, size, savings
        return Trace(operations=()) if shape.plan is None else cls.trace_of(model, *shape.plan, training=training)

    @staticmethod
    def trace_of(model: nn.Module, plan: Plan, facts: Facts, *, training: bool) -> Trace:
        """The trace of a plan."""
        made = Moves(plan, facts, training=training).operations()
        if training and facts.size > 1:
            numbers = sum(one.numel() for one in shared_parameters(model) if one.requires_grad)
            made.append(all_reduce("gradients", numbers, facts.itemsize, facts.size))
        return Trace(operations=tuple(made))

    @staticmethod
    def facts_of(planner: Planner, plan: Plan, rank: int) -> Facts:
        """What formulas need beside a rank's plan."""
        graph, model, size = planner.graph, planner.model, len(planner.needed)
        item = dtype_of(model).itemsize
        return Facts(
            size=size,
            itemsize=item,
            weight=0 if graph.in_edges.weight is None else item,
            missing=[missing_loops(graph, plan, planned) for planned in plan.schedules],
            embedded=embedded_shape(graph, planner.needed, rank, part_of(graph, size, planner.placement)),
            embedded_width=sum(weight.shape[1] for weight in embeddings(model).values()),
            share=planner.savings.share,
            edge_ids=bool(graph.relations) or graph.edge_features is not None,
            on_cpu=planner.on_cpu,
        )

    @classmethod
    def check_fits(
        cls, graph: Graph, model: nn.Module, *, size: int, placement: Placement, savings: Savings = ALL_SAVINGS
    ) -> None:
        in_files = placement.device in ("", "cpu") or placement.scratch is not None
        free = free_bytes(placement.scratch) if in_files else 0
        planner = cls.planner(graph, model, size, replace(placement, device_bytes=None), savings)
        limit, hub = placement.device_bytes, int(graph.in_edges.degree.max()) if graph.num_vertices else 0
        if limit is not None and (least := planner.miniature.bytes(ChunkShape(1, hub + 1, hub))) > limit:
            count = min(SOME_CHUNKS, planner.max_chunks)
            some = max(planner.miniature.most(planner.cut(one, count, reorder=False).chunks) for one in range(size))
            raise InputError(
                f"--device-memory {format_bytes(limit)}: one vertex with its {hub:,} in-edges takes "
                f"{format_bytes(least)}, and {count} chunks take {format_bytes(some)} each: give --device-memory "
                f"{int(some / MARGIN) + 1}, or a smaller --hidden"
            )
        if not in_files:
            return
        disk = 0
        for rank in range(int(os.environ.get("LOCAL_WORLD_SIZE", size))):
            plan = planner.cut(rank, max(placement.chunks, 1), reorder=False)
            disk += forecast(graph, model, plan, cls.facts_of(planner, plan, rank), Trace(operations=())).disk
        if disk > free:
            folder = placement.scratch or tempfile.gettempdir()
            raise InputError(
                f"{folder}: vertex data takes {format_bytes(disk)} there, and {format_bytes(free)} are free: give "
                "another folder with --scratch, a smaller --hidden, or fewer --layers"
            )


class FirstChunk(Offload):
    """Only the first chunk of everything: what it takes is to be seen, not what it gives."""

    def batches(self, hop: int) -> Sequence[PlacedBatch]:
        return super().batches(hop)[:1]

    def spans(self, num_rows: int) -> Sequence[slice]:
        return super().spans(num_rows)[:1]


def missing_loops(graph: Graph, plan: Plan, planned: Planned) -> list[int]:
    """Of each batch, the targets that have no edge to themselves."""
    lacks = ~graph.in_edges.has_loop[plan.dependencies.rows]
    return [int(lacks[batch.targets].sum()) for batch in planned.schedule.batches]

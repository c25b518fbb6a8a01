"""Offload beyond the device's memory (HongTu): rows live on the host, chunks of the graph are worked on in turn.

The search for chunks is made once; its outcome is what `decisions` says, and ranks make the same plan of it.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from weft.comm import Group
from weft.cost import NOMINAL_RATES, Trace, all_reduce
from weft.data import Graph
from weft.nn import SPREAD, Workload, embeddings
from weft.parallel.chunks.cut.rank_chunks import ChunkShape, RankChunks
from weft.parallel.chunks.program.chunk_program import Segment
from weft.parallel.chunks.program.segment_flops import SegmentFlops
from weft.parallel.chunks.program.tracer import ProgramTracer
from weft.parallel.chunks.run.chunk_runtime import as_slice
from weft.partition import Dependencies, ReceptiveField, make_dependencies
from weft.runtime.memory import release_freed_memory
from weft.storage.unnamed_files import free_bytes
from weft.strategies.base import MemoryUse, Options, Plan
from weft.strategies.offload.cutter import Cutter, Orders
from weft.strategies.offload.estimate import OffloadEstimate, estimate_offload, graph_bytes
from weft.strategies.offload.memory_probe import MemoryProbe
from weft.strategies.offload.moves import Moves, MoveSizes
from weft.strategies.offload.options import ChunkOptions, OffloadOptions
from weft.strategies.offload.placed import PlacedOffload
from weft.strategies.step_pruning import find_receptive_field, reason_for_all_rows
from weft.strategies.vertex.embedding_rows import make_embedded_halo
from weft.strategies.vertex.plan import CommunicatedPlan, HybridOptions, HybridPlan, VertexPlan
from weft.utils.errors import InputError
from weft.utils.units import format_bytes

EXAMPLE_CHUNKS = 64  # whose memory is named where a limit is below what any chunk takes
MARGIN = 0.95  # of a limit is filled: chunks have taken up to 5 % more than was told
ATTENTION_COST = 3  # an edge of attention costs as much as so many of a sum


class ChunkVertices(HybridPlan):
    """Where the vertices of chunks live, and which sources are cached."""

    optimisations = ()  # no cover: chunks load the rows of sources alone


class OffloadPlan(Plan):
    """Rows, and what their gradients need, on the host; on the device, one chunk of the edges at a time, exact."""

    name = "offload"
    options_type: ClassVar[type[Options]] = OffloadOptions
    flags: ClassVar[tuple[str, ...]] = ("machine",)
    optimisations: ClassVar[tuple[str, ...]] = ("reach", "share", "keep", "reorder", "prefetch")
    traits = SPREAD
    options: ChunkOptions

    def solve(self, state: Any) -> None:
        work = self.work
        tracer = ProgramTracer(work.graph, work.model, work.optimisations)
        self.programs = {training: tracer.program(training=training) for training in (True, False)}
        self.vertices = self.make_vertices()
        if (asked := self.programs[True].num_hops) != (foreseen := len(self.vertices.caching.costs)):
            raise InputError(
                f"strategy {self.name} makes {asked} aggregates over the edges, and the model's layers {foreseen}: "
                "give a layer that maps rows alone as weft.nn.RowLayer, and each aggregate a layer of its own"
            )
        found = (one for one in self.programs[True].segments if one.aggregates and not one.constant)
        self.saved_hops = frozenset(one.hop for one in found if self._keeps(one))
        like = (
            self.saved_hops,
            work.optimisations,
            self.options.device,
            self.in_memory,
            work.dtype,
            work.stats.num_features,
            work.stats.weighted,
        )
        self.memory_probe = MemoryProbe(work.graph, work.model, self._place_scaled, retains=self.in_memory, like=like)
        self._decisions: dict[str, Any] | None = state
        self._cutters: list[Cutter] = []
        self._chunks: dict[int, RankChunks] = {}

    def make_vertices(self) -> VertexPlan:
        """Where vertices live, and which sources are cached."""
        options = self.options
        assert isinstance(options, OffloadOptions)
        by_cost = options.cache_ratio is not None or self.machine is not None
        caching = HybridOptions(
            partition=options.partition, cache_ratio=options.cache_ratio, cache_memory=options.cache_memory
        )
        vertices = (ChunkVertices if by_cost else CommunicatedPlan)(self.work, self.size, caching, self.machine)
        return vertices.restrict_to(self.receptive_field) if isinstance(self.receptive_field, ReceptiveField) else vertices

    @cached_property
    def receptive_field(self) -> ReceptiveField | str:
        """What training steps and evaluations read of the graph, which have one set of rows; or why that is all."""
        reach = find_receptive_field(self.work, self.traits, training=False)
        if isinstance(reach, str):
            return reach
        if embeddings(self.work.model) or self.work.graph.relations:
            return "types are of the whole graph"
        return reason_for_all_rows(self.work, self.traits, training=True) or reach

    @property
    def cutters(self) -> list[Cutter]:
        """What cuts aggregates into chunks; it holds what all ranks compute and fetch, until `forget`."""
        if not self._cutters:
            self._cutters = self.make_cutters()
        return self._cutters

    def make_cutters(self) -> list[Cutter]:
        """One for all ranks, whose chunks share what they load; or one for each rank."""
        return [self.make_cutter(self.vertices.all_dependencies)]

    def make_cutter(self, needed: Sequence[Dependencies]) -> Cutter:
        """That of some ranks."""
        return Cutter(
            self.work,
            self.programs,
            needed,
            self.saved_hops,
            on_cpu=self.options.on_cpu,
            prefetch=self.work.optimisations.prefetch,
            in_memory=self.in_memory,
            in_files=self.in_files,
        )

    @property
    def max_chunks(self) -> int:
        """More than this many chunks are not tried."""
        return max(cutter.max_chunks for cutter in self.cutters)

    @property
    def min_chunks(self) -> int:
        """As many chunks are made at least."""
        return max(self.options.chunks, 1)

    def release(self) -> None:
        """Lets go of what planning holds."""
        self._cutters, self._chunks = [], {}
        self.vertices.release()
        release_freed_memory()  # planning takes more than the device may have

    def state(self) -> dict[str, Any]:
        made = self._cuts()
        if "estimates" not in made:  # which take longer than the rest, and no rank needs
            chunks = self.cut(made["count"], made["orders"])
            made["estimates"] = [asdict(self.estimate(rank, one)) for rank, one in enumerate(chunks)]
        return made

    def _cuts(self) -> dict[str, Any]:
        """The decisions that chunks follow from."""
        if self._decisions is None:
            count, orders = self._search()
            self._decisions = {"count": count, "orders": orders}
        return self._decisions

    def chunks(self, rank: int) -> RankChunks:
        """What a rank does chunk by chunk; of the last that was asked for it is not made again."""
        if rank not in self._chunks:
            made = self._cuts()
            self._chunks = {rank: self.cut_rank(rank, made["count"], made["orders"])}
        return self._chunks[rank]

    def cut(self, count: int, orders: Orders | None = None) -> list[RankChunks]:
        """All ranks' shares in so many chunks."""
        return [self.cut_rank(rank, count, orders) for rank in range(self.size)]

    def cut_rank(self, rank: int, count: int, orders: Orders | None) -> RankChunks:
        """A rank's share in so many chunks."""
        (cutter,) = self.cutters
        return cutter.cut(rank, cutter.bounds(count), orders)

    def choose_orders(self, count: int) -> Orders | None:
        """The order of so many chunks that takes less time, if it is not theirs."""
        if not self.work.optimisations.reorder:
            return None
        (cutter,) = self.cutters
        return cutter.choose_orders(cutter.bounds(count), NOMINAL_RATES)

    def _search(self) -> tuple[int, Orders | None]:
        """As few chunks as fit, and their order. InputError where the device's memory is too little for any."""
        count, limit = self.min_chunks, self.options.device_memory
        while limit is not None and (most := self._peak(count)) > MARGIN * limit:
            if count >= self.max_chunks:
                raise InputError(
                    f"--device-memory {format_bytes(limit)}: a chunk takes at least {format_bytes(most)}, of {count:,} "
                    f"chunks: give --device-memory {int(most / MARGIN) + 1}, more --workers, or a smaller --hidden"
                )
            count = min(self.max_chunks, max(count + 1, int(count * min(1.05 * most / limit, 4))))
        orders = self.choose_orders(count)
        fits = limit is None or orders is None or self._peak(count, orders) <= MARGIN * limit
        return count, orders if fits else None

    def _peak(self, count: int, orders: Orders | None = None) -> int:
        """What the largest of so many chunks of any rank takes."""
        return self.memory_probe.peak(schedule for one in self.cut(count, orders) for schedule in one.chunks)

    def _keeps(self, segment: Segment) -> bool:
        """Whether an aggregate's results are kept for the backward pass, or made again from its sources (section 4.2).

        That is asked only of results which that pass needs. Kept, they and what is kept beside them are written and
        read; made again, each edge reads a row on the device, and of a sum, which needs no rows otherwise, every source
        comes from the host at least once.
        """
        wanted, linear, stats = self.options.intermediates, segment.op.linear, self.work.stats
        if wanted == "recompute" or not segment.op.can_save or (linear and not segment.needs_result):
            return False
        if not linear and segment.steps > 1:
            return False
        if linear and self.in_memory:
            return False  # the segment behind has it
        if wanted == "keep" or segment.steps > 1 or self.in_memory:
            return True
        width = segment.aggregated.width
        by_edge = 1 if linear else ATTENTION_COST
        again = (linear * stats.num_vertices + by_edge * stats.num_edges / NOMINAL_RATES.inplace) * width
        return 2 * stats.num_vertices * segment.total_saved_width <= again

    def _place_scaled(self, graph: Graph, model: nn.Module, bounds: Sequence[int], in_place: bool) -> PlacedOffload:
        """Places a model on a small graph, of whose chunks only the first is worked on."""
        options, part = self.options, torch.zeros(graph.num_vertices, dtype=torch.int32)
        work = Workload(model, graph, self.work.optimisations)
        needed = make_dependencies(graph.in_edges, part, 0, 1, self.vertices.caching)
        cutter = Cutter(
            work,
            self.programs,
            [needed],
            self.saved_hops,
            on_cpu=options.on_cpu,
            prefetch=False,
            in_memory=self.in_memory,
            in_files=self.in_files,
            in_place=in_place,
        )
        chunks = replace(cutter.cut(0, [[bounds] * self.programs[True].num_hops]), range_size=bounds[1])
        group = Group(device=options.device if options.device and torch.cuda.is_available() else "cpu")
        return PlacedOffload(work, chunks, group, folder=options.scratch, only_first=True)

    def check_fits(self) -> None:
        options, graph = self.options, self.work.graph
        if self.in_memory and not self.work.optimisations.prefetch:
            raise InputError(
                "--disable prefetch has no effect where rows are in memory and nothing is loaded: leave it out, or "
                "give --device-memory"
            )
        free = free_bytes(options.scratch) if self.in_files else 0
        limit, hub = options.device_memory, int(graph.in_edges.degree.max()) if graph.num_vertices else 0
        if limit is not None and (least := self.memory_probe.peak_of_shape(ChunkShape(1, hub + 1, hub))) > limit:
            count = min(EXAMPLE_CHUNKS, self.max_chunks)
            some = self._peak(count)
            raise InputError(
                f"--device-memory {format_bytes(limit)}: one vertex with its {hub:,} in-edges takes "
                f"{format_bytes(least)}, and {count} chunks take {format_bytes(some)} each: give --device-memory "
                f"{int(some / MARGIN) + 1}, or a smaller --hidden"
            )
        ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", self.size))
        disk = sum(one["disk"] for one in self.state()["estimates"][:ranks_here])
        if self.in_files and disk > free:
            folder = options.scratch or tempfile.gettempdir()
            raise InputError(
                f"{folder}: vertex data takes {format_bytes(disk)} there, and {format_bytes(free)} are free: give "
                "another folder with --scratch, a smaller --hidden, or fewer --layers"
            )

    def trace(self, rank: int = 0, *, training: bool) -> Trace:
        flops = SegmentFlops(self.work, self.programs[training], self.vertices.layer_sizes(rank), training=training)
        return self._trace(self.chunks(rank), self._sizes(rank), flops, training=training)

    def _trace(
        self, chunks: RankChunks, sizes: MoveSizes, flops: SegmentFlops | None = None, *, training: bool
    ) -> Trace:
        made = Moves(chunks, sizes, training=training, flops=flops).operations()
        if training and self.size > 1:
            made.append(all_reduce("gradients", self.work.num_shared, self.work.itemsize, self.size))
        return Trace(operations=tuple(made))

    def _sizes(self, rank: int) -> MoveSizes:
        work, graph = self.work, self.work.graph
        return MoveSizes(
            size=self.size,
            itemsize=work.itemsize,
            weight=work.itemsize if work.stats.weighted else 0,
            embedded=self.vertices.embedding_exchange(rank),
            embedded_width=sum(weight.shape[1] for weight in embeddings(work.model).values()),
            fresh_share=work.stats.fresh_share,
            share=work.optimisations.share,
            edge_ids=bool(graph.relations) or graph.edge_features is not None,
        )

    @property
    def part(self) -> Tensor | None:
        return self.vertices.part

    @property
    def in_memory(self) -> bool:
        """Whether rows are in the host's memory, since nobody has limited that of a device which is the host itself."""
        options = self.options
        return options.on_cpu and options.device_memory is None and options.scratch is None

    @property
    def pinned(self) -> bool:
        """Whether rows are in pinned memory of the host, for a device that is apart."""
        return not self.options.on_cpu and self.options.scratch is None

    @property
    def in_files(self) -> bool:
        """Whether rows are in files of the host."""
        return not (self.in_memory or self.pinned)

    def estimate(self, rank: int, chunks: RankChunks) -> OffloadEstimate:
        """What a rank will take and move."""
        sizes = self._sizes(rank)
        trace = self._trace(chunks, sizes, training=True)
        made = estimate_offload(self.work.graph, self.work.model, chunks, sizes, trace, pinned=self.pinned)
        if self.in_memory:
            made = replace(made, host=made.host + made.disk + self._copied_features(chunks), disk=0)
        probe = self.memory_probe.in_place if chunks.in_place else self.memory_probe
        return replace(made, device=probe.peak(chunks.chunks))

    def _copied_features(self, chunks: RankChunks) -> int:
        """Bytes of features that a rank has besides the graph's, since there they do not stand as its rows do."""
        x = self.work.graph.x
        if x is None or (x.dtype == self.work.row_dtype and isinstance(as_slice(chunks.dependencies.rows), slice)):
            return 0
        return chunks.num_rows(0) * x.shape[1] * self.work.itemsize

    def peak_memory(self, rank: int = 0) -> MemoryUse:
        known = self._cuts().get("estimates")
        told = OffloadEstimate(**known[rank]) if known else self.estimate(rank, self.chunks(rank))
        return MemoryUse(told.device, told.host, told.disk, graph_bytes(self.work.graph))

    def place(self, group: Group, *, seed: int = 0) -> PlacedOffload:
        foreseen, vertices = self._cuts().get("estimates"), self.vertices
        placed = PlacedOffload(
            self.work,
            self.chunks(group.rank),
            group,
            seed=seed,
            folder=self.options.scratch,
            embedded_halo=make_embedded_halo(self.work, vertices.dependencies(group.rank), vertices.part, group),
            estimate=OffloadEstimate(**foreseen[group.rank]) if foreseen else None,
            receptive_field=self.receptive_field if "reach" in self.optimisations else "",
        )
        self.release()
        return placed

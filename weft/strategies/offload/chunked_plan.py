"""Plans for graphs beyond the memory of the device: rows on the host, chunk after chunk on the device.

One process searches for the chunks; the others make the same plan from its `state()`.
"""

from __future__ import annotations

import os
import tempfile
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from weft.comm import Group
from weft.cost import NOMINAL_RATES, MemoryUse, Trace, all_reduce
from weft.data import Graph
from weft.nn import SPREAD, EdgeSoftmax, ReceptiveField, Workload, embeddings
from weft.parallel.blocks.caching_costs import NOMINAL, caching_costs
from weft.parallel.blocks.embedding_rows import make_embedded_halo
from weft.parallel.blocks.vertex_blocks import VertexBlocks
from weft.parallel.blocks.vertex_layout import VertexLayout
from weft.parallel.chunks.cut.rank_chunks import ChunkShape, RankChunks
from weft.parallel.chunks.program.chunk_program import Segment
from weft.parallel.chunks.program.segment_flops import SegmentFlops
from weft.parallel.chunks.program.tracer import ProgramTracer
from weft.parallel.chunks.run.chunk_runtime import as_slice
from weft.partition import Dependencies, make_dependencies
from weft.runtime.memory.heap import release_freed_memory
from weft.storage.unnamed_files import empty_in_file, empty_in_memory, free_bytes
from weft.strategies.base import RECOMPUTING, Plan
from weft.strategies.offload.cutter import Cutter, Orders
from weft.strategies.offload.estimate import OffloadEstimate, estimate_offload, graph_bytes
from weft.strategies.offload.memory_probe import MemoryProbe
from weft.strategies.offload.moves import Moves, MoveSizes
from weft.strategies.offload.options import ChunkOptions
from weft.strategies.offload.placed import PlacedOffload
from weft.utils.dtypes import dtype_name
from weft.utils.errors import InputError
from weft.utils.units import format_bytes

EXAMPLE_CHUNKS = 64
"""Number of chunks whose memory an error names, if the limit is too small for any number."""
MARGIN = 0.95
"""Share of a limit that is filled, since chunks have needed up to 5 % more than estimated."""
ATTENTION_COST = 3
"""Cost of an attention's edge, relative to an edge of a sum."""


class ChunkedPlan(Plan):
    """Plan whose rows are on the host, exact: the device has one chunk of the graph at a time."""

    traits = SPREAD
    options: ChunkOptions

    @classmethod
    def check_rows(cls, work: Workload) -> None:
        attends = any(isinstance(op.op, EdgeSoftmax) for op in work.outline(cls.traits, training=True))
        if work.row_dtype != work.dtype and attends:
            raise InputError(
                f"--dtype {dtype_name(work.row_dtype)}: under strategy {cls.name}, attention stores sums over edges "
                "with the rows, which would be rounded too: leave it out, or give --model gcn, sage or gin"
            )

    def solve(self, state: Any) -> None:
        work = self.work
        try:
            tracer = ProgramTracer(work.graph, work.model, work.optimisations)
            self.programs = {training: tracer.program(training=training) for training in (True, False)}
        except InputError as error:
            raise InputError(f"strategy {self.name}: {error}") from error
        self.vertices = self.make_vertices()
        if (num_aggregates := self.programs[True].num_hops) != (num_in_outline := len(self.vertices.caching.costs)):
            raise InputError(
                f"strategy {self.name} finds {num_aggregates} aggregates over the edges, but the model's outline "
                f"has {num_in_outline}: make each layer that changes only rows a weft.nn.RowLayer, and use one layer "
                "for each aggregate"
            )
        saveable = (segment for segment in self.programs[True].segments if segment.aggregates and not segment.constant)
        self.saved_hops = frozenset(segment.hop for segment in saveable if self._saves_result(segment))
        like = (
            self.saved_hops,
            work.optimisations,
            self.options.device,
            self.in_memory,
            work.dtype,
            work.row_dtype,
            work.stats.num_features,
            work.stats.feature_dtype,
            work.stats.weighted,
        )
        self.memory_probe = MemoryProbe(work.graph, work.model, self._place_scaled, retains=self.in_memory, like=like)
        self._decisions: dict[str, Any] | None = state
        self._cutters: list[Cutter] = []
        self._chunks: dict[int, RankChunks] = {}

    @property
    def receptive_field(self) -> ReceptiveField | str:
        """Receptive field that training steps and evaluations share, or the reason why they read all rows."""
        return ""

    @abstractmethod
    def make_vertices(self) -> VertexBlocks:
        """Return the partition of the vertices, and the decision which sources are cached."""

    @abstractmethod
    def make_cutters(self) -> list[Cutter]:
        """Return one cutter for all ranks, whose chunks share what they load, or one for each rank."""

    @abstractmethod
    def cut_rank(self, rank: int, count: int, orders: Orders | None) -> RankChunks:
        """Return the chunks of a rank.

        Args:
            rank: The rank.
            count: Number of chunks of each aggregate.
            orders: Order of the chunks; None: the original one.
        """

    def choose_orders(self, count: int) -> Orders | None:
        """Return the fastest order of `count` chunks; None for the original one."""
        del count
        return None

    def vertex_blocks(self, partition: Tensor | None, *, ratio: float | None, max_bytes: int | None) -> VertexBlocks:
        """Return the blocks of a partition.

        Args:
            partition: Rank of every vertex, int32 [N]; None: contiguous ranges.
            ratio: Share of remote sources to cache; None: wherever it costs less.
            max_bytes: Limit of a rank's cached vertices in bytes; None: no limit.
        """
        traits = self.traits if ratio == 0 else RECOMPUTING
        operations = self.work.outline(traits, training=True)
        caching = caching_costs(self.work, operations, self.machine or NOMINAL, ratio=ratio, max_bytes=max_bytes)
        allocate = partial(empty_in_file, folder=self.options.folder) if self.in_files else empty_in_memory
        return VertexBlocks(self.work, self.size, partition, caching, traits, allocate=allocate)

    @property
    def cutters(self) -> list[Cutter]:
        """Objects that divide aggregates into chunks; they keep the dependencies of all ranks until `release`."""
        if not self._cutters:
            self._cutters = self.make_cutters()
        return self._cutters

    def make_cutter(self, needed: Sequence[Dependencies]) -> Cutter:
        """Return the object that divides the aggregates of some ranks into chunks."""
        return Cutter(
            self.work,
            self.programs,
            needed,
            self.saved_hops,
            on_cpu=self.options.on_cpu,
            prefetch=self.work.optimisations.prefetch,
            in_memory=self.in_memory,
            in_files=self.in_files,
            folder=self.options.folder,
        )

    @property
    def max_chunks(self) -> int:
        """Largest number of chunks that is tried."""
        return max(cutter.max_chunks for cutter in self.cutters)

    @property
    def min_chunks(self) -> int:
        """Smallest number of chunks that is tried."""
        return max(self.options.chunks, 1)

    def release(self) -> None:
        """Free the memory that planning needed, including the chunks that were tried."""
        self._cutters, self._chunks = [], {}
        self.vertices.release()
        release_freed_memory()  # planning takes more than the device may have

    def state(self) -> dict[str, Any]:
        decisions = self._cuts()
        if "estimates" not in decisions:  # computed late: they take longest, and ranks do not need them
            chunks = self.cut(decisions["count"], decisions["orders"])
            decisions["estimates"] = [
                asdict(self.estimate(rank, rank_chunks)) for rank, rank_chunks in enumerate(chunks)
            ]
        return decisions

    def _cuts(self) -> dict[str, Any]:
        """Return the decisions from which the chunks follow."""
        if self._decisions is None:
            count, orders = self._search()
            self._decisions = {"count": count, "orders": orders}
        return self._decisions

    def chunks(self, rank: int) -> RankChunks:
        """Return the chunks of a rank; the last result is cached."""
        if rank not in self._chunks:
            decisions = self._cuts()
            self._chunks = {rank: self.cut_rank(rank, decisions["count"], decisions["orders"])}
        return self._chunks[rank]

    def cut(self, count: int, orders: Orders | None = None) -> list[RankChunks]:
        """Return the chunks of all ranks.

        Args:
            count: Number of chunks of each aggregate.
            orders: Order of the chunks; None: the original one.
        """
        return [self.cut_rank(rank, count, orders) for rank in range(self.size)]

    def _search(self) -> tuple[int, Orders | None]:
        """Return the smallest number of chunks that fits in the device's memory, and their order.

        Raises:
            InputError: No number of chunks fits.
        """
        count, limit = self.min_chunks, self.options.device_bytes
        while limit is not None and (peak := self._peak(count)) > MARGIN * limit:
            if count >= self.max_chunks:
                raise InputError(
                    f"--device-memory {format_bytes(limit)}: a chunk takes at least {format_bytes(peak)}, with "
                    f"{count:,} chunks: give --device-memory {int(peak / MARGIN) + 1}, more --workers, or a "
                    "smaller --hidden"
                )
            # Memory shrinks at most in proportion to a chunk's size: raise the count by the excess, up to 4 times.
            count = min(self.max_chunks, max(count + 1, int(count * min(1.05 * peak / limit, 4))))
        orders = self.choose_orders(count)
        fits = limit is None or orders is None or self._peak(count, orders) <= MARGIN * limit
        return count, orders if fits else None

    def _peak(self, count: int, orders: Orders | None = None) -> int:
        """Return the peak device bytes of any chunk of any rank."""
        return self.memory_probe.peak(
            schedule for rank_chunks in self.cut(count, orders) for schedule in rank_chunks.chunks
        )

    def _saves_result(self, segment: Segment) -> bool:
        """Return whether an aggregate's results are saved for backward, or recomputed (HongTu, section 4.2).

        Only results that backward needs are considered. Saved results, and what is saved with them, are written and
        read once. To recompute them, each edge reads a row on the device, and for a sum, whose backward needs no source
        rows otherwise, each source row is loaded from the host at least once.
        """
        option, linear, stats = self.options.intermediates, segment.op.linear, self.work.stats
        if option == "recompute" or not segment.op.can_save or (linear and not segment.needs_result):
            return False
        if not linear and segment.steps > 1:
            return False
        if linear and self.in_memory:
            return False  # the next segment has it
        if option == "keep" or segment.steps > 1 or self.in_memory:
            return True
        # Columns that move between host and device (a read on the device costs 1 / NOMINAL_RATES.inplace of that):
        # saved results are written and read; to recompute them, a sum loads its sources, and each edge reads a row.
        width = segment.aggregated.width
        by_edge = 1 if linear else ATTENTION_COST
        recompute_cost = (linear * stats.num_vertices + by_edge * stats.num_edges / NOMINAL_RATES.inplace) * width
        return 2 * stats.num_vertices * segment.total_saved_width <= recompute_cost

    def _place_scaled(self, graph: Graph, model: nn.Module, bounds: Sequence[int], in_place: bool) -> PlacedOffload:
        """Place a model on a small graph, and compute only the first chunk of each aggregate."""
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
            folder=options.folder,
        )
        chunks = replace(cutter.cut(0, [[bounds] * self.programs[True].num_hops]), range_size=bounds[1])
        group = Group(device=options.device if options.device and torch.cuda.is_available() else "cpu")
        return PlacedOffload(work, chunks, group, folder=options.folder, only_first=True)

    def check_fits(self) -> None:
        options, graph = self.options, self.work.graph
        if self.in_memory and not self.work.optimisations.prefetch:
            raise InputError(
                "--disable prefetch has no effect if rows are in memory, since nothing is loaded: leave it out, or "
                "give --device-memory"
            )
        free = free_bytes(options.folder) if self.in_files else 0
        limit, hub = options.device_bytes, int(graph.in_edges.indptr.diff().max()) if graph.num_vertices else 0
        if limit is not None and (least := self.memory_probe.peak_of_shape(ChunkShape(1, hub + 1, hub))) > limit:
            count = min(EXAMPLE_CHUNKS, self.max_chunks)
            example_bytes = self._peak(count)
            raise InputError(
                f"--device-memory {format_bytes(limit)}: one vertex with its {hub:,} in-edges takes "
                f"{format_bytes(least)}, and {count} chunks take up to {format_bytes(example_bytes)} each: give "
                f"--device-memory {int(example_bytes / MARGIN) + 1}, or a smaller --hidden"
            )
        ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", self.size))
        disk = sum(estimate["disk"] for estimate in self.state()["estimates"][:ranks_here])
        if self.in_files and disk > free:
            folder = options.folder or tempfile.gettempdir()
            raise InputError(
                f"{folder}: vertex data takes {format_bytes(disk)}, but only {format_bytes(free)} are free there: give "
                "another folder with --scratch, a smaller --hidden, or fewer --layers"
            )

    def trace(self, rank: int = 0, *, training: bool) -> Trace:
        flops = SegmentFlops(
            self.work, self.programs[training], VertexLayout(self.vertices).layer_sizes(rank), training=training
        )
        return self._trace(self.chunks(rank), self._sizes(rank), flops, training=training)

    def _trace(
        self, chunks: RankChunks, sizes: MoveSizes, flops: SegmentFlops | None = None, *, training: bool
    ) -> Trace:
        operations = Moves(chunks, sizes, training=training, flops=flops).operations()
        if training and self.size > 1 and self.work.num_summed:
            operations.append(all_reduce("gradients", self.work.num_summed, self.work.dtype.itemsize, self.size))
        return Trace(operations=tuple(operations))

    def _sizes(self, rank: int) -> MoveSizes:
        work, graph = self.work, self.work.graph
        return MoveSizes(
            size=self.size,
            itemsize=work.itemsize,
            sum_itemsize=work.dtype.itemsize,
            weight=work.dtype.itemsize if work.stats.weighted else 0,
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
        """True if rows are in the host's memory, because that is the device's memory and has no limit."""
        options = self.options
        return options.on_cpu and options.device_bytes is None and options.folder is None

    @property
    def pinned(self) -> bool:
        """True if rows are in pinned host memory, because the device has its own memory."""
        return not self.options.on_cpu and self.options.folder is None

    @property
    def in_files(self) -> bool:
        """True if rows are in files of the host."""
        return not (self.in_memory or self.pinned)

    def estimate(self, rank: int, chunks: RankChunks) -> OffloadEstimate:
        """Estimate the memory of a rank, and the bytes that it moves.

        Args:
            rank: The rank.
            chunks: Chunks of the rank.
        """
        sizes = self._sizes(rank)
        trace = self._trace(chunks, sizes, training=True)
        estimate = estimate_offload(self.work.graph, self.work.model, chunks, sizes, trace, pinned=self.pinned)
        if self.in_memory:
            estimate = replace(estimate, host=estimate.host + estimate.disk + self._copied_features(chunks), disk=0)
        return replace(estimate, device=self.memory_probe.peak(chunks.chunks, in_place=chunks.in_place))

    def _copied_features(self, chunks: RankChunks) -> int:
        """Return the bytes of a rank's copy of its features; 0 if it reads them where the graph stores them."""
        x = self.work.graph.x
        if x is None or (x.dtype == self.work.row_dtype and isinstance(as_slice(chunks.dependencies.rows), slice)):
            return 0
        return chunks.num_rows(0) * x.shape[1] * self.work.itemsize

    def peak_memory(self, rank: int = 0) -> MemoryUse:
        estimates = self._cuts().get("estimates")
        estimate = OffloadEstimate(**estimates[rank]) if estimates else self.estimate(rank, self.chunks(rank))
        return MemoryUse(estimate.device, estimate.host, estimate.disk, graph_bytes(self.work.graph))

    def place(self, group: Group, *, seed: int = 0) -> PlacedOffload:
        estimates, vertices = self._cuts().get("estimates"), self.vertices
        placed = PlacedOffload(
            self.work,
            self.chunks(group.rank),
            group,
            seed=seed,
            folder=self.options.folder,
            embedded_halo=make_embedded_halo(self.work, vertices.dependencies(group.rank), vertices.part, group),
            estimate=OffloadEstimate(**estimates[group.rank]) if estimates else None,
            receptive_field=self.receptive_field,
        )
        self.release()
        return placed

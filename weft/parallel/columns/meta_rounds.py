"""Rounds without data, over which a `ColumnPass` runs on the meta device to estimate its memory."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, Future
from dataclasses import replace
from functools import cached_property, partial
from heapq import nlargest
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from weft.comm import Group
from weft.kernels import EdgeFeatures
from weft.nn import AttendEdges, ByRelation, MetaTopology, Workload
from weft.parallel.chunks.run.chunk_aggregates import layout_of
from weft.parallel.chunks.run.chunk_runtime import Runtime
from weft.parallel.chunks.run.slots import (
    BACKWARD_FIELDS,
    FORWARD_FIELDS,
    Edges,
    PlacedRound,
    SlotLayout,
    SlotTopology,
    Way,
)
from weft.parallel.columns.chunking import Chunking, CutSizes
from weft.parallel.columns.column_pass import ColumnRounds
from weft.parallel.columns.pass_sizes import PassSizes
from weft.runtime.native import id_dtype
from weft.runtime.streams import pinned_bytes
from weft.storage.unnamed_files import ArrayFile, ArrayMemory, ArrayRef, MetaArrayFile

ID_BYTES = 8
"""Bytes of the number of a row on the device."""
MAX_ROUNDS = 32
"""Number of rounds up to which an estimate runs all of them."""
NUM_LARGEST = 4
"""Number of the largest rounds in each respect that an estimate runs if there are more rounds."""
NO_ROWS = CutSizes(
    bounds=(0, 0),
    num_slots=0,
    in_place=False,
    ahead=False,
    num_bytes=0,
    loads=(0,),
    write_backs=(0,),
    edges=[0],
    loops=[0],
)
"""Sizes of a chunk without rows and edges."""


class MetaRound(PlacedRound):
    """Round whose arrays have sizes and no data.

    Args:
        number: Number of the round.
        sizes: Sizes of the pass.
        work: The model and the graph.
        whole: Topology of the graph without data.
        array_file: Stores the arrays.
    """

    def __init__(
        self,
        number: int,
        sizes: PassSizes,
        work: Workload,
        whole: MetaTopology,
        array_file: ArrayFile | ArrayMemory,
    ) -> None:
        cut, layout, stats = sizes.cut, layout_of(sizes.op), work.stats
        self.targets, self.results = slice(*cut.bounds[number : number + 2]), sizes.result_ranges[number]
        self.whole, self.array_file, self.num_slots = whole, array_file, cut.num_slots
        self.num_edges, self.in_place = cut.edges[number], cut.in_place
        self.recv_row_counts = self.send_row_counts = self.send_grad_counts = self.recv_grad_counts = (0,)
        self._topologies: dict[SlotLayout, SlotTopology] = {}
        reads_features = isinstance(sizes.op, AttendEdges) and sizes.op.has_edge_map
        self._dtype, self._num_features = work.dtype, stats.num_edge_features * reads_features

        def put(count: int, dtype: torch.dtype) -> ArrayRef:
            return array_file.put(torch.empty(count, dtype=dtype, device="meta"))

        vertex, num_edges = id_dtype(stats.num_vertices), self.num_edges + cut.loops[number]
        source, edge = work.graph.in_edges.indices.dtype, id_dtype(stats.num_edges)
        moved = {"load": cut.loads[number], "write_back": cut.write_backs[number]}
        moved |= {f"{name}_slots": count for name, count in moved.items()}
        self._sources, self._targets = put(cut.num_slots, vertex), put(self.targets.stop - self.targets.start, vertex)
        self._indices = {name: put(moved.get(name, 0), vertex) for name in (*FORWARD_FIELDS, *BACKWARD_FIELDS)}
        needs_edge_ids = bool(work.graph.relations) or stats.num_edge_features > 0
        self._edge_ids = put(self.num_edges, torch.int64) if needs_edge_ids else None
        num_positions = num_edges * (stats.num_edge_features > 0)
        weighted = stats.weighted and layout != "relations"
        self._edges = {
            layout: Edges(
                indptr=put(sizes.results[number] + 1, torch.int64),
                indices=put(num_edges, source),
                weight=put(num_edges, work.dtype) if weighted else None,
                transpose=(
                    put(cut.num_slots + 1, torch.int64),
                    put(num_edges, source),
                    put(num_edges, edge),
                    put(num_edges, work.dtype) if weighted else None,
                ),
                edge_positions=put(num_positions, torch.int64) if layout == "looped" else None,
                num_sources=cut.num_slots,
            )
        }

    def _topology(self, layout: SlotLayout, to_device: Callable[[Tensor], Tensor], way: Way) -> SlotTopology:
        topology = super()._topology(layout, to_device, way)
        if self._num_features:  # their values would decide which self-loops get means
            features = partial(torch.empty, device="meta", dtype=self._dtype)
            topology.edge_features = features(self.num_edges, self._num_features)
            topology.features_with_loops = EdgeFeatures(features(topology.adjacency.num_edges, self._num_features))
        return topology


class MetaRounds(ColumnRounds):
    """Rounds of an aggregate without data, of the same sizes as those of `ColumnRounds`.

    Of many rounds, only the largest ones run. Rounds on a device with its own memory have no rows and edges.

    Args:
        work: The model and the graph.
        chunking: Divides the aggregate into chunks.
        group: Process group of the ranks as this rank sees it, on the meta device: it sends nothing.
        sizes: Sizes of the pass.
    """

    def __init__(self, work: Workload, chunking: Chunking, group: Group, sizes: PassSizes) -> None:
        num_vertices = work.stats.num_vertices
        Runtime.__init__(
            self,
            work,
            group,
            group.device,
            dtype=work.dtype,
            folder=None,
            in_memory=sizes.in_memory,
            prefetch=sizes.cut.ahead,
        )
        self.chunking, self.num_bytes, self.sizes = chunking, sizes.cut.num_bytes, sizes
        self.num_rows, self.num_results = num_vertices, sum(sizes.results)
        self.num_own = len(range(group.rank, self.num_rows, group.size))
        self.num_local = sum(len(rows.positions) for rows in sizes.exchange.sends if rows is not None)
        self.position = self.order = None
        if isinstance(sizes.op, ByRelation):
            self.position = self.order = torch.empty(self.num_results, dtype=torch.int64, device="meta")
        whole = MetaTopology(work, num_vertices, num_vertices, work.stats.num_edges)
        rounds = [MetaRound(number, sizes, work, whole, self.array_file) for number in range(len(sizes.results))]
        if sizes.separate_memory:
            empty = MetaRound(0, replace(sizes, cut=NO_ROWS, results=(0,)), work, whole, MetaArrayFile())
            rounds = [empty] * len(rounds)
        numbers = largest_rounds(sizes)
        self._rounds = [rounds[number] for number in numbers]
        groups = [range(number, number + 1) for number in numbers]
        if sizes.in_memory:  # the sets of all chunks are on their way at once
            groups = [range(*ends) for ends in pairwise([0, *numbers[1:], len(rounds)])]
        self.exchange_plan = sizes.exchange.of_chunks(groups)

    @cached_property
    def _loader(self) -> Executor:
        return InlineExecutor()

    @property
    def topology_bytes(self) -> int:
        """Bytes that rounds in memory compute once: row numbers and scalings."""
        num_ids = self.sizes.cut.num_slots * len(self.sizes.results) + self.num_rows
        return num_ids * (ID_BYTES + self.sizes.itemsize)

    @property
    def stored_bytes(self) -> int:
        """Bytes of the rounds, and of the rows that the passes of a step have stored outside of the device."""
        rows = [rows.num_bytes for rows in self.pool.free_rows]
        return self.array_file.num_bytes + sum(map(pinned_bytes, rows) if self.sizes.separate_memory else rows)


class InlineExecutor(Executor):
    """Executor that runs each task when it is submitted, because a mode observes only the tensors of its thread."""

    def submit(self, work: Callable[..., Any], /, *arguments: Any, **options: Any) -> Future[Any]:
        done = Future[Any]()
        done.set_result(work(*arguments, **options))
        return done


def largest_rounds(sizes: PassSizes) -> list[int]:
    """Return the numbers of the rounds that an estimate runs, ascending; the peak is in one of them, or nearly.

    Args:
        sizes: Sizes of the pass.
    """
    cut, (arriving, _, leaving) = sizes.cut, zip(*sizes.schedule, strict=True)
    numbers = range(len(sizes.results))
    if len(numbers) <= MAX_ROUNDS:
        return [*numbers]
    targets = [end - first for first, end in pairwise(cut.bounds)]
    respects = targets, sizes.results, cut.edges, cut.loads, cut.write_backs, arriving, leaving
    return sorted({number for each in respects for number in nlargest(NUM_LARGEST, numbers, key=each.__getitem__)})

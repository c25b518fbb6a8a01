"""Where rounds run: their rows and edges in memory or in files, what is loaded ahead, what a pass needs besides."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import Protocol, TypeVar, cast

import torch
from torch import Tensor, nn

from weft.comm import Group
from weft.nn import Inputs, Topology, Workload, is_embedded, typed_rows
from weft.parallel.chunks.cut.rank_chunks import RankChunks
from weft.parallel.chunks.run.activations import BoundaryRows, Rows
from weft.parallel.chunks.run.slots import PlacedRound
from weft.runtime.streams import COMPUTE, LOAD, STORE, InOrder, Staging, StreamMark, streams_of
from weft.storage.host_rows import IndexedRows, MemoryRows, host_rows
from weft.storage.unnamed_files import ArrayFile, ArrayMemory, release

Item = TypeVar("Item")
Brought = TypeVar("Brought")


class RowPool:
    """Memory of the host for rows, in files of a folder, plain or pinned; what is freed is used again."""

    def __init__(
        self, dtype: torch.dtype, device: torch.device, staging: Staging, folder: Path | None, *, in_memory: bool
    ) -> None:
        self.dtype, self.device, self.staging, self.folder, self.in_memory = dtype, device, staging, folder, in_memory
        self._free: dict[tuple[int, int], list[Rows]] = defaultdict(list)

    def alloc(self, num_rows: int, width: int) -> Rows:
        """Rows [num_rows, width] of any content."""
        free = self._free[num_rows, width]
        if free:
            return free.pop()
        return host_rows(
            num_rows,
            width,
            self.dtype,
            device=self.device,
            staging=self.staging,
            folder=self.folder,
            in_memory=self.in_memory,
        )

    def free(self, *rows: Rows | None) -> None:
        """Frees rows."""
        for one in rows:
            if one is not None:
                self._free[one.num_rows, one.width].append(one)


class Runtime(ABC):
    """What aggregates are made with, round by round.

    device: of the aggregates. folder: of the files; None: that for temporary ones. in_memory: rows and rounds are in
    the device's memory, not on the host in files. prefetch: the next round is loaded while one is worked on.
    """

    def __init__(
        self,
        work: Workload,
        group: Group,
        device: torch.device,
        *,
        folder: Path | None,
        in_memory: bool,
        prefetch: bool,
    ) -> None:
        self.graph, self.optimisations, self.dtype = work.graph, work.optimisations, work.dtype
        self.group, self.meter, self.device = group, group.meter, device
        self.in_memory, self.prefetch = in_memory, prefetch
        self.streams = group.streams if device == group.device else streams_of(device)
        if in_memory:  # where nothing moves
            self.streams = InOrder(device)
        self.pool = RowPool(work.dtype, device, Staging(self.streams), folder, in_memory=in_memory)
        self.array_file = ArrayMemory() if in_memory else ArrayFile(folder)

    @abstractmethod
    def rounds(self, hop: int, *, back: bool = False) -> Sequence[PlacedRound]:
        """The rounds of an aggregate in their order, or in that of its backward pass."""

    def zeros(self, num_rows: int, width: int) -> Rows:
        """Rows [num_rows, width] of zeros."""
        rows = self.pool.alloc(num_rows, width)
        rows.clear()
        return rows

    def transfer(self, tag: str, to_device: int, to_host: int) -> None:
        """Counts bytes between host and device."""
        self.meter.transfer(tag, to_device, to_host)

    def to_device(self, tensor: Tensor) -> Tensor:
        """A tensor of the host that nobody changes, on the device, for what is computed there."""
        return self.streams.lend(self.streams.to_device(tensor), COMPUTE)

    def read(self, rows: Rows, span: slice) -> Tensor:
        """A range of rows, on the device."""
        return self.streams.lend(rows.load(span.start, span.stop).to(self.device), COMPUTE)

    def read_grads(self, rows: Rows, span: slice) -> Tensor:
        """The gradients of a range of rows, on the device."""
        grad = self.read(rows, span)
        self.transfer("gradients", grad.nbytes, 0)
        return grad

    def store(self, rows: Rows, span: slice, values: Tensor) -> None:
        """Puts a range of rows on the host."""
        with self.streams.on(STORE, self.streams.mark()), self.meter.noted("store", "rows", bytes=values.nbytes):
            rows.write(span.start, self.streams.lend(values, STORE))
        self.transfer("rows", 0, values.nbytes)

    def deposit(self, into: Rows, span: slice, grad: Tensor) -> None:
        """Adds the gradients of a range of rows to those on the host."""
        self.give(into, torch.arange(span.start, span.stop), grad.contiguous())

    def give(self, into: Rows, rows: Tensor, grads: Tensor, places: Tensor | None = None) -> None:
        """Adds gradients to those of rows on the host; see `HostRows.add`."""
        num_bytes = len(rows) * grads.shape[1] * grads.itemsize
        with self.meter.noted("store", "gradients", bytes=num_bytes):
            into.add(rows, grads, places)
        self.transfer("gradients", 0, num_bytes)

    def ahead(
        self, items: Iterable[Item], load: Callable[[Item], Brought], ready: Callable[[int], bool] | None = None
    ) -> Iterator[tuple[Item, Brought]]:
        """Each item with what is loaded for it, the next one's while the caller works on this one's.

        ready: whether what the item of a number reads is there; the next one is loaded early only if it is. A device
        that is apart loads an item's behind its work on the item before the last, for which the host waits as well, so
        that no more than two items' are there at once.
        """
        items, streams, stream = list(items), self.streams, LOAD if self.prefetch else COMPUTE

        def bring(number: int, behind: StreamMark | None) -> tuple[Brought, StreamMark | None]:
            if number:
                streams.finish(behind)
            with streams.on(stream, None if number else behind), self.meter.noted("load", "chunk", chunk=number):
                return load(items[number]), streams.mark()

        coming: Future[tuple[Brought, StreamMark | None]] | None = None
        behind = streams.mark()
        for number, item in enumerate(items):
            loaded, there = bring(number, behind) if coming is None else self._waited_for(coming)
            behind = streams.mark()
            streams.join(there)
            early = self.prefetch and number + 1 < len(items) and (ready is None or ready(number + 1))
            coming = self._loader.submit(bring, number + 1, behind) if early else None
            yield item, loaded
            del loaded  # as the caller does with what it got, before it asks for the next

    def _waited_for(self, coming: Future[Item]) -> Item:
        with self.meter.noted("compute", "wait: load"):
            return coming.result()

    @cached_property
    def _loader(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(1, thread_name_prefix="weft-loader")


class Fetcher(Protocol):
    """What brings the embedded rows that a rank computes again."""

    def fetch(self, weight: Tensor) -> Tensor:
        """The rows of all embedded vertices of the rank, from those that it keeps."""
        ...


class PlacedChunks(Runtime):
    """What a pass needs on its rank.

    model: the rank's own. embedded_halo: None where every rank has its vertices' embedded rows. folder: of the files;
    None: that for temporary ones. only_first: work on the first chunk of everything, to see what it takes.
    """

    def __init__(
        self,
        chunks: RankChunks,
        work: Workload,
        model: nn.Module,
        group: Group,
        *,
        seed: int,
        topology: Topology,
        embedded_halo: Fetcher | None,
        folder: Path | None,
        only_first: bool = False,
    ) -> None:
        super().__init__(work, group, group.device, folder=folder, in_memory=chunks.in_memory, prefetch=chunks.prefetch)
        self.model, self.seed, self.topology, self.work = model, seed, topology, work
        self.embedded_halo = embedded_halo
        needed = chunks.dependencies
        self.vertices, self.num_own = needed.rows, needed.num_own
        self.row_ids = topology.ids[needed.rows].to(group.device)
        self.stages, self._schedule_of = chunks.stages, chunks.schedule_of
        self._rows_at = [chunks.num_rows(hop) for hop in range(len(needed.hops) + 1)]
        self._spans = {num_rows: chunks.spans(num_rows) for num_rows in self._rows_at}
        self._places: dict[tuple[int, int], Tensor | slice] = {}
        self.halo = chunks.halo
        self.constant: BoundaryRows | None = None
        self.features = self._features(chunks)
        self._number = 1 if only_first else None
        self._rounds: list[list[PlacedRound]] = []
        for planned in chunks.schedules:
            hop, vertices = planned.hop, torch.cat([needed.rows[: planned.hop.num_inputs], planned.hop.fetched])
            placed = (
                PlacedRound(round_, hop, vertices, topology, planned.layouts, self.array_file)
                for round_ in planned.schedule.rounds
            )
            self._rounds.append(list(placed))

    def _features(self, chunks: RankChunks) -> MemoryRows | None:
        """The features of this rank's rows where the graph has them, if they are read there."""
        if not chunks.reads_features:
            return None
        if self.in_memory:
            return MemoryRows.of(self.work.features(as_slice(self.vertices), self.device))
        return IndexedRows(cast(Tensor, self.graph.x), self.vertices, self.dtype, self.pool.staging)

    @property
    def model_stages(self) -> range:
        """Those that draw dropout masks of their own."""
        return range(int(self.model.num_stages))  # type: ignore[arg-type]

    def rounds(self, hop: int, *, back: bool = False) -> Sequence[PlacedRound]:
        del back  # it is the same
        return self._rounds[self._schedule_of[hop]][: self._number]

    def spans(self, num_rows: int) -> Sequence[slice]:
        """Ranges of rows that are worked on one after the other."""
        return self._spans[num_rows][: self._number]

    def num_rows(self, hop: int) -> int:
        """How many rows this rank has before an aggregate, or, behind the last one, in the end."""
        return self._rows_at[min(hop, len(self._rows_at) - 1)]

    def inputs_of(self, span: slice) -> Inputs:
        """The features of a range of rows; where these are of vertices in a row, and in memory, no copy of them."""
        vertices = self.vertices[span]
        typed = typed_rows(self.graph, vertices, self.group.device, self.dtype)
        place = span.start, span.stop
        if self.in_memory and place not in self._places:  # found once for all epochs
            self._places[place] = as_slice(vertices)
        rows = self.work.features(self._places.get(place, vertices), self.group.device)
        if not self.in_memory:
            self.release()
        return Inputs(rows=rows, optimisations=self.optimisations, typed=typed)

    def release(self) -> None:
        """Gives back the pages of a graph that is mapped: what is resident is to be what the device may have."""
        graph, edges = self.graph, self.graph.in_edges
        known = (graph.x, graph.edge_features, graph.edge_type, *graph.features.values())
        for one in (*known, edges.indptr, edges.indices, edges.weight):
            if one is not None:
                release(one)

    def embedded_in(self, span: slice) -> slice:
        """Which of this rank's embedded rows belong to a range of its rows."""
        before = self._embedded_before
        return slice(int(before[span.start]), int(before[span.stop]))

    @cached_property
    def _embedded_before(self) -> Tensor:
        found = is_embedded(self.graph)[self.vertices].cumsum(0)
        return torch.cat([found.new_zeros(1), found])


def as_slice(indices: Tensor) -> Tensor | slice:
    """Indices as a slice, where each is one more than the one before."""
    start = int(indices[0]) if len(indices) else 0
    in_a_row = torch.equal(indices, torch.arange(len(indices)) + start)
    return slice(start, start + len(indices)) if in_a_row else indices

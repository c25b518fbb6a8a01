"""Rows and rounds of a rank at run time: allocation, loads, stores, prefetch, and the inputs of a model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import Protocol, TypeVar, cast

import torch
from torch import Tensor, nn

from weft.comm import Group
from weft.nn import Inputs, Topology, Workload, is_embedded, typed_rows
from weft.parallel.chunks.cut.rank_chunks import RankChunks
from weft.parallel.chunks.run.activations import Activations, StoredRows
from weft.parallel.chunks.run.slots import PlacedRound
from weft.runtime.streams import COMPUTE, LOAD, STORE, InOrder, Staging, StreamMark, streams_of
from weft.storage.host_rows import IndexedRows, MemoryRows, host_rows
from weft.storage.quantized_table import FeatureTable
from weft.storage.unnamed_files import ArrayFile, ArrayMemory, MetaArrayFile, release
from weft.utils.dtypes import sum_dtype

Item = TypeVar("Item")
LoadedItem = TypeVar("LoadedItem")


class RowPool:
    """Allocator of rows on the host; freed rows are reused by shape and type.

    Args:
        dtype: Type of the rows.
        device: Device that reads them.
        staging: Pinned buffers for copies to the device.
        folder: Folder of the files; None: the folder for temporary files.
        in_memory: Rows are in the memory of the device, not in files or pinned memory.
    """

    def __init__(
        self, dtype: torch.dtype, device: torch.device, staging: Staging, folder: Path | None, *, in_memory: bool
    ) -> None:
        self.dtype, self.device, self.staging, self.folder, self.in_memory = dtype, device, staging, folder, in_memory
        self.sum_dtype = sum_dtype(dtype)
        self._free: dict[tuple[int, int, torch.dtype], list[StoredRows]] = defaultdict(list)

    def alloc(self, num_rows: int, width: int, *, in_sum_dtype: bool = False) -> StoredRows:
        """Return rows [num_rows, width] with arbitrary content.

        Args:
            num_rows: Number of rows.
            width: Number of columns.
            in_sum_dtype: Return rows in the type of sums (float32 for bfloat16 rows).
        """
        dtype = self.sum_dtype if in_sum_dtype else self.dtype
        free = self._free[num_rows, width, dtype]
        if free:
            return free.pop()
        return host_rows(
            num_rows,
            width,
            dtype,
            device=self.device,
            staging=self.staging,
            folder=self.folder,
            in_memory=self.in_memory,
        )

    def free(self, *freed: StoredRows | None) -> None:
        """Return rows to the pool; None is ignored."""
        for rows in freed:
            if rows is not None:
                self._free[rows.num_rows, rows.width, rows.dtype].append(rows)

    @property
    def free_rows(self) -> list[StoredRows]:
        """All rows that are free."""
        return [rows for free in self._free.values() for rows in free]

    def close_free(self) -> None:
        """Give back the space of all rows that are free."""
        while self._free:
            for rows in self._free.popitem()[1]:
                rows.close()


class Runtime(ABC):
    """Rows, rounds and copies of a rank that works chunk by chunk.

    Args:
        work: The model and the graph.
        group: The ranks.
        device: Device of the aggregates.
        dtype: Type of the rows.
        folder: Folder of the files; None: the folder for temporary files.
        in_memory: Rows and rounds are in the memory of the device, not in files or pinned memory.
        prefetch: The next round is loaded while one is computed.
    """

    in_reverse = False
    """True if the backward pass runs the rounds from the last to the first."""

    def __init__(
        self,
        work: Workload,
        group: Group,
        device: torch.device,
        *,
        dtype: torch.dtype,
        folder: Path | None,
        in_memory: bool,
        prefetch: bool,
    ) -> None:
        self.graph, self.optimisations, self.dtype = work.graph, work.optimisations, dtype
        self.group, self.meter, self.device = group, group.meter, device
        self.in_memory, self.prefetch = in_memory, prefetch
        self.streams = group.streams if device == group.device else streams_of(device)
        if in_memory:  # nothing is copied
            self.streams = InOrder(device)
        self.pool = RowPool(dtype, device, Staging(self.streams), folder, in_memory=in_memory)
        self.sum_dtype = self.pool.sum_dtype
        self.array_file: ArrayFile | ArrayMemory
        if in_memory:
            self.array_file = ArrayMemory()
        else:
            self.array_file = MetaArrayFile() if device.type == "meta" else ArrayFile(folder)

    @abstractmethod
    def rounds(self, hop: int, *, back: bool = False) -> Sequence[PlacedRound]:
        """Return the rounds of an aggregate in the order in which they run.

        Args:
            hop: Number of the aggregate.
            back: Return the rounds of the backward pass.
        """

    def zeros(self, num_rows: int, width: int) -> StoredRows:
        """Return rows [num_rows, width] of zeros.

        Args:
            num_rows: Number of rows.
            width: Number of columns.
        """
        rows = self.pool.alloc(num_rows, width)
        rows.clear()
        return rows

    def transfer(self, tag: str, to_device: int, to_host: int) -> None:
        """Count bytes that are copied between host and device.

        Args:
            tag: What is copied, such as "rows".
            to_device: Bytes copied to the device.
            to_host: Bytes copied to the host.
        """
        self.meter.transfer(tag, to_device, to_host)

    def to_device(self, tensor: Tensor) -> Tensor:
        """Copy a tensor to the device for computation. Nobody may change the original during the copy."""
        return self.streams.lend(self.streams.to_device(tensor), COMPUTE)

    def read(self, rows: StoredRows, span: slice) -> Tensor:
        """Return a range of rows on the device.

        Args:
            rows: Rows on the host.
            span: Range of rows.
        """
        return self.streams.lend(rows.load(span.start, span.stop).to(self.device), COMPUTE)

    def read_grads(self, rows: StoredRows, span: slice) -> Tensor:
        """Return a range of gradient rows on the device, rounded to the type of rows, and count the copy.

        Args:
            rows: Gradient rows on the host.
            span: Range of rows.
        """
        grad = self.read(rows, span)
        self.transfer("gradients", grad.nbytes, 0)
        return grad.to(self.dtype)

    def write(self, rows: StoredRows, span: slice, values: Tensor) -> None:
        """Write a range of rows to the host.

        Args:
            rows: Destination.
            span: Range of rows.
            values: New values of the range, [n, F].
        """
        with self.streams.on(STORE, self.streams.mark()), self.meter.noted("store", "rows", bytes=values.nbytes):
            rows.write(span.start, self.streams.lend(values, STORE))
        self.transfer("rows", 0, values.nbytes)

    def accumulate(self, into: StoredRows, span: slice, grad: Tensor) -> None:
        """Add gradients to a range of rows on the host.

        Args:
            into: Destination.
            span: Range of rows.
            grad: Gradients of the range, [n, F].
        """
        self.accumulate_rows(into, torch.arange(span.start, span.stop), grad.to(into.dtype).contiguous())

    def accumulate_rows(self, into: StoredRows, rows: Tensor, grads: Tensor, positions: Tensor | None = None) -> None:
        """Add gradients to given rows on the host.

        Args:
            into: Destination.
            rows: Row numbers, int64 [c], ascending and distinct.
            grads: Gradients.
            positions: Position in `grads` of each row's gradient, int64 [c]; None: in order.
        """
        num_bytes = len(rows) * grads.shape[1] * grads.itemsize
        with self.meter.noted("store", "gradients", bytes=num_bytes):
            into.add(rows, grads, positions)
        self.transfer("gradients", 0, num_bytes)

    def load_ahead(
        self, items: Iterable[Item], load: Callable[[Item], LoadedItem], ready: Callable[[int], bool] | None = None
    ) -> Iterator[tuple[Item, LoadedItem]]:
        """Yield each item with what was loaded for it; the next item is loaded while the caller uses this one.

        On a device with its own memory, the load of an item waits for the work on the item before the last one. The
        host waits for that too, so at most two items are loaded at once.

        Args:
            items: Items in order.
            load: Loads an item.
            ready: Returns True if all data of an item, by number, is available; otherwise the item is not loaded early.
                None: always.
        """
        items, streams, stream = list(items), self.streams, LOAD if self.prefetch else COMPUTE

        def bring(number: int, mark: StreamMark | None) -> tuple[LoadedItem, StreamMark | None]:
            if number:
                streams.finish(mark)
            with streams.on(stream, None if number else mark), self.meter.noted("load", "chunk", chunk=number):
                return load(items[number]), streams.mark()

        next_load: Future[tuple[LoadedItem, StreamMark | None]] | None = None
        mark = streams.mark()
        for number, item in enumerate(items):
            loaded, loaded_mark = bring(number, mark) if next_load is None else self._waited_for(next_load)
            mark = streams.mark()
            streams.join(loaded_mark)
            early = self.prefetch and number + 1 < len(items) and (ready is None or ready(number + 1))
            next_load = self._loader.submit(bring, number + 1, mark) if early else None
            yield item, loaded
            del loaded  # frees it before the next item is loaded; the caller deletes its reference too

    def _waited_for(self, pending: Future[Item]) -> Item:
        with self.meter.noted("compute", "wait: load"):
            return pending.result()

    @cached_property
    def _loader(self) -> Executor:
        return ThreadPoolExecutor(1, thread_name_prefix="weft-loader")


class Fetcher(Protocol):
    """Fetches the rows of an embedding that other ranks own and this rank computes with."""

    def fetch(self, weight: Tensor) -> Tensor:
        """Return the rows of all embedded vertices of this rank, given the rows that it owns."""
        ...


class PlacedChunks(Runtime):
    """The chunks of a rank with its model, rows and rounds, ready to run passes.

    Args:
        chunks: The chunks of the rank.
        work: The model and the graph.
        model: The rank's copy of the model.
        group: The ranks.
        seed: Seed of dropout.
        topology: Topology of the whole graph.
        embedded_halo: Fetches embedded rows from other ranks; None if every rank owns the rows that it needs.
        folder: Folder of the files; None: the folder for temporary files.
        only_first: Run only the first chunk of every aggregate, to measure its memory.
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
        super().__init__(
            work,
            group,
            group.device,
            dtype=work.row_dtype,
            folder=folder,
            in_memory=chunks.in_memory,
            prefetch=chunks.prefetch,
        )
        self.model, self.seed, self.topology, self.work = model, seed, topology, work
        self.embedded_halo = embedded_halo
        dependencies = chunks.dependencies
        self.vertices, self.num_own = dependencies.rows, dependencies.num_own
        self.row_ids = topology.ids_of(dependencies.rows).to(group.device)
        self.stages, self._schedule_of = chunks.stages, chunks.schedule_of
        self._rows_at = [chunks.num_rows(hop) for hop in range(len(dependencies.hops) + 1)]
        self._spans = {num_rows: chunks.spans(num_rows) for num_rows in self._rows_at}
        self._feature_rows: dict[tuple[int, int], Tensor | slice] = {}
        self.halo = chunks.halo
        self.constant: Activations | None = None
        self.features = self._features(chunks)
        self.only_first, self._max_rounds = only_first, 1 if only_first else None
        self._rounds: list[list[PlacedRound]] = []
        for planned in chunks.schedules:
            hop, vertices = planned.hop, planned.hop.sources(dependencies.rows)
            placed = (
                PlacedRound(round_, hop, vertices, topology, planned.layouts, self.array_file)
                for round_ in planned.schedule.make_rounds()
            )
            self._rounds.append(list(placed))

    def _features(self, chunks: RankChunks) -> MemoryRows | None:
        """Return this rank's rows of the graph's features, if they are read where the graph stores them."""
        if not chunks.reads_features:
            return None
        if self.in_memory:
            return MemoryRows.of(self.work.features(as_slice(self.vertices), self.device))
        return IndexedRows(cast(FeatureTable, self.graph.x), self.vertices, self.dtype, self.pool.staging)

    @property
    def model_stages(self) -> range:
        """Numbers of the model stages; each has dropout masks of its own."""
        return range(int(self.model.num_stages))  # type: ignore[arg-type]

    def rounds(self, hop: int, *, back: bool = False) -> Sequence[PlacedRound]:
        del back  # the backward pass has the same order
        return self._rounds[self._schedule_of[hop]][: self._max_rounds]

    def spans(self, num_rows: int) -> Sequence[slice]:
        """Return the ranges of rows that are processed one after the other where no aggregate comes first."""
        return self._spans[num_rows][: self._max_rounds]

    def num_rows(self, hop: int) -> int:
        """Return the number of local rows before an aggregate; after the last one, of the logits."""
        return self._rows_at[min(hop, len(self._rows_at) - 1)]

    def inputs_of(self, span: slice) -> Inputs:
        """Return the features of a range of rows.

        In memory, features of consecutive vertices are not copied.
        """
        vertices = self.vertices[span]
        typed = typed_rows(self.graph, vertices, self.group.device, self.dtype)
        range_key = span.start, span.stop
        if self.in_memory and range_key not in self._feature_rows:  # computed once for all epochs
            self._feature_rows[range_key] = as_slice(vertices)
        rows = self.work.features(self._feature_rows.get(range_key, vertices), self.group.device)
        if not self.in_memory:
            self.release()
        return Inputs(rows=rows, optimisations=self.optimisations, typed=typed)

    def release(self) -> None:
        """Release the pages of a memory-mapped graph, so that they do not count as resident memory."""
        graph, edges = self.graph, self.graph.in_edges
        attributes = (graph.x, graph.edge_features, graph.edge_type, *graph.features.values())
        for array in (*attributes, edges.indptr, edges.indices, edges.weight):
            if array is not None:
                release(array)

    def embedded_in(self, span: slice) -> slice:
        """Return the range of this rank's embedded rows that belongs to a range of its rows."""
        before = self._embedded_before
        return slice(int(before[span.start]), int(before[span.stop]))

    @cached_property
    def _embedded_before(self) -> Tensor:
        num_embedded = is_embedded(self.graph)[self.vertices].cumsum(0)
        return torch.cat([num_embedded.new_zeros(1), num_embedded])


def as_slice(indices: Tensor) -> Tensor | slice:
    """Return indices as a slice if each is one more than the previous one, else unchanged."""
    start = int(indices[0]) if len(indices) else 0
    in_a_row = torch.equal(indices, torch.arange(len(indices)) + start)
    return slice(start, start + len(indices)) if in_a_row else indices

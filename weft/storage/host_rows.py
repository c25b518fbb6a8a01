"""Rows of the host: in files without a name, for a device with a limit; in memory, pinned where that is a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from weft.runtime import native
from weft.runtime.streams import Guard, InOrder, Staging, Streams, to_host
from weft.storage.unnamed_files import ScratchFile

BLOCK_BYTES = 1 << 14  # of rows that are cleared as one
ON_CPU = Staging(InOrder(torch.device("cpu")))


class HostRows:
    """Rows [n, F] on the host in a file, zero at first; what is moved takes no memory but the caller's.

    dtype: float32 or float64. folder: None for that for temporary files. staging: through which they go to a device.
    RunError where the file's folder has no room. One call at a time.
    """

    def __init__(
        self, num_rows: int, width: int, dtype: torch.dtype, folder: Path | None = None, staging: Staging = ON_CPU
    ) -> None:
        self._staging, self._streams = staging, staging.streams
        self.num_rows, self.width, self.dtype = num_rows, width, dtype
        self.num_bytes = num_rows * width * dtype.itemsize
        self._file = ScratchFile(self.num_bytes, folder)
        self._block = max(1, BLOCK_BYTES // max(1, width * dtype.itemsize))
        self._cleared = np.zeros(-(-num_rows // self._block), np.uint8)  # by block: what the file has there is void

    def read(self, first: int, end: int) -> Tensor:
        """A copy of the rows [end - first, F] from `first` on."""
        return self._read(first, end, torch.empty(end - first, self.width, dtype=self.dtype))

    def load(self, first: int, end: int) -> Tensor:
        """The same on the device."""
        with self._staging.lend(end - first, self.width, self.dtype) as found:
            return self._streams.to_device(self._read(first, end, found))

    def _read(self, first: int, end: int, out: Tensor) -> Tensor:
        assert 0 <= first <= end <= self.num_rows
        self._settle(first, end)
        return self._file.read(first * self.width * self.dtype.itemsize, out)

    def write(self, first: int, rows: Tensor) -> None:
        """Puts rows [m, F] in the place of those from `first` on."""
        assert first >= 0
        assert first + len(rows) <= self.num_rows
        assert rows.shape[1:] == (self.width,)
        end, block = first + len(rows), self._block
        self._cleared[-(-first // block) : len(self._cleared) if end == self.num_rows else end // block] = 0
        self._settle(first, end)
        self._file.write(first * self.width * self.dtype.itemsize, to_host(self._streams, rows.detach()).to(self.dtype))

    def gather(self, rows: Tensor, out: Tensor, places: Tensor | None = None) -> None:
        """`out[places[i]] = self[rows[i]]`; rows int64 [c], ascending and distinct; out [K, F] contiguous.

        places None: out[i].
        """
        self._check(rows, out)
        self._settle(0, self.num_rows)
        if self._streams.holds(out):
            with self._staging.lend(len(rows), self.width, self.dtype) as found:
                self.gather(rows, found)
                _put(found, out, places, self._streams)
            return
        with self._file.explained():
            native.gather_file_rows(self._file.handle, rows, places, out)

    def add(self, rows: Tensor, values: Tensor, places: Tensor | None = None) -> None:
        """`self[rows[i]] += values[places[i]]`; rows int64 [c], ascending and distinct; values [K, F].

        places None: values[i].
        """
        self._check(rows, values)
        if self._streams.holds(values):
            values, places = to_host(self._streams, _taken(values, places)), None
        with self._file.explained():
            native.add_file_rows(
                self._file.handle,
                rows,
                places,
                values,
                num_rows=self.num_rows,
                block_rows=self._block,
                cleared=torch.from_numpy(self._cleared),
            )

    def clear(self) -> None:
        """Makes all rows zero, without a word to the file: what is added to them is written there, and not read."""
        self._cleared.fill(1)

    def tensor(self) -> Tensor:
        """All rows [n, F] as a tensor that is mapped: it shares them, and keeps them when this object is gone."""
        if not self.num_bytes:
            return torch.empty(self.num_rows, self.width, dtype=self.dtype)
        self._settle(0, self.num_rows)
        return self._file.tensor(self.num_rows, self.width, dtype=self.dtype)

    def close(self) -> None:
        """Gives the space back, unless a tensor shares it."""
        self._file.close()

    def _settle(self, first: int, end: int) -> None:
        """Writes the zeros of blocks that were cleared, in which some of these rows are."""
        cleared = self._cleared[first // self._block : -(-end // self._block)]
        if not cleared.any():
            return
        for block in (cleared.nonzero()[0] + first // self._block).tolist():
            begin, stop = block * self._block, min((block + 1) * self._block, self.num_rows)
            zeros = torch.zeros(stop - begin, self.width, dtype=self.dtype)
            self._file.write(begin * self.width * self.dtype.itemsize, zeros)
        cleared.fill(0)

    def _check(self, rows: Tensor, table: Tensor) -> None:
        assert table.shape[1:] == (self.width,)
        assert table.dtype == self.dtype
        assert not len(rows) or int(rows[-1]) < self.num_rows


class MemoryRows:
    """The same rows in the memory of a device; staging: of the host instead, for a device that is apart from it.

    There they are pinned, and copies of them are under way while the host goes on: what is read waits for them.
    """

    def __init__(
        self, num_rows: int, width: int, dtype: torch.dtype, device: torch.device, staging: Staging = ON_CPU
    ) -> None:
        self.num_rows, self.width, self.dtype = num_rows, width, dtype
        self.num_bytes = num_rows * width * dtype.itemsize
        self._staging, self._streams = staging, staging.streams
        self._guard = Guard(self._streams)
        if self._streams.apart:
            self._rows = self._streams.pinned([num_rows, width], dtype).zero_()
        else:
            self._rows = torch.zeros(num_rows, width, dtype=dtype, device=device)

    @classmethod
    def of(cls, rows: Tensor) -> MemoryRows:
        """These rows [n, F], shared."""
        made = cls(0, rows.shape[1], rows.dtype, rows.device)
        made.num_rows, made.num_bytes, made._rows = len(rows), rows.nbytes, rows
        return made

    def read(self, first: int, end: int) -> Tensor:
        """The rows [end - first, F] from `first` on: in their own memory, not to be changed; a copy of pinned ones."""
        self._guard.host_reads()
        return self._rows[first:end].clone() if self._streams.apart else self._rows[first:end]

    def load(self, first: int, end: int) -> Tensor:
        """The same on the device."""
        with self._guard.stream_reads():
            return self._streams.to_device(self._rows[first:end]) if self._streams.apart else self._rows[first:end]

    def write(self, first: int, rows: Tensor) -> None:
        """Puts rows [m, F] in the place of those from `first` on."""
        into = self._rows[first : first + len(rows)]
        if self._streams.holds(rows):
            with self._guard.stream_writes():
                into.copy_(rows.detach(), non_blocking=True)
        else:
            self._guard.host_writes()
            into.copy_(rows.detach())

    def gather(self, rows: Tensor, out: Tensor, places: Tensor | None = None) -> None:
        """`out[places[i]] = self[rows[i]]`; rows int64 [c], ascending and distinct; out [K, F], here or on the GPU.

        places None: out[i].
        """
        if not self._streams.apart:
            rows, run = rows.to(self._rows.device), _run(places, len(rows))
            if places is None or run is not None:
                torch.index_select(self._rows, 0, rows, out=out[run])
            else:
                out.index_copy_(0, places.to(out.device), self._rows.index_select(0, rows))
            return
        self._guard.host_reads()
        with self._staging.lend(len(rows), self.width, self.dtype) as found:
            _put(torch.index_select(self._rows, 0, rows, out=found), out, places, self._streams)

    def add(self, rows: Tensor, values: Tensor, places: Tensor | None = None) -> None:
        """`self[rows[i]] += values[places[i]]`; rows int64 [c], ascending and distinct; values [K, F].

        places None: values[i].
        """
        added = to_host(self._streams, _taken(values, places))
        self._guard.host_writes()
        add_rows(self._rows, rows.to(self._rows.device), added)

    def clear(self) -> None:
        """Makes all rows zero."""
        self._guard.host_writes()
        self._rows.zero_()

    def tensor(self) -> Tensor:
        """All rows [n, F], shared."""
        self._guard.host_writes()
        return self._rows

    def close(self) -> None:
        """Gives the memory back, unless a tensor shares it."""
        self._guard.host_writes()
        self._rows = self._rows.new_empty(0, self.width)


class IndexedRows(MemoryRows):
    """Rows `table[ids]` of a table [N, F] of the host that nobody changes, for a device apart: read, never written.

    ids: int64 [n]. dtype: that in which they come.
    """

    def __init__(self, table: Tensor, ids: Tensor, dtype: torch.dtype, staging: Staging = ON_CPU) -> None:
        self.num_rows, self.width, self.dtype = len(ids), table.shape[1], dtype
        self.num_bytes = self.num_rows * self.width * dtype.itemsize
        self._table, self._ids, self._staging, self._streams = table, ids, staging, staging.streams

    def load(self, first: int, end: int) -> Tensor:
        with self._picked(self._ids[first:end]) as found:
            return self._streams.to_device(found)

    def gather(self, rows: Tensor, out: Tensor, places: Tensor | None = None) -> None:
        with self._picked(self._ids[rows]) as found:
            _put(found, out, places, self._streams)

    @contextmanager
    def _picked(self, ids: Tensor) -> Iterator[Tensor]:
        """The rows of some ids, for the present stream to copy."""
        with self._staging.lend(len(ids), self.width, self.dtype) as found:
            if found.dtype == self._table.dtype:
                torch.index_select(self._table, 0, ids, out=found)
            else:
                found.copy_(self._table.index_select(0, ids))
            yield found


def _taken(values: Tensor, places: Tensor | None) -> Tensor:
    """`values[places]`; None: all."""
    return values if places is None else values.index_select(0, places.to(values.device))


def _put(found: Tensor, out: Tensor, places: Tensor | None, streams: Streams) -> None:
    """`out[places[i]] = found[i]`, by one copy where places are a run; None: out[i]."""
    run = _run(places, len(found))
    if places is None or run is not None:
        out[run].copy_(found, non_blocking=True)
    else:
        out.index_copy_(0, places.to(out.device), streams.to_device(found) if streams.apart else found.to(out.device))


def _run(places: Tensor | None, count: int) -> slice | None:
    """So many places as a slice, if each is one more than the one before; None: the first ones."""
    if places is None or not count:
        return slice(0, count)
    first = int(places[0])
    alike = torch.equal(places.to("cpu"), torch.arange(first, first + count))
    return slice(first, first + count) if alike else None


def host_rows(
    num_rows: int,
    width: int,
    dtype: torch.dtype,
    *,
    device: torch.device,
    staging: Staging = ON_CPU,
    folder: Path | None = None,
    in_memory: bool = False,
) -> HostRows | MemoryRows:
    """Rows for a device to work on: in its memory, if they are to be; else on the host, in a file or, for a GPU without
    a folder's name, pinned.

    staging: of the device's streams, where rows are on the host.
    """
    if in_memory:
        return MemoryRows(num_rows, width, dtype, device)
    if staging.streams.apart and folder is None:
        return MemoryRows(num_rows, width, dtype, device, staging)
    return HostRows(num_rows, width, dtype, folder, staging)


def add_rows(table: Tensor, rows: Tensor, added: Tensor) -> None:
    """`table[rows] += added` on the table's device; rows int64 [c], distinct."""
    if table.device.type == "cpu":
        native.add_rows(table, rows, added.to("cpu"))
    else:
        table.index_add_(0, rows, added)

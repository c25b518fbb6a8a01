"""Rows on the host: in unnamed files if the device has a memory limit, or in memory, pinned if the device is a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from weft.runtime import native
from weft.runtime.memory.limit import memory_limit_bytes
from weft.runtime.streams import Guard, InOrder, Staging, Streams, to_host
from weft.storage.quantized_table import FeatureTable
from weft.storage.unnamed_files import ScratchFile, release

BLOCK_BYTES = 1 << 14
"""Bytes of a block of rows, which has one flag that says whether it is cleared."""
COPY_BYTES = 1 << 26
"""Bytes that `rows_in_file` copies at a time."""
FILE_SHARE = 0.25
"""A copy of features that takes more than this share of the memory is in a mapped file."""
ON_CPU = Staging(InOrder(torch.device("cpu")))


class HostRows:
    """Rows [n, F] on the host in an unnamed file, initially zero. Moving rows needs no memory but the caller's.

    Not thread-safe.

    Args:
        num_rows: Number of rows, n.
        width: Width of a row, F.
        dtype: float32, float64 or bfloat16; `add` supports the first two.
        folder: Folder of the file; None: the default folder for temporary files.
        staging: Buffers through which rows are copied to the device.

    Raises:
        RunError: If the folder has too little free space.
    """

    def __init__(
        self, num_rows: int, width: int, dtype: torch.dtype, folder: Path | None = None, staging: Staging = ON_CPU
    ) -> None:
        self._staging, self._streams = staging, staging.streams
        self.num_rows, self.width, self.dtype = num_rows, width, dtype
        self.num_bytes = num_rows * width * dtype.itemsize
        self._file = ScratchFile(self.num_bytes, folder)
        self._block = max(1, BLOCK_BYTES // max(1, width * dtype.itemsize))
        self._cleared = np.zeros(-(-num_rows // self._block), np.uint8)  # 1: the block is zero, whatever the file has

    def read(self, first: int, end: int) -> Tensor:
        """Return a copy of a range of rows, [end - first, F], on the host.

        Args:
            first: First row.
            end: Row after the last one.
        """
        return self._read(first, end, torch.empty(end - first, self.width, dtype=self.dtype))

    def load(self, first: int, end: int) -> Tensor:
        """Return a copy of a range of rows, [end - first, F], on the device.

        Args:
            first: First row.
            end: Row after the last one.
        """
        with self._staging.lend(end - first, self.width, self.dtype) as buffer:
            return self._streams.to_device(self._read(first, end, buffer))

    def _read(self, first: int, end: int, out: Tensor) -> Tensor:
        assert 0 <= first <= end <= self.num_rows
        self._write_zeros(first, end)
        return self._file.read(first * self.width * self.dtype.itemsize, out)

    def write(self, first: int, rows: Tensor) -> None:
        """Replace rows.

        Args:
            first: First row to replace.
            rows: New rows [m, F], on the host or the device.
        """
        assert first >= 0
        assert first + len(rows) <= self.num_rows
        assert rows.shape[1:] == (self.width,)
        end, block = first + len(rows), self._block
        # Blocks that are replaced completely are no longer cleared; those that are replaced in part get their zeros.
        self._cleared[-(-first // block) : len(self._cleared) if end == self.num_rows else end // block] = 0
        self._write_zeros(first, end)
        self._file.write(first * self.width * self.dtype.itemsize, to_host(self._streams, rows.detach()).to(self.dtype))

    def gather(self, rows: Tensor, out: Tensor, positions: Tensor | None = None) -> None:
        """Copy rows to a tensor: `out[positions[i]] = self[rows[i]]`.

        Args:
            rows: Rows to copy, int64 [c], ascending and distinct.
            out: Destination [K, F], contiguous, on the host or the device.
            positions: Destination of each row, int64 [c]; None: row i goes to out[i].
        """
        self._check(rows, out)
        self._write_zeros(0, self.num_rows)
        if self._streams.holds(out):
            with self._staging.lend(len(rows), self.width, self.dtype) as buffer:
                self.gather(rows, buffer)
                _put(buffer, out, positions, self._streams)
            return
        with self._file.explained():
            native.gather_file_rows(self._file.handle, rows, positions, out)

    def add(self, rows: Tensor, values: Tensor, positions: Tensor | None = None) -> None:
        """Accumulate rows: `self[rows[i]] += values[positions[i]]`.

        Args:
            rows: Rows to add to, int64 [c], ascending and distinct.
            values: Values to add, [K, F], on the host or the device.
            positions: Row of `values` for each row, int64 [c]; None: values[i].
        """
        self._check(rows, values)
        if self._streams.holds(values):
            values, positions = to_host(self._streams, _select(values, positions)), None
        with self._file.explained():
            native.add_file_rows(
                self._file.handle,
                rows,
                positions,
                values,
                num_rows=self.num_rows,
                block_rows=self._block,
                cleared=torch.from_numpy(self._cleared),
            )

    def clear(self) -> None:
        """Set all rows to zero without accessing the file; the next `add` to a block writes it without reading."""
        self._cleared.fill(1)

    def tensor(self, num_rows: int | None = None) -> Tensor:
        """Return the rows as a memory-mapped tensor [n, F] that shares them and outlives this object.

        Args:
            num_rows: Number of rows, n; further ones than this object has are zero. None: as many as it has.
        """
        num_rows = self.num_rows if num_rows is None else num_rows
        if not num_rows * self.width:
            return torch.empty(num_rows, self.width, dtype=self.dtype)
        self._write_zeros(0, self.num_rows)
        return self._file.tensor(num_rows, self.width, dtype=self.dtype)

    def close(self) -> None:
        """Free the space, unless a tensor shares it."""
        self._file.close()

    def _write_zeros(self, first: int, end: int) -> None:
        """Write the zeros of cleared blocks that contain any row of a range, so that the file is valid there."""
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
    """Rows [n, F] in memory, with the interface of HostRows, initially zero.

    For an asynchronous device (a GPU) with `staging`, the rows are pinned host memory. Copies of them run while the
    host continues; reads wait for them.

    Args:
        num_rows: Number of rows, n.
        width: Width of a row, F.
        dtype: Dtype of the rows.
        device: Device that stores the rows, unless they are pinned.
        staging: Buffers of an asynchronous device that reads the rows from the host. Default: the rows are on `device`.
    """

    def __init__(
        self, num_rows: int, width: int, dtype: torch.dtype, device: torch.device, staging: Staging = ON_CPU
    ) -> None:
        self.num_rows, self.width, self.dtype = num_rows, width, dtype
        self.num_bytes = num_rows * width * dtype.itemsize
        self._staging, self._streams = staging, staging.streams
        self._guard = Guard(self._streams)
        if self._streams.asynchronous:
            self._rows = self._streams.pinned([num_rows, width], dtype).zero_()
        else:
            self._rows = torch.zeros(num_rows, width, dtype=dtype, device=device)

    @classmethod
    def of(cls, rows: Tensor) -> MemoryRows:
        """Return rows that share a tensor [n, F]."""
        result = cls(0, rows.shape[1], rows.dtype, rows.device)
        result.num_rows, result.num_bytes, result._rows = len(rows), rows.nbytes, rows
        return result

    def read(self, first: int, end: int) -> Tensor:
        """Return a range of rows, [end - first, F]: a view that must not be changed, or a copy of pinned rows.

        Args:
            first: First row.
            end: Row after the last one.
        """
        self._guard.host_reads()
        return self._rows[first:end].clone() if self._streams.asynchronous else self._rows[first:end]

    def load(self, first: int, end: int) -> Tensor:
        """Return a range of rows, [end - first, F], on the device.

        Args:
            first: First row.
            end: Row after the last one.
        """
        with self._guard.stream_reads():
            return (
                self._streams.to_device(self._rows[first:end]) if self._streams.asynchronous else self._rows[first:end]
            )

    def write(self, first: int, rows: Tensor) -> None:
        """Replace rows.

        Args:
            first: First row to replace.
            rows: New rows [m, F], on the host or the device.
        """
        destination = self._rows[first : first + len(rows)]
        if self._streams.holds(rows):
            with self._guard.stream_writes():
                destination.copy_(rows.detach(), non_blocking=True)
        else:
            self._guard.host_writes()
            destination.copy_(rows.detach())

    def gather(self, rows: Tensor, out: Tensor, positions: Tensor | None = None) -> None:
        """Copy rows to a tensor: `out[positions[i]] = self[rows[i]]`.

        Args:
            rows: Rows to copy, int64 [c], ascending and distinct.
            out: Destination [K, F], on the host or the device.
            positions: Destination of each row, int64 [c]; None: row i goes to out[i].
        """
        if not self._streams.asynchronous:
            rows, run = rows.to(self._rows.device), _run(positions, len(rows))
            if positions is None or run is not None:
                torch.index_select(self._rows, 0, rows, out=out[run])
            else:
                out.index_copy_(0, positions.to(out.device), self._rows.index_select(0, rows))
            return
        self._guard.host_reads()
        with self._staging.lend(len(rows), self.width, self.dtype) as buffer:
            _put(torch.index_select(self._rows, 0, rows, out=buffer), out, positions, self._streams)

    def add(self, rows: Tensor, values: Tensor, positions: Tensor | None = None) -> None:
        """Accumulate rows: `self[rows[i]] += values[positions[i]]`.

        Args:
            rows: Rows to add to, int64 [c], ascending and distinct.
            values: Values to add, [K, F], on the host or the device.
            positions: Row of `values` for each row, int64 [c]; None: values[i].
        """
        added = to_host(self._streams, _select(values, positions))
        self._guard.host_writes()
        add_rows(self._rows, rows.to(self._rows.device), added)

    def clear(self) -> None:
        """Set all rows to zero."""
        self._guard.host_writes()
        self._rows.zero_()

    def tensor(self) -> Tensor:
        """Return all rows [n, F] as a tensor that shares them."""
        self._guard.host_writes()
        return self._rows

    def close(self) -> None:
        """Free the memory, unless a tensor shares it."""
        self._guard.host_writes()
        self._rows = self._rows.new_empty(0, self.width)


class MetaRows(MemoryRows):
    """Rows of a file without data, on the meta device: only copies of rows are allocated.

    Args:
        num_rows: Number of rows, n.
        width: Width of a row, F.
        dtype: Dtype of the rows.
    """

    def __init__(self, num_rows: int, width: int, dtype: torch.dtype) -> None:
        super().__init__(1, width, dtype, torch.device("meta"))
        self.num_rows, self.num_bytes = num_rows, num_rows * width * dtype.itemsize
        self._rows = self._rows.expand(num_rows, -1)

    def read(self, first: int, end: int) -> Tensor:
        return self._rows.new_empty(end - first, self.width)

    def load(self, first: int, end: int) -> Tensor:
        return self.read(first, end)

    def write(self, first: int, rows: Tensor) -> None:
        pass

    def gather(self, rows: Tensor, out: Tensor, positions: Tensor | None = None) -> None:
        pass

    def add(self, rows: Tensor, values: Tensor, positions: Tensor | None = None) -> None:
        pass

    def clear(self) -> None:
        pass


class IndexedRows(MemoryRows):
    """Read-only rows `table[ids]` of a constant host table [N, F], for an asynchronous device.

    Args:
        table: The table.
        ids: Row of the table for each row, int64 [n].
        dtype: Dtype of the rows on the device.
        staging: Buffers through which rows are copied to the device.
    """

    def __init__(self, table: FeatureTable, ids: Tensor, dtype: torch.dtype, staging: Staging = ON_CPU) -> None:
        self.num_rows, self.width, self.dtype = len(ids), table.shape[1], dtype
        self.num_bytes = self.num_rows * self.width * dtype.itemsize
        self._table, self._ids, self._staging, self._streams = table, ids, staging, staging.streams

    def load(self, first: int, end: int) -> Tensor:
        with self._picked(self._ids[first:end]) as buffer:
            return self._streams.to_device(buffer)

    def gather(self, rows: Tensor, out: Tensor, positions: Tensor | None = None) -> None:
        with self._picked(self._ids[rows]) as buffer:
            _put(buffer, out, positions, self._streams)

    @contextmanager
    def _picked(self, ids: Tensor) -> Iterator[Tensor]:
        """Yield a staging buffer with some rows of the table, which the current stream must copy inside the block."""
        with self._staging.lend(len(ids), self.width, self.dtype) as buffer:
            if isinstance(self._table, Tensor) and buffer.dtype == self._table.dtype:
                torch.index_select(self._table, 0, ids, out=buffer)
            else:
                buffer.copy_(self._table[ids])
            yield buffer


def _select(values: Tensor, positions: Tensor | None) -> Tensor:
    """Return `values[positions]`, or all values if positions is None."""
    return values if positions is None else values.index_select(0, positions.to(values.device))


def _put(rows: Tensor, out: Tensor, positions: Tensor | None, streams: Streams) -> None:
    """Set `out[positions[i]] = rows[i]`, with one copy if positions are consecutive; None: out[i] = rows[i]."""
    run = _run(positions, len(rows))
    if positions is None or run is not None:
        out[run].copy_(rows, non_blocking=True)
    else:
        out.index_copy_(
            0, positions.to(out.device), streams.to_device(rows) if streams.asynchronous else rows.to(out.device)
        )


def _run(positions: Tensor | None, count: int) -> slice | None:
    """Return `count` positions as a slice if they are consecutive, else None. Positions None means the first ones."""
    if positions is None or not count:
        return slice(0, count)
    if positions.is_meta:
        return None
    first = int(positions[0])
    consecutive = torch.equal(positions.to("cpu"), torch.arange(first, first + count))
    return slice(first, first + count) if consecutive else None


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
    """Return rows for a device with the interface of HostRows.

    They are in the device's memory if `in_memory`; else on the host: in a file, or, for a GPU without a folder, pinned.
    On the meta device, rows in a file have no data.

    Args:
        num_rows: Number of rows.
        width: Width of a row.
        dtype: Dtype of the rows.
        device: The device.
        staging: Buffers of the device's streams, for rows on the host.
        folder: Folder of the file; None: the default folder for temporary files.
        in_memory: Whether the device's memory can hold the rows.
    """
    if in_memory:
        return MemoryRows(num_rows, width, dtype, device)
    if device.type == "meta":
        return MetaRows(num_rows, width, dtype)
    if staging.streams.asynchronous and folder is None:
        return MemoryRows(num_rows, width, dtype, device, staging)
    return HostRows(num_rows, width, dtype, folder, staging)


def add_rows(table: Tensor, rows: Tensor, added: Tensor) -> None:
    """Accumulate `table[rows] += added` on the table's device.

    Args:
        table: The table [n, F].
        rows: int64 [c], distinct.
        added: Values [c, F].
    """
    if table.device.type == "cpu":
        native.add_rows(table, rows, added.to("cpu"))
    else:
        table.index_add_(0, rows, added)


def keeps_in_file(num_bytes: int) -> bool:
    """Return whether a copy of features on the CPU is in a mapped file, whose pages the system can evict."""
    return num_bytes > FILE_SHARE * memory_limit_bytes()


def rows_in_file(table: FeatureTable, ids: Tensor, dtype: torch.dtype, num_read: int | None = None) -> Tensor:
    """Return a copy of rows of a table, which may map a file, as a tensor that maps an unnamed file.

    Args:
        table: The table [N, F].
        ids: Row of the table for each row, int64 [n].
        dtype: Type of the copy.
        num_read: Number of rows to copy, the first ones, because nobody reads the others; None: all.

    Raises:
        RunError: If the folder for temporary files has too little free space.
    """
    num_read = len(ids) if num_read is None else num_read
    copied = HostRows(num_read, table.shape[1], dtype)
    block = max(1, COPY_BYTES // max(1, table.shape[1] * dtype.itemsize))
    for first in range(0, num_read, block):
        copied.write(first, table[ids[first : min(first + block, num_read)]])
        release(table)
    return copied.tensor(len(ids))

"""Sorting of more edges than fit in memory: distributed by row to buckets on disk, then sorted bucket by bucket."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import DTypeLike, NDArray
from torch import Tensor

from weft.runtime.native import coo_to_csr

BUCKET_RECORDS = 1 << 20
"""Number of records of a block, and least number of a bucket, approximately."""
NUM_BUCKETS = 256
"""Approximate number of buckets of many records: few, because a block is written to all of them in pieces."""
BUCKET_BYTES = 96 << 20
"""Approximate limit of a bucket's size."""

Records = NDArray[Any]
"""A structured array with integer fields `row` and `col`, and further fields that are moved along."""
ReportProgress = Callable[[str], None]
"""Function that is called with a line of progress."""


class RecordFile:
    """Records in an unnamed temporary file, which is deleted when it is closed.

    Args:
        folder: Folder of the file.
        name: Name that the file has while it is being opened.
        dtype: Dtype of the records.
    """

    def __init__(self, folder: Path, name: str, dtype: DTypeLike) -> None:
        self.dtype, self.num_records = np.dtype(dtype), 0
        self._file = (folder / name).open("x+b")
        (folder / name).unlink()

    def add(self, records: Records) -> None:
        """Append records."""
        records.tofile(self._file)
        self.num_records += len(records)

    def put(self, position: int, records: Records) -> None:
        """Write records at a position.

        Args:
            position: Number of the first record.
            records: The records.
        """
        self._file.seek(position * self.dtype.itemsize)
        records.tofile(self._file)

    def read(self, first: int, last: int) -> Records:
        """Return a range of records.

        Args:
            first: Position of the first record.
            last: Position after the last record.
        """
        self._file.flush()
        self._file.seek(first * self.dtype.itemsize)
        return np.fromfile(self._file, self.dtype, last - first)

    def blocks(self) -> Iterator[Records]:
        """Yield all records in order, in blocks."""
        for first in range(0, self.num_records, BUCKET_RECORDS):
            yield self.read(first, min(first + BUCKET_RECORDS, self.num_records))

    def close(self) -> None:
        """Close the file, which frees its space."""
        self._file.close()


def sorted_records(
    read: Callable[[], Iterator[Records]],
    dtype: np.dtype[Any],
    num_rows: int,
    num_cols: int,
    folder: Path,
    report: ReportProgress,
) -> Iterator[Records]:
    """Yield records sorted by (row, col, position in the input), in blocks of whole rows.

    Memory: a few times a bucket, or the records of one row if they are more, and 16 bytes per row.

    Args:
        read: Function that yields the records in blocks; called twice.
        dtype: Dtype of the records.
        num_rows: Number of rows.
        num_cols: Number of columns.
        folder: Folder for a temporary file.
        report: Called with a line of progress after each bucket.
    """
    # 1. Count the records of each row, and cut the rows into buckets of similar size.
    # 2. Write each record to its bucket; a bucket's records stay in their order.
    # 3. Read one bucket after the other and sort it by (row, col), stably.
    counts = np.zeros(num_rows, np.int64)
    for records in read():
        np.add.at(counts, records["row"], 1)  # bincount would take time by the number of rows, for each block
    largest = max(BUCKET_RECORDS, min(int(counts.sum()) // NUM_BUCKETS, BUCKET_BYTES // dtype.itemsize))
    first_rows, bounds = buckets(counts, largest)
    narrow = np.min_scalar_type(len(first_rows))  # NumPy sorts numbers of 16 bits by radix, seven times as fast
    del counts
    cursor = bounds[:-1].copy()
    with closing(RecordFile(folder, "buckets.tmp", dtype)) as file:
        for records in read():
            bucket = np.searchsorted(first_rows[1:], records["row"], side="right").astype(narrow)
            sizes = np.bincount(bucket, minlength=len(cursor))
            records = in_order(records, torch.from_numpy(bucket.argsort(kind="stable")))
            ends = np.cumsum(sizes)
            for number in np.flatnonzero(sizes).tolist():
                file.put(int(cursor[number]), records[ends[number] - sizes[number] : ends[number]])
            cursor += sizes
        for number, row in enumerate(first_rows.tolist()):
            records = file.read(int(bounds[number]), int(bounds[number + 1]))
            last = num_rows if number + 1 == len(first_rows) else int(first_rows[number + 1])
            rows, cols = (torch.from_numpy(ids.astype(np.int64)) for ids in (records["row"] - row, records["col"]))
            yield in_order(records, coo_to_csr(rows, cols, last - row, num_cols)[2])
            report(f"sorted {bounds[number + 1]:,} of {bounds[-1]:,} edges")


def in_order(records: Records, order: Tensor) -> Records:
    """Return records in another order. PyTorch moves rows of words many times as fast as NumPy structured records.

    Args:
        records: The records, [n].
        order: Position of each record to return, int32 or int64.
    """
    word = np.int32 if records.dtype.itemsize % 4 == 0 else np.uint8
    words = torch.from_numpy(
        records.view(word).reshape(len(records), records.dtype.itemsize // np.dtype(word).itemsize)
    )
    return np.asarray(words.index_select(0, order).numpy()).view(records.dtype).reshape(len(order))


def buckets(counts: NDArray[np.int64], num_records: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Cut rows into buckets of similar size.

    Args:
        counts: Number of records of each row, int64 [rows].
        num_records: Approximate number of records of a bucket.

    Returns:
        First row of each bucket, and the bounds of the buckets' records, one more than buckets.
    """
    ends = np.cumsum(counts)
    first_rows, bounds = [], [0]
    row = 0
    while row < len(counts):
        first_rows.append(row)
        row = max(row + 1, int(np.searchsorted(ends, bounds[-1] + num_records, side="right")))
        bounds.append(int(ends[row - 1]))
    return np.array(first_rows, np.int64), np.array(bounds, np.int64)

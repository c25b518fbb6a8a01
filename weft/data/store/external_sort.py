"""Sorting more edges than memory holds: by row into buckets on the disk, each sorted by itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import DTypeLike, NDArray

from weft.runtime.native import coo_to_csr

BUCKET_RECORDS = 1 << 20

Records = NDArray[Any]
"""A structured array with whole numbers `row` and `col`, and what is kept with them."""
ReportProgress = Callable[[str], None]


class RecordFile:
    """Records one after the other in a file without a name, which goes when it is closed."""

    def __init__(self, folder: Path, name: str, dtype: DTypeLike) -> None:
        self.dtype, self.num_records = np.dtype(dtype), 0
        self._file = (folder / name).open("w+b")
        (folder / name).unlink()

    def add(self, records: Records) -> None:
        """Some more at the end."""
        records.tofile(self._file)
        self.num_records += len(records)

    def put(self, place: int, records: Records) -> None:
        """Some from a place on."""
        self._file.seek(place * self.dtype.itemsize)
        records.tofile(self._file)

    def read(self, first: int, last: int) -> Records:
        """Those from one place up to another."""
        self._file.flush()
        self._file.seek(first * self.dtype.itemsize)
        return np.fromfile(self._file, self.dtype, last - first)

    def blocks(self) -> Iterator[Records]:
        """All in order."""
        for first in range(0, self.num_records, BUCKET_RECORDS):
            yield self.read(first, min(first + BUCKET_RECORDS, self.num_records))

    def close(self) -> None:
        """Gives the space back."""
        self._file.close()


def sorted_records(
    read: Callable[[], Iterator[Records]],
    dtype: np.dtype[Any],
    num_rows: int,
    num_cols: int,
    folder: Path,
    say: ReportProgress,
) -> Iterator[Records]:
    """What `read` gives, by (row, col, position), in blocks of whole rows. It is read twice.

    Memory: some times BUCKET_RECORDS records, or those of one row if they are more, and 16 bytes for each row.
    """
    counts = np.zeros(num_rows, np.int64)
    for records in read():
        counts += np.bincount(records["row"], minlength=num_rows)
    first_rows, places = buckets(counts)
    del counts
    cursor = places[:-1].copy()
    with closing(RecordFile(folder, "buckets.tmp", dtype)) as file:
        for records in read():
            bucket = np.searchsorted(first_rows[1:], records["row"], side="right")
            records, sizes = records[bucket.argsort(kind="stable")], np.bincount(bucket, minlength=len(cursor))
            ends = np.cumsum(sizes)
            for number in np.flatnonzero(sizes).tolist():
                file.put(int(cursor[number]), records[ends[number] - sizes[number] : ends[number]])
            cursor += sizes
        for number, row in enumerate(first_rows.tolist()):
            records = file.read(int(places[number]), int(places[number + 1]))
            last = num_rows if number + 1 == len(first_rows) else int(first_rows[number + 1])
            rows, cols = (torch.from_numpy(ids.astype(np.int64)) for ids in (records["row"] - row, records["col"]))
            yield records[coo_to_csr(rows, cols, last - row, num_cols)[2].numpy()]
            say(f"sorted {places[number + 1]:,} of {places[-1]:,} edges")


def buckets(counts: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Ranges of rows of about BUCKET_RECORDS records: the first row of each, and where records begin, and end."""
    ends = np.cumsum(counts)
    first_rows, places = [], [0]
    row = 0
    while row < len(counts):
        first_rows.append(row)
        row = max(row + 1, int(np.searchsorted(ends, places[-1] + BUCKET_RECORDS, side="right")))
        places.append(int(ends[row - 1]))
    return np.array(first_rows, np.int64), np.array(places, np.int64)

"""The C++ extension, with its functions for whole graphs. Importing this module loads it after PyTorch."""

from __future__ import annotations

from collections.abc import Callable

import torch  # first: the extension then shares the OpenMP runtime of its wheel
from torch import Tensor

try:
    from weft import _native
except ImportError as error:
    remedy = "reinstall weft, or build it in a checkout: pip install -e ."
    raise ImportError(f"weft's C++ extension did not load ({error}); {remedy}") from error

INTERFACE = 20
"""Version of the extension's functions, which grows with every change; csrc/module.cpp has the same number."""

if INTERFACE != _native.INTERFACE:
    raise ImportError(
        f"weft's C++ extension has another version ({_native.__file__}): rebuild it with pip install -e ."
    )

__all__ = [
    "_native",
    "add_file_rows",
    "add_rows",
    "breadth_first",
    "cache_levels",
    "coo_to_csr",
    "count_parts",
    "cut_rows",
    "fennel",
    "find_loops",
    "gather_block",
    "gather_file_rows",
    "id_dtype",
    "missing_sources",
    "plain_tensor",
    "read_bytes",
    "refine",
    "release_pages",
    "transpose",
    "write_bytes",
]

release_pages = _native.release_pages


def id_dtype(count: int) -> torch.dtype:
    """Return the dtype of ids of `count` things: int32 below 2**31, else int64."""
    return torch.int32 if count < 2**31 else torch.int64


def plain_tensor(tensor: Tensor) -> Tensor:
    """Return a tensor of a subclass, such as PyG's EdgeIndex, as a torch.Tensor; the same object if it is one.

    Subclasses that wrap another tensor have no memory of their own, which native functions read.
    """
    if type(tensor) is Tensor:
        return tensor
    unwrap = getattr(tensor, "as_tensor", None)
    return tensor.as_subclass(Tensor) if unwrap is None else unwrap()


def coo_to_csr(
    rows: Tensor, cols: Tensor, num_rows: int, num_cols: int, num_threads: int | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return edges as compressed rows, ordered by (row, column, position in the input).

    Args:
        rows: Row of each edge within [0, num_rows), int32 or int64 [E], on the CPU.
        cols: Column of each edge within [0, num_cols), with the same dtype.
        num_rows: Number of rows.
        num_cols: Number of columns.
        num_threads: Number of threads; None: PyTorch's.

    Returns:
        indptr int64 [num_rows + 1], indices [E] (columns), edge_ids [E] (positions in the input). indices and edge_ids
        are int32 if num_cols and E allow it, else int64.

    Raises:
        ValueError: rows and cols differ in shape or dtype, or the dtype is neither int32 nor int64.
    """
    if rows.shape != cols.shape or rows.dim() != 1:
        raise ValueError(f"rows {list(rows.shape)} and cols {list(cols.shape)} must both have one id per edge")
    if rows.dtype != cols.dtype or rows.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"rows ({rows.dtype}) and cols ({cols.dtype}) must both be int32 or both int64")
    indptr = torch.empty(num_rows + 1, dtype=torch.int64)
    indices = torch.empty(len(cols), dtype=id_dtype(num_cols))
    edge_ids = torch.empty(len(cols), dtype=id_dtype(len(cols)))
    threads = num_threads or torch.get_num_threads()
    _native.coo_to_csr(rows.contiguous(), cols.contiguous(), num_cols, indptr, indices, edge_ids, threads)
    return indptr, indices, edge_ids


def transpose(
    indptr: Tensor, indices: Tensor, num_cols: int, num_threads: int | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the transposed matrix. All tensors are on the CPU.

    Args:
        indptr: First entry of each row, int64 [N + 1].
        indices: Column of each entry, int32 or int64 [E].
        num_cols: Number of columns.
        num_threads: Number of threads; None: PyTorch's.

    Returns:
        indptr_t int64 [num_cols + 1]; indices_t [E], the rows of the entries, ascending in each transposed row;
        edge_ids [E], the position of each entry in `indices`.
    """
    indptr_t = torch.empty(num_cols + 1, dtype=torch.int64)
    indices_t = torch.empty(len(indices), dtype=indices.dtype)
    edge_ids = torch.empty(len(indices), dtype=id_dtype(len(indices)))
    threads = num_threads or torch.get_num_threads()
    _native.transpose(indptr.contiguous(), indices.contiguous(), indptr_t, indices_t, edge_ids, threads)
    return indptr_t, indices_t, edge_ids


def find_loops(indptr: Tensor, indices: Tensor, num_threads: int | None = None) -> Tensor:
    """Return a mask of the rows v that contain column v, bool [N]. All tensors are on the CPU.

    Args:
        indptr: First entry of each row, int64 [N + 1].
        indices: Column of each entry, ascending in each row, [E].
        num_threads: Number of threads; None: PyTorch's.
    """
    loops = torch.empty(len(indptr) - 1, dtype=torch.bool)
    _native.find_loops(indptr.contiguous(), indices.contiguous(), loops, num_threads or torch.get_num_threads())
    return loops


def breadth_first(indptr: Tensor, indices: Tensor, indptr_t: Tensor, indices_t: Tensor, starts: Tensor) -> Tensor:
    """Return all vertices in breadth-first order, int64 [N]. All tensors are on the CPU.

    The search follows edges in both directions. It starts at the first vertex of `starts`, and again at the first one
    that it has not reached.

    Args:
        indptr: First entry of each row, int64 [N + 1].
        indices: Column of each entry, int32 or int64 [E].
        indptr_t: First entry of each row of the transposed matrix, int64 [N + 1].
        indices_t: Column of each entry of the transposed matrix, [E].
        starts: All vertices, int64 [N].
    """
    order = torch.empty_like(starts)
    _native.breadth_first(
        indptr.contiguous(), indices.contiguous(), indptr_t.contiguous(), indices_t.contiguous(), starts, order
    )
    return order


def count_parts(
    indptr: Tensor, indices: Tensor, part: Tensor, num_parts: int, num_threads: int | None = None
) -> tuple[Tensor, int]:
    """Count vertices and edges of a partition. All tensors are on the CPU.

    Needs N * num_parts bytes of temporary memory.

    Args:
        indptr: First entry of each row, int64 [N + 1].
        indices: Column of each entry, int32 or int64 [E].
        part: Part of each vertex, int32 [N].
        num_parts: Number of parts.
        num_threads: Number of threads; None: PyTorch's.

    Returns:
        Vertices, in-edges and remote source vertices of each part, int64 [3, num_parts]; and the number of edges
        between parts.
    """
    counts = torch.empty(3, num_parts, dtype=torch.int64)
    threads = num_threads or torch.get_num_threads()
    return counts, _native.count_parts(indptr.contiguous(), indices.contiguous(), part.contiguous(), counts, threads)


def fennel(
    indptr: Tensor, indices: Tensor, indptr_t: Tensor, indices_t: Tensor, order: Tensor, num_parts: int, most: int
) -> Tensor:
    """Return a part for each vertex, int32 [N], by the Fennel heuristic; see csrc/partition.h.

    All tensors are on the CPU.

    Args:
        indptr: First entry of each row, int64 [N + 1].
        indices: Column of each entry, int32 or int64 [E].
        indptr_t: First entry of each row of the transposed matrix, int64 [N + 1].
        indices_t: Column of each entry of the transposed matrix, [E].
        order: All vertices in the order in which they are processed, int64 [N].
        num_parts: Number of parts.
        most: Largest number of vertices of a part.
    """
    part = torch.empty(len(order), dtype=torch.int32)
    _native.fennel(
        indptr.contiguous(),
        indices.contiguous(),
        indptr_t.contiguous(),
        indices_t.contiguous(),
        order,
        num_parts,
        most,
        part,
    )
    return part


def refine(
    indptr: Tensor,
    indices: Tensor,
    part: Tensor,
    num_parts: int,
    order: Tensor,
    *,
    vertex_slack: float,
    edge_slack: float,
    remote_slack: float,
    max_passes: int,
) -> tuple[Tensor, Tensor, int]:
    """Improve a partition by moving vertices; see csrc/partition.h. All tensors are on the CPU.

    Needs 4 * N * num_parts bytes of temporary memory.

    Args:
        indptr: First entry of each row, int64 [N + 1].
        indices: Column of each entry, ascending in each row, [E].
        part: Part of each vertex, int32 [N].
        num_parts: Number of parts.
        order: All vertices in the order in which they are processed, int64 [N].
        vertex_slack: Allowed excess of a part's vertices over the mean, as a fraction.
        edge_slack: Allowed excess of a part's in-edges over the mean, as a fraction.
        remote_slack: Allowed excess of a part's remote vertices over the mean, as a fraction.
        max_passes: Largest number of passes over all vertices.

    Returns:
        The new part of each vertex, int32 [N]; and the counts and the number of cut edges as `count_parts` returns
        them.
    """
    part, counts = part.clone(), torch.empty(3, num_parts, dtype=torch.int64)
    cut = _native.refine(
        indptr.contiguous(),
        indices.contiguous(),
        order,
        vertex_slack,
        edge_slack,
        remote_slack,
        max_passes,
        part,
        counts,
    )
    return part, counts, cut


def cache_levels(
    indptr: Tensor,
    indices: Tensor,
    part: Tensor,
    own_part: int,
    wanted: Tensor,
    costs: Tensor,
    *,
    first: int,
    ratio: float,
    max_bytes: float,
    num_threads: int | None = None,
) -> tuple[Tensor, float, bool]:
    """Return up to which layer a part recomputes each remote vertex instead of fetching it; see csrc/dependencies.h.

    Args:
        indptr: First entry of each row, int64 [N + 1].
        indices: Column of each entry, int32 or int64 [E].
        part: Part of each vertex, int32 [N].
        own_part: The part.
        wanted: Remote sources of the part, int64.
        costs: For each layer: seconds of computing a row, of an in-edge, of fetching a row; bytes of a row, of an
            in-edge; float64 [layers, 5].
        first: Lowest layer that has costs.
        ratio: Fraction of `wanted` to cache at each layer; below 0: as costs decide.
        max_bytes: Limit of the memory of all cached rows; below 0: no limit.
        num_threads: Number of threads; None: PyTorch's.

    Returns:
        The highest layer for each vertex, int8 [N], -1 for vertices that are not cached; the bytes that they need; and
        whether the limit ended the selection. All tensors are on the CPU.
    """
    levels = torch.empty(len(part), dtype=torch.int8)
    threads = num_threads or torch.get_num_threads()
    taken, limited = _native.cache_levels(
        indptr.contiguous(),
        indices.contiguous(),
        part,
        own_part,
        wanted,
        costs,
        first,
        ratio,
        max_bytes,
        levels,
        threads,
    )
    return levels, taken, limited


Allocate = Callable[[int, torch.dtype], Tensor]
"""Returns an uninitialized tensor of a length and a dtype, in memory or in a mapped file."""


def gather_block(
    indptr: Tensor,
    indices: Tensor,
    part: Tensor,
    inputs: Tensor,
    num_targets: int,
    allocate: Allocate | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the in-edges of some vertices as a block, with sources numbered by their position.

    All tensors are on the CPU.

    Args:
        indptr: First entry of each row, int64 [N + 1].
        indices: Column of each entry, int32 or int64 [E].
        part: Part of each vertex, int32 [N].
        inputs: Distinct vertices, int64; the first ones are the targets.
        num_targets: Number of targets.
        allocate: Allocates the indices. Default: in memory.

    Returns:
        indptr int64 [num_targets + 1]; indices, each a position among `inputs` followed by `fetched`, with the dtype of
        the graph; fetched int64, the sources that are not in `inputs`, ordered by part and id.
    """
    targets = inputs[:num_targets]
    block = torch.zeros(num_targets + 1, dtype=torch.int64)
    torch.cumsum(indptr[targets + 1] - indptr[targets], 0, out=block[1:])
    num_edges = int(block[-1])
    positions = allocate(num_edges, indices.dtype) if allocate else torch.empty(num_edges, dtype=indices.dtype)
    fetched = torch.empty(len(part), dtype=torch.int64)
    count = _native.gather_block(
        indptr.contiguous(), indices.contiguous(), part, inputs, num_targets, positions, fetched
    )
    return block, positions, fetched[:count].clone()


def missing_sources(indptr: Tensor, indices: Tensor, part: Tensor, inputs: Tensor, num_targets: int) -> Tensor:
    """Return the sources of some vertices that are not among given ones, int64, ordered by part and id.

    Args:
        indptr: First entry of each row, int64 [N + 1].
        indices: Column of each entry, int32 or int64 [E].
        part: Part of each vertex, int32 [N].
        inputs: Distinct vertices, int64; the first ones are the targets.
        num_targets: Number of targets.
    """
    sources = torch.empty(len(part), dtype=torch.int64)
    count = _native.gather_block(indptr.contiguous(), indices.contiguous(), part, inputs, num_targets, None, sources)
    return sources[:count].clone()


def cut_rows(
    indptr: Tensor,
    indices: Tensor,
    num_cols: int,
    *,
    per_row: int,
    per_column: int,
    per_entry: int,
    rows_are_columns: bool,
    limit: int,
) -> tuple[Tensor, int]:
    """Split the rows into contiguous ranges, each as long as its working set fits a limit. All tensors are on the CPU.

    The working set of a range is per_row for each row, plus per_column for each distinct column, plus per_entry for
    each entry. A row that does not fit is a range by itself.

    Args:
        indptr: First entry of each row, int64 [N + 1].
        indices: Column of each entry, int32 or int64 [E].
        num_cols: Number of columns.
        per_row: Bytes of a row.
        per_column: Bytes of a column.
        per_entry: Bytes of an entry.
        rows_are_columns: True if the rows of a range also count as its columns.
        limit: Bytes that a working set may have.

    Returns:
        Bounds of the ranges, int64, ascending from 0; and the bytes of the largest working set.
    """
    bounds = torch.empty(len(indptr), dtype=torch.int64)
    count, most = _native.cut_rows(
        indptr.contiguous(),
        indices.contiguous(),
        num_cols,
        per_row,
        per_column,
        per_entry,
        rows_are_columns,
        limit,
        bounds,
    )
    return bounds[:count].clone(), most


def add_rows(target: Tensor, rows: Tensor, added: Tensor) -> None:
    """Compute `target[rows] += added` in place, without a temporary copy. All tensors are on the CPU.

    Args:
        target: Rows to change, [N, F].
        rows: Distinct row ids, int64 [c].
        added: Rows to add, [c, F].
    """
    _native.add_rows(rows.contiguous(), added.contiguous(), target, torch.get_num_threads())


def gather_file_rows(
    file: int, rows: Tensor, out_rows: Tensor | None, out: Tensor, num_threads: int | None = None
) -> None:
    """Read rows of a file: `out[out_rows[i]] = file[rows[i]]`. All tensors are on the CPU.

    Args:
        file: File descriptor.
        rows: Row ids in the file, ascending and distinct, int64 [c].
        out_rows: Row ids in `out`, int64 [c]; None: `out[i]`.
        out: Contiguous rows to write, [K, F] of any dtype.
        num_threads: Number of threads; None: PyTorch's.

    Raises:
        OSError: The file cannot be read.
    """
    threads = num_threads or torch.get_num_threads()
    _native.gather_file_rows(file, rows.contiguous(), _or_range(rows, out_rows), out.view(torch.uint8), threads)


def add_file_rows(
    file: int,
    rows: Tensor,
    value_rows: Tensor | None,
    values: Tensor,
    *,
    num_rows: int,
    block_rows: int,
    cleared: Tensor,
    num_threads: int | None = None,
) -> None:
    """Add rows in a file: `file[rows[i]] += values[value_rows[i]]`. All tensors are on the CPU.

    Nobody else may write to the file in the meantime.

    Args:
        file: File descriptor.
        rows: Row ids in the file, ascending and distinct, int64 [c].
        value_rows: Row ids in `values`, int64 [c]; None: `values[i]`.
        values: Rows to add, [K, F].
        num_rows: Number of rows of the file.
        block_rows: Number of rows of a block.
        cleared: Mask of blocks whose rows count as zero, whatever the file contains, uint8 by block. Blocks to which
            rows are added are set to 0.
        num_threads: Number of threads; None: PyTorch's.

    Raises:
        OSError: The file cannot be read or written.
    """
    threads = num_threads or torch.get_num_threads()
    tensors = rows.contiguous(), _or_range(rows, value_rows), values.contiguous()
    _native.add_file_rows(file, *tensors, num_rows, block_rows, cleared, threads)


def _or_range(rows: Tensor, row_ids: Tensor | None) -> Tensor:
    """Return the row ids contiguous, or 0, 1, ... if there are none."""
    return torch.arange(len(rows)) if row_ids is None else row_ids.contiguous()


def read_bytes(file: int, offset: int, out: Tensor, num_threads: int | None = None) -> None:
    """Fill a tensor with bytes of a file.

    Args:
        file: File descriptor.
        offset: First byte in the file.
        out: Contiguous tensor on the CPU.
        num_threads: Number of threads; None: PyTorch's.

    Raises:
        OSError: The file cannot be read, or is too short.
    """
    _native.read_bytes(file, offset, out.view(-1).view(torch.uint8), num_threads or torch.get_num_threads())


def write_bytes(file: int, offset: int, tensor: Tensor) -> None:
    """Write a tensor to a file.

    Args:
        file: File descriptor.
        offset: First byte in the file.
        tensor: Tensor on the CPU.

    Raises:
        OSError: The file cannot be written.
    """
    _native.write_bytes(file, offset, tensor.contiguous().view(-1).view(torch.uint8))

"""The C++ extension, loaded once and the right way round, and what works on whole graphs above it."""

from __future__ import annotations

import torch  # first: its wheel carries the OpenMP runtime that the extension then shares
from torch import Tensor

try:
    from weft import _native
except ImportError as error:
    remedy = "install weft again, or, in a checkout, build it: pip install -e ."
    raise ImportError(f"weft's C++ extension did not load ({error}); {remedy}") from error

INTERFACE = 14  # grows with every change to what _native offers; csrc/module.cpp has the same line

if INTERFACE != _native.INTERFACE:
    raise ImportError(f"weft's C++ extension is of another version ({_native.__file__}); rebuild: pip install -e .")

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
    "read_bytes",
    "refine",
    "release_pages",
    "transpose",
    "write_bytes",
]

release_pages = _native.release_pages


def id_dtype(count: int) -> torch.dtype:
    """The narrowest integer that numbers `count` things: int32 below 2**31, else int64."""
    return torch.int32 if count < 2**31 else torch.int64


def coo_to_csr(
    rows: Tensor, cols: Tensor, num_rows: int, num_cols: int, num_threads: int | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Edges as compressed rows, ordered by (row, column, position in the input).

    Args:
        rows, cols: int32 or int64 [E], on the CPU, within [0, num_rows) and [0, num_cols).

    Returns:
        indptr int64 [num_rows + 1], indices [E] (columns), edge_ids [E] (positions in the input); the last two are
        int32 where num_cols and E allow it, else int64.
    """
    if rows.shape != cols.shape or rows.dim() != 1:
        raise ValueError(f"rows {list(rows.shape)} and cols {list(cols.shape)} must be one id per edge each")
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
    """The transposed matrix: indptr_t int64 [num_cols + 1], indices_t [E] (rows, ascending in each transposed row) and
    edge_ids [E], the position of each entry in `indices`. Tensors on the CPU."""
    indptr_t = torch.empty(num_cols + 1, dtype=torch.int64)
    indices_t = torch.empty(len(indices), dtype=indices.dtype)
    edge_ids = torch.empty(len(indices), dtype=id_dtype(len(indices)))
    threads = num_threads or torch.get_num_threads()
    _native.transpose(indptr.contiguous(), indices.contiguous(), indptr_t, indices_t, edge_ids, threads)
    return indptr_t, indices_t, edge_ids


def find_loops(indptr: Tensor, indices: Tensor, num_threads: int | None = None) -> Tensor:
    """Whether row v holds column v, bool [num_rows]; columns ascend in each row. Tensors on the CPU."""
    found = torch.empty(len(indptr) - 1, dtype=torch.bool)
    _native.find_loops(indptr.contiguous(), indices.contiguous(), found, num_threads or torch.get_num_threads())
    return found


def breadth_first(indptr: Tensor, indices: Tensor, indptr_t: Tensor, indices_t: Tensor, starts: Tensor) -> Tensor:
    """All N vertices in the order in which a breadth-first search meets them, int64 [N]. Tensors on the CPU.

    Edges lead both ways: rows are in-neighbours, transposed rows out-neighbours. `starts` int64 [N] holds every vertex;
    the search begins at the first of them, and again at the first that it has not met.
    """
    order = torch.empty_like(starts)
    _native.breadth_first(
        indptr.contiguous(), indices.contiguous(), indptr_t.contiguous(), indices_t.contiguous(), starts, order
    )
    return order


def count_parts(
    indptr: Tensor, indices: Tensor, part: Tensor, num_parts: int, num_threads: int | None = None
) -> tuple[Tensor, int]:
    """Per part its vertices, in-edges and remote vertices, int64 [3, num_parts]; and the edges between parts.

    part: int32 [N], within [0, num_parts). Takes N * num_parts bytes meanwhile. Tensors on the CPU.
    """
    counts = torch.empty(3, num_parts, dtype=torch.int64)
    threads = num_threads or torch.get_num_threads()
    return counts, _native.count_parts(indptr.contiguous(), indices.contiguous(), part.contiguous(), counts, threads)


def fennel(
    indptr: Tensor, indices: Tensor, indptr_t: Tensor, indices_t: Tensor, order: Tensor, num_parts: int, most: int
) -> Tensor:
    """The part of every vertex, int32 [N], none with more than `most`; see csrc/partition.h. Tensors on the CPU.

    Rows are in-neighbours, transposed rows out-neighbours. `order` int64 [N] holds every vertex.
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
    """Better parts, int32 [N], from those given, with the counts and the cut as `count_parts` gives them.

    Slacks are fractions of the mean over the parts; see csrc/partition.h. `order` int64 [N] holds every vertex. Columns
    ascend in each row. Takes 4 * N * num_parts bytes meanwhile. Tensors on the CPU.
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
    own: int,
    wanted: Tensor,
    costs: Tensor,
    *,
    first: int,
    ratio: float,
    max_bytes: float,
    num_threads: int | None = None,
) -> tuple[Tensor, float, bool]:
    """Up to which level part `own` computes each vertex again, int8 [N], -1 for none; see csrc/dependencies.h.

    Args:
        part: int32 [N]. wanted: int64, the part's remote sources.
        costs: float64 [levels, 5], seconds of a row, of an in-edge, of a fetched row; bytes of a row, of an in-edge.
        first: the lowest level that costs anything. ratio: of `wanted` at each level; below 0: by cost.
        max_bytes: of all that is cached; below 0: no limit.

    Returns:
        the levels, the bytes that they take, and whether the limit ended the choice. Tensors on the CPU.
    """
    levels = torch.empty(len(part), dtype=torch.int8)
    threads = num_threads or torch.get_num_threads()
    taken, limited = _native.cache_levels(
        indptr.contiguous(), indices.contiguous(), part, own, wanted, costs, first, ratio, max_bytes, levels, threads
    )
    return levels, taken, limited


def gather_block(
    indptr: Tensor, indices: Tensor, part: Tensor, inputs: Tensor, num_targets: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The in-edges of the first `num_targets` of `inputs` (int64, distinct), with sources by position.

    Returns:
        indptr int64 [num_targets + 1]; indices as the graph's, each a position among inputs and then fetched; fetched
        int64, the sources that are no inputs, by part and id. Tensors on the CPU.
    """
    targets = inputs[:num_targets]
    block = torch.zeros(num_targets + 1, dtype=torch.int64)
    torch.cumsum(indptr[targets + 1] - indptr[targets], 0, out=block[1:])
    positions = torch.empty(int(block[-1]), dtype=indices.dtype)
    fetched = torch.empty(len(part), dtype=torch.int64)
    count = _native.gather_block(
        indptr.contiguous(), indices.contiguous(), part, inputs, num_targets, positions, fetched
    )
    return block, positions, fetched[:count].clone()


def cut_rows(
    indptr: Tensor,
    indices: Tensor,
    num_cols: int,
    *,
    per_row: int,
    per_column: int,
    per_entry: int,
    own: bool,
    limit: int,
) -> tuple[Tensor, int]:
    """Bounds of contiguous ranges of rows, each as long as its working set fits `limit` bytes, and the largest set.

    A range takes so many bytes per row, per distinct column and per entry; own: the rows are columns too.
    A row that does not fit is a range by itself. Bounds are int64, ascending from 0. Tensors on the CPU.
    """
    bounds = torch.empty(len(indptr), dtype=torch.int64)
    count, most = _native.cut_rows(
        indptr.contiguous(), indices.contiguous(), num_cols, per_row, per_column, per_entry, own, limit, bounds
    )
    return bounds[:count].clone(), most


def add_rows(target: Tensor, rows: Tensor, added: Tensor) -> None:
    """`target[rows] += added` in place, without a copy: rows int64 [c], distinct; added [c, F]. Tensors on the CPU."""
    _native.add_rows(rows.contiguous(), added.contiguous(), target, torch.get_num_threads())


def gather_file_rows(
    file: int, rows: Tensor, places: Tensor | None, out: Tensor, num_threads: int | None = None
) -> None:
    """`out[places[i]] =` a file's `rows[i]`: int64, ascending and distinct; out [K, F]; places None: i itself.

    OSError. Tensors on the CPU.
    """
    threads = num_threads or torch.get_num_threads()
    _native.gather_file_rows(file, rows.contiguous(), _places(rows, places), out, threads)


def add_file_rows(
    file: int,
    rows: Tensor,
    places: Tensor | None,
    values: Tensor,
    *,
    num_rows: int,
    block_rows: int,
    cleared: Tensor,
    num_threads: int | None = None,
) -> None:
    """A file's `rows[i] += values[places[i]]`: int64, ascending and distinct; values [K, F]; places None: i itself.

    The file has `num_rows` rows in blocks of `block_rows`; those of a block that is cleared (uint8 by block) are zero,
    whatever the file has there. What was added to is cleared no more. OSError. Nobody else may write to the file
    meanwhile. Tensors on the CPU.
    """
    threads = num_threads or torch.get_num_threads()
    known = rows.contiguous(), _places(rows, places), values.contiguous()
    _native.add_file_rows(file, *known, num_rows, block_rows, cleared, threads)


def _places(rows: Tensor, places: Tensor | None) -> Tensor:
    return torch.arange(len(rows)) if places is None else places.contiguous()


def read_bytes(file: int, offset: int, out: Tensor, num_threads: int | None = None) -> None:
    """Fills a contiguous tensor on the CPU from a byte of a file on. OSError, and where the file ends before."""
    _native.read_bytes(file, offset, out.view(-1).view(torch.uint8), num_threads or torch.get_num_threads())


def write_bytes(file: int, offset: int, tensor: Tensor) -> None:
    """Writes a tensor on the CPU from a byte of a file on. OSError."""
    _native.write_bytes(file, offset, tensor.contiguous().view(-1).view(torch.uint8))

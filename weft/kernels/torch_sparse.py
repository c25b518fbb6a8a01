"""Sums over in-edges as PyTorch's sparse matrix products, an alternative to the Triton kernels on a GPU.

`weft probe` measures which of the two is faster (`weft.runtime.kernel_selection`). Without Triton, these sums are the
only kernels on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from weft.data.adjacency import Adjacency
from weft.data.degrees import CompressedRows
from weft.kernels.backend import Scale


def spmm(adj: Adjacency, x: Tensor, scale: Scale, weighted: bool, in_sum_dtype: bool = False) -> Tensor:
    del in_sum_dtype  # rows already have the dtype of sums: `ops` does not call this with bfloat16
    x = x.contiguous()
    y = _scaled_product(adj, adj.weight if weighted else None, x, scale.source, scale.target)
    if scale.loop is not None:
        y += x[: adj.num_targets] * scale.loop[:, None]
    return y


def spmm_transposed(
    adj: Adjacency, grad_y: Tensor, scale: Scale, weighted: bool, into: Tensor | None = None, in_sum_dtype: bool = False
) -> Tensor:
    del in_sum_dtype
    edges, grad_y = adj.transpose, grad_y.contiguous()
    grad_x = _scaled_product(edges, edges.weight if weighted else None, grad_y, scale.target, scale.source)
    if scale.loop is not None:
        grad_x[: adj.num_targets] += grad_y * scale.loop[:, None]
    return grad_x if into is None else into.add_(grad_x)


def _scaled_product(
    rows: CompressedRows, weight: Tensor | None, x: Tensor, before: Tensor | None, after: Tensor | None
) -> Tensor:
    """Return `after * (A (before * x))`, where A is the sparse matrix of the rows with these weights."""
    matrix, x = _cached_matrix(rows, weight, x), x if before is None else x * before[:, None]
    with _deterministic():
        y = torch.bmm(matrix, x[None])[0].contiguous()  # some versions return column-major results on a GPU
    return y if after is None else y.mul_(after[:, None])


def _cached_matrix(rows: CompressedRows, weight: Tensor | None, x: Tensor) -> Tensor:
    """Return the sparse matrix of constant weights, or of ones, [1, rows, columns], from a cache by dtype.

    The format is coordinate (row, column): PyTorch guarantees reproducible products on a GPU for this format only.
    """
    key = weight is not None, x.dtype
    if key not in rows.matrices:
        values = x.new_ones(len(rows.indices)) if weight is None else weight
        coordinates = torch.stack([torch.zeros_like(rows.indices), rows.entry_rows, rows.indices]).long()
        size = (1, len(rows.indptr) - 1, len(x))
        # Without the context manager, some versions of PyTorch warn that they do not check the matrix.
        with torch.sparse.check_sparse_tensor_invariants(enable=False):
            rows.matrices[key] = torch.sparse_coo_tensor(coordinates, values, size, is_coalesced=True)
    return rows.matrices[key]


@contextmanager
def _deterministic() -> Iterator[None]:
    """Make PyTorch use COO_ALG2 of cuSPARSE in the `with` block.

    NVIDIA guarantees reproducible results for COO_ALG2, but not for CSR_ALG2.
    """
    before = torch.get_deterministic_debug_mode()
    torch.set_deterministic_debug_mode("warn")
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(before)

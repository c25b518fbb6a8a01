"""Sums over in-edges as PyTorch's sparse matrix products, an alternative to the Triton kernels on a GPU.

`weft probe` measures which of the two is faster (see `weft.runtime.kernel_selection`). Without Triton, a GPU has no other kernels.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from weft.data.adjacency import Adjacency
from weft.data.degrees import CompressedRows
from weft.kernels.backend import Scale


def spmm(adj: Adjacency, x: Tensor, scale: Scale, weighted: bool, wide: bool = False) -> Tensor:
    del wide  # rows have the type of the sums: `ops` sends no bfloat16 here
    x = x.contiguous()
    y = _scaled_product(adj, adj.weight if weighted else None, x, scale.source, scale.target)
    if scale.loop is not None:
        y += x[: adj.num_targets] * scale.loop[:, None]
    return y


def spmm_transposed(
    adj: Adjacency, grad_y: Tensor, scale: Scale, weighted: bool, into: Tensor | None = None, wide: bool = False
) -> Tensor:
    del wide
    edges, grad_y = adj.transpose, grad_y.contiguous()
    grad_x = _scaled_product(edges, edges.weight if weighted else None, grad_y, scale.target, scale.source)
    if scale.loop is not None:
        grad_x[: adj.num_targets] += grad_y * scale.loop[:, None]
    return grad_x if into is None else into.add_(grad_x)


def _scaled_product(
    rows: CompressedRows, weight: Tensor | None, x: Tensor, before: Tensor | None, after: Tensor | None
) -> Tensor:
    matrix, x = _kept_matrix(rows, weight, x), x if before is None else x * before[:, None]
    with _same_bits():
        y = torch.bmm(matrix, x[None])[0].contiguous()  # some versions give columns on a GPU
    return y if after is None else y.mul_(after[:, None])


def _kept_matrix(rows: CompressedRows, weight: Tensor | None, x: Tensor) -> Tensor:
    """The matrix [1, rows, columns] of constant weights, or of ones, made once for rows and type.

    By coordinates, since these are what PyTorch promises the same bits of on a GPU.
    """
    key = weight is not None, x.dtype
    if key not in rows.matrices:
        values = x.new_ones(len(rows.indices)) if weight is None else weight
        places = torch.stack([torch.zeros_like(rows.indices), rows.entry_rows, rows.indices]).long()
        size = (1, len(rows.indptr) - 1, len(x))
        rows.matrices[key] = torch.sparse_coo_tensor(places, values, size, check_invariants=False, is_coalesced=True)
    return rows.matrices[key]


@contextmanager
def _same_bits() -> Iterator[None]:
    """Has cuSPARSE asked for COO_ALG2, of which NVIDIA promises the same bits in each run; of CSR_ALG2 it does not."""
    before = torch.get_deterministic_debug_mode()
    torch.set_deterministic_debug_mode("warn")
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(before)

"""Sums of rows that are aligned to cache lines have the same bits as sums of contiguous rows."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.lib.kernel_cases import graph, randn
from weft.kernels import Scale, cpu, spmm, spmm_transposed
from weft.runtime.memory.alignment import LINE_BYTES, empty_aligned, is_aligned, readable_width, row_stride

DTYPES = [torch.float32, torch.float64, torch.bfloat16]


@pytest.mark.parametrize(
    ("width", "itemsize", "stride"),
    [
        (47, 4, 48),
        (44, 4, 48),
        (41, 4, 48),
        (63, 4, 64),
        (172, 4, 176),
        (40, 4, 40),  # Every row spans three cache lines, aligned or not.
        (64, 4, 64),
        (15, 4, 15),  # A row is shorter than a cache line.
        (15, 8, 16),
        (47, 2, 47),
        (1, 4, 1),
        (0, 4, 0),
    ],
)
def test_rows_are_padded_if_half_a_cache_line_is_saved(width, itemsize, stride):
    assert row_stride(width, itemsize) == stride


def test_padding_is_zero_and_readable(monkeypatch):
    monkeypatch.undo()  # Without the poison of new tensors, padding is zero.
    x = empty_aligned(torch.ones(1), 9, 47)
    assert x.shape == (9, 47)
    assert is_aligned(x)
    assert readable_width(x) == 48
    assert x.as_strided((9, 1), (48, 1), 47).count_nonzero() == 0


def with_padding(x: Tensor, before: int, stride: int, *, cut: bool) -> Tensor:
    """Return a copy of rows with padding between them, which is NaN and must not be read.

    Args:
        x: The rows.
        before: Number of elements before the first row.
        stride: Number of elements from one row to the next.
        cut: True if the storage ends with the last row, without padding after it.
    """
    end = before + len(x) * stride - (stride - x.shape[1]) * cut
    numbers = torch.full((end + LINE_BYTES,), torch.nan, dtype=x.dtype)
    skipped = -numbers.data_ptr() % LINE_BYTES // x.itemsize
    numbers = numbers[skipped : skipped + end]
    exact = numbers.untyped_storage()[: (skipped + end) * x.itemsize] if cut else numbers.untyped_storage()
    numbers = torch.empty(0, dtype=x.dtype).set_(exact, skipped, (end,))
    return numbers.as_strided(x.shape, (stride, 1), skipped + before).copy_(x)


@pytest.mark.parametrize("isa", cpu._native.supported_isas())
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("cut", [False, True])
def test_bits_do_not_depend_on_the_layout_of_rows(isa, dtype, cut):
    best = cpu._native.current_isa()
    cpu._native.set_isa(isa)
    torch.set_num_threads(2)  # Both threads share the columns of the hub.
    adj = graph(50, 50, 9000, hub=True).cast(torch.float64 if dtype == torch.float64 else torch.float32)
    line = LINE_BYTES // dtype.itemsize
    try:
        for width in [1, 7, 15, 17, 28, 31, 33, 44, 47, 63, 64, 100, 172, 300]:
            whole = -(-width // line) * line
            scale = Scale(loop=torch.rand(50).to(adj.weight), target=torch.rand(50).to(adj.weight))
            x, added = randn(50, width, seed=1, dtype=dtype), randn(50, width, seed=2, dtype=dtype)
            expected = spmm(adj, x, scale=scale, weighted=True)
            back = spmm_transposed(adj, x, scale=scale, into=added.clone())
            for before, stride in [(0, whole), (line, whole + 2 * line), (3, width + 5)]:
                padded = with_padding(x, before, stride, cut=cut)
                assert readable_width(padded) == (
                    whole if before % line == 0 and stride == whole and not cut else width
                )
                assert torch.equal(spmm(adj, padded, scale=scale, weighted=True), expected)
                assert torch.equal(spmm_transposed(adj, padded, scale=scale, into=added.clone()), back)
    finally:
        cpu._native.set_isa(best)


def test_aligned_rows_are_not_copied(monkeypatch):
    copied = []
    monkeypatch.setattr(cpu, "empty_aligned", lambda *arguments: copied.append(arguments) or empty_aligned(*arguments))
    adj, both = graph(20, 20, 90), torch.ones(20, 128)
    x = empty_aligned(both, 20, 47).fill_(1)
    assert not x.is_contiguous()
    spmm(adj, x)
    assert not copied
    spmm(adj, both[:, 64:])  # The stride is larger than necessary.
    assert len(copied) == 1


def test_no_rows_of_any_strides():
    adj = replace(graph(4, 4, 0), indptr=torch.zeros(1, dtype=torch.int64))
    none = torch.ones(4, 5)[:0].as_strided((0, 5), (0, 0))
    assert spmm_transposed(adj, none).shape == (4, 5)


def test_an_expanded_row():
    x = randn(1, 47, seed=1).expand(20, -1)
    adj = graph(20, 20, 90)
    assert torch.equal(spmm(adj, x), spmm(adj, x.contiguous()))

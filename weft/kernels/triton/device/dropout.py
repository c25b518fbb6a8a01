"""Dropout whose mask depends only on (key, vertex, column), for rows or for their ReLU."""

import triton
import triton.language as tl

from weft.kernels.triton.device.common import hashed, key_at, word_of


@triton.jit(do_not_specialize=["num_rows", "key", "threshold", "first_column"])
def keyed_dropout(
    x,
    rows,
    y,
    num_rows,
    width,
    num_blocks,
    key,
    threshold: tl.uint32,
    first_column: tl.uint32,
    scale: tl.float64,
    RELU: tl.constexpr,
    ACC: tl.constexpr,
    OFFSET: tl.constexpr,
    B: tl.constexpr,
    C: tl.constexpr,
):
    """Compute `y_rc = x_rc * scale` where the hash of (key, rows[r], first_column + c) reaches the threshold, else 0.

    Args:
        x: Rows, [n, F].
        rows: Global vertex id of each row, int64 [n].
        y: Result, [n, F].
        num_rows: Number of rows.
        width: Number of columns.
        num_blocks: Number of blocks of columns.
        key: Address of the random key of 64 bits.
        threshold: Elements whose 32 random bits are below it are dropped.
        first_column: Global number of the first column.
        scale: Factor of elements that are not dropped.
        RELU: True for dropout of max(x, 0).
        ACC: Dtype of sums.
        OFFSET: Integer type of offsets into tensors.
        B: Rows of a program.
        C: Columns of a program.
    """
    row = tl.program_id(0) // num_blocks * B + tl.arange(0, B)
    column = tl.program_id(0) % num_blocks * C + tl.arange(0, C)
    exists = row < num_rows
    word = word_of(key_at(key), tl.load(rows + row, mask=exists, other=0))
    column_number = tl.full((), first_column, tl.uint32) + column.to(tl.uint32)
    element = row.to(OFFSET)[:, None] * width + column[None, :]
    mask = exists[:, None] & (column < width)[None, :]
    value = tl.load(x + element, mask=mask, other=0.0).to(ACC) * tl.full((), scale, ACC)
    if RELU:
        value = tl.where(value < 0, 0.0, value)
    value = tl.where(hashed(word[:, None], column_number[None, :]) >= tl.full((), threshold, tl.uint32), value, 0.0)
    tl.store(y + element, value.to(y.dtype.element_ty), mask=mask)


@triton.jit
def relu_dropout_backward(
    y, grad_y, grad_x, size, scale: tl.float64, ACC: tl.constexpr, OFFSET: tl.constexpr, B: tl.constexpr
):
    """Compute `grad_x = grad_y * scale` where y is positive, else 0: there, the element was dropped or negative.

    Args:
        y: Result of the dropout.
        grad_y: Its gradient.
        grad_x: Gradient of the input.
        size: Number of elements.
        scale: Factor of elements that are not dropped.
        ACC: Dtype of sums.
        OFFSET: Integer type of offsets into tensors.
        B: Elements of a program.
    """
    element = tl.program_id(0).to(OFFSET) * B + tl.arange(0, B)
    mask = element < size
    zero = tl.load(y + element, mask=mask, other=0.0).to(ACC) <= 0
    grad = tl.load(grad_y + element, mask=mask, other=0.0).to(ACC) * tl.full((), scale, ACC)
    tl.store(grad_x + element, tl.where(zero, 0.0, grad).to(grad_x.dtype.element_ty), mask=mask)

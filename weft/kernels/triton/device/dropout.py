"""Dropout whose mask is a function of (key, vertex, column) alone, of rows or of what ReLU makes of them."""

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
    """`y_rc = x_rc * scale` where the hash of (key, rows[r], first_column + c) is at least the threshold, else 0."""
    row = tl.program_id(0) // num_blocks * B + tl.arange(0, B)
    column = tl.program_id(0) % num_blocks * C + tl.arange(0, C)
    exists = row < num_rows
    word = word_of(key_at(key), tl.load(rows + row, mask=exists, other=0))
    number = tl.full((), first_column, tl.uint32) + column.to(tl.uint32)
    place = row.to(OFFSET)[:, None] * width + column[None, :]
    mask = exists[:, None] & (column < width)[None, :]
    value = tl.load(x + place, mask=mask, other=0.0).to(ACC) * tl.full((), scale, ACC)
    if RELU:
        value = tl.where(value < 0, 0.0, value)
    value = tl.where(hashed(word[:, None], number[None, :]) >= tl.full((), threshold, tl.uint32), value, 0.0)
    tl.store(y + place, value.to(y.dtype.element_ty), mask=mask)


@triton.jit
def relu_dropout_backward(
    y, grad_y, grad_x, size, scale: tl.float64, ACC: tl.constexpr, OFFSET: tl.constexpr, B: tl.constexpr
):
    """`grad_x = grad_y * scale` where y is positive, else 0: it was dropped, or cut off."""
    place = tl.program_id(0).to(OFFSET) * B + tl.arange(0, B)
    mask = place < size
    zero = tl.load(y + place, mask=mask, other=0.0).to(ACC) <= 0
    grad = tl.load(grad_y + place, mask=mask, other=0.0).to(ACC) * tl.full((), scale, ACC)
    tl.store(grad_x + place, tl.where(zero, 0.0, grad).to(grad_x.dtype.element_ty), mask=mask)

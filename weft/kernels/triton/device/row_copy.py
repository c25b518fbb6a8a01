"""Copy of rows between two tensors, of which one may be in pinned host memory."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_rows"])
def move_rows(
    table,
    sources,
    out,
    out_rows,
    num_rows,
    width,
    num_blocks,
    ADD: tl.constexpr,
    OFFSET: tl.constexpr,
    B: tl.constexpr,
    C: tl.constexpr,
):
    """Compute `out[out_rows[i]] = table[sources[i]]`, or add to it.

    Args:
        table: Rows to read, [n, F].
        sources: Row ids in the table; None: row i.
        out: Rows to write, [K, F].
        out_rows: Distinct row ids in `out`; None: row i.
        num_rows: Number of rows to copy.
        width: Number of columns.
        num_blocks: Number of blocks of columns.
        ADD: True to add.
        OFFSET: Integer type of offsets into tensors.
        B: Rows of a program.
        C: Columns of a program.
    """
    row = tl.program_id(0) // num_blocks * B + tl.arange(0, B)
    column = tl.program_id(0) % num_blocks * C + tl.arange(0, C)
    exists = row < num_rows
    mask = exists[:, None] & (column < width)[None, :]
    source = row
    if sources is not None:
        source = tl.load(sources + row, mask=exists, other=0)
    out_row = row
    if out_rows is not None:
        out_row = tl.load(out_rows + row, mask=exists, other=0)
    value = tl.load(table + source.to(OFFSET)[:, None] * width + column[None, :], mask=mask, other=0.0)
    destination = out + out_row.to(OFFSET)[:, None] * width + column[None, :]
    if ADD:
        value += tl.load(destination, mask=mask, other=0.0)
    tl.store(destination, value, mask=mask)

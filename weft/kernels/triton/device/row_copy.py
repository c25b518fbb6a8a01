"""Rows from one table to another, of which either may be pinned memory of the host."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_rows"])
def move_rows(
    table,
    sources,
    out,
    places,
    num_rows,
    width,
    num_blocks,
    ADD: tl.constexpr,
    OFFSET: tl.constexpr,
    B: tl.constexpr,
    C: tl.constexpr,
):
    """`out[places[i]] = table[sources[i]]`, or with `ADD` added to it; None: i itself. Places are distinct."""
    row = tl.program_id(0) // num_blocks * B + tl.arange(0, B)
    column = tl.program_id(0) % num_blocks * C + tl.arange(0, C)
    exists = row < num_rows
    mask = exists[:, None] & (column < width)[None, :]
    source = row
    if sources is not None:
        source = tl.load(sources + row, mask=exists, other=0)
    place = row
    if places is not None:
        place = tl.load(places + row, mask=exists, other=0)
    value = tl.load(table + source.to(OFFSET)[:, None] * width + column[None, :], mask=mask, other=0.0)
    into = out + place.to(OFFSET)[:, None] * width + column[None, :]
    if ADD:
        value += tl.load(into, mask=mask, other=0.0)
    tl.store(into, value, mask=mask)

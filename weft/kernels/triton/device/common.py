"""Functions that several kernels use: ranges of segments and columns, leaky_relu, and random bits for dropout."""

import triton
import triton.language as tl


@triton.jit
def segments_of(first, count, row, num_segments, num_blocks, R: tl.constexpr):
    """Return the block of columns and the segments that this program processes.

    Args:
        first: First entry of each segment, [S].
        count: Number of entries of each segment, [S].
        row: Row of each segment, [S].
        num_segments: Number of segments.
        num_blocks: Number of blocks of columns.
        R: Segments of a program.

    Returns:
        Number of the block; numbers of the segments, mask of those that exist, their rows, first entries and numbers of
        entries, [R] each.
    """
    block = tl.program_id(0) % num_blocks
    segment = tl.program_id(0) // num_blocks * R + tl.arange(0, R)
    exists = segment < num_segments
    begin = tl.load(first + segment, mask=exists, other=0)
    length = tl.load(count + segment, mask=exists, other=0)
    return block, segment, exists, tl.load(row + segment, mask=exists, other=0), begin, length


@triton.jit
def columns_of(blocks, block, C: tl.constexpr, ALIGN: tl.constexpr):
    """Return the head of a block, its columns [C], and a mask of the columns that exist.

    Args:
        blocks: Head, first column and end of each block of columns, int32 [B, 3].
        block: Number of the block.
        C: Columns of a program.
        ALIGN: Power of two that divides all bounds of columns.
    """
    column = tl.multiple_of(tl.load(blocks + block * 3 + 1), ALIGN) + tl.arange(0, C)
    return tl.load(blocks + block * 3), column, column < tl.multiple_of(tl.load(blocks + block * 3 + 2), ALIGN)


@triton.jit
def range_of(bounds, head, ALIGN: tl.constexpr):
    """Return the first column and the end of a head.

    Args:
        bounds: First column of each head, and the end of the last, int32 [H + 1].
        head: Number of the head.
        ALIGN: Power of two that divides all bounds of columns.
    """
    return tl.multiple_of(tl.load(bounds + head), ALIGN), tl.multiple_of(tl.load(bounds + head + 1), ALIGN)


@triton.jit
def entries_of(begin, length, done, K: tl.constexpr):
    """Return the next K entries of each segment, [R, K], and a mask of those that exist.

    Args:
        begin: First entry of each segment, [R].
        length: Number of entries of each segment, [R].
        done: Number of entries of each segment that were already processed.
        K: Entries of a segment that are processed side by side.
    """
    entry = done + tl.arange(0, K)
    return begin[:, None] + entry[None, :], entry[None, :] < length[:, None]


@triton.jit
def leaky_relu(argument, slope):
    """Return leaky_relu of the argument.

    Args:
        argument: Block of values.
        slope: Negative slope.
    """
    return tl.where(argument > 0, argument, argument * slope)


@triton.jit
def mix64(value):
    """Return a permutation of 64-bit values: the finalizer of SplitMix64, as `weft.utils.random.mix64`."""
    value += 0x9E3779B97F4A7C15
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB
    return value ^ (value >> 31)


@triton.jit
def key_at(key):
    """Load a random key, stored as int64, as uint64."""
    return tl.load(key).to(tl.uint64, bitcast=True)


@triton.jit
def word_of(key, identifier):
    """Return 64 random bits, uint64.

    Args:
        key: Random key or other random bits, uint64.
        identifier: Integers, such as vertex ids.
    """
    return mix64(key ^ identifier.to(tl.uint64, bitcast=True))


@triton.jit
def hashed(word, column):
    """Return 32 random bits, as `weft.kernels.reference.hashed`.

    Args:
        word: 64 random bits of each row, uint64.
        column: Numbers of the columns, uint32.
    """
    bits = word.to(tl.uint32) + column * 0x9E3779B9
    bits = (bits ^ (bits >> 16)) * 0x21F0AAAD
    bits = bits ^ (bits >> 15) ^ (word >> 32).to(tl.uint32)
    bits = bits * 0x735A2D97
    return bits ^ (bits >> 15)


@triton.jit
def edge_words(key, source_ids, target_ids, source, target, copies, at, exists):
    """Return 64 random bits for each edge, uint64.

    Args:
        key: Address of the random key of 64 bits.
        source_ids: Global vertex id of each source.
        target_ids: Global vertex id of each target; None: no dropout.
        source: Source of each edge.
        target: Target of each edge.
        copies: Number of equal edges before each edge in its row; None: no duplicate edges.
        at: Number of each entry.
        exists: Mask of entries that exist.
    """
    word = word_of(key_at(key), tl.load(target_ids + target, mask=exists, other=0))
    word = word_of(word, tl.load(source_ids + source, mask=exists, other=0))
    if copies is not None:
        copy = tl.load(copies + at, mask=exists, other=0)
        word = tl.where(copy > 0, mix64(word ^ copy.to(tl.uint64)), word)
    return word


@triton.jit
def keeps(word, head, first_head, threshold):
    """Return a mask of the weights that dropout does not drop.

    Args:
        word: 64 random bits of each edge, uint64.
        head: Number of the head, or of several heads.
        first_head: Global number of the first head.
        threshold: Edges whose 32 random bits are below it are dropped.
    """
    head_number = tl.full((), first_head, tl.uint32) + head.to(tl.uint32)
    return hashed(word, head_number) >= tl.full((), threshold, tl.uint32)

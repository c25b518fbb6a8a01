"""Segments, columns, leaky_relu and the random bits of dropout."""

import triton
import triton.language as tl


@triton.jit
def segments_of(first, count, row, num_segments, num_blocks, R: tl.constexpr):
    """This program's block of columns; of its segments [R] numbers, whether there are any, rows, entries, counts."""
    block = tl.program_id(0) % num_blocks
    segment = tl.program_id(0) // num_blocks * R + tl.arange(0, R)
    exists = segment < num_segments
    begin = tl.load(first + segment, mask=exists, other=0)
    length = tl.load(count + segment, mask=exists, other=0)
    return block, segment, exists, tl.load(row + segment, mask=exists, other=0), begin, length


@triton.jit
def columns_of(blocks, block, C: tl.constexpr, ALIGN: tl.constexpr):
    """The block's head and columns [C], and which of these it has; begin and end are multiples of `ALIGN`."""
    column = tl.multiple_of(tl.load(blocks + block * 3 + 1), ALIGN) + tl.arange(0, C)
    return tl.load(blocks + block * 3), column, column < tl.multiple_of(tl.load(blocks + block * 3 + 2), ALIGN)


@triton.jit
def range_of(bounds, head, ALIGN: tl.constexpr):
    """The first column and the end of a head; multiples of `ALIGN`."""
    return tl.multiple_of(tl.load(bounds + head), ALIGN), tl.multiple_of(tl.load(bounds + head + 1), ALIGN)


@triton.jit
def entries_of(begin, length, done, K: tl.constexpr):
    """The entries [R, K] from the one numbered `done` on, and which of these there are."""
    place = done + tl.arange(0, K)
    return begin[:, None] + place[None, :], place[None, :] < length[:, None]


@triton.jit
def leaky_relu(argument, slope):
    return tl.where(argument > 0, argument, argument * slope)


@triton.jit
def mix64(value):
    """The finaliser of SplitMix64, as `weft.utils.random.mix64`."""
    value += 0x9E3779B97F4A7C15
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB
    return value ^ (value >> 31)


@triton.jit
def key_at(key):
    """The 64 bits, uint64, that are there as int64."""
    return tl.load(key).to(tl.uint64, bitcast=True)


@triton.jit
def word_of(key, identifier):
    """64 random bits of a word uint64 and an integer."""
    return mix64(key ^ identifier.to(tl.uint64, bitcast=True))


@triton.jit
def hashed(word, column):
    """The 32 bits of words uint64 and columns uint32, as `weft.kernels.reference.hashed`."""
    bits = word.to(tl.uint32) + column * 0x9E3779B9
    bits = (bits ^ (bits >> 16)) * 0x21F0AAAD
    bits = bits ^ (bits >> 15) ^ (word >> 32).to(tl.uint32)
    bits = bits * 0x735A2D97
    return bits ^ (bits >> 15)


@triton.jit
def edge_words(key, source_ids, target_ids, source, target, copies, at, exists):
    """The random bits of edges, uint64; copies: of entries, or None where no edge is another's copy."""
    word = word_of(key_at(key), tl.load(target_ids + target, mask=exists, other=0))
    word = word_of(word, tl.load(source_ids + source, mask=exists, other=0))
    if copies is not None:
        copy = tl.load(copies + at, mask=exists, other=0)
        word = tl.where(copy > 0, mix64(word ^ copy.to(tl.uint64)), word)
    return word


@triton.jit
def keeps(word, head, first_head, threshold):
    """Whether dropout keeps the weights of edges by their words, of a head or of many."""
    number = tl.full((), first_head, tl.uint32) + head.to(tl.uint32)
    return hashed(word, number) >= tl.full((), threshold, tl.uint32)

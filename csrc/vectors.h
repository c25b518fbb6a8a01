// Vectors, the division of columns into vectors, and the distribution of rows over threads. This file and the kernels
// are compiled once per instruction set, in its namespace. They must not use inline functions of the standard library:
// the linker could take their code from the build for another instruction set.
#pragma once

#include <cstdint>
#include <utility>

#include "kernels.h"

#define WEFT_INLINE inline __attribute__((always_inline))

namespace weft::WEFT_ISA {

// Vectors of sums that fit into the registers next to the other values of a loop.
constexpr int kMaxVectors = WEFT_ACCUMULATORS;

// Lanes of a vector of the type in which R is summed.
template <class R>
constexpr int kLanes = WEFT_VECTOR_BYTES / sizeof(Sum<R>);

// Whether numbers of a type are converted to a wider type when loaded (bfloat16).
template <class R>
constexpr bool kNarrow = sizeof(R) < sizeof(Sum<R>);

template <class T, int L>
struct VectorOf {
  typedef T type __attribute__((vector_size(L * sizeof(T))));
  typedef T unaligned __attribute__((vector_size(L * sizeof(T)), aligned(sizeof(T)), may_alias));
};
template <class T>
struct VectorOf<T, 1> {
  using type = T;
  using unaligned = T;
};

template <class T, int L>
using Vector = typename VectorOf<T, L>::type;

template <int L>
WEFT_INLINE Vector<uint32_t, L> widened(Vector<uint16_t, L> bits) {
  if constexpr (L == 1) {
    return bits;
  } else {
    return __builtin_convertvector(bits, Vector<uint32_t, L>);
  }
}

template <int L>
WEFT_INLINE Vector<uint16_t, L> narrowed(Vector<uint32_t, L> bits) {
  if constexpr (L == 1) {
    return static_cast<uint16_t>(bits);
  } else {
    return __builtin_convertvector(bits, Vector<uint16_t, L>);
  }
}

// Loads L numbers, converted to the type in which they are summed.
template <int L, class R>
WEFT_INLINE Vector<Sum<R>, L> load(const R* from) {
  if constexpr (kNarrow<R>) {
    const auto half = *reinterpret_cast<const typename VectorOf<uint16_t, L>::unaligned*>(&from->bits);
    const Vector<uint32_t, L> bits = widened<L>(half) << 16;
    Vector<float, L> value;
    __builtin_memcpy(&value, &bits, sizeof(value));
    return value;
  } else {
    return *reinterpret_cast<const typename VectorOf<R, L>::unaligned*>(from);
  }
}

// Stores L numbers. Conversion to bfloat16 rounds to nearest, ties to even; NaN stays NaN.
template <int L, class R>
WEFT_INLINE void store(R* to, Vector<Sum<R>, L> value) {
  if constexpr (kNarrow<R>) {
    using U = Vector<uint32_t, L>;
    U bits;
    __builtin_memcpy(&bits, &value, sizeof(bits));
    const U rounded = bits + (((bits >> 16) & 1u) + 0x7FFFu), quiet = U{} + 0x7FC00000u;
    const U kept = value != value ? quiet : rounded;
    *reinterpret_cast<typename VectorOf<uint16_t, L>::unaligned*>(&to->bits) = narrowed<L>(kept >> 16);
  } else {
    *reinterpret_cast<typename VectorOf<R, L>::unaligned*>(to) = value;
  }
}

// Loads only the first `count` lanes, since memory after them may be invalid; the other lanes are 0.
template <int L, class R>
WEFT_INLINE Vector<Sum<R>, L> load_first(const R* from, int64_t count) {
  if (count >= L) return load<L>(from);
  Vector<Sum<R>, L> value{};
  if constexpr (L > 1) {
    Vector<Sum<R>, L / 2> halves[2] = {load_first<L / 2>(from, count)};
    if (count > L / 2) halves[1] = load_first<L / 2>(from + L / 2, count - L / 2);
    __builtin_memcpy(&value, halves, sizeof(value));
  }
  return value;
}

template <int L, class R>
WEFT_INLINE void store_first(R* to, Vector<Sum<R>, L> value, int64_t count) {
  if (count >= L) return store<L>(to, value);
  if constexpr (L > 1) {
    Vector<Sum<R>, L / 2> halves[2];
    __builtin_memcpy(halves, &value, sizeof(value));
    store_first<L / 2>(to, halves[0], count);
    if (count > L / 2) store_first<L / 2>(to + L / 2, halves[1], count - L / 2);
  }
}

// Combines all lanes, repeatedly in halves.
template <int L, class T, class Combine>
WEFT_INLINE T reduce_lanes(Vector<T, L> value, Combine combine) {
  if constexpr (L == 1) {
    return value;
  } else {
    Vector<T, L / 2> halves[2];
    __builtin_memcpy(halves, &value, sizeof(value));
    return reduce_lanes<L / 2, T>(combine(halves[0], halves[1]), combine);
  }
}

template <int L, class T>
WEFT_INLINE T sum_lanes(Vector<T, L> value) {
  return reduce_lanes<L, T>(value, [](auto a, auto b) __attribute__((always_inline)) { return a + b; });
}

template <int L, class T>
WEFT_INLINE T max_lanes(Vector<T, L> value) {
  return reduce_lanes<L, T>(value, [](auto a, auto b) __attribute__((always_inline)) { return b > a ? b : a; });
}

// Prefetch distance in entries, for rows of which `kValues` numbers are read: about 8 KiB, measured with
// benchmarks/kernels.py.
template <class T, int kValues>
constexpr int kAhead = 8192 / (kValues * int{sizeof(T)}) < 8    ? 8
                       : 8192 / (kValues * int{sizeof(T)}) > 32 ? 32
                                                                : 8192 / (kValues * int{sizeof(T)});

// Prefetches the cache lines of the numbers 0 to `last`, which kValues lanes cover, and no further line if the row is
// narrow. A row may start anywhere in its first line.
template <int kValues, class T>
WEFT_INLINE void prefetch(const T* row, int64_t last) {
  constexpr int line = 64 / sizeof(T);
#pragma GCC unroll 32
  for (int value = 0; value < kValues; value += line) __builtin_prefetch(row + value);
  __builtin_prefetch(row + last);
}

template <class T>
WEFT_INLINE void prefetch_row(const T* row, int64_t width) {
  for (int64_t column = 0; column < width; column += 64 / sizeof(T)) __builtin_prefetch(row + column);
}

// Columns [column, column + (N - 1) L) in whole vectors, then one vector that starts at `tail`, of which the columns
// before `end` count. If the width is no multiple of L and nothing readable follows, the last vector overlaps the
// others and computes the same numbers again. So no loop has a remainder.
struct Columns {
  int64_t column, tail, end;
};

template <int L, int N>
WEFT_INLINE int64_t column_of(int i, Columns columns) {
  return i + 1 < N ? columns.column + i * L : columns.tail;
}

// Returns Family::run<L, N> for a number of lanes and of vectors. Widths below a full vector use narrower vectors.
template <class Family, int L, int... N>
typename Family::Run run_of(int num_vectors, std::integer_sequence<int, N...>) {
  constexpr typename Family::Run runs[] = {&Family::template run<L, N + 1>...};
  return runs[num_vectors - 1];
}

template <class Family, int L>
typename Family::Run find_run(int lanes, int num_vectors) {
  if constexpr (L > 1) {
    if (lanes < L) return find_run<Family, L / 2>(lanes, num_vectors);
  }
  constexpr bool full = L == kLanes<typename Family::Scalar>;
  return run_of<Family, L>(num_vectors, std::make_integer_sequence<int, full ? Family::max_vectors : 2>());
}

// Divides columns [begin, end) into blocks of nearly equal size, with at most max_vectors full vectors, and calls
// visit(run, columns) for each. Columns before `readable` may be read.
template <class Family, class Visit>
WEFT_INLINE void for_columns(int64_t begin, int64_t end, int64_t readable, Visit visit) {
  constexpr int full = kLanes<typename Family::Scalar>;
  constexpr int64_t widest = int64_t{full} * Family::max_vectors;
  const int64_t num_blocks = (end - begin + widest - 1) / widest;
  const int64_t step = num_blocks ? ((end - begin + num_blocks - 1) / num_blocks + full - 1) / full * full : 0;
  for (int64_t column = begin; column < end; column += step) {
    const int64_t width = end - column < step ? end - column : step;
    int lanes = full;
    while (lanes > width) lanes /= 2;
    const int num_vectors = static_cast<int>((width + lanes - 1) / lanes);
    const int64_t aligned = column + (num_vectors - 1) * lanes, last = readable - lanes;
    visit(find_run<Family, full>(lanes, num_vectors), Columns{column, aligned < last ? aligned : last, column + width});
  }
}

// Memory of one thread, initialized to zero.
template <class T>
struct Scratch {
  T* const numbers;
  explicit Scratch(int64_t count) : numbers(new T[count]()) {}
  ~Scratch() { delete[] numbers; }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
};

// The number of threads to use: no more than there are tasks.
WEFT_INLINE int useful_threads(int64_t num_tasks, int num_threads) {
  return num_tasks < num_threads ? static_cast<int>(num_tasks) : num_threads;
}

// Rows in blocks of about equal cost. The cost of a range is its number of entries and rows: row r begins at cost
// indptr[r] + r.
struct RowBlocks {
  const int64_t* indptr;
  const int64_t num_rows, cost, num_blocks;

  RowBlocks(const int64_t* row_ends, int64_t rows, int num_threads)
      : indptr(row_ends), num_rows(rows), cost(row_ends[rows] + rows), num_blocks(count(cost, num_threads)) {}

  static int64_t count(int64_t cost, int num_threads) {
    const int64_t finest = cost / 2048 + 1, wanted = int64_t{64} * num_threads;
    return finest < wanted ? finest : wanted;
  }

  int64_t begin(int64_t block) const { return cost * block / num_blocks; }

  // The first row that begins in a block or after it.
  int64_t row(int64_t block) const {
    int64_t low = 0, high = num_rows;
    while (low < high) {
      const int64_t middle = (low + high) / 2;
      if (indptr[middle] + middle < begin(block)) {
        low = middle + 1;
      } else {
        high = middle;
      }
    }
    return low;
  }

  // The first block that begins after the start of a row.
  int64_t block_after(int64_t row) const {
    const int64_t at = indptr[row] + row;
    int64_t block = at * num_blocks / cost;
    while (begin(block) <= at) ++block;
    return block;
  }
};

// Calls body(first_row, end_row) for every block; each free thread takes the next block.
template <class Body>
WEFT_INLINE void for_row_blocks(const int64_t* indptr, int64_t num_rows, int num_threads, Body body) {
  const RowBlocks blocks(indptr, num_rows, num_threads);
#pragma omp parallel for schedule(dynamic, 1) num_threads(useful_threads(blocks.num_blocks, num_threads))
  for (int64_t block = 0; block < blocks.num_blocks; ++block) body(blocks.row(block), blocks.row(block + 1));
}

// Calls body(first_row, end_row, first_column, end_column) for blocks of rows. If one row (a hub) fills several blocks,
// its columns are divided over these blocks, so that it does not delay one thread. One thread still sums each column,
// in the order of the entries.
template <int kColumns, class Body>
WEFT_INLINE void for_blocks(const int64_t* indptr, int64_t num_rows, int64_t width, int num_threads, Body body) {
  const RowBlocks blocks(indptr, num_rows, num_threads);
#pragma omp parallel for schedule(dynamic, 1) num_threads(useful_threads(blocks.num_blocks, num_threads))
  for (int64_t block = 0; block < blocks.num_blocks; ++block) {
    const int64_t first = blocks.row(block), end = blocks.row(block + 1);
    if (end == 0) continue;
    const int64_t last = end - 1, before = blocks.block_after(last), parts = blocks.block_after(end) - before;
    if (parts < 2) {
      body(first, end, 0, width);
      continue;
    }
    if (first < last) body(first, last, 0, width);
    const int64_t vectors = (width + kColumns - 1) / kColumns, part = block + 1 - before;
    const int64_t from = vectors * part / parts * kColumns, to = vectors * (part + 1) / parts * kColumns;
    body(last, end, from, to < width ? to : width);
  }
}

}  // namespace weft::WEFT_ISA

// Weighted sums of rows, with a weight for each entry and head: the division of columns into vectors, and the loop over
// a chunk of entries.
#pragma once

#include "vectors.h"

namespace weft::WEFT_ISA {

constexpr int kChunk = 128;  // entries whose weights are computed together
constexpr int kHeads = 8;    // heads per pass over the graph: the weights of a chunk stay in the L1 cache

template <class T>
using Weights = T[kHeads][kChunk];

// G consecutive heads of a group from `head` on, each `width` columns wide; their columns start at `column`.
struct Part {
  int64_t head, column, width;
};

// A chunk of a row's entries: y_c += sum_e weight_e x_uc and, with kPlus, plus_c += sum_e positive_e x_uc. The first
// chunk of a row (`first`) overwrites y and plus. After the entries of `indices` follows the self-loop, which reads row
// `own` of x; own = -1: no self-loop.
template <class R, class I>
struct Chunk {
  using T = Sum<R>;
  const I* indices;
  int64_t count;
  int64_t own;
  const I* last_index;  // last entry of the graph: prefetching stops there
  const Weights<T>*weight, *positive;
  const R* x;
  int64_t width;
  T *y, *plus;
  bool first;

  int64_t num_entries() const { return count + (own >= 0); }
};

// Calls visit(begins) for each chunk of a row's entries, kChunk at a time; the self-loop is in the last chunk. begins:
// true for the first chunk.
template <class R, class I, class Visit>
WEFT_INLINE void for_chunks(const int64_t* indptr, const I* indices, int64_t row, bool loop, Chunk<R, I>& chunk,
                            Visit visit) {
  const int64_t first = indptr[row], end = indptr[row + 1];
  for (int64_t entry = first; entry < end || loop; entry += kChunk) {
    const bool whole = end - entry >= kChunk;
    chunk.indices = indices + entry;
    chunk.count = whole ? kChunk : end - entry;
    chunk.own = loop && !whole ? row : -1;
    visit(entry == first);
    chunk.first = false;
    if (!whole) break;
  }
}

template <class R, class I, bool kPlus>
struct ChunkRows {
  using T = Sum<R>;
  using Scalar = T;
  using Run = void (*)(const Chunk<R, I>&, Part part);
  static constexpr int max_vectors = kPlus ? kMaxVectors / 2 : kMaxVectors;

  // Processes V vectors of L lanes for each of G heads. If the width is no multiple of L, the last vector of a head
  // overlaps the one before it, which computes some columns twice but needs no remainder loop.
  template <int L, int V, int G>
  static void run(const Chunk<R, I>& a, Part part) {
    constexpr int N = V * G;
    int64_t column[N];
    Vector<T, L> sum[N] = {}, plus[N] = {};
    for (int i = 0; i < N; ++i) {
      const int64_t within = i % V * L < part.width - L ? i % V * L : part.width - L;
      column[i] = part.column + i / V * part.width + within;
    }
    if (!a.first) {
#pragma GCC unroll 16
      for (int i = 0; i < N; ++i) {
        sum[i] = load<L>(a.y + column[i]);
        if (kPlus) plus[i] = load<L>(a.plus + column[i]);
      }
    }
    const auto add = [&](const R* x, int64_t e) {
#pragma GCC unroll 16
      for (int i = 0; i < N; ++i) {
        const Vector<T, L> value = load<L>(x + column[i]);
        sum[i] += value * (*a.weight)[part.head + i / V][e];
        if (kPlus) plus[i] += value * (*a.positive)[part.head + i / V][e];
      }
    };
    for (int64_t e = 0; e < a.count; ++e) {
      const int64_t left = a.last_index - (a.indices + e);
      const int64_t source = a.indices[left > kAhead<R, L * N> ? e + kAhead<R, L * N> : e + left];
      prefetch<L * N>(a.x + source * a.width + part.column, column[N - 1] - part.column + L - 1);
      add(a.x + a.indices[e] * a.width, e);
    }
    if (a.own >= 0) add(a.x + a.own * a.width, a.count);
#pragma GCC unroll 16
    for (int i = 0; i < N; ++i) {
      store<L>(a.y + column[i], sum[i]);
      if (kPlus) store<L>(a.plus + column[i], plus[i]);
    }
  }

  // Only some numbers of vectors are compiled. A head uses the next larger one, which computes some columns twice.
  static constexpr int round_up(int vectors) {
    return vectors <= 4 ? vectors : vectors <= 8 ? (vectors + 1) / 2 * 2 : (vectors + 3) / 4 * 4;
  }

  template <int L, int V, int G>
  static Run compiled() {
    if constexpr (V * G <= max_vectors && (L == kLanes<T> || V <= 2)) {
      return &run<L, V, G>;
    } else {
      return nullptr;
    }
  }

  template <int L, int V>
  static Run find_heads(int heads) {
    return heads == 1   ? compiled<L, V, 1>()
           : heads == 2 ? compiled<L, V, 2>()
           : heads == 4 ? compiled<L, V, 4>()
                        : compiled<L, V, 8>();
  }

  template <int L>
  static Run find(int lanes, int vectors, int heads) {
    if constexpr (L > 1) {
      if (lanes < L) return find<L / 2>(lanes, vectors, heads);
    }
    switch (vectors) {
      case 1:
        return find_heads<L, 1>(heads);
      case 2:
        return find_heads<L, 2>(heads);
      case 3:
        return find_heads<L, 3>(heads);
      case 4:
        return find_heads<L, 4>(heads);
      case 6:
        return find_heads<L, 6>(heads);
      case 8:
        return find_heads<L, 8>(heads);
      case 12:
        return find_heads<L, 12>(heads);
      default:
        return find_heads<L, 16>(heads);
    }
  }
};

// The heads [first, end) of one pass over the graph, and the steps that compute their columns. Narrow heads of equal
// width share a step (2, 4 or 8 heads); a wide head is divided into blocks of nearly equal width.
template <class Rows>
class Plan {
 public:
  Plan(const int64_t* bounds, int64_t first, int64_t end) : first_(first), end_(end) {
    constexpr int full = kLanes<typename Rows::Scalar>;
    const int64_t widest = int64_t{full} * Rows::max_vectors;
    steps_ = new Step[end - first + (bounds[end] - bounds[first]) / widest];
    for (int64_t head = first; head < end;) {
      const int64_t width = bounds[head + 1] - bounds[head];
      const int64_t num_blocks = (width + widest - 1) / widest;
      if (num_blocks > 1) {
        const int64_t block = ((width + num_blocks - 1) / num_blocks + full - 1) / full * full;
        for (int64_t column = 0; column < width; column += block) {
          add(bounds, head, 1, column, width - column < block ? width - column : block);
        }
        ++head;
      } else if (width == 0) {
        ++head;
      } else {
        int heads = 1;
        while (heads < kHeads && fits(width, 2 * heads) && equal(bounds, head, end, 2 * heads)) heads *= 2;
        add(bounds, head, heads, 0, width);
        head += heads;
      }
    }
  }
  ~Plan() { delete[] steps_; }
  Plan(const Plan&) = delete;
  Plan& operator=(const Plan&) = delete;

  template <class Entries>
  WEFT_INLINE void run(const Entries& chunk) const {
    for (int64_t step = 0; step < num_steps_; ++step) steps_[step].run(chunk, steps_[step].part);
  }
  int64_t first() const { return first_; }
  int64_t num_heads() const { return end_ - first_; }

 private:
  struct Step {
    typename Rows::Run run;
    Part part;
  };

  static int lanes_of(int64_t width) {
    int lanes = kLanes<typename Rows::Scalar>;
    while (lanes > width) lanes /= 2;
    return lanes;
  }
  static int vectors_of(int64_t width) {
    const int lanes = lanes_of(width);
    return Rows::round_up(static_cast<int>((width + lanes - 1) / lanes));
  }
  static bool fits(int64_t width, int heads) { return vectors_of(width) * heads <= Rows::max_vectors; }
  static bool equal(const int64_t* bounds, int64_t head, int64_t end, int heads) {
    if (head + heads > end) return false;
    bool same = true;
    const int64_t width = bounds[head + 1] - bounds[head];
    for (int i = 1; i < heads; ++i) same = same && bounds[head + i + 1] - bounds[head + i] == width;
    return same;
  }
  void add(const int64_t* bounds, int64_t head, int heads, int64_t column, int64_t width) {
    const auto run = Rows::template find<kLanes<typename Rows::Scalar>>(lanes_of(width), vectors_of(width), heads);
    steps_[num_steps_++] = {run, {head - first_, bounds[head] + column, width}};
  }

  int64_t first_, end_, num_steps_ = 0;
  Step* steps_;
};

}  // namespace weft::WEFT_ISA

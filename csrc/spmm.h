// Sums and maxima of neighbours' rows over the entries of each row.
#pragma once

#include "kernels.h"
#include "vectors.h"

namespace weft::WEFT_ISA {

// Sums for rows [first, end) and one block of columns. Sums stay in registers; kernels without weights read no number
// per entry except for the index.
template <class R, class Y, class I, bool kWeight, bool kNeighbour>
struct SpmmRows {
  using T = Sum<R>;
  using Scalar = T;
  using Run = void (*)(const Spmm<R, Y, I>&, int64_t first, int64_t end, Columns columns);
  static constexpr int max_vectors = kMaxVectors;

  template <int L, int N>
  static void run(const Spmm<R, Y, I>& a, int64_t first, int64_t end, Columns columns) {
    const int64_t last_entry = a.indptr[a.num_rows] - 1, last = columns.tail - columns.column + L - 1;
    for (int64_t row = first; row < end; ++row) {
      if (a.add && a.indptr[row] == a.indptr[row + 1] && row >= a.num_loops) continue;
      Y* y = a.y + row * a.width;
      if (a.add) prefetch<L * N>(y + columns.column, columns.end - columns.column - 1);
      Vector<T, L> sum[N] = {};
      for (int64_t entry = a.indptr[row]; entry < a.indptr[row + 1]; ++entry) {
        const int64_t ahead = entry + kAhead<R, L * N> < last_entry ? entry + kAhead<R, L * N> : last_entry;
        prefetch<L * N>(a.x + a.indices[ahead] * a.x_stride + columns.column, last);
        const int64_t source = a.indices[entry];
        const R* x = a.x + source * a.x_stride;
        T scale = 1;
        if (kWeight) scale *= a.weight[entry];
        if (kNeighbour) scale *= a.neighbour_scale[source];
#pragma GCC unroll 16
        for (int i = 0; i < N; ++i) {
          const Vector<T, L> value = load<L>(x + column_of<L, N>(i, columns));
          sum[i] += kWeight || kNeighbour ? value * scale : value;
        }
      }
      // All vectors are scaled in the same way, so that the bits of a number do not depend on its vector.
      const T row_scale = a.row_scale ? a.row_scale[row] : T{1};
      for (int i = 0; i < N; ++i) sum[i] *= row_scale;
      if (row < a.num_loops) {
        const R* x = a.x + row * a.x_stride;
        for (int i = 0; i < N; ++i) sum[i] += load<L>(x + column_of<L, N>(i, columns)) * a.loop_scale[row];
      }
      const int64_t count = columns.end - columns.tail;
      if (a.add) {  // all loads before the first store, since the last two vectors may overlap
        for (int i = 0; i + 1 < N; ++i) sum[i] += load<L>(y + column_of<L, N>(i, columns));
        sum[N - 1] += load_first<L>(y + columns.tail, count);
      }
      for (int i = 0; i + 1 < N; ++i) store<L>(y + column_of<L, N>(i, columns), sum[i]);
      store_first<L>(y + columns.tail, sum[N - 1], count);
    }
  }
};

// Runs a family of loops (such as SpmmRows) over all rows and columns. Columns before `readable` may be read.
template <class Family, class Arguments>
void for_rows(const int64_t* indptr, int64_t num_rows, int64_t readable, const Arguments& a) {
  for_blocks<kLanes<typename Family::Scalar>>(
      indptr, num_rows, a.width, a.num_threads, [&](int64_t first, int64_t end, int64_t from, int64_t to) {
        for_columns<Family>(from, to, readable, [&](auto run, Columns columns) { run(a, first, end, columns); });
      });
}

template <bool kWeight, bool kNeighbour, class R, class Y, class I>
void spmm_as(const Spmm<R, Y, I>& a) {
  for_rows<SpmmRows<R, Y, I, kWeight, kNeighbour>>(a.indptr, a.num_rows, a.readable, a);
}

template <class R, class Y, class I>
void spmm(const Spmm<R, Y, I>& a) {
  if (a.weight && a.neighbour_scale) return spmm_as<true, true>(a);
  if (a.weight) return spmm_as<true, false>(a);
  if (a.neighbour_scale) return spmm_as<false, true>(a);
  return spmm_as<false, false>(a);
}

// Each thread adds to a range of y's rows of its own, given by its bounds, so the sums are in the order of the rows of x. All
// threads read all indices.
template <class R, class I>
void scatter(const Scatter<R, I>& a) {
  using T = Sum<R>;
  constexpr int L = kLanes<R>;
  constexpr int64_t kEntriesAhead = 8, kPerLine = 64 / sizeof(T);
  const int64_t last_entry = a.indptr[a.num_rows] - 1;
#pragma omp parallel for schedule(static) num_threads(a.num_threads)
  for (int part = 0; part < a.num_threads; ++part) {
    const int64_t first = a.bounds[part], end = a.bounds[part + 1];
    for (int64_t row = 0; row < a.num_rows; ++row) {
      const R* x = a.x + row * a.x_stride;
      const T row_scale = a.row_scale ? a.row_scale[row] : T{1};
      for (int64_t entry = a.indptr[row]; entry < a.indptr[row + 1]; ++entry) {
        const int64_t ahead = a.indices[entry + kEntriesAhead < last_entry ? entry + kEntriesAhead : last_entry];
        if (ahead >= first && ahead < end) {
          for (int64_t i = 0; i < a.width; i += kPerLine) __builtin_prefetch(a.y + ahead * a.width + i, 1);
        }
        const int64_t target = a.indices[entry];
        if (target < first || target >= end) continue;
        T scale = row_scale;
        if (a.weight) scale *= a.weight[entry];
        if (a.target_scale) scale *= a.target_scale[target];
        T* y = a.y + target * a.width;
        int64_t i = 0;
        for (; i + L <= a.width; i += L) store<L>(y + i, load<L>(y + i) + load<L>(x + i) * scale);
        for (; i < a.width; ++i) store<1>(y + i, load<1>(y + i) + load<1>(x + i) * scale);
      }
    }
  }
}

// The maximum of each column, and the entry at which it occurs first. NaN counts as the maximum, as in PyTorch.
template <class T, class I>
struct MaxRows {
  using Scalar = T;
  using Place = typename Position<T>::type;
  using Run = void (*)(const SpmmMax<T, I>&, int64_t first, int64_t end, Columns columns);
  static constexpr int max_vectors = kMaxVectors / 2;

  template <int L, int N>
  static void run(const SpmmMax<T, I>& a, int64_t first, int64_t end, Columns columns) {
    const int64_t last_entry = a.indptr[a.num_rows] - 1, last = columns.tail - columns.column + L - 1;
    for (int64_t row = first; row < end; ++row) {
      const int64_t begin = a.indptr[row];
      Vector<T, L> best[N] = {};
      Vector<Place, L> place[N] = {};
      for (int64_t entry = begin; entry < a.indptr[row + 1]; ++entry) {
        const int64_t ahead = entry + kAhead<T, L * N> < last_entry ? entry + kAhead<T, L * N> : last_entry;
        prefetch<L * N>(a.x + a.indices[ahead] * a.width + columns.column, last);
        const T* x = a.x + a.indices[entry] * a.width;
        const Vector<Place, L> here = Vector<Place, L>{} + static_cast<Place>(entry - begin);
#pragma GCC unroll 16
        for (int i = 0; i < N; ++i) {
          const Vector<T, L> value = load<L>(x + column_of<L, N>(i, columns));
          const auto wins = (value > best[i]) | (value != value) | (here == Place{0});
          best[i] = wins ? value : best[i];
          place[i] = wins ? here : place[i];
        }
      }
#pragma GCC unroll 16
      for (int i = 0; i < N; ++i) {
        const int64_t at = row * a.width + column_of<L, N>(i, columns);
        store<L>(a.y + at, best[i]);
        store<L>(a.position + at, place[i]);
      }
    }
  }
};

template <class T, class I>
void spmm_max(const SpmmMax<T, I>& a) {
  for_rows<MaxRows<T, I>>(a.indptr, a.num_rows, a.width, a);
}

template <class T, class I>
struct MaxBackwardRows {
  using Scalar = T;
  using Place = typename Position<T>::type;
  using Run = void (*)(const SpmmMaxBackward<T, I>&, int64_t first, int64_t end, Columns columns);
  static constexpr int max_vectors = kMaxVectors;

  template <int L, int N>
  static void run(const SpmmMaxBackward<T, I>& a, int64_t first, int64_t end, Columns columns) {
    for (int64_t source = first; source < end; ++source) {
      Vector<T, L> sum[N] = {};
      for (int64_t entry = a.indptr_t[source]; entry < a.indptr_t[source + 1]; ++entry) {
        const int64_t target = a.indices_t[entry];
        const auto here = static_cast<Place>(a.edge_ids[entry] - a.indptr[target]);
#pragma GCC unroll 16
        for (int i = 0; i < N; ++i) {
          const int64_t at = target * a.width + column_of<L, N>(i, columns);
          const Vector<T, L> zero{};
          sum[i] += load<L>(a.position + at) == here ? load<L>(a.grad_y + at) : zero;
        }
      }
#pragma GCC unroll 16
      for (int i = 0; i < N; ++i) store<L>(a.grad_x + source * a.width + column_of<L, N>(i, columns), sum[i]);
    }
  }
};

template <class T, class I>
void spmm_max_backward(const SpmmMaxBackward<T, I>& a) {
  for_rows<MaxBackwardRows<T, I>>(a.indptr_t, a.num_sources, a.width, a);
}

}  // namespace weft::WEFT_ISA

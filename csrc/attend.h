// Edge softmax and its weighted sum, forward and backward, a head at a time. Weights of a few entries at once are computed into
// a buffer (which vectorises the exponential), then the rows they weigh are summed; nothing of size entries x heads x width.
#pragma once

#include "exp.h"
#include "kernels.h"
#include "vectors.h"

namespace weft::WEFT_ISA {

constexpr int kChunk = 128;  // entries at once: their weights stay in the first-level cache

template <class T>
WEFT_INLINE T leaky_relu(T x, T slope) {
  return x > 0 ? x : x * slope;
}

// One head's columns over a chunk of entries: with kSum, y += sum_e weight_e x_u; with kDot, dots_e += own . x_u.
template <class T, class I>
struct Chunk {
  const I* indices;
  int64_t count;
  const I* last_index;  // of the whole graph: nothing beyond is fetched ahead
  const T* weight;
  const T* x;
  int64_t width;
  T* y;
  const T* own;
  T* dots;
};

template <class T, class I, bool kSum, bool kDot>
struct ChunkRows {
  using Scalar = T;
  using Run = void (*)(const Chunk<T, I>&, Columns columns);
  static constexpr int max_vectors = kDot && kSum ? kMaxVectors / 2 : kMaxVectors;

  template <int L, int N>
  static void run(const Chunk<T, I>& a, Columns columns) {
    Vector<T, L> sum[N] = {}, own[N] = {};
    if (kSum) {
#pragma GCC unroll 16
      for (int i = 0; i < N; ++i) sum[i] = load<L>(a.y + column_of<L, N>(i, columns));
    }
    if (kDot) {
#pragma GCC unroll 16
      for (int i = 0; i < N; ++i) own[i] = load<L>(a.own + column_of<L, N>(i, columns));
      own[N - 1] = without_overlap<L, N>(own[N - 1], columns);
    }
    for (int64_t e = 0; e < a.count; ++e) {
      const I* ahead = a.last_index - (a.indices + e) > kPrefetch ? a.indices + e + kPrefetch : a.last_index;
      prefetch_row<L, N>(a.x + *ahead * a.width, columns);
      const T* x = a.x + a.indices[e] * a.width;
      const T weight = kSum ? a.weight[e] : T{0};
      Vector<T, L> product{};
#pragma GCC unroll 16
      for (int i = 0; i < N; ++i) {
        const Vector<T, L> value = load<L>(x + column_of<L, N>(i, columns));
        if (kSum) sum[i] += value * weight;
        if (kDot) product += value * own[i];
      }
      if (kDot) a.dots[e] += sum_lanes<L, T>(product);
    }
    if (kSum) {
#pragma GCC unroll 16
      for (int i = 0; i < N; ++i) store<L>(a.y + column_of<L, N>(i, columns), sum[i]);
    }
  }

  // The last vector without the lanes that the one before it has already: a dot product counts each column once.
  template <int L, int N>
  static WEFT_INLINE Vector<T, L> without_overlap(Vector<T, L> value, Columns columns) {
    if constexpr (L == 1) {
      return value;
    } else {
      T lanes[L];
      store<L>(lanes, value);
      const int64_t overlap = columns.column + (N - 1) * L - columns.tail;
      for (int64_t lane = 0; lane < overlap; ++lane) lanes[lane] = 0;
      return load<L>(lanes);
    }
  }
};

template <bool kSum, bool kDot, class T, class I>
WEFT_INLINE void visit_chunk(const Chunk<T, I>& chunk, int64_t begin, int64_t end) {
  for_columns<ChunkRows<T, I, kSum, kDot>>(begin, end, [&](auto run, Columns columns) { run(chunk, columns); });
}

template <class T, class I>
void attend_lse(const AttendLse<T, I>& a) {
  for_row_blocks(a.indptr, a.num_targets, a.num_threads, [&](int64_t first_row, int64_t end_row) {
    T logits[kChunk];
    for (int64_t row = first_row; row < end_row; ++row) {
      for (int64_t head = 0; head < a.num_heads; ++head) {
        const T own = a.logit_dst[row * a.num_heads + head];
        T largest = -static_cast<T>(__builtin_inf()), sum = 0;
        const auto add = [&](int64_t count) {
          T most = largest;
#pragma omp simd reduction(max : most)
          for (int64_t e = 0; e < count; ++e) most = logits[e] > most ? logits[e] : most;
          if (most == -static_cast<T>(__builtin_inf())) return;
          T part = 0;
#pragma omp simd reduction(+ : part)
          for (int64_t e = 0; e < count; ++e) part += exponential(logits[e] - most);
          sum = sum * exponential(largest - most) + part;
          largest = most;
        };
        for (int64_t entry = a.indptr[row]; entry < a.indptr[row + 1]; entry += kChunk) {
          const int64_t left = a.indptr[row + 1] - entry, count = left < kChunk ? left : kChunk;
          for (int64_t e = 0; e < count; ++e) {
            logits[e] = leaky_relu(a.logit_src[a.indices[entry + e] * a.num_heads + head] + own, a.slope);
          }
          add(count);
        }
        if (a.loop && a.loop[row]) {
          logits[0] = leaky_relu(a.logit_src[row * a.num_heads + head] + own, a.slope);
          add(1);
        }
        a.lse[row * a.num_heads + head] = sum == 0 ? T{0} : largest + logarithm(sum);
      }
    }
  });
}

template <class T, class I>
void attend_sum(const AttendSum<T, I>& a) {
  const I* last_index = a.indices + a.indptr[a.num_targets] - 1;
  for_row_blocks(a.indptr, a.num_targets, a.num_threads, [&](int64_t first_row, int64_t end_row) {
    T weight[kChunk];
    for (int64_t row = first_row; row < end_row; ++row) {
      T* y = a.y + row * a.width;
      for (int64_t head = 0; head < a.num_heads; ++head) {
        const int64_t at = row * a.num_heads + head;
        const T own = a.logit_dst[at], lse = a.lse[at];
        const int64_t begin = a.bounds[head], end = a.bounds[head + 1];
        for (int64_t column = begin; column < end; ++column) y[column] = 0;
        Chunk<T, I> chunk{};
        chunk.weight = weight;
        chunk.x = a.h;
        chunk.width = a.width;
        chunk.y = y;
        chunk.last_index = last_index;
        for (int64_t entry = a.indptr[row]; entry < a.indptr[row + 1]; entry += kChunk) {
          const int64_t left = a.indptr[row + 1] - entry;
          chunk.count = left < kChunk ? left : kChunk;
          chunk.indices = a.indices + entry;
#pragma omp simd
          for (int64_t e = 0; e < chunk.count; ++e) {
            const T source = a.logit_src[chunk.indices[e] * a.num_heads + head];
            weight[e] = exponential(leaky_relu(source + own, a.slope) - lse);
          }
          visit_chunk<true, false>(chunk, begin, end);
        }
        if (a.loop && a.loop[row]) {
          const T self = exponential(leaky_relu(a.logit_src[at] + own, a.slope) - lse);
          for (int64_t column = begin; column < end; ++column) y[column] += self * a.h[row * a.width + column];
        }
      }
    }
  });
}

template <class T>
void attend_stats(const AttendStats<T>& a) {
#pragma omp parallel for schedule(static) num_threads(a.num_threads)
  for (int64_t row = 0; row < a.num_targets; ++row) {
    for (int64_t head = 0; head < a.num_heads; ++head) {
      T dot = 0;
      if (a.grad_y) {
        const T *grad_y = a.grad_y + row * a.width, *y = a.y + row * a.width;
#pragma omp simd reduction(+ : dot)
        for (int64_t column = a.bounds[head]; column < a.bounds[head + 1]; ++column) dot += grad_y[column] * y[column];
      }
      T* stats = a.stats + row * 3 * a.num_heads + head;
      stats[0] = a.logit_dst[row * a.num_heads + head];
      stats[a.num_heads] = a.lse[row * a.num_heads + head];
      stats[2 * a.num_heads] = dot;
    }
  }
}

// A source and head over a chunk of its out-edges: with alpha the weights and D the stats' dot product, the gradient of
// leaky_relu's argument is alpha (grad_y_v . h_u - D_v) leaky_relu'(argument).
template <class T, class I>
struct SourceHead {
  const AttendBackward<T, I>& a;
  T weight[kChunk], slope[kChunk], total[kChunk], dots[kChunk];

  explicit SourceHead(const AttendBackward<T, I>& args) : a(args) {}

  // Returns the sum of the gradients; leaves each in dots.
  T visit(int64_t source, int64_t head, const I* targets, int64_t count, const I* last_index) {
    const int64_t heads = a.num_heads;
    const T own = a.logit_src[source * heads + head];
#pragma omp simd
    for (int64_t e = 0; e < count; ++e) {
      const T* stats = a.stats + targets[e] * 3 * heads + head;
      const T argument = own + stats[0];
      slope[e] = argument > 0 ? T{1} : a.slope;
      weight[e] = exponential(argument * slope[e] - stats[heads]);
      total[e] = stats[2 * heads];
      dots[e] = 0;
    }
    Chunk<T, I> chunk{};
    chunk.indices = targets;
    chunk.count = count;
    chunk.last_index = last_index;
    chunk.weight = weight;
    chunk.x = a.grad_y;
    chunk.width = a.width;
    chunk.y = a.grad_h ? a.grad_h + source * a.width : nullptr;
    chunk.own = a.h + source * a.width;
    chunk.dots = dots;
    const int64_t begin = a.bounds[head], end = a.bounds[head + 1];
    if (!a.grad_logit_src) {
      visit_chunk<true, false>(chunk, begin, end);
      return 0;
    }
    if (a.grad_h) {
      visit_chunk<true, true>(chunk, begin, end);
    } else {
      visit_chunk<false, true>(chunk, begin, end);
    }
    T sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t e = 0; e < count; ++e) {
      dots[e] = weight[e] * (dots[e] - total[e]) * slope[e];
      sum += dots[e];
    }
    return sum;
  }
};

template <class T, class I>
void attend_backward(const AttendBackward<T, I>& a) {
  const I* last_index = a.indices_t + a.indptr_t[a.num_sources] - 1;
  for_row_blocks(a.indptr_t, a.num_sources, a.num_threads, [&](int64_t first_row, int64_t end_row) {
    SourceHead<T, I> work(a);
    for (int64_t source = first_row; source < end_row; ++source) {
      if (a.grad_h) {
        for (int64_t column = 0; column < a.width; ++column) a.grad_h[source * a.width + column] = 0;
      }
      const int64_t begin = a.indptr_t[source], end = a.indptr_t[source + 1];
      for (int64_t head = 0; head < a.num_heads; ++head) {
        T sum = 0;
        for (int64_t entry = begin; entry < end; entry += kChunk) {
          const int64_t count = end - entry < kChunk ? end - entry : kChunk;
          sum += work.visit(source, head, a.indices_t + entry, count, last_index);
          if (!a.grad_logit_src) continue;
          for (int64_t e = 0; e < count; ++e) {
            T& grad = a.grad_edge[a.edge_ids[entry + e] * a.num_heads + head];
            grad = a.first ? work.dots[e] : grad + work.dots[e];
          }
        }
        if (a.loop && source < a.num_targets && a.loop[source]) {
          const I self = static_cast<I>(source);
          const T grad = work.visit(source, head, &self, 1, &self);
          sum += grad;
          if (a.grad_logit_src) a.grad_logit_dst[source * a.num_heads + head] += grad;
        }
        if (a.grad_logit_src) a.grad_logit_src[source * a.num_heads + head] += sum;
      }
    }
  });
}

template <class T>
void attend_targets(const AttendTargets<T>& a) {
  for_row_blocks(a.indptr, a.num_targets, a.num_threads, [&](int64_t first_row, int64_t end_row) {
    for (int64_t row = first_row; row < end_row; ++row) {
      T* grad = a.grad_logit_dst + row * a.num_heads;
      for (int64_t entry = a.indptr[row]; entry < a.indptr[row + 1]; ++entry) {
        for (int64_t head = 0; head < a.num_heads; ++head) grad[head] += a.grad_edge[entry * a.num_heads + head];
      }
    }
  });
}

}  // namespace weft::WEFT_ISA

// Edge softmax and its weighted sum, forward and backward.
//
// For an edge e from u to v and one head:
//
//   z_e = logit_src_u + logit_dst_v      argument of LeakyReLU, whose slope is s
//   alpha_e                              softmax of leaky_relu(z_e) over the edges into v
//   y_v = sum_e alpha_e h_u              result
//   D_v = grad_y_v . y_v                 the same for all edges into v
//
//   gradient of z_e = alpha_e leaky_relu'(z_e) (grad_y_v . h_u - D_v),   leaky_relu'(z) = s + (1 - s) [z > 0]
//
// To get the gradient of a logit, sum this over the edges of its vertex. The dot products with grad_y_v or h_u then
// need only two sums of rows: one with the weights alpha_e, one with alpha_e [z_e > 0] (`weight` and `positive` in the
// code). The forward and the backward pass therefore use the same loop over rows, and no array has E x H numbers.
//
// Dropout replaces alpha_e by m_e alpha_e in the sums of rows, so the gradient has m_e grad_y_v . h_u. The masks m are
// computed again in the backward pass.
#pragma once

#include "chunk.h"
#include "edge_mask.h"
#include "kernels.h"
#include "softmax.h"

namespace weft::WEFT_ISA {

template <class T>
WEFT_INLINE void scale_columns(T* row, int64_t begin, int64_t end, T factor) {
  for (int64_t column = begin; column < end; ++column) row[column] *= factor;
}

template <class T>
WEFT_INLINE void zero_columns(T* row, int64_t begin, int64_t end) {
  for (int64_t column = begin; column < end; ++column) row[column] = 0;
}

template <class R>
WEFT_INLINE void put_columns(R* row, const Sum<R>* put, int64_t begin, int64_t end) {
  for (int64_t column = begin; column < end; ++column) store<1>(row + column, put[column]);
}

template <class R>
WEFT_INLINE void add_columns(R* row, const Sum<R>* added, int64_t begin, int64_t end) {
  for (int64_t column = begin; column < end; ++column) {
    store<1>(row + column, load<1>(row + column) + added[column]);
  }
}

// The forward pass for targets [first_row, end_row) and one group of heads. kPlus: also compute plus and share, which
// the backward pass needs.
template <bool kPlus, class R, class I>
struct AttendRows {
  using T = Sum<R>;
  const Attend<R, I>& a;
  const Plan<ChunkRows<R, I, kPlus>>& plan;
  const int64_t head = plan.first(), num_heads = plan.num_heads();
  const int64_t* bounds = a.bounds + head;
  Chunk<R, I> chunk{};
  Scratch<T> scratch{kNarrow<R> ? 2 * a.width : 0};  // a row of y and of plus, before rounding to bfloat16
  Softmax<T> softmax;
  EdgeMask mask{a.dropout};
  alignas(64) Weights<T> weight, positive;

  AttendRows(const Attend<R, I>& args, const Plan<ChunkRows<R, I, kPlus>>& columns) : a(args), plan(columns) {
    chunk.weight = &weight;
    chunk.positive = &positive;
    chunk.x = a.h;
    chunk.width = a.width;
  }

  void run(int64_t first_row, int64_t end_row) {
    chunk.last_index = a.indices + a.indptr[a.num_targets] - 1;
    for (int64_t row = first_row; row < end_row; ++row) {
      if constexpr (kNarrow<R>) {
        chunk.y = scratch.numbers;
        chunk.plus = scratch.numbers + a.width;
      } else {
        chunk.y = a.y + row * a.width;
        chunk.plus = kPlus ? a.plus + row * a.width : nullptr;
      }
      chunk.first = true;
      softmax.clear();
      for_chunks(a.indptr, a.indices, row, a.loop && a.loop[row], chunk, [&](bool begins) {
        gather(a.logit_src + head, a.num_heads, num_heads, chunk, weight);
        for (int64_t j = 0; j < num_heads; ++j) {
          if (a.lse_known) {
            know(row, j);
          } else {
            add(row, j);
          }
        }
        if (a.dropout) drop(row, begins);
        plan.run(chunk);
      });
      finish(row);
      if constexpr (kNarrow<R>) {
        put_columns(a.y + row * a.width, chunk.y, bounds[0], bounds[num_heads]);
        if (kPlus) put_columns(a.plus + row * a.width, chunk.plus, bounds[0], bounds[num_heads]);
      }
    }
  }

  // Weights of head j in this chunk, where lse has the denominators already (from an earlier forward pass).
  void know(int64_t row, int64_t j) {
    constexpr int L = kLanes<T>;
    const int64_t at = row * a.num_heads + head + j;
    const T own = load<1>(a.logit_dst + at), lse = a.lse[at];
    for (int64_t e = 0; e < chunk.num_entries(); e += L) {
      const Vector<T, L> argument = load<L>(weight[j] + e) + own;
      const Vector<T, L> alpha = exponential<T, L>(leaky_relu(argument, a.slope) - lse);
      store<L>(weight[j] + e, alpha);
      if (kPlus) store<L>(positive[j] + e, where_positive(argument, alpha));
    }
  }

  void drop(int64_t row, bool begins) {
    if (begins) mask.begin();
    mask.template draw<false>(row, chunk.indices, chunk.count, chunk.own >= 0);
    for (int64_t j = 0; j < num_heads; ++j) {
      mask.drop(head + j, chunk.num_entries(), weight[j], kPlus ? positive[j] : nullptr);
    }
  }

  // Weights of head j in this chunk, relative to the largest logit so far (online softmax). If that has grown, the sums
  // of earlier chunks are scaled down to match.
  void add(int64_t row, int64_t j) {
    const T own = load<1>(a.logit_dst + row * a.num_heads + head + j);
    const T factor = softmax.add(j, own, a.slope, chunk.num_entries(), weight[j], positive[j]);
    if (!chunk.first && factor != 1) scale(j, factor);
  }

  void scale(int64_t j, T factor) {
    scale_columns(chunk.y, bounds[j], bounds[j + 1], factor);
    if (kPlus) scale_columns(chunk.plus, bounds[j], bounds[j + 1], factor);
  }

  void finish(int64_t row) {
    if (chunk.first) {
      zero_columns(chunk.y, bounds[0], bounds[num_heads]);
      if (kPlus) zero_columns(chunk.plus, bounds[0], bounds[num_heads]);
    }
    if (a.lse_known) return;
    for (int64_t j = 0; j < num_heads; ++j) {
      const int64_t at = row * a.num_heads + head + j;
      const bool empty = softmax.sum[j] == 0;
      const T factor = empty ? T{0} : 1 / softmax.sum[j];
      a.lse[at] = empty ? T{0} : softmax.largest[j] + logarithm(softmax.sum[j]);
      if (kPlus) a.share[at] = softmax.share[j] * factor;
      if (!chunk.first) scale(j, factor);
    }
  }
};

// Calls body(plan, first_row, end_row) for each group of heads and block of rows.
template <class Rows, class Body>
void for_groups(const int64_t* bounds, int64_t num_heads, const int64_t* indptr, int64_t num_rows, int num_threads,
                Body body) {
  for (int64_t head = 0; head < num_heads; head += kHeads) {
    const Plan<Rows> plan(bounds, head, head + kHeads < num_heads ? head + kHeads : num_heads);
    for_row_blocks(indptr, num_rows, num_threads, [&](int64_t first, int64_t end) { body(plan, first, end); });
  }
}

template <bool kPlus, class R, class I>
void attend_as(const Attend<R, I>& a) {
  for_groups<ChunkRows<R, I, kPlus>>(
      a.bounds, a.num_heads, a.indptr, a.num_targets, a.num_threads,
      [&](const auto& plan, int64_t first, int64_t end) { AttendRows<kPlus, R, I>(a, plan).run(first, end); });
}

template <class R, class I>
void attend(const Attend<R, I>& a) {
  if (a.plus) return attend_as<true>(a);
  return attend_as<false>(a);
}

template <class R, class X>
Sum<R> dot_columns(const R* a, const X* b, int64_t begin, int64_t end) {
  Sum<R> dot = 0;
#pragma omp simd reduction(+ : dot)
  for (int64_t column = begin; column < end; ++column) dot += load<1>(a + column) * load<1>(b + column);
  return dot;
}

template <class R>
void attend_stats(const AttendStats<R>& a) {
  using T = Sum<R>;
  const int threads = useful_threads(a.num_targets * a.width / 8192 + 1, a.num_threads);
#pragma omp parallel for schedule(static) num_threads(threads)
  for (int64_t row = 0; row < a.num_targets; ++row) {
    for (int64_t head = 0; head < a.num_heads; ++head) {
      const int64_t at = row * a.num_heads + head, begin = a.bounds[head], end = a.bounds[head + 1];
      T dot = 0;
      if (a.grad_y) {
        const R* grad_y = a.grad_y + row * a.width;
        dot = dot_columns(grad_y, a.y + row * a.width, begin, end);
        const T positive = dot_columns(grad_y, a.plus + row * a.width, begin, end);
        // alpha (grad_y . h - dot) sums to zero over the row, so the term with the slope s vanishes. The rest is
        // (1 - s) times the sum over edges with a positive argument.
        a.grad_logit_dst[at] += (1 - a.slope) * (positive - dot * a.share[at]);
      }
      T* stats = a.stats + row * 3 * a.num_heads + head;
      stats[0] = load<1>(a.logit_dst + at);
      stats[a.num_heads] = a.lse[at];
      stats[2 * a.num_heads] = dot;
    }
  }
}

// The backward pass for sources [first_row, end_row) of the transpose and one group of heads. kLogits: also compute the
// gradient of logit_src.
template <bool kLogits, class R, class I>
struct AttendBackwardRows {
  using T = Sum<R>;
  const AttendBackward<R, I>& a;
  const Plan<ChunkRows<R, I, kLogits>>& plan;
  const int64_t head = plan.first(), num_heads = plan.num_heads();
  Chunk<R, I> chunk{};
  Scratch<T> scratch{2 * a.width};  // a row of plus, and of grad_h if that is added to, rounded or not needed
  T dots[kHeads];                   // sum of alpha leaky_relu' D over the row
  EdgeMask mask{a.dropout};
  alignas(64) Weights<T> weight, positive, lse, dot;

  AttendBackwardRows(const AttendBackward<R, I>& args, const Plan<ChunkRows<R, I, kLogits>>& columns)
      : a(args), plan(columns) {
    chunk.weight = &weight;
    chunk.positive = &positive;
    chunk.x = a.grad_y;
    chunk.width = a.width;
    chunk.plus = scratch.numbers + a.width;
  }

  void run(int64_t first_row, int64_t end_row) {
    chunk.last_index = a.indices_t + a.indptr_t[a.num_sources] - 1;
    for (int64_t row = first_row; row < end_row; ++row) {
      const bool loop = a.loop && row < a.num_targets && a.loop[row];
      if (a.add && a.indptr_t[row] == a.indptr_t[row + 1] && !loop) continue;
      if (kLogits) prefetch_row(a.h + row * a.width, a.width);
      if (a.add) prefetch_row(a.grad_h + row * a.width, a.width);
      chunk.y = scratch.numbers;
      if constexpr (!kNarrow<R>) {
        if (a.grad_h && !a.add) chunk.y = a.grad_h + row * a.width;
      }
      chunk.first = true;
      zero_columns(dots, 0, kHeads);
      for_chunks(a.indptr_t, a.indices_t, row, loop, chunk, [&](bool begins) {
        const T* stats = a.stats + head;
        gather(stats, 3 * a.num_heads, num_heads, chunk, weight);
        gather(stats + a.num_heads, 3 * a.num_heads, num_heads, chunk, lse);
        if (kLogits) gather(stats + 2 * a.num_heads, 3 * a.num_heads, num_heads, chunk, dot);
        for (int64_t j = 0; j < num_heads; ++j) weigh(row, j);
        if (a.dropout) drop(row, begins);
        plan.run(chunk);
      });
      finish(row);
    }
  }

  void weigh(int64_t row, int64_t j) {
    constexpr int L = kLanes<T>;
    const T own = load<1>(a.logit_src + row * a.num_heads + head + j);
    Vector<T, L> sum{}, sum_positive{};
    const int64_t count = chunk.num_entries();
    for (int64_t e = count; kLogits && e < padded<T>(count); ++e) dot[j][e] = 0;
    for (int64_t e = 0; e < count; e += L) {
      const Vector<T, L> argument = load<L>(weight[j] + e) + own;
      const Vector<T, L> alpha = exponential<T, L>(leaky_relu(argument, a.slope) - load<L>(lse[j] + e));
      store<L>(weight[j] + e, alpha);
      if (kLogits) {
        const Vector<T, L> kept = where_positive(argument, alpha);
        store<L>(positive[j] + e, kept);
        sum += alpha * load<L>(dot[j] + e);
        sum_positive += kept * load<L>(dot[j] + e);
      }
    }
    if (kLogits) dots[j] += mixed(sum_lanes<L, T>(sum), sum_lanes<L, T>(sum_positive));
  }

  void drop(int64_t row, bool begins) {
    if (begins) mask.begin();
    mask.template draw<true>(row, chunk.indices, chunk.count, chunk.own >= 0);
    for (int64_t j = 0; j < num_heads; ++j) {
      mask.drop(head + j, chunk.num_entries(), weight[j], kLogits ? positive[j] : nullptr);
    }
  }

  // A sum with the factor leaky_relu': s times the sum of all terms, and 1 - s times the sum of those with z > 0.
  T mixed(T all, T positive_ones) const { return a.slope * all + (1 - a.slope) * positive_ones; }

  void finish(int64_t row) {
    const int64_t* bounds = a.bounds + head;
    if (chunk.first) zero_columns(chunk.y, bounds[0], bounds[num_heads]);
    if (a.add) {
      add_columns(a.grad_h + row * a.width, chunk.y, bounds[0], bounds[num_heads]);
    } else if (kNarrow<R> && a.grad_h) {
      put_columns(a.grad_h + row * a.width, chunk.y, bounds[0], bounds[num_heads]);
    }
    if (chunk.first || !kLogits) return;
    const R* h = a.h + row * a.width;
    for (int64_t j = 0; j < num_heads; ++j) {
      const T all = dot_columns(h, chunk.y, bounds[j], bounds[j + 1]);
      const T positive_ones = dot_columns(h, chunk.plus, bounds[j], bounds[j + 1]);
      a.grad_logit_src[row * a.num_heads + head + j] += mixed(all, positive_ones) - dots[j];
    }
  }
};

template <bool kLogits, class R, class I>
void attend_backward_as(const AttendBackward<R, I>& a) {
  for_groups<ChunkRows<R, I, kLogits>>(a.bounds, a.num_heads, a.indptr_t, a.num_sources, a.num_threads,
                                       [&](const auto& plan, int64_t first, int64_t end) {
                                         AttendBackwardRows<kLogits, R, I>(a, plan).run(first, end);
                                       });
}

template <class R, class I>
void attend_backward(const AttendBackward<R, I>& a) {
  if (a.grad_logit_src) return attend_backward_as<true>(a);
  return attend_backward_as<false>(a);
}

}  // namespace weft::WEFT_ISA

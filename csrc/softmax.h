// Attention weights for a chunk of entries: gathers the arguments by head, and updates an online softmax chunk by
// chunk.
#pragma once

#include "chunk.h"
#include "exp.h"

namespace weft::WEFT_ISA {

template <class T>
WEFT_INLINE int64_t padded(int64_t count) {
  return (count + kLanes<T> - 1) / kLanes<T> * kLanes<T>;
}

// into[j][e] = table[indices[e]][j] for the H heads of a group; then the row `own` (the self-loop), unless that is -1.
// The last entry is repeated up to a whole vector. Prefetching stops at indices[left].
template <int H, class R, class I>
void gather_heads(const R* table, int64_t stride, const I* indices, int64_t count, int64_t left, int64_t own,
                  Weights<Sum<R>>& into) {
  for (int64_t e = 0; e < count; ++e) {
    __builtin_prefetch(table + indices[e + kChunk / 2 < left ? e + kChunk / 2 : left] * stride);
    const R* row = table + indices[e] * stride;
    for (int j = 0; j < H; ++j) into[j][e] = load<1>(row + j);
  }
  if (own >= 0) {
    for (int j = 0; j < H; ++j) into[j][count] = load<1>(table + own * stride + j);
    ++count;
  }
  for (int64_t e = count; e < padded<R>(count); ++e) {
    for (int j = 0; j < H; ++j) into[j][e] = into[j][count - 1];
  }
}

template <class R, class X, class I>
void gather(const R* table, int64_t stride, int64_t num_heads, const Chunk<X, I>& chunk, Weights<Sum<R>>& into) {
  using Gather = void (*)(const R*, int64_t, const I*, int64_t, int64_t, int64_t, Weights<Sum<R>>&);
  constexpr Gather gathers[kHeads] = {&gather_heads<1, R, I>, &gather_heads<2, R, I>, &gather_heads<3, R, I>,
                                      &gather_heads<4, R, I>, &gather_heads<5, R, I>, &gather_heads<6, R, I>,
                                      &gather_heads<7, R, I>, &gather_heads<8, R, I>};
  const int64_t left = chunk.last_index - chunk.indices;
  gathers[num_heads - 1](table, stride, chunk.indices, chunk.count, left, chunk.own, into);
}

template <class T>
constexpr T kInfinity = static_cast<T>(__builtin_inf());

template <class V, class T>
WEFT_INLINE V leaky_relu(V x, T slope) {
  const V zero{};
  return x > zero ? x : x * slope;
}

template <class V>
WEFT_INLINE V where_positive(V argument, V value) {
  const V zero{};
  return argument > zero ? value : zero;
}

// The softmax of one target and group of heads over the chunks so far, relative to the largest logit so far.
template <class T>
struct Softmax {
  T largest[kHeads], sum[kHeads], share[kHeads];  // share: the part of sum whose argument is positive

  void clear() {
    for (int j = 0; j < kHeads; ++j) {
      largest[j] = -kInfinity<T>;
      sum[j] = share[j] = 0;
    }
  }

  // Adds a chunk of head j:
  //
  // 1. Compute the logits, leaky_relu(argument + own), and the new largest logit.
  // 2. Compute weight = exp(logit - largest), and `positive`, which is weight where the argument is positive, else 0.
  // 3. Scale the sums of earlier chunks to the new largest logit, and add those of this chunk.
  //
  // On entry, `weight` has the arguments without `own`; from `count` on it repeats an earlier one up to a whole vector,
  // and these weights become zero. Returns the factor of step 3, by which the sums of rows must be scaled as well.
  T add(int64_t j, T own, T slope, int64_t count, T* weight, T* positive) {
    constexpr int L = kLanes<T>;
    using V = Vector<T, L>;
    V most = V{} + largest[j];
    for (int64_t e = 0; e < count; e += L) {
      const V argument = load<L>(weight + e) + own, logit = leaky_relu(argument, slope);
      store<L>(positive + e, argument);
      store<L>(weight + e, logit);
      most = logit > most ? logit : most;
    }
    const T now = max_lanes<L, T>(most), shift = now == -kInfinity<T> ? T{0} : now;
    for (int64_t e = count; e < padded<T>(count); ++e) weight[e] = -kInfinity<T>;
    V part{}, part_share{};
    for (int64_t e = 0; e < count; e += L) {
      const V power = exponential<T, L>(load<L>(weight + e) - shift);
      const V kept = where_positive(load<L>(positive + e), power);
      store<L>(weight + e, power);
      store<L>(positive + e, kept);
      part += power;
      part_share += kept;
    }
    const T factor = largest[j] == now             ? T{1}
                     : largest[j] == -kInfinity<T> ? T{0}
                                                   : exponential<T, 1>(largest[j] - shift);
    sum[j] = sum[j] * factor + sum_lanes<L, T>(part);
    share[j] = share[j] * factor + sum_lanes<L, T>(part_share);
    largest[j] = now;
    return factor;
  }
};

}  // namespace weft::WEFT_ISA

// Dropout of rows, optionally after ReLU. The mask depends only on (key, vertex, column), so that it is the same for
// any number of ranks.
#pragma once

#include "kernels.h"
#include "vectors.h"

namespace weft::WEFT_ISA {

// The finaliser of SplitMix64 (Steele, Lea, Flood 2014), as weft.utils.random.mix64.
WEFT_INLINE uint64_t mix64(uint64_t value) {
  value += 0x9E3779B97F4A7C15u;
  value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9u;
  value = (value ^ (value >> 27)) * 0x94D049BB133111EBu;
  return value ^ (value >> 31);
}

// A 32-bit hash of a column: two rounds of a mixer, with one half of the row's 64-bit word added before each. U is a
// column or a vector of columns, Half is a half or a vector of halves.
template <class Half, class U>
WEFT_INLINE U column_hash(Half low, Half high, U column) {
  U hash = low + column * 0x9E3779B9u;
  hash ^= hash >> 16;
  hash *= 0x21F0AAADu;
  hash ^= hash >> 15;
  hash ^= high;
  hash *= 0x735A2D97u;
  hash ^= hash >> 15;
  return hash;
}

// Returns `value` in lanes where the condition (on 32-bit numbers) holds, else 0.
template <class T, int L, class Condition>
WEFT_INLINE Vector<T, L> where(Condition condition, Vector<T, L> value) {
  const Vector<T, L> zero{};
  if constexpr (L == 1 || sizeof(T) == sizeof(uint32_t)) {
    return condition ? value : zero;
  } else {
    return __builtin_convertvector(condition, Vector<int64_t, L>) ? value : zero;
  }
}

template <class R, bool kRelu>
struct DropoutRow {
  using T = Sum<R>;
  const Dropout<R>& a;
  const R* x;
  R* y;
  uint32_t low, high;

  template <int L>
  WEFT_INLINE void columns(int64_t column) const {
    using U = Vector<uint32_t, L>;
    U number{};
    if constexpr (L > 1) {
      for (int i = 0; i < L; ++i) number[i] = static_cast<uint32_t>(i);
    }
    number += a.first_column + static_cast<uint32_t>(column);
    Vector<T, L> value = load<L>(x + column) * a.scale;
    const Vector<T, L> zero{};
    if (kRelu) value = value < zero ? zero : value;
    store<L>(y + column, where<T, L>(column_hash(low, high, number) >= a.threshold, value));
  }

  // Whole vectors, then one that ends with the row and computes some numbers again.
  template <int L>
  WEFT_INLINE void run() const {
    if constexpr (L > 1) {
      if (a.width < L) return run<L / 2>();
    }
    for (int64_t column = 0; column + L <= a.width; column += L) columns<L>(column);
    if (a.width % L) columns<L>(a.width - L);
  }
};

template <class R, bool kRelu>
void dropout_as(const Dropout<R>& a) {
  const int threads = useful_threads(a.num_rows * a.width / 8192 + 1, a.num_threads);
#pragma omp parallel for schedule(static) num_threads(threads)
  for (int64_t row = 0; row < a.num_rows; ++row) {
    const uint64_t mixed = mix64(a.key ^ static_cast<uint64_t>(a.rows[row]));
    const auto low = static_cast<uint32_t>(mixed), high = static_cast<uint32_t>(mixed >> 32);
    DropoutRow<R, kRelu>{a, a.x + row * a.width, a.y + row * a.width, low, high}.template run<kLanes<R>>();
  }
}

template <class R>
void dropout(const Dropout<R>& a) {
  if (a.relu) return dropout_as<R, true>(a);
  return dropout_as<R, false>(a);
}

// No branch: about half of the numbers are zero, in an unpredictable order.
template <int L, class R>
WEFT_INLINE void relu_dropout_backward_at(const ReluDropoutBackward<R>& a, int64_t i) {
  const Vector<Sum<R>, L> zero{};
  store<L>(a.grad_x + i, load<L>(a.y + i) <= zero ? zero : load<L>(a.grad_y + i) * a.scale);
}

template <class R>
void relu_dropout_backward(const ReluDropoutBackward<R>& a) {
  constexpr int L = kLanes<R>;
  const int64_t num_vectors = a.size / L;
  const int threads = useful_threads(a.size / 8192 + 1, a.num_threads);
#pragma omp parallel for schedule(static) num_threads(threads)
  for (int64_t vector = 0; vector < num_vectors; ++vector) relu_dropout_backward_at<L>(a, vector * L);
  for (int64_t i = num_vectors * L; i < a.size; ++i) relu_dropout_backward_at<1>(a, i);
}

}  // namespace weft::WEFT_ISA

// Dropout whose mask is a function of (key, vertex, column) alone.
#pragma once

#include "kernels.h"
#include "vectors.h"

namespace weft::WEFT_ISA {

// The finaliser of SplitMix64 (Steele, Lea, Flood 2014), as weft.core.random.mix64.
WEFT_INLINE uint64_t mix64(uint64_t value) {
  value += 0x9E3779B97F4A7C15u;
  value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9u;
  value = (value ^ (value >> 27)) * 0x94D049BB133111EBu;
  return value ^ (value >> 31);
}

// Two rounds of a 32-bit mixer, the row's two halves entering before each.
WEFT_INLINE uint32_t column_hash(uint32_t low, uint32_t high, uint32_t column) {
  uint32_t hash = low + column * 0x9E3779B9u;
  hash ^= hash >> 16;
  hash *= 0x21F0AAADu;
  hash ^= hash >> 15;
  hash ^= high;
  hash *= 0x735A2D97u;
  hash ^= hash >> 15;
  return hash;
}

template <class T>
void dropout(const Dropout<T>& a) {
  const int threads = useful_threads(a.num_rows * a.width / 8192 + 1, a.num_threads);
#pragma omp parallel for schedule(static) num_threads(threads)
  for (int64_t row = 0; row < a.num_rows; ++row) {
    const uint64_t mixed = mix64(a.key ^ static_cast<uint64_t>(a.rows[row]));
    const auto low = static_cast<uint32_t>(mixed), high = static_cast<uint32_t>(mixed >> 32);
    const T* x = a.x + row * a.width;
    T* y = a.y + row * a.width;
#pragma omp simd
    for (int64_t column = 0; column < a.width; ++column) {
      const bool keep = column_hash(low, high, a.first_column + static_cast<uint32_t>(column)) >= a.threshold;
      y[column] = keep ? x[column] * a.scale : T{0};
    }
  }
}

}  // namespace weft::WEFT_ISA

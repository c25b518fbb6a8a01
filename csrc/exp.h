// The exponential function of a vector of numbers; with one lane, of a number.
#pragma once

#include <cstdint>

#include "vectors.h"

namespace weft::WEFT_ISA {

// Computes e^x = 2^n e^r:
//
// 1. n = round(x / ln 2). Adding `shift` rounds to an integer and leaves it in the low bits of the sum.
// 2. r = x - n ln 2, so |r| <= ln 2 / 2. ln 2 has two parts, so that n times the first one is exact.
// 3. e^r is a Taylor series, whose degree is high enough for the precision of the type.
// 4. 2^n is built from the bits of n.
//
// Below `smallest`, where results would be subnormal, the result is 0; above `largest` it is infinite. NaN stays NaN.
template <class T>
struct Exponential;

template <>
struct Exponential<float> {
  using Bits = int32_t;
  static constexpr int degree = 7, mantissa_bits = 23, bias = 127;
  static constexpr float shift = 0x1.8p23f, ln2_high = 0x1.62ep-1f, ln2_low = 0x1.0bfbe8p-15f;
  static constexpr float smallest = -87.3f, largest = 88.3f;
};

template <>
struct Exponential<double> {
  using Bits = int64_t;
  static constexpr int degree = 13, mantissa_bits = 52, bias = 1023;
  static constexpr double shift = 0x1.8p52, ln2_high = 0x1.62e42fee0p-1, ln2_low = 0x1.a39ef35793c76p-33;
  static constexpr double smallest = -708.3, largest = 709.0;
};

constexpr double inverse_factorial(int n) { return n < 2 ? 1.0 : inverse_factorial(n - 1) / n; }

template <class T, int L, int kDegree, class V>
WEFT_INLINE V taylor(V r) {
  V sum = V{} + static_cast<T>(inverse_factorial(Exponential<T>::degree));
  if constexpr (kDegree < Exponential<T>::degree)
    sum = taylor<T, L, kDegree + 1>(r) * r + static_cast<T>(inverse_factorial(kDegree));
  return sum;
}

template <class T, int L>
WEFT_INLINE Vector<T, L> exponential(Vector<T, L> x) {
  using E = Exponential<T>;
  using V = Vector<T, L>;
  using Bits = Vector<typename E::Bits, L>;
  const V zero{}, low = zero + E::smallest, high = zero + E::largest, infinite = zero + static_cast<T>(__builtin_inf());
  V clamped = x < low ? low : x;
  clamped = clamped > high ? high : clamped;
  const V shifted = clamped * static_cast<T>(0x1.71547652b82fep0) + E::shift;
  const V n = shifted - E::shift;
  const V r = (clamped - n * E::ln2_high) - n * E::ln2_low;
  Bits bits;
  __builtin_memcpy(&bits, &shifted, sizeof(bits));
  bits = (bits + E::bias) << E::mantissa_bits;
  V power;
  __builtin_memcpy(&power, &bits, sizeof(power));
  const V result = taylor<T, L, 0>(r) * power;
  return x < low ? zero : (x > high ? infinite : result);
}

WEFT_INLINE float logarithm(float x) { return __builtin_logf(x); }
WEFT_INLINE double logarithm(double x) { return __builtin_log(x); }

}  // namespace weft::WEFT_ISA

// The exponential function in a form that compilers turn into vector code.
#pragma once

#include <cstdint>

#include "vectors.h"

namespace weft::WEFT_ISA {

template <class Int, class T>
WEFT_INLINE Int bits_of(T value) {
  Int bits;
  __builtin_memcpy(&bits, &value, sizeof(bits));
  return bits;
}

// e^x = 2^n e^r with n = round(x / ln 2) and |r| <= ln 2 / 2, where the Taylor series is as good as the type. Adding `shift`
// rounds to an integer and leaves it in the low bits. ln 2 is split so that n times its first part is exact. Results that would
// be subnormal are 0; above `largest` the result is infinite; NaN stays NaN.
WEFT_INLINE float exponential(float x) {
  const float shift = 0x1.8p23f, largest = 88.3f, smallest = -87.3f;
  const float clamped = x > largest ? largest : (x < smallest ? smallest : x);
  const float shifted = clamped * 0x1.715476p0f + shift;
  const float n = shifted - shift;
  const float r = (clamped - n * 0x1.62ep-1f) - n * 0x1.0bfbe800p-15f;
  float sum = 1.0f / 5040;
  sum = sum * r + 1.0f / 720;
  sum = sum * r + 1.0f / 120;
  sum = sum * r + 1.0f / 24;
  sum = sum * r + 1.0f / 6;
  sum = sum * r + 0.5f;
  sum = sum * r + 1.0f;
  sum = sum * r + 1.0f;
  const uint32_t power = (bits_of<uint32_t>(shifted) + 127) << 23;
  const float result = sum * bits_of<float>(power);
  return x < smallest ? 0.0f : (x > largest ? __builtin_inff() : result);
}

WEFT_INLINE double exponential(double x) {
  const double shift = 0x1.8p52, largest = 709.0, smallest = -708.3;
  const double clamped = x > largest ? largest : (x < smallest ? smallest : x);
  const double shifted = clamped * 0x1.71547652b82fep0 + shift;
  const double n = shifted - shift;
  const double r = (clamped - n * 0x1.62e42fee0p-1) - n * 0x1.a39ef35793c76p-33;
  double sum = 1.0 / 6227020800;
  sum = sum * r + 1.0 / 479001600;
  sum = sum * r + 1.0 / 39916800;
  sum = sum * r + 1.0 / 3628800;
  sum = sum * r + 1.0 / 362880;
  sum = sum * r + 1.0 / 40320;
  sum = sum * r + 1.0 / 5040;
  sum = sum * r + 1.0 / 720;
  sum = sum * r + 1.0 / 120;
  sum = sum * r + 1.0 / 24;
  sum = sum * r + 1.0 / 6;
  sum = sum * r + 0.5;
  sum = sum * r + 1.0;
  sum = sum * r + 1.0;
  const uint64_t power = (bits_of<uint64_t>(shifted) + 1023) << 52;
  const double result = sum * bits_of<double>(power);
  return x < smallest ? 0.0 : (x > largest ? __builtin_inf() : result);
}

WEFT_INLINE float logarithm(float x) { return __builtin_logf(x); }
WEFT_INLINE double logarithm(double x) { return __builtin_log(x); }

}  // namespace weft::WEFT_ISA

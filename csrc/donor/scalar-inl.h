// The donor codec's own inner loops in plain C++: the scalar twin, and bodies that the compiler vectorises for others.
// Included by donor/dispatch.h only.
#pragma once

#include "donor/kernels.h"

namespace kvstore::donor {

KVSTORE_INLINE std::uint16_t or_zero(std::uint16_t x) {
  return (x & 0x7f80) == 0x7f80 ? std::uint16_t{0} : x;
}

KVSTORE_INLINE void finite_body(const std::uint16_t* x, std::size_t width, std::uint16_t* __restrict mu) {
  for (std::size_t j = 0; j < width; ++j) mu[j] = or_zero(x[j]);
}

// A number of exponent `e` with 14 binary places at the exponent `top`, rounded down.
KVSTORE_INLINE int fixed(int x, int e, int top) {
  const int mantissa = e == 0 ? 0 : (128 | (x & 127)) << 6;
  const int shift = top - e < 31 ? top - e : 31;
  return (x & 0x8000 ? -mantissa : mantissa) >> shift;
}

KVSTORE_INLINE void turn_body(const std::uint16_t* x, std::size_t half, const std::int16_t* cos,
                              const std::int16_t* sin, std::uint16_t* __restrict mu) {
  for (std::size_t j = 0; j < half; ++j) {
    const int one = or_zero(x[j]), two = or_zero(x[half + j]), e = one >> 7 & 255, f = two >> 7 & 255;
    const int larger = e > f ? e : f, top = larger > kLeastExponent ? larger : kLeastExponent;
    const int a = fixed(one, e, top), b = fixed(two, f, top), c = cos[j], s = sin[j];
    const float scale = as_float(static_cast<std::uint32_t>(top - 27) << 23);
    mu[j] = or_zero(upper(static_cast<float>(a * c - b * s) * scale));
    mu[half + j] = or_zero(upper(static_cast<float>(b * c + a * s) * scale));
  }
}

KVSTORE_INLINE void add_body(const std::uint16_t* delta, const std::uint16_t* from, float scale, std::size_t width,
                             std::uint16_t* __restrict mu) {
  for (std::size_t j = 0; j < width; ++j) mu[j] = upper(number(from[j]) + number(or_zero(delta[j])) * scale);
}

KVSTORE_INLINE void subtract_body(const std::uint16_t* x, const std::uint16_t* from, float scale, std::size_t width,
                                  std::uint16_t* __restrict d) {
  for (std::size_t j = 0; j < width; ++j) d[j] = upper((number(x[j]) - number(from[j])) * scale);
}

KVSTORE_INLINE void measure_body(const std::uint16_t* x, const std::uint16_t* mu, float weight, std::size_t width,
                                 float* __restrict totals) {
  for (std::size_t j = 0; j < width; ++j) {
    const float d = number(x[j]) - number(mu[j]);
    const std::uint32_t bits = bits_of(d) & 0x7fffffff;
    totals[j] += as_float(bits >= 0x7f800000 ? 0 : bits) * weight;
  }
}

#define KVSTORE_DONOR_TWIN(NAME, TARGET)                                                                               \
  namespace NAME {                                                                                                     \
  TARGET inline void finite(const std::uint16_t* x, std::size_t width, std::uint16_t* mu) {                            \
    finite_body(x, width, mu);                                                                                         \
  }                                                                                                                    \
  TARGET inline void turn(const std::uint16_t* x, std::size_t half, const std::int16_t* cos, const std::int16_t* sin,  \
                          std::uint16_t* mu) {                                                                         \
    turn_body(x, half, cos, sin, mu);                                                                                  \
  }                                                                                                                    \
  TARGET inline void add(const std::uint16_t* delta, const std::uint16_t* from, float scale, std::size_t width,        \
                         std::uint16_t* mu) {                                                                          \
    add_body(delta, from, scale, width, mu);                                                                           \
  }                                                                                                                    \
  TARGET inline void subtract(const std::uint16_t* x, const std::uint16_t* from, float scale, std::size_t width,       \
                              std::uint16_t* d) {                                                                      \
    subtract_body(x, from, scale, width, d);                                                                           \
  }                                                                                                                    \
  TARGET inline void measure(const std::uint16_t* x, const std::uint16_t* mu, float weight, std::size_t width,         \
                             float* totals) {                                                                          \
    measure_body(x, mu, weight, width, totals);                                                                        \
  }                                                                                                                    \
  inline constexpr Kernels kKernels = {finite, turn, add, subtract, measure};                                          \
  }

}  // namespace kvstore::donor

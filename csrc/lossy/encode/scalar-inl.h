// The loops of the lossy mode's encoder in plain C++; the bodies of most serve the other twins, too. Included by
// lossy/encode/dispatch.h only.
#pragma once

#include "common/floats.h"
#include "lossy/encode/kernels.h"

namespace kvstore::lossy {

KVSTORE_INLINE void straighten_body(const std::uint16_t* bits, std::size_t width, const Turn& turn,
                                    float* __restrict x) {
  const std::size_t half = turn.half;
  if (half == 0) {
    for (std::size_t j = 0; j < width; ++j) x[j] = widened(bits[j]);
    return;
  }
  const float *cos = turn.cos, *sin = turn.sin;
  for (std::size_t head = 0; head < width; head += 2 * half, x += 2 * half, bits += 2 * half) {
    for (std::size_t j = 0; j < half; ++j) {
      const float a = widened(bits[j]), b = widened(bits[half + j]);
      x[j] = a * cos[j] + b * sin[j];
      x[half + j] = b * cos[j] - a * sin[j];
    }
  }
}

KVSTORE_INLINE void residual_body(const Part& part, const float* x, const std::int32_t* sums, double* __restrict to) {
  const float *bias = part.bias.data(), *out = part.out.data();
  const std::size_t width = part.sums.width;
  for (std::size_t j = 0; j < width; ++j) {
    const float mu = (static_cast<float>(sums[j]) + bias[j]) * out[j];
    to[j] = static_cast<double>(x[j] - mu);
  }
}

KVSTORE_INLINE float largest_body(const std::uint16_t* a, const std::uint16_t* b, std::size_t width, float least) {
  std::uint32_t most = bits_of(least);  // of numbers without a sign bits are in the same order
  for (std::size_t j = 0; j < width; ++j) {
    const std::uint32_t off = bits_of(widened(a[j]) - widened(b[j])) & 0x7fffffff;
    most = off > most ? off : most;
  }
  return as_float(most);
}

KVSTORE_INLINE void in_steps_body(const double* __restrict a, std::size_t width, float step, float* __restrict y) {
  const double by = step;
  for (std::size_t k = 0; k < width; ++k) y[k] = static_cast<float>(a[k] / by);
}

// Eight sums beside each other, which vectors hold.
KVSTORE_INLINE double folded(const double* sums) {
  return ((sums[0] + sums[4]) + (sums[2] + sums[6])) + ((sums[1] + sums[5]) + (sums[3] + sums[7]));
}

KVSTORE_INLINE double lost_body(const float* y, const float* found, std::size_t width, float step) {
  const double by = step;
  double sums[kWide] = {};
  std::size_t k = 0;
  for (; k + kWide <= width; k += kWide) {
    for (std::size_t i = 0; i < kWide; ++i) {
      const double e = (static_cast<double>(y[k + i]) - static_cast<double>(found[k + i])) * by;
      sums[i] += e * e;
    }
  }
  for (std::size_t i = 0; k + i < width; ++i) {
    const double e = (static_cast<double>(y[k + i]) - static_cast<double>(found[k + i])) * by;
    sums[i] += e * e;
  }
  return folded(sums);
}

KVSTORE_INLINE double dot_body(const float* a, const float* b, std::size_t width) {
  double sums[kWide] = {};
  std::size_t k = 0;
  for (; k + kWide <= width; k += kWide)
    for (std::size_t i = 0; i < kWide; ++i) sums[i] += static_cast<double>(a[k + i]) * static_cast<double>(b[k + i]);
  for (std::size_t i = 0; k + i < width; ++i) sums[i] += static_cast<double>(a[k + i]) * static_cast<double>(b[k + i]);
  return folded(sums);
}

KVSTORE_INLINE void round_exactly_body(const Part& part, const std::int32_t* sums, const double* added,
                                       const Turn& turn, double* __restrict x, std::uint16_t* __restrict bits) {
  const std::size_t width = part.sums.width, half = turn.half;
  const float *bias = part.bias.data(), *out = part.out.data(), *unit = part.unit.data();
  for (std::size_t j = 0; j < width; ++j) {
    const float mu = (static_cast<float>(sums[j]) + bias[j]) * out[j];
    x[j] = static_cast<double>(mu) + added[j] * static_cast<double>(unit[j]);
  }
  if (half == 0) {
    for (std::size_t j = 0; j < width; ++j) bits[j] = rounded_bits(static_cast<float>(x[j]));
    return;
  }
  const float *cos = turn.cos, *sin = turn.sin;
  for (std::size_t head = 0; head < width; head += 2 * half, x += 2 * half, bits += 2 * half) {
    for (std::size_t j = 0; j < half; ++j) {
      const double a = x[j], b = x[half + j], c = cos[j], s = sin[j];
      bits[j] = rounded_bits(static_cast<float>(a * c - b * s));
      bits[half + j] = rounded_bits(static_cast<float>(b * c + a * s));
    }
  }
}

namespace scalar {

template <class T>
inline void multiply(const Factor<T>& by, const double* from, std::size_t width, double* to) {
  for (std::size_t at = 0; at < kTile * by.stride; ++at) to[at] = 0;
  for (std::size_t i = 0; i < by.count; ++i) {
    const std::size_t k = by.which == nullptr ? i : by.which[i];
    const T* const row = by.rows + k * by.stride;
    for (std::size_t r = 0; r < kTile; ++r) {
      const double x = from[r * width + k];
      double* const sum = to + r * by.stride;
      for (std::size_t c = 0; c < by.stride; ++c) sum[c] += x * static_cast<double>(row[c]);
    }
  }
}

inline void straighten(const std::uint16_t* bits, std::size_t width, const Turn& turn, float* x) {
  straighten_body(bits, width, turn, x);
}

inline void residual(const Part& part, const float* x, const std::int32_t* sums, double* to) {
  residual_body(part, x, sums, to);
}

inline float largest(const std::uint16_t* a, const std::uint16_t* b, std::size_t width, float least) {
  return largest_body(a, b, width, least);
}

inline void in_steps(const double* a, std::size_t width, float step, float* y) { in_steps_body(a, width, step, y); }

inline double lost(const float* y, const float* found, std::size_t width, float step) {
  return lost_body(y, found, width, step);
}

inline double dot(const float* a, const float* b, std::size_t width) { return dot_body(a, b, width); }

inline void round_exactly(const Part& part, const std::int32_t* sums, const double* added, const Turn& turn,
                          double* room, std::uint16_t* bits) {
  round_exactly_body(part, sums, added, turn, room, bits);
}

inline constexpr Encoding kEncoding = {multiply<float>, multiply<std::int8_t>, straighten, residual, in_steps, lost,
                                       dot, round_exactly, largest};

}  // namespace scalar
}  // namespace kvstore::lossy

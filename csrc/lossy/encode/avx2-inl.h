// The loops of the lossy mode's encoder with AVX2: products by hand, the rest as the compiler vectorises it.
// Included by lossy/encode/dispatch.h only.
#pragma once

#if defined(__x86_64__)
#include <cstring>

#include "common/intrinsics_begin.h"
#include "lossy/encode/scalar-inl.h"

namespace kvstore::lossy::avx2 {

KVSTORE_AVX2 inline __m256d four(const float* from) { return _mm256_cvtps_pd(_mm_loadu_ps(from)); }

KVSTORE_AVX2 inline __m256d four(const std::int8_t* from) {
  std::int32_t bytes;
  std::memcpy(&bytes, from, sizeof bytes);
  return _mm256_cvtepi32_pd(_mm_cvtepi8_epi32(_mm_cvtsi32_si128(bytes)));
}

// Four columns times COLUMNS of half a tile, so that all sums stay in registers.
template <std::size_t COLUMNS, class T>
KVSTORE_AVX2 inline void columns(const Factor<T>& by, const double* from, std::size_t width, std::size_t begin,
                                 double* to) {
  constexpr std::size_t rows = kTile / 2;
  __m256d total[rows][COLUMNS];
  for (std::size_t r = 0; r < rows; ++r)
    for (std::size_t c = 0; c < COLUMNS; ++c) total[r][c] = _mm256_setzero_pd();
  for (std::size_t i = 0; i < by.count; ++i) {
    const std::size_t k = by.which == nullptr ? i : by.which[i];
    __m256d row[COLUMNS];
    for (std::size_t c = 0; c < COLUMNS; ++c) row[c] = four(by.rows + k * by.stride + begin + 4 * c);
    for (std::size_t r = 0; r < rows; ++r) {
      const __m256d x = _mm256_broadcast_sd(from + r * width + k);
      for (std::size_t c = 0; c < COLUMNS; ++c) total[r][c] = _mm256_add_pd(total[r][c], _mm256_mul_pd(x, row[c]));
    }
  }
  for (std::size_t r = 0; r < rows; ++r)
    for (std::size_t c = 0; c < COLUMNS; ++c) _mm256_storeu_pd(to + r * by.stride + begin + 4 * c, total[r][c]);
}

template <class T>
KVSTORE_AVX2 inline void multiply(const Factor<T>& by, const double* from, std::size_t width, double* to) {
  for (std::size_t row = 0; row < kTile; row += kTile / 2) {
    const double* const x = from + row * width;
    double* const out = to + row * by.stride;
    std::size_t begin = 0;
    for (; begin + 12 <= by.stride; begin += 12) columns<3>(by, x, width, begin, out);
    for (; begin < by.stride; begin += 4) columns<1>(by, x, width, begin, out);
  }
}

KVSTORE_AVX2 inline void straighten(const std::uint16_t* bits, std::size_t width, const Turn& turn, float* x) {
  straighten_body(bits, width, turn, x);
}

KVSTORE_AVX2 inline void residual(const Part& part, const float* x, const std::int32_t* sums, double* to) {
  residual_body(part, x, sums, to);
}

KVSTORE_AVX2 inline void in_steps(const double* a, std::size_t width, float step, float* y) {
  in_steps_body(a, width, step, y);
}

KVSTORE_AVX2 inline double lost(const float* y, const float* found, std::size_t width, float step) {
  return lost_body(y, found, width, step);
}

KVSTORE_AVX2 inline double dot(const float* a, const float* b, std::size_t width) { return dot_body(a, b, width); }

KVSTORE_AVX2 inline void round_exactly(const Part& part, const std::int32_t* sums, const double* added,
                                       const Turn& turn, double* room, std::uint16_t* bits) {
  round_exactly_body(part, sums, added, turn, room, bits);
}

KVSTORE_AVX2 inline float largest(const std::uint16_t* a, const std::uint16_t* b, std::size_t width, float least) {
  return largest_body(a, b, width, least);
}

inline constexpr Encoding kEncoding = {multiply<float>, multiply<std::int8_t>, straighten, residual, in_steps, lost,
                                       dot, round_exactly, largest};

}  // namespace kvstore::lossy::avx2

#include "common/intrinsics_end.h"
#endif

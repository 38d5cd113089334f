// The loops of the lossy mode's encoder with AVX-512: products by hand, the rest as the compiler vectorises it.
// Included by lossy/encode/dispatch.h only.
#pragma once

#if defined(__x86_64__)
#include "common/intrinsics_begin.h"
#include "lossy/encode/scalar-inl.h"

namespace kvstore::lossy::avx512 {

KVSTORE_AVX512 inline __m512d eight(const float* from) { return _mm512_cvtps_pd(_mm256_loadu_ps(from)); }

KVSTORE_AVX512 inline __m512d eight(const std::int8_t* from) {
  const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(from));
  return _mm512_cvtepi32_pd(_mm256_cvtepi8_epi32(bytes));
}

template <std::size_t COLUMNS, class T>
KVSTORE_AVX512 inline void columns(const Factor<T>& by, const double* from, std::size_t width, std::size_t begin,
                                   double* to) {
  __m512d total[kTile][COLUMNS];
  for (std::size_t r = 0; r < kTile; ++r)
    for (std::size_t c = 0; c < COLUMNS; ++c) total[r][c] = _mm512_setzero_pd();
  for (std::size_t i = 0; i < by.count; ++i) {
    const std::size_t k = by.which == nullptr ? i : by.which[i];
    __m512d row[COLUMNS];
    for (std::size_t c = 0; c < COLUMNS; ++c) row[c] = eight(by.rows + k * by.stride + begin + 8 * c);
    for (std::size_t r = 0; r < kTile; ++r) {
      const __m512d x = _mm512_set1_pd(from[r * width + k]);
      for (std::size_t c = 0; c < COLUMNS; ++c) total[r][c] = _mm512_fmadd_pd(x, row[c], total[r][c]);
    }
  }
  for (std::size_t r = 0; r < kTile; ++r)
    for (std::size_t c = 0; c < COLUMNS; ++c) _mm512_storeu_pd(to + r * by.stride + begin + 8 * c, total[r][c]);
}

template <class T>
KVSTORE_AVX512 inline void multiply(const Factor<T>& by, const double* from, std::size_t width, double* to) {
  std::size_t begin = 0;
  for (; begin + 24 <= by.stride; begin += 24) columns<3>(by, from, width, begin, to);
  for (; begin < by.stride; begin += 8) columns<1>(by, from, width, begin, to);
}

KVSTORE_AVX512_WIDE inline void straighten(const std::uint16_t* bits, std::size_t width, const Turn& turn, float* x) {
  straighten_body(bits, width, turn, x);
}

KVSTORE_AVX512_WIDE inline void residual(const Part& part, const float* x, const std::int32_t* sums, double* to) {
  residual_body(part, x, sums, to);
}

KVSTORE_AVX512_WIDE inline void in_steps(const double* a, std::size_t width, float step, float* y) {
  in_steps_body(a, width, step, y);
}

KVSTORE_AVX512_WIDE inline double lost(const float* y, const float* found, std::size_t width, float step) {
  return lost_body(y, found, width, step);
}

KVSTORE_AVX512_WIDE inline double dot(const float* a, const float* b, std::size_t width) {
  return dot_body(a, b, width);
}

KVSTORE_AVX512_WIDE inline void round_exactly(const Part& part, const std::int32_t* sums, const double* added,
                                              const Turn& turn, double* room, std::uint16_t* bits) {
  round_exactly_body(part, sums, added, turn, room, bits);
}

KVSTORE_AVX512_WIDE inline float largest(const std::uint16_t* a, const std::uint16_t* b, std::size_t width,
                                         float least) {
  return largest_body(a, b, width, least);
}

inline constexpr Encoding kEncoding = {multiply<float>, multiply<std::int8_t>, straighten, residual, in_steps, lost,
                                       dot, round_exactly, largest};

}  // namespace kvstore::lossy::avx512

#include "common/intrinsics_end.h"
#endif

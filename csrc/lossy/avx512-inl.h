// The loops of the lossy mode's decoder with AVX-512: values by hand, the rest is AVX2's. Included by
// lossy/dispatch.h only.
#pragma once

#if defined(__x86_64__)
#include "common/intrinsics_begin.h"
#include "lossy/avx2-inl.h"
#include "lossy/scalar-inl.h"

namespace kvstore::lossy::avx512 {

template <std::size_t COLUMNS>
KVSTORE_AVX512 inline void some(const Part& part, const Components& found, std::size_t panel, const std::int32_t* sums,
                                float* x) {
  const std::size_t padded = part.sums.padded, width = part.sums.width;
  const std::int8_t* const basis = part.basis.data() + panel * width;
  __m512 total[kTile][COLUMNS];
  for (std::size_t r = 0; r < kTile; ++r)
    for (std::size_t c = 0; c < COLUMNS; ++c) total[r][c] = _mm512_setzero_ps();
  for (std::size_t i = 0; i < found.count; ++i) {
    const std::size_t k = found.which[i];
    const float* const y = found.tile + k;
    __m512 from[COLUMNS];
    for (std::size_t c = 0; c < COLUMNS; ++c) {
      const void* bytes = basis + (k * COLUMNS + c) * kVector;
      from[c] = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(static_cast<const __m128i*>(bytes))));
    }
    for (std::size_t r = 0; r < kTile; ++r)
      for (std::size_t c = 0; c < COLUMNS; ++c)
        total[r][c] = _mm512_fmadd_ps(_mm512_set1_ps(y[r * width]), from[c], total[r][c]);
  }
  for (std::size_t c = 0; c < COLUMNS; ++c) {
    const std::size_t column = panel + kVector * c;
    const __m512 unit = _mm512_loadu_ps(part.unit.data() + column), out = _mm512_loadu_ps(part.out.data() + column);
    const __m512 bias = _mm512_loadu_ps(part.bias.data() + column);
    for (std::size_t r = 0; r < kTile; ++r) {
      const __m512 sum = _mm512_cvtepi32_ps(_mm512_loadu_si512(sums + r * padded + column));
      const __m512 mu = _mm512_mul_ps(_mm512_add_ps(sum, bias), out);
      _mm512_storeu_ps(x + r * padded + column, _mm512_fmadd_ps(total[r][c], unit, mu));
    }
  }
}

KVSTORE_AVX512 inline void values(const Part& part, const Components& found, const std::int32_t* sums, float* x) {
  for (std::size_t panel = 0; panel < part.sums.padded; panel += kPanel) {
    switch ((part.sums.padded - panel) / kVector) {
      case 1: some<1>(part, found, panel, sums, x); break;
      case 2: some<2>(part, found, panel, sums, x); break;
      default: some<3>(part, found, panel, sums, x);
    }
  }
}

// With FMA, which the compiler would use, values would be rounded otherwise than by the other twins.
inline constexpr Kernels kKernels = {avx2::scale, values, avx2::round};

}  // namespace kvstore::lossy::avx512

#include "common/intrinsics_end.h"
#endif

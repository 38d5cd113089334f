// The loops of the lossy mode's decoder with AVX2: values by hand, the rest as the compiler vectorises it. Included by
// lossy/dispatch.h only.
#pragma once

#if defined(__x86_64__)
#include "common/intrinsics_begin.h"
#include "lossy/scalar-inl.h"

namespace kvstore::lossy::avx2 {

constexpr std::size_t kLanes = 8;
constexpr std::size_t kRows = 4;  // half a tile, so that all sums stay in registers

template <std::size_t COLUMNS>
KVSTORE_AVX2 inline void some(const Part& part, const Components& found, std::size_t panel, std::size_t wide,
                              std::size_t begin, std::size_t row, const std::int32_t* sums, float* x) {
  const std::size_t padded = part.sums.padded, width = part.sums.width, at = panel + begin;
  const std::int8_t* const basis = part.basis.data() + panel * width + begin;
  __m256 total[kRows][COLUMNS];
  for (std::size_t r = 0; r < kRows; ++r)
    for (std::size_t c = 0; c < COLUMNS; ++c) total[r][c] = _mm256_setzero_ps();
  for (std::size_t i = 0; i < found.count; ++i) {
    const std::size_t k = found.which[i];
    __m256 from[COLUMNS];
    for (std::size_t c = 0; c < COLUMNS; ++c) {
      const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(basis + k * wide + kLanes * c));
      from[c] = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes));
    }
    for (std::size_t r = 0; r < kRows; ++r) {
      const __m256 y = _mm256_broadcast_ss(found.tile + (row + r) * width + k);
      for (std::size_t c = 0; c < COLUMNS; ++c)
        total[r][c] = _mm256_add_ps(total[r][c], _mm256_mul_ps(y, from[c]));
    }
  }
  for (std::size_t c = 0; c < COLUMNS; ++c) {
    const std::size_t column = at + kLanes * c;
    const __m256 unit = _mm256_loadu_ps(part.unit.data() + column), out = _mm256_loadu_ps(part.out.data() + column);
    const __m256 bias = _mm256_loadu_ps(part.bias.data() + column);
    for (std::size_t r = 0; r < kRows; ++r) {
      const std::size_t to = (row + r) * padded + column;
      const __m256 sum = _mm256_cvtepi32_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(sums + to)));
      const __m256 mu = _mm256_mul_ps(_mm256_add_ps(sum, bias), out);
      _mm256_storeu_ps(x + to, _mm256_add_ps(mu, _mm256_mul_ps(total[r][c], unit)));
    }
  }
}

KVSTORE_AVX2 inline void values(const Part& part, const Components& found, const std::int32_t* sums, float* x) {
  const std::size_t padded = part.sums.padded;
  for (std::size_t panel = 0; panel < padded; panel += kPanel) {
    const std::size_t wide = padded - panel < kPanel ? padded - panel : kPanel;
    for (std::size_t row = 0; row < kTile; row += kRows) {
      std::size_t begin = 0;
      for (; begin + 3 * kLanes <= wide; begin += 3 * kLanes) some<3>(part, found, panel, wide, begin, row, sums, x);
      for (; begin < wide; begin += kLanes) some<1>(part, found, panel, wide, begin, row, sums, x);
    }
  }
}

KVSTORE_AVX2 inline void scale(float* tile, const float* component, std::size_t width, const float* steps,
                               std::uint32_t* any) {
  scale_body(tile, component, width, steps, any);
}

KVSTORE_AVX2 inline void round(const float* x, std::size_t width, const Turn& turn, std::uint16_t* bits) {
  round_body(x, width, turn, bits);
}

inline constexpr Kernels kKernels = {scale, values, round};

}  // namespace kvstore::lossy::avx2

#include "common/intrinsics_end.h"
#endif

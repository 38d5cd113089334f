// AVX2 twins of the predictive codec's loops: sums and bins by hand, the rest as the compiler vectorises it. Included
// by predictive/dispatch.h only.
#pragma once

#if defined(__x86_64__)
#include "common/intrinsics_begin.h"
#include "predictive/avx2-axis-inl.h"
#include "predictive/scalar-inl.h"

namespace kvstore::predict::avx2 {

using Input = std::uint16_t;  // inputs are widened once, where they are made
constexpr std::size_t kColumns = 8;

// ROWS tokens of 8 columns. A vector has 4 columns: of each, the products of two inputs and of two more.
template <int ROWS>
KVSTORE_AVX2 inline void sum_tile(const Part& part, const std::int8_t* w, std::size_t step, const std::int32_t* bias,
                                  const Inputs& inputs, std::size_t row, std::int32_t* sums) {
  __m256i total[ROWS][2];
  for (int r = 0; r < ROWS; ++r) total[r][0] = total[r][1] = _mm256_setzero_si256();
  const std::size_t parts = part.inputs.size();
  for (std::size_t i = 0; i < parts; ++i) {
    const std::size_t stride = inputs.stride[i];
    const std::uint8_t* q = inputs.rows[i] + row * stride;
    for (std::size_t group = part.groups[i]; group != 0; --group, q += kGroup * sizeof(Input), w += step) {
      const __m256i one = _mm256_cvtepi8_epi16(_mm_load_si128(reinterpret_cast<const __m128i*>(w)));
      const __m256i two = _mm256_cvtepi8_epi16(_mm_load_si128(reinterpret_cast<const __m128i*>(w + 16)));
      for (int r = 0; r < ROWS; ++r) {
        long long four;
        std::memcpy(&four, q + r * stride, sizeof four);
        const __m256i in = _mm256_set1_epi64x(four);
        total[r][0] = _mm256_add_epi32(total[r][0], _mm256_madd_epi16(in, one));
        total[r][1] = _mm256_add_epi32(total[r][1], _mm256_madd_epi16(in, two));
      }
    }
  }
  const __m256i first = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(bias));
  for (int r = 0; r < ROWS; ++r) {
    const __m256i mixed = _mm256_hadd_epi32(total[r][0], total[r][1]);  // 0 1 4 5 2 3 6 7
    const __m256i sum = _mm256_add_epi32(first, _mm256_permute4x64_epi64(mixed, _MM_SHUFFLE(3, 1, 2, 0)));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(sums + r * part.padded), sum);
  }
}

KVSTORE_AVX2 inline void sums(const Part& part, const std::int8_t* weight, const Inputs& inputs, std::size_t n,
                              std::int32_t* sums) {
  for (std::size_t column = 0; column < part.padded; column += kColumns) {
    const std::size_t panel = column / kPanel * kPanel;
    const std::size_t wide = part.padded - panel < kPanel ? part.padded - panel : kPanel;
    const std::int8_t* const w = weight + (panel * part.depth + column - panel) * kGroup;
    const std::int32_t* const bias = part.bias.data() + column;
    std::int32_t* const to = sums + column;
    std::size_t t = 0;
    for (; t + 6 <= n; t += 6) sum_tile<6>(part, w, wide * kGroup, bias, inputs, t, to + t * part.padded);
    if (t + 4 <= n) {
      sum_tile<4>(part, w, wide * kGroup, bias, inputs, t, to + t * part.padded);
      t += 4;
    }
    for (; t < n; ++t) sum_tile<1>(part, w, wide * kGroup, bias, inputs, t, to + t * part.padded);
  }
}

KVSTORE_AVX2 inline void predict(const Part& part, const std::int32_t* sums, const Angles& angles, std::uint16_t* mu) {
  predict_body(part, sums, angles, mu);
}

KVSTORE_AVX2 inline void inputs(const Part& part, const std::uint16_t* x, const Angles& angles, std::uint8_t* q) {
  inputs_body<Input>(part, x, angles, q);
}

inline constexpr Kernels kKernels = {sizeof(Input), sums, predict, classes, split, join, inputs, check};

}  // namespace kvstore::predict::avx2

#include "common/intrinsics_end.h"
#endif

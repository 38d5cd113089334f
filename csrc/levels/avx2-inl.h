// AVX2 twins of the loops of the levels: the sums by hand, the rest as the compiler vectorises it. Included by
// levels/dispatch.h only.
#pragma once

#if defined(__x86_64__)
#include "common/intrinsics_begin.h"
#include "levels/scalar-inl.h"

namespace kvstore::levels::avx2 {

constexpr int kVectors = 4;  // of four columns: of each, the products of two inputs and of two more

// Adds the products of a tile of inputs to the sums of ROWS rows of a group.
template <int ROWS>
KVSTORE_AVX2 KVSTORE_INLINE void add_tile(const std::uint8_t* q, const std::int8_t* w, std::size_t step,
                                          __m256i (&total)[ROWS][kVectors]) {
  for (std::size_t k = 0; k < kSteps; ++k, q += 4, w += step) {
    __m256i in[ROWS];
    for (int r = 0; r < ROWS; ++r) {
      std::int32_t four;
      std::memcpy(&four, q + static_cast<std::size_t>(r) * kColumns, sizeof four);
      in[r] = _mm256_broadcastq_epi64(_mm_cvtepu8_epi16(_mm_cvtsi32_si128(four)));
    }
    for (int v = 0; v < kVectors; ++v) {
      const __m256i weights = _mm256_cvtepi8_epi16(_mm_load_si128(reinterpret_cast<const __m128i*>(w + 16 * v)));
      for (int r = 0; r < ROWS; ++r)
        total[r][v] = _mm256_add_epi32(total[r][v], _mm256_madd_epi16(in[r], weights));
    }
  }
}

// The sums of 16 columns in their order, with what they begin with.
template <int ROWS>
KVSTORE_AVX2 KVSTORE_INLINE void finish(const __m256i (&total)[ROWS][kVectors], int row, const std::int32_t* from,
                                        __m256i (&found)[2]) {
  for (int half = 0; half < 2; ++half) {
    const __m256i mixed = _mm256_hadd_epi32(total[row][2 * half], total[row][2 * half + 1]);  // 0 1 4 5 2 3 6 7
    found[half] = _mm256_add_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + 8 * half)),
                                   _mm256_permute4x64_epi64(mixed, _MM_SHUFFLE(3, 1, 2, 0)));
  }
}

KVSTORE_AVX2 inline void sums(const Part& part, const std::int8_t* weight, const std::uint8_t* const* inputs,
                              RowCount rows, std::int32_t* sums) {
  constexpr int kAtOnce = 2;
  const std::size_t columns = part.groups.size();
  for (std::size_t g = 0; g < columns; ++g) {
    const std::size_t panel = g / kMostPanel * kMostPanel;
    const std::size_t wide = columns - panel < kMostPanel ? columns - panel : kMostPanel;
    const std::int8_t* const first = weight + (panel * part.depth * kSteps + g - panel) * predict::kColumnsBytes;
    const std::size_t step = wide * predict::kColumnsBytes;
    for (std::size_t t = 0; t < rows.padded; t += kAtOnce) {
      __m256i total[kAtOnce][kVectors];
      for (auto& row : total)
        for (__m256i& x : row) x = _mm256_setzero_si256();
      const std::int8_t* w = first;
      for (std::size_t i = 0; i < part.inputs.size(); ++i)
        for (std::size_t d = 0; d < part.depths[i]; ++d, w += kSteps * step)
          add_tile<kAtOnce>(inputs[i] + (d * rows.padded + t) * kColumns, w, step, total);
      for (int r = 0; r < kAtOnce; ++r) {
        __m256i found[2];
        finish<kAtOnce>(total, r, part.groups[g].bias, found);
        std::int32_t* const to = sums + (g * rows.padded + t + static_cast<std::size_t>(r)) * kColumns;
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), found[0]);
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + 8), found[1]);
      }
    }
  }
}

KVSTORE_AVX2 inline void group(const Group& group, const std::int8_t* weight, std::size_t number,
                               const std::int32_t* sums, std::size_t stride, const std::uint8_t* residuals,
                               RowCount rows, std::int16_t* p) {
  constexpr int kAtOnce = 2;
  const __m256i first = _mm256_load_si256(reinterpret_cast<const __m256i*>(group.shift));
  const __m256i second = _mm256_load_si256(reinterpret_cast<const __m256i*>(group.shift + 8));
  for (std::size_t t = 0; t < rows.padded; t += kAtOnce) {
    __m256i total[kAtOnce][kVectors];
    for (auto& row : total)
      for (__m256i& x : row) x = _mm256_setzero_si256();
    const std::int8_t* w = weight;
    for (std::size_t g = 0; g < number; ++g, w += kSteps * predict::kColumnsBytes)
      add_tile<kAtOnce>(residuals + (g * rows.padded + t) * kColumns, w, predict::kColumnsBytes, total);
    for (int r = 0; r < kAtOnce; ++r) {
      __m256i found[2];
      finish<kAtOnce>(total, r, sums + (t + static_cast<std::size_t>(r)) * stride, found);
      const __m256i both = _mm256_packs_epi32(_mm256_srav_epi32(found[0], first), _mm256_srav_epi32(found[1], second));
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(p + (t + static_cast<std::size_t>(r)) * kColumns),
                          _mm256_permute4x64_epi64(both, _MM_SHUFFLE(3, 1, 2, 0)));
    }
  }
}

KVSTORE_AVX2 inline std::uint64_t multiply(std::uint64_t rounds) {
  constexpr int kTotals = 12, kProducts = 16;
  __m256i total[kTotals], in = _mm256_set1_epi16(3), weights = _mm256_set1_epi16(-5);
#pragma GCC unroll 12
  for (int j = 0; j < kTotals; ++j) {
    total[j] = _mm256_setzero_si256();
    __asm__ volatile("" : "+x"(total[j]));  // not known to be alike
  }
  for (std::uint64_t i = 0; i < rounds; ++i) {
    __asm__ volatile("" : "+x"(in), "+x"(weights));
#pragma GCC unroll 12
    for (int j = 0; j < kTotals; ++j) total[j] = _mm256_add_epi32(total[j], _mm256_madd_epi16(in, weights));
  }
#pragma GCC unroll 12
  for (int j = 0; j < kTotals; ++j) __asm__ volatile("" : "+x"(total[j]));
  return rounds * kTotals * kProducts;
}

}  // namespace kvstore::levels::avx2

namespace kvstore::levels {
KVSTORE_LEVELS_TWIN(avx2, KVSTORE_AVX2, sums, group)
}

#include "common/intrinsics_end.h"
#endif

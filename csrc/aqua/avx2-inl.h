// AVX2 twins of the loops of AQUA-KV, most as the compiler vectorises them. Included by aqua/dispatch.h only.
#pragma once

#if defined(__x86_64__)
#include "aqua/scalar-inl.h"
#include "common/intrinsics_begin.h"

namespace kvstore::aqua::avx2 {

KVSTORE_AVX2 inline void predict(const float* x, std::size_t rows, std::size_t inputs, const float* weight,
                                 std::size_t width, float* out) {
  predict_body(x, rows, inputs, weight, width, out);
}
KVSTORE_AVX2 inline void hadamard(float* tile, std::size_t columns, std::size_t group, float factor) {
  hadamard_body(tile, columns, group, factor);
}
KVSTORE_AVX2 inline void nearest(const float* tile, std::size_t columns, const float* points, std::size_t count,
                                 std::uint8_t* out) {
  nearest_body(tile, columns, points, count, out);
}
// Squared distances of x and y from half of the points of a list.
KVSTORE_AVX2 KVSTORE_INLINE __m256 distances(const NearPoints& near, std::size_t half, __m256 x, __m256 y) {
  const __m256 dx = _mm256_sub_ps(x, _mm256_load_ps(near.across + 8 * half));
  const __m256 dy = _mm256_sub_ps(y, _mm256_load_ps(near.up + 8 * half));
  return _mm256_add_ps(_mm256_mul_ps(dx, dx), _mm256_mul_ps(dy, dy));
}

KVSTORE_AVX2 inline void nearest_of_many(const float* tile, std::size_t columns, const float* points,
                                         std::size_t count, const Candidates& candidates, std::uint8_t* out) {
  for (std::size_t i = 0; i < columns / 2 * kLanes; ++i) {
    const float* const at = tile + i / kLanes * 2 * kLanes + i % kLanes;
    if (!has_cell(candidates, at[0], at[kLanes])) {
      out[i] = nearest_of_all(at[0], at[kLanes], points, count);
      continue;
    }
    const std::size_t cell = cell_of(candidates, at[0], at[kLanes]);
    const NearPoints& near = candidates.lists()[cell];
    const __m256 x = _mm256_set1_ps(at[0]), y = _mm256_set1_ps(at[kLanes]);
    const __m256 low = distances(near, 0, x, y), high = distances(near, 1, x, y);
    __m256 least = _mm256_min_ps(low, high);
    least = _mm256_min_ps(least, _mm256_permute2f128_ps(least, least, 1));
    least = _mm256_min_ps(least, _mm256_permute_ps(least, 0x4E));
    least = _mm256_min_ps(least, _mm256_permute_ps(least, 0xB1));
    const int first = _mm256_movemask_ps(_mm256_cmp_ps(low, least, _CMP_EQ_OQ));
    const int second = _mm256_movemask_ps(_mm256_cmp_ps(high, least, _CMP_EQ_OQ));
    const int place = __builtin_ctz(static_cast<unsigned>(first | second << 8));
    out[i] = candidates.numbers()[cell][static_cast<std::size_t>(place)];
  }
}
KVSTORE_AVX2 inline void place(const std::uint8_t* numbers, std::size_t columns, const float* points, float* tile) {
  place_body(numbers, columns, points, tile);
}

inline constexpr Kernels kKernels = {predict, hadamard, nearest, nearest_of_many, place};

}  // namespace kvstore::aqua::avx2
#include "common/intrinsics_end.h"
#endif

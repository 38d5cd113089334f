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
    const __m128 dx = _mm_sub_ps(_mm_set1_ps(at[0]), _mm_load_ps(near.across));
    const __m128 dy = _mm_sub_ps(_mm_set1_ps(at[kLanes]), _mm_load_ps(near.up));
    const __m128 distance = _mm_add_ps(_mm_mul_ps(dx, dx), _mm_mul_ps(dy, dy));
    __m128 least = _mm_min_ps(distance, _mm_permute_ps(distance, 0x4E));
    least = _mm_min_ps(least, _mm_permute_ps(least, 0xB1));
    const int first = _mm_movemask_ps(_mm_cmp_ps(distance, least, _CMP_EQ_OQ));
    out[i] = candidates.numbers()[cell][static_cast<std::size_t>(__builtin_ctz(static_cast<unsigned>(first)))];
  }
}
KVSTORE_AVX2 inline void place(const std::uint8_t* numbers, std::size_t columns, const float* points, float* tile) {
  place_body(numbers, columns, points, tile);
}

// 8 x 8 numbers: rows become columns.
KVSTORE_AVX2 KVSTORE_INLINE void transpose(__m256 (&v)[8]) {
  __m256 a[8], b[8];
  for (int i = 0; i < 8; i += 2) {
    a[i] = _mm256_unpacklo_ps(v[i], v[i + 1]);
    a[i + 1] = _mm256_unpackhi_ps(v[i], v[i + 1]);
  }
  for (int i = 0; i < 8; i += 4) {
    b[i] = _mm256_shuffle_ps(a[i], a[i + 2], 0x44);
    b[i + 1] = _mm256_shuffle_ps(a[i], a[i + 2], 0xEE);
    b[i + 2] = _mm256_shuffle_ps(a[i + 1], a[i + 3], 0x44);
    b[i + 3] = _mm256_shuffle_ps(a[i + 1], a[i + 3], 0xEE);
  }
  for (int i = 0; i < 4; ++i) {
    v[i] = _mm256_permute2f128_ps(b[i], b[i + 4], 0x20);
    v[i + 4] = _mm256_permute2f128_ps(b[i], b[i + 4], 0x31);
  }
}

KVSTORE_AVX2 inline void to_tile(const float* values, std::size_t width, const float* divisors, const float* signs,
                                 float* tile) {
  std::size_t c = 0;
  for (; c + 8 <= width; c += 8) {
    for (std::size_t row = 0; row < kLanes; row += 8) {
      __m256 v[8];
      for (std::size_t i = 0; i < 8; ++i)
        v[i] = _mm256_div_ps(_mm256_loadu_ps(values + (row + i) * width + c), _mm256_set1_ps(divisors[row + i]));
      transpose(v);
      for (std::size_t i = 0; i < 8; ++i)
        _mm256_storeu_ps(tile + (c + i) * kLanes + row, _mm256_mul_ps(v[i], _mm256_set1_ps(signs[c + i])));
    }
  }
  to_tile_body(values, width, divisors, signs, c, tile);
}
KVSTORE_AVX2 inline void from_tile(const float* tile, std::size_t width, const float* scales, const float* signs,
                                   float* values) {
  std::size_t c = 0;
  for (; c + 8 <= width; c += 8) {
    for (std::size_t row = 0; row < kLanes; row += 8) {
      __m256 v[8];
      for (std::size_t i = 0; i < 8; ++i)
        v[i] = _mm256_mul_ps(_mm256_loadu_ps(tile + (c + i) * kLanes + row), _mm256_set1_ps(signs[c + i]));
      transpose(v);
      for (std::size_t i = 0; i < 8; ++i)
        _mm256_storeu_ps(values + (row + i) * width + c, _mm256_mul_ps(v[i], _mm256_set1_ps(scales[row + i])));
    }
  }
  from_tile_body(tile, width, scales, signs, c, values);
}
KVSTORE_AVX2 inline double squares(const float* values, std::size_t count) {
  if (count <= 128) return squares_body(values, count);
  const std::size_t half = count / 2 - count / 2 % 8;
  return squares(values, half) + squares(values + half, count - half);
}
KVSTORE_AVX2 inline void take_inputs(const float* part, std::size_t rows, std::size_t width, std::size_t apart,
                                     float* x) {
  take_inputs_body(part, rows, width, apart, x);
}
KVSTORE_AVX2 inline void gather(const Side& side, const float* guess, std::size_t begin, std::size_t rows, float* out) {
  gather_body(side, guess, begin, rows, out);
}
KVSTORE_AVX2 inline void scatter(const Side& side, std::size_t begin, std::size_t rows, float* values) {
  scatter_body(side, begin, rows, values);
}
KVSTORE_AVX2 inline void complete(const float* guess, std::size_t count, float* values, float* found) {
  complete_body(guess, count, values, found);
}

inline constexpr Kernels kKernels = {predict,   hadamard, nearest,     nearest_of_many, place,   to_tile,
                                     from_tile, squares,  take_inputs, gather,          scatter, complete};

}  // namespace kvstore::aqua::avx2
#include "common/intrinsics_end.h"
#endif

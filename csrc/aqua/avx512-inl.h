// AVX-512 twins of the loops of AQUA-KV: a tile's column is a vector. Included by aqua/dispatch.h only.
#pragma once

#if defined(__x86_64__)
#include <cfloat>

#include "aqua/scalar-inl.h"
#include "common/intrinsics_begin.h"

namespace kvstore::aqua::avx512 {

// ROWS rows of WIDE vectors of columns: all sums stay in registers. Products are exact, so that adding them in one step
// rounds as in two.
template <int ROWS, int WIDE>
KVSTORE_AVX512_INLINE void predict_tile(const float* x, std::size_t inputs, const float* weight, std::size_t width,
                                        std::size_t column, float* out) {
  const std::size_t panel = (inputs + 1) * kLanes;
  __m512 sum[ROWS][WIDE];
  for (int r = 0; r < ROWS; ++r)
    for (int c = 0; c < WIDE; ++c)
      sum[r][c] = _mm512_loadu_ps(weight + static_cast<std::size_t>(c) * panel + inputs * kLanes);
  for (std::size_t i = 0; i < inputs; ++i) {
    __m512 w[WIDE];
    for (int c = 0; c < WIDE; ++c) w[c] = _mm512_loadu_ps(weight + static_cast<std::size_t>(c) * panel + i * kLanes);
    for (int r = 0; r < ROWS; ++r) {
      const __m512 in = _mm512_set1_ps(x[static_cast<std::size_t>(r) * inputs + i]);
      for (int c = 0; c < WIDE; ++c) sum[r][c] = _mm512_fmadd_ps(in, w[c], sum[r][c]);
    }
  }
  for (int c = 0; c < WIDE; ++c) {
    const std::size_t at = column + static_cast<std::size_t>(c) * kLanes;
    const std::size_t have = width - at < kLanes ? width - at : kLanes;
    const auto mask = static_cast<__mmask16>((1u << have) - 1);
    for (int r = 0; r < ROWS; ++r)
      _mm512_mask_storeu_ps(out + static_cast<std::size_t>(r) * width + at, mask, sum[r][c]);
  }
}

template <int WIDE>
KVSTORE_AVX512 void predict_panel(const float* x, std::size_t rows, std::size_t inputs, const float* weight,
                                  std::size_t width, std::size_t column, float* out) {
  constexpr int kRows = 8;
  std::size_t row = 0;
  for (; row + kRows <= rows; row += kRows)
    predict_tile<kRows, WIDE>(x + row * inputs, inputs, weight, width, column, out + row * width);
  for (; row < rows; ++row)
    predict_tile<1, WIDE>(x + row * inputs, inputs, weight, width, column, out + row * width);
}

inline void predict(const float* x, std::size_t rows, std::size_t inputs, const float* weight, std::size_t width,
                    float* out) {
  const std::size_t panel = (inputs + 1) * kLanes;
  std::size_t column = 0;
  for (; width - column > 2 * kLanes; column += 3 * kLanes, weight += 3 * panel) {
    predict_panel<3>(x, rows, inputs, weight, width, column, out);
    if (width - column <= 3 * kLanes) return;
  }
  for (; column < width; column += kLanes, weight += panel)
    predict_panel<1>(x, rows, inputs, weight, width, column, out);
}

KVSTORE_AVX512_WIDE inline void hadamard(float* tile, std::size_t columns, std::size_t group, float factor) {
  hadamard_body(tile, columns, group, factor);
}

// PAIRS pairs of columns at once, so that one does not wait for its own last step.
template <int PAIRS>
KVSTORE_AVX512_INLINE void nearest_of(const float* tile, const float* points, std::size_t count, std::uint8_t* out) {
  __m512 x[PAIRS], y[PAIRS], least[PAIRS];
  __m512i best[PAIRS];
  for (int i = 0; i < PAIRS; ++i) {
    x[i] = _mm512_loadu_ps(tile + 2 * static_cast<std::size_t>(i) * kLanes);
    y[i] = _mm512_loadu_ps(tile + (2 * static_cast<std::size_t>(i) + 1) * kLanes);
    least[i] = _mm512_set1_ps(FLT_MAX);
    best[i] = _mm512_setzero_si512();
  }
  for (std::size_t p = 0; p < count; ++p) {
    const __m512 across = _mm512_set1_ps(points[2 * p]), up = _mm512_set1_ps(points[2 * p + 1]);
    const __m512i number = _mm512_set1_epi32(static_cast<int>(p));
    for (int i = 0; i < PAIRS; ++i) {
      const __m512 dx = _mm512_sub_ps(x[i], across), dy = _mm512_sub_ps(y[i], up);
      const __m512 distance = _mm512_add_ps(_mm512_mul_ps(dx, dx), _mm512_mul_ps(dy, dy));
      best[i] = _mm512_mask_mov_epi32(best[i], _mm512_cmp_ps_mask(distance, least[i], _CMP_LT_OQ), number);
      least[i] = _mm512_min_ps(distance, least[i]);
    }
  }
  for (int i = 0; i < PAIRS; ++i)
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out + static_cast<std::size_t>(i) * kLanes),
                     _mm512_cvtepi32_epi8(best[i]));
}

KVSTORE_AVX512 inline void nearest(const float* tile, std::size_t columns, const float* points, std::size_t count,
                                   std::uint8_t* out) {
  constexpr std::size_t kPairs = 4;
  std::size_t c = 0;
  for (; c + 2 * kPairs <= columns; c += 2 * kPairs, out += kPairs * kLanes)
    nearest_of<kPairs>(tile + c * kLanes, points, count, out);
  for (; c < columns; c += 2, out += kLanes) nearest_of<1>(tile + c * kLanes, points, count, out);
}

// A list is a vector; the cells of all rows are found at once.
KVSTORE_AVX512 inline void nearest_of_many(const float* tile, std::size_t columns, const float* points,
                                           std::size_t count, const Candidates& candidates, std::uint8_t* out) {
  const __m512 reach = _mm512_set1_ps(candidates.reach()), scale = _mm512_set1_ps(candidates.cells_per_unit());
  const __m512i last = _mm512_set1_epi32(static_cast<int>(Candidates::kSide) - 1);
  const auto cells = [&](__m512 v) KVSTORE_AVX512 {
    return _mm512_min_epi32(_mm512_cvttps_epi32(_mm512_mul_ps(_mm512_add_ps(v, reach), scale)), last);
  };
  for (std::size_t c = 0; c < columns; c += 2, out += kLanes) {
    const float* const across = tile + c * kLanes;
    const float* const up = across + kLanes;
    const __m512 x = _mm512_loadu_ps(across), y = _mm512_loadu_ps(up);
    const unsigned inside = _mm512_cmp_ps_mask(_mm512_abs_ps(x), reach, _CMP_LT_OQ) &
                            _mm512_cmp_ps_mask(_mm512_abs_ps(y), reach, _CMP_LT_OQ);
    const __m512i side = _mm512_set1_epi32(static_cast<int>(Candidates::kSide));
    alignas(64) std::uint32_t cell[kLanes];
    _mm512_store_si512(cell, _mm512_add_epi32(_mm512_mullo_epi32(cells(y), side), cells(x)));
    for (std::size_t lane = 0; lane < kLanes; ++lane) {
      if (!(inside >> lane & 1)) {
        out[lane] = nearest_of_all(across[lane], up[lane], points, count);
        continue;
      }
      const NearPoints& near = candidates.lists()[cell[lane]];
      const __m512 dx = _mm512_sub_ps(_mm512_set1_ps(across[lane]), _mm512_load_ps(near.across));
      const __m512 dy = _mm512_sub_ps(_mm512_set1_ps(up[lane]), _mm512_load_ps(near.up));
      const __m512 distance = _mm512_add_ps(_mm512_mul_ps(dx, dx), _mm512_mul_ps(dy, dy));
      __m512 least = _mm512_min_ps(distance, _mm512_shuffle_f32x4(distance, distance, 0x4E));
      least = _mm512_min_ps(least, _mm512_shuffle_f32x4(least, least, 0xB1));
      least = _mm512_min_ps(least, _mm512_permute_ps(least, 0x4E));
      least = _mm512_min_ps(least, _mm512_permute_ps(least, 0xB1));
      const unsigned first = _mm512_cmp_ps_mask(distance, least, _CMP_EQ_OQ);
      out[lane] = candidates.numbers()[cell[lane]][static_cast<std::size_t>(__builtin_ctz(first))];
    }
  }
}

KVSTORE_AVX512 inline void place(const std::uint8_t* numbers, std::size_t columns, const float* points, float* tile) {
  for (std::size_t c = 0; c < columns; c += 2, numbers += kLanes) {
    const __m512i at = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(numbers)));
    _mm512_storeu_ps(tile + c * kLanes, _mm512_i32gather_ps(at, points, 8));
    _mm512_storeu_ps(tile + (c + 1) * kLanes, _mm512_i32gather_ps(at, points + 1, 8));
  }
}

inline constexpr Kernels kKernels = {predict, hadamard, nearest, nearest_of_many, place};

}  // namespace kvstore::aqua::avx512
#include "common/intrinsics_end.h"
#endif

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

// The lists of four places in one vector.
KVSTORE_AVX512_INLINE __m512 lists_of(const float* lists, const std::uint32_t* cell) {
  constexpr std::size_t kApart = sizeof(NearPoints) / sizeof(float);
  const __m256 low = _mm256_set_m128(_mm_load_ps(lists + cell[1] * kApart), _mm_load_ps(lists + cell[0] * kApart));
  const __m256 high = _mm256_set_m128(_mm_load_ps(lists + cell[3] * kApart), _mm_load_ps(lists + cell[2] * kApart));
  return _mm512_insertf32x8(_mm512_castps256_ps512(low), high, 1);
}

// The cells of all rows are found at once, the nearest points of four rows: a list takes a quarter of a vector.
KVSTORE_AVX512 inline void nearest_of_many(const float* tile, std::size_t columns, const float* points,
                                           std::size_t count, const Candidates& candidates, std::uint8_t* out) {
  const __m512 reach = _mm512_set1_ps(candidates.reach()), scale = _mm512_set1_ps(candidates.cells_per_unit());
  const __m512i last = _mm512_set1_epi32(static_cast<int>(Candidates::kSide) - 1);
  const __m512i side = _mm512_set1_epi32(static_cast<int>(Candidates::kSide));
  const __m512i quarter = _mm512_set_epi32(3, 3, 3, 3, 2, 2, 2, 2, 1, 1, 1, 1, 0, 0, 0, 0);
  const auto cells = [&](__m512 v) KVSTORE_AVX512 {
    return _mm512_min_epi32(_mm512_cvttps_epi32(_mm512_mul_ps(_mm512_add_ps(v, reach), scale)), last);
  };
  const NearPoints* const lists = candidates.lists();
  for (std::size_t c = 0; c < columns; c += 2, out += kLanes) {
    const float* const across = tile + c * kLanes;
    const float* const up = across + kLanes;
    const __m512 x = _mm512_loadu_ps(across), y = _mm512_loadu_ps(up);
    const auto inside = static_cast<__mmask16>(_mm512_cmp_ps_mask(_mm512_abs_ps(x), reach, _CMP_LT_OQ) &
                                               _mm512_cmp_ps_mask(_mm512_abs_ps(y), reach, _CMP_LT_OQ));
    alignas(64) std::uint32_t cell[kLanes];
    _mm512_store_si512(cell, _mm512_maskz_add_epi32(inside, _mm512_mullo_epi32(cells(y), side), cells(x)));
    for (std::size_t four = 0; four < kLanes; four += 4) {
      const __m512i at = _mm512_add_epi32(quarter, _mm512_set1_epi32(static_cast<int>(four)));
      const __m512 dx = _mm512_sub_ps(_mm512_permutexvar_ps(at, x), lists_of(lists->across, cell + four));
      const __m512 dy = _mm512_sub_ps(_mm512_permutexvar_ps(at, y), lists_of(lists->up, cell + four));
      const __m512 distance = _mm512_add_ps(_mm512_mul_ps(dx, dx), _mm512_mul_ps(dy, dy));
      __m512 least = _mm512_min_ps(distance, _mm512_permute_ps(distance, 0x4E));
      least = _mm512_min_ps(least, _mm512_permute_ps(least, 0xB1));
      const unsigned first = _mm512_cmp_ps_mask(distance, least, _CMP_EQ_OQ) | 0x8888u;  // of no number there is none
      for (std::size_t i = 0; i < 4; ++i)
        out[four + i] = candidates.numbers()[cell[four + i]][static_cast<std::size_t>(__builtin_ctz(first >> 4 * i))];
    }
    for (unsigned beyond = static_cast<std::uint16_t>(~inside); beyond; beyond &= beyond - 1) {
      const auto lane = static_cast<std::size_t>(__builtin_ctz(beyond));
      out[lane] = nearest_of_all(across[lane], up[lane], points, count);
    }
  }
}

// A point is fetched as a whole; then the numbers of eight and eight are parted.
KVSTORE_AVX512 inline void place(const std::uint8_t* numbers, std::size_t columns, const float* points, float* tile) {
  const __m512i even = _mm512_set_epi32(30, 28, 26, 24, 22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0);
  const __m512i odd = _mm512_add_epi32(even, _mm512_set1_epi32(1));
  for (std::size_t c = 0; c < columns; c += 2, numbers += kLanes) {
    const __m512i at = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(numbers)));
    const __m512 low = _mm512_castpd_ps(_mm512_i32gather_pd(_mm512_castsi512_si256(at), points, 8));
    const __m512 high = _mm512_castpd_ps(_mm512_i32gather_pd(_mm512_extracti64x4_epi64(at, 1), points, 8));
    _mm512_storeu_ps(tile + c * kLanes, _mm512_permutex2var_ps(low, even, high));
    _mm512_storeu_ps(tile + (c + 1) * kLanes, _mm512_permutex2var_ps(low, odd, high));
  }
}

// 16 x 16 numbers: rows become columns.
KVSTORE_AVX512_INLINE void transpose(__m512 (&v)[16]) {
  __m512 a[16], b[16];
  for (int i = 0; i < 16; i += 2) {
    a[i] = _mm512_unpacklo_ps(v[i], v[i + 1]);
    a[i + 1] = _mm512_unpackhi_ps(v[i], v[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {  // of four rows: columns 0, 4, 8 and 12 in one vector, 1, 5, 9, 13 in the next
    b[i] = _mm512_shuffle_ps(a[i], a[i + 2], 0x44);
    b[i + 1] = _mm512_shuffle_ps(a[i], a[i + 2], 0xEE);
    b[i + 2] = _mm512_shuffle_ps(a[i + 1], a[i + 3], 0x44);
    b[i + 3] = _mm512_shuffle_ps(a[i + 1], a[i + 3], 0xEE);
  }
  for (int i = 0; i < 4; ++i) {
    const __m512 low = _mm512_shuffle_f32x4(b[i], b[i + 4], 0x88);
    const __m512 high = _mm512_shuffle_f32x4(b[i + 8], b[i + 12], 0x88);
    const __m512 odd_low = _mm512_shuffle_f32x4(b[i], b[i + 4], 0xDD);
    const __m512 odd_high = _mm512_shuffle_f32x4(b[i + 8], b[i + 12], 0xDD);
    v[i] = _mm512_shuffle_f32x4(low, high, 0x88);
    v[i + 8] = _mm512_shuffle_f32x4(low, high, 0xDD);
    v[i + 4] = _mm512_shuffle_f32x4(odd_low, odd_high, 0x88);
    v[i + 12] = _mm512_shuffle_f32x4(odd_low, odd_high, 0xDD);
  }
}

KVSTORE_AVX512 inline void to_tile(const float* values, std::size_t width, const float* divisors, const float* signs,
                                   float* tile) {
  std::size_t c = 0;
  for (; c + kLanes <= width; c += kLanes) {
    __m512 v[kLanes];
    for (std::size_t i = 0; i < kLanes; ++i)
      v[i] = _mm512_div_ps(_mm512_loadu_ps(values + i * width + c), _mm512_set1_ps(divisors[i]));
    transpose(v);
    for (std::size_t i = 0; i < kLanes; ++i)
      _mm512_storeu_ps(tile + (c + i) * kLanes, _mm512_mul_ps(v[i], _mm512_set1_ps(signs[c + i])));
  }
  to_tile_body(values, width, divisors, signs, c, tile);
}
KVSTORE_AVX512 inline void from_tile(const float* tile, std::size_t width, const float* scales, const float* signs,
                                     float* values) {
  std::size_t c = 0;
  for (; c + kLanes <= width; c += kLanes) {
    __m512 v[kLanes];
    for (std::size_t i = 0; i < kLanes; ++i)
      v[i] = _mm512_mul_ps(_mm512_loadu_ps(tile + (c + i) * kLanes), _mm512_set1_ps(signs[c + i]));
    transpose(v);
    for (std::size_t i = 0; i < kLanes; ++i)
      _mm512_storeu_ps(values + i * width + c, _mm512_mul_ps(v[i], _mm512_set1_ps(scales[i])));
  }
  from_tile_body(tile, width, scales, signs, c, values);
}
KVSTORE_AVX512_WIDE inline double squares(const float* values, std::size_t count) {
  if (count <= 128) return squares_body(values, count);
  const std::size_t half = count / 2 - count / 2 % 8;
  return squares(values, half) + squares(values + half, count - half);
}
KVSTORE_AVX512_WIDE inline void take_inputs(const float* part, std::size_t rows, std::size_t width, std::size_t apart,
                                            float* x) {
  take_inputs_body(part, rows, width, apart, x);
}
KVSTORE_AVX512_WIDE inline void gather(const Side& side, const float* guess, std::size_t begin, std::size_t rows,
                                       float* out) {
  gather_body(side, guess, begin, rows, out);
}
KVSTORE_AVX512_WIDE inline void scatter(const Side& side, std::size_t begin, std::size_t rows, float* values) {
  scatter_body(side, begin, rows, values);
}
KVSTORE_AVX512_WIDE inline void complete(const float* guess, std::size_t count, float* values, float* found) {
  complete_body(guess, count, values, found);
}

inline constexpr Kernels kKernels = {predict,   hadamard, nearest,     nearest_of_many, place,   to_tile,
                                     from_tile, squares,  take_inputs, gather,          scatter, complete};

}  // namespace kvstore::aqua::avx512
#include "common/intrinsics_end.h"
#endif

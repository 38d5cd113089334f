// The floating-point loops of the lossy mode's decoder: components to values, and those to bf16. Included by
// lossy/lossy.cc only.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "lossy/model.h"
#include "predictive/scalar-inl.h"

namespace kvstore::lossy {

using predict::kPanel;
using predict::kVector;

constexpr std::size_t kTile = 8;  // rows at a time

// cos and sin of a row's position; half is 0 where nothing is rotated.
struct Turn {
  const float* cos;
  const float* sin;
  std::size_t half;
};

// What some rows have besides their predictions. tile: [kTile][width]; which: the components that are not zero in all
// of them.
struct Components {
  const float* tile;
  const std::uint32_t* which;
  std::size_t count;
};

struct Kernels {
  // Multiplies a tile's numbers by the steps of rows and by what components are in units of; any: [width], 0 where all
  // are zero.
  void (*scale)(float* tile, const float* component, std::size_t width, const float* steps, std::uint32_t* any);
  // A tile of rows: predictions, and what the components add. sums, x: [kTile][padded]
  void (*values)(const Part& part, const Components& found, const std::int32_t* sums, float* x);
  // One row's values, rotated, as bf16.
  void (*round)(const float* x, std::size_t width, const Turn& turn, std::uint16_t* bits);
};

// ---- values ---------------------------------------------------------------------------------------------------------

inline void values_plain(const Part& part, const Components& found, const std::int32_t* sums, float* x) {
  const std::size_t padded = part.sums.padded, width = part.sums.width;
  for (std::size_t panel = 0; panel < padded; panel += kPanel) {
    const std::size_t wide = padded - panel < kPanel ? padded - panel : kPanel;
    const std::int8_t* const basis = part.basis.data() + panel * width;
    float total[kTile][kPanel] = {};
    for (std::size_t i = 0; i < found.count; ++i) {
      const std::size_t k = found.which[i];
      float row[kPanel];
      for (std::size_t j = 0; j < wide; ++j) row[j] = basis[k * wide + j];
      for (std::size_t r = 0; r < kTile; ++r)
        for (std::size_t j = 0; j < wide; ++j) total[r][j] += found.tile[r * width + k] * row[j];
    }
    for (std::size_t r = 0; r < kTile; ++r) {
      for (std::size_t j = 0; j < wide; ++j) {
        const std::size_t at = r * padded + panel + j;
        const float mu = (static_cast<float>(sums[at]) + part.bias[panel + j]) * part.out[panel + j];
        x[at] = mu + total[r][j] * part.unit[panel + j];
      }
    }
  }
}

// ---- components -----------------------------------------------------------------------------------------------------

KVSTORE_INLINE void scale_body(float* __restrict tile, const float* component, std::size_t width, const float* steps,
                               std::uint32_t* __restrict any) {
  for (std::size_t k = 0; k < width; ++k) any[k] = 0;
  for (std::size_t r = 0; r < kTile; ++r, tile += width) {
    const float step = steps[r];
    for (std::size_t k = 0; k < width; ++k) {
      const float y = tile[k] * step * component[k];
      any[k] |= y != 0.0f;
      tile[k] = y;
    }
  }
}

// ---- bf16 -----------------------------------------------------------------------------------------------------------

KVSTORE_INLINE std::uint16_t rounded_bits(float v) {
  std::uint32_t u;
  std::memcpy(&u, &v, sizeof u);
  const std::uint32_t even = (u + 0x7fff + (u >> 16 & 1)) >> 16;
  return static_cast<std::uint16_t>((u & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : even);
}

KVSTORE_INLINE void round_body(const float* x, std::size_t width, const Turn& turn, std::uint16_t* __restrict bits) {
  const std::size_t half = turn.half;
  if (half == 0) {
    for (std::size_t j = 0; j < width; ++j) bits[j] = rounded_bits(x[j]);
    return;
  }
  const float *cos = turn.cos, *sin = turn.sin;
  for (std::size_t head = 0; head < width; head += 2 * half, x += 2 * half, bits += 2 * half) {
    for (std::size_t j = 0; j < half; ++j) {
      bits[j] = rounded_bits(x[j] * cos[j] - x[half + j] * sin[j]);
      bits[half + j] = rounded_bits(x[half + j] * cos[j] + x[j] * sin[j]);
    }
  }
}

inline void round_plain(const float* x, std::size_t width, const Turn& turn, std::uint16_t* bits) {
  round_body(x, width, turn, bits);
}

inline void scale_plain(float* tile, const float* component, std::size_t width, const float* steps,
                        std::uint32_t* any) {
  scale_body(tile, component, width, steps, any);
}

inline constexpr Kernels kPlainKernels = {scale_plain, values_plain, round_plain};

}  // namespace kvstore::lossy

#if defined(__x86_64__)
#include <immintrin.h>

#if defined(__GNUC__) && !defined(__clang__)
// GCC 12 takes the undefined vectors that its own intrinsics start from for a mistake of ours (GCC bug 105593).
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif

namespace kvstore::lossy::avx2 {

#define KVSTORE_AVX2 __attribute__((target("avx2")))

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

#undef KVSTORE_AVX2

}  // namespace kvstore::lossy::avx2

namespace kvstore::lossy::avx512 {

#define KVSTORE_AVX512 __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl")))

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

#undef KVSTORE_AVX512

}  // namespace kvstore::lossy::avx512

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic pop
#endif
#endif

namespace kvstore::lossy {

inline const Kernels& kernels(Level level) {
#if defined(__x86_64__)
  if (level == Level::avx512) return avx512::kKernels;
  if (level >= Level::avx2) return avx2::kKernels;
#endif
  (void)level;
  return kPlainKernels;
}

}  // namespace kvstore::lossy

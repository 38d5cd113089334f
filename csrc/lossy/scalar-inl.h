// The loops of the lossy mode's decoder in plain C++; the bodies of two of them serve AVX2 too. Included by
// lossy/dispatch.h only.
#pragma once

#include "common/floats.h"
#include "lossy/kernels.h"

namespace kvstore::lossy {

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

namespace scalar {

inline void values(const Part& part, const Components& found, const std::int32_t* sums, float* x) {
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

inline void round(const float* x, std::size_t width, const Turn& turn, std::uint16_t* bits) {
  round_body(x, width, turn, bits);
}

inline void scale(float* tile, const float* component, std::size_t width, const float* steps,
                        std::uint32_t* any) {
  scale_body(tile, component, width, steps, any);
}

inline constexpr Kernels kKernels = {scale, values, round};

}  // namespace scalar
}  // namespace kvstore::lossy

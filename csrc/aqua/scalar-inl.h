// The loops of AQUA-KV in plain C++. Included by aqua/dispatch.h and by the twins only.
#pragma once

#include <cfloat>

#include "aqua/kernels.h"

namespace kvstore::aqua {

template <std::size_t ROWS>
KVSTORE_INLINE void predict_rows(const float* x, std::size_t inputs, const float* weight, std::size_t width,
                                 std::size_t have, float* out) {
  float sum[ROWS][kLanes];
  for (std::size_t r = 0; r < ROWS; ++r)
    for (std::size_t c = 0; c < kLanes; ++c) sum[r][c] = weight[inputs * kLanes + c];
  for (std::size_t i = 0; i < inputs; ++i) {
    for (std::size_t r = 0; r < ROWS; ++r) {
      const float in = x[r * inputs + i];
      for (std::size_t c = 0; c < kLanes; ++c) sum[r][c] += in * weight[i * kLanes + c];
    }
  }
  for (std::size_t r = 0; r < ROWS; ++r)
    for (std::size_t c = 0; c < have; ++c) out[r * width + c] = sum[r][c];
}

KVSTORE_INLINE void predict_body(const float* x, std::size_t rows, std::size_t inputs, const float* weight,
                                 std::size_t width, float* out) {
  constexpr std::size_t kRows = 4;
  for (std::size_t column = 0; column < width; column += kLanes, weight += (inputs + 1) * kLanes) {
    const std::size_t have = width - column < kLanes ? width - column : kLanes;
    std::size_t row = 0;
    for (; row + kRows <= rows; row += kRows)
      predict_rows<kRows>(x + row * inputs, inputs, weight, width, have, out + row * width + column);
    for (; row < rows; ++row)
      predict_rows<1>(x + row * inputs, inputs, weight, width, have, out + row * width + column);
  }
}

KVSTORE_INLINE void hadamard_body(float* tile, std::size_t columns, std::size_t group, float factor) {
  for (std::size_t half = 1; half < group; half *= 2) {
    for (std::size_t begin = 0; begin < columns; begin += 2 * half) {
      for (std::size_t c = begin; c < begin + half; ++c) {
        float* const a = tile + c * kLanes;
        float* const b = a + half * kLanes;
        for (std::size_t lane = 0; lane < kLanes; ++lane) {
          const float first = a[lane], second = b[lane];
          a[lane] = first + second;
          b[lane] = first - second;
        }
      }
    }
  }
  for (std::size_t i = 0; i < columns * kLanes; ++i) tile[i] *= factor;
}

KVSTORE_INLINE void nearest_body(const float* tile, std::size_t columns, const float* points, std::size_t count,
                                 std::uint8_t* out) {
  for (std::size_t c = 0; c < columns; c += 2, out += kLanes) {
    const float* const x = tile + c * kLanes;
    const float* const y = x + kLanes;
    float least[kLanes];
    std::int32_t best[kLanes];
    for (std::size_t lane = 0; lane < kLanes; ++lane) {
      const float dx = x[lane] - points[0], dy = y[lane] - points[1];
      least[lane] = dx * dx + dy * dy;
      best[lane] = 0;
    }
    for (std::size_t p = 1; p < count; ++p) {
      const float across = points[2 * p], up = points[2 * p + 1];
      for (std::size_t lane = 0; lane < kLanes; ++lane) {
        const float dx = x[lane] - across, dy = y[lane] - up, distance = dx * dx + dy * dy;
        best[lane] = distance < least[lane] ? static_cast<std::int32_t>(p) : best[lane];
        least[lane] = distance < least[lane] ? distance : least[lane];
      }
    }
    for (std::size_t lane = 0; lane < kLanes; ++lane) out[lane] = static_cast<std::uint8_t>(best[lane]);
  }
}

// The first of all points that are the nearest of a place.
inline std::uint8_t nearest_of_all(float x, float y, const float* points, std::size_t count) {
  float least = FLT_MAX;
  std::size_t best = 0;
  for (std::size_t p = 0; p < count; ++p) {
    const float dx = x - points[2 * p], dy = y - points[2 * p + 1], distance = dx * dx + dy * dy;
    if (distance < least) least = distance, best = p;
  }
  return static_cast<std::uint8_t>(best);
}

KVSTORE_INLINE bool has_cell(const Candidates& candidates, float x, float y) {
  const float reach = candidates.reach();
  return x > -reach && x < reach && y > -reach && y < reach;
}

// The cell of a place that has one.
KVSTORE_INLINE std::size_t cell_of(const Candidates& candidates, float x, float y) {
  constexpr auto kLast = static_cast<std::int32_t>(Candidates::kSide) - 1;
  const float reach = candidates.reach(), scale = candidates.cells_per_unit();
  const auto column = static_cast<std::int32_t>((x + reach) * scale);
  const auto row = static_cast<std::int32_t>((y + reach) * scale);
  return static_cast<std::size_t>(row > kLast ? kLast : row) * Candidates::kSide +
         static_cast<std::size_t>(column > kLast ? kLast : column);
}

KVSTORE_INLINE void place_body(const std::uint8_t* numbers, std::size_t columns, const float* points, float* tile) {
  for (std::size_t c = 0; c < columns; c += 2, numbers += kLanes) {
    for (std::size_t lane = 0; lane < kLanes; ++lane) {
      const std::size_t number = numbers[lane];
      tile[c * kLanes + lane] = points[2 * number];
      tile[(c + 1) * kLanes + lane] = points[2 * number + 1];
    }
  }
}

namespace scalar {

inline void predict(const float* x, std::size_t rows, std::size_t inputs, const float* weight, std::size_t width,
                    float* out) {
  predict_body(x, rows, inputs, weight, width, out);
}
inline void hadamard(float* tile, std::size_t columns, std::size_t group, float factor) {
  hadamard_body(tile, columns, group, factor);
}
inline void nearest(const float* tile, std::size_t columns, const float* points, std::size_t count, std::uint8_t* out) {
  nearest_body(tile, columns, points, count, out);
}
inline void nearest_of_many(const float* tile, std::size_t columns, const float* points, std::size_t count,
                            const Candidates& candidates, std::uint8_t* out) {
  for (std::size_t i = 0; i < columns / 2 * kLanes; ++i) {
    const float* const at = tile + i / kLanes * 2 * kLanes + i % kLanes;
    const float x = at[0], y = at[kLanes];
    if (!has_cell(candidates, x, y)) {
      out[i] = nearest_of_all(x, y, points, count);
      continue;
    }
    const std::size_t cell = cell_of(candidates, x, y);
    const NearPoints& near = candidates.lists()[cell];
    float least = FLT_MAX;
    std::size_t best = 0;
    for (std::size_t p = 0; p < NearPoints::kMost; ++p) {
      const float dx = x - near.across[p], dy = y - near.up[p], distance = dx * dx + dy * dy;
      best = distance < least ? p : best;
      least = distance < least ? distance : least;
    }
    out[i] = candidates.numbers()[cell][best];
  }
}
inline void place(const std::uint8_t* numbers, std::size_t columns, const float* points, float* tile) {
  place_body(numbers, columns, points, tile);
}

inline constexpr Kernels kKernels = {predict, hadamard, nearest, nearest_of_many, place};

}  // namespace scalar
}  // namespace kvstore::aqua

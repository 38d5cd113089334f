// The loops of AQUA-KV in plain C++. Included by aqua/dispatch.h and by the twins only.
#pragma once

#include <cfloat>

#include "aqua/kernels.h"
#include "common/floats.h"

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

// Two steps at once of what Hadamard's transform adds and subtracts: of columns `half` apart, then twice as far.
KVSTORE_INLINE void two_steps(float* tile, std::size_t half) {
  float* const p[] = {tile, tile + half * kLanes, tile + 2 * half * kLanes, tile + 3 * half * kLanes};
  for (std::size_t lane = 0; lane < kLanes; ++lane) {
    const float a = p[0][lane] + p[1][lane], b = p[0][lane] - p[1][lane];
    const float c = p[2][lane] + p[3][lane], d = p[2][lane] - p[3][lane];
    p[0][lane] = a + c;
    p[1][lane] = b + d;
    p[2][lane] = a - c;
    p[3][lane] = b - d;
  }
}

KVSTORE_INLINE void one_step(float* tile, std::size_t half) {
  float* const other = tile + half * kLanes;
  for (std::size_t lane = 0; lane < kLanes; ++lane) {
    const float first = tile[lane], second = other[lane];
    tile[lane] = first + second;
    other[lane] = first - second;
  }
}

KVSTORE_INLINE void hadamard_body(float* tile, std::size_t columns, std::size_t group, float factor) {
  std::size_t half = 1;
  for (; 4 * half <= group; half *= 4)
    for (std::size_t begin = 0; begin < columns; begin += 4 * half)
      for (std::size_t c = begin; c < begin + half; ++c) two_steps(tile + c * kLanes, half);
  if (half < group)
    for (std::size_t begin = 0; begin < columns; begin += 2 * half)
      for (std::size_t c = begin; c < begin + half; ++c) one_step(tile + c * kLanes, half);
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

// ---- rows, as the compiler vectorises them --------------------------------------------------------------------------

// Columns of a tile from `begin` on.
KVSTORE_INLINE void to_tile_body(const float* values, std::size_t width, const float* divisors, const float* signs,
                                 std::size_t begin, float* tile) {
  for (std::size_t c = begin; c < width; ++c)
    for (std::size_t row = 0; row < kLanes; ++row)
      tile[c * kLanes + row] = values[row * width + c] / divisors[row] * signs[c];
}

KVSTORE_INLINE void from_tile_body(const float* tile, std::size_t width, const float* scales, const float* signs,
                                   std::size_t begin, float* values) {
  for (std::size_t row = 0; row < kLanes; ++row)
    for (std::size_t c = begin; c < width; ++c)
      values[row * width + c] = tile[c * kLanes + row] * signs[c] * scales[row];
}

KVSTORE_INLINE double square_of(float v) { return static_cast<double>(v) * static_cast<double>(v); }

// Of at most 128 numbers.
KVSTORE_INLINE double squares_body(const float* values, std::size_t count) {
  if (count < 8) {
    double sum = -0.0;
    for (std::size_t i = 0; i < count; ++i) sum += square_of(values[i]);
    return sum;
  }
  double part[8];
  for (std::size_t k = 0; k < 8; ++k) part[k] = square_of(values[k]);
  std::size_t i = 8;
  for (; i + 8 <= count; i += 8)
    for (std::size_t k = 0; k < 8; ++k) part[k] += square_of(values[i + k]);
  double sum = ((part[0] + part[1]) + (part[2] + part[3])) + ((part[4] + part[5]) + (part[6] + part[7]));
  for (; i < count; ++i) sum += square_of(values[i]);
  return sum;
}

KVSTORE_INLINE void take_inputs_body(const float* part, std::size_t rows, std::size_t width, std::size_t apart,
                                     float* x) {
  constexpr std::uint32_t kNoNumber = 0x7FC00000;
  for (std::size_t row = 0; row < rows; ++row, part += width, x += apart) {
    for (std::size_t i = 0; i < width; ++i) {
      const std::uint32_t bits = bits_of(part[i]), exponent = bits >> 23 & 0xFF;
      const std::uint32_t known = exponent < 127 - 80 ? 0u : bits & 0xFFFF0000u;
      x[i] = as_float(exponent > 127 + 100 ? kNoNumber : known);
    }
  }
}

KVSTORE_INLINE void turn_body(float* row, const Side& side, std::size_t number, float sign) {
  const std::size_t pairs = side.turns.pairs;
  const float* const cos = side.turns.cos + number * pairs;
  const float* const sin = side.turns.sin + number * pairs;
  for (std::size_t head = 0; head < side.heads; ++head, row += side.dim) {
    for (std::size_t i = 0; i < pairs; ++i) {
      const float first = row[i], second = row[pairs + i], c = cos[i], s = sign * sin[i];
      row[i] = first * c - second * s;
      row[pairs + i] = second * c + first * s;
    }
  }
}

KVSTORE_INLINE void gather_body(const Side& side, const float* guess, std::size_t begin, std::size_t rows, float* out) {
  const std::size_t width = side.width();
  for (std::size_t row = 0; row < rows; ++row) {
    float* const to = out + row * width;
    for (std::size_t head = 0; head < side.heads; ++head) {
      const std::uint16_t* const from = side.cache + (head * side.tokens + side.sinks + begin + row) * side.dim;
      for (std::size_t i = 0; i < side.dim; ++i) to[head * side.dim + i] = widened(from[i]);
    }
    if (side.turns.pairs) turn_body(to, side, begin + row, -1.0f);
    for (std::size_t c = 0; c < width; ++c) to[c] -= guess ? guess[(begin + row) * width + c] : 0.0f;
  }
}

KVSTORE_INLINE void scatter_body(const Side& side, std::size_t begin, std::size_t rows, float* values) {
  const float largest = widened(0x7F7F);
  for (std::size_t row = 0; row < rows; ++row) {
    float* const from = values + row * side.width();
    if (side.turns.pairs) turn_body(from, side, begin + row, 1.0f);
    for (std::size_t head = 0; head < side.heads; ++head) {
      std::uint16_t* const to = side.cache + (head * side.tokens + side.sinks + begin + row) * side.dim;
      for (std::size_t i = 0; i < side.dim; ++i) {
        const float v = from[head * side.dim + i];
        to[i] = rounded_bits(v > largest ? largest : v < -largest ? -largest : v);
      }
    }
  }
}

KVSTORE_INLINE void complete_body(const float* guess, std::size_t count, float* values, float* found) {
  for (std::size_t i = 0; i < count; ++i) {
    values[i] = (guess ? guess[i] : 0.0f) + values[i];
    found[i] = widened(rounded_bits(values[i]));
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

inline void to_tile(const float* values, std::size_t width, const float* divisors, const float* signs, float* tile) {
  to_tile_body(values, width, divisors, signs, 0, tile);
}
inline void from_tile(const float* tile, std::size_t width, const float* scales, const float* signs, float* values) {
  from_tile_body(tile, width, scales, signs, 0, values);
}
inline double squares(const float* values, std::size_t count) {
  if (count <= 128) return squares_body(values, count);
  const std::size_t half = count / 2 - count / 2 % 8;
  return squares(values, half) + squares(values + half, count - half);
}
inline void take_inputs(const float* part, std::size_t rows, std::size_t width, std::size_t apart, float* x) {
  take_inputs_body(part, rows, width, apart, x);
}
inline void gather(const Side& side, const float* guess, std::size_t begin, std::size_t rows, float* out) {
  gather_body(side, guess, begin, rows, out);
}
inline void scatter(const Side& side, std::size_t begin, std::size_t rows, float* values) {
  scatter_body(side, begin, rows, values);
}
inline void complete(const float* guess, std::size_t count, float* values, float* found) {
  complete_body(guess, count, values, found);
}

inline constexpr Kernels kKernels = {predict,   hadamard, nearest,     nearest_of_many, place,   to_tile,
                                     from_tile, squares,  take_inputs, gather,          scatter, complete};

}  // namespace scalar
}  // namespace kvstore::aqua

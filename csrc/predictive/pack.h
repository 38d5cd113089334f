// Weights as the kernels of sums take them: four inputs of a column side by side.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kvstore::predict {

// Lays out up to four rows of weights, `stride` apart, each of `columns`: the weight of row r and column j at
// out[4 * j + r]. Adds up the columns in sums.
inline void pack_rows(const std::int8_t* row, std::size_t stride, std::size_t rows, std::size_t columns,
                      std::int8_t* out, std::int32_t* sums) {
  if (rows == 4) {
    const std::int8_t *const a = row, *const b = a + stride, *const c = b + stride, *const d = c + stride;
    for (std::size_t j = 0; j < columns; ++j) {
      out[4 * j] = a[j];
      out[4 * j + 1] = b[j];
      out[4 * j + 2] = c[j];
      out[4 * j + 3] = d[j];
    }
    for (std::size_t j = 0; j < columns; ++j) sums[j] += a[j] + b[j] + c[j] + d[j];
    return;
  }
  for (std::size_t r = 0; r < rows; ++r, row += stride) {
    for (std::size_t j = 0; j < columns; ++j) {
      out[4 * j + r] = row[j];
      sums[j] += row[j];
    }
  }
}

}  // namespace kvstore::predict

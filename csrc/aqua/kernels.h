// The inner loops of AQUA-KV as a table of functions. kernels() in aqua/dispatch.h gives the table of a machine.
//
// They work on tiles of kLanes rows, column after column: of every column the values of all rows of the tile.
#pragma once

#include <cstddef>
#include <cstdint>

#include "aqua/candidates.h"
#include "common/simd.h"

namespace kvstore::aqua {

constexpr std::size_t kLanes = 16;

struct Kernels {
  // Predictions of `rows` rows, `width` apart. x: rows of `inputs` numbers. weight: of every kLanes columns, padded,
  // those of each input, then what is added. Sums begin with that and follow the order of the inputs; products are
  // exact.
  void (*predict)(const float* x, std::size_t rows, std::size_t inputs, const float* weight, std::size_t width,
                  float* out);
  // Hadamard's transform of every `group` columns of a tile, in place; the result is multiplied by `factor`.
  void (*hadamard)(float* tile, std::size_t columns, std::size_t group, float factor);
  // Of each pair of columns the nearest of `count` points, the first where several are. out: [columns / 2][kLanes].
  void (*nearest)(const float* tile, std::size_t columns, const float* points, std::size_t count, std::uint8_t* out);
  // The same, looking only at the points of a place's cell.
  void (*nearest_of_many)(const float* tile, std::size_t columns, const float* points, std::size_t count,
                          const Candidates& candidates, std::uint8_t* out);
  // The points of `nearest` as columns.
  void (*place)(const std::uint8_t* numbers, std::size_t columns, const float* points, float* tile);
};

}  // namespace kvstore::aqua

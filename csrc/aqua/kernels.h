// The inner loops of AQUA-KV as a table of functions. kernels() in aqua/dispatch.h gives the table of a machine.
//
// They work on tiles of kLanes rows, column after column: of every column the values of all rows of the tile.
#pragma once

#include <cstddef>
#include <cstdint>

#include "aqua/aqua.h"
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
  // kLanes rows as a tile, each divided by its divisor, each column multiplied by its sign.
  void (*to_tile)(const float* values, std::size_t width, const float* divisors, const float* signs, float* tile);
  // The inverse: each row multiplied by its scale.
  void (*from_tile)(const float* tile, std::size_t width, const float* scales, const float* signs, float* values);
  // The sum of squares in the order in which numpy adds along the last axis, so that scales are the same.
  double (*squares)(const float* values, std::size_t count);
  // What predictions start from: inputs `count` numbers apart in rows of x. Small ones are 0, those too large NaN.
  void (*take_inputs)(const float* part, std::size_t rows, std::size_t width, std::size_t apart, float* x);
  // Rows of a side from `begin`, rotated back, less `guess` ([rows of the side][width]; null: nothing).
  void (*gather)(const Side& side, const float* guess, std::size_t begin, std::size_t rows, float* out);
  // The inverse, of rows with their guess, which are mutated; what is too large becomes the largest number.
  void (*scatter)(const Side& side, std::size_t begin, std::size_t rows, float* values);
  // Adds `guess` to decoded numbers (null: nothing), and rounds what comes out to `found`.
  void (*complete)(const float* guess, std::size_t count, float* values, float* found);
};

}  // namespace kvstore::aqua

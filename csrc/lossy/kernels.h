// The loops of the lossy mode's decoder as a table of functions: components to values, and those to bf16.
#pragma once

#include <cstddef>
#include <cstdint>

#include "lossy/model.h"

namespace kvstore::lossy {

using predict::kPanel;
using predict::kVector;

constexpr std::size_t kTile = 8;  // rows at a time

// cos and sin of a row's position; half is 0 if nothing is rotated.
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
  // Multiplies a tile's numbers by the steps of rows and by what components are in units of; any: [width], 0 if all
  // are zero.
  void (*scale)(float* tile, const float* component, std::size_t width, const float* steps, std::uint32_t* any);
  // A tile of rows: predictions, and what the components add. sums, x: [kTile][padded]
  void (*values)(const Part& part, const Components& found, const std::int32_t* sums, float* x);
  // One row's values, rotated, as bf16.
  void (*round)(const float* x, std::size_t width, const Turn& turn, std::uint16_t* bits);
};

}  // namespace kvstore::lossy

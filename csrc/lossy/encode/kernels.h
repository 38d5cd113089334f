// The loops of the lossy mode's encoder as a table of functions. Sums are made in double precision, so that their order
// decides nothing.
#pragma once

#include <cstddef>
#include <cstdint>

#include "lossy/kernels.h"

namespace kvstore::lossy {

constexpr std::size_t kWide = 8;  // matrices have rows of whole multiples of it

// The rows of a matrix that a tile is multiplied with; which: null for all of them.
template <class T>
struct Factor {
  const T* rows;
  std::size_t stride;  // a multiple of kWide; what is beyond the matrix is 0
  const std::uint32_t* which;
  std::size_t count;
};

// All but the first two do one row of a part.
struct Encoding {
  // to[r][c] = sum over i of from[r][w] * rows[w][c], w = which[i]. from: [kTile][width]; to: [kTile][stride].
  void (*analyse)(const Factor<float>& by, const double* from, std::size_t width, double* to);
  void (*rebuild)(const Factor<std::int8_t>& by, const double* from, std::size_t width, double* to);
  // bf16 as numbers, rotated back.
  void (*straighten)(const std::uint16_t* bits, std::size_t width, const Turn& turn, float* x);
  // What is not predicted.
  void (*residual)(const Part& part, const float* x, const std::int32_t* sums, double* to);
  // The same in steps.
  void (*in_steps)(const double* a, std::size_t width, float step, float* y);
  // Sum of the squares of (y - found) * step.
  double (*lost)(const float* y, const float* found, std::size_t width, float step);
  // Sum of a[i] * b[i].
  double (*dot)(const float* a, const float* b, std::size_t width);
  // Predictions, and what the components add, in units; rotated, as bf16. sums: of the predictions.
  void (*round)(const Part& part, const std::int32_t* sums, const double* added, const Turn& turn, double* room,
                std::uint16_t* bits);
  // The largest difference of two rows of bf16, or `least`.
  float (*largest)(const std::uint16_t* a, const std::uint16_t* b, std::size_t width, float least);
};

}  // namespace kvstore::lossy

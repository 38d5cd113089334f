// The inner loops of the donor codec's step mode as a table of functions.
#pragma once

#include <cstddef>
#include <cstdint>

#include "common/cpu.h"

namespace kvstore::donor::steps {

// All do one row of a part.
struct Kernels {
  // totals += |mu|
  void (*add)(const std::uint16_t* mu, std::size_t width, float* totals);
  // The tables of numbers of coded channels: kClasses + scales + shift, within bounds.
  void (*tables)(const std::uint8_t* scales, std::size_t width, int shift, std::uint8_t* to);
  // The sum of the symbols' magnitudes, and the largest symbol.
  std::int64_t (*measure)(const std::uint8_t* symbols, std::size_t width, std::uint8_t* largest);
  // bf16 of mu + numbers * steps, to nearest, ties to even.
  void (*restore)(const std::uint16_t* mu, const std::int8_t* numbers, const float* steps, std::size_t width,
                  std::uint16_t* to);
  // The numbers; kLargest + 1 for escapes. inverse: 16 / step, or 0.
  void (*quantise)(const std::uint16_t* x, const std::uint16_t* mu, const float* steps, const float* inverse,
                   std::size_t width, std::int8_t* numbers);
  // Of each channel: the sum of squared errors, the bits of the largest error.
  void (*errors)(const std::uint16_t* x, const std::uint16_t* y, std::size_t width, double* squares,
                 std::uint32_t* largest);
};

}  // namespace kvstore::donor::steps

// The inner loops that the donor codec has besides the predictive codec's, as a table of functions.
#pragma once

#include <cstddef>
#include <cstdint>

#include "common/floats.h"

namespace kvstore::donor {

constexpr int kLeastExponent = 28;  // of a pair that is turned, so that no intermediate number is subnormal

// The first two do one head of a row, the others a row of a part. Nothing beyond is read or written.
struct Kernels {
  // The head itself, 0 for what is not finite.
  void (*finite)(const std::uint16_t* x, std::size_t width, std::uint16_t* mu);
  // A head of keys, what is not finite being 0, turned. cos, sin: [half] in 1/16384.
  void (*turn)(const std::uint16_t* x, std::size_t half, const std::int16_t* cos, const std::int16_t* sin,
               std::uint16_t* mu);
  // from + delta * scale, numbers that are not finite being 0 in delta.
  void (*add)(const std::uint16_t* delta, const std::uint16_t* from, float scale, std::size_t width,
              std::uint16_t* mu);
  // (x - from) * scale
  void (*subtract)(const std::uint16_t* x, const std::uint16_t* from, float scale, std::size_t width,
                   std::uint16_t* d);
  // totals += |x - mu| * weight, but for distances that are not finite.
  void (*measure)(const std::uint16_t* x, const std::uint16_t* mu, float weight, std::size_t width, float* totals);
};

KVSTORE_INLINE float number(std::uint16_t x) { return as_float(static_cast<std::uint32_t>(x) << 16); }

// 2^(-quarters / 4), exactly the same everywhere.
KVSTORE_INLINE float weight_of(int quarters) {
  constexpr std::uint32_t roots[] = {0x3f800000, 0x3f5744fd, 0x3f3504f3, 0x3f1837f0};
  return as_float(roots[quarters & 3] - static_cast<std::uint32_t>(quarters >> 2) * (1u << 23));
}

// The table that runs at a level.
const Kernels& kernels(Level level);

}  // namespace kvstore::donor

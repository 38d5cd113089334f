// The bits of floating-point numbers.
#pragma once

#include <cstdint>
#include <cstring>

#include "common/simd.h"

namespace kvstore {

KVSTORE_INLINE std::uint32_t bits_of(float v) {
  std::uint32_t bits;
  std::memcpy(&bits, &v, sizeof bits);
  return bits;
}

KVSTORE_INLINE float as_float(std::uint32_t bits) {
  float v;
  std::memcpy(&v, &bits, sizeof v);
  return v;
}

// A bf16 as a number.
KVSTORE_INLINE float widened(std::uint16_t bits) { return as_float(static_cast<std::uint32_t>(bits) << 16); }

// The upper half of a number's bits: as bf16, rounded towards zero.
KVSTORE_INLINE std::uint16_t upper(float v) { return static_cast<std::uint16_t>(bits_of(v) >> 16); }

// A number as bf16, rounded to the nearest; half-way cases to even.
KVSTORE_INLINE std::uint16_t rounded_bits(float v) {
  const std::uint32_t u = bits_of(v);
  const std::uint32_t even = (u + 0x7fff + (u >> 16 & 1)) >> 16;
  return static_cast<std::uint16_t>((u & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : even);
}

}  // namespace kvstore

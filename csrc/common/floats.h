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

// The upper half of a number's bits: as bf16, rounded towards zero.
KVSTORE_INLINE std::uint16_t upper(float v) { return static_cast<std::uint16_t>(bits_of(v) >> 16); }

}  // namespace kvstore

// Words: what stands for a value of another dtype where a codec works with bf16. A sign, 8 bits of exponent and 7 of
// mantissa: of an fp32 its upper half; of an fp16 or a float8 the exponent counts from where a bf16's would, and
// mantissa bits that are not there are 0. Bodies that are compiled for every set of instructions, see common/simd.h.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "common/simd.h"

namespace kvstore::words {

template <class T>
KVSTORE_INLINE T at(const std::uint8_t* values, std::size_t i) {
  T v;
  std::memcpy(&v, values + i * sizeof v, sizeof v);
  return v;
}

template <class T>
KVSTORE_INLINE void put(std::uint8_t* values, std::size_t i, unsigned v) {
  const T narrow = static_cast<T>(v);
  std::memcpy(values + i * sizeof narrow, &narrow, sizeof narrow);
}

// Floats of an 8- or 16-bit type T with EXPONENT and MANTISSA bits; exponents count from BIAS on as those of bf16.
template <class T, unsigned EXPONENT, unsigned MANTISSA, unsigned BIAS>
struct Narrow {
  static constexpr unsigned kSign = EXPONENT + MANTISSA, kMost = (1u << EXPONENT) - 1;

  KVSTORE_INLINE static void make(const std::uint8_t* values, std::size_t count, std::uint16_t* words) {
    for (std::size_t i = 0; i < count; ++i) {
      const auto v = static_cast<std::uint16_t>(at<T>(values, i));
      const auto mantissa = static_cast<std::uint16_t>(v & ((1u << MANTISSA) - 1));
      const auto upper =
          static_cast<std::uint16_t>(MANTISSA > 7 ? mantissa >> (MANTISSA - 7) : mantissa << (7 - MANTISSA));
      words[i] = static_cast<std::uint16_t>((v >> kSign & 1u) << 15 | ((v >> MANTISSA & kMost) + BIAS) << 7 | upper);
    }
  }

  // kept(i): the mantissa bits below the two that words have.
  template <class Kept>
  KVSTORE_INLINE static void merge(const std::uint16_t* words, std::size_t count, std::uint8_t* values, Kept kept) {
    for (std::size_t i = 0; i < count; ++i) {
      const unsigned w = words[i], exponent = ((w >> 7) - BIAS) & kMost;
      put<T>(values, i, (w >> 15) << kSign | exponent << MANTISSA | (w >> 5 & 3u) << (MANTISSA - 2) | kept(i));
    }
  }
};

using Half = Narrow<std::uint16_t, 5, 10, 112>;
using E5M2 = Narrow<std::uint8_t, 5, 2, 112>;
using E4M3 = Narrow<std::uint8_t, 4, 3, 120>;

KVSTORE_INLINE void make_upper(const std::uint8_t* values, std::size_t count, std::uint16_t* words) {
  for (std::size_t i = 0; i < count; ++i) words[i] = static_cast<std::uint16_t>(at<std::uint32_t>(values, i) >> 16);
}

// The bits that are set in any of the values, 4 bytes each.
KVSTORE_INLINE std::uint32_t any_of(const std::uint8_t* values, std::size_t count) {
  std::uint32_t found = 0;
  for (std::size_t i = 0; i < count; ++i) found |= at<std::uint32_t>(values, i);
  return found;
}

// The upper `lower` bytes (1 or 2) of the lower halves of fp32.
KVSTORE_INLINE void keep_lower(const std::uint8_t* values, std::size_t lower, std::size_t count, std::uint8_t* kept) {
  if (lower == 2) {
    for (std::size_t i = 0; i < count; ++i) put<std::uint16_t>(kept, i, at<std::uint32_t>(values, i) & 0xFFFFu);
  } else if (lower == 1) {
    for (std::size_t i = 0; i < count; ++i) kept[i] = static_cast<std::uint8_t>(at<std::uint32_t>(values, i) >> 8);
  }
}

// fp32 of upper halves and what was kept.
KVSTORE_INLINE void merge_lower(const std::uint16_t* words, const std::uint8_t* kept, std::size_t lower,
                                std::size_t count, std::uint8_t* values) {
  if (lower == 2) {
    for (std::size_t i = 0; i < count; ++i)
      put<std::uint32_t>(values, i, static_cast<std::uint32_t>(words[i]) << 16 | at<std::uint16_t>(kept, i));
  } else if (lower == 1) {
    for (std::size_t i = 0; i < count; ++i)
      put<std::uint32_t>(values, i, static_cast<std::uint32_t>(words[i]) << 16 | static_cast<unsigned>(kept[i]) << 8);
  } else {
    for (std::size_t i = 0; i < count; ++i) put<std::uint32_t>(values, i, static_cast<std::uint32_t>(words[i]) << 16);
  }
}

}  // namespace kvstore::words

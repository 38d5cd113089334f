// The loops between values and words of every dtype but bf16, whose values are words; see entropy/forms.h. Written for
// the compiler to vectorise, as those of entropy/scalar-inl.h are.
#pragma once

#include <cstring>

#include "common/simd.h"
#include "entropy/forms.h"

namespace kvstore::entropy {

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

KVSTORE_INLINE std::uint32_t any_body(const std::uint8_t* values, std::size_t count) {
  std::uint32_t found = 0;
  for (std::size_t i = 0; i < count; ++i) found |= at<std::uint32_t>(values, i);
  return found;
}

// Floats of an 8- or 16-bit type T with EXPONENT and MANTISSA bits; exponents count from BIAS on as those of bf16.
template <class T, unsigned EXPONENT, unsigned MANTISSA, unsigned BIAS>
struct Narrow {
  static constexpr unsigned kSign = EXPONENT + MANTISSA, kMost = (1u << EXPONENT) - 1;

  KVSTORE_INLINE static void words(const std::uint8_t* values, std::size_t count, std::uint16_t* words) {
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

KVSTORE_INLINE void words_body(Dtype dtype, const std::uint8_t* values, std::size_t count, std::uint16_t* words) {
  switch (dtype) {
    case Dtype::float32:
      for (std::size_t i = 0; i < count; ++i) words[i] = static_cast<std::uint16_t>(at<std::uint32_t>(values, i) >> 16);
      break;
    case Dtype::float16: Half::words(values, count, words); break;
    case Dtype::float8_e5m2: E5M2::words(values, count, words); break;
    case Dtype::float8_e4m3fn: E4M3::words(values, count, words); break;
    case Dtype::bfloat16: break;
  }
}

// Of fp32 `lower` bytes of the lower half from its top, of fp16 the lower byte, of E4M3 the lowest bit: eight eighths of
// the run share bytes.
KVSTORE_INLINE void keep_body(Dtype dtype, std::size_t lower, const std::uint8_t* values, std::size_t count,
                              std::uint8_t* kept) {
  if (dtype == Dtype::float32 && lower == 2) {
    for (std::size_t i = 0; i < count; ++i) put<std::uint16_t>(kept, i, at<std::uint32_t>(values, i) & 0xFFFFu);
  } else if (dtype == Dtype::float32 && lower == 1) {
    for (std::size_t i = 0; i < count; ++i) kept[i] = static_cast<std::uint8_t>(at<std::uint32_t>(values, i) >> 8);
  } else if (dtype == Dtype::float16) {
    for (std::size_t i = 0; i < count; ++i) kept[i] = static_cast<std::uint8_t>(at<std::uint16_t>(values, i));
  } else if (dtype == Dtype::float8_e4m3fn) {
    const std::size_t eighth = (count + 7) / 8;
    std::memset(kept, 0, eighth);
    for (unsigned bit = 0; bit < 8 && bit * eighth < count; ++bit) {
      const std::uint8_t* from = values + bit * eighth;
      const std::size_t here = count - bit * eighth < eighth ? count - bit * eighth : eighth;
      for (std::size_t i = 0; i < here; ++i) kept[i] = static_cast<std::uint8_t>(kept[i] | (from[i] & 1u) << bit);
    }
  }
}

KVSTORE_INLINE void merge_body(Dtype dtype, std::size_t lower, const std::uint16_t* words, const std::uint8_t* kept,
                               std::size_t count, std::uint8_t* values) {
  const auto nothing = [](std::size_t) { return 0u; };
  switch (dtype) {
    case Dtype::float32:
      for (std::size_t i = 0; lower == 2 && i < count; ++i)
        put<std::uint32_t>(values, i, static_cast<std::uint32_t>(words[i]) << 16 | at<std::uint16_t>(kept, i));
      for (std::size_t i = 0; lower == 1 && i < count; ++i)
        put<std::uint32_t>(values, i, static_cast<std::uint32_t>(words[i]) << 16 | static_cast<unsigned>(kept[i]) << 8);
      for (std::size_t i = 0; lower == 0 && i < count; ++i)
        put<std::uint32_t>(values, i, static_cast<std::uint32_t>(words[i]) << 16);
      break;
    case Dtype::float16: Half::merge(words, count, values, [&](std::size_t i) { return kept[i] + 0u; }); break;
    case Dtype::float8_e5m2: E5M2::merge(words, count, values, nothing); break;
    case Dtype::float8_e4m3fn: {
      const std::size_t eighth = (count + 7) / 8;
      for (unsigned bit = 0; bit < 8 && bit * eighth < count; ++bit) {
        const std::size_t first = bit * eighth, here = count - first < eighth ? count - first : eighth;
        E4M3::merge(words + first, here, values + first, [&](std::size_t i) { return kept[i] >> bit & 1u; });
      }
      break;
    }
    case Dtype::bfloat16: break;
  }
}

}  // namespace kvstore::entropy

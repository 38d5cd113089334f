// How values of each dtype meet the coder, which works on words (common/words.h, FORMAT.md "entropy"): symbols know the
// sign, the exponent and two mantissa bits of a word; what they leave out of a value is kept as it is.
#pragma once

#include <cstddef>
#include <cstdint>

#include "splitzip/splitzip.h"

namespace kvstore::entropy {

using splitzip::Dtype;

// The 5 lowest bits of words, in planes.
inline std::size_t planes_bytes(std::size_t count) { return (count + 1) / 2 + (count + 7) / 8; }

struct Form {
  std::uint32_t mode;
  std::size_t item;     // bytes of a value
  std::size_t escape;   // and of the upper part that an escape lists
  bool planes;          // whether the lowest bits of words are kept, in planes

  // What is kept of a head of `count` values. lower: bytes of an fp32's lower half.
  std::size_t kept(Dtype dtype, std::size_t lower, std::size_t count) const {
    const std::size_t rest = dtype == Dtype::float32         ? lower * count
                             : dtype == Dtype::float16       ? count
                             : dtype == Dtype::float8_e4m3fn ? (count + 7) / 8
                                                             : 0;
    return (planes ? planes_bytes(count) : 0) + rest;
  }
};

inline Form form_of(Dtype dtype) {
  switch (dtype) {
    case Dtype::float32: return {8, 4, 2, true};
    case Dtype::float16: return {9, 2, 2, false};
    case Dtype::float8_e5m2: return {10, 1, 1, false};
    case Dtype::float8_e4m3fn: return {11, 1, 1, false};
    case Dtype::bfloat16: break;
  }
  return {2, 2, 2, true};
}

}  // namespace kvstore::entropy

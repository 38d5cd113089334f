// The splitzip format: 4-bit exponent codes, sign and mantissa planes, sparse escapes (FORMAT.md, "splitzip").
#pragma once

#include <cstddef>
#include <cstdint>

#include "common/cpu.h"
#include "common/rows.h"

namespace kvstore::splitzip {

// E4M3 has 4 exponent bits: codes would save nothing, so its layers are stored as they are.
enum class Dtype : int { bfloat16, float16, float32, float8_e5m2, float8_e4m3fn };

inline constexpr std::size_t kChunk = 4096;  // values of one head that share a window of exponents
inline constexpr std::size_t kGroup = 32;    // every head's planes start at a multiple of so many values

// What the layers of a block have in common. Tensors are [heads, tokens, dim]; 2i and 2i + 1 are the keys and values of
// layer i. row_bytes: of one token of one head.
struct Shape {
  Dtype dtype;
  std::size_t layers;
  const std::uint32_t* heads;
  const std::uint32_t* row_bytes;
  std::size_t tokens;
};

// The most bytes that a layer can take; 0 if it has more values than the format can count.
std::size_t bound(const Shape& shape, std::size_t layer);

// What a layer takes at least.
std::size_t least(const Shape& shape, std::size_t layer);

// What a layer of ordinary values takes, rounded up.
std::size_t usual(const Shape& shape, std::size_t layer);

inline constexpr std::size_t kTooShort = ~std::size_t{0};

// Codes all layers one after the other into `out`. sizes: bytes of each layer. Returns how many chunks were stored raw,
// or kTooShort if `capacity`, less than the sum of the bounds, was too small; `out` then holds anything. The caller
// vouches for the rows.
std::size_t encode(const Shape& shape, const Rows* source, std::uint8_t* out, std::size_t capacity,
                   std::uint64_t* sizes, Level level);

// Decodes the first `wanted` tokens of all layers into `target`. Returns nullptr, or what is wrong with the payload, of
// which nothing outside of `nbytes` is read; the target then holds anything. sizes: as from `encode`, their sum nbytes.
const char* decode(const Shape& shape, const std::uint8_t* payload, std::size_t nbytes, const std::uint64_t* sizes,
                   const Rows* target, std::size_t wanted, Level level, bool large = false);

}  // namespace kvstore::splitzip

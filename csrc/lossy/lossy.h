// The lossy mode of the predictive codec (FORMAT.md, "predictive"): decoding. The definition, and the encoder, is
// codecs/predictive/lossy_reference.py.
#pragma once

#include <cstddef>
#include <cstdint>

#include "common/cpu.h"
#include "common/rows.h"
#include "lossy/model.h"

namespace kvstore::lossy {

constexpr std::uint32_t kMode = 5;
constexpr std::size_t kHeader = 30;  // of the first layer
constexpr float kMostStep = 1e6f;

// `count` tokens, the first at position `start`, and a row table of their keys and values: K and V of every layer of
// the model, rows of bf16. Nothing may change during a call. From one token to the next it is `every` positions: 1, but
// for the sample of a block that is encoded to see how long it becomes.
struct Block {
  const std::int64_t* tokens;
  std::size_t count;
  std::int64_t start;
  const Rows* rows;
  std::int64_t every = 1;
};

// For tests, what each part was made from: numbers and classes [count * C], shifts [count]; classes are -1 where
// nothing is coded, numbers are 0 there, and shifts are kPlain for rows that are exact.
struct Trace {
  std::int16_t* const* numbers;
  std::int8_t* const* classes;
  std::uint8_t* const* shifts;
};

// Whether so many tokens of the model's widths are few enough to be decoded at once.
bool codable(const Model& model, std::size_t count);

// Writes the first `wanted` tokens to block.rows; null, or what is damaged. Any payload is safe to give; what rows hold
// after damage is undefined. sizes: [layers]. trace: or null. Throws std::bad_alloc only.
const char* decode(const Model& model, const Block& block, const std::uint8_t* payload, std::size_t nbytes,
                   const std::uint64_t* sizes, std::size_t wanted, Level level, const Trace* trace = nullptr);

}  // namespace kvstore::lossy

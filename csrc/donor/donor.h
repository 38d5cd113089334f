// The donor codec's exact core (FORMAT.md, "donor"): the differences of bf16 rows from the rows of the same tokens
// in other blocks, coded by rANS. codecs/donor/reference.py is this as a program.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "common/cpu.h"
#include "common/in_order.h"
#include "common/rows.h"
#include "predictive/model.h"

namespace kvstore::donor {

constexpr std::size_t kChannels = 8;  // of a head that share a scale

// Rows [start, start + count) of a block and the rows, as many, that they are predicted by.
struct Span {
  std::size_t start, count;
  std::int64_t turn;   // which of the block's angles its keys are rotated by; below 0: none
  const Rows* donor;   // K and V of every layer; only read
};

// Spans are disjoint, rise, and are not empty. Nothing may change during a call.
struct Block {
  const Span* spans;
  std::size_t number;           // of spans, at least 1
  const std::int16_t* angles;   // of each: cos [half], sin [half] in 1/16384
  std::size_t half;             // of the dimensions of K, if a span is rotated
  const Rows* rows;             // of the whole block: K and V of every layer, rows of bf16
  std::int64_t start;           // position of the block's first row
  bool propagated;              // the model has weights, and knows the positions
};

// Rows in spans.
inline std::size_t covered(const Block& block) {
  std::size_t sum = 0;
  for (std::size_t s = 0; s < block.number; ++s) sum += block.spans[s].count;
  return sum;
}

// Writes the layers one after the other to out and their sizes to sizes [layers]; false if they are longer than
// capacity. All of out may be overwritten. The model must have frequencies and be `codable` for all covered rows.
// Throws std::bad_alloc only.
bool encode(const predict::Model& model, const Block& block, std::uint8_t* out, std::size_t capacity,
            std::uint64_t* sizes, Level level);

// Writes the covered rows below `wanted` to block.rows; null, or what is damaged. Any payload is safe to give; what
// rows hold after damage is undefined. sizes: [layers].
const char* decode(const predict::Model& model, const Block& block, const std::uint8_t* payload, std::size_t nbytes,
                   const std::uint64_t* sizes, std::size_t wanted, Level level);
// The same, a layer at a time; `sizes` are not needed any more afterwards.
std::unique_ptr<InOrder> in_order(const predict::Model& model, const Block& block, const std::uint8_t* payload,
                                  std::size_t nbytes, const std::uint64_t* sizes, std::size_t wanted, Level level);

}  // namespace kvstore::donor

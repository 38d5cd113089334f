// The predictive codec, lossless (FORMAT.md, "predictive"): the differences of bf16 values from what
// the token's id and the two layers before predict, coded by rANS.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "common/cpu.h"
#include "common/in_order.h"
#include "common/rows.h"
#include "predictive/kernels.h"
#include "predictive/model.h"

namespace kvstore::predict {

constexpr std::uint32_t kMode = 4;

// Results of encode other than 0.
enum Result : int {
  kNoRoom = -1,    // longer than capacity
  kFallBack = -2,  // not smaller than limit, or not predictable()
};

// `count` tokens, the first at position `start`, and a row table of their keys and values: K and V of every layer of
// the model, rows of bf16. Nothing may change during a call.
struct Block {
  const std::int64_t* tokens;
  std::size_t count;
  std::int64_t start;
  const Rows* rows;
};

// What dtypes have of their own: the number of the mode, and loops of `Kernels`; null: those of bf16.
struct Axis {
  std::uint32_t mode = kMode;
  decltype(Kernels::classes) classes = nullptr;
  decltype(Kernels::split) split = nullptr;
  decltype(Kernels::join) join = nullptr;
};

// Whether the block has tokens and the model knows their positions.
bool predictable(const Model& model, const Block& block);

// Writes the layers one after the other to out and their sizes to sizes [layers]; 0, or a Result. All of out may be
// overwritten. The model must have frequencies and be `codable`. Throws std::bad_alloc only.
int encode(const Model& model, const Block& block, std::uint8_t* out, std::size_t capacity, std::size_t limit,
           std::uint64_t* sizes, Level level, const Axis& axis = {});

// Writes the first `wanted` tokens to block.rows; null, or what is damaged. Any payload is safe to give; what rows hold
// after damage is undefined. sizes: [layers].
const char* decode(const Model& model, const Block& block, const std::uint8_t* payload, std::size_t nbytes,
                   const std::uint64_t* sizes, std::size_t wanted, Level level, const Axis& axis = {});
// The same, a layer at a time; `sizes` and `axis` are not needed any more afterwards.
std::unique_ptr<InOrder> in_order(const Model& model, const Block& block, const std::uint8_t* payload,
                                  std::size_t nbytes, const std::uint64_t* sizes, std::size_t wanted, Level level,
                                  const Axis& axis = {});

// What encode would hand to rANS, part after part: symbols and classes [count * C], and the offset of each row's scale
// in quarter octaves [count]. Needs no frequencies. False: not predictable.
bool residuals(const Model& model, const Block& block, std::uint8_t* const* symbols, std::uint8_t* const* classes,
               std::int32_t* const* offsets, Level level);

}  // namespace kvstore::predict

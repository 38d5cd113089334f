// The levels of the exact predictor (FORMAT.md, "Levels"): inside a layer, channels are coded in groups of 16, and each
// group is predicted from the groups before it too.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "common/cpu.h"
#include "common/in_order.h"
#include "levels/model.h"
#include "predictive/predictive.h"

namespace kvstore::levels {

constexpr std::uint32_t mode_of(int level) { return 20 + static_cast<std::uint32_t>(level); }

// As those of predictive.h.
bool predictable(const Model& model, const predict::Block& block);
int encode(const Model& model, const predict::Block& block, std::uint8_t* out, std::size_t capacity, std::size_t limit,
           std::uint64_t* sizes, Level level);
const char* decode(const Model& model, const predict::Block& block, const std::uint8_t* payload, std::size_t nbytes,
                   const std::uint64_t* sizes, std::size_t wanted, Level level);
std::unique_ptr<InOrder> in_order(const Model& model, const predict::Block& block, const std::uint8_t* payload,
                                  std::size_t nbytes, const std::uint64_t* sizes, std::size_t wanted, Level level);

// Multiplies and adds 8-bit numbers with what the sums are made with, in registers; returns how many. For benchmarks.
std::uint64_t multiply(std::uint64_t rounds, Level level);

}  // namespace kvstore::levels

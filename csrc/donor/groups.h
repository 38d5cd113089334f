// The donor codec's mode in groups (FORMAT.md, "In groups"): what a block differs in from its donors is predicted as
// the levels of the exact predictor predict blocks. codecs/donor/groups/reference.py is this as a program.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "common/cpu.h"
#include "common/in_order.h"
#include "donor/donor.h"
#include "levels/model.h"

namespace kvstore::donor::groups {

// As those of donor.h; `propagated` is not looked at. The model must be `levels::codable` for all covered rows and know
// the positions.
bool encode(const levels::Model& model, const Block& block, std::uint8_t* out, std::size_t capacity,
            std::uint64_t* sizes, Level level);
const char* decode(const levels::Model& model, const Block& block, const std::uint8_t* payload, std::size_t nbytes,
                   const std::uint64_t* sizes, std::size_t wanted, Level level);
std::unique_ptr<InOrder> in_order(const levels::Model& model, const Block& block, const std::uint8_t* payload,
                                  std::size_t nbytes, const std::uint64_t* sizes, std::size_t wanted, Level level);

}  // namespace kvstore::donor::groups

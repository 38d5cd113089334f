// The rows of donors as a prediction of a block's: what the exact core and the step mode both start from. Included by
// donor/donor.cc and donor/steps/steps.cc only.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "donor/dispatch.h"
#include "donor/donor.h"

namespace kvstore::donor {

// Writes part `number`, of `part.heads` heads, of all covered rows to `to`, one row after the other: the donors' values,
// keys turned where their span says so, 0 for what is not finite. room: for a row of a head.
inline void load(const Kernels& run, const Block& block, const predict::Part& part, std::size_t number,
                 std::uint16_t* room, std::uint16_t* to) {
  for (std::size_t s = 0; s < block.number; ++s) {
    const Span& span = block.spans[s];
    const bool turned = span.turn >= 0 && number % 2 == 0;
    const std::size_t turn = turned ? static_cast<std::size_t>(span.turn) : 0;
    const std::int16_t* const cos = block.angles + turn * 2 * block.half;
    const Rows& rows = span.donor[number];
    for (std::size_t i = 0; i < span.count; ++i) {
      const std::int64_t before = rows.token_stride * static_cast<std::int64_t>(i);
      std::uint64_t address = rows.address + static_cast<std::uint64_t>(before);
      for (std::size_t head = 0; head < part.heads; ++head, to += part.dim) {
        const auto* x = reinterpret_cast<const std::uint16_t*>(address);
        if (address % sizeof *x != 0) {
          std::memcpy(room, reinterpret_cast<const void*>(address), 2 * part.dim);
          x = room;
        }
        if (turned)
          run.turn(x, block.half, cos, cos + block.half, to);
        else
          run.finite(x, part.dim, to);
        address += static_cast<std::uint64_t>(rows.head_stride);
      }
    }
  }
}

}  // namespace kvstore::donor

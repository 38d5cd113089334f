// Rows of bf16 between tensors and buffers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "common/rows.h"

namespace kvstore::predict {

template <bool OUT>
inline void copy_head(std::uint64_t address, std::uint16_t* values, std::size_t bytes) {
  if (OUT)
    std::memcpy(reinterpret_cast<void*>(address), values, bytes);
  else
    std::memcpy(values, reinterpret_cast<const void*>(address), bytes);
}

// Copies row `row` of a part, of `heads` heads of `dim` values, from a tensor to `values`, its heads one after the
// other, or back.
template <bool OUT, class AnyPart>
void copy_row(const AnyPart& part, const Rows& place, std::size_t row, std::uint16_t* values) {
  const std::int64_t before = place.token_stride * static_cast<std::int64_t>(row);
  std::uint64_t address = place.address + static_cast<std::uint64_t>(before);
  for (std::size_t head = 0; head < part.heads; ++head, values += part.dim) {
    // The usual sizes are a few instructions, others a call.
    switch (part.dim) {
      case 64: copy_head<OUT>(address, values, 128); break;
      case 128: copy_head<OUT>(address, values, 256); break;
      default: copy_head<OUT>(address, values, 2 * part.dim);
    }
    address += static_cast<std::uint64_t>(place.head_stride);
  }
}

}  // namespace kvstore::predict

#include "donor/rows.h"

#include <cstring>

#include "donor/dispatch.h"

namespace kvstore::donor {

const Kernels& kernels(Level level) { return KVSTORE_PICK(level, kKernels); }

void load(const Kernels& run, const Block& block, std::size_t heads, std::size_t dim, std::size_t number,
          std::uint16_t* scratch, std::uint16_t* to) {
  for (std::size_t s = 0; s < block.number; ++s) {
    const Span& span = block.spans[s];
    const bool turned = span.turn >= 0 && number % 2 == 0;
    const std::size_t turn = turned ? static_cast<std::size_t>(span.turn) : 0;
    const std::int16_t* const cos = block.angles + turn * 2 * block.half;
    const Rows& rows = span.donor[number];
    for (std::size_t i = 0; i < span.count; ++i) {
      const std::int64_t before = rows.token_stride * static_cast<std::int64_t>(i);
      std::uint64_t address = rows.address + static_cast<std::uint64_t>(before);
      for (std::size_t head = 0; head < heads; ++head, to += dim) {
        const auto* x = reinterpret_cast<const std::uint16_t*>(address);
        if (address % sizeof *x != 0) {
          std::memcpy(scratch, reinterpret_cast<const void*>(address), 2 * dim);
          x = scratch;
        }
        if (turned)
          run.turn(x, block.half, cos, cos + block.half, to);
        else
          run.finite(x, dim, to);
        address += static_cast<std::uint64_t>(rows.head_stride);
      }
    }
  }
}

}  // namespace kvstore::donor

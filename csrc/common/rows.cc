#include "common/rows.h"

#include <cstring>

#include "common/stream.h"

namespace kvstore {

void copy_rows(const Rows* target, const Rows* source, const std::uint32_t* heads,
               const std::uint32_t* row_bytes, std::size_t count, std::size_t tokens, bool large) {
  if (tokens == 0) return;
  const auto copy = [large](std::uint64_t to, std::uint64_t from, std::size_t nbytes) {
    if (large)
      stream(reinterpret_cast<void*>(to), reinterpret_cast<const void*>(from), nbytes);
    else
      std::memcpy(reinterpret_cast<void*>(to), reinterpret_cast<const void*>(from), nbytes);
  };
  for (std::size_t i = 0; i < count; ++i) {
    const std::size_t row = row_bytes[i];
    const auto step = static_cast<std::int64_t>(row);
    const bool packed = target[i].token_stride == step && source[i].token_stride == step;
    for (std::uint32_t h = 0; h < heads[i]; ++h) {
      // Offsets are added to integers, not to pointers: strides may be negative or zero.
      const auto to = target[i].address + static_cast<std::uint64_t>(target[i].head_stride * h);
      const auto from = source[i].address + static_cast<std::uint64_t>(source[i].head_stride * h);
      if (packed) {
        copy(to, from, row * tokens);
        continue;
      }
      for (std::size_t t = 0; t < tokens; ++t) {
        const auto n = static_cast<std::int64_t>(t);
        copy(to + static_cast<std::uint64_t>(target[i].token_stride * n),
             from + static_cast<std::uint64_t>(source[i].token_stride * n), row);
      }
    }
  }
  if (large) stream_end();
}

}  // namespace kvstore

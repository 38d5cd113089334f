// Copies key/value rows between strided tensors and packed blocks.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kvstore {

// One [heads, tokens, row_bytes] tensor in memory; strides in bytes, rows contiguous.
struct Rows {
  std::uint64_t address;
  std::int64_t head_stride;
  std::int64_t token_stride;
};

// Copies `count` tensors of `tokens` rows each from `source` to `target`. Where the tokens of a head lie
// contiguous on both sides a head is one memcpy. The caller vouches that all ranges are valid and disjoint.
void copy_rows(const Rows* target, const Rows* source, const std::uint32_t* heads,
               const std::uint32_t* row_bytes, std::size_t count, std::size_t tokens);

}  // namespace kvstore

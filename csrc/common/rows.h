// Key/value rows in memory: copies between strided tensors and packed blocks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace kvstore {

// One [heads, tokens, row_bytes] tensor in memory; strides in bytes, rows contiguous.
struct Rows {
  std::uint64_t address;
  std::int64_t head_stride;
  std::int64_t token_stride;
};

// Copies `count` tensors of `tokens` rows each from `source` to `target`. Where the tokens of a head lie
// contiguous on both sides a head is one copy. large: the target is part of more than the caches hold, and is written
// past them. The caller vouches that all ranges are valid and disjoint.
void copy_rows(const Rows* target, const Rows* source, const std::uint32_t* heads,
               const std::uint32_t* row_bytes, std::size_t count, std::size_t tokens, bool large = false);

// The rows of one head as one run of bytes.
struct Run {
  std::uint64_t address;
  std::int64_t stride;
  std::size_t row;

  Run(const Rows& rows, std::uint32_t head, std::size_t row_bytes)
      : address(rows.address + static_cast<std::uint64_t>(rows.head_stride * head)),
        stride(rows.token_stride),
        row(row_bytes) {}

  bool contiguous() const { return stride == static_cast<std::int64_t>(row); }

  // visit(address of a piece of a row, offset in the part, bytes) for `nbytes` from `begin`.
  template <class Visit>
  void each(std::size_t begin, std::size_t nbytes, Visit visit) const {
    for (std::size_t done = 0; done < nbytes;) {
      const std::size_t at = begin + done, within = at % row;
      const std::size_t piece = row - within < nbytes - done ? row - within : nbytes - done;
      visit(address + static_cast<std::uint64_t>(stride * static_cast<std::int64_t>(at / row)) + within, done, piece);
      done += piece;
    }
  }

  // `nbytes` from `begin`, in place if they lie together, else copied into `room`.
  const std::uint8_t* gather(std::size_t begin, std::size_t nbytes, std::uint8_t* room) const {
    if (contiguous()) return reinterpret_cast<const std::uint8_t*>(address + begin);
    each(begin, nbytes, [&](std::uint64_t at, std::size_t done, std::size_t piece) {
      std::memcpy(room + done, reinterpret_cast<const void*>(at), piece);
    });
    return room;
  }

  void scatter(std::size_t begin, std::size_t nbytes, const std::uint8_t* from) const {
    each(begin, nbytes, [&](std::uint64_t at, std::size_t done, std::size_t piece) {
      std::memcpy(reinterpret_cast<void*>(at), from + done, piece);
    });
  }
};

}  // namespace kvstore

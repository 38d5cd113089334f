// Writes to a file that many pieces of memory make up.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kvstore {

struct Piece {
  const void* data;
  size_t size;
};

struct Written {
  int error;       // of the system; 0: none
  uint64_t asked;  // bytes of the call that failed, or that the system took a part of only; 0 where all was written
};

// Writes the pieces one after the other from `offset` on. A call takes as many whole pieces as are at most `most_bytes`
// together, but at least one, and at most `most_pieces`.
Written write_pieces(int fd, const Piece* pieces, size_t count, uint64_t offset, size_t most_bytes, size_t most_pieces);

}  // namespace kvstore

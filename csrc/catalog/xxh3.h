// XXH3 with 64 bits, seed 0 and the usual secret: the checksum of catalog values, which are 16 bytes or more. The same
// numbers as the package xxhash gives.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kvstore {

uint64_t xxh3_64(const uint8_t* data, size_t size);  // size >= 17

}  // namespace kvstore

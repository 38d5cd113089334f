// XXH3, seed 0 and the usual secret, where C++ hashes, or Python's lock is to be kept meanwhile: the checksums of
// catalog values, which are 16 bytes or more, and of payloads. The same numbers as the package xxhash gives.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "common/cpu.h"

namespace kvstore {

constexpr size_t kLeast64 = 17, kLeast128 = 241;  // bytes that each takes at least

uint64_t xxh3_64(const uint8_t* data, size_t size, Level level);

// The bytes of the hash in the order in which xxhash writes them.
std::array<uint8_t, 16> xxh3_128(const uint8_t* data, size_t size, Level level);

}  // namespace kvstore

// Numbers in as few bytes as they need: 7 bits a byte, the lowest first; a byte's highest bit is set if more follow.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kvstore {

// Takes a number of up to 35 bits from the `left` bytes at `at` and moves both on. False: the bytes end before it does.
inline bool take_varint(const std::uint8_t*& at, std::size_t& left, std::uint64_t& value) {
  value = 0;
  for (unsigned shift = 0; shift < 35 && left != 0; shift += 7) {
    const std::uint8_t byte = *at++;
    --left;
    value |= static_cast<std::uint64_t>(byte & 127) << shift;
    if (byte < 128) return true;
  }
  return false;
}

// Calls put(byte) for each byte of a number.
template <class Put>
void put_varint(std::uint64_t value, Put put) {
  for (; value > 127; value >>= 7) put(static_cast<std::uint8_t>((value & 127) | 128));
  put(static_cast<std::uint8_t>(value));
}

}  // namespace kvstore

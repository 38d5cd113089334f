// Little-endian integers at any address.
#pragma once

#include <cstdint>

namespace kvstore {

inline std::uint32_t load16(const std::uint8_t* from) { return from[0] | static_cast<std::uint32_t>(from[1]) << 8; }

inline std::uint32_t load32(const std::uint8_t* from) { return load16(from) | load16(from + 2) << 16; }

inline void store16(std::uint8_t* to, std::uint32_t value) {
  to[0] = static_cast<std::uint8_t>(value);
  to[1] = static_cast<std::uint8_t>(value >> 8);
}

inline void store32(std::uint8_t* to, std::uint32_t value) {
  store16(to, value);
  store16(to + 2, value >> 16);
}

inline void store64(std::uint8_t* to, std::uint64_t value) {
  store32(to, static_cast<std::uint32_t>(value));
  store32(to + 4, static_cast<std::uint32_t>(value >> 32));
}

}  // namespace kvstore

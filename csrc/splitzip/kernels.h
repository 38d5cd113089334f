// The inner loops of splitzip as a table of functions, one for each CPU level: a chunk of values to codes and planes,
// and back; and what they share.
//
// Head is the part of a value that is coded: uint16_t (bf16: 8 exponent bits, rest of 8 bits) or uint8_t (E5M2: 5
// exponent bits, rest of 3 bits, as three bit planes per 32 values).
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "common/endian.h"
#include "splitzip/splitzip.h"

namespace kvstore::splitzip {

struct Range {
  unsigned top;  // the largest exponent
  bool zero;     // whether any is zero
};

struct Window {
  unsigned base;
  bool zero;  // code 0 stands for exponent 0, not for the base
};

inline constexpr std::size_t kMasks = kChunk / 64;

template <class Head>
struct Kernels {
  Range (*scan)(const Head* values, std::size_t count);
  // How many exponents are above `top`.
  std::size_t (*above)(const Head* values, std::size_t count, unsigned top);
  // Writes the codes and planes of a chunk, zeros up to a whole group, and one bit per value that is escaped. Meanwhile
  // the processor is told to fetch as much from `next` on, which may be any address: `scan` would wait for it.
  void (*pack)(const Head* values, std::size_t count, Window window, std::uint8_t* codes, std::uint8_t* rest,
               std::uint64_t* escaped, std::uintptr_t next);
  // The inverse, escaped values excepted. stream: the values will not be read soon, and are aligned to 64 bytes.
  void (*unpack)(const std::uint8_t* codes, const std::uint8_t* rest, std::size_t count, Window window, Head* values,
                 bool stream);
};

// ---- the two kinds of heads -----------------------------------------------------------------------------------------

inline unsigned exponent_of(std::uint16_t v) { return (v >> 7) & 0xFFu; }
inline unsigned exponent_of(std::uint8_t v) { return (v >> 2) & 0x1Fu; }
inline std::uint16_t with_exponent(std::uint16_t v, unsigned e) {
  return static_cast<std::uint16_t>((v & 0x807Fu) | ((e & 0xFFu) << 7));
}
inline std::uint8_t with_exponent(std::uint8_t v, unsigned e) {
  return static_cast<std::uint8_t>((v & 0x83u) | ((e & 0x1Fu) << 2));
}
template <class Head>
constexpr std::size_t rest_bytes(std::size_t values) {  // of whole groups
  return sizeof(Head) == 2 ? values : values / 8 * 3;
}

inline void pack_rest(const std::uint16_t* v, std::size_t count, std::uint8_t* rest) {
  for (std::size_t i = 0; i < count; ++i) rest[i] = static_cast<std::uint8_t>(((v[i] >> 8) & 0x80u) | (v[i] & 0x7Fu));
  for (std::size_t i = count; i % kGroup; ++i) rest[i] = 0;
}
inline void pack_rest(const std::uint8_t* v, std::size_t count, std::uint8_t* rest) {
  for (std::size_t first = 0; first < count; first += kGroup, rest += 12) {
    std::uint32_t planes[3] = {0, 0, 0};
    for (std::size_t i = 0; i < kGroup && first + i < count; ++i) {
      const std::uint32_t x = v[first + i];
      planes[0] |= (x & 1u) << i;
      planes[1] |= (x >> 1 & 1u) << i;
      planes[2] |= (x >> 7) << i;
    }
    for (std::size_t p = 0; p < 3; ++p) store32(rest + 4 * p, planes[p]);
  }
}
// The values with exponent 0.
inline void unpack_rest(const std::uint8_t* rest, std::size_t count, std::uint16_t* v) {
  for (std::size_t i = 0; i < count; ++i)
    v[i] = static_cast<std::uint16_t>((rest[i] & 0x80u) << 8 | (rest[i] & 0x7Fu));
}
inline void unpack_rest(const std::uint8_t* rest, std::size_t count, std::uint8_t* v) {
  for (std::size_t i = 0; i < count; ++i) {
    const std::uint8_t* group = rest + i / kGroup * 12;
    const std::size_t bit = i % kGroup;
    v[i] = static_cast<std::uint8_t>((load32(group) >> bit & 1u) | (load32(group + 4) >> bit & 1u) << 1 |
                                     (load32(group + 8) >> bit & 1u) << 7);
  }
}

// Fetches the lines of 64 values.
template <class Head>
inline void prefetch64(std::uintptr_t values) {
  for (std::size_t line = 0; line < sizeof(Head); ++line)
    __builtin_prefetch(reinterpret_cast<const void*>(values + 64 * line));
}

inline unsigned exponent_of_code(unsigned code, Window window) {
  return code == 0 && window.zero ? 0 : window.base + code;
}

// The two bytes of a value by code, rest excepted: what vector twins look up.
struct CodeBytes {
  alignas(16) std::uint8_t high[16], low[16];

  CodeBytes(Window window, bool wide) {
    for (unsigned code = 0; code < 16; ++code) {
      const unsigned e = exponent_of_code(code, window);
      high[code] = static_cast<std::uint8_t>((e & 0xFFu) >> 1);
      low[code] = static_cast<std::uint8_t>(wide ? e << 7 : (e & 0x1Fu) << 2);
    }
  }
};

}  // namespace kvstore::splitzip

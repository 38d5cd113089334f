// The rANS steps in plain C++, a lane at a time. Included by rans/dispatch.h only.
#pragma once

#include "common/endian.h"
#include "rans/walk.h"

namespace kvstore::rans::scalar {
namespace {

// One lane's symbol. Writes the two bytes below top in any case, so that nothing here is a branch.
template <int BITS>
inline std::uint32_t encode_lane(std::uint32_t e, std::uint32_t x, std::uint8_t*& top) {
  const std::uint32_t below = e & 0xfff;
  const std::uint32_t full = (x >> (31 - BITS)) > below;
  store16(top - 2, x);
  top -= 2 * full;
  x >>= 16 * full;
  const std::uint32_t q = x / (below + 1);
  return (q << BITS) + (x - q * (below + 1)) + (e >> 12 & 0xfff);
}

template <int BITS>
inline std::uint32_t decode_lane(std::uint32_t e, std::uint32_t x, const std::uint8_t*& words) {
  x = ((e >> 8 & 0xfff) + 1) * (x >> BITS) + (e >> 20);
  const std::uint32_t low = x < kLow;
  const std::uint32_t next = load16(words) & (0 - low);
  words += 2 * low;
  return x << (16 * low) | next;
}

template <int BITS>
std::size_t encode(const std::uint32_t* entries, std::uint32_t* states, const std::uint8_t* symbols,
                          ClassWalk& walk, std::size_t steps, std::uint8_t*& top, const std::uint8_t* floor,
                          std::uint32_t& seen) {
  std::uint8_t* at = top;
  for (; steps != 0 && at - floor >= kStepBytes; --steps) {
    symbols -= kLanes;
    walk.back();
    const std::uint8_t* classes = walk.here();
    for (std::size_t lane = kLanes; lane-- > 0;) {
      const std::uint32_t e = entries[std::size_t{classes[lane]} * Tables::kSymbols + symbols[lane]];
      seen |= e;
      states[lane] = encode_lane<BITS>(e, states[lane], at);
    }
  }
  top = at;
  return steps;
}

template <int BITS>
std::size_t decode(const std::uint32_t* slots, std::uint32_t* states, const std::uint8_t*& words,
                          const std::uint8_t* end, ClassWalk& walk, std::size_t steps, std::uint8_t* out) {
  const std::uint8_t* at = words;
  for (; steps != 0 && end - at >= kStepBytes; --steps) {
    const std::uint8_t* classes = walk.here();
    for (std::size_t lane = 0; lane < kLanes; ++lane) {
      const std::uint32_t x = states[lane];
      const std::uint32_t e = slots[(std::size_t{classes[lane]} << BITS) + (x & ((1u << BITS) - 1))];
      out[lane] = static_cast<std::uint8_t>(e);
      states[lane] = decode_lane<BITS>(e, x, at);
    }
    walk.forward();
    out += kLanes;
  }
  words = at;
  return steps;
}

}  // namespace
}  // namespace kvstore::rans::scalar

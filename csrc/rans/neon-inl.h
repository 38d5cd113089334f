// NEON twins of the rANS steps: eight vectors of 4 lanes. Included by rans/dispatch.h only.
#pragma once

#if defined(__aarch64__)
#include "common/intrinsics_begin.h"
#include "common/simd.h"
#include "rans/walk.h"

namespace kvstore::rans::neon {
namespace {

constexpr std::size_t kVectors = kLanes / 4;

// For every set of lanes, which bytes of a vector are their lower halves, moved to the end of eight bytes (pack), and
// which bytes of the next words each of them takes (spread). 255: none.
struct Shuffles {
  alignas(16) std::uint8_t pack[16][8];
  alignas(16) std::uint8_t spread[16][16];
};

constexpr Shuffles make_shuffles() {
  Shuffles made{};
  for (unsigned set = 0; set < 16; ++set) {
    unsigned count = 0;
    for (unsigned lane = 0; lane < 4; ++lane) count += set >> lane & 1;
    for (unsigned i = 0; i < 8; ++i) made.pack[set][i] = 255;
    for (unsigned i = 0; i < 16; ++i) made.spread[set][i] = 255;
    unsigned word = 0;
    for (unsigned lane = 0; lane < 4; ++lane) {
      if (!(set >> lane & 1)) continue;
      for (unsigned byte = 0; byte < 2; ++byte) {
        made.pack[set][8 - 2 * count + 2 * word + byte] = static_cast<std::uint8_t>(4 * lane + byte);
        made.spread[set][4 * lane + byte] = static_cast<std::uint8_t>(2 * word + byte);
      }
      ++word;
    }
  }
  return made;
}

constexpr Shuffles kShuffles = make_shuffles();

// Which lanes are all ones, and how many.
struct Set {
  unsigned lanes, count;
};

KVSTORE_INLINE Set set_of(uint32x4_t full) {
  const std::uint32_t bits[4] = {0x101, 0x102, 0x104, 0x108};
  const unsigned sum = vaddvq_u32(vandq_u32(full, vld1q_u32(bits)));
  return {sum & 15, sum >> 8};
}

// 16 bytes as four vectors.
KVSTORE_INLINE void widen(const std::uint8_t* from, uint32x4_t (&to)[4]) {
  const uint8x16_t bytes = vld1q_u8(from);
  const uint16x8_t low = vmovl_u8(vget_low_u8(bytes)), high = vmovl_high_u8(bytes);
  to[0] = vmovl_u16(vget_low_u16(low));
  to[1] = vmovl_high_u16(low);
  to[2] = vmovl_u16(vget_low_u16(high));
  to[3] = vmovl_high_u16(high);
}

// table[index] for four lanes; NEON has no gather.
KVSTORE_INLINE uint32x4_t pick4(const std::uint32_t* table, uint32x4_t index) {
  const uint64x2_t pairs = vreinterpretq_u64_u32(index);
  const std::uint64_t a = vgetq_lane_u64(pairs, 0), b = vgetq_lane_u64(pairs, 1);
  uint32x4_t found = vld1q_dup_u32(table + (a & 0xffffffff));
  found = vld1q_lane_u32(table + (a >> 32), found, 1);
  found = vld1q_lane_u32(table + (b & 0xffffffff), found, 2);
  return vld1q_lane_u32(table + (b >> 32), found, 3);
}

template <int BITS>
KVSTORE_INLINE uint32x4_t encode4(uint32x4_t e, uint32x4_t x, std::uint8_t*& top) {
  const uint32x4_t below = vandq_u32(e, vdupq_n_u32(0xfff));  // frequency - 1
  const uint32x4_t f = vaddq_u32(below, vdupq_n_u32(1));
  const uint32x4_t full = vcgtq_u32(vshrq_n_u32(x, 31 - BITS), below);
  const Set set = set_of(full);
  vst1_u8(top - 8, vqtbl1_u8(vreinterpretq_u8_u32(x), vld1_u8(kShuffles.pack[set.lanes])));
  top -= 2 * set.count;
  x = vbslq_u32(full, vshrq_n_u32(x, 16), x);
  // x / f is below 2^20. The divisor is made larger by 2^-22 to 2^-21 of itself (its lowest 12 bits are zero), more
  // than the two roundings can add, whatever the rounding mode: the quotient is right or one too small.
  const uint32x4_t wide = vorrq_u32(vreinterpretq_u32_f32(vcvtq_f32_u32(f)), vdupq_n_u32(4));
  const uint32x4_t q = vcvtq_u32_f32(vdivq_f32(vcvtq_f32_u32(x), vreinterpretq_f32_u32(wide)));
  const uint32x4_t rest = vmlsq_u32(x, q, f);
  const uint32x4_t offset = vandq_u32(vshrq_n_u32(e, 12), vdupq_n_u32(0xfff));
  const uint32x4_t next = vaddq_u32(vaddq_u32(rest, offset), vshlq_n_u32(q, BITS));
  const uint32x4_t small = vcgtq_u32(rest, below);
  return vaddq_u32(next, vandq_u32(small, vsubq_u32(vdupq_n_u32(1u << BITS), f)));
}

template <int BITS>
std::size_t encode(const std::uint32_t* entries, std::uint32_t* states, const std::uint8_t* symbols, ClassWalk& walk,
                   std::size_t steps, std::uint8_t*& top, const std::uint8_t* floor, std::uint32_t& seen) {
  uint32x4_t x[kVectors], all = vdupq_n_u32(0);
  for (std::size_t v = 0; v < kVectors; ++v) x[v] = vld1q_u32(states + 4 * v);
  std::uint8_t* at = top;
  for (; steps != 0 && at - floor >= kStepBytes; --steps) {
    symbols -= kLanes;
    walk.back();
    const std::uint8_t* classes = walk.here();
    for (std::size_t half = kVectors; half != 0; half -= 4) {
      uint32x4_t kinds[4], which[4];
      widen(classes + 4 * (half - 4), kinds);
      widen(symbols + 4 * (half - 4), which);
      for (std::size_t v = 4; v-- > 0;) {
        const uint32x4_t e = pick4(entries, vsliq_n_u32(which[v], kinds[v], 8));
        all = vorrq_u32(all, e);
        x[half - 4 + v] = encode4<BITS>(e, x[half - 4 + v], at);
      }
    }
  }
  top = at;
  seen |= vmaxvq_u32(all) & 1u << 31;
  for (std::size_t v = 0; v < kVectors; ++v) vst1q_u32(states + 4 * v, x[v]);
  return steps;
}

template <int BITS>
KVSTORE_INLINE uint32x4_t decode4(uint32x4_t e, uint32x4_t x, const std::uint8_t*& words) {
  const uint32x4_t high = vshrq_n_u32(x, BITS);
  const uint32x4_t below = vandq_u32(vshrq_n_u32(e, 8), vdupq_n_u32(0xfff));
  x = vmlaq_u32(vaddq_u32(high, vshrq_n_u32(e, 20)), high, below);
  const uint32x4_t low = vcltq_u32(x, vdupq_n_u32(kLow));
  const Set set = set_of(low);
  const uint8x8_t next = vld1_u8(words);
  words += 2 * set.count;
  const uint8x16_t spread = vqtbl1q_u8(vcombine_u8(next, next), vld1q_u8(kShuffles.spread[set.lanes]));
  return vbslq_u32(low, vorrq_u32(vshlq_n_u32(x, 16), vreinterpretq_u32_u8(spread)), x);
}

template <int BITS>
std::size_t decode(const std::uint32_t* slots, std::uint32_t* states, const std::uint8_t*& words,
                   const std::uint8_t* end, ClassWalk& walk, std::size_t steps, std::uint8_t* out) {
  uint32x4_t x[kVectors];
  for (std::size_t v = 0; v < kVectors; ++v) x[v] = vld1q_u32(states + 4 * v);
  const std::uint8_t* at = words;
  for (; steps != 0 && end - at >= kStepBytes; --steps) {
    const std::uint8_t* classes = walk.here();
    for (std::size_t half = 0; half < kVectors; half += 4) {
      uint32x4_t kinds[4], e[4];
      widen(classes + 4 * half, kinds);
      for (std::size_t v = 0; v < 4; ++v) {
        const uint32x4_t slot = vandq_u32(x[half + v], vdupq_n_u32((1u << BITS) - 1));
        e[v] = pick4(slots, vsliq_n_u32(slot, kinds[v], BITS));
        x[half + v] = decode4<BITS>(e[v], x[half + v], at);
      }
      const uint16x8_t low = vcombine_u16(vmovn_u32(e[0]), vmovn_u32(e[1]));
      const uint16x8_t high = vcombine_u16(vmovn_u32(e[2]), vmovn_u32(e[3]));
      vst1q_u8(out + 4 * half, vcombine_u8(vmovn_u16(low), vmovn_u16(high)));  // the lowest bytes: the symbols
    }
    walk.forward();
    out += kLanes;
  }
  words = at;
  for (std::size_t v = 0; v < kVectors; ++v) vst1q_u32(states + 4 * v, x[v]);
  return steps;
}

}  // namespace
}  // namespace kvstore::rans::neon

#include "common/intrinsics_end.h"
#endif

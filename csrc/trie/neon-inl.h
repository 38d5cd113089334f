// How many leading tokens two runs share, with NEON. Included by trie/dispatch.h only.
#pragma once

#include <cstdint>

#if defined(__aarch64__)
#include "common/intrinsics_begin.h"
#include "common/simd.h"

namespace kvstore::neon {
namespace {

KVSTORE_INLINE uint32x4_t same4(const uint32_t* a, const uint32_t* b) { return vceqq_u32(vld1q_u32(a), vld1q_u32(b)); }
KVSTORE_INLINE uint32x4_t same4(const uint16_t* a, const uint32_t* b) {
  return vceqq_u32(vmovl_u16(vld1_u16(a)), vld1q_u32(b));
}

template <class Token>
uint32_t shared(const Token* a, const uint32_t* b, uint32_t count) {
  uint32_t i = 0;
  // Two cache lines a turn while everything is equal; the exact place is found below.
  for (; count - i >= 32; i += 32) {
    uint32x4_t same = same4(a + i, b + i);
    for (uint32_t k = 4; k < 32; k += 4) same = vandq_u32(same, same4(a + i + k, b + i + k));
    if (vminvq_u32(same) == 0) break;
  }
  for (; count - i >= 4; i += 4) {
    const uint64_t equal = vget_lane_u64(vreinterpret_u64_u16(vmovn_u32(same4(a + i, b + i))), 0);
    if (~equal != 0) return i + static_cast<uint32_t>(__builtin_ctzll(~equal)) / 16;
  }
  while (i < count && a[i] == b[i]) ++i;
  return i;
}

constexpr auto prefix = shared<uint32_t>;
constexpr auto narrow_prefix = shared<uint16_t>;

}  // namespace
}  // namespace kvstore::neon

#include "common/intrinsics_end.h"
#endif

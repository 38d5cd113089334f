// How many leading tokens two runs share, with AVX-512. Included by trie/dispatch.h only.
#pragma once

#include <cstdint>

#if defined(__x86_64__)
#include "common/intrinsics_begin.h"
#include "common/simd.h"

namespace kvstore::avx512 {
namespace {

__attribute__((target("avx512f"))) uint32_t prefix(const uint32_t* a, const uint32_t* b, uint32_t count) {
  uint32_t i = 0;
  for (; count - i >= 64; i += 64) {
    __m512i differ = _mm512_setzero_si512();
    for (uint32_t k = 0; k < 64; k += 16)
      differ = _mm512_or_si512(differ, _mm512_xor_si512(_mm512_loadu_si512(a + i + k), _mm512_loadu_si512(b + i + k)));
    if (_mm512_test_epi32_mask(differ, differ)) break;
  }
  while (i < count) {
    const uint32_t left = count - i;
    const __mmask16 lanes = left >= 16 ? 0xffff : static_cast<__mmask16>((1u << left) - 1);
    const __m512i x = _mm512_maskz_loadu_epi32(lanes, a + i), y = _mm512_maskz_loadu_epi32(lanes, b + i);
    const __mmask16 differ = _mm512_mask_cmpneq_epi32_mask(lanes, x, y);
    if (differ) return i + static_cast<uint32_t>(__builtin_ctz(differ));
    i += left >= 16 ? 16 : left;
  }
  return i;
}

}  // namespace
}  // namespace kvstore::avx512

#include "common/intrinsics_end.h"
#endif

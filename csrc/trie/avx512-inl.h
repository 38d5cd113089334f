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

__attribute__((target("avx512f"))) inline __m512i differ16(const uint16_t* a, const uint32_t* b) {
  const __m256i narrow = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(a));
  return _mm512_xor_si512(_mm512_cvtepu16_epi32(narrow), _mm512_loadu_si512(b));
}

__attribute__((target("avx512f"))) uint32_t narrow_prefix(const uint16_t* a, const uint32_t* b, uint32_t count) {
  uint32_t i = 0;
  for (; count - i >= 64; i += 64) {
    const __m512i low = _mm512_or_si512(differ16(a + i, b + i), differ16(a + i + 16, b + i + 16));
    const __m512i high = _mm512_or_si512(differ16(a + i + 32, b + i + 32), differ16(a + i + 48, b + i + 48));
    const __m512i differ = _mm512_or_si512(low, high);
    if (_mm512_test_epi32_mask(differ, differ)) break;
  }
  for (; count - i >= 16; i += 16) {
    const __m512i differ = differ16(a + i, b + i);
    const __mmask16 lanes = _mm512_test_epi32_mask(differ, differ);
    if (lanes) return i + static_cast<uint32_t>(__builtin_ctz(lanes));
  }
  while (i < count && a[i] == b[i]) ++i;
  return i;
}

}  // namespace
}  // namespace kvstore::avx512

#include "common/intrinsics_end.h"
#endif

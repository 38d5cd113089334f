// Twins of common_prefix: how many leading tokens two runs share. Included by trie/read.cc only.
#pragma once

#include <cstdint>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "trie/trie.h"

namespace kvstore {
namespace {

uint32_t prefix_scalar(const uint32_t* a, const uint32_t* b, uint32_t count) {
  uint32_t i = 0;
  while (i < count && a[i] == b[i]) ++i;
  return i;
}

#if defined(__x86_64__)
__attribute__((target("avx2"))) inline __m256i same8(const uint32_t* a, const uint32_t* b) {
  return _mm256_cmpeq_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(a)),
                            _mm256_loadu_si256(reinterpret_cast<const __m256i*>(b)));
}

__attribute__((target("avx2"))) uint32_t prefix_avx2(const uint32_t* a, const uint32_t* b, uint32_t count) {
  uint32_t i = 0;
  // Two cache lines a turn while everything is equal; the exact place is found below.
  for (; count - i >= 32; i += 32) {
    const __m256i all = _mm256_and_si256(_mm256_and_si256(same8(a + i, b + i), same8(a + i + 8, b + i + 8)),
                                         _mm256_and_si256(same8(a + i + 16, b + i + 16), same8(a + i + 24, b + i + 24)));
    if (_mm256_movemask_epi8(all) != -1) break;
  }
  for (; count - i >= 8; i += 8) {
    const uint32_t equal = static_cast<uint32_t>(_mm256_movemask_ps(_mm256_castsi256_ps(same8(a + i, b + i))));
    if (equal != 0xff) return i + static_cast<uint32_t>(__builtin_ctz(~equal));
  }
  while (i < count && a[i] == b[i]) ++i;
  return i;
}

__attribute__((target("avx512f"))) uint32_t prefix_avx512(const uint32_t* a, const uint32_t* b, uint32_t count) {
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
    const __mmask16 differ =
        _mm512_mask_cmpneq_epi32_mask(lanes, _mm512_maskz_loadu_epi32(lanes, a + i), _mm512_maskz_loadu_epi32(lanes, b + i));
    if (differ) return i + static_cast<uint32_t>(__builtin_ctz(differ));
    i += left >= 16 ? 16 : left;
  }
  return i;
}
#endif

}  // namespace

PrefixFn common_prefix(Level level) {
#if defined(__x86_64__)
  if (level == Level::avx512) return prefix_avx512;
  if (level == Level::avx2) return prefix_avx2;
#endif
  (void)level;
  return prefix_scalar;
}

}  // namespace kvstore

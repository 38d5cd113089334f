// How many leading tokens two runs share, with AVX2. Included by trie/dispatch.h only.
#pragma once

#include <cstdint>

#if defined(__x86_64__)
#include "common/intrinsics_begin.h"
#include "common/simd.h"

namespace kvstore::avx2 {
namespace {

KVSTORE_AVX2 inline __m256i same8(const uint32_t* a, const uint32_t* b) {
  return _mm256_cmpeq_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(a)),
                            _mm256_loadu_si256(reinterpret_cast<const __m256i*>(b)));
}

KVSTORE_AVX2 inline __m256i same8(const uint16_t* a, const uint32_t* b) {
  const __m128i narrow = _mm_loadu_si128(reinterpret_cast<const __m128i*>(a));
  return _mm256_cmpeq_epi32(_mm256_cvtepu16_epi32(narrow), _mm256_loadu_si256(reinterpret_cast<const __m256i*>(b)));
}

template <class Token>
KVSTORE_AVX2 uint32_t shared(const Token* a, const uint32_t* b, uint32_t count) {
  uint32_t i = 0;
  // Two cache lines a turn while everything is equal; the exact place is found below.
  for (; count - i >= 32; i += 32) {
    const __m256i low = _mm256_and_si256(same8(a + i, b + i), same8(a + i + 8, b + i + 8));
    const __m256i high = _mm256_and_si256(same8(a + i + 16, b + i + 16), same8(a + i + 24, b + i + 24));
    if (_mm256_movemask_epi8(_mm256_and_si256(low, high)) != -1) break;
  }
  for (; count - i >= 8; i += 8) {
    const uint32_t equal = static_cast<uint32_t>(_mm256_movemask_ps(_mm256_castsi256_ps(same8(a + i, b + i))));
    if (equal != 0xff) return i + static_cast<uint32_t>(__builtin_ctz(~equal));
  }
  while (i < count && a[i] == b[i]) ++i;
  return i;
}

constexpr auto prefix = shared<uint32_t>;
constexpr auto narrow_prefix = shared<uint16_t>;

}  // namespace
}  // namespace kvstore::avx2

#include "common/intrinsics_end.h"
#endif

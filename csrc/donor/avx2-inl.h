// The donor codec's own inner loops with AVX2: keys are turned by hand, the rest is as the compiler vectorises it.
// Included by donor/dispatch.h only.
#pragma once

#if defined(__x86_64__)
#include "common/intrinsics_begin.h"
#include "donor/scalar-inl.h"

namespace kvstore::donor {

KVSTORE_DONOR_TWIN(plain, KVSTORE_AVX2)

namespace avx2 {

constexpr std::size_t kPairs = 16;

KVSTORE_AVX2_INLINE __m256i words(int v) { return _mm256_set1_epi16(static_cast<short>(v)); }
KVSTORE_AVX2_INLINE __m256i load(const void* from) { return _mm256_loadu_si256(static_cast<const __m256i*>(from)); }

KVSTORE_AVX2_INLINE __m256i or_zero16(__m256i x) {
  const __m256i top = words(0x7f80);
  return _mm256_andnot_si256(_mm256_cmpeq_epi16(_mm256_and_si256(x, top), top), x);
}

// As `fixed` of scalar-inl.h. There is no shift of 16 bits by amounts of their own: a shift by s is a product with
// 2^(14 - s), whose upper half is taken. A number below zero is shifted as what is one above it, with all bits turned,
// and turned back, so that it is rounded down.
KVSTORE_AVX2_INLINE __m256i fixed(__m256i x, __m256i e, __m256i top) {
  const __m256i none = _mm256_cmpeq_epi16(e, _mm256_setzero_si256());
  const __m256i minus = _mm256_andnot_si256(none, _mm256_srai_epi16(x, 15));
  // Four times the mantissa.
  __m256i m = _mm256_andnot_si256(none, _mm256_slli_epi16(_mm256_or_si256(x, words(128)), 8));
  m = _mm256_add_epi16(m, _mm256_and_si256(minus, words(-4)));
  const __m256i shift = _mm256_subs_epu8(top, e), twice = _mm256_or_si256(shift, _mm256_slli_epi16(shift, 8));
  // Both bytes of the power come from one table, the upper from 8 entries behind; nothing beyond 15.
  const __m256i powers = _mm256_broadcastsi128_si256(
      _mm_setr_epi8(0, 0, 0, 0, 0, 0, 0, -128, 64, 32, 16, 8, 4, 2, 1, 0));
  const __m256i power = _mm256_shuffle_epi8(powers, _mm256_adds_epu8(twice, words(0x7870)));
  return _mm256_xor_si256(_mm256_mulhi_epu16(m, power), minus);
}

// The upper halves of numbers, of the lower and the upper halves of each 16 bytes.
KVSTORE_AVX2_INLINE __m256i uppers(__m256i low, __m256i high, __m256i scale) {
  const __m256i zero = _mm256_setzero_si256();
  const __m256 l = _mm256_castsi256_ps(_mm256_unpacklo_epi16(zero, scale));
  const __m256 h = _mm256_castsi256_ps(_mm256_unpackhi_epi16(zero, scale));
  const __m256 a = _mm256_mul_ps(_mm256_cvtepi32_ps(low), l), b = _mm256_mul_ps(_mm256_cvtepi32_ps(high), h);
  return _mm256_packus_epi32(_mm256_srli_epi32(_mm256_castps_si256(a), 16),
                             _mm256_srli_epi32(_mm256_castps_si256(b), 16));
}

// 16 pairs: sums of two products of 16 bits are one instruction.
KVSTORE_AVX2_INLINE void turn16(const std::uint16_t* x, std::size_t half, const std::int16_t* cos,
                                const std::int16_t* sin, std::uint16_t* mu) {
  const __m256i c = load(cos), s = load(sin), minus = _mm256_sub_epi16(_mm256_setzero_si256(), s);
  const __m256i one = or_zero16(load(x)), two = or_zero16(load(x + half));
  const __m256i e = _mm256_and_si256(_mm256_srli_epi16(one, 7), words(255));
  const __m256i f = _mm256_and_si256(_mm256_srli_epi16(two, 7), words(255));
  const __m256i top = _mm256_max_epi16(_mm256_max_epi16(e, f), words(kLeastExponent));
  const __m256i a = fixed(one, e, top), b = fixed(two, f, top);
  const __m256i low = _mm256_unpacklo_epi16(a, b), high = _mm256_unpackhi_epi16(a, b);
  const __m256i scale = _mm256_slli_epi16(_mm256_sub_epi16(top, words(27)), 7);
  const __m256i p = uppers(_mm256_madd_epi16(low, _mm256_unpacklo_epi16(c, minus)),
                           _mm256_madd_epi16(high, _mm256_unpackhi_epi16(c, minus)), scale);
  const __m256i q = uppers(_mm256_madd_epi16(low, _mm256_unpacklo_epi16(s, c)),
                           _mm256_madd_epi16(high, _mm256_unpackhi_epi16(s, c)), scale);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(mu), or_zero16(p));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(mu + half), or_zero16(q));
}

KVSTORE_AVX2 inline void turn(const std::uint16_t* x, std::size_t half, const std::int16_t* cos,
                              const std::int16_t* sin, std::uint16_t* mu) {
  if (half < kPairs) {
    turn_body(x, half, cos, sin, mu);
    return;
  }
  std::size_t j = 0;
  for (; j + kPairs <= half; j += kPairs) turn16(x + j, half, cos + j, sin + j, mu + j);
  if (j == half) return;
  j = half - kPairs;  // some a second time
  turn16(x + j, half, cos + j, sin + j, mu + j);
}

inline constexpr Kernels kKernels = {plain::finite, turn, plain::add, plain::subtract, plain::measure};

}  // namespace avx2
}  // namespace kvstore::donor

#include "common/intrinsics_end.h"
#endif

// The donor codec's own inner loops with AVX-512: keys are turned by hand, the rest is as the compiler vectorises it.
// Included by donor/dispatch.h only.
#pragma once

#if defined(__x86_64__)
#include "common/intrinsics_begin.h"
#include "donor/scalar-inl.h"

namespace kvstore::donor {

KVSTORE_DONOR_TWIN(wide, KVSTORE_AVX512)

namespace avx512 {

// Words of 16 bits.
KVSTORE_AVX512_INLINE __m512i words(int v) { return _mm512_set1_epi16(static_cast<short>(v)); }

KVSTORE_AVX512_INLINE __m512i fixed(__m512i x, __m512i e, __m512i top) {
  __m512i m = _mm512_slli_epi16(_mm512_or_si512(_mm512_and_si512(x, words(127)), words(128)), 6);
  m = _mm512_maskz_mov_epi16(_mm512_test_epi16_mask(e, e), m);
  m = _mm512_mask_sub_epi16(m, _mm512_movepi16_mask(x), _mm512_setzero_si512(), m);
  return _mm512_srav_epi16(m, _mm512_sub_epi16(top, e));
}

// The upper halves of numbers, of the lower and the upper halves of each 16 bytes.
KVSTORE_AVX512_INLINE __m512i uppers(__m512i low, __m512i high, __m512i scale) {
  const __m512i zero = _mm512_setzero_si512();
  const __m512 l = _mm512_castsi512_ps(_mm512_unpacklo_epi16(zero, scale));
  const __m512 h = _mm512_castsi512_ps(_mm512_unpackhi_epi16(zero, scale));
  const __m512 a = _mm512_mul_ps(_mm512_cvtepi32_ps(low), l), b = _mm512_mul_ps(_mm512_cvtepi32_ps(high), h);
  return _mm512_packus_epi32(_mm512_srli_epi32(_mm512_castps_si512(a), 16),
                             _mm512_srli_epi32(_mm512_castps_si512(b), 16));
}

KVSTORE_AVX512_INLINE __m512i or_zero16(__m512i x) {
  const __m512i top = words(0x7f80);
  return _mm512_maskz_mov_epi16(_mm512_cmpneq_epi16_mask(_mm512_and_si512(x, top), top), x);
}

// 32 pairs at a time: sums of two products of 16 bits are one instruction.
KVSTORE_AVX512 inline void turn(const std::uint16_t* x, std::size_t half, const std::int16_t* cos,
                                const std::int16_t* sin, std::uint16_t* mu) {
  for (std::size_t j = 0; j < half; j += 32) {
    const __mmask32 live = half - j >= 32 ? ~__mmask32{0} : (__mmask32{1} << (half - j)) - 1;
    const __m512i c = _mm512_maskz_loadu_epi16(live, cos + j), s = _mm512_maskz_loadu_epi16(live, sin + j);
    const __m512i minus = _mm512_sub_epi16(_mm512_setzero_si512(), s);
    const __m512i one = or_zero16(_mm512_maskz_loadu_epi16(live, x + j));
    const __m512i two = or_zero16(_mm512_maskz_loadu_epi16(live, x + j + half));
    const __m512i e = _mm512_and_si512(_mm512_srli_epi16(one, 7), words(255));
    const __m512i f = _mm512_and_si512(_mm512_srli_epi16(two, 7), words(255));
    const __m512i top = _mm512_max_epi16(_mm512_max_epi16(e, f), words(kLeastExponent));
    const __m512i a = fixed(one, e, top), b = fixed(two, f, top);
    const __m512i low = _mm512_unpacklo_epi16(a, b), high = _mm512_unpackhi_epi16(a, b);
    const __m512i scale = _mm512_slli_epi16(_mm512_sub_epi16(top, words(27)), 7);
    const __m512i p = uppers(_mm512_madd_epi16(low, _mm512_unpacklo_epi16(c, minus)),
                             _mm512_madd_epi16(high, _mm512_unpackhi_epi16(c, minus)), scale);
    const __m512i q = uppers(_mm512_madd_epi16(low, _mm512_unpacklo_epi16(s, c)),
                             _mm512_madd_epi16(high, _mm512_unpackhi_epi16(s, c)), scale);
    _mm512_mask_storeu_epi16(mu + j, live, or_zero16(p));
    _mm512_mask_storeu_epi16(mu + j + half, live, or_zero16(q));
  }
}

inline constexpr Kernels kKernels = {wide::finite, turn, wide::add, wide::subtract, wide::measure};

}  // namespace avx512
}  // namespace kvstore::donor

#include "common/intrinsics_end.h"
#endif

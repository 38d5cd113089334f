// AVX-512 twins of the rANS steps: two vectors of 16 lanes. Included by rans/dispatch.h, and by loops of parts above
// that take the symbols themselves.
#pragma once

#if defined(__x86_64__)
#include "common/intrinsics_begin.h"
#include "common/simd.h"
#include "rans/avx2-inl.h"
#include "rans/walk.h"

namespace kvstore::rans::avx512 {
namespace {

KVSTORE_AVX512_POPCNT KVSTORE_INLINE __m512i bytes16(const std::uint8_t* from) {
  return _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
}

KVSTORE_AVX512_POPCNT KVSTORE_INLINE __m512i pick16(const std::uint32_t* table, __m512i index) {
  const __m256i low = avx2::pick8(table, _mm512_castsi512_si256(index));
  return _mm512_inserti64x4(_mm512_castsi256_si512(low), avx2::pick8(table, _mm512_extracti64x4_epi64(index, 1)), 1);
}

template <int BITS>
KVSTORE_AVX512_POPCNT inline __m512i encode16(const std::uint32_t* entries, __m512i x, const std::uint8_t* symbols,
                                              const std::uint8_t* classes, std::uint8_t*& top, __m512i& seen) {
  const __m512i e = pick16(entries, _mm512_or_si512(_mm512_slli_epi32(bytes16(classes), 8), bytes16(symbols)));
  seen = _mm512_or_si512(seen, e);
  const __m512i below = _mm512_and_si512(e, _mm512_set1_epi32(0xfff));  // frequency - 1
  const __m512i f = _mm512_add_epi32(below, _mm512_set1_epi32(1));
  const __mmask16 full = _mm512_cmpgt_epu32_mask(_mm512_srli_epi32(x, 31 - BITS), below);
  // The words are to end at top: they are packed to the front, then turned around the vector's end. Compressing
  // straight to memory is microcode on some machines.
  const int count = __builtin_popcount(full);
  const __m256i words = _mm512_cvtepi32_epi16(_mm512_maskz_compress_epi32(full, x));
  const __m256i lane = _mm256_setr_epi16(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  const __m256i turn = _mm256_add_epi16(lane, _mm256_set1_epi16(static_cast<short>(count)));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(top - 32), _mm256_permutexvar_epi16(turn, words));
  top -= 2 * count;
  x = _mm512_mask_srli_epi32(x, full, x, 16);
  // x / f is below 2^20, so a quotient in single precision, rounded down throughout, is right or one too small.
  const __m512 real = _mm512_div_round_ps(_mm512_cvt_roundepi32_ps(x, _MM_FROUND_TO_ZERO | _MM_FROUND_NO_EXC),
                                          _mm512_cvtepi32_ps(f), _MM_FROUND_TO_ZERO | _MM_FROUND_NO_EXC);
  const __m512i q = _mm512_cvttps_epi32(real);
  const __m512i rest = _mm512_sub_epi32(x, _mm512_mullo_epi32(q, f));
  const __mmask16 small = _mm512_cmpgt_epu32_mask(rest, below);
  const __m512i offset = _mm512_and_si512(_mm512_srli_epi32(e, 12), _mm512_set1_epi32(0xfff));
  const __m512i next = _mm512_add_epi32(_mm512_add_epi32(rest, offset), _mm512_slli_epi32(q, BITS));
  return _mm512_mask_add_epi32(next, small, next, _mm512_sub_epi32(_mm512_set1_epi32(1 << BITS), f));
}

template <int BITS>
KVSTORE_AVX512_POPCNT std::size_t encode(const std::uint32_t* entries, std::uint32_t* states,
                                         const std::uint8_t* symbols, ClassWalk& walk, std::size_t steps,
                                         std::uint8_t*& top, const std::uint8_t* floor, std::uint32_t& seen) {
  __m512i a = _mm512_loadu_si512(states), b = _mm512_loadu_si512(states + 16), all = _mm512_setzero_si512();
  std::uint8_t* at = top;
  for (; steps != 0 && at - floor >= kStepBytes; --steps) {
    symbols -= kLanes;
    walk.back();
    const std::uint8_t* classes = walk.here();
    b = encode16<BITS>(entries, b, symbols + 16, classes + 16, at, all);
    a = encode16<BITS>(entries, a, symbols, classes, at, all);
  }
  top = at;
  seen |= _mm512_movepi32_mask(all) ? 1u << 31 : 0;
  _mm512_storeu_si512(states, a);
  _mm512_storeu_si512(states + 16, b);
  return steps;
}

// The slots of 16 lanes, whose classes are given: their lowest bytes are the symbols.
template <int BITS>
KVSTORE_AVX512_POPCNT KVSTORE_INLINE __m512i slots16(const std::uint32_t* slots, __m512i x, __m512i classes) {
  const __m512i slot = _mm512_and_si512(x, _mm512_set1_epi32((1 << BITS) - 1));
  return pick16(slots, _mm512_or_si512(_mm512_slli_epi32(classes, BITS), slot));
}

// The states behind these symbols.
template <int BITS>
KVSTORE_AVX512_POPCNT KVSTORE_INLINE __m512i next16(__m512i e, __m512i x, const std::uint8_t*& words) {
  const __m512i high = _mm512_srli_epi32(x, BITS);
  const __m512i below = _mm512_and_si512(_mm512_srli_epi32(e, 8), _mm512_set1_epi32(0xfff));
  x = _mm512_add_epi32(_mm512_mullo_epi32(high, below), _mm512_add_epi32(high, _mm512_srli_epi32(e, 20)));
  const __mmask16 low = _mm512_cmplt_epu32_mask(x, _mm512_set1_epi32(kLow));
  const __m512i next = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(words)));
  words += 2 * __builtin_popcount(low);
  return _mm512_or_si512(_mm512_mask_slli_epi32(x, low, x, 16), _mm512_maskz_expand_epi32(low, next));
}

KVSTORE_AVX512_POPCNT KVSTORE_INLINE void store_symbols(std::uint8_t* to, __m512i e) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_cvtepi32_epi8(e));
}

template <int BITS>
KVSTORE_AVX512_POPCNT std::size_t decode(const std::uint32_t* slots, std::uint32_t* states, const std::uint8_t*& words,
                                         const std::uint8_t* end, ClassWalk& walk, std::size_t steps,
                                         std::uint8_t* out) {
  __m512i a = _mm512_loadu_si512(states), b = _mm512_loadu_si512(states + 16);
  const std::uint8_t* at = words;
  for (; steps != 0 && end - at >= kStepBytes; --steps) {
    const std::uint8_t* classes = walk.here();
    const __m512i one = slots16<BITS>(slots, a, bytes16(classes));
    a = next16<BITS>(one, a, at);
    const __m512i two = slots16<BITS>(slots, b, bytes16(classes + 16));
    b = next16<BITS>(two, b, at);
    store_symbols(out, one);
    store_symbols(out + 16, two);
    walk.forward();
    out += kLanes;
  }
  words = at;
  _mm512_storeu_si512(states, a);
  _mm512_storeu_si512(states + 16, b);
  return steps;
}

// A step of each in turn: one waits for its own results, and the other fills this time.
template <int BITS>
KVSTORE_AVX512_POPCNT std::size_t decode_pair(const std::uint32_t* slots, Side& p, Side& q, std::size_t steps) {
  __m512i a = _mm512_loadu_si512(p.states), b = _mm512_loadu_si512(p.states + 16);
  __m512i c = _mm512_loadu_si512(q.states), d = _mm512_loadu_si512(q.states + 16);
  const std::uint8_t *at = p.words, *to = q.words;
  std::uint8_t *first = p.out, *second = q.out;
  for (; steps != 0 && p.end - at >= kStepBytes && q.end - to >= kStepBytes; --steps) {
    const std::uint8_t *mine = p.walk.here(), *other = q.walk.here();
    const __m512i one = slots16<BITS>(slots, a, bytes16(mine)), two = slots16<BITS>(slots, c, bytes16(other));
    a = next16<BITS>(one, a, at);
    c = next16<BITS>(two, c, to);
    const __m512i three = slots16<BITS>(slots, b, bytes16(mine + 16));
    const __m512i four = slots16<BITS>(slots, d, bytes16(other + 16));
    b = next16<BITS>(three, b, at);
    d = next16<BITS>(four, d, to);
    store_symbols(first, one);
    store_symbols(first + 16, three);
    store_symbols(second, two);
    store_symbols(second + 16, four);
    p.walk.forward();
    q.walk.forward();
    first += kLanes;
    second += kLanes;
  }
  p.words = at;
  q.words = to;
  p.out = first;
  q.out = second;
  _mm512_storeu_si512(p.states, a);
  _mm512_storeu_si512(p.states + 16, b);
  _mm512_storeu_si512(q.states, c);
  _mm512_storeu_si512(q.states + 16, d);
  return steps;
}

}  // namespace
}  // namespace kvstore::rans::avx512

#include "common/intrinsics_end.h"
#endif

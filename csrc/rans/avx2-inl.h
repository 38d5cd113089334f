// AVX2 twins of the rANS steps: four vectors of 8 lanes. Included by rans/dispatch.h only.
#pragma once

#if defined(__x86_64__)
#include "common/intrinsics_begin.h"
#include "common/simd.h"
#include "rans/walk.h"

namespace kvstore::rans::avx2 {
namespace {

// For every set of lanes, the permutation that moves them to the end of a vector (pack), and the one that hands
// neighbouring words to them (spread). AVX2 has no compress and expand.
struct Shuffles {
  alignas(64) std::uint8_t pack[256][8];
  alignas(64) std::uint8_t spread[256][8];
};

constexpr Shuffles make_shuffles() {
  Shuffles made{};
  for (unsigned set = 0; set < 256; ++set) {
    unsigned count = 0;
    for (unsigned lane = 0; lane < 8; ++lane) count += (set >> lane) & 1;
    unsigned word = 0;
    for (unsigned lane = 0; lane < 8; ++lane)
      if ((set >> lane) & 1) {
        made.pack[set][8 - count + word] = static_cast<std::uint8_t>(lane);
        made.spread[set][lane] = static_cast<std::uint8_t>(word++);
      }
  }
  return made;
}

constexpr Shuffles kShuffles = make_shuffles();

KVSTORE_AVX2_POPCNT inline __m256i bytes8(const std::uint8_t* from) {
  return _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)));
}

// table[index] for eight lanes. Single loads, because gathers are 10 to 20 % slower on Zen 4 and far slower on
// processors whose microcode makes them safe.
KVSTORE_AVX2_POPCNT KVSTORE_INLINE __m256i pick8(const std::uint32_t* table, __m256i index) {
  const __m128i low = _mm256_castsi256_si128(index), high = _mm256_extracti128_si256(index, 1);
  const auto a = static_cast<std::uint64_t>(_mm_cvtsi128_si64(low));
  const auto b = static_cast<std::uint64_t>(_mm_extract_epi64(low, 1));
  const auto c = static_cast<std::uint64_t>(_mm_cvtsi128_si64(high));
  const auto d = static_cast<std::uint64_t>(_mm_extract_epi64(high, 1));
  const auto first = [table](std::uint64_t pair) { return static_cast<int>(table[pair & 0xffffffff]); };
  const auto second = [table](std::uint64_t pair) { return static_cast<int>(table[pair >> 32]); };
  return _mm256_setr_epi32(first(a), second(a), first(b), second(b), first(c), second(c), first(d), second(d));
}

template <int BITS>
KVSTORE_AVX2_POPCNT inline __m256i encode8(const std::uint32_t* entries, __m256i x, const std::uint8_t* symbols,
                                           const std::uint8_t* classes, std::uint8_t*& top, __m256i& seen) {
  const __m256i e = pick8(entries, _mm256_or_si256(_mm256_slli_epi32(bytes8(classes), 8), bytes8(symbols)));
  seen = _mm256_or_si256(seen, e);
  const __m256i below = _mm256_and_si256(e, _mm256_set1_epi32(0xfff));  // frequency - 1
  const __m256i f = _mm256_add_epi32(below, _mm256_set1_epi32(1));
  const __m256i full = _mm256_cmpgt_epi32(_mm256_srli_epi32(x, 31 - BITS), below);
  const auto set = static_cast<unsigned>(_mm256_movemask_ps(_mm256_castsi256_ps(full)));
  const __m256i cut = _mm256_and_si256(x, _mm256_set1_epi32(0xffff));
  const __m256i packed = _mm256_permutevar8x32_epi32(cut, bytes8(kShuffles.pack[set]));
  const __m128i words = _mm_packus_epi32(_mm256_castsi256_si128(packed), _mm256_extracti128_si256(packed, 1));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(top - 16), words);
  top -= 2 * __builtin_popcount(set);
  x = _mm256_blendv_epi8(x, _mm256_srli_epi32(x, 16), full);
  // x / f is below 2^20. The divisor is made larger by 2^-22 to 2^-21 of itself (its lowest 12 bits are zero), more
  // than the two roundings can add, whatever the rounding mode: the quotient is right or one too small.
  const __m256i wide = _mm256_or_si256(_mm256_castps_si256(_mm256_cvtepi32_ps(f)), _mm256_set1_epi32(4));
  const __m256i q = _mm256_cvttps_epi32(_mm256_div_ps(_mm256_cvtepi32_ps(x), _mm256_castsi256_ps(wide)));
  const __m256i rest = _mm256_sub_epi32(x, _mm256_mullo_epi32(q, f));
  const __m256i small = _mm256_cmpgt_epi32(rest, below);
  const __m256i offset = _mm256_and_si256(_mm256_srli_epi32(e, 12), _mm256_set1_epi32(0xfff));
  const __m256i next = _mm256_add_epi32(_mm256_add_epi32(rest, offset), _mm256_slli_epi32(q, BITS));
  return _mm256_add_epi32(next, _mm256_and_si256(small, _mm256_sub_epi32(_mm256_set1_epi32(1 << BITS), f)));
}

template <int BITS>
KVSTORE_AVX2_POPCNT std::size_t encode(const std::uint32_t* entries, std::uint32_t* states, const std::uint8_t* symbols,
                                       ClassWalk& walk, std::size_t steps, std::uint8_t*& top,
                                       const std::uint8_t* floor, std::uint32_t& seen) {
  __m256i* const kept = reinterpret_cast<__m256i*>(states);
  __m256i a = _mm256_loadu_si256(kept), b = _mm256_loadu_si256(kept + 1);
  __m256i c = _mm256_loadu_si256(kept + 2), d = _mm256_loadu_si256(kept + 3);
  __m256i all = _mm256_setzero_si256();
  std::uint8_t* at = top;
  for (; steps != 0 && at - floor >= kStepBytes; --steps) {
    symbols -= kLanes;
    walk.back();
    const std::uint8_t* classes = walk.here();
    d = encode8<BITS>(entries, d, symbols + 24, classes + 24, at, all);
    c = encode8<BITS>(entries, c, symbols + 16, classes + 16, at, all);
    b = encode8<BITS>(entries, b, symbols + 8, classes + 8, at, all);
    a = encode8<BITS>(entries, a, symbols, classes, at, all);
  }
  top = at;
  seen |= _mm256_movemask_ps(_mm256_castsi256_ps(all)) ? 1u << 31 : 0;
  _mm256_storeu_si256(kept, a);
  _mm256_storeu_si256(kept + 1, b);
  _mm256_storeu_si256(kept + 2, c);
  _mm256_storeu_si256(kept + 3, d);
  return steps;
}

template <int BITS>
KVSTORE_AVX2_POPCNT inline __m256i decode8(const std::uint32_t* slots, __m256i x, const std::uint8_t* classes,
                                           const std::uint8_t*& words, std::uint8_t* out) {
  const __m256i slot = _mm256_and_si256(x, _mm256_set1_epi32((1 << BITS) - 1));
  const __m256i e = pick8(slots, _mm256_or_si256(_mm256_slli_epi32(bytes8(classes), BITS), slot));
  const __m256i first = _mm256_shuffle_epi8(e, _mm256_set1_epi32(0x0c080400));  // each half: its four symbols
  const auto low4 = static_cast<std::uint32_t>(_mm_cvtsi128_si32(_mm256_castsi256_si128(first)));
  const auto high4 = static_cast<std::uint32_t>(_mm_cvtsi128_si32(_mm256_extracti128_si256(first, 1)));
  std::memcpy(out, &low4, 4);
  std::memcpy(out + 4, &high4, 4);
  const __m256i high = _mm256_srli_epi32(x, BITS);
  const __m256i below = _mm256_and_si256(_mm256_srli_epi32(e, 8), _mm256_set1_epi32(0xfff));
  x = _mm256_add_epi32(_mm256_mullo_epi32(high, below), _mm256_add_epi32(high, _mm256_srli_epi32(e, 20)));
  const __m256i low = _mm256_cmpgt_epi32(_mm256_set1_epi32(kLow), x);
  const auto set = static_cast<unsigned>(_mm256_movemask_ps(_mm256_castsi256_ps(low)));
  const __m256i next = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(words)));
  words += 2 * __builtin_popcount(set);
  const __m256i spread = _mm256_permutevar8x32_epi32(next, bytes8(kShuffles.spread[set]));
  return _mm256_blendv_epi8(x, _mm256_or_si256(_mm256_slli_epi32(x, 16), spread), low);
}

template <int BITS>
KVSTORE_AVX2_POPCNT std::size_t decode(const std::uint32_t* slots, std::uint32_t* states, const std::uint8_t*& words,
                                       const std::uint8_t* end, ClassWalk& walk, std::size_t steps, std::uint8_t* out) {
  __m256i* const kept = reinterpret_cast<__m256i*>(states);
  __m256i a = _mm256_loadu_si256(kept), b = _mm256_loadu_si256(kept + 1);
  __m256i c = _mm256_loadu_si256(kept + 2), d = _mm256_loadu_si256(kept + 3);
  const std::uint8_t* at = words;
  for (; steps != 0 && end - at >= kStepBytes; --steps) {
    const std::uint8_t* classes = walk.here();
    a = decode8<BITS>(slots, a, classes, at, out);
    b = decode8<BITS>(slots, b, classes + 8, at, out + 8);
    c = decode8<BITS>(slots, c, classes + 16, at, out + 16);
    d = decode8<BITS>(slots, d, classes + 24, at, out + 24);
    walk.forward();
    out += kLanes;
  }
  words = at;
  _mm256_storeu_si256(kept, a);
  _mm256_storeu_si256(kept + 1, b);
  _mm256_storeu_si256(kept + 2, c);
  _mm256_storeu_si256(kept + 3, d);
  return steps;
}

// A step of each in turn: one waits for its own results, and the other fills this time.
template <int BITS>
KVSTORE_AVX2_POPCNT std::size_t decode_pair(const std::uint32_t* slots, Side& p, Side& q, std::size_t steps) {
  __m256i* const kept = reinterpret_cast<__m256i*>(p.states);
  __m256i* const more = reinterpret_cast<__m256i*>(q.states);
  __m256i a[4], b[4];
  for (int i = 0; i < 4; ++i) {
    a[i] = _mm256_loadu_si256(kept + i);
    b[i] = _mm256_loadu_si256(more + i);
  }
  const std::uint8_t *at = p.words, *to = q.words;
  std::uint8_t *first = p.out, *second = q.out;
  for (; steps != 0 && p.end - at >= kStepBytes && q.end - to >= kStepBytes; --steps) {
    const std::uint8_t *mine = p.walk.here(), *other = q.walk.here();
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      a[i] = decode8<BITS>(slots, a[i], mine + 8 * i, at, first + 8 * i);
      b[i] = decode8<BITS>(slots, b[i], other + 8 * i, to, second + 8 * i);
    }
    p.walk.forward();
    q.walk.forward();
    first += kLanes;
    second += kLanes;
  }
  p.words = at;
  q.words = to;
  p.out = first;
  q.out = second;
  for (int i = 0; i < 4; ++i) {
    _mm256_storeu_si256(kept + i, a[i]);
    _mm256_storeu_si256(more + i, b[i]);
  }
  return steps;
}

}  // namespace
}  // namespace kvstore::rans::avx2

#include "common/intrinsics_end.h"
#endif

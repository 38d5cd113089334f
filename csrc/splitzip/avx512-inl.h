// splitzip's inner loops with AVX-512 (F, BW, DQ, VL): 64 values a step.
#pragma once

#if defined(__x86_64__)
#include "common/intrinsics_begin.h"
#include "common/simd.h"
#include "splitzip/scalar-inl.h"

namespace kvstore::splitzip::avx512 {

KVSTORE_AVX512_POPCNT inline __m512i load(const void* at) { return _mm512_loadu_si512(at); }

// The low bytes of 2 x 32 words, in order.
KVSTORE_AVX512_POPCNT inline __m512i narrow(__m512i a, __m512i b) {
  return _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7), _mm512_packus_epi16(a, b));
}

// 64 values: their exponents as bytes, and sign and mantissa (of E5M2 the whole values).
struct Heads {
  __m512i exponents;
  __m512i rest;
};

// Sign and mantissa of 32 values, as words: ((x >> 8) & 0x80) | (x & 0x7F).
KVSTORE_AVX512_POPCNT inline __m512i rest_of(__m512i x) {
  const __m512i mantissa = _mm512_and_si512(x, _mm512_set1_epi16(0x7F));
  return _mm512_ternarylogic_epi32(_mm512_set1_epi16(0x80), _mm512_srli_epi16(x, 8), mantissa, 0xEA);
}

KVSTORE_AVX512_POPCNT inline Heads split(const std::uint16_t* v) {
  const __m512i a = load(v), b = load(v + 32), byte = _mm512_set1_epi16(0xFF);
  return {narrow(_mm512_and_si512(_mm512_srli_epi16(a, 7), byte), _mm512_and_si512(_mm512_srli_epi16(b, 7), byte)),
          narrow(rest_of(a), rest_of(b))};
}
KVSTORE_AVX512_POPCNT inline Heads split(const std::uint8_t* v) {
  const __m512i x = load(v);
  return {_mm512_and_si512(_mm512_srli_epi16(x, 2), _mm512_set1_epi8(0x1F)), x};
}

KVSTORE_AVX512_POPCNT inline void write_rest(const std::uint16_t*, __m512i rest, std::uint8_t* to) {
  _mm512_storeu_si512(to, rest);
}
KVSTORE_AVX512_POPCNT inline void write_rest(const std::uint8_t*, __m512i x, std::uint8_t* to) {
  const std::uint64_t planes[3] = {_mm512_movepi8_mask(_mm512_slli_epi16(x, 7)),
                                   _mm512_movepi8_mask(_mm512_slli_epi16(x, 6)), _mm512_movepi8_mask(x)};
  for (std::size_t p = 0; p < 3; ++p) {
    store32(to + 4 * p, static_cast<std::uint32_t>(planes[p]));
    store32(to + 12 + 4 * p, static_cast<std::uint32_t>(planes[p] >> 32));
  }
}

// Largest and whether any is zero, on whole heads: sign and mantissa do not change the order of exponents.
KVSTORE_AVX512_POPCNT inline Range scan_words(const std::uint16_t* values, std::size_t count) {
  const __m512i magnitude = _mm512_set1_epi16(0x7FFF);
  __m512i top = _mm512_setzero_si512(), least = magnitude;
  for (std::size_t i = 0; i < count; i += 32) {
    const __m512i x = _mm512_and_si512(load(values + i), magnitude);
    top = _mm512_max_epu16(top, x);
    least = _mm512_min_epu16(least, x);
  }
  alignas(64) std::uint16_t tops[32], leasts[32];
  _mm512_store_si512(tops, top);
  _mm512_store_si512(leasts, least);
  return {scalar::scan(tops, 32).top, scalar::scan(leasts, 32).zero};
}
KVSTORE_AVX512_POPCNT inline Range scan_words(const std::uint8_t* values, std::size_t count) {
  const __m512i magnitude = _mm512_set1_epi8(0x7F);
  __m512i top = _mm512_setzero_si512(), least = magnitude;
  for (std::size_t i = 0; i < count; i += 64) {
    const __m512i x = _mm512_and_si512(load(values + i), magnitude);
    top = _mm512_max_epu8(top, x);
    least = _mm512_min_epu8(least, x);
  }
  alignas(64) std::uint8_t tops[64], leasts[64];
  _mm512_store_si512(tops, top);
  _mm512_store_si512(leasts, least);
  return {scalar::scan(tops, 64).top, scalar::scan(leasts, 64).zero};
}

template <class Head>
KVSTORE_AVX512_POPCNT Range scan(const Head* values, std::size_t count) {
  const std::size_t whole = count / 64 * 64;
  Range range = scalar::scan(values + whole, count - whole);
  if (whole > 0) {
    const Range found = scan_words(values, whole);
    range.top = found.top > range.top ? found.top : range.top;
    range.zero |= found.zero;
  }
  return range;
}

KVSTORE_AVX512_POPCNT inline std::size_t at_least(const std::uint16_t* v, unsigned e) {
  const __m512i magnitude = _mm512_set1_epi16(0x7FFF), least = _mm512_set1_epi16(static_cast<short>(e << 7));
  const __mmask32 a = _mm512_cmpge_epu16_mask(_mm512_and_si512(load(v), magnitude), least);
  const __mmask32 b = _mm512_cmpge_epu16_mask(_mm512_and_si512(load(v + 32), magnitude), least);
  return static_cast<std::size_t>(_mm_popcnt_u32(a) + _mm_popcnt_u32(b));
}
KVSTORE_AVX512_POPCNT inline std::size_t at_least(const std::uint8_t* v, unsigned e) {
  const __m512i least = _mm512_set1_epi8(static_cast<char>(e << 2));
  const __mmask64 mask = _mm512_cmpge_epu8_mask(_mm512_and_si512(load(v), _mm512_set1_epi8(0x7F)), least);
  return static_cast<std::size_t>(_mm_popcnt_u32(static_cast<unsigned>(mask)) +
                                  _mm_popcnt_u32(static_cast<unsigned>(mask >> 32)));
}

template <class Head>
KVSTORE_AVX512_POPCNT std::size_t above(const Head* values, std::size_t count, unsigned top) {
  if (top >= (sizeof(Head) == 2 ? 255u : 31u)) return 0;
  std::size_t i = 0, found = 0;
  for (; i + 64 <= count; i += 64) found += at_least(values + i, top + 1);
  return found + scalar::above(values + i, count - i, top);
}

template <class Head>
KVSTORE_AVX512_POPCNT void pack(const Head* values, std::size_t count, Window window, std::uint8_t* codes,
                                std::uint8_t* rest, std::uint64_t* escaped, std::uintptr_t next) {
  const __m512i base = _mm512_set1_epi8(static_cast<char>(window.base)), most = _mm512_set1_epi8(15);
  const __m512i weights = _mm512_set1_epi16(0x1001);
  const __mmask64 zeros = window.zero ? ~__mmask64{0} : __mmask64{0};
  std::size_t i = 0;
  for (; i + 64 <= count; i += 64) {
    prefetch64<Head>(next + i * sizeof(Head));
    const Heads heads = split(values + i);
    const __m512i d = _mm512_sub_epi8(heads.exponents, base);
    __mmask64 fits = _mm512_cmple_epu8_mask(d, most);
    fits &= ~(zeros & _mm512_testn_epi8_mask(d, d));
    escaped[i / 64] = ~(fits | (zeros & _mm512_testn_epi8_mask(heads.exponents, heads.exponents)));
    const __m512i pairs = _mm512_maddubs_epi16(_mm512_maskz_mov_epi8(fits, d), weights);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(codes + i / 2), _mm512_cvtepi16_epi8(pairs));
    write_rest(values, heads.rest, rest + rest_bytes<Head>(i));
  }
  if (i < count)
    scalar::pack(values + i, count - i, window, codes + i / 2, rest + rest_bytes<Head>(i), escaped + i / 64, next);
}

// 64 codes, one a byte.
KVSTORE_AVX512_POPCNT inline __m512i spread(const std::uint8_t* codes) {
  const __m512i wide = _mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes)));
  return _mm512_and_si512(_mm512_or_si512(wide, _mm512_slli_epi16(wide, 4)), _mm512_set1_epi16(0x0F0F));
}

KVSTORE_AVX512_POPCNT inline void write(void* at, __m512i x, bool stream) {
  if (stream)
    _mm512_stream_si512(static_cast<__m512i*>(at), x);
  else
    _mm512_storeu_si512(at, x);
}

struct Tables {
  __m512i high, low;  // the two bytes of a value, by code, rest excepted
};

KVSTORE_AVX512_POPCNT inline Tables tables_of(Window window, bool wide) {
  const CodeBytes bytes(window, wide);
  return {_mm512_broadcast_i32x4(_mm_load_si128(reinterpret_cast<const __m128i*>(bytes.high))),
          _mm512_broadcast_i32x4(_mm_load_si128(reinterpret_cast<const __m128i*>(bytes.low)))};
}

KVSTORE_AVX512_POPCNT inline void unpack64(const Tables& tables, __m512i code, const std::uint8_t* rest,
                                           std::uint16_t* v, bool stream) {
  // Qwords 0 4 1 5 2 6 3 7: the interleave below works within 128 bits.
  const __m512i order = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7);
  const __m512i r = _mm512_permutexvar_epi64(order, load(rest));
  const __m512i c = _mm512_permutexvar_epi64(order, code);
  const __m512i sign = _mm512_set1_epi8(static_cast<char>(0x80));
  // (r & sign) | high, (r & ~sign) | low
  const __m512i high = _mm512_ternarylogic_epi32(r, sign, _mm512_shuffle_epi8(tables.high, c), 0xEA);
  const __m512i low = _mm512_ternarylogic_epi32(r, sign, _mm512_shuffle_epi8(tables.low, c), 0xBA);
  write(v, _mm512_unpacklo_epi8(low, high), stream);
  write(v + 32, _mm512_unpackhi_epi8(low, high), stream);
}
KVSTORE_AVX512_POPCNT inline void unpack64(const Tables& tables, __m512i code, const std::uint8_t* rest,
                                           std::uint8_t* v, bool stream) {
  const auto plane = [&](std::size_t p) {
    return static_cast<__mmask64>(load32(rest + 4 * p)) | static_cast<__mmask64>(load32(rest + 12 + 4 * p)) << 32;
  };
  __m512i x = _mm512_shuffle_epi8(tables.low, code);
  x = _mm512_or_si512(x, _mm512_maskz_set1_epi8(plane(0), 1));
  x = _mm512_or_si512(x, _mm512_maskz_set1_epi8(plane(1), 2));
  x = _mm512_or_si512(x, _mm512_maskz_set1_epi8(plane(2), static_cast<char>(0x80)));
  write(v, x, stream);
}

template <class Head>
KVSTORE_AVX512_POPCNT void unpack(const std::uint8_t* codes, const std::uint8_t* rest, std::size_t count, Window window,
                                  Head* values, bool stream) {
  const Tables tables = tables_of(window, sizeof(Head) == 2);
  std::size_t i = 0;
  for (; i + 64 <= count; i += 64)
    unpack64(tables, spread(codes + i / 2), rest + rest_bytes<Head>(i), values + i, stream);
  scalar::unpack(codes + i / 2, rest + rest_bytes<Head>(i), count - i, window, values + i, false);
}

template <class Head>
inline constexpr Kernels<Head> kKernels = {scan<Head>, above<Head>, pack<Head>, unpack<Head>};

}  // namespace kvstore::splitzip::avx512

#include "common/intrinsics_end.h"
#endif

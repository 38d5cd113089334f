// splitzip's inner loops with AVX2: 64 values a step.
#pragma once

#if defined(__x86_64__)
#include "common/intrinsics_begin.h"
#include "common/simd.h"
#include "splitzip/scalar-inl.h"

namespace kvstore::splitzip::avx2 {

KVSTORE_AVX2_POPCNT inline __m256i load(const void* at) { return _mm256_loadu_si256(static_cast<const __m256i*>(at)); }
KVSTORE_AVX2_POPCNT inline void store(void* at, __m256i x) { _mm256_storeu_si256(static_cast<__m256i*>(at), x); }

// The low bytes of 2 x 16 words, in order.
KVSTORE_AVX2_POPCNT inline __m256i narrow(__m256i a, __m256i b) {
  return _mm256_permute4x64_epi64(_mm256_packus_epi16(a, b), 0xD8);
}

KVSTORE_AVX2_POPCNT inline unsigned largest(__m256i bytes) {
  __m128i x = _mm_max_epu8(_mm256_castsi256_si128(bytes), _mm256_extracti128_si256(bytes, 1));
  x = _mm_max_epu8(x, _mm_srli_si128(x, 8));
  x = _mm_max_epu8(x, _mm_srli_si128(x, 4));
  x = _mm_max_epu8(x, _mm_srli_si128(x, 2));
  x = _mm_max_epu8(x, _mm_srli_si128(x, 1));
  return static_cast<unsigned>(_mm_cvtsi128_si32(x)) & 0xFFu;
}

// The exponents of 32 values as bytes.
KVSTORE_AVX2_POPCNT inline __m256i exponents(const std::uint16_t* v) {
  const __m256i byte = _mm256_set1_epi16(0xFF);
  return narrow(_mm256_and_si256(_mm256_srli_epi16(load(v), 7), byte),
                _mm256_and_si256(_mm256_srli_epi16(load(v + 16), 7), byte));
}
KVSTORE_AVX2_POPCNT inline __m256i exponents(const std::uint8_t* v) {
  return _mm256_and_si256(_mm256_srli_epi16(load(v), 2), _mm256_set1_epi8(0x1F));
}

KVSTORE_AVX2_POPCNT inline __m256i rest_of(__m256i x) {
  return _mm256_or_si256(_mm256_and_si256(_mm256_srli_epi16(x, 8), _mm256_set1_epi16(0x80)),
                         _mm256_and_si256(x, _mm256_set1_epi16(0x7F)));
}
KVSTORE_AVX2_POPCNT inline void pack_rest32(const std::uint16_t* v, std::uint8_t* rest) {
  store(rest, narrow(rest_of(load(v)), rest_of(load(v + 16))));
}
KVSTORE_AVX2_POPCNT inline void pack_rest32(const std::uint8_t* v, std::uint8_t* rest) {
  const __m256i x = load(v);
  store32(rest, static_cast<std::uint32_t>(_mm256_movemask_epi8(_mm256_slli_epi16(x, 7))));
  store32(rest + 4, static_cast<std::uint32_t>(_mm256_movemask_epi8(_mm256_slli_epi16(x, 6))));
  store32(rest + 8, static_cast<std::uint32_t>(_mm256_movemask_epi8(x)));
}

// Codes of 32 exponents as bytes; the bits of those that are escaped.
KVSTORE_AVX2_POPCNT inline __m256i codes_of(__m256i e, Window window, std::uint32_t* escaped) {
  const __m256i zero = _mm256_setzero_si256();
  const __m256i d = _mm256_sub_epi8(e, _mm256_set1_epi8(static_cast<char>(window.base)));
  __m256i fits = _mm256_cmpeq_epi8(_mm256_min_epu8(d, _mm256_set1_epi8(15)), d);
  __m256i known = fits;
  if (window.zero) {
    fits = _mm256_andnot_si256(_mm256_cmpeq_epi8(d, zero), fits);
    known = _mm256_or_si256(fits, _mm256_cmpeq_epi8(e, zero));
  }
  *escaped = ~static_cast<std::uint32_t>(_mm256_movemask_epi8(known));
  return _mm256_and_si256(d, fits);
}

template <class Head>
KVSTORE_AVX2_POPCNT Range scan(const Head* values, std::size_t count) {
  __m256i top = _mm256_setzero_si256(), least = _mm256_set1_epi8(-1);
  std::size_t i = 0;
  for (; i + 32 <= count; i += 32) {
    const __m256i e = exponents(values + i);
    top = _mm256_max_epu8(top, e);
    least = _mm256_min_epu8(least, e);
  }
  Range range = scalar::scan(values + i, count - i);
  const unsigned found = largest(top);
  range.top = found > range.top ? found : range.top;
  range.zero |= i > 0 && _mm256_movemask_epi8(_mm256_cmpeq_epi8(least, _mm256_setzero_si256())) != 0;
  return range;
}

template <class Head>
KVSTORE_AVX2_POPCNT std::size_t above(const Head* values, std::size_t count, unsigned top) {
  if (top >= 255) return 0;
  const __m256i least = _mm256_set1_epi8(static_cast<char>(top + 1));
  std::size_t i = 0, found = 0;
  for (; i + 32 <= count; i += 32) {
    const __m256i e = exponents(values + i);
    const int mask = _mm256_movemask_epi8(_mm256_cmpeq_epi8(_mm256_max_epu8(e, least), e));
    found += static_cast<std::size_t>(_mm_popcnt_u32(static_cast<unsigned>(mask)));
  }
  return found + scalar::above(values + i, count - i, top);
}

template <class Head>
KVSTORE_AVX2_POPCNT void pack(const Head* values, std::size_t count, Window window, std::uint8_t* codes,
                              std::uint8_t* rest, std::uint64_t* escaped, std::uintptr_t next) {
  const __m256i weights = _mm256_set1_epi16(0x1001);
  std::size_t i = 0;
  for (; i + 64 <= count; i += 64) {
    prefetch64<Head>(next + i * sizeof(Head));
    std::uint32_t low, high;
    const __m256i a = codes_of(exponents(values + i), window, &low);
    const __m256i b = codes_of(exponents(values + i + 32), window, &high);
    store(codes + i / 2, narrow(_mm256_maddubs_epi16(a, weights), _mm256_maddubs_epi16(b, weights)));
    pack_rest32(values + i, rest + rest_bytes<Head>(i));
    pack_rest32(values + i + 32, rest + rest_bytes<Head>(i + 32));
    escaped[i / 64] = low | static_cast<std::uint64_t>(high) << 32;
  }
  if (i < count)
    scalar::pack(values + i, count - i, window, codes + i / 2, rest + rest_bytes<Head>(i), escaped + i / 64, next);
}

// 32 codes, one a byte.
KVSTORE_AVX2_POPCNT inline __m256i spread(const std::uint8_t* codes) {
  const __m256i wide = _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(codes)));
  return _mm256_and_si256(_mm256_or_si256(wide, _mm256_slli_epi16(wide, 4)), _mm256_set1_epi16(0x0F0F));
}

KVSTORE_AVX2_POPCNT inline void write(void* at, __m256i x, bool stream) {
  if (stream)
    _mm256_stream_si256(static_cast<__m256i*>(at), x);
  else
    store(at, x);
}

struct Tables {
  __m256i high, low;  // the two bytes of a value, by code, rest excepted
};

KVSTORE_AVX2_POPCNT inline Tables tables_of(Window window, bool wide) {
  const CodeBytes bytes(window, wide);
  return {_mm256_broadcastsi128_si256(_mm_load_si128(reinterpret_cast<const __m128i*>(bytes.high))),
          _mm256_broadcastsi128_si256(_mm_load_si128(reinterpret_cast<const __m128i*>(bytes.low)))};
}

KVSTORE_AVX2_POPCNT inline void unpack32(const Tables& tables, __m256i code, const std::uint8_t* rest, std::uint16_t* v,
                                         bool stream) {
  // Qwords 0 2 1 3: the interleave below works within 128 bits.
  const __m256i r = _mm256_permute4x64_epi64(load(rest), 0xD8);
  const __m256i c = _mm256_permute4x64_epi64(code, 0xD8);
  const __m256i sign = _mm256_set1_epi8(static_cast<char>(0x80));
  const __m256i high = _mm256_or_si256(_mm256_and_si256(r, sign), _mm256_shuffle_epi8(tables.high, c));
  const __m256i low = _mm256_or_si256(_mm256_andnot_si256(sign, r), _mm256_shuffle_epi8(tables.low, c));
  write(v, _mm256_unpacklo_epi8(low, high), stream);
  write(v + 16, _mm256_unpackhi_epi8(low, high), stream);
}
// 32 bits as 32 bytes that are `value` if the bit is set.
KVSTORE_AVX2_POPCNT inline __m256i bits(const std::uint8_t* word, int value) {
  const __m256i which = _mm256_setr_epi64x(0, 0x0101010101010101, 0x0202020202020202, 0x0303030303030303);
  const __m256i bit = _mm256_set1_epi64x(static_cast<long long>(0x8040201008040201ull));
  const __m256i all = _mm256_shuffle_epi8(_mm256_set1_epi32(static_cast<int>(load32(word))), which);
  const __m256i set = _mm256_cmpeq_epi8(_mm256_and_si256(all, bit), bit);
  return _mm256_and_si256(set, _mm256_set1_epi8(static_cast<char>(value)));
}
KVSTORE_AVX2_POPCNT inline void unpack32(const Tables& tables, __m256i code, const std::uint8_t* rest, std::uint8_t* v,
                                         bool stream) {
  const __m256i mantissa = _mm256_or_si256(bits(rest, 1), bits(rest + 4, 2));
  const __m256i x = _mm256_or_si256(_mm256_or_si256(mantissa, bits(rest + 8, 0x80)),
                                    _mm256_shuffle_epi8(tables.low, code));
  write(v, x, stream);
}

template <class Head>
KVSTORE_AVX2_POPCNT void unpack(const std::uint8_t* codes, const std::uint8_t* rest, std::size_t count, Window window,
                                Head* values, bool stream) {
  const Tables tables = tables_of(window, sizeof(Head) == 2);
  std::size_t i = 0;
  for (; i + 32 <= count; i += 32)
    unpack32(tables, spread(codes + i / 2), rest + rest_bytes<Head>(i), values + i, stream);
  scalar::unpack(codes + i / 2, rest + rest_bytes<Head>(i), count - i, window, values + i, false);
}

template <class Head>
inline constexpr Kernels<Head> kKernels = {scan<Head>, above<Head>, pack<Head>, unpack<Head>};

}  // namespace kvstore::splitzip::avx2

#include "common/intrinsics_end.h"
#endif

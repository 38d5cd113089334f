// AVX-512 twins of the predictive codec's loops; the sums need VNNI besides. Included by predictive/dispatch.h only.
#pragma once

#if defined(__x86_64__)
#include "common/intrinsics_begin.h"
#include "predictive/scalar-inl.h"

namespace kvstore::predict::avx512 {

inline bool runs() {
  static const bool has = __builtin_cpu_supports("avx512vnni") != 0;
  return has;
}

// ---- sums -----------------------------------------------------------------------------------------------------------

// ROWS tokens of a panel of COLUMNS vectors: all sums stay in registers.
template <int ROWS, int COLUMNS>
KVSTORE_VNNI_INLINE void sum_tile(const Part& part, const std::int8_t* w, const std::int32_t* bias,
                                    const Inputs& inputs, std::size_t row, std::int32_t* sums) {
  // The first tiles bring the next panel nearer, be it the next part's or nobody's; the others what is there already.
  const std::size_t turn = row / ROWS, ahead_lines = turn < COLUMNS ? part.depth * (COLUMNS + turn) : 0;
  auto ahead = reinterpret_cast<std::uintptr_t>(w) + ahead_lines * kColumnsBytes;
  __m512i total[ROWS][COLUMNS];
  for (int r = 0; r < ROWS; ++r)
    for (int c = 0; c < COLUMNS; ++c) total[r][c] = _mm512_loadu_si512(bias + kVector * c);
  const std::size_t parts = part.inputs.size();
  for (std::size_t i = 0; i < parts; ++i) {
    const std::size_t stride = inputs.stride[i];
    const std::uint8_t* q = inputs.rows[i] + row * stride;
    for (std::size_t group = part.groups[i]; group != 0; --group, q += kGroup, w += kColumnsBytes * COLUMNS) {
      __m512i weights[COLUMNS];
      for (int c = 0; c < COLUMNS; ++c) weights[c] = _mm512_load_si512(w + kColumnsBytes * c);
      _mm_prefetch(reinterpret_cast<const char*>(ahead), _MM_HINT_T1);
      ahead += kColumnsBytes;
      for (int r = 0; r < ROWS; ++r) {
        int four;
        std::memcpy(&four, q + r * stride, sizeof four);
        const __m512i in = _mm512_set1_epi32(four);
        for (int c = 0; c < COLUMNS; ++c) total[r][c] = _mm512_dpbusd_epi32(total[r][c], in, weights[c]);
      }
    }
  }
  for (int r = 0; r < ROWS; ++r)
    for (int c = 0; c < COLUMNS; ++c) _mm512_storeu_si512(sums + r * part.padded + kVector * c, total[r][c]);
}

template <int COLUMNS>
KVSTORE_VNNI void sum_panel(const Part& part, const std::int8_t* w, const std::int32_t* bias, const Inputs& inputs,
                              std::size_t n, std::int32_t* sums) {
  std::size_t t = 0;
  for (; t + 8 <= n; t += 8) sum_tile<8, COLUMNS>(part, w, bias, inputs, t, sums + t * part.padded);
  if (t + 4 <= n) {
    sum_tile<4, COLUMNS>(part, w, bias, inputs, t, sums + t * part.padded);
    t += 4;
  }
  for (; t < n; ++t) sum_tile<1, COLUMNS>(part, w, bias, inputs, t, sums + t * part.padded);
}

inline void sums(const Part& part, const std::int8_t* weight, const Inputs& inputs, std::size_t n,
                 std::int32_t* sums) {
  for (std::size_t panel = 0; panel < part.padded; panel += kPanel) {
    const std::int8_t* const w = weight + panel * part.depth * kGroup;
    const std::int32_t* const bias = part.bias.data() + panel;
    switch ((part.padded - panel) / kVector) {
      case 1: sum_panel<1>(part, w, bias, inputs, n, sums + panel); break;
      case 2: sum_panel<2>(part, w, bias, inputs, n, sums + panel); break;
      default: sum_panel<3>(part, w, bias, inputs, n, sums + panel);
    }
  }
}

// ---- prediction -----------------------------------------------------------------------------------------------------

KVSTORE_VNNI_INLINE __mmask16 first16(std::size_t n) {
  return n >= 16 ? static_cast<__mmask16>(0xffff) : static_cast<__mmask16>((1u << n) - 1);
}
KVSTORE_VNNI_INLINE __mmask32 first32(std::size_t n) { return n >= 32 ? ~__mmask32{0} : (__mmask32{1} << n) - 1; }

KVSTORE_VNNI_INLINE __m512i rounded16(__m512 v, float most) {
  return _mm512_cvtps_epi32(_mm512_min_ps(_mm512_max_ps(v, _mm512_set1_ps(-most)), _mm512_set1_ps(most)));
}

KVSTORE_VNNI_INLINE void store_upper(std::uint16_t* to, __mmask16 live, __m512 v) {
  const __m512i high = _mm512_srli_epi32(_mm512_castps_si512(v), 16);
  _mm256_mask_storeu_epi16(to, live, _mm512_cvtepi32_epi16(high));
}

KVSTORE_VNNI inline void predict(const Part& part, const std::int32_t* sums, const Angles& angles,
                                   std::uint16_t* mu) {
  const float* out = part.out_scale.data();
  if (!part.rotated) {
    for (std::size_t j = 0; j < part.width; j += 16) {
      const __m512 sum = _mm512_cvtepi32_ps(_mm512_loadu_si512(sums + j));
      store_upper(mu + j, first16(part.width - j), _mm512_mul_ps(sum, _mm512_loadu_ps(out + j)));
    }
    return;
  }
  const std::size_t half = angles.half;
  const float* from = part.from_fixed.data();
  for (std::size_t head = 0; head < part.heads; ++head) {
    const std::size_t at = head * 2 * half;
    for (std::size_t j = 0; j < half; j += 16) {
      const __mmask16 live = first16(half - j);
      const std::size_t one = at + j, two = one + half;
      const __m512 x = _mm512_cvtepi32_ps(_mm512_maskz_loadu_epi32(live, sums + one));
      const __m512 y = _mm512_cvtepi32_ps(_mm512_maskz_loadu_epi32(live, sums + two));
      const __m512i a = rounded16(_mm512_mul_ps(x, _mm512_maskz_loadu_ps(live, out + one)), kRange);
      const __m512i b = rounded16(_mm512_mul_ps(y, _mm512_maskz_loadu_ps(live, out + two)), kRange);
      const __m512i cos = _mm512_maskz_loadu_epi32(live, angles.cos + j);
      const __m512i sin = _mm512_maskz_loadu_epi32(live, angles.sin + j);
      const __m512 scale = _mm512_maskz_loadu_ps(live, from + one);
      const __m512i p = _mm512_sub_epi32(_mm512_mullo_epi32(a, cos), _mm512_mullo_epi32(b, sin));
      const __m512i q = _mm512_add_epi32(_mm512_mullo_epi32(b, cos), _mm512_mullo_epi32(a, sin));
      store_upper(mu + one, live, _mm512_mul_ps(_mm512_cvtepi32_ps(p), scale));
      store_upper(mu + two, live, _mm512_mul_ps(_mm512_cvtepi32_ps(q), scale));
    }
  }
}

// Values as fp32, 0 if they are not finite.
KVSTORE_VNNI_INLINE __m512 numbers(const std::uint16_t* x, __mmask16 live) {
  const __m512i bits = _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(live, x)), 16);
  const __m512i top = _mm512_set1_epi32(0x7f800000);
  const __mmask16 finite = _mm512_cmpneq_epi32_mask(_mm512_and_si512(bits, top), top);
  return _mm512_castsi512_ps(_mm512_maskz_mov_epi32(finite, bits));
}

KVSTORE_VNNI_INLINE void store_input(std::uint8_t* to, __mmask16 live, __m512 v) {
  const __m512i q = _mm512_add_epi32(rounded16(v, 127.0f), _mm512_set1_epi32(128));
  _mm_mask_storeu_epi8(to, live, _mm512_cvtepi32_epi8(q));
}

KVSTORE_VNNI inline void inputs(const Part& part, const std::uint16_t* x, const Angles& angles, std::uint8_t* q) {
  const float* in = part.in_scale.data();
  if (!part.rotated) {
    for (std::size_t j = 0; j < part.width; j += 16) {
      const __mmask16 live = first16(part.width - j);
      store_input(q + j, live, _mm512_mul_ps(numbers(x + j, live), _mm512_loadu_ps(in + j)));
    }
    return;
  }
  const std::size_t half = angles.half;
  const float* to = part.to_fixed.data();
  for (std::size_t head = 0; head < part.heads; ++head) {
    const std::size_t at = head * 2 * half;
    for (std::size_t j = 0; j < half; j += 16) {
      const __mmask16 live = first16(half - j);
      const std::size_t one = at + j, two = one + half;
      const __m512 scale = _mm512_maskz_loadu_ps(live, to + one);
      const __m512i a = rounded16(_mm512_mul_ps(numbers(x + one, live), scale), kRange);
      const __m512i b = rounded16(_mm512_mul_ps(numbers(x + two, live), scale), kRange);
      const __m512i cos = _mm512_maskz_loadu_epi32(live, angles.cos + j);
      const __m512i sin = _mm512_maskz_loadu_epi32(live, angles.sin + j);
      const __m512i p = _mm512_add_epi32(_mm512_mullo_epi32(a, cos), _mm512_mullo_epi32(b, sin));
      const __m512i r = _mm512_sub_epi32(_mm512_mullo_epi32(b, cos), _mm512_mullo_epi32(a, sin));
      store_input(q + one, live, _mm512_mul_ps(_mm512_cvtepi32_ps(p), _mm512_maskz_loadu_ps(live, in + one)));
      store_input(q + two, live, _mm512_mul_ps(_mm512_cvtepi32_ps(r), _mm512_maskz_loadu_ps(live, in + two)));
    }
  }
}

// ---- the axis of bins: 32 values of 16 bits -------------------------------------------------------------------------

// Hidden from the compiler, which would make the constant anew at every use, slower than to load it.
KVSTORE_VNNI_INLINE __m512i kept(__m512i v) {
  __asm__("" : "+v"(v));
  return v;
}
KVSTORE_VNNI_INLINE __m512i both(int v) { return kept(_mm512_set1_epi16(static_cast<short>(v))); }

// 16 bits each, but for `ratio`: 64 * 2^(9 - quarter / 4) of the four quarters.
struct Constants {
  __m512i least = both(-440), most = both(440), lift = both(131), first = both(8), last = both(254);
  __m512i three = both(3), byte = both(255), mantissa = both(127), one = both(128), magnitude = both(0x7fff);
  __m512i lookup = both(0x0202), upper = both(0x0100), unit = both(1);
  __m512i ratio =
      kept(_mm512_set1_epi64(static_cast<long long>(38ull << 57 | 45ull << 41 | 54ull << 25 | 64ull << 9)));
  KVSTORE_VNNI_INLINE Constants() {}
};

struct Bins {
  __m512i linear, quarter;
};

KVSTORE_VNNI_INLINE Bins bins_of(__m512i scale, __m512i offset, const Constants& k) {
  __m512i s = _mm512_add_epi16(scale, offset);
  s = _mm512_min_epi16(_mm512_max_epi16(s, k.least), k.most);
  const __m512i linear = _mm512_add_epi16(_mm512_srai_epi16(s, 2), k.lift);
  return {_mm512_min_epi16(_mm512_max_epi16(linear, k.first), k.last), _mm512_and_si512(s, k.three)};
}

KVSTORE_VNNI_INLINE __m512i exponents(__m512i bits, const Constants& k) {
  return _mm512_and_si512(_mm512_srli_epi16(bits, 7), k.byte);
}

// index_of: a shift of more than 7 leaves nothing, nor does a negative one, which counts as a large one.
KVSTORE_VNNI_INLINE __m512i indices(__m512i bits, __m512i e, __m512i linear, __mmask32& above, const Constants& k) {
  above = _mm512_cmpge_epi16_mask(e, linear);
  const __m512i mantissa = _mm512_or_si512(_mm512_and_si512(bits, k.mantissa), k.one);
  const __m512i below = _mm512_srlv_epi16(mantissa, _mm512_sub_epi16(linear, e));
  const __m512i magnitude = _mm512_add_epi16(_mm512_and_si512(bits, k.magnitude), k.one);
  return _mm512_mask_sub_epi16(below, above, magnitude, _mm512_slli_epi16(linear, 7));
}

KVSTORE_VNNI_INLINE __m512i signs(__m512i bits) { return _mm512_srai_epi16(bits, 15); }

KVSTORE_VNNI_INLINE __m512i octaves_of(__m512i e, __m512i linear, const Constants& k) {
  return _mm512_min_epi16(_mm512_max_epi16(_mm512_sub_epi16(e, linear), _mm512_setzero_si512()), k.first);
}

KVSTORE_VNNI_INLINE __m256i class_bytes(__m512i octaves, __m512i quarter, __m512i first) {
  return _mm512_cvtepi16_epi8(_mm512_add_epi16(_mm512_add_epi16(_mm512_slli_epi16(octaves, 2), quarter), first));
}

// distance_of, 255 for `far`: sums of 8 bytes. d is within -96..96 unless it is far.
KVSTORE_VNNI_INLINE __m512i distances_of(__m512i d, __m512i octaves, __m512i quarter, __mmask32 far, __mmask32 live,
                                           const Constants& k) {
  const __m512i pick = _mm512_add_epi16(_mm512_mullo_epi16(quarter, k.lookup), k.upper);
  const __m512i ratio = _mm512_shuffle_epi8(k.ratio, pick);
  // Twice the distance, so that 64 * 2^10 need not fit 16 bits.
  const __m512i size = _mm512_sllv_epi16(_mm512_abs_epi16(d), _mm512_add_epi16(octaves, k.unit));
  __m512i n = _mm512_min_epu16(_mm512_mulhi_epu16(size, ratio), k.byte);
  n = _mm512_mask_mov_epi16(n, far, k.byte);
  return _mm512_sad_epu8(_mm512_maskz_mov_epi16(live, n), _mm512_setzero_si512());
}

KVSTORE_VNNI inline void classes(const Part& part, const std::uint16_t* mu, int offset, std::uint8_t* classes) {
  const __m512i first = both(part.value ? static_cast<int>(kClasses) : 0);
  const Constants k;
  const __m512i row = both(offset);
  for (std::size_t j = 0; j < part.width; j += 32) {
    const __mmask32 live = first32(part.width - j);
    const Bins bins = bins_of(_mm512_loadu_si512(part.scale.data() + j), row, k);
    const __m512i octaves = octaves_of(exponents(_mm512_maskz_loadu_epi16(live, mu + j), k), bins.linear, k);
    _mm256_mask_storeu_epi8(classes + j, live, class_bytes(octaves, bins.quarter, first));
  }
}

// Appends the bits of 32 values: neighbours join until eight pieces of at most 40 bits are left.
KVSTORE_VNNI_INLINE void put32(BitsOut& raw, __m512i bits, __m512i counts) {
  const __m512i low = _mm512_and_si512(counts, _mm512_set1_epi32(0xffff)), high = _mm512_srli_epi32(counts, 16);
  __m512i pair = _mm512_or_si512(_mm512_and_si512(bits, _mm512_set1_epi32(0xffff)),
                                 _mm512_sllv_epi32(_mm512_srli_epi32(bits, 16), low));
  const __m512i two = _mm512_add_epi32(low, high);
  const __m512i words = _mm512_set1_epi64(0xffffffff);
  pair = _mm512_or_si512(_mm512_and_si512(pair, words),
                         _mm512_sllv_epi64(_mm512_srli_epi64(pair, 32), _mm512_and_si512(two, words)));
  const __m512i four = _mm512_add_epi64(_mm512_and_si512(two, words), _mm512_srli_epi64(two, 32));
  alignas(64) std::uint64_t piece[8], count[8];
  _mm512_store_si512(piece, pair);
  _mm512_store_si512(count, four);
  for (int i = 0; i < 8; ++i) raw.put(piece[i], static_cast<unsigned>(count[i]));
}

struct SplitConstants : Constants {
  __m512i shift_symbol = both(kOffset), known = both(2 * kOffset - 1), escape = both(kEscape);
  __m512i seven = both(7), ten = both(kMostRaw), ones = both(-1);
  KVSTORE_VNNI_INLINE SplitConstants() {}
};

// Codes the `live` ones of 32 values; returns sums of their distances. first: class.
KVSTORE_VNNI_INLINE __m512i split32(const std::uint16_t* x, const std::uint16_t* mu, const Bins& bins, __m512i first,
                                    __mmask32 live, const SplitConstants& k, std::uint8_t* symbols,
                                    std::uint8_t* classes, BitsOut& out, std::uint16_t*& escapes) {
  const __m512i v = _mm512_maskz_loadu_epi16(live, x), m = _mm512_maskz_loadu_epi16(live, mu);
  const __m512i e = exponents(v, k), of_mu = exponents(m, k);
  __mmask32 above, ignored;
  const __m512i index = indices(v, e, bins.linear, above, k);
  const __m512i from = _mm512_xor_si512(indices(m, of_mu, bins.linear, ignored, k), signs(m));
  const __m512i d = _mm512_subs_epi16(_mm512_xor_si512(index, signs(v)), from);
  const __m512i symbol = _mm512_add_epi16(d, k.shift_symbol);
  const __mmask32 far = _mm512_cmpgt_epu16_mask(symbol, k.known);
  const __m512i octaves = octaves_of(of_mu, bins.linear, k);
  _mm256_mask_storeu_epi8(symbols, live, _mm512_cvtepi16_epi8(_mm512_mask_mov_epi16(symbol, far, k.escape)));
  _mm256_mask_storeu_epi8(classes, live, class_bytes(octaves, bins.quarter, first));

  const __mmask32 deep = _mm512_testn_epi16_mask(index, index);
  const __m512i shift = _mm512_sub_epi16(bins.linear, e), mantissa = _mm512_and_si512(v, k.mantissa);
  const __m512i gap = _mm512_sub_epi16(shift, k.first);
  const __mmask32 near = _mm512_mask_cmplt_epi16_mask(_mm512_test_epi16_mask(e, e), gap, k.seven);
  __m512i counts = _mm512_mask_mov_epi16(shift, deep, k.ten);
  counts = _mm512_maskz_mov_epi16(live & ~(far | above), counts);
  const __m512i whole = _mm512_mask_add_epi16(k.seven, near, gap, _mm512_slli_epi16(mantissa, 3));
  __m512i bits = _mm512_andnot_si512(_mm512_sllv_epi16(k.ones, counts), mantissa);
  bits = _mm512_mask_mov_epi16(bits, deep, whole);
  bits = _mm512_maskz_mov_epi16(live & ~far, bits);
  put32(out, bits, counts);
  for (__mmask32 left = live & (far | (deep & ~near)); left != 0; left &= left - 1)
    *escapes++ = x[static_cast<unsigned>(__builtin_ctz(left))];
  return distances_of(d, octaves, bins.quarter, far, live, k);
}

KVSTORE_VNNI inline std::uint32_t split(const Part& part, const std::uint16_t* x, const std::uint16_t* mu,
                                          int offset, std::uint8_t* symbols, std::uint8_t* classes, BitsOut& raw,
                                          std::uint16_t*& escapes) {
  const __m512i first = both(part.value ? static_cast<int>(kClasses) : 0), row = both(offset);
  const SplitConstants k;
  __m512i total = _mm512_setzero_si512();
  BitsOut out = raw;
  for (std::size_t j = 0; j < part.width; j += 32) {
    const Bins bins = bins_of(_mm512_loadu_si512(part.scale.data() + j), row, k);
    const __m512i more = split32(x + j, mu + j, bins, first, first32(part.width - j), k, symbols + j, classes + j, out,
                                 escapes);
    total = _mm512_add_epi64(total, more);
  }
  raw = out;
  return static_cast<std::uint32_t>(_mm512_reduce_add_epi64(total));
}

// Raw bits of 32 bins (0..255, where 128 and more have none), by the upper and lower half of a byte.
struct RawLookup {
  __m512i by_low = kept(_mm512_broadcast_i32x4(_mm_setr_epi8(10, 7, 6, 6, 5, 5, 5, 5, 4, 4, 4, 4, 4, 4, 4, 4)));
  __m512i by_high = kept(_mm512_broadcast_i32x4(_mm_setr_epi8(15, 3, 2, 2, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0)));
  __m512i last = both(0x0f0e);
  KVSTORE_VNNI_INLINE RawLookup() {}
};

KVSTORE_VNNI_INLINE __m512i raw_counts(__m512i index, const RawLookup& lookup, __m512i nibble, __m512i byte) {
  const __m512i low = _mm512_shuffle_epi8(lookup.by_low, _mm512_and_si512(index, nibble));
  const __m512i high = _mm512_shuffle_epi8(lookup.by_high, _mm512_srli_epi16(index, 4));
  // The upper byte of each lane looked up the first entries.
  return _mm512_and_si512(_mm512_min_epu8(low, high), byte);
}

// Where each value's bits begin, and how many there are in all.
KVSTORE_VNNI_INLINE __m512i starts(__m512i counts, __m512i last_word, unsigned& all) {
  __m512i sum = _mm512_add_epi16(counts, _mm512_bslli_epi128(counts, 2));
  sum = _mm512_add_epi16(sum, _mm512_bslli_epi128(sum, 4));
  sum = _mm512_add_epi16(sum, _mm512_bslli_epi128(sum, 8));
  // The last of each eight, to the eights behind.
  const __m512i last = _mm512_shuffle_epi8(sum, last_word);
  const __m512i one = _mm512_maskz_shuffle_i64x2(0xfc, last, last, _MM_SHUFFLE(2, 1, 0, 0));
  const __m512i two = _mm512_add_epi16(one, _mm512_maskz_shuffle_i64x2(0xfc, one, one, _MM_SHUFFLE(2, 1, 0, 0)));
  sum = _mm512_add_epi16(sum, two);
  sum = _mm512_add_epi16(sum, _mm512_maskz_shuffle_i64x2(0xf0, two, two, _MM_SHUFFLE(1, 0, 0, 0)));
  all = static_cast<unsigned>(_mm_extract_epi16(_mm512_extracti32x4_epi32(sum, 3), 7));
  return _mm512_sub_epi16(sum, counts);
}

struct JoinConstants : Constants {
  __m512i zero = _mm512_setzero_si512(), ones = both(-1), seven = both(7), nibble = both(15), sixteen = both(16);
  __m512i shift_symbol = both(kOffset), escape = both(kEscape), minus = both(0x8000);
  RawLookup lookup;
  KVSTORE_VNNI_INLINE JoinConstants() {}
};

// What 32 values were found to be: those that are damaged, or that `whole` says to take from the escapes.
struct Joined {
  __mmask32 bad, whole;
  __m512i distances;
};

// Decodes the `live` ones of 32 values to x, with raw bits from bit `at` on, which is moved.
KVSTORE_VNNI_INLINE Joined join32(const std::uint8_t* symbols, const std::uint16_t* mu, const Bins& bins,
                                  __mmask32 live, const JoinConstants& k, const std::uint8_t* raw, std::size_t& at,
                                  std::uint16_t* x) {
  const __m512i m = _mm512_maskz_loadu_epi16(live, mu), of_mu = exponents(m, k);
  const __m512i symbol = _mm512_cvtepu8_epi16(_mm256_maskz_loadu_epi8(live, symbols));
  const __mmask32 far = _mm512_cmpeq_epi16_mask(symbol, k.escape);
  const __m512i d = _mm512_sub_epi16(symbol, k.shift_symbol), octaves = octaves_of(of_mu, bins.linear, k);
  __mmask32 ignored;
  const __m512i from = _mm512_xor_si512(indices(m, of_mu, bins.linear, ignored, k), signs(m));
  const __m512i i = _mm512_add_epi16(from, d), sign = signs(i);
  const __m512i index = _mm512_xor_si512(i, sign);

  const __m512i small = _mm512_mask_mov_epi16(_mm512_min_epu16(index, k.byte), far | ~live, k.byte);
  const __m512i counts = raw_counts(small, k.lookup, k.nibble, k.byte);
  unsigned all;
  const __m512i within = _mm512_set1_epi16(static_cast<short>(at & 15));
  const __m512i begin = _mm512_add_epi16(starts(counts, k.lookup.last, all), within);
  const __m512i window = _mm512_loadu_si512(raw + (at >> 4 << 1));
  at += all;
  const __m512i word = _mm512_srli_epi16(begin, 4), bit = _mm512_and_si512(begin, k.nibble);
  const __m512i low = _mm512_srlv_epi16(_mm512_permutexvar_epi16(word, window), bit);
  const __m512i high = _mm512_sllv_epi16(_mm512_permutexvar_epi16(_mm512_add_epi16(word, k.unit), window),
                                         _mm512_sub_epi16(k.sixteen, bit));
  const __m512i bits = _mm512_andnot_si512(_mm512_sllv_epi16(k.ones, counts), _mm512_or_si512(low, high));

  const __mmask32 above = _mm512_cmpgt_epu16_mask(index, k.mantissa), deep = _mm512_testn_epi16_mask(index, index);
  const __m512i linear = _mm512_slli_epi16(bins.linear, 7);
  // Below: (linear - count) << 7 | the bin's lower bits | raw. Above: linear + index - 128.
  __m512i v = _mm512_or_si512(_mm512_and_si512(_mm512_sllv_epi16(index, counts), k.mantissa), bits);
  v = _mm512_add_epi16(v, _mm512_sub_epi16(linear, _mm512_slli_epi16(counts, 7)));
  v = _mm512_mask_add_epi16(v, above, linear, _mm512_sub_epi16(index, k.one));
  const __m512i gap = _mm512_and_si512(bits, k.seven);
  const __m512i e = _mm512_sub_epi16(bins.linear, _mm512_add_epi16(gap, k.first));
  v = _mm512_mask_add_epi16(v, deep, _mm512_slli_epi16(e, 7), _mm512_srli_epi16(bits, 3));
  const __mmask32 whole = far | _mm512_mask_cmpeq_epi16_mask(deep, gap, k.seven);
  const __mmask32 bad = (above & _mm512_movepi16_mask(v)) | _mm512_mask_cmple_epi16_mask(deep, e, k.zero);
  _mm512_mask_storeu_epi16(x, live, _mm512_or_si512(v, _mm512_and_si512(sign, k.minus)));
  return {live & ~whole & bad, live & whole, distances_of(d, octaves, bins.quarter, far, live, k)};
}

KVSTORE_VNNI_INLINE bool take_escapes(__mmask32 whole, EscapesIn& escapes, std::uint16_t* x) {
  for (__mmask32 left = whole; left != 0; left &= left - 1) {
    if (escapes.at == escapes.end) return false;
    x[static_cast<unsigned>(__builtin_ctz(left))] = static_cast<std::uint16_t>(load16(escapes.at));
    escapes.at += 2;
  }
  return true;
}

KVSTORE_VNNI inline bool join(const Part& part, const std::uint8_t* symbols, const std::uint16_t* mu, int offset,
                                BitsIn& raw, EscapesIn& escapes, std::uint16_t* x, std::uint32_t* distances) {
  const JoinConstants k;
  const __m512i row = both(offset);
  __m512i total = k.zero;
  __mmask32 bad = 0;
  std::size_t at = raw.at;
  for (std::size_t j = 0; j < part.width; j += 32) {
    const Bins bins = bins_of(_mm512_loadu_si512(part.scale.data() + j), row, k);
    const Joined found = join32(symbols + j, mu + j, bins, first32(part.width - j), k, raw.bytes, at, x + j);
    total = _mm512_add_epi64(total, found.distances);
    bad |= found.bad;
    if (!take_escapes(found.whole, escapes, x + j)) return false;
  }
  raw.at = at;
  *distances = static_cast<std::uint32_t>(_mm512_reduce_add_epi64(total));
  return bad == 0;
}

KVSTORE_VNNI inline void check(const std::uint16_t* x, std::size_t count, std::uint32_t* a, std::uint32_t* b) {
  // Lane i of `sum` is the sum of every 16th value from i on. `later` adds it up after every step, so that a value is
  // in there as often as steps follow it, its own included.
  __m512i sum = _mm512_setzero_si512(), later = sum;
  std::size_t steps = 0;
  for (std::size_t i = 0; i < count; i += 16, ++steps) {
    sum = _mm512_add_epi32(sum, _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(first16(count - i), x + i)));
    later = _mm512_add_epi32(later, sum);
  }
  alignas(64) std::uint32_t sums[16], laters[16];
  _mm512_store_si512(sums, sum);
  _mm512_store_si512(laters, later);
  std::uint32_t total = 0, weighted = 0;
  for (std::uint32_t i = 0; i < 16; ++i) {
    total += sums[i];
    weighted += sums[i] * (i + 1) + 16 * (static_cast<std::uint32_t>(steps) * sums[i] - laters[i]);
  }
  *a = total;
  *b = weighted;
}

inline constexpr Kernels kKernels = {1, sums, predict, classes, split, join, inputs, check};

}  // namespace kvstore::predict::avx512

#include "common/intrinsics_end.h"
#endif

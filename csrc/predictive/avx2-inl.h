// AVX2 twins of the predictive codec's loops: sums and bins by hand, the rest as the compiler vectorises it. Included
// by predictive/dispatch.h only.
#pragma once

#if defined(__x86_64__)
#include <cstring>

#include "common/intrinsics_begin.h"
#include "predictive/scalar-inl.h"

namespace kvstore::predict::avx2 {

// ---- sums and predictions -------------------------------------------------------------------------------------------

using Input = std::uint16_t;  // inputs are widened once, where they are made
constexpr std::size_t kColumns = 8;

// ROWS tokens of 8 columns. A vector has 4 columns: of each, the products of two inputs and of two more.
template <int ROWS>
KVSTORE_AVX2 inline void sum_tile(const Part& part, const std::int8_t* w, std::size_t step, const std::int32_t* bias,
                                  const Inputs& inputs, std::size_t row, std::int32_t* sums) {
  __m256i total[ROWS][2];
  for (int r = 0; r < ROWS; ++r) total[r][0] = total[r][1] = _mm256_setzero_si256();
  const std::size_t parts = part.inputs.size();
  for (std::size_t i = 0; i < parts; ++i) {
    const std::size_t stride = inputs.stride[i];
    const std::uint8_t* q = inputs.rows[i] + row * stride;
    for (std::size_t group = part.groups[i]; group != 0; --group, q += kGroup * sizeof(Input), w += step) {
      const __m256i one = _mm256_cvtepi8_epi16(_mm_load_si128(reinterpret_cast<const __m128i*>(w)));
      const __m256i two = _mm256_cvtepi8_epi16(_mm_load_si128(reinterpret_cast<const __m128i*>(w + 16)));
      for (int r = 0; r < ROWS; ++r) {
        long long four;
        std::memcpy(&four, q + r * stride, sizeof four);
        const __m256i in = _mm256_set1_epi64x(four);
        total[r][0] = _mm256_add_epi32(total[r][0], _mm256_madd_epi16(in, one));
        total[r][1] = _mm256_add_epi32(total[r][1], _mm256_madd_epi16(in, two));
      }
    }
  }
  const __m256i first = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(bias));
  for (int r = 0; r < ROWS; ++r) {
    const __m256i mixed = _mm256_hadd_epi32(total[r][0], total[r][1]);  // 0 1 4 5 2 3 6 7
    const __m256i sum = _mm256_add_epi32(first, _mm256_permute4x64_epi64(mixed, _MM_SHUFFLE(3, 1, 2, 0)));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(sums + r * part.padded), sum);
  }
}

KVSTORE_AVX2 inline void sums(const Part& part, const std::int8_t* weight, const Inputs& inputs, std::size_t n,
                              std::int32_t* sums) {
  for (std::size_t column = 0; column < part.padded; column += kColumns) {
    const std::size_t panel = column / kPanel * kPanel;
    const std::size_t wide = part.padded - panel < kPanel ? part.padded - panel : kPanel;
    const std::int8_t* const w = weight + (panel * part.depth + column - panel) * kGroup;
    const std::int32_t* const bias = part.bias.data() + column;
    std::int32_t* const to = sums + column;
    std::size_t t = 0;
    for (; t + 6 <= n; t += 6) sum_tile<6>(part, w, wide * kGroup, bias, inputs, t, to + t * part.padded);
    if (t + 4 <= n) {
      sum_tile<4>(part, w, wide * kGroup, bias, inputs, t, to + t * part.padded);
      t += 4;
    }
    for (; t < n; ++t) sum_tile<1>(part, w, wide * kGroup, bias, inputs, t, to + t * part.padded);
  }
}

KVSTORE_AVX2 inline void predict(const Part& part, const std::int32_t* sums, const Angles& angles, std::uint16_t* mu) {
  predict_body(part, sums, angles, mu);
}

KVSTORE_AVX2 inline void inputs(const Part& part, const std::uint16_t* x, const Angles& angles, std::uint8_t* q) {
  inputs_body<Input>(part, x, angles, q);
}

// ---- the axis of bins: 16 values of 16 bits -------------------------------------------------------------------------
//
// AVX2 has no shifts of 16 bits by amounts of their own. Shifts to the left are products with a power of two, which is
// looked up; shifts to the right are shifts to the left by what is missing to 7, and then one by 7.

constexpr std::size_t kWords = 16;
constexpr std::size_t kJoined = 96;  // values of a strip

// Hidden from the compiler, which would make the constant anew at every use, slower than to load it.
KVSTORE_AVX2_INLINE __m256i kept(__m256i v) {
  __asm__("" : "+x"(v));
  return v;
}
KVSTORE_AVX2_INLINE __m256i both(int v) { return kept(_mm256_set1_epi16(static_cast<short>(v))); }

// The same 16 bytes in both halves, to be looked up in.
KVSTORE_AVX2_INLINE __m256i table(__m128i bytes) { return kept(_mm256_broadcastsi128_si256(bytes)); }

KVSTORE_AVX2_INLINE __m256i load_words(const void* from) {
  return _mm256_loadu_si256(static_cast<const __m256i*>(from));
}
KVSTORE_AVX2_INLINE void store_words(void* to, __m256i words) {
  _mm256_storeu_si256(static_cast<__m256i*>(to), words);
}
KVSTORE_AVX2_INLINE __m256i bytes_as_words(const std::uint8_t* from) {
  return _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
}
KVSTORE_AVX2_INLINE void store_bytes(std::uint8_t* to, __m256i words) {
  const __m128i bytes = _mm_packus_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), bytes);
}

// Two bits for each word of a mask, of which only the lower counts.
KVSTORE_AVX2_INLINE unsigned set_of(__m256i mask) {
  return static_cast<unsigned>(_mm256_movemask_epi8(mask)) & 0x55555555u;
}
KVSTORE_AVX2_INLINE unsigned first_of(unsigned set) { return static_cast<unsigned>(__builtin_ctz(set)) / 2; }

KVSTORE_AVX2_INLINE std::uint32_t total_of(__m256i sums) {  // of four sums of 64 bits
  const __m128i two = _mm_add_epi64(_mm256_castsi256_si128(sums), _mm256_extracti128_si256(sums, 1));
  return static_cast<std::uint32_t>(_mm_cvtsi128_si64(two) + _mm_extract_epi64(two, 1));
}

struct Constants {
  __m256i zero = _mm256_setzero_si256();
  __m256i most = both(440), lift = both(131), three = both(3), byte = both(255), mantissa = both(127), one = both(128);
  __m256i eight = both(8), pick = both(static_cast<int>(0x8070)), shift_symbol = both(kOffset), escape = both(kEscape);
  __m256i upper = both(0x0700), seven = both(7);
  __m256i down = table(_mm_setr_epi8(-128, 64, 32, 16, 8, 4, 2, 1, 0, 0, 0, 0, 0, 0, 0, 0));
  __m256i masks = table(_mm_setr_epi8(0, 1, 3, 7, 15, 31, 63, 127, 0, 0, 0, 0, 0, 0, 0, 0));
  __m256i octaves = table(_mm_setr_epi8(2, 4, 8, 16, 32, 64, -128, 0, 0, 0, 0, 0, 0, 0, 1, 2));
  __m256i ratio = table(_mm_setr_epi8(64, 54, 45, 38, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0));
  KVSTORE_AVX2_INLINE Constants() {}
};

struct Bins {
  __m256i linear, quarter;
};

// Scales are at least -400 and offsets from -32 to 40: only above is there anything to limit, where scales of donors
// may go up to 655, and `linear` is within its limits then.
KVSTORE_AVX2_INLINE Bins bins_of(const std::int16_t* scale, __m256i offset, const Constants& k) {
  const __m256i s = _mm256_min_epi16(_mm256_add_epi16(load_words(scale), offset), k.most);
  return {_mm256_add_epi16(_mm256_srai_epi16(s, 2), k.lift), _mm256_and_si256(s, k.three)};
}

KVSTORE_AVX2_INLINE __m256i exponents(__m256i bits, const Constants& k) {
  return _mm256_and_si256(_mm256_srli_epi16(bits, 7), k.byte);
}
KVSTORE_AVX2_INLINE __m256i signs(__m256i bits) { return _mm256_srai_epi16(bits, 15); }

// A number among the bins: how many octaves it lies below the exponent `linear`, or above, and its bin without sign.
struct Place {
  __m256i below, above, index;
  __m256i pick;  // looks `below` up: 0 from 16 on
};

KVSTORE_AVX2_INLINE Place place_of(__m256i bits, __m256i linear, const Constants& k) {
  const __m256i e = exponents(bits, k);
  Place made{};
  made.below = _mm256_subs_epu8(linear, e);
  made.above = _mm256_subs_epu8(e, linear);
  made.pick = _mm256_adds_epu8(made.below, k.pick);
  const __m256i mantissa = _mm256_or_si256(_mm256_and_si256(bits, k.mantissa), k.one);
  const __m256i shifted = _mm256_mullo_epi16(mantissa, _mm256_shuffle_epi8(k.down, made.pick));
  // Above, bins go on as mantissas do.
  made.index = _mm256_add_epi16(_mm256_srli_epi16(shifted, 7), _mm256_slli_epi16(made.above, 7));
  return made;
}

KVSTORE_AVX2_INLINE __m256i class_words(__m256i octaves, __m256i quarter, __m256i first) {
  return _mm256_add_epi16(_mm256_add_epi16(_mm256_slli_epi16(octaves, 2), quarter), first);
}

// distance_of, 255 for `far`: four sums. d is within -96..96 unless it is far.
KVSTORE_AVX2_INLINE __m256i distances_of(__m256i d, __m256i octaves, __m256i quarter, __m256i far, const Constants& k) {
  // 2^(octaves + 1), both bytes from one table: the lower at `octaves`, the upper 7 behind.
  const __m256i pick = _mm256_add_epi16(_mm256_or_si256(octaves, _mm256_slli_epi16(octaves, 8)), k.upper);
  const __m256i ratio = _mm256_and_si256(_mm256_shuffle_epi8(k.ratio, quarter), k.byte);
  const __m256i factor = _mm256_mullo_epi16(ratio, _mm256_shuffle_epi8(k.octaves, pick));  // at most 2^15
  const __m256i size = _mm256_mulhi_epu16(_mm256_slli_epi16(_mm256_abs_epi16(d), 9), factor);
  const __m256i least = _mm256_min_epu16(_mm256_or_si256(size, far), k.byte);
  return _mm256_sad_epu8(least, k.zero);
}

// ---- classes --------------------------------------------------------------------------------------------------------

KVSTORE_AVX2 inline void classes(const Part& part, const std::uint16_t* mu, int offset, std::uint8_t* classes) {
  const std::int16_t* const scale = part.scale.data();
  const __m256i first = both(part.value ? static_cast<int>(kClasses) : 0), row = both(offset);
  const std::size_t width = part.width;
  const Constants k;
  std::size_t j = 0;
  for (; j + kWords <= width; j += kWords) {
    const Bins bins = bins_of(scale + j, row, k);
    const __m256i above = _mm256_subs_epu8(exponents(load_words(mu + j), k), bins.linear);
    store_bytes(classes + j, class_words(_mm256_min_epi16(above, k.eight), bins.quarter, first));
  }
  if (j < width) classes_row(scale + j, width - j, part.value, mu + j, offset, classes + j);
}

// ---- split ----------------------------------------------------------------------------------------------------------

// Appends the bits of 16 values: neighbours join until two pieces are left, or four if these are too long.
KVSTORE_AVX2_INLINE void put16(BitsOut& raw, __m256i bits, __m256i counts, __m256i zero) {
  const __m256i low = _mm256_blend_epi16(counts, zero, 0xaa);
  const __m256i two = _mm256_add_epi32(low, _mm256_srli_epi32(counts, 16));
  const __m256i pair = _mm256_or_si256(_mm256_blend_epi16(bits, zero, 0xaa),
                                       _mm256_sllv_epi32(_mm256_srli_epi32(bits, 16), low));
  const __m256i low_two = _mm256_blend_epi32(two, zero, 0xaa);
  const __m256i four = _mm256_add_epi64(low_two, _mm256_srli_epi64(two, 32));
  const __m256i piece = _mm256_or_si256(_mm256_blend_epi32(pair, zero, 0xaa),
                                        _mm256_sllv_epi64(_mm256_srli_epi64(pair, 32), low_two));
  const __m128i pieces[] = {_mm256_castsi256_si128(piece), _mm256_extracti128_si256(piece, 1)};
  const __m128i lengths[] = {_mm256_castsi256_si128(four), _mm256_extracti128_si256(four, 1)};
  for (int i = 0; i < 2; ++i) {
    const auto one = static_cast<std::uint64_t>(_mm_cvtsi128_si64(pieces[i]));
    const auto other = static_cast<std::uint64_t>(_mm_extract_epi64(pieces[i], 1));
    const auto length = static_cast<unsigned>(_mm_cvtsi128_si32(lengths[i]));
    const auto more = static_cast<unsigned>(_mm_extract_epi32(lengths[i], 2));
    if (length + more <= 50) {
      raw.put(one | other << length, length + more);
    } else {
      raw.put(one, length);
      raw.put(other, more);
    }
  }
}

struct SplitConstants : Constants {
  __m256i exponent = both(0x7f80), six = both(6), ten = both(kMostRaw);
  KVSTORE_AVX2_INLINE SplitConstants() {}
};

// Codes 16 values; returns sums of their distances. first: class.
KVSTORE_AVX2_INLINE __m256i split16(const std::uint16_t* x, const std::uint16_t* mu, const Bins& bins, __m256i first,
                                    const SplitConstants& k, std::uint8_t* symbols, std::uint8_t* classes,
                                    BitsOut& out, std::uint16_t*& escapes) {
  const __m256i v = load_words(x), m = load_words(mu);
  const Place to = place_of(v, bins.linear, k), from = place_of(m, bins.linear, k);
  const __m256i octaves = _mm256_min_epi16(from.above, k.eight);
  const __m256i d = _mm256_subs_epi16(_mm256_xor_si256(to.index, signs(v)), _mm256_xor_si256(from.index, signs(m)));
  // A distance that is too far away wraps around to more than any symbol, or stays above.
  const __m256i symbol = _mm256_min_epu16(_mm256_add_epi16(d, k.shift_symbol), k.escape);
  const __m256i far = _mm256_cmpeq_epi16(symbol, k.escape);
  store_bytes(symbols, symbol);
  store_bytes(classes, class_words(octaves, bins.quarter, first));

  const __m256i mantissa = _mm256_and_si256(v, k.mantissa), deep = _mm256_cmpgt_epi16(to.below, k.seven);
  const __m256i low = _mm256_and_si256(mantissa, _mm256_shuffle_epi8(k.masks, to.pick));
  const __m256i gap = _mm256_sub_epi16(to.below, k.eight);
  const __m256i zero = _mm256_cmpeq_epi16(_mm256_and_si256(v, k.exponent), k.zero);
  const __m256i none = _mm256_or_si256(zero, _mm256_cmpgt_epi16(gap, k.six));  // among the deep: an escape
  const __m256i whole = _mm256_blendv_epi8(_mm256_add_epi16(gap, _mm256_slli_epi16(mantissa, 3)), k.seven, none);
  const __m256i bits = _mm256_andnot_si256(far, _mm256_blendv_epi8(low, whole, deep));
  const __m256i counts = _mm256_andnot_si256(far, _mm256_blendv_epi8(to.below, k.ten, deep));
  put16(out, bits, counts, k.zero);
  for (unsigned left = set_of(_mm256_or_si256(far, _mm256_and_si256(deep, none))); left != 0; left &= left - 1)
    *escapes++ = x[first_of(left)];
  return distances_of(d, octaves, bins.quarter, far, k);
}

KVSTORE_AVX2 inline std::uint32_t split(const Part& part, const std::uint16_t* x, const std::uint16_t* mu, int offset,
                                        std::uint8_t* symbols, std::uint8_t* classes, BitsOut& raw,
                                        std::uint16_t*& escapes) {
  const std::int16_t* const scale = part.scale.data();
  const __m256i first = both(part.value ? static_cast<int>(kClasses) : 0), row = both(offset);
  const std::size_t width = part.width;
  const SplitConstants k;
  __m256i total = k.zero;
  BitsOut out = raw;
  std::uint16_t* whole = escapes;
  std::size_t j = 0;
  for (; j + kWords <= width; j += kWords) {
    const Bins bins = bins_of(scale + j, row, k);
    const __m256i more = split16(x + j, mu + j, bins, first, k, symbols + j, classes + j, out, whole);
    total = _mm256_add_epi64(total, more);
  }
  std::uint32_t distances = total_of(total);
  if (j < width)
    distances += split_row(scale + j, width - j, part.value, x + j, mu + j, offset, symbols + j, classes + j, out,
                           whole);
  raw = out;
  escapes = whole;
  return distances;
}

// ---- join -----------------------------------------------------------------------------------------------------------

// Where in its half each value's bits begin, and how many a half has.
struct Starts {
  __m256i begin;
  unsigned low, high;
};

KVSTORE_AVX2_INLINE Starts starts_of(__m256i counts) {
  __m256i sum = _mm256_add_epi16(counts, _mm256_slli_si256(counts, 2));
  sum = _mm256_add_epi16(sum, _mm256_slli_si256(sum, 4));
  sum = _mm256_add_epi16(sum, _mm256_slli_si256(sum, 8));
  return {_mm256_sub_epi16(sum, counts), static_cast<unsigned>(_mm256_extract_epi16(sum, 7)),
          static_cast<unsigned>(_mm256_extract_epi16(sum, 15))};
}

struct JoinConstants : Constants {
  __m256i ones = both(-1), nibble = both(15), ten = both(kMostRaw), minus = both(static_cast<int>(0x8000));
  __m256i next = kept(_mm256_set1_epi32(0x03020100)), bits = kept(_mm256_set1_epi32((1 << kMostRaw) - 1));
  // Raw bits of bins (0..255, where 128 and more have none), by the upper and lower half of a byte.
  __m256i by_low = table(_mm_setr_epi8(10, 7, 6, 6, 5, 5, 5, 5, 4, 4, 4, 4, 4, 4, 4, 4));
  __m256i by_high = table(_mm_setr_epi8(15, 3, 2, 2, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0));
  KVSTORE_AVX2_INLINE JoinConstants() {}
};

// kMostRaw bits from each value's first on. Each half of the values has all its bits within 16 bytes.
KVSTORE_AVX2_INLINE __m256i raw_words(const std::uint8_t* raw, std::size_t at, const Starts& starts,
                                      const JoinConstants& k) {
  const std::size_t next = at + starts.low;
  const __m128i low = _mm_loadu_si128(reinterpret_cast<const __m128i*>(raw + (at >> 3)));
  const __m128i high = _mm_loadu_si128(reinterpret_cast<const __m128i*>(raw + (next >> 3)));
  const __m256i window = _mm256_inserti128_si256(_mm256_castsi128_si256(low), high, 1);
  const __m128i one = _mm_set1_epi16(static_cast<short>(at & 7)), two = _mm_set1_epi16(static_cast<short>(next & 7));
  const __m256i within = _mm256_inserti128_si256(_mm256_castsi128_si256(one), two, 1);
  const __m256i bit = _mm256_add_epi16(starts.begin, within);
  const __m256i byte = _mm256_srli_epi16(bit, 3), shift = _mm256_and_si256(bit, k.seven);
  const __m256i twice = _mm256_or_si256(byte, _mm256_slli_epi16(byte, 8));
  const __m256i a = _mm256_shuffle_epi8(window, _mm256_add_epi8(_mm256_unpacklo_epi16(twice, twice), k.next));
  const __m256i b = _mm256_shuffle_epi8(window, _mm256_add_epi8(_mm256_unpackhi_epi16(twice, twice), k.next));
  return _mm256_packus_epi32(
      _mm256_and_si256(_mm256_srlv_epi32(a, _mm256_unpacklo_epi16(shift, k.zero)), k.bits),
      _mm256_and_si256(_mm256_srlv_epi32(b, _mm256_unpackhi_epi16(shift, k.zero)), k.bits));
}

// index: 0..255
KVSTORE_AVX2_INLINE __m256i raw_counts(__m256i index, const JoinConstants& k) {
  const __m256i low = _mm256_shuffle_epi8(k.by_low, _mm256_and_si256(index, k.nibble));
  const __m256i high = _mm256_shuffle_epi8(k.by_high, _mm256_srli_epi16(index, 4));
  return _mm256_and_si256(_mm256_min_epu8(low, high), k.byte);  // the upper bytes looked up the first entries
}

// What is known of the values of a strip before their raw bits are read. Strips are gone over twice: a processor does
// not look far enough ahead to begin values while those before still wait for the place of their bits.
struct Found {
  alignas(32) std::uint16_t bins[kJoined], counts[kJoined], linear[kJoined], begin[kJoined];
  unsigned low[kJoined / kWords], high[kJoined / kWords];  // bins: below 0 on the other side of 0
};

// The bins of 16 values, and sums of their distances.
KVSTORE_AVX2_INLINE __m256i find16(const std::uint8_t* symbols, const std::uint16_t* mu, const Bins& bins,
                                   const JoinConstants& k, Found& found, std::size_t at) {
  const __m256i m = load_words(mu), symbol = bytes_as_words(symbols);
  const Place from = place_of(m, bins.linear, k);
  const __m256i far = _mm256_cmpeq_epi16(symbol, k.escape), d = _mm256_sub_epi16(symbol, k.shift_symbol);
  const __m256i i = _mm256_add_epi16(_mm256_xor_si256(from.index, signs(m)), d);
  const __m256i index = _mm256_xor_si256(i, signs(i));
  store_words(found.bins + at, i);
  const __m256i counts = raw_counts(_mm256_min_epu16(_mm256_or_si256(index, far), k.byte), k);
  const Starts starts = starts_of(counts);
  store_words(found.counts + at, counts);
  store_words(found.begin + at, starts.begin);
  found.low[at / kWords] = starts.low;
  found.high[at / kWords] = starts.high;
  store_words(found.linear + at, bins.linear);
  return distances_of(d, _mm256_min_epi16(from.above, k.eight), bins.quarter, far, k);
}

// Values that are damaged, or that `whole` says to take from the escapes.
struct Joined {
  __m256i bad, whole;
};

// Decodes the 16 values of a strip that begin at `from` to x, with raw bits from bit `at` on, which is moved.
KVSTORE_AVX2_INLINE Joined join16(const std::uint8_t* symbols, const Found& found, std::size_t from,
                                  const JoinConstants& k, const std::uint8_t* raw, std::size_t& at, std::uint16_t* x) {
  const __m256i i = load_words(found.bins + from), counts = load_words(found.counts + from);
  const __m256i linear = load_words(found.linear + from);
  const Starts starts{load_words(found.begin + from), found.low[from / kWords], found.high[from / kWords]};
  const __m256i sign = signs(i), index = _mm256_xor_si256(i, sign);
  const __m256i far = _mm256_cmpeq_epi16(bytes_as_words(symbols), k.escape);
  const __m256i words = raw_words(raw, at, starts, k);
  at += starts.low + starts.high;
  const __m256i deep = _mm256_cmpeq_epi16(counts, k.ten), mask = _mm256_shuffle_epi8(k.masks, counts);
  // (linear - count) << 7 | the bin's lower bits | raw. Of bins of one value, which have no count, this is
  // linear + index - 128.
  const __m256i shifted = _mm256_mullo_epi16(index, _mm256_sub_epi16(mask, k.ones));
  const __m256i base = _mm256_add_epi16(_mm256_sub_epi16(linear, counts), k.ones);
  const __m256i wide = _mm256_add_epi16(_mm256_slli_epi16(base, 7),
                                        _mm256_add_epi16(shifted, _mm256_and_si256(words, mask)));
  const __m256i gap = _mm256_and_si256(words, k.seven);
  const __m256i e = _mm256_sub_epi16(_mm256_sub_epi16(linear, k.eight), gap);
  const __m256i small = _mm256_add_epi16(_mm256_slli_epi16(e, 7), _mm256_srli_epi16(words, 3));
  const __m256i v = _mm256_blendv_epi8(wide, small, deep);
  store_words(x, _mm256_or_si256(v, _mm256_and_si256(sign, k.minus)));
  const __m256i whole = _mm256_or_si256(far, _mm256_and_si256(deep, _mm256_cmpeq_epi16(gap, k.seven)));
  // A number beyond the largest has the bit of the sign set, one below the least normal number is at most 127.
  return {_mm256_andnot_si256(whole, _mm256_cmpgt_epi16(k.one, v)), whole};
}

KVSTORE_AVX2 inline bool join(const Part& part, const std::uint8_t* symbols, const std::uint16_t* mu, int offset,
                              BitsIn& raw, EscapesIn& escapes, std::uint16_t* x, std::uint32_t* distances) {
  const std::int16_t* const scale = part.scale.data();
  const std::size_t width = part.width;
  const JoinConstants k;
  const __m256i row = both(offset);
  __m256i total = k.zero, bad = k.zero;
  const std::uint8_t* const bits = raw.bytes;
  Found found;
  std::size_t at = raw.at, j = 0;
  for (std::size_t wide; (wide = (width - j < kJoined ? width - j : kJoined) / kWords * kWords) != 0; j += wide) {
    for (std::size_t i = 0; i < wide; i += kWords) {
      const Bins bins = bins_of(scale + j + i, row, k);
      total = _mm256_add_epi64(total, find16(symbols + j + i, mu + j + i, bins, k, found, i));
    }
    for (std::size_t i = 0; i < wide; i += kWords) {
      std::uint16_t* const to = x + j + i;
      const Joined made = join16(symbols + j + i, found, i, k, bits, at, to);
      bad = _mm256_or_si256(bad, made.bad);
      for (unsigned left = set_of(made.whole); left != 0; left &= left - 1) {
        if (escapes.at == escapes.end) return false;
        to[first_of(left)] = static_cast<std::uint16_t>(load16(escapes.at));
        escapes.at += 2;
      }
    }
  }
  raw.at = at;
  *distances = total_of(total);
  bool good = _mm256_testz_si256(bad, bad) != 0;
  if (j < width) {
    std::uint32_t more = 0;
    good &= join_row(scale + j, width - j, symbols + j, mu + j, offset, raw, escapes, x + j, &more);
    *distances += more;
  }
  return good;
}

// ---- check ----------------------------------------------------------------------------------------------------------

KVSTORE_AVX2 inline void check(const std::uint16_t* x, std::size_t count, std::uint32_t* a, std::uint32_t* b) {
  // Lane i of `sum` adds up the values 2i and 2i + 1 of all 16, `odd` the latter alone. `later` adds up `sum` after
  // every step, so that values are in there as often as steps follow them, their own included.
  __m256i sum = _mm256_setzero_si256(), later = sum, odd = sum;
  const std::size_t steps = count / 16;
  for (std::size_t i = 0; i < steps; ++i) {
    const __m256i v = load_words(x + 16 * i), upper = _mm256_srli_epi32(v, 16);
    sum = _mm256_add_epi32(sum, _mm256_add_epi32(_mm256_blend_epi16(v, _mm256_setzero_si256(), 0xaa), upper));
    odd = _mm256_add_epi32(odd, upper);
    later = _mm256_add_epi32(later, sum);
  }
  alignas(32) std::uint32_t sums[8], odds[8], laters[8];
  _mm256_store_si256(reinterpret_cast<__m256i*>(sums), sum);
  _mm256_store_si256(reinterpret_cast<__m256i*>(odds), odd);
  _mm256_store_si256(reinterpret_cast<__m256i*>(laters), later);
  std::uint32_t all = 0, weighted = 0;
  for (std::uint32_t i = 0; i < 8; ++i) {
    all += sums[i];
    weighted += sums[i] * (2 * i + 1) + odds[i] + 16 * (static_cast<std::uint32_t>(steps) * sums[i] - laters[i]);
  }
  for (std::size_t i = 16 * steps; i < count; ++i) {
    all += x[i];
    weighted += static_cast<std::uint32_t>(i + 1) * x[i];
  }
  *a = all;
  *b = weighted;
}

inline constexpr Kernels kKernels = {sizeof(Input), sums, predict, classes, split, join, nullptr, inputs, check};

}  // namespace kvstore::predict::avx2

#include "common/intrinsics_end.h"
#endif

// The axis of bins with AVX-512: 32 values of 16 bits at a time. Included by avx512-inl.h of those that use it only.
#pragma once

#if defined(__x86_64__)
#include "common/intrinsics_begin.h"
#include "predictive/kernels.h"
#include "rans/avx512-inl.h"

namespace kvstore::predict::avx512 {

KVSTORE_VNNI_INLINE __mmask32 first32(std::size_t n) { return n >= 32 ? ~__mmask32{0} : (__mmask32{1} << n) - 1; }

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

KVSTORE_VNNI_INLINE __m512i class_words(__m512i octaves, __m512i quarter, __m512i first) {
  return _mm512_add_epi16(_mm512_add_epi16(_mm512_slli_epi16(octaves, 2), quarter), first);
}

KVSTORE_VNNI_INLINE __m256i class_bytes(__m512i octaves, __m512i quarter, __m512i first) {
  return _mm512_cvtepi16_epi8(class_words(octaves, quarter, first));
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

// Which bins 32 values are in, and their raw bits.
struct Found {
  __m512i index, sign, counts, bits, distances;
  __mmask32 far;
};

// What 32 values were found to be: those that are damaged, or that `whole` says to take from the escapes.
struct Joined {
  __mmask32 bad, whole;
  __m512i distances;
};

// The first half of joining the `live` ones of 32 values, with raw bits from bit `at` on, which is moved.
KVSTORE_VNNI_INLINE Found find32(__m512i symbol, __m512i m, const Bins& bins, __mmask32 live, const JoinConstants& k,
                                 const std::uint8_t* raw, std::size_t& at) {
  const __m512i of_mu = exponents(m, k);
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
  return {index, sign, counts, bits, distances_of(d, octaves, bins.quarter, far, live, k), far};
}

// The second: writes the values to x.
KVSTORE_VNNI_INLINE Joined place32(const Found& found, const Bins& bins, __mmask32 live, const JoinConstants& k,
                                   std::uint16_t* x) {
  const __m512i index = found.index, counts = found.counts, bits = found.bits;
  const __mmask32 above = _mm512_cmpgt_epu16_mask(index, k.mantissa), deep = _mm512_testn_epi16_mask(index, index);
  const __m512i linear = _mm512_slli_epi16(bins.linear, 7);
  // Below: (linear - count) << 7 | the bin's lower bits | raw. Above: linear + index - 128.
  __m512i v = _mm512_or_si512(_mm512_and_si512(_mm512_sllv_epi16(index, counts), k.mantissa), bits);
  v = _mm512_add_epi16(v, _mm512_sub_epi16(linear, _mm512_slli_epi16(counts, 7)));
  v = _mm512_mask_add_epi16(v, above, linear, _mm512_sub_epi16(index, k.one));
  const __m512i gap = _mm512_and_si512(bits, k.seven);
  const __m512i e = _mm512_sub_epi16(bins.linear, _mm512_add_epi16(gap, k.first));
  v = _mm512_mask_add_epi16(v, deep, _mm512_slli_epi16(e, 7), _mm512_srli_epi16(bits, 3));
  const __mmask32 whole = found.far | _mm512_mask_cmpeq_epi16_mask(deep, gap, k.seven);
  const __mmask32 bad = (above & _mm512_movepi16_mask(v)) | _mm512_mask_cmple_epi16_mask(deep, e, k.zero);
  _mm512_mask_storeu_epi16(x, live, _mm512_or_si512(v, _mm512_and_si512(found.sign, k.minus)));
  return {live & ~whole & bad, live & whole, found.distances};
}

// Decodes the `live` ones of 32 values to x, with raw bits from bit `at` on, which is moved.
KVSTORE_VNNI_INLINE Joined join32(const std::uint8_t* symbols, const std::uint16_t* mu, const Bins& bins,
                                  __mmask32 live, const JoinConstants& k, const std::uint8_t* raw, std::size_t& at,
                                  std::uint16_t* x) {
  const __m512i symbol = _mm512_cvtepu8_epi16(_mm256_maskz_loadu_epi8(live, symbols));
  const __m512i m = _mm512_maskz_loadu_epi16(live, mu);
  return place32(find32(symbol, m, bins, live, k, raw, at), bins, live, k, x);
}

KVSTORE_VNNI_INLINE bool take_escapes(__mmask32 whole, EscapesIn& escapes, std::uint16_t* x) {
  for (__mmask32 left = whole; left != 0; left &= left - 1) {
    if (escapes.at == escapes.end) return false;
    x[static_cast<unsigned>(__builtin_ctz(left))] = static_cast<std::uint16_t>(load16(escapes.at));
    escapes.at += 2;
  }
  return true;
}

// ---- symbols and values at once -------------------------------------------------------------------------------------

// rANS waits for its own results most of the time. So the 32 values before are joined meanwhile, in two halves between
// what the lanes of a step do: a processor does not look far enough ahead to find other work by itself.
class Decoding {
 public:
  // first: the class of the part's least exponent. x: of the first value; the others follow.
  KVSTORE_VNNI_INLINE Decoding(const rans::Steps& stream, const BitsIn& raw, const EscapesIn& escapes, __m512i first,
                               std::uint16_t* x)
      : slots_(stream.slots),
        words_(stream.words),
        end_(stream.end),
        a_(_mm512_loadu_si512(stream.states)),
        b_(_mm512_loadu_si512(stream.states + 16)),
        raw_(raw),
        escapes_(escapes),
        first_(first),
        x_(x) {}

  // Whether there are words for so many values for sure.
  KVSTORE_VNNI_INLINE bool has(std::size_t values) const {
    return end_ - words_ >= static_cast<std::ptrdiff_t>(2 * values);
  }

  // Takes the symbols of 32 values; predictions and bins are theirs. Returns what `finish` does, of the 32 before, or
  // zeros if these are the first.
  KVSTORE_VNNI_INLINE __m512i step(__m512i mu, const Bins& bins) {
    const __m512i octaves = octaves_of(exponents(mu, k_), bins.linear, k_);
    const __m512i classes = class_words(octaves, bins.quarter, first_);
    const __m512i low = _mm512_cvtepu16_epi32(_mm512_castsi512_si256(classes));
    __m512i high = _mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64(classes, 1));
    const __m512i one = rans::avx512::slots16<kTableBits>(slots_, a_, low);
    a_ = rans::avx512::next16<kTableBits>(one, a_, words_);
    in_order(a_, symbol_);
    Found found = find();
    in_order(found.bits, high);
    const __m512i two = rans::avx512::slots16<kTableBits>(slots_, b_, high);
    b_ = rans::avx512::next16<kTableBits>(two, b_, words_);
    in_order(b_, found.index);
    const __m512i distances = place(found);
    symbol_ = _mm512_and_si512(_mm512_permutex2var_epi16(one, even_, two), k_.byte);
    mu_ = mu;
    bins_ = bins;
    live_ = ~__mmask32{0};
    return distances;
  }

  // Joins the values whose symbols were taken last; nothing follows. Returns sums of their distances.
  KVSTORE_VNNI_INLINE __m512i finish() {
    return place(find());
  }

  // Of the values that are joined: whether none is damaged. And where their raw bits end.
  KVSTORE_VNNI_INLINE bool good() const { return bad_ == 0; }
  KVSTORE_VNNI_INLINE std::size_t position() const { return raw_.at; }

  // Gives back what was taken.
  KVSTORE_VNNI_INLINE void leave(const rans::Steps& stream, BitsIn& raw, EscapesIn& escapes) const {
    stream.words = words_;
    _mm512_storeu_si512(stream.states, a_);
    _mm512_storeu_si512(stream.states + 16, b_);
    raw = raw_;
    escapes = escapes_;
  }

 private:
  // Keeps the compiler from making the second before the first.
  static KVSTORE_VNNI_INLINE void in_order(__m512i& first, __m512i& second) {
    __asm__ volatile("" : "+v"(first), "+v"(second));
  }

  KVSTORE_VNNI_INLINE Found find() { return find32(symbol_, mu_, bins_, live_, k_, raw_.bytes, raw_.at); }
  KVSTORE_VNNI_INLINE __m512i place(const Found& found) {
    const Joined joined = place32(found, bins_, live_, k_, x_);
    bad_ |= joined.bad;
    if (!take_escapes(joined.whole, escapes_, x_)) bad_ = 1;
    x_ += live_ != 0 ? 32 : 0;
    return joined.distances;
  }

  const JoinConstants k_;
  const std::uint32_t* slots_;
  const std::uint8_t *words_, *end_;
  __m512i a_, b_;
  BitsIn raw_;
  EscapesIn escapes_;
  __m512i first_;
  __m512i even_ = kept(_mm512_set_epi16(62, 60, 58, 56, 54, 52, 50, 48, 46, 44, 42, 40, 38, 36, 34, 32,  //
                                        30, 28, 26, 24, 22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0));
  // The values that are still to be joined.
  __m512i symbol_ = k_.zero, mu_ = k_.zero;
  Bins bins_ = {k_.zero, k_.zero};
  __mmask32 live_ = 0, bad_ = 0;
  std::uint16_t* x_;
};

}  // namespace kvstore::predict::avx512

#include "common/intrinsics_end.h"
#endif

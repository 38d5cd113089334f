// AVX-512 twins of the loops of the levels, with VNNI: two rows of 16 columns a vector. Included by levels/dispatch.h
// only.
#pragma once

#if defined(__x86_64__)
#include "common/intrinsics_begin.h"
#include "levels/scalar-inl.h"
#include "predictive/avx512-inl.h"

namespace kvstore::levels::avx512 {

namespace axis = kvstore::predict::avx512;
constexpr std::size_t kPair = 2 * kColumns;

// ---- sums -----------------------------------------------------------------------------------------------------------

KVSTORE_VNNI_INLINE __m512i four_of(const std::uint8_t* q) {
  int four;
  std::memcpy(&four, q, sizeof four);
  return _mm512_set1_epi32(four);
}

// ROWS rows of a panel of WIDE groups: all sums stay in registers. sums: of the panel; turn: how many were made of it.
template <int ROWS, int WIDE>
KVSTORE_VNNI_INLINE void sum_tile(const Part& part, const Group* groups, const std::int8_t* w, const Summed& block,
                                  std::size_t row, std::size_t turn, std::int32_t* sums) {
  const std::size_t padded = block.rows.padded;
  // The first tiles bring the next panel nearer, be it the next part's or nobody's; the others what is there already.
  const std::size_t ahead_lines = turn < WIDE ? part.depth * kSteps * (WIDE + turn) : 0;
  auto ahead = reinterpret_cast<std::uintptr_t>(w) + ahead_lines * predict::kColumnsBytes;
  __m512i total[ROWS][WIDE];
  for (int r = 0; r < ROWS; ++r)
    for (int c = 0; c < WIDE; ++c) total[r][c] = _mm512_load_si512(groups[c].bias);
  const std::size_t parts = part.inputs.size();
  for (std::size_t i = 0; i < parts; ++i) {
    const std::uint8_t* q = block.inputs[i] + row * kColumns;
    for (std::size_t group = part.depths[i]; group != 0; --group, q += padded * kColumns) {
      for (std::size_t k = 0; k < kSteps; ++k, w += predict::kColumnsBytes * WIDE) {
        __m512i weights[WIDE];
        for (int c = 0; c < WIDE; ++c) weights[c] = _mm512_load_si512(w + predict::kColumnsBytes * c);
        _mm_prefetch(reinterpret_cast<const char*>(ahead), _MM_HINT_T1);
        ahead += predict::kColumnsBytes;
        for (int r = 0; r < ROWS; ++r) {
          const __m512i in = four_of(q + static_cast<std::size_t>(r) * kColumns + 4 * k);
          for (int c = 0; c < WIDE; ++c) total[r][c] = _mm512_dpbusd_epi32(total[r][c], in, weights[c]);
        }
      }
    }
  }
  for (int c = 0; c < WIDE; ++c)
    for (int r = 0; r < ROWS; ++r)
      _mm512_storeu_si512(sums + (static_cast<std::size_t>(c) * padded + row + static_cast<std::size_t>(r)) * kColumns,
                          total[r][c]);
}

// A panel of all blocks, from group `panel` on.
template <int WIDE>
KVSTORE_VNNI void sum_panel(const Part& part, std::size_t panel, const std::int8_t* w, const Summed* blocks,
                            std::size_t count) {
  std::size_t turn = 0;
  for (const Summed* block = blocks; block != blocks + count; ++block) {
    std::int32_t* const to = block->sums + panel * block->rows.padded * kColumns;
    for (std::size_t t = 0; t < block->rows.padded; t += kRows)
      sum_tile<kRows, WIDE>(part, part.groups.data() + panel, w, *block, t, turn++, to);
  }
}

inline void sums(const Part& part, const std::int8_t* weight, const Summed* blocks, std::size_t count) {
  const std::size_t columns = part.groups.size();
  for (std::size_t panel = 0; panel < columns; panel += kMostPanel) {
    const std::int8_t* const w = weight + panel * part.depth * kSteps * predict::kColumnsBytes;
    switch (columns - panel) {
      case 1: sum_panel<1>(part, panel, w, blocks, count); break;
      case 2: sum_panel<2>(part, panel, w, blocks, count); break;
      default: sum_panel<3>(part, panel, w, blocks, count);
    }
  }
}

template <int ROWS>
KVSTORE_VNNI_INLINE void group_rows(const Group& group, const std::int8_t* w, std::size_t number,
                                    const std::int32_t* sums, std::size_t stride, const std::uint8_t* q,
                                    std::size_t padded, std::int16_t* p) {
  __m512i total[ROWS];
  for (int r = 0; r < ROWS; ++r) total[r] = _mm512_loadu_si512(sums + static_cast<std::size_t>(r) * stride);
  for (std::size_t g = 0; g < number; ++g, q += padded * kColumns) {
    for (std::size_t k = 0; k < kSteps; ++k, w += predict::kColumnsBytes) {
      const __m512i weights = _mm512_load_si512(w);
      for (int r = 0; r < ROWS; ++r)
        total[r] = _mm512_dpbusd_epi32(total[r], four_of(q + static_cast<std::size_t>(r) * kColumns + 4 * k), weights);
    }
  }
  const __m512i shift = _mm512_load_si512(group.shift);
  for (int r = 0; r < ROWS; ++r)
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p + static_cast<std::size_t>(r) * kColumns),
                        _mm512_cvtsepi32_epi16(_mm512_srav_epi32(total[r], shift)));
}

KVSTORE_VNNI inline void group(const Group& group, const std::int8_t* weight, std::size_t number,
                               const std::int32_t* sums, std::size_t stride, const std::uint8_t* residuals,
                               RowCount rows, std::int16_t* p) {
  std::size_t t = 0;
  for (; t + 2 * kRows <= rows.padded; t += 2 * kRows)
    group_rows<2 * kRows>(group, weight, number, sums + t * stride, stride, residuals + t * kColumns, rows.padded,
                          p + t * kColumns);
  if (t < rows.padded)
    group_rows<kRows>(group, weight, number, sums + t * stride, stride, residuals + t * kColumns, rows.padded,
                      p + t * kColumns);
}

// ---- between bf16 and fixed point -----------------------------------------------------------------------------------

KVSTORE_VNNI_INLINE __m512i wide(__m256i x) { return _mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16); }
KVSTORE_VNNI_INLINE __m256i upper_of(__m512 v) {
  return _mm512_cvtepi32_epi16(_mm512_srli_epi32(_mm512_castps_si512(v), 16));
}

// Angles of two rows for a group's eight pairs.
KVSTORE_VNNI_INLINE __m512i two_rows(const std::int32_t* turns, std::size_t stride) {
  const __m256i one = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(turns));
  const __m256i two = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(turns + stride));
  return _mm512_inserti64x4(_mm512_castsi256_si512(one), two, 1);
}

KVSTORE_VNNI inline void predict(const Group& group, const std::int16_t* p, const Turns* turns, RowCount rows,
                                 std::uint16_t* mu) {
  const __m512 scale = _mm512_load_ps(group.from_fixed);
  const __m512i high = _mm512_set1_epi32(static_cast<int>(0xffff0000));
  for (std::size_t t = 0; t < rows.padded; t += 2, p += kPair, mu += kPair) {
    const __m512i both = _mm512_loadu_si512(p);
    if (turns == nullptr) {
      const __m512 one = _mm512_cvtepi32_ps(_mm512_cvtepi16_epi32(_mm512_castsi512_si256(both)));
      const __m512 two = _mm512_cvtepi32_ps(_mm512_cvtepi16_epi32(_mm512_extracti64x4_epi64(both, 1)));
      const __m512i found = _mm512_castsi256_si512(upper_of(_mm512_mul_ps(one, scale)));
      _mm512_storeu_si512(mu, _mm512_inserti64x4(found, upper_of(_mm512_mul_ps(two, scale)), 1));
      continue;
    }
    const std::size_t at = t * turns->stride;
    const __m512i a = _mm512_madd_epi16(both, two_rows(turns->forward + at, turns->stride));
    const __m512i b = _mm512_madd_epi16(both, two_rows(turns->across + at, turns->stride));
    const __m512i x = _mm512_castps_si512(_mm512_mul_ps(_mm512_cvtepi32_ps(a), scale));
    const __m512i y = _mm512_castps_si512(_mm512_mul_ps(_mm512_cvtepi32_ps(b), scale));
    _mm512_storeu_si512(mu, _mm512_or_si512(_mm512_srli_epi32(x, 16), _mm512_and_si512(y, high)));
  }
}

KVSTORE_VNNI inline void fixed(const Group& group, const std::uint16_t* x, const Turns* turns, RowCount rows,
                               std::int16_t* u) {
  const __m512 scale = _mm512_load_ps(group.to_fixed);
  const __m512i top = _mm512_set1_epi16(0x7f80), high = _mm512_set1_epi32(static_cast<int>(0xffff0000));
  const __m512i half = _mm512_set1_epi32(1 << 13);
  for (std::size_t t = 0; t < rows.padded; t += 2, x += kPair, u += kPair) {
    const __m512i raw = _mm512_loadu_si512(x);
    const __m512i v = _mm512_maskz_mov_epi16(_mm512_cmpneq_epi16_mask(_mm512_and_si512(raw, top), top), raw);
    if (turns == nullptr) {
      const __m512 one = _mm512_mul_ps(_mm512_castsi512_ps(wide(_mm512_castsi512_si256(v))), scale);
      const __m512 two = _mm512_mul_ps(_mm512_castsi512_ps(wide(_mm512_extracti64x4_epi64(v, 1))), scale);
      const __m512i found = _mm512_castsi256_si512(_mm512_cvtepi32_epi16(axis::rounded16(one, 32767.0f)));
      const __m256i second = _mm512_cvtepi32_epi16(axis::rounded16(two, 32767.0f));
      _mm512_storeu_si512(u, _mm512_inserti64x4(found, second, 1));
      continue;
    }
    const std::size_t at = t * turns->stride;
    const __m512 first = _mm512_castsi512_ps(_mm512_slli_epi32(v, 16));
    const __m512 second = _mm512_castsi512_ps(_mm512_and_si512(v, high));
    const __m512i a = axis::rounded16(_mm512_mul_ps(first, scale), predict::kRange);
    const __m512i b = axis::rounded16(_mm512_mul_ps(second, scale), predict::kRange);
    const __m512i both = _mm512_mask_mov_epi16(a, 0xaaaaaaaa, _mm512_slli_epi32(b, 16));
    // Back: (cos, sin) and (-sin, cos) are the others turned around.
    const __m512i cos = _mm512_ror_epi32(two_rows(turns->across + at, turns->stride), 16);
    const __m512i sin = _mm512_ror_epi32(two_rows(turns->forward + at, turns->stride), 16);
    const __m512i c = _mm512_srai_epi32(_mm512_add_epi32(_mm512_madd_epi16(both, cos), half), 14);
    const __m512i d = _mm512_srai_epi32(_mm512_add_epi32(_mm512_madd_epi16(both, sin), half), 14);
    _mm512_storeu_si512(u, _mm512_mask_mov_epi16(c, 0xaaaaaaaa, _mm512_slli_epi32(d, 16)));
  }
}

KVSTORE_VNNI_INLINE void store_narrow(std::uint8_t* to, __m512i v, __m512i factor) {
  const __m256i found = _mm512_cvtsepi16_epi8(_mm512_mulhrs_epi16(v, factor));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm256_xor_si256(found, _mm256_set1_epi8(-128)));
}

KVSTORE_VNNI inline void inputs(const Group& group, const std::int16_t* u, RowCount rows, std::uint8_t* inputs) {
  const __m512i gain = _mm512_load_si512(group.gain);
  for (std::size_t i = 0; i < rows.padded * kColumns; i += kPair)
    store_narrow(inputs + i, _mm512_loadu_si512(u + i), gain);
}

KVSTORE_VNNI inline void residuals(const Group& group, const std::int16_t* u, const std::int16_t* p, RowCount rows,
                                   std::uint8_t* residuals) {
  const __m512i narrow = _mm512_load_si512(group.narrow);
  for (std::size_t i = 0; i < rows.padded * kColumns; i += kPair)
    store_narrow(residuals + i, _mm512_subs_epi16(_mm512_loadu_si512(u + i), _mm512_loadu_si512(p + i)), narrow);
}

// ---- the axis of bins -----------------------------------------------------------------------------------------------

// The columns of the rows t and t + 1 that there are.
KVSTORE_VNNI_INLINE __mmask32 live_of(const Group& group, std::size_t t, std::size_t n) {
  const __mmask32 row = static_cast<__mmask32>((std::uint64_t{1} << group.width) - 1);
  return t + 1 < n ? row | row << kColumns : row;
}

KVSTORE_VNNI_INLINE __m512i class_of(bool value) {
  return axis::both(value ? static_cast<int>(predict::kClasses) : 0);
}

KVSTORE_VNNI inline void classes(const Group& group, bool value, const std::uint16_t* mu, RowCount rows,
                                 const Coded& coded) {
  const axis::Constants k;
  const __m512i scale = _mm512_load_si512(group.scale), first = class_of(value);
  for (std::size_t i = 0; i < rows.padded * kColumns; i += kPair) {
    const axis::Bins bins = axis::bins_of(scale, _mm512_loadu_si512(coded.offsets + i), k);
    const __m512i octaves = axis::octaves_of(axis::exponents(_mm512_loadu_si512(mu + i), k), bins.linear, k);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(coded.classes + i), axis::class_bytes(octaves, bins.quarter, first));
  }
}

KVSTORE_VNNI_INLINE void add_distances(std::uint64_t* to, __m512i more) {
  _mm512_storeu_si512(to, _mm512_add_epi64(_mm512_loadu_si512(to), more));
}

KVSTORE_VNNI inline void split(const Group& group, bool value, const std::uint16_t* x, const std::uint16_t* mu,
                               RowCount rows, const Coded& coded, predict::BitsOut& raw, std::uint16_t*& escapes) {
  const axis::SplitConstants k;
  const __m512i scale = _mm512_load_si512(group.scale), first = class_of(value);
  predict::BitsOut out = raw;
  for (std::size_t t = 0; t < rows.n; t += 2) {
    const std::size_t i = t * kColumns;
    const axis::Bins bins = axis::bins_of(scale, _mm512_loadu_si512(coded.offsets + i), k);
    const __m512i more = axis::split32(x + i, mu + i, bins, first, live_of(group, t, rows.n), k, coded.symbols + i,
                                       coded.classes + i, out, escapes);
    add_distances(coded.distances + t / 2 * kDistances, more);
  }
  raw = out;
}

KVSTORE_VNNI inline bool join(const Group& group, const std::uint16_t* mu, RowCount rows, const Coded& coded,
                              predict::BitsIn& raw, predict::EscapesIn& escapes, std::uint16_t* x) {
  const axis::JoinConstants k;
  const __m512i scale = _mm512_load_si512(group.scale);
  __mmask32 bad = 0;
  std::size_t at = raw.at;
  for (std::size_t t = 0; t < rows.n; t += 2) {
    const std::size_t i = t * kColumns;
    const axis::Bins bins = axis::bins_of(scale, _mm512_loadu_si512(coded.offsets + i), k);
    const axis::Joined found =
        axis::join32(coded.symbols + i, mu + i, bins, live_of(group, t, rows.n), k, raw.bytes, at, x + i);
    add_distances(coded.distances + t / 2 * kDistances, found.distances);
    bad |= found.bad;
    if (!axis::take_escapes(found.whole, escapes, x + i)) return false;
  }
  raw.at = at;
  return bad == 0;
}

KVSTORE_VNNI inline std::size_t decode(const Group& group, bool value, const std::uint16_t* mu, RowCount rows,
                                       const rans::Steps& stream, const Coded& coded, predict::BitsIn& raw,
                                       predict::EscapesIn& escapes, std::uint16_t* x) {
  if (group.width != kColumns) return 0;
  const axis::Constants k;
  const __m512i scale = _mm512_load_si512(group.scale);
  axis::Decoding decoding(stream, raw, escapes, class_of(value), x);
  std::uint64_t* distances = coded.distances;
  std::size_t t = 0;
  for (; t + 2 <= rows.n && decoding.has(kPair); t += 2) {
    const std::size_t i = t * kColumns;
    const axis::Bins bins = axis::bins_of(scale, _mm512_loadu_si512(coded.offsets + i), k);
    const __m512i before = decoding.step(_mm512_loadu_si512(mu + i), bins);
    if (t == 0) continue;
    add_distances(distances, before);
    distances += kDistances;
  }
  if (t != 0) add_distances(distances, decoding.finish());
  if (!decoding.good()) return 0;
  decoding.leave(stream, raw, escapes);
  return t;
}

KVSTORE_VNNI inline std::uint64_t multiply(std::uint64_t rounds) {
  constexpr int kTotals = 24, kProducts = 64;
  __m512i total[kTotals], in = _mm512_set1_epi8(3), weights = _mm512_set1_epi8(-5);
#pragma GCC unroll 24
  for (int j = 0; j < kTotals; ++j) total[j] = axis::kept(_mm512_setzero_si512());  // not known to be alike
  for (std::uint64_t i = 0; i < rounds; ++i) {
    __asm__ volatile("" : "+v"(in), "+v"(weights));
#pragma GCC unroll 24
    for (int j = 0; j < kTotals; ++j) total[j] = _mm512_dpbusd_epi32(total[j], in, weights);
  }
#pragma GCC unroll 24
  for (int j = 0; j < kTotals; ++j) __asm__ volatile("" : "+v"(total[j]));
  return rounds * kTotals * kProducts;
}

inline constexpr Kernels kKernels = {1,         sums,    group, predict, fixed,  inputs,
                                     residuals, classes, split, join,    decode, multiply};

}  // namespace kvstore::levels::avx512

#include "common/intrinsics_end.h"
#endif

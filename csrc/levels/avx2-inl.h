// AVX2 twins of the loops of the levels; a vector is a row of 16 columns. Included by levels/dispatch.h only.
#pragma once

#if defined(__x86_64__)
#include "common/intrinsics_begin.h"
#include "levels/scalar-inl.h"
#include "predictive/avx2-inl.h"

namespace kvstore::levels::avx2 {

namespace axis = kvstore::predict::avx2;
using Input = std::int16_t;  // inputs and residuals are widened once, where they are made

KVSTORE_AVX2_INLINE __m256i load(const void* from) { return _mm256_loadu_si256(static_cast<const __m256i*>(from)); }
KVSTORE_AVX2_INLINE void store(void* to, __m256i v) { _mm256_storeu_si256(static_cast<__m256i*>(to), v); }

// The upper halves of each 128 bits, and the lower ones, put in order after two vectors were packed to one.
KVSTORE_AVX2_INLINE __m256i in_order(__m256i packed) {
  return _mm256_permute4x64_epi64(packed, _MM_SHUFFLE(3, 1, 2, 0));
}

// ---- sums -----------------------------------------------------------------------------------------------------------

constexpr std::size_t kDeep = 16;           // groups of inputs whose weights stay in the L1 cache
constexpr std::size_t kSlab = 96;           // rows whose sums stay there
constexpr std::size_t kPairs = 2 * kSteps;  // of inputs of a group

// Weights of 16 columns as 16 bits: for every two inputs, for every column, two.
struct alignas(64) Weights {
  __m256i of[kDeep * kPairs][2];
};

// step: bytes from four inputs to the next.
KVSTORE_AVX2_INLINE void widen(const std::int8_t* w, std::size_t step, std::size_t deep, Weights& to) {
  const __m128i low = _mm_setr_epi8(-1, 0, -1, 1, -1, 4, -1, 5, -1, 8, -1, 9, -1, 12, -1, 13);
  const __m256i first = _mm256_broadcastsi128_si256(low);
  const __m256i second = _mm256_or_si256(first, _mm256_set1_epi16(0x0200));
  for (std::size_t k = 0; k < kSteps * deep; ++k, w += step) {
    for (std::size_t half = 0; half < 2; ++half) {
      const __m256i four = _mm256_load_si256(reinterpret_cast<const __m256i*>(w) + half);
      to.of[2 * k][half] = _mm256_srai_epi16(_mm256_shuffle_epi8(four, first), 8);
      to.of[2 * k + 1][half] = _mm256_srai_epi16(_mm256_shuffle_epi8(four, second), 8);
    }
  }
}

// Tiles of inputs, and how many there are.
struct Inputs {
  const Input* tile;
  std::size_t stride, deep;
};

// Lines of weights that are needed next, be they the next part's or nobody's: a few are brought nearer by every tile.
struct Ahead {
  std::uintptr_t line;
  std::size_t step;
};

// Adds the products of ROWS rows to sums.
template <int ROWS>
KVSTORE_AVX2_INLINE void add_rows(const Inputs& inputs, std::size_t row, const Weights& weights, Ahead& ahead,
                                  const std::int32_t* from, std::size_t stride, std::int32_t* to) {
  __m256i total[ROWS][2];
  from += row * stride;
  for (int r = 0; r < ROWS; ++r, from += stride) {
    total[r][0] = load(from);
    total[r][1] = load(from + 8);
  }
  const Input* q = inputs.tile + row * kColumns;
  const __m256i(*w)[2] = weights.of;
  for (std::size_t d = inputs.deep; d != 0; --d, q += inputs.stride, w += kPairs) {
    _mm_prefetch(reinterpret_cast<const char*>(ahead.line), _MM_HINT_T1);
    ahead.line += ahead.step;
#pragma GCC unroll 4
    for (std::size_t k = 0; k < kPairs; ++k) {
      const __m256i one = w[k][0], two = w[k][1];
      for (int r = 0; r < ROWS; ++r) {
        std::int32_t pair;
        std::memcpy(&pair, q + static_cast<std::size_t>(r) * kColumns + 2 * k, sizeof pair);
        const __m256i in = _mm256_set1_epi32(pair);
        // `kept` keeps the order: the compiler would add up trees, for which there are not enough registers.
        total[r][0] = axis::kept(_mm256_add_epi32(total[r][0], _mm256_madd_epi16(in, one)));
        total[r][1] = axis::kept(_mm256_add_epi32(total[r][1], _mm256_madd_epi16(in, two)));
      }
    }
  }
  to += row * kColumns;
  for (int r = 0; r < ROWS; ++r, to += kColumns) {
    store(to, total[r][0]);
    store(to + 8, total[r][1]);
  }
}

// Adds the products of `rows` rows. from: sums `stride` apart, to which they are added.
KVSTORE_AVX2 inline void add_products(const Inputs& inputs, std::size_t rows, const Weights& weights, Ahead ahead,
                                      const std::int32_t* from, std::size_t stride, std::int32_t* to) {
  std::size_t t = 0;
  for (; t + 6 <= rows; t += 6) {
    if (t == 6 * kSteps) ahead.step = 0;  // all lines are on their way
    add_rows<6>(inputs, t, weights, ahead, from, stride, to);
  }
  if (t + 4 <= rows) {
    add_rows<4>(inputs, t, weights, ahead, from, stride, to);
    t += 4;
  }
  if (t + 2 <= rows) {
    add_rows<2>(inputs, t, weights, ahead, from, stride, to);
    t += 2;
  }
  if (t < rows) add_rows<1>(inputs, t, weights, ahead, from, stride, to);
}

KVSTORE_AVX2 inline void sums(const Part& part, const std::int8_t* weight, const Summed* blocks, std::size_t count) {
  const std::size_t columns = part.groups.size();
  Weights weights;
  std::size_t before = 0;  // groups of inputs
  for (std::size_t i = 0; i < part.inputs.size(); ++i) {
    for (std::size_t done = 0, deep; done != part.depths[i]; done += deep, before += deep) {
      const std::size_t left = part.depths[i] - done;
      deep = left < kDeep ? left : kDeep;
      for (std::size_t g = 0; g < columns; ++g) {
        const std::size_t panel = g / kMostPanel * kMostPanel;
        const std::size_t wide = columns - panel < kMostPanel ? columns - panel : kMostPanel;
        const std::size_t line = panel * part.depth * kSteps + before * kSteps * wide + g - panel;
        const std::int8_t* const w = weight + line * predict::kColumnsBytes;
        const std::size_t step = wide * predict::kColumnsBytes;
        widen(w, step, deep, weights);
        Ahead ahead{reinterpret_cast<std::uintptr_t>(w) + part.depth * kSteps * step, step};  // the next panel
        for (const Summed* block = blocks; block != blocks + count; ++block) {
          const std::size_t tile = block->rows.padded * kColumns;
          const Input* const from = reinterpret_cast<const Input*>(block->inputs[i]) + done * tile;
          std::int32_t* const to = block->sums + g * tile;
          add_products({from, tile, deep}, block->rows.n, weights, ahead, before == 0 ? part.groups[g].bias : to,
                       before == 0 ? 0 : kColumns, to);
          ahead.step = 0;
        }
      }
    }
  }
}

KVSTORE_AVX2 inline void group(const Group& group, const std::int8_t* weight, std::size_t number,
                               const std::int32_t* sums, std::size_t stride, const std::uint8_t* residuals,
                               RowCount rows, std::int16_t* p) {
  const __m256i first = load(group.shift), second = load(group.shift + 8);
  const std::size_t tile = rows.padded * kColumns;
  alignas(64) std::int32_t totals[kSlab * kColumns];
  Weights weights;
  for (std::size_t t = 0; t < rows.n; t += kSlab, sums += kSlab * stride) {
    const std::size_t slab = rows.n - t < kSlab ? rows.n - t : kSlab;
    const std::int32_t* from = sums;
    std::size_t apart = stride;
    for (std::size_t g = 0, deep; g < number; g += deep) {
      deep = number - g < kDeep ? number - g : kDeep;
      const std::int8_t* const w = weight + g * kSteps * predict::kColumnsBytes;
      if (t == 0 || number > kDeep) widen(w, predict::kColumnsBytes, deep, weights);
      const Ahead ahead{reinterpret_cast<std::uintptr_t>(w) + deep * kSteps * predict::kColumnsBytes,
                        predict::kColumnsBytes};
      const Input* const q = reinterpret_cast<const Input*>(residuals) + g * tile + t * kColumns;
      add_products({q, tile, deep}, slab, weights, ahead, from, apart, totals);
      from = totals;
      apart = kColumns;
    }
    for (std::size_t r = 0; r < slab; ++r, from += apart, p += kColumns) {
      const __m256i low = _mm256_srav_epi32(load(from), first), high = _mm256_srav_epi32(load(from + 8), second);
      store(p, in_order(_mm256_packs_epi32(low, high)));
    }
  }
}

// ---- between bf16 and fixed point -----------------------------------------------------------------------------------

KVSTORE_AVX2_INLINE __m256 numbers(__m128i x) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(x), 16));
}
KVSTORE_AVX2_INLINE __m256i upper_of(__m256 v) { return _mm256_srli_epi32(_mm256_castps_si256(v), 16); }
KVSTORE_AVX2_INLINE __m256i rounded(__m256 v, __m256 least, __m256 most) {
  return _mm256_cvtps_epi32(_mm256_min_ps(_mm256_max_ps(v, least), most));
}

KVSTORE_AVX2 inline void predict(const Group& group, const std::int16_t* p, const Turns* turns, RowCount rows,
                                 std::uint16_t* mu) {
  const __m256 scale = _mm256_load_ps(group.from_fixed), second = _mm256_load_ps(group.from_fixed + 8);
  for (std::size_t t = 0; t < rows.n; ++t, p += kColumns, mu += kColumns) {
    const __m256i both = load(p);
    if (turns == nullptr) {
      const __m256 one = _mm256_cvtepi32_ps(_mm256_cvtepi16_epi32(_mm256_castsi256_si128(both)));
      const __m256 two = _mm256_cvtepi32_ps(_mm256_cvtepi16_epi32(_mm256_extracti128_si256(both, 1)));
      const __m256i low = upper_of(_mm256_mul_ps(one, scale)), high = upper_of(_mm256_mul_ps(two, second));
      store(mu, in_order(_mm256_packus_epi32(low, high)));
      continue;
    }
    const __m256i a = _mm256_madd_epi16(both, load(turns->forward + t * turns->stride));
    const __m256i b = _mm256_madd_epi16(both, load(turns->across + t * turns->stride));
    const __m256i x = upper_of(_mm256_mul_ps(_mm256_cvtepi32_ps(a), scale));
    const __m256i y = _mm256_castps_si256(_mm256_mul_ps(_mm256_cvtepi32_ps(b), scale));
    store(mu, _mm256_blend_epi16(x, y, 0xaa));
  }
}

KVSTORE_AVX2 inline void fixed(const Group& group, const std::uint16_t* x, const Turns* turns, RowCount rows,
                               std::int16_t* u) {
  const __m256 scale = _mm256_load_ps(group.to_fixed), next = _mm256_load_ps(group.to_fixed + 8);
  const __m256 most = _mm256_set1_ps(turns == nullptr ? 32767.0f : predict::kRange);
  const __m256 least = _mm256_sub_ps(_mm256_setzero_ps(), most);
  const __m256i top = _mm256_set1_epi16(0x7f80), half = _mm256_set1_epi32(1 << 13);
  for (std::size_t t = 0; t < rows.n; ++t, x += kColumns, u += kColumns) {
    const __m256i raw = load(x);
    const __m256i v = _mm256_andnot_si256(_mm256_cmpeq_epi16(_mm256_and_si256(raw, top), top), raw);
    if (turns == nullptr) {
      const __m256 one = numbers(_mm256_castsi256_si128(v)), two = numbers(_mm256_extracti128_si256(v, 1));
      const __m256i low = rounded(_mm256_mul_ps(one, scale), least, most);
      const __m256i high = rounded(_mm256_mul_ps(two, next), least, most);
      store(u, in_order(_mm256_packs_epi32(low, high)));
      continue;
    }
    const __m256 one = _mm256_castsi256_ps(_mm256_slli_epi32(v, 16));
    const __m256 two = _mm256_castsi256_ps(_mm256_blend_epi16(_mm256_setzero_si256(), v, 0xaa));
    const __m256i a = rounded(_mm256_mul_ps(one, scale), least, most);
    const __m256i b = rounded(_mm256_mul_ps(two, scale), least, most);
    // Back: (cos, sin) and (-sin, cos) are the others turned around.
    const __m256i both = _mm256_blend_epi16(b, _mm256_slli_epi32(a, 16), 0xaa);
    const __m256i c = _mm256_madd_epi16(both, load(turns->across + t * turns->stride));
    const __m256i d = _mm256_madd_epi16(both, load(turns->forward + t * turns->stride));
    const __m256i even = _mm256_srli_epi32(_mm256_add_epi32(c, half), 14);
    const __m256i odd = _mm256_slli_epi32(_mm256_add_epi32(d, half), 2);
    store(u, _mm256_blend_epi16(even, odd, 0xaa));
  }
}

// 128 too large, in 16 bits.
KVSTORE_AVX2_INLINE __m256i narrow(__m256i v, __m256i factor) {
  const __m256i found = _mm256_mulhrs_epi16(v, factor);
  const __m256i within = _mm256_min_epi16(_mm256_max_epi16(found, _mm256_set1_epi16(-128)), _mm256_set1_epi16(127));
  return _mm256_add_epi16(within, _mm256_set1_epi16(128));
}

KVSTORE_AVX2 inline void inputs(const Group& group, const std::int16_t* u, RowCount rows, std::uint8_t* inputs) {
  const __m256i gain = load(group.gain);
  for (std::size_t i = 0; i < rows.n * kColumns; i += kColumns)
    store(inputs + i * sizeof(Input), narrow(load(u + i), gain));
}

KVSTORE_AVX2 inline void residuals(const Group& group, const std::int16_t* u, const std::int16_t* p, RowCount rows,
                                   std::uint8_t* residuals) {
  const __m256i factor = load(group.narrow);
  for (std::size_t i = 0; i < rows.n * kColumns; i += kColumns)
    store(residuals + i * sizeof(Input), narrow(_mm256_subs_epi16(load(u + i), load(p + i)), factor));
}

// ---- the axis of bins: whole groups; narrow ones are left to the compiler ----------------------------------------

// Donors' scales may lie far away.
KVSTORE_AVX2_INLINE axis::Bins bins_of(__m256i scale, __m256i offset, const axis::Constants& k) {
  const __m256i s = _mm256_max_epi16(_mm256_add_epi16(scale, offset), _mm256_set1_epi16(-440));
  const __m256i limited = _mm256_min_epi16(s, k.most);
  return {_mm256_add_epi16(_mm256_srai_epi16(limited, 2), k.lift), _mm256_and_si256(limited, k.three)};
}

KVSTORE_AVX2_INLINE __m256i class_of(bool value) { return axis::both(value ? static_cast<int>(predict::kClasses) : 0); }

KVSTORE_AVX2_INLINE void add_distances(const Coded& coded, std::size_t row, __m256i more) {
  std::uint64_t* const to = coded.distances + row / 2 * kDistances + row % 2 * 4;
  store(to, _mm256_add_epi64(load(to), more));
}

KVSTORE_AVX2 inline void classes(const Group& group, bool value, const std::uint16_t* mu, RowCount rows,
                                 const Coded& coded) {
  const axis::Constants k;
  const __m256i scale = load(group.scale), first = class_of(value);
  for (std::size_t i = 0; i < rows.n * kColumns; i += kColumns) {
    const axis::Bins bins = bins_of(scale, load(coded.offsets + i), k);
    const __m256i above = _mm256_subs_epu8(axis::exponents(load(mu + i), k), bins.linear);
    axis::store_bytes(coded.classes + i, axis::class_words(_mm256_min_epi16(above, k.eight), bins.quarter, first));
  }
}

KVSTORE_AVX2 inline void split(const Group& group, bool value, const std::uint16_t* x, const std::uint16_t* mu,
                               RowCount rows, const Coded& coded, predict::BitsOut& raw, std::uint16_t*& escapes) {
  if (group.width != kColumns) return split_body(group, value, x, mu, rows, coded, raw, escapes);
  const axis::SplitConstants k;
  const __m256i scale = load(group.scale), first = class_of(value);
  predict::BitsOut out = raw;
  std::uint16_t* whole = escapes;
  for (std::size_t t = 0; t < rows.n; ++t) {
    const std::size_t i = t * kColumns;
    const axis::Bins bins = bins_of(scale, load(coded.offsets + i), k);
    const __m256i more =
        axis::split16(x + i, mu + i, bins, first, k, coded.symbols + i, coded.classes + i, out, whole);
    add_distances(coded, t, more);
  }
  raw = out;
  escapes = whole;
}

KVSTORE_AVX2 inline bool join(const Group& group, const std::uint16_t* mu, RowCount rows, const Coded& coded,
                              predict::BitsIn& raw, predict::EscapesIn& escapes, std::uint16_t* x) {
  if (group.width != kColumns) return join_body(group, mu, rows, coded, raw, escapes, x);
  constexpr std::size_t kStrip = axis::kJoined / kColumns;  // rows
  const axis::JoinConstants k;
  const __m256i scale = load(group.scale);
  __m256i bad = k.zero;
  axis::Found found;
  std::size_t at = raw.at;
  for (std::size_t begin = 0; begin < rows.n; begin += kStrip) {
    const std::size_t end = rows.n - begin < kStrip ? rows.n : begin + kStrip;
    for (std::size_t t = begin; t < end; ++t) {
      const std::size_t i = t * kColumns;
      const axis::Bins bins = bins_of(scale, load(coded.offsets + i), k);
      add_distances(coded, t, axis::find16(coded.symbols + i, mu + i, bins, k, found, (t - begin) * kColumns));
    }
    for (std::size_t t = begin; t < end; ++t) {
      const std::size_t i = t * kColumns;
      const axis::Joined made =
          axis::join16(coded.symbols + i, found, (t - begin) * kColumns, k, raw.bytes, at, x + i);
      bad = _mm256_or_si256(bad, made.bad);
      for (unsigned left = axis::set_of(made.whole); left != 0; left &= left - 1) {
        if (escapes.at == escapes.end) return false;
        x[i + axis::first_of(left)] = static_cast<std::uint16_t>(load16(escapes.at));
        escapes.at += 2;
      }
    }
  }
  raw.at = at;
  return _mm256_testz_si256(bad, bad) != 0;
}

KVSTORE_AVX2 inline std::uint64_t multiply(std::uint64_t rounds) {
  constexpr int kTotals = 12, kProducts = 16;
  __m256i total[kTotals], in = _mm256_set1_epi16(3), weights = _mm256_set1_epi16(-5);
#pragma GCC unroll 12
  for (int j = 0; j < kTotals; ++j) total[j] = axis::kept(_mm256_setzero_si256());
  for (std::uint64_t i = 0; i < rounds; ++i) {
#pragma GCC unroll 12
    for (int j = 0; j < kTotals; ++j) {
      total[j] = _mm256_add_epi32(total[j], _mm256_madd_epi16(in, weights));
      // Neither is known to be what it was: no product is used again.
      __asm__ volatile("" : "+x"(total[j]), "+x"(weights));
    }
  }
#pragma GCC unroll 12
  for (int j = 0; j < kTotals; ++j) __asm__ volatile("" : "+x"(total[j]));
  return rounds * kTotals * kProducts;
}

inline constexpr Kernels kKernels = {sizeof(Input), sums,    group, predict, fixed,   inputs,
                                     residuals,     classes, split, join,    nullptr, multiply};

}  // namespace kvstore::levels::avx2

#include "common/intrinsics_end.h"
#endif

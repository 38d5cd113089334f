// AVX-512 twins of the predictive codec's loops; the sums need VNNI besides. Included by predictive/dispatch.h only.
#pragma once

#if defined(__x86_64__)
#include "common/intrinsics_begin.h"
#include "predictive/bins/avx512-inl.h"
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

// ---- the axis of bins -----------------------------------------------------------------------------------------------

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

// The rows that were joined, while there are words for a whole one; 0: damage.
KVSTORE_VNNI_INLINE std::size_t decode_rows(const Predicted& predicted, std::size_t count, Decoding& decoding,
                                            std::size_t most, std::uint32_t* distances) {
  const std::size_t width = predicted.part.width;
  const std::int16_t* const scale = predicted.part.scale.data();
  const std::uint16_t* mu = predicted.mu;
  const Constants k;
  __m512i total = _mm512_setzero_si512();
  std::size_t t = 0;
  for (; t < count && decoding.has(width); ++t, mu += width) {
    const __m512i row = both(predicted.offsets[t]);
    for (std::size_t j = 0; j < width; j += 32) {
      const Bins bins = bins_of(_mm512_loadu_si512(scale + j), row, k);
      total = _mm512_add_epi64(total, decoding.step(_mm512_loadu_si512(mu + j), bins));
      if (j != 0 || t == 0) continue;
      distances[t - 1] = static_cast<std::uint32_t>(_mm512_reduce_add_epi64(total));
      total = _mm512_setzero_si512();
      if (decoding.position() > most) return 0;
    }
  }
  if (t == 0) return 0;
  distances[t - 1] = static_cast<std::uint32_t>(_mm512_reduce_add_epi64(_mm512_add_epi64(total, decoding.finish())));
  return decoding.good() && decoding.position() <= most ? t : 0;
}

KVSTORE_VNNI inline std::size_t decode(const Predicted& predicted, std::size_t count, const rans::Steps& stream,
                                       BitsIn& raw, std::size_t most, EscapesIn& escapes, std::uint16_t* x,
                                       std::uint32_t* distances) {
  if (predicted.part.width % 32 != 0) return 0;  // rows would not begin with the first lane
  Decoding decoding(stream, raw, escapes, both(predicted.part.value ? static_cast<int>(kClasses) : 0), x);
  const std::size_t done = decode_rows(predicted, count, decoding, most, distances);
  if (done != 0) decoding.leave(stream, raw, escapes);
  return done;
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

inline constexpr Kernels kKernels = {1, sums, predict, classes, split, join, decode, inputs, check};

}  // namespace kvstore::predict::avx512

#include "common/intrinsics_end.h"
#endif

// The inner loops of the entropy codec, written for the compiler to vectorise: one body, of which entropy/dispatch.h
// makes the twin of every CPU level.
#pragma once

#include <cstring>

#include "common/simd.h"
#include "common/words.h"
#include "entropy/kernels.h"

namespace kvstore::entropy {

inline constexpr std::size_t kMostSamples = 64;

// The costs of a symbol in all classes: added up as one, which no compiler finds by itself.
typedef std::uint16_t Costs __attribute__((vector_size(2 * kClasses)));

inline constexpr std::size_t kStrip = 64;  // channels at a time: their sums stay in registers

KVSTORE_INLINE void count_strip(const std::uint16_t* values, std::size_t tokens, std::size_t dim, std::size_t width,
                                std::uint32_t* exponents, std::uint32_t* signs) {
  std::uint16_t e[kStrip] = {}, s[kStrip] = {};
  for (std::size_t t = 0; t < tokens; ++t, values += dim) {
    for (std::size_t i = 0; i < width; ++i) {
      e[i] = static_cast<std::uint16_t>(e[i] + (values[i] >> 7 & 0xFF));
      s[i] = static_cast<std::uint16_t>(s[i] + (values[i] >> 15));
    }
  }
  for (std::size_t i = 0; i < width; ++i) {
    exponents[i] += e[i];
    signs[i] += s[i];
  }
}

KVSTORE_INLINE void count_body(const std::uint16_t* values, std::size_t tokens, std::size_t dim,
                               std::uint32_t* exponents, std::uint32_t* signs) {
  constexpr std::size_t kMost = 256;  // so many exponents add up to less than 2^16
  for (std::size_t c = 0; c < dim; ++c) exponents[c] = signs[c] = 0;
  for (std::size_t first = 0; first < tokens; first += kMost, values += kMost * dim) {
    const std::size_t rows = tokens - first < kMost ? tokens - first : kMost;
    std::size_t c = 0;
    for (; c + kStrip <= dim; c += kStrip) count_strip(values + c, rows, dim, kStrip, exponents + c, signs + c);
    if (c < dim) count_strip(values + c, rows, dim, dim - c, exponents + c, signs + c);
  }
}

KVSTORE_INLINE void symbols_body(const std::uint16_t* values, std::size_t tokens, std::size_t dim,
                                 const Channels& channels, std::uint8_t* out) {
  const std::uint16_t* base = channels.base;
  const std::uint16_t* flip = channels.flip;
  for (std::size_t t = 0; t < tokens; ++t, values += dim, out += dim) {
    for (std::size_t c = 0; c < dim; ++c) {
      const std::uint16_t v = values[c];
      const auto e = static_cast<std::uint16_t>(v >> 7 & 0xFF);
      const auto relative = static_cast<std::uint16_t>(base[c] - e);
      const auto sign = static_cast<std::uint16_t>((v >> 15) ^ flip[c]);
      const auto symbol = static_cast<std::uint16_t>(sign * (4 * kRelative) + relative * 4 + (v >> 5 & 3));
      const bool outside = relative >= kRelative || e == 0;
      out[c] = static_cast<std::uint8_t>(outside ? kEscape : symbol);
    }
  }
}

// The cheapest class of kChannels neighbouring channels, whose loads overlap.
template <std::size_t kChannels>
KVSTORE_INLINE void choose_some(const std::uint8_t* symbols, const std::uint8_t* end, std::size_t step,
                                const std::uint16_t* costs, std::uint8_t* chosen) {
  Costs total[kChannels] = {};
  for (; symbols < end; symbols += step) {
    for (std::size_t c = 0; c < kChannels; ++c) {
      Costs cost;
      std::memcpy(&cost, costs + symbols[c] * kClasses, sizeof cost);
      total[c] += cost;
    }
  }
  for (std::size_t c = 0; c < kChannels; ++c) {
    std::uint16_t sums[kClasses];
    std::memcpy(sums, &total[c], sizeof sums);
    // Smallest first, then where it is: of equals the first.
    std::uint16_t least = sums[0];
    for (std::size_t k = 1; k < kClasses; ++k) least = sums[k] < least ? sums[k] : least;
    unsigned same = 0;
    for (std::size_t k = 0; k < kClasses; ++k) same |= static_cast<unsigned>(sums[k] == least) << k;
    chosen[c] = static_cast<std::uint8_t>(__builtin_ctz(same));
  }
}

KVSTORE_INLINE void choose_body(const std::uint8_t* symbols, std::size_t tokens, std::size_t dim,
                                const std::uint16_t* costs, std::uint8_t* chosen) {
  const std::size_t step = (tokens + kMostSamples - 1) / kMostSamples * dim;
  const std::uint8_t* const end = symbols + tokens * dim;
  std::size_t c = 0;
  for (; c + 4 <= dim; c += 4) choose_some<4>(symbols + c, end, step, costs, chosen + c);
  for (; c < dim; ++c) choose_some<1>(symbols + c, end, step, costs, chosen + c);
}

KVSTORE_INLINE std::size_t restrict_body(std::uint8_t* symbols, std::size_t tokens, std::size_t dim,
                                         const Ranges& known) {
  const std::uint8_t *begin0 = known.begin[0], *begin1 = known.begin[1];
  const std::uint8_t *width0 = known.width[0], *width1 = known.width[1];
  std::size_t escapes = 0;
  for (std::size_t t = 0; t < tokens; ++t, symbols += dim) {
    for (std::size_t c = 0; c < dim; ++c) {
      const std::uint8_t symbol = symbols[c];
      const bool is0 = static_cast<std::uint8_t>(symbol - begin0[c]) <= width0[c];
      const bool is1 = static_cast<std::uint8_t>(symbol - begin1[c]) <= width1[c];
      symbols[c] = is0 | is1 ? symbol : static_cast<std::uint8_t>(kEscape);
    }
    std::uint8_t found = 0;  // of rows of up to 255 channels; wider ones are counted in parts
    for (std::size_t c = 0; c < dim; c += 255, found = 0) {
      const std::size_t width = dim - c < 255 ? dim - c : 255;
      for (std::size_t i = 0; i < width; ++i) found = static_cast<std::uint8_t>(found + (symbols[c + i] == kEscape));
      escapes += found;
    }
  }
  return escapes;
}

// The 5 lowest bits: two halves of the run share bytes of 4 bits, eight eighths share bytes of 1 bit.
KVSTORE_INLINE void low_body(const std::uint16_t* values, std::size_t count, std::uint8_t* out) {
  const std::size_t half = (count + 1) / 2, eighth = (count + 7) / 8, second = count - half;
  for (std::size_t i = 0; i < second; ++i)
    out[i] = static_cast<std::uint8_t>((values[i] & 15u) | (values[half + i] & 15u) << 4);
  for (std::size_t i = second; i < half; ++i) out[i] = static_cast<std::uint8_t>(values[i] & 15u);
  out += half;
  std::memset(out, 0, eighth);
  for (unsigned bit = 0; bit < 8 && bit * eighth < count; ++bit) {
    const std::uint16_t* from = values + bit * eighth;
    const std::size_t here = count - bit * eighth < eighth ? count - bit * eighth : eighth;
    for (std::size_t i = 0; i < here; ++i)
      out[i] = static_cast<std::uint8_t>(out[i] | (from[i] >> 4 & 1u) << bit);
  }
}

// The inverse.
KVSTORE_INLINE void spread_body(const std::uint8_t* low, std::size_t count, std::uint16_t* values) {
  const std::size_t half = (count + 1) / 2, eighth = (count + 7) / 8;
  for (std::size_t i = 0; i < half; ++i) values[i] = low[i] & 15u;
  for (std::size_t i = half; i < count; ++i) values[i] = static_cast<std::uint16_t>(low[i - half] >> 4);
  low += half;
  for (unsigned bit = 0; bit < 8 && bit * eighth < count; ++bit) {
    std::uint16_t* to = values + bit * eighth;
    const std::size_t here = count - bit * eighth < eighth ? count - bit * eighth : eighth;
    for (std::size_t i = 0; i < here; ++i)
      to[i] = static_cast<std::uint16_t>(to[i] | (low[i] >> bit & 1u) << 4);
  }
}

// A row of words, made byte by byte. nibbles: in the lower or the UPPER half; bits: where `bit` is set.
template <bool UPPER>
KVSTORE_INLINE void join_row(const std::uint8_t* symbols, const std::uint8_t* nibbles, const std::uint8_t* bits,
                             std::uint8_t bit, std::size_t dim, const Channels& channels,
                             std::uint16_t* __restrict values) {
  const std::uint16_t* base = channels.base;
  const std::uint16_t* flip = channels.flip;
  for (std::size_t c = 0; c < dim; ++c) {
    const std::uint8_t symbol = symbols[c], negative = symbol >= 4 * kRelative ? 0x80 : 0;
    const auto rest = static_cast<std::uint8_t>(symbol - (negative ? 4 * kRelative : 0));
    const auto exponent = static_cast<std::uint8_t>(static_cast<std::uint8_t>(base[c]) - (rest >> 2));
    const auto four = static_cast<std::uint8_t>(UPPER ? nibbles[c] >> 4 : nibbles[c] & 15);
    const auto five = static_cast<std::uint8_t>(four | (bits[c] & bit ? 16 : 0));
    const auto low = static_cast<std::uint8_t>(static_cast<std::uint8_t>(exponent << 7) | (rest & 3) << 5 | five);
    const std::uint8_t other = static_cast<std::uint8_t>(flip[c]) ? 0x80 : 0;
    const auto high = static_cast<std::uint8_t>((negative ^ other) | exponent >> 1);
    values[c] = static_cast<std::uint16_t>(low | high << 8);
  }
}

// Rows that do not cross the planes: `tokens` is a multiple of 8.
KVSTORE_INLINE void join_rows(const std::uint8_t* symbols, const std::uint8_t* low, std::size_t tokens,
                              std::size_t dim, const Channels& channels, std::uint16_t* values) {
  const std::size_t half = tokens / 2, eighth = tokens / 8;
  const std::uint8_t* const bits = low + half * dim;
  for (std::size_t t = 0; t < tokens; ++t, symbols += dim, values += dim) {
    const auto bit = static_cast<std::uint8_t>(1u << t / eighth);
    const std::uint8_t* const plane = bits + t % eighth * dim;
    if (t < half)
      join_row<false>(symbols, low + t * dim, plane, bit, dim, channels, values);
    else
      join_row<true>(symbols, low + (t - half) * dim, plane, bit, dim, channels, values);
  }
}

KVSTORE_INLINE void join_body(const std::uint8_t* symbols, const std::uint8_t* low, std::size_t tokens, std::size_t dim,
                              const Channels& channels, std::uint16_t* values) {
  if (low != nullptr && tokens % 8 == 0) return join_rows(symbols, low, tokens, dim, channels, values);
  if (low != nullptr)
    spread_body(low, tokens * dim, values);
  else
    std::memset(values, 0, 2 * tokens * dim);
  const std::uint16_t* base = channels.base;
  const std::uint16_t* flip = channels.flip;
  for (std::size_t t = 0; t < tokens; ++t, values += dim, symbols += dim) {
    for (std::size_t c = 0; c < dim; ++c) {
      const std::uint16_t symbol = symbols[c];
      const std::uint16_t sign = symbol >= 4 * kRelative ? 1 : 0;
      const auto rest = static_cast<std::uint16_t>(symbol - sign * (4 * kRelative));
      const auto exponent = static_cast<std::uint16_t>((base[c] - (rest >> 2)) & 0xFF);
      values[c] = static_cast<std::uint16_t>(values[c] | (sign ^ flip[c]) << 15 | exponent << 7 | (rest & 3u) << 5);
    }
  }
}

// ---- between values and words of every dtype but bf16, whose values are words ---------------------------------------

KVSTORE_INLINE void words_body(Dtype dtype, const std::uint8_t* values, std::size_t count, std::uint16_t* words) {
  switch (dtype) {
    case Dtype::float32: words::make_upper(values, count, words); break;
    case Dtype::float16: words::Half::make(values, count, words); break;
    case Dtype::float8_e5m2: words::E5M2::make(values, count, words); break;
    case Dtype::float8_e4m3fn: words::E4M3::make(values, count, words); break;
    case Dtype::bfloat16: break;
  }
}

// Of fp32 `lower` bytes of the lower half from its top, of fp16 the lower byte, of E4M3 the lowest bit: eight eighths
// of the run share bytes.
KVSTORE_INLINE void keep_body(Dtype dtype, std::size_t lower, const std::uint8_t* values, std::size_t count,
                              std::uint8_t* kept) {
  if (dtype == Dtype::float32) {
    words::keep_lower(values, lower, count, kept);
  } else if (dtype == Dtype::float16) {
    for (std::size_t i = 0; i < count; ++i) kept[i] = static_cast<std::uint8_t>(words::at<std::uint16_t>(values, i));
  } else if (dtype == Dtype::float8_e4m3fn) {
    const std::size_t eighth = (count + 7) / 8;
    std::memset(kept, 0, eighth);
    for (unsigned bit = 0; bit < 8 && bit * eighth < count; ++bit) {
      const std::uint8_t* from = values + bit * eighth;
      const std::size_t here = count - bit * eighth < eighth ? count - bit * eighth : eighth;
      for (std::size_t i = 0; i < here; ++i) kept[i] = static_cast<std::uint8_t>(kept[i] | (from[i] & 1u) << bit);
    }
  }
}

KVSTORE_INLINE void merge_body(Dtype dtype, std::size_t lower, const std::uint16_t* words, const std::uint8_t* kept,
                               std::size_t count, std::uint8_t* values) {
  switch (dtype) {
    case Dtype::float32: words::merge_lower(words, kept, lower, count, values); break;
    case Dtype::float16:
      words::Half::merge(words, count, values, [&](std::size_t i) { return kept[i] + 0u; });
      break;
    case Dtype::float8_e5m2:
      words::E5M2::merge(words, count, values, [](std::size_t) { return 0u; });
      break;
    case Dtype::float8_e4m3fn: {
      const std::size_t eighth = (count + 7) / 8;
      for (unsigned bit = 0; bit < 8 && bit * eighth < count; ++bit) {
        const std::size_t first = bit * eighth, here = count - first < eighth ? count - first : eighth;
        words::E4M3::merge(words + first, here, values + first, [&](std::size_t i) { return kept[i] >> bit & 1u; });
      }
      break;
    }
    case Dtype::bfloat16: break;
  }
}

}  // namespace kvstore::entropy

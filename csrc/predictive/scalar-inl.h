// The inner loops of the predictive codec in plain C++: the scalar twin, and of some loops the AVX2 twin too, from one
// body that the compiler vectorises. Included by predictive/dispatch.h only.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>

#include "common/floats.h"
#include "predictive/kernels.h"

namespace kvstore::predict {

constexpr float kRange = 23170.0f;  // 32767 / sqrt(2): what a rotation leaves within 16 bits
constexpr std::size_t kStrip = 64;  // columns at a time

KVSTORE_INLINE int rounded(float v, float most) {
  const float low = v < -most ? -most : v;
  return static_cast<int>(__builtin_rintf(low > most ? most : low));
}

// ---- prediction -----------------------------------------------------------------------------------------------------

inline void sums_scalar(const Part& part, const std::int8_t* weight, const Inputs& inputs, std::size_t n,
                       std::int32_t* sums) {
  for (std::size_t t = 0; t < n; ++t, sums += part.padded) {
    const std::int8_t* w = weight;
    for (std::size_t panel = 0; panel < part.padded; panel += kPanel) {
      const std::size_t wide = part.padded - panel < kPanel ? part.padded - panel : kPanel;
      std::uint32_t total[kPanel];  // sums wrap around on their way; the last one is in range
      for (std::size_t j = 0; j < wide; ++j) total[j] = static_cast<std::uint32_t>(part.bias[panel + j]);
      for (std::size_t i = 0; i < part.inputs.size(); ++i) {
        const std::uint8_t* q = inputs.rows[i] + t * inputs.stride[i];
        for (std::size_t group = 0; group < part.groups[i]; ++group, q += kGroup, w += wide * kGroup) {
          for (std::size_t j = 0; j < wide; ++j) {
            const std::int8_t* four = w + j * kGroup;
            // A product fits 16 bits, which more of are multiplied at once.
            const auto p0 = static_cast<std::int16_t>(q[0] * four[0]), p1 = static_cast<std::int16_t>(q[1] * four[1]);
            const auto p2 = static_cast<std::int16_t>(q[2] * four[2]), p3 = static_cast<std::int16_t>(q[3] * four[3]);
            total[j] += static_cast<std::uint32_t>(p0 + p1 + p2 + p3);
          }
        }
      }
      for (std::size_t j = 0; j < wide; ++j) sums[panel + j] = static_cast<std::int32_t>(total[j]);
    }
  }
}

KVSTORE_INLINE void predict_body(const Part& part, const std::int32_t* sums, const Angles& angles,
                                 std::uint16_t* __restrict mu) {
  const float* out = part.out_scale.data();
  const std::size_t width = part.width;  // bytes that are written might else be those of the width
  if (!part.rotated) {
    for (std::size_t j = 0; j < width; ++j) mu[j] = upper(static_cast<float>(sums[j]) * out[j]);
    return;
  }
  const std::size_t half = angles.half;
  const float* from = part.from_fixed.data();
  const std::int32_t *cos = angles.cos, *sin = angles.sin;
  for (std::size_t head = 0; head < part.heads; ++head) {
    for (std::size_t j = 0; j < half; ++j) {
      const int a = rounded(static_cast<float>(sums[j]) * out[j], kRange);
      const int b = rounded(static_cast<float>(sums[half + j]) * out[half + j], kRange);
      mu[j] = upper(static_cast<float>(a * cos[j] - b * sin[j]) * from[j]);
      mu[half + j] = upper(static_cast<float>(b * cos[j] + a * sin[j]) * from[j]);
    }
    sums += 2 * half;
    mu += 2 * half;
    out += 2 * half;
    from += 2 * half;
  }
}

// A value counts as 0 if it is not finite.
KVSTORE_INLINE float number(std::uint16_t x) {
  const std::uint32_t bits = (x & 0x7f80) == 0x7f80 ? 0 : static_cast<std::uint32_t>(x) << 16;
  return as_float(bits);
}

template <class Input>
KVSTORE_INLINE void inputs_body(const Part& part, const std::uint16_t* x, const Angles& angles, std::uint8_t* bytes) {
  Input* __restrict q = reinterpret_cast<Input*>(bytes);
  const std::size_t width = part.width;
  const float* in = part.in_scale.data();
  if (!part.rotated) {
    for (std::size_t j = 0; j < width; ++j)
      q[j] = static_cast<Input>(rounded(number(x[j]) * in[j], 127.0f) + 128);
    return;
  }
  const std::size_t half = angles.half;
  const float* to = part.to_fixed.data();
  const std::int32_t *cos = angles.cos, *sin = angles.sin;
  for (std::size_t head = 0; head < part.heads; ++head) {
    for (std::size_t j = 0; j < half; ++j) {
      const int a = rounded(number(x[j]) * to[j], kRange), b = rounded(number(x[half + j]) * to[j], kRange);
      const auto c = static_cast<float>(a * cos[j] + b * sin[j]);
      const auto d = static_cast<float>(b * cos[j] - a * sin[j]);
      q[j] = static_cast<Input>(rounded(c * in[j], 127.0f) + 128);
      q[half + j] = static_cast<Input>(rounded(d * in[half + j], 127.0f) + 128);
    }
    x += 2 * half;
    q += 2 * half;
    in += 2 * half;
    to += 2 * half;
  }
}

// ---- the axis of bins -----------------------------------------------------------------------------------------------

// Scale of a value's bins: quarter octaves to the exponent from which on a bin is one bf16 value.
KVSTORE_INLINE int scale_of(int scale, int offset) { return clamped(scale + offset, -440, 440); }
KVSTORE_INLINE int linear_of(int scale) { return clamped((scale >> 2) + 131, 8, 254); }

KVSTORE_INLINE int exponent_of(int bits) { return bits >> 7 & 255; }

// The bin of bf16 bits without sign.
KVSTORE_INLINE int index_of(int bits, int linear) {
  const int shift = clamped(linear - exponent_of(bits), 0, 8);  // 128..255 have 8 bits
  const int below = (128 | (bits & 127)) >> shift;
  return exponent_of(bits) >= linear ? 128 + (bits & 0x7fff) - (linear << 7) : below;
}
KVSTORE_INLINE int signed_index(int bits, int linear) { return index_of(bits, linear) ^ -(bits >> 15); }

KVSTORE_INLINE int octaves_of(int mu, int linear) { return clamped(exponent_of(mu) - linear, 0, 8); }

KVSTORE_INLINE int distance_of(int d, int octaves, int quarter) {
  const int ratio = 0x262d3640 >> 8 * quarter & 255;  // 64 * 2^(-quarter / 4)
  const int size = (clamped(d < 0 ? -d : d, 0, kOffset) << octaves) * ratio >> 6;
  return size < 255 ? size : 255;
}

KVSTORE_INLINE void classes_row(const std::int16_t* scale, std::size_t width, bool value, const std::uint16_t* mu,
                                int offset, std::uint8_t* __restrict classes) {
  const int first = value ? static_cast<int>(kClasses) : 0;
  for (std::size_t j = 0; j < width; ++j) {
    const int s = scale_of(scale[j], offset);
    classes[j] = static_cast<std::uint8_t>(first + 4 * octaves_of(mu[j], linear_of(s)) + (s & 3));
  }
}
KVSTORE_INLINE void classes_body(const Part& part, const std::uint16_t* mu, int offset, std::uint8_t* classes) {
  classes_row(part.scale.data(), part.width, part.value, mu, offset, classes);
}

KVSTORE_INLINE std::uint32_t split_row(const std::int16_t* scale, std::size_t all, bool of_v, const std::uint16_t* x,
                                       const std::uint16_t* mu, int offset, std::uint8_t* __restrict symbols,
                                       std::uint8_t* __restrict classes, BitsOut& raw, std::uint16_t*& escapes) {
  const int first = of_v ? static_cast<int>(kClasses) : 0;
  std::uint32_t distances = 0;
  std::uint16_t bits[kStrip], counts[kStrip], whole[kStrip];
  for (std::size_t begin = 0; begin < all; begin += kStrip) {
    const std::size_t width = all - begin < kStrip ? all - begin : kStrip;
    std::uint16_t any = 0;
    for (std::size_t j = 0; j < width; ++j) {
      const int s = scale_of(scale[begin + j], offset), linear = linear_of(s), quarter = s & 3;
      const int v = x[begin + j], m = mu[begin + j], octaves = octaves_of(m, linear);
      const int d = signed_index(v, linear) - signed_index(m, linear);
      const bool far = (d < -kOffset) | (d >= kOffset);
      const int symbol = d + kOffset, distance = distance_of(d, octaves, quarter);
      symbols[begin + j] = static_cast<std::uint8_t>(far ? kEscape : symbol);
      classes[begin + j] = static_cast<std::uint8_t>(first + 4 * octaves + quarter);
      distances += static_cast<std::uint32_t>(far ? 255 : distance);
      const int e = exponent_of(v), shift = linear - e, gap = shift - 8, mantissa = v & 127;
      const bool deep = shift > 7, near = (e > 0) & (gap < 7);  // a subnormal value is always deep: linear >= 8
      const int few = clamped(shift, 0, 7), low = mantissa & ((1 << few) - 1), all = gap | mantissa << 3;
      const int value = near ? all : 7, bits_here = deep ? value : low, count = deep ? kMostRaw : few;
      bits[j] = static_cast<std::uint16_t>(far ? 0 : bits_here);
      counts[j] = static_cast<std::uint16_t>(far ? 0 : count);
      whole[j] = static_cast<std::uint16_t>(far | (deep & !near));
      any = static_cast<std::uint16_t>(any | whole[j]);
    }
    std::size_t j = 0;
    for (; j + 4 <= width; j += 4) {
      const unsigned two = counts[j] + counts[j + 1], three = two + counts[j + 2];
      const std::uint64_t four = bits[j] | std::uint64_t{bits[j + 1]} << counts[j] |
                                 std::uint64_t{bits[j + 2]} << two | std::uint64_t{bits[j + 3]} << three;
      raw.put(four, three + counts[j + 3]);
    }
    for (; j < width; ++j) raw.put(bits[j], counts[j]);
    for (std::size_t i = 0; any != 0 && i < width; ++i) {
      *escapes = x[begin + i];
      escapes += whole[i];
    }
  }
  return distances;
}
KVSTORE_INLINE std::uint32_t split_body(const Part& part, const std::uint16_t* x, const std::uint16_t* mu, int offset,
                                        std::uint8_t* symbols, std::uint8_t* classes, BitsOut& raw,
                                        std::uint16_t*& escapes) {
  return split_row(part.scale.data(), part.width, part.value, x, mu, offset, symbols, classes, raw, escapes);
}

// Raw bits of the bins 0..127; none from there on.
struct RawCounts {
  std::uint8_t of[256];
};
constexpr RawCounts make_raw_counts() {
  RawCounts made{};
  for (unsigned index = 0; index < 128; ++index) {
    int count = index == 0 ? kMostRaw : 7;
    for (unsigned i = index; i > 1; i >>= 1) --count;
    made.of[index] = static_cast<std::uint8_t>(count);
  }
  return made;
}
inline constexpr RawCounts kRawCounts = make_raw_counts();

KVSTORE_INLINE bool take_escapes(const std::uint16_t* whole, std::size_t width, EscapesIn& escapes, std::uint16_t* x) {
  for (std::size_t j = 0; j < width; ++j) {
    if (!whole[j]) continue;
    if (escapes.at == escapes.end) return false;
    x[j] = static_cast<std::uint16_t>(load16(escapes.at));
    escapes.at += 2;
  }
  return true;
}

KVSTORE_INLINE bool join_row(const std::int16_t* scale, std::size_t all, const std::uint8_t* symbols,
                             const std::uint16_t* mu, int offset, BitsIn& raw, EscapesIn& escapes,
                             std::uint16_t* __restrict x, std::uint32_t* distances) {
  std::uint32_t total = 0;
  std::int32_t bad = 0;
  std::uint16_t indices[kStrip], negative[kStrip], linears[kStrip], bits[kStrip], counts[kStrip], whole[kStrip];
  for (std::size_t begin = 0; begin < all; begin += kStrip) {
    const std::size_t width = all - begin < kStrip ? all - begin : kStrip;
    for (std::size_t j = 0; j < width; ++j) {
      const int s = scale_of(scale[begin + j], offset), linear = linear_of(s);
      const int m = mu[begin + j], symbol = symbols[begin + j], d = symbol - kOffset;
      const bool far = symbol == kEscape;
      const int i = signed_index(m, linear) + d, sign = i >> 31, index = i ^ sign;
      indices[j] = static_cast<std::uint16_t>(far ? 255 : index);
      negative[j] = static_cast<std::uint16_t>(sign & 0x8000);
      linears[j] = static_cast<std::uint16_t>(linear);
      whole[j] = far;
      const int distance = distance_of(d, octaves_of(m, linear), s & 3);
      total += static_cast<std::uint32_t>(far ? 255 : distance);
    }
    for (std::size_t j = 0; j < width; ++j) {
      const unsigned count = kRawCounts.of[indices[j] < 255 ? indices[j] : 255];
      bits[j] = static_cast<std::uint16_t>((load32(raw.bytes + (raw.at >> 3)) >> (raw.at & 7)) & ((1u << count) - 1));
      counts[j] = static_cast<std::uint16_t>(count);
      raw.at += count;
    }
    unsigned any = 0;
    for (std::size_t j = 0; j < width; ++j) {
      const int index = indices[j], linear = linears[j], few = counts[j] < 8 ? counts[j] : 0, gap = bits[j] & 7;
      const int above = index - 128 + (linear << 7);
      const int below = (linear - few) << 7 | ((index << few) & 127) | bits[j];
      const int deep = (linear - 8 - gap) * 128 + (bits[j] >> 3);
      const int magnitude = index >= 128 ? above : index > 0 ? below : deep;
      const bool escaped = whole[j] | (index == 0 && gap == 7);
      const bool wrong = (magnitude > 0x7fff) | (magnitude < 128);
      bad |= escaped ? 0 : wrong;
      whole[j] = escaped;
      any |= escaped;
      x[begin + j] = static_cast<std::uint16_t>(magnitude | negative[j]);
    }
    if (any && !take_escapes(whole, width, escapes, x + begin)) return false;
  }
  *distances = total;
  return bad == 0;
}
KVSTORE_INLINE bool join_body(const Part& part, const std::uint8_t* symbols, const std::uint16_t* mu, int offset,
                              BitsIn& raw, EscapesIn& escapes, std::uint16_t* x, std::uint32_t* distances) {
  return join_row(part.scale.data(), part.width, symbols, mu, offset, raw, escapes, x, distances);
}

KVSTORE_INLINE void check_body(const std::uint16_t* x, std::size_t count, std::uint32_t* a, std::uint32_t* b) {
  std::uint32_t sum = 0, weighted = 0;
  for (std::size_t i = 0; i < count; ++i) {
    sum += x[i];
    weighted += static_cast<std::uint32_t>(i + 1) * x[i];
  }
  *a = sum;
  *b = weighted;
}

#define KVSTORE_PREDICT_TWIN(NAME, TARGET, INPUT, SUMS)                                                                \
  namespace NAME {                                                                                                     \
  TARGET inline void predict(const Part& p, const std::int32_t* s, const Angles& a, std::uint16_t* mu) {               \
    predict_body(p, s, a, mu);                                                                                         \
  }                                                                                                                    \
  TARGET inline void classes(const Part& p, const std::uint16_t* mu, int offset, std::uint8_t* c) {                    \
    classes_body(p, mu, offset, c);                                                                                    \
  }                                                                                                                    \
  TARGET inline std::uint32_t split(const Part& p, const std::uint16_t* x, const std::uint16_t* mu, int offset,        \
                                    std::uint8_t* s, std::uint8_t* c, BitsOut& raw, std::uint16_t*& escapes) {         \
    return split_body(p, x, mu, offset, s, c, raw, escapes);                                                           \
  }                                                                                                                    \
  TARGET inline bool join(const Part& p, const std::uint8_t* s, const std::uint16_t* mu, int offset, BitsIn& raw,      \
                          EscapesIn& escapes, std::uint16_t* x, std::uint32_t* distances) {                            \
    return join_body(p, s, mu, offset, raw, escapes, x, distances);                                                    \
  }                                                                                                                    \
  TARGET inline void inputs(const Part& p, const std::uint16_t* x, const Angles& a, std::uint8_t* q) {                 \
    inputs_body<INPUT>(p, x, a, q);                                                                                    \
  }                                                                                                                    \
  TARGET inline void check(const std::uint16_t* x, std::size_t n, std::uint32_t* a, std::uint32_t* b) {                \
    check_body(x, n, a, b);                                                                                            \
  }                                                                                                                    \
  inline constexpr Kernels kKernels = {sizeof(INPUT), SUMS, predict, classes, split, join, nullptr, inputs, check};    \
  }

KVSTORE_PREDICT_TWIN(scalar, , std::uint8_t, sums_scalar)

}  // namespace kvstore::predict

// The axis of bins of float8 (FORMAT.md, "float8"), one body for all sets of instructions. Included by dispatch.h only.
#pragma once

#include <cstddef>
#include <cstdint>

#include "common/floats.h"
#include "predictive/scalar-inl.h"

namespace kvstore::predict::float8 {

// What is coded otherwise than of bf16.
struct Loops {
  decltype(Kernels::classes) classes;
  decltype(Kernels::split) split;
  decltype(Kernels::join) join;
  // Words of values, and back.
  void (*make)(const std::uint8_t* values, std::size_t count, std::uint16_t* words);
  void (*merge)(const std::uint16_t* words, std::size_t count, std::uint8_t* values);
};

// A float8 whose least normal number has the exponent LEAST as a bf16. Its codes without sign, 0..127, stand in the
// order of the numbers, those of no number too, and so do words: bf16 numbers, of no number those that would follow.
template <int MANTISSA, int LEAST>
struct Form {
  static constexpr int kBelow = 7 - MANTISSA;           // bits of a bf16's mantissa below a code
  static constexpr int kEnd = 128 << kBelow;
  static constexpr int kNormal = 1 << MANTISSA;

  // Where a number lies among the codes, in parts of 2^-kBelow.
  KVSTORE_INLINE static int place(int bits) {
    const int found = index_of(bits, LEAST);
    return found < kEnd ? found : kEnd - 1;
  }
  KVSTORE_INLINE static int word(int code) {
    constexpr float unit = 1.0f / static_cast<float>(1ull << (127 + MANTISSA - LEAST));
    const int small = upper(static_cast<float>(code) * unit), normal = (code << kBelow) - 128 + (LEAST << 7);
    return code < kNormal ? small : normal;
  }
  // Quarter octaves that the distance of two codes here is above the scale `s` of residuals.
  KVSTORE_INLINE static int rise(int mu, int s) {
    const int e = exponent_of(mu);
    return 4 * ((e > LEAST ? e : LEAST) + kBelow - 134) - s;
  }
  KVSTORE_INLINE static int class_of(int rise, int place) {
    const int fine = clamped((rise + 28) >> 1, 0, 11);
    const int coarse = 12 + 4 * clamped((rise + 4) >> 1, 0, 5) + (place >> (kBelow - 2) & 3);
    return rise < -4 ? fine : coarse;
  }
  // How far the code `i` lies from a place, in eighths of the scale, at most 255. i: below 0 on the other side of 0.
  KVSTORE_INLINE static int distance(int i, int place, int rise) {
    const int away = (i - (i >> 31)) * (1 << kBelow) - place;
    const int ratio = 0x6c5b4c40 >> 8 * (rise & 3) & 255;  // 64 * 2^(quarter / 4)
    const int size = (away < 0 ? -away : away) * ratio, up = (rise >> 2) - kBelow - 3;
    const int scaled = up > 0 ? size << clamped(up, 0, 8) : size >> clamped(-up, 0, 24);
    return scaled < 255 ? scaled : 255;
  }
};

using E5M2 = Form<2, 113>;
using E4M3 = Form<3, 121>;

template <class F>
KVSTORE_INLINE void classes_body(const Part& part, const std::uint16_t* mu, int offset,
                                 std::uint8_t* __restrict classes) {
  const int first = part.value ? static_cast<int>(kClasses) : 0;
  const std::int16_t* const scale = part.scale.data();
  const std::size_t width = part.width;
  for (std::size_t j = 0; j < width; ++j) {
    const int s = scale_of(scale[j], offset);
    classes[j] = static_cast<std::uint8_t>(first + F::class_of(F::rise(mu[j], s), F::place(mu[j])));
  }
}

template <class F>
KVSTORE_INLINE std::uint32_t split_body(const Part& part, const std::uint16_t* x, const std::uint16_t* mu, int offset,
                                        std::uint8_t* __restrict symbols, std::uint8_t* __restrict classes,
                                        std::uint16_t*& escapes) {
  const int first = part.value ? static_cast<int>(kClasses) : 0;
  const std::int16_t* const scale = part.scale.data();
  const std::size_t width = part.width;
  std::uint32_t distances = 0, any = 0;
  for (std::size_t j = 0; j < width; ++j) {
    const int s = scale_of(scale[j], offset), m = mu[j], v = x[j], place = F::place(m), rise = F::rise(m, s);
    const int code = F::place(v) >> F::kBelow, i = code ^ -((v ^ m) >> 15 & 1), d = i - (place >> F::kBelow);
    const bool far = (d < -kOffset) | (d >= kOffset);
    symbols[j] = static_cast<std::uint8_t>(far ? kEscape : d + kOffset);
    classes[j] = static_cast<std::uint8_t>(first + F::class_of(rise, place));
    distances += static_cast<std::uint32_t>(far ? 255 : F::distance(i, place, rise));
    any |= far;
  }
  for (std::size_t j = 0; any != 0 && j < width; ++j) {
    *escapes = x[j];
    escapes += symbols[j] == kEscape;
  }
  return distances;
}

template <class F>
KVSTORE_INLINE bool join_body(const Part& part, const std::uint8_t* symbols, const std::uint16_t* mu, int offset,
                              EscapesIn& escapes, std::uint16_t* __restrict x, std::uint32_t* distances) {
  const std::int16_t* const scale = part.scale.data();
  const std::size_t width = part.width;
  std::uint32_t total = 0, any = 0;
  std::int32_t bad = 0;
  for (std::size_t j = 0; j < width; ++j) {
    const int s = scale_of(scale[j], offset), m = mu[j], symbol = symbols[j], place = F::place(m);
    const int i = (place >> F::kBelow) + symbol - kOffset, other = i >> 31, code = i ^ other;
    const bool far = symbol == kEscape;
    total += static_cast<std::uint32_t>(far ? 255 : F::distance(i, place, F::rise(m, s)));
    bad |= !far & (code > 127);
    any |= far;
    x[j] = static_cast<std::uint16_t>(F::word(code & 127) | ((m >> 15 ^ other) & 1) << 15);
  }
  *distances = total;
  for (std::size_t j = 0; any != 0 && j < width; ++j) {
    if (symbols[j] != kEscape) continue;
    if (escapes.at == escapes.end) return false;
    x[j] = static_cast<std::uint16_t>(load16(escapes.at));
    escapes.at += 2;
    if (F::word(F::place(x[j]) >> F::kBelow) != (x[j] & 0x7fff)) return false;
  }
  return bad == 0;
}

template <class F>
KVSTORE_INLINE void make_body(const std::uint8_t* values, std::size_t count, std::uint16_t* __restrict words) {
  for (std::size_t i = 0; i < count; ++i)
    words[i] = static_cast<std::uint16_t>(F::word(values[i] & 127) | (values[i] & 128) << 8);
}

template <class F>
KVSTORE_INLINE void merge_body(const std::uint16_t* words, std::size_t count, std::uint8_t* __restrict values) {
  for (std::size_t i = 0; i < count; ++i)
    values[i] = static_cast<std::uint8_t>(F::place(words[i]) >> F::kBelow | (words[i] >> 8 & 128));
}

}  // namespace kvstore::predict::float8

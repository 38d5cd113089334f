// splitzip's inner loops with NEON: 64 values a step. Included by splitzip/dispatch.h only.
#pragma once

#if defined(__aarch64__)
#include "common/intrinsics_begin.h"
#include "splitzip/scalar-inl.h"

namespace kvstore::splitzip::neon {

// Exponents and what is left of 16 values, as bytes. E5M2: the values themselves.
struct Heads {
  uint8x16_t exponents, rest;
};

inline Heads split(const std::uint16_t* v) {
  const uint8x16x2_t x = vld2q_u8(reinterpret_cast<const std::uint8_t*>(v));  // lower bytes, upper bytes
  return {vsriq_n_u8(vshlq_n_u8(x.val[1], 1), x.val[0], 7), vbslq_u8(vdupq_n_u8(0x80), x.val[1], x.val[0])};
}
inline Heads split(const std::uint8_t* v) {
  const uint8x16_t x = vld1q_u8(v);
  return {vandq_u8(vshrq_n_u8(x, 2), vdupq_n_u8(0x1F)), x};
}

// One bit for each of 64 bytes, which are 0 or 255, in their order.
inline uint8x8_t bits_of(const uint8x16_t (&set)[4]) {
  const uint8x16_t bit = vreinterpretq_u8_u64(vdupq_n_u64(0x8040201008040201u));
  const uint8x16_t low = vpaddq_u8(vandq_u8(set[0], bit), vandq_u8(set[1], bit));
  const uint8x16_t high = vpaddq_u8(vandq_u8(set[2], bit), vandq_u8(set[3], bit));
  const uint8x16_t four = vpaddq_u8(low, high);
  return vget_low_u8(vpaddq_u8(four, four));
}

template <class Head>
Range scan(const Head* values, std::size_t count) {
  uint8x16_t top = vdupq_n_u8(0), least = vdupq_n_u8(255);
  std::size_t i = 0;
  for (; i + 16 <= count; i += 16) {
    const uint8x16_t e = split(values + i).exponents;
    top = vmaxq_u8(top, e);
    least = vminq_u8(least, e);
  }
  Range range = scalar::scan(values + i, count - i);
  const unsigned found = vmaxvq_u8(top);
  range.top = found > range.top ? found : range.top;
  range.zero |= i > 0 && vminvq_u8(least) == 0;
  return range;
}

template <class Head>
std::size_t above(const Head* values, std::size_t count, unsigned top) {
  if (top >= 255) return 0;
  const uint8x16_t most = vdupq_n_u8(static_cast<std::uint8_t>(top));
  std::size_t i = 0, found = 0;
  for (; i + 64 <= count; i += 64) {
    uint8x16_t here = vdupq_n_u8(0);
    for (std::size_t k = 0; k < 64; k += 16)
      here = vsubq_u8(here, vcgtq_u8(split(values + i + k).exponents, most));
    found += vaddvq_u8(here);
  }
  return found + scalar::above(values + i, count - i, top);
}

inline void write_rest(const std::uint16_t*, const uint8x16_t (&rest)[4], std::uint8_t* to) {
  for (std::size_t k = 0; k < 4; ++k) vst1q_u8(to + 16 * k, rest[k]);
}
// Three planes of 32 values, then those of the next 32.
inline void write_rest(const std::uint8_t*, const uint8x16_t (&x)[4], std::uint8_t* to) {
  const std::uint8_t planes[3] = {1, 2, 0x80};
  for (std::size_t p = 0; p < 3; ++p) {
    const uint8x16_t bit = vdupq_n_u8(planes[p]);
    const uint8x16_t set[4] = {vtstq_u8(x[0], bit), vtstq_u8(x[1], bit), vtstq_u8(x[2], bit), vtstq_u8(x[3], bit)};
    const uint32x2_t both = vreinterpret_u32_u8(bits_of(set));
    store32(to + 4 * p, vget_lane_u32(both, 0));
    store32(to + 12 + 4 * p, vget_lane_u32(both, 1));
  }
}

template <class Head>
void pack(const Head* values, std::size_t count, Window window, std::uint8_t* codes, std::uint8_t* rest,
          std::uint64_t* escaped, std::uintptr_t next) {
  const uint8x16_t base = vdupq_n_u8(static_cast<std::uint8_t>(window.base)), most = vdupq_n_u8(15);
  const uint8x16_t zeros = vdupq_n_u8(window.zero ? 255 : 0);  // whether exponent 0 has code 0
  std::size_t i = 0;
  for (; i + 64 <= count; i += 64) {
    prefetch64<Head>(next + i * sizeof(Head));
    uint8x16_t code[4], left[4], escape[4];
    for (std::size_t k = 0; k < 4; ++k) {
      const Heads heads = split(values + i + 16 * k);
      const uint8x16_t d = vsubq_u8(heads.exponents, base);
      const uint8x16_t fits = vbicq_u8(vcleq_u8(d, most), vandq_u8(vceqzq_u8(d), zeros));
      escape[k] = vmvnq_u8(vorrq_u8(fits, vandq_u8(vceqzq_u8(heads.exponents), zeros)));
      code[k] = vandq_u8(d, fits);
      left[k] = heads.rest;
    }
    for (std::size_t k = 0; k < 4; k += 2)  // of two neighbours the first has the lower half of a byte
      vst1q_u8(codes + i / 2 + 8 * k,
               vsliq_n_u8(vuzp1q_u8(code[k], code[k + 1]), vuzp2q_u8(code[k], code[k + 1]), 4));
    write_rest(values, left, rest + rest_bytes<Head>(i));
    escaped[i / 64] = vget_lane_u64(vreinterpret_u64_u8(bits_of(escape)), 0);
  }
  if (i < count)
    scalar::pack(values + i, count - i, window, codes + i / 2, rest + rest_bytes<Head>(i), escaped + i / 64, next);
}

struct Tables {
  uint8x16_t high, low;  // the two bytes of a value, by code, rest excepted
};

// 32 values of 32 codes, one a byte.
inline void unpack32(const Tables& tables, const uint8x16x2_t& code, const std::uint8_t* rest, std::uint16_t* v) {
  const uint8x16_t sign = vdupq_n_u8(0x80);
  for (int half = 0; half < 2; ++half) {
    const uint8x16_t r = vld1q_u8(rest + 16 * half);
    const uint8x16_t low = vorrq_u8(vbicq_u8(r, sign), vqtbl1q_u8(tables.low, code.val[half]));
    const uint8x16_t high = vorrq_u8(vandq_u8(r, sign), vqtbl1q_u8(tables.high, code.val[half]));
    vst2q_u8(reinterpret_cast<std::uint8_t*>(v + 16 * half), uint8x16x2_t{{low, high}});
  }
}

// 16 bits, from byte `from` of a group on, as bytes that are `value` if the bit is set.
inline uint8x16_t spread16(const std::uint8_t* from, std::uint8_t value) {
  const uint8x16_t bit = vreinterpretq_u8_u64(vdupq_n_u64(0x8040201008040201u));
  const uint8x16_t all = vcombine_u8(vdup_n_u8(from[0]), vdup_n_u8(from[1]));
  return vandq_u8(vtstq_u8(all, bit), vdupq_n_u8(value));
}
inline void unpack32(const Tables& tables, const uint8x16x2_t& code, const std::uint8_t* rest, std::uint8_t* v) {
  for (int half = 0; half < 2; ++half) {
    const std::uint8_t* const from = rest + 2 * half;
    const uint8x16_t mantissa = vorrq_u8(spread16(from, 1), spread16(from + 4, 2));
    const uint8x16_t x = vorrq_u8(vorrq_u8(mantissa, spread16(from + 8, 0x80)),
                                  vqtbl1q_u8(tables.low, code.val[half]));
    vst1q_u8(v + 16 * half, x);
  }
}

template <class Head>
void unpack(const std::uint8_t* codes, const std::uint8_t* rest, std::size_t count, Window window, Head* values,
            bool) {
  const CodeBytes bytes(window, sizeof(Head) == 2);
  const Tables tables = {vld1q_u8(bytes.high), vld1q_u8(bytes.low)};
  std::size_t i = 0;
  for (; i + 32 <= count; i += 32) {
    const uint8x16_t pairs = vld1q_u8(codes + i / 2);
    const uint8x16_t first = vandq_u8(pairs, vdupq_n_u8(15)), second = vshrq_n_u8(pairs, 4);
    unpack32(tables, vzipq_u8(first, second), rest + rest_bytes<Head>(i), values + i);
  }
  scalar::unpack(codes + i / 2, rest + rest_bytes<Head>(i), count - i, window, values + i, false);
}

template <class Head>
inline constexpr Kernels<Head> kKernels = {scan<Head>, above<Head>, pack<Head>, unpack<Head>};

}  // namespace kvstore::splitzip::neon

#include "common/intrinsics_end.h"
#endif

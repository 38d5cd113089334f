// NEON twins of the sums of the predictive codec, with the instructions for dot products and without; other loops are
// the plain ones, which the compiler vectorises. Included by predictive/dispatch.h, and by twins that stand on it.
#pragma once

#if defined(__aarch64__)
#if defined(__linux__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

#include "common/intrinsics_begin.h"
#include "predictive/scalar-inl.h"

namespace kvstore::predict::neon {

// Whether this machine has dot products of bytes (Armv8.2 on; Armv8.4 always).
inline bool has_dotprod() {
#if defined(__ARM_FEATURE_DOTPROD)
  return true;
#elif defined(__linux__) && defined(HWCAP_ASIMDDP)
  static const bool has = (getauxval(AT_HWCAP) & HWCAP_ASIMDDP) != 0;
  return has;
#else
  return false;
#endif
}

constexpr int kVectors = 2;  // of four columns, that are summed at once

// Sums wrap around on their way.
KVSTORE_INLINE int32x4_t added(int32x4_t a, int32x4_t b) {
  return vreinterpretq_s32_u32(vaddq_u32(vreinterpretq_u32_s32(a), vreinterpretq_u32_s32(b)));
}

// Weights are signed, inputs are not: 128 is taken from an input, and 128 times the weights are added in the end.

// Sums of ROWS rows of eight columns, as dot products make them.
template <int ROWS>
struct Dots {
  int32x4_t total[ROWS][kVectors], weights[kVectors];

  KVSTORE_DOTPROD_INLINE Dots() {
    for (int v = 0; v < kVectors; ++v) {
      weights[v] = vdupq_n_s32(0);
      for (int r = 0; r < ROWS; ++r) total[r][v] = vdupq_n_s32(0);
    }
  }

  KVSTORE_DOTPROD_INLINE static int8x16_t four(const std::uint8_t* q) {
    std::int32_t bytes;
    std::memcpy(&bytes, q, sizeof bytes);
    return vreinterpretq_s8_u8(veorq_u8(vreinterpretq_u8_s32(vdupq_n_s32(bytes)), vdupq_n_u8(0x80)));
  }

  template <int LANE>
  KVSTORE_DOTPROD_INLINE void add_group(const int8x16_t (&in)[ROWS], const std::int8_t* w) {
    for (int v = 0; v < kVectors; ++v) {
      const int8x16_t by = vld1q_s8(w + 16 * v);
      weights[v] = vdotq_s32(weights[v], by, vdupq_n_s8(1));
      for (int r = 0; r < ROWS; ++r) total[r][v] = vdotq_laneq_s32(total[r][v], by, in[r], LANE);
    }
  }

  // `groups` times four inputs, which lie together, of rows `stride` apart; weights are `step` apart.
  KVSTORE_DOTPROD_INLINE void add(const std::uint8_t* q, std::size_t stride, const std::int8_t* w, std::size_t step,
                                  std::size_t groups) {
    int8x16_t in[ROWS];
    for (; groups >= 4; groups -= 4, q += 16, w += 4 * step) {
      for (int r = 0; r < ROWS; ++r)
        in[r] = vreinterpretq_s8_u8(veorq_u8(vld1q_u8(q + static_cast<std::size_t>(r) * stride), vdupq_n_u8(0x80)));
      add_group<0>(in, w);
      add_group<1>(in, w + step);
      add_group<2>(in, w + 2 * step);
      add_group<3>(in, w + 3 * step);
    }
    for (; groups != 0; --groups, q += 4, w += step) {
      for (int r = 0; r < ROWS; ++r) in[r] = four(q + static_cast<std::size_t>(r) * stride);
      add_group<0>(in, w);
    }
  }

  KVSTORE_DOTPROD_INLINE int32x4_t sum(int r, int v) const {
    return added(total[r][v], vshlq_n_s32(weights[v], 7));
  }
};

// The same of products of 16 bits. A vector of four columns has, in two halves, of each the sums of two inputs and of
// two more.
template <int ROWS>
struct Products {
  int32x4_t total[ROWS][kVectors][2], weights[kVectors][2];

  KVSTORE_INLINE Products() {
    for (int v = 0; v < kVectors; ++v) {
      for (int half = 0; half < 2; ++half) {
        weights[v][half] = vdupq_n_s32(0);
        for (int r = 0; r < ROWS; ++r) total[r][v][half] = vdupq_n_s32(0);
      }
    }
  }

  KVSTORE_INLINE void add(const std::uint8_t* q, std::size_t stride, const std::int8_t* w, std::size_t step,
                          std::size_t groups) {
    for (; groups != 0; --groups, q += 4, w += step) {
      int8x8_t in[ROWS];
      for (int r = 0; r < ROWS; ++r) {
        std::int32_t bytes;
        std::memcpy(&bytes, q + static_cast<std::size_t>(r) * stride, sizeof bytes);
        in[r] = vreinterpret_s8_u8(veor_u8(vreinterpret_u8_s32(vdup_n_s32(bytes)), vdup_n_u8(0x80)));
      }
      for (int v = 0; v < kVectors; ++v) {
        const int8x16_t by = vld1q_s8(w + 16 * v);
        weights[v][0] = vpadalq_s16(weights[v][0], vmovl_s8(vget_low_s8(by)));
        weights[v][1] = vpadalq_s16(weights[v][1], vmovl_high_s8(by));
        for (int r = 0; r < ROWS; ++r) {
          total[r][v][0] = vpadalq_s16(total[r][v][0], vmull_s8(vget_low_s8(by), in[r]));
          total[r][v][1] = vpadalq_s16(total[r][v][1], vmull_s8(vget_high_s8(by), in[r]));
        }
      }
    }
  }

  KVSTORE_INLINE int32x4_t sum(int r, int v) const {
    return added(vpaddq_s32(total[r][v][0], total[r][v][1]),
                 vshlq_n_s32(vpaddq_s32(weights[v][0], weights[v][1]), 7));
  }
};

#define KVSTORE_NEON_PREDICT_SUMS(NAME, TARGET, SUMS, MOST)                                                            \
  namespace NAME {                                                                                                     \
  /* ROWS tokens of eight columns. */                                                                                  \
  template <int ROWS>                                                                                                  \
  TARGET inline void tile(const Part& part, const std::int8_t* w, std::size_t step, const std::int32_t* bias,          \
                          const Inputs& inputs, std::size_t row, std::int32_t* sums) {                                 \
    SUMS<ROWS> found;                                                                                                  \
    for (std::size_t i = 0; i < part.inputs.size(); ++i) {                                                             \
      found.add(inputs.rows[i] + row * inputs.stride[i], inputs.stride[i], w, step, part.groups[i]);                   \
      w += step * part.groups[i];                                                                                      \
    }                                                                                                                  \
    for (int r = 0; r < ROWS; ++r)                                                                                     \
      for (int v = 0; v < kVectors; ++v)                                                                               \
        vst1q_s32(sums + static_cast<std::size_t>(r) * part.padded + 4 * v,                                            \
                  added(vld1q_s32(bias + 4 * v), found.sum(r, v)));                                                    \
  }                                                                                                                    \
                                                                                                                       \
  TARGET inline void sums(const Part& part, const std::int8_t* weight, const Inputs& inputs, std::size_t n,            \
                          std::int32_t* sums) {                                                                        \
    for (std::size_t column = 0; column < part.padded; column += 4 * kVectors) {                                       \
      const std::size_t panel = column / kPanel * kPanel;                                                              \
      const std::size_t wide = part.padded - panel < kPanel ? part.padded - panel : kPanel;                            \
      const std::int8_t* const w = weight + (panel * part.depth + column - panel) * kGroup;                            \
      const std::int32_t* const bias = part.bias.data() + column;                                                      \
      std::int32_t* const to = sums + column;                                                                          \
      std::size_t t = 0;                                                                                               \
      for (; t + MOST <= n; t += MOST) tile<MOST>(part, w, wide * kGroup, bias, inputs, t, to + t * part.padded);      \
      for (; t + 2 <= n; t += 2) tile<2>(part, w, wide * kGroup, bias, inputs, t, to + t * part.padded);               \
      if (t < n) tile<1>(part, w, wide * kGroup, bias, inputs, t, to + t * part.padded);                               \
    }                                                                                                                  \
  }                                                                                                                    \
  }

// As many rows at once as sums stay in registers.
KVSTORE_NEON_PREDICT_SUMS(plain, , Products, 4)
KVSTORE_NEON_PREDICT_SUMS(dotted, KVSTORE_DOTPROD, Dots, 8)

constexpr Kernels with_sums(Kernels kernels, decltype(Kernels::sums) sums) {
  kernels.sums = sums;
  return kernels;
}

inline constexpr Kernels kKernels = with_sums(scalar::kKernels, plain::sums);
inline constexpr Kernels kDotted = with_sums(scalar::kKernels, dotted::sums);

}  // namespace kvstore::predict::neon

#include "common/intrinsics_end.h"
#endif

// NEON twins of the loops of the levels: the sums, with the instructions for dot products and without; the other loops
// are the plain ones, which the compiler vectorises. Included by levels/dispatch.h only.
#pragma once

#if defined(__aarch64__)
#include "common/intrinsics_begin.h"
#include "levels/scalar-inl.h"
#include "predictive/neon-inl.h"

namespace kvstore::levels::neon {

using predict::neon::added;
using predict::neon::kVectors;

constexpr std::size_t kWide = 4 * kVectors;  // columns at once: half of a group

#define KVSTORE_NEON_LEVELS_SUMS(NAME, TARGET, SUMS, ROWS)                                                             \
  namespace NAME {                                                                                                     \
  TARGET inline void sums(const Part& part, const std::int8_t* weight, const Summed* blocks, std::size_t count) {      \
    const std::size_t columns = part.groups.size();                                                                    \
    for (std::size_t half = 0; half < columns * kColumns; half += kWide) {                                             \
      const std::size_t g = half / kColumns, panel = g / kMostPanel * kMostPanel;                                      \
      const std::size_t wide = columns - panel < kMostPanel ? columns - panel : kMostPanel;                            \
      const std::size_t step = wide * predict::kColumnsBytes;                                                          \
      const std::int8_t* const first =                                                                                 \
          weight + panel * part.depth * kSteps * predict::kColumnsBytes + 4 * (half - panel * kColumns);               \
      const std::int32_t* const bias = part.groups[g].bias + half % kColumns;                                          \
      for (const Summed* block = blocks; block != blocks + count; ++block) {                                           \
        const std::size_t padded = block->rows.padded;                                                                 \
        for (std::size_t t = 0; t < padded; t += ROWS) {                                                               \
          predict::neon::SUMS<ROWS> found;                                                                             \
          const std::int8_t* w = first;                                                                                \
          for (std::size_t i = 0; i < part.inputs.size(); ++i)                                                         \
            for (std::size_t d = 0; d < part.depths[i]; ++d, w += kSteps * step)                                       \
              found.add(block->inputs[i] + (d * padded + t) * kColumns, kColumns, w, step, kSteps);                    \
          std::int32_t* to = block->sums + (g * padded + t) * kColumns + half % kColumns;                              \
          for (int r = 0; r < ROWS; ++r, to += kColumns)                                                               \
            for (int v = 0; v < kVectors; ++v)                                                                         \
              vst1q_s32(to + 4 * v, added(vld1q_s32(bias + 4 * v), found.sum(r, v)));                                  \
        }                                                                                                              \
      }                                                                                                                \
    }                                                                                                                  \
  }                                                                                                                    \
                                                                                                                       \
  TARGET inline void group(const Group& group, const std::int8_t* weight, std::size_t number,                          \
                           const std::int32_t* sums, std::size_t stride, const std::uint8_t* residuals, RowCount rows, \
                           std::int16_t* p) {                                                                          \
    for (std::size_t half = 0; half < kColumns; half += kWide) {                                                       \
      const int32x4_t first = vnegq_s32(vld1q_s32(group.shift + half));                                                \
      const int32x4_t second = vnegq_s32(vld1q_s32(group.shift + half + 4));                                           \
      for (std::size_t t = 0; t < rows.padded; t += ROWS) {                                                            \
        predict::neon::SUMS<ROWS> found;                                                                               \
        const std::int8_t* w = weight + 4 * half;                                                                      \
        for (std::size_t g = 0; g < number; ++g, w += kSteps * predict::kColumnsBytes)                                 \
          found.add(residuals + (g * rows.padded + t) * kColumns, kColumns, w, predict::kColumnsBytes, kSteps);        \
        for (int r = 0; r < ROWS; ++r) {                                                                               \
          const std::size_t row = t + static_cast<std::size_t>(r);                                                     \
          const std::int32_t* const from = sums + row * stride + half;                                                 \
          const int32x4_t low = vshlq_s32(added(vld1q_s32(from), found.sum(r, 0)), first);                             \
          const int32x4_t high = vshlq_s32(added(vld1q_s32(from + 4), found.sum(r, 1)), second);                       \
          vst1q_s16(p + row * kColumns + half, vcombine_s16(vqmovn_s32(low), vqmovn_s32(high)));                       \
        }                                                                                                              \
      }                                                                                                                \
    }                                                                                                                  \
  }                                                                                                                    \
  }

// As many rows at once as sums stay in registers; rows are padded to whole kRows.
static_assert(kRows == 8 && kVectors == 2);
KVSTORE_NEON_LEVELS_SUMS(plain, , Products, 4)
KVSTORE_NEON_LEVELS_SUMS(dotted, KVSTORE_DOTPROD, Dots, 8)

constexpr Kernels with_sums(Kernels kernels, decltype(Kernels::sums) sums, decltype(Kernels::group) group) {
  kernels.sums = sums;
  kernels.group = group;
  return kernels;
}

inline constexpr Kernels kKernels = with_sums(scalar::kKernels, plain::sums, plain::group);
inline constexpr Kernels kDotted = with_sums(scalar::kKernels, dotted::sums, dotted::group);

}  // namespace kvstore::levels::neon

#include "common/intrinsics_end.h"
#endif

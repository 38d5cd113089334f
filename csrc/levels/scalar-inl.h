// The inner loops of the levels in plain C++: the scalar twin, and bodies that the compiler vectorises for
// others. Included by levels/dispatch.h only.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>

#include "common/floats.h"
#include "levels/kernels.h"
#include "predictive/scalar-inl.h"

namespace kvstore::levels {

KVSTORE_INLINE int clamped16(int v) { return predict::clamped(v, -32768, 32767); }
KVSTORE_INLINE std::uint8_t narrowed(int v, int factor) {
  return static_cast<std::uint8_t>(predict::clamped((v * factor + (1 << 14)) >> 15, -128, 127) + 128);
}

inline void sums_of_block(const Part& part, const std::int8_t* weight, const Summed& block) {
  const std::size_t columns = part.groups.size();
  const RowCount rows = block.rows;
  for (std::size_t panel = 0; panel < columns; panel += kMostPanel) {
    const std::size_t wide = columns - panel < kMostPanel ? columns - panel : kMostPanel;
    for (std::size_t c = 0; c < wide; ++c) {
      for (std::size_t t = 0; t < rows.padded; ++t) {
        std::uint32_t total[kColumns];  // sums wrap around on their way; the last one is in range
        for (std::size_t j = 0; j < kColumns; ++j)
          total[j] = static_cast<std::uint32_t>(part.groups[panel + c].bias[j]);
        const std::int8_t* w = weight + c * predict::kColumnsBytes;
        for (std::size_t i = 0; i < part.inputs.size(); ++i) {
          for (std::size_t g = 0; g < part.depths[i]; ++g) {
            const std::uint8_t* q = block.inputs[i] + (g * rows.padded + t) * kColumns;
            for (std::size_t k = 0; k < kSteps; ++k, q += 4, w += wide * predict::kColumnsBytes)
              for (std::size_t j = 0; j < kColumns; ++j)
                total[j] += static_cast<std::uint32_t>(q[0] * w[4 * j] + q[1] * w[4 * j + 1] + q[2] * w[4 * j + 2] +
                                                       q[3] * w[4 * j + 3]);
          }
        }
        std::int32_t* const to = block.sums + ((panel + c) * rows.padded + t) * kColumns;
        for (std::size_t j = 0; j < kColumns; ++j) to[j] = static_cast<std::int32_t>(total[j]);
      }
    }
    weight += wide * part.depth * kSteps * predict::kColumnsBytes;
  }
}

inline void sums_scalar(const Part& part, const std::int8_t* weight, const Summed* blocks, std::size_t count) {
  for (const Summed* block = blocks; block != blocks + count; ++block) sums_of_block(part, weight, *block);
}

KVSTORE_INLINE void group_body(const Group& group, const std::int8_t* weight, std::size_t number,
                               const std::int32_t* sums, std::size_t stride, const std::uint8_t* residuals,
                               RowCount rows, std::int16_t* p) {
  for (std::size_t t = 0; t < rows.padded; ++t) {
    std::uint32_t total[kColumns];
    for (std::size_t j = 0; j < kColumns; ++j) total[j] = static_cast<std::uint32_t>(sums[t * stride + j]);
    const std::int8_t* w = weight;
    for (std::size_t g = 0; g < number; ++g) {
      const std::uint8_t* q = residuals + (g * rows.padded + t) * kColumns;
      for (std::size_t k = 0; k < kSteps; ++k, q += 4, w += predict::kColumnsBytes)
        for (std::size_t j = 0; j < kColumns; ++j)
          total[j] += static_cast<std::uint32_t>(q[0] * w[4 * j] + q[1] * w[4 * j + 1] + q[2] * w[4 * j + 2] +
                                                 q[3] * w[4 * j + 3]);
    }
    for (std::size_t j = 0; j < kColumns; ++j)
      p[t * kColumns + j] = static_cast<std::int16_t>(clamped16(static_cast<std::int32_t>(total[j]) >> group.shift[j]));
  }
}

KVSTORE_INLINE int low(std::int32_t both) { return static_cast<std::int16_t>(both); }
KVSTORE_INLINE int high(std::int32_t both) { return both >> 16; }

KVSTORE_INLINE void predict_body(const Group& group, const std::int16_t* p, const Turns* turns, RowCount rows,
                                 std::uint16_t* __restrict mu) {
  for (std::size_t t = 0; t < rows.padded; ++t, p += kColumns, mu += kColumns) {
    if (turns == nullptr) {
      for (std::size_t j = 0; j < kColumns; ++j) mu[j] = upper(static_cast<float>(p[j]) * group.from_fixed[j]);
      continue;
    }
    const std::int32_t* const forward = turns->forward + t * turns->stride;
    const std::int32_t* const across = turns->across + t * turns->stride;
    for (std::size_t i = 0; i < kColumns / 2; ++i) {
      const int a = p[2 * i], b = p[2 * i + 1];
      const int x = a * low(forward[i]) + b * high(forward[i]), y = a * low(across[i]) + b * high(across[i]);
      mu[2 * i] = upper(static_cast<float>(x) * group.from_fixed[i]);
      mu[2 * i + 1] = upper(static_cast<float>(y) * group.from_fixed[i]);
    }
  }
}

KVSTORE_INLINE void fixed_body(const Group& group, const std::uint16_t* x, const Turns* turns, RowCount rows,
                               std::int16_t* __restrict u) {
  for (std::size_t t = 0; t < rows.padded; ++t, x += kColumns, u += kColumns) {
    if (turns == nullptr) {
      for (std::size_t j = 0; j < kColumns; ++j)
        u[j] = static_cast<std::int16_t>(predict::rounded(predict::number(x[j]) * group.to_fixed[j], 32767.0f));
      continue;
    }
    const std::int32_t* const forward = turns->forward + t * turns->stride;
    const std::int32_t* const across = turns->across + t * turns->stride;
    for (std::size_t i = 0; i < kColumns / 2; ++i) {
      const int a = predict::rounded(predict::number(x[2 * i]) * group.to_fixed[i], predict::kRange);
      const int b = predict::rounded(predict::number(x[2 * i + 1]) * group.to_fixed[i], predict::kRange);
      // Back: (cos, sin) and (-sin, cos).
      const int c = a * high(across[i]) + b * low(across[i]), d = a * high(forward[i]) + b * low(forward[i]);
      u[2 * i] = static_cast<std::int16_t>((c + (1 << 13)) >> 14);
      u[2 * i + 1] = static_cast<std::int16_t>((d + (1 << 13)) >> 14);
    }
  }
}

KVSTORE_INLINE void inputs_body(const Group& group, const std::int16_t* u, RowCount rows,
                                std::uint8_t* __restrict inputs) {
  for (std::size_t t = 0; t < rows.padded; ++t, u += kColumns, inputs += kColumns)
    for (std::size_t j = 0; j < kColumns; ++j) inputs[j] = narrowed(u[j], group.gain[j]);
}

KVSTORE_INLINE void residuals_body(const Group& group, const std::int16_t* u, const std::int16_t* p, RowCount rows,
                                   std::uint8_t* __restrict residuals) {
  for (std::size_t t = 0; t < rows.padded; ++t, u += kColumns, p += kColumns, residuals += kColumns)
    for (std::size_t j = 0; j < kColumns; ++j) residuals[j] = narrowed(clamped16(u[j] - p[j]), group.narrow[j]);
}

KVSTORE_INLINE void classes_body(const Group& group, bool value, const std::uint16_t* mu, RowCount rows,
                                 const Coded& coded) {
  for (std::size_t t = 0; t < rows.n; ++t)
    predict::classes_row(group.scale, group.width, value, mu + t * kColumns, coded.offsets[t * kColumns],
                         coded.classes + t * kColumns);
}

KVSTORE_INLINE void split_body(const Group& group, bool value, const std::uint16_t* x, const std::uint16_t* mu,
                               RowCount rows, const Coded& coded, predict::BitsOut& raw, std::uint16_t*& escapes) {
  for (std::size_t t = 0; t < rows.n; ++t) {
    const std::size_t at = t * kColumns;
    coded.distances[t / 2 * kDistances + t % 2 * 4] +=
        predict::split_row(group.scale, group.width, value, x + at, mu + at, coded.offsets[at], coded.symbols + at,
                           coded.classes + at, raw, escapes);
  }
}

KVSTORE_INLINE bool join_body(const Group& group, const std::uint16_t* mu, RowCount rows, const Coded& coded,
                              predict::BitsIn& raw, predict::EscapesIn& escapes, std::uint16_t* x) {
  bool good = true;
  for (std::size_t t = 0; t < rows.n && good; ++t) {
    const std::size_t at = t * kColumns;
    std::uint32_t distances = 0;
    good = predict::join_row(group.scale, group.width, coded.symbols + at, mu + at, coded.offsets[at], raw, escapes,
                             x + at, &distances);
    coded.distances[t / 2 * kDistances + t % 2 * 4] += distances;
  }
  return good;
}

#define KVSTORE_LEVELS_TWIN(NAME, TARGET, SUMS, GROUP)                                                                 \
  namespace NAME {                                                                                                     \
  TARGET inline void predict(const Group& g, const std::int16_t* p, const Turns* a, RowCount r, std::uint16_t* mu) {   \
    predict_body(g, p, a, r, mu);                                                                                      \
  }                                                                                                                    \
  TARGET inline void fixed(const Group& g, const std::uint16_t* x, const Turns* a, RowCount r, std::int16_t* u) {      \
    fixed_body(g, x, a, r, u);                                                                                         \
  }                                                                                                                    \
  TARGET inline void inputs(const Group& g, const std::int16_t* u, RowCount r, std::uint8_t* q) {                      \
    inputs_body(g, u, r, q);                                                                                           \
  }                                                                                                                    \
  TARGET inline void residuals(const Group& g, const std::int16_t* u, const std::int16_t* p, RowCount r,               \
                               std::uint8_t* q) {                                                                      \
    residuals_body(g, u, p, r, q);                                                                                     \
  }                                                                                                                    \
  TARGET inline void classes(const Group& g, bool value, const std::uint16_t* mu, RowCount r, const Coded& c) {        \
    classes_body(g, value, mu, r, c);                                                                                  \
  }                                                                                                                    \
  TARGET inline void split(const Group& g, bool value, const std::uint16_t* x, const std::uint16_t* mu, RowCount r,    \
                           const Coded& c, predict::BitsOut& raw, std::uint16_t*& escapes) {                           \
    split_body(g, value, x, mu, r, c, raw, escapes);                                                                   \
  }                                                                                                                    \
  TARGET inline bool join(const Group& g, const std::uint16_t* mu, RowCount r, const Coded& c, predict::BitsIn& raw,   \
                          predict::EscapesIn& escapes, std::uint16_t* x) {                                             \
    return join_body(g, mu, r, c, raw, escapes, x);                                                                    \
  }                                                                                                                    \
  inline constexpr Kernels kKernels = {1,         SUMS,    GROUP, predict, fixed,   inputs,                           \
                                       residuals, classes, split, join,    nullptr, multiply};                         \
  }

inline void group_scalar(const Group& group, const std::int8_t* weight, std::size_t number, const std::int32_t* sums,
                         std::size_t stride, const std::uint8_t* residuals, RowCount rows, std::int16_t* p) {
  group_body(group, weight, number, sums, stride, residuals, rows, p);
}

namespace scalar {
inline std::uint64_t multiply(std::uint64_t rounds) {
  std::int32_t total[kColumns] = {};
  for (std::uint64_t i = 0; i < rounds; ++i) {
    for (std::size_t j = 0; j < kColumns; ++j) total[j] += static_cast<int>(i & 255) * static_cast<int>(j);
    __asm__ volatile("" : : "r"(total) : "memory");
  }
  return rounds * kColumns;
}
}  // namespace scalar

KVSTORE_LEVELS_TWIN(scalar, , sums_scalar, group_scalar)

}  // namespace kvstore::levels

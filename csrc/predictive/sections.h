// What the exact codecs that stand on the predictive codec's loops share: what a part leaves besides its symbols, the
// size of residuals, rows in memory, and the sums over a layer. Included by predictive/predictive.cc, donor/donor.cc and
// donor/steps/steps.cc only.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "common/rows.h"
#include "predictive/dispatch.h"
#include "predictive/scalar-inl.h"

namespace kvstore::predict {

// What the values of a part leave besides their symbols, in a buffer for the widest part of a block.
struct Leftovers {
  explicit Leftovers(std::size_t values) : raw((values * kMostRaw + 7) / 8), escapes(values) {}

  Buffer<std::uint8_t> raw;
  Buffer<std::uint16_t> escapes;
};

// Quarter octaves that a mantissa of 16 bits, the highest set, is above its power of two.
inline int mantissa_quarters(std::uint32_t m) { return (m >= 38968) + (m >= 46341) + (m >= 55109); }

// 4 * log2(v) rounded down, v >= 1.
inline int log2_quarters(std::uint32_t v) {
  const int top = 31 - __builtin_clz(v);
  return 4 * top + mantissa_quarters(top > 15 ? v >> (top - 15) : v << (15 - top));
}

// The same of a number that is not negative; for 0 less than -500.
inline int log2_quarters(float v) {
  std::uint32_t bits;
  std::memcpy(&bits, &v, sizeof bits);
  return 4 * (static_cast<int>(bits >> 23) - 127) + mantissa_quarters((bits >> 8 & 0x7fff) | 0x8000);
}

template <bool OUT>
inline void copy_head(std::uint64_t address, std::uint16_t* values, std::size_t bytes) {
  if (OUT)
    std::memcpy(reinterpret_cast<void*>(address), values, bytes);
  else
    std::memcpy(values, reinterpret_cast<const void*>(address), bytes);
}

// Copies row `row` of a part from a tensor to `values`, its heads one after the other, or back.
template <bool OUT>
void copy_row(const Part& part, const Rows& place, std::size_t row, std::uint16_t* values) {
  const std::int64_t before = place.token_stride * static_cast<std::int64_t>(row);
  std::uint64_t address = place.address + static_cast<std::uint64_t>(before);
  for (std::size_t head = 0; head < part.heads; ++head, values += part.dim) {
    // The usual sizes are a few instructions, others a call.
    switch (part.dim) {
      case 64: copy_head<OUT>(address, values, 128); break;
      case 128: copy_head<OUT>(address, values, 256); break;
      default: copy_head<OUT>(address, values, 2 * part.dim);
    }
    address += static_cast<std::uint64_t>(place.head_stride);
  }
}

// The two sums over a layer's values.
struct Sums {
  std::uint32_t a = 0, b = 0;
  std::size_t before = 0;

  void add(const Kernels& kernels, const std::uint16_t* values, std::size_t count) {
    std::uint32_t more = 0, weighted = 0;
    kernels.check(values, count, &more, &weighted);
    a += more;
    b += weighted + static_cast<std::uint32_t>(before) * more;
    before += count;
  }
};

}  // namespace kvstore::predict

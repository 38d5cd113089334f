// By how many quarter octaves the residuals of a row are larger than its part's usual ones.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>

#include "common/floats.h"
#include "predictive/buffer.h"

namespace kvstore::predict {

// Quarter octaves that a mantissa of 16 bits, the highest set, is above its power of two.
inline int mantissa_quarters(std::uint32_t m) { return (m >= 38968) + (m >= 46341) + (m >= 55109); }

// 4 * log2(v) rounded down, v >= 1.
inline int log2_quarters(std::uint32_t v) {
  const int top = 31 - __builtin_clz(v);
  return 4 * top + mantissa_quarters(top > 15 ? v >> (top - 15) : v << (15 - top));
}

// The same of a number that is not negative; for 0 less than -500.
inline int log2_quarters(float v) {
  const std::uint32_t bits = bits_of(v);
  return 4 * (static_cast<int>(bits >> 23) - 127) + mantissa_quarters((bits >> 8 & 0x7fff) | 0x8000);
}

// The offsets of a block's rows, part after part, each from how well the scales of the two parts before fitted.
class Offsets {
 public:
  explicit Offsets(std::size_t count)
      : count_(count), offsets_(count), fits_{Buffer<std::int32_t>(count), Buffer<std::int32_t>(count)} {
    std::fill_n(fits_[0].get(), count, 0);
    std::fill_n(fits_[1].get(), count, 0);
  }

  const std::int32_t* get() const { return offsets_.get(); }

  // Makes those of the next part. adapt: factors of the two fits and what is added to them, in 1/256.
  void predict(const std::int32_t (&adapt)[3]) {
    for (std::size_t t = 0; t < count_; ++t) {
      const int sum = adapt[0] * fits_[0].get()[t] + adapt[1] * fits_[1].get()[t] + adapt[2] + 128;
      offsets_.get()[t] = clamped(sum >> 8, -32, 40);
    }
  }

  // distances: what the residuals of each row of that part, `width` values wide, add up to.
  void advance(const std::uint32_t* distances, std::size_t width) {
    std::swap(fits_[0], fits_[1]);
    for (std::size_t t = 0; t < count_; ++t) {
      const auto mean = static_cast<std::uint32_t>(std::uint64_t{distances[t]} * 64 / width);
      fits_[0].get()[t] = offsets_.get()[t] + log2_quarters(std::max(mean, 1u)) - 34;
    }
  }

 private:
  std::size_t count_;
  Buffer<std::int32_t> offsets_;
  Buffer<std::int32_t> fits_[2];  // of the part before, and of the one before that
};

}  // namespace kvstore::predict

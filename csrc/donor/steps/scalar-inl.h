// The inner loops of the donor codec's step mode: one body each, of which donor/steps/dispatch.h makes the twin of
// every CPU level for the compiler to vectorise. Products are exact, or are not added to anything, so that fused
// operations round like others.
#pragma once

#include "common/floats.h"
#include "donor/kernels.h"
#include "donor/steps/kernels.h"
#include "donor/steps/steps.h"

namespace kvstore::donor::steps {

constexpr int kNearer = 3;  // sixteenths of a step
constexpr std::uint32_t kLimitBits = 0x49742400;  // 1e6

KVSTORE_INLINE std::uint32_t rounded(float v) {
  const std::uint32_t bits = bits_of(v);
  return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

KVSTORE_INLINE void add_body(const std::uint16_t* mu, std::size_t width, float* __restrict totals) {
  for (std::size_t j = 0; j < width; ++j) totals[j] += number(mu[j] & 0x7fff);
}

KVSTORE_INLINE void tables_body(const std::uint8_t* scales, std::size_t width, int shift, std::uint8_t* __restrict to) {
  const auto by = static_cast<std::int8_t>(shift);
  for (std::size_t j = 0; j < width; ++j) {
    const auto found = static_cast<std::int8_t>(static_cast<std::int8_t>(scales[j]) + by);
    const std::int8_t least = found > 0 ? found : std::int8_t{0};
    constexpr auto most = static_cast<std::int8_t>(kScales - 1);
    to[j] = static_cast<std::uint8_t>((least < most ? least : most) + static_cast<int>(kClasses));
  }
}

KVSTORE_INLINE std::int64_t measure_body(const std::uint8_t* symbols, std::size_t width, std::uint8_t* largest) {
  std::uint32_t sum = 0;  // at most 16 * 2^20
  std::uint8_t most = 0;
  for (std::size_t j = 0; j < width; ++j) {
    const std::uint8_t s = symbols[j];
    sum += s > kLargest ? s - static_cast<std::uint32_t>(kLargest) : static_cast<std::uint32_t>(kLargest) - s;
    most = s > most ? s : most;
  }
  *largest = most;
  return sum;
}

KVSTORE_INLINE void restore_body(const std::uint16_t* mu, const std::int8_t* numbers, const float* steps,
                               std::size_t width, std::uint16_t* __restrict to) {
  for (std::size_t j = 0; j < width; ++j)
    to[j] = static_cast<std::uint16_t>(rounded(number(mu[j]) + static_cast<float>(numbers[j]) * steps[j]));
}

KVSTORE_INLINE void quantise_body(const std::uint16_t* x, const std::uint16_t* mu, const float* steps,
                                const float* inverse, std::size_t width, std::int8_t* __restrict numbers) {
  for (std::size_t j = 0; j < width; ++j) {
    const float from = number(mu[j]);
    const std::uint32_t distance = bits_of(number(x[j]) - from);
    // Numbers that are not negative compare like their bits; NaN is larger than all.
    const std::uint32_t sixteenths = bits_of(as_float(distance & 0x7fffffff) * inverse[j]);
    const float bounded = as_float(sixteenths < kLimitBits ? sixteenths : kLimitBits);
    const int size = (static_cast<int>(bounded) + kNearer) >> 4;
    const int few = size > kLargest ? 0 : size, sign = -static_cast<int>(distance >> 31);
    const int found = (few ^ sign) - sign;
    const std::uint32_t made = rounded(from + static_cast<float>(found) * steps[j]);
    const int kept = (size > kLargest) | ((x[j] & 0x7f80) == 0x7f80) | ((made & 0x7f80) == 0x7f80);
    numbers[j] = static_cast<std::int8_t>(kept ? kLargest + 1 : found);
  }
}

KVSTORE_INLINE void errors_body(const std::uint16_t* x, const std::uint16_t* y, std::size_t width,
                              double* __restrict squares, std::uint32_t* __restrict largest) {
  for (std::size_t j = 0; j < width; ++j) {
    const float distance = number(x[j]) - number(y[j]);
    const std::uint32_t error = x[j] == y[j] ? 0 : bits_of(distance) & 0x7fffffff;
    const double wide = as_float(error);
    squares[j] += wide * wide;
    largest[j] = error > largest[j] ? error : largest[j];
  }
}

}  // namespace kvstore::donor::steps

// splitzip's inner loops in plain C++. Included by splitzip/dispatch.h and its vector twins only.
#pragma once

#include "splitzip/kernels.h"

namespace kvstore::splitzip::scalar {

template <class Head>
Range scan(const Head* values, std::size_t count) {
  Range range{0, false};
  for (std::size_t i = 0; i < count; ++i) {
    const unsigned e = exponent_of(values[i]);
    range.top = e > range.top ? e : range.top;
    range.zero |= e == 0;
  }
  return range;
}

template <class Head>
std::size_t above(const Head* values, std::size_t count, unsigned top) {
  std::size_t found = 0;
  for (std::size_t i = 0; i < count; ++i) found += exponent_of(values[i]) > top;
  return found;
}

template <class Head>
void pack(const Head* values, std::size_t count, Window window, std::uint8_t* codes, std::uint8_t* rest,
                 std::uint64_t* escaped, std::uintptr_t) {
  const unsigned least = window.zero ? 1 : 0;
  const auto code_of = [&](std::size_t i) -> unsigned {
    const unsigned e = exponent_of(values[i]), d = e - window.base;
    const bool fits = d - least <= 15u - least;
    const bool escape = !fits && !(window.zero && e == 0);
    escaped[i / 64] |= static_cast<std::uint64_t>(escape) << (i % 64);
    return fits ? d : 0;
  };
  for (std::size_t i = 0; i < (count + 63) / 64; ++i) escaped[i] = 0;
  std::size_t i = 0;
  for (; i + 2 <= count; i += 2) {
    const unsigned low = code_of(i);
    codes[i / 2] = static_cast<std::uint8_t>(low | code_of(i + 1) << 4);
  }
  if (i < count) {
    codes[i / 2] = static_cast<std::uint8_t>(code_of(i));
    i += 2;
  }
  for (; i % kGroup; i += 2) codes[i / 2] = 0;
  pack_rest(values, count, rest);
}

template <class Head>
void unpack(const std::uint8_t* codes, const std::uint8_t* rest, std::size_t count, Window window, Head* values,
                   bool) {
  unpack_rest(rest, count, values);
  for (std::size_t i = 0; i < count; ++i)
    values[i] = with_exponent(values[i], exponent_of_code(codes[i / 2] >> (i % 2 * 4) & 15u, window));
}

template <class Head>
inline constexpr Kernels<Head> kKernels = {scan<Head>, above<Head>, pack<Head>, unpack<Head>};

}  // namespace kvstore::splitzip::scalar

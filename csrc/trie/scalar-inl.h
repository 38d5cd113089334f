// How many leading tokens two runs share, in plain C++. Included by trie/dispatch.h only.
#pragma once

#include <cstdint>

#include "common/simd.h"

namespace kvstore::scalar {
namespace {

template <class Token>
uint32_t shared(const Token* a, const uint32_t* b, uint32_t count) {
  uint32_t i = 0;
  while (i < count && a[i] == b[i]) ++i;
  return i;
}

constexpr auto prefix = shared<uint32_t>;
constexpr auto narrow_prefix = shared<uint16_t>;

}  // namespace
}  // namespace kvstore::scalar

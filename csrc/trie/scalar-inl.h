// How many leading tokens two runs share, in plain C++. Included by trie/dispatch.h only.
#pragma once

#include <cstdint>

#include "common/simd.h"

namespace kvstore::scalar {
namespace {

uint32_t prefix(const uint32_t* a, const uint32_t* b, uint32_t count) {
  uint32_t i = 0;
  while (i < count && a[i] == b[i]) ++i;
  return i;
}

uint32_t narrow_prefix(const uint16_t* a, const uint32_t* b, uint32_t count) {
  uint32_t i = 0;
  while (i < count && a[i] == b[i]) ++i;
  return i;
}

}  // namespace
}  // namespace kvstore::scalar

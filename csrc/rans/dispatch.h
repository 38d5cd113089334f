// Which twin of the rANS steps runs. Included by rans/rans.cc only.
#pragma once

#include "common/simd.h"
#include "rans/avx2-inl.h"
#include "rans/avx512-inl.h"
#include "rans/neon-inl.h"
#include "rans/scalar-inl.h"

namespace kvstore::rans {
namespace {

template <int BITS>
EncodeSteps encode_steps(Level level) {
  return KVSTORE_PICK(level, encode<BITS>);
}

template <int BITS>
DecodeSteps decode_steps(Level level) {
  return KVSTORE_PICK(level, decode<BITS>);
}

// Null where two at once are no faster than one after the other.
template <int BITS>
DecodePair decode_pair(Level level) {
#if defined(__x86_64__)
  if (level >= Level::avx512) return avx512::decode_pair<BITS>;
  if (level == Level::avx2) return avx2::decode_pair<BITS>;
#endif
  static_cast<void>(level);
  return nullptr;
}

}  // namespace
}  // namespace kvstore::rans

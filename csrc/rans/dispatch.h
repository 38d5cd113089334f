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

}  // namespace
}  // namespace kvstore::rans

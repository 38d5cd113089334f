// Which twin of XXH3's loop runs. Included by xxh3/xxh3.cc only.
#pragma once

#include "common/simd.h"
#include "xxh3/avx2-inl.h"
#include "xxh3/avx512-inl.h"
#include "xxh3/neon-inl.h"
#include "xxh3/scalar-inl.h"

namespace kvstore::xxh3 {

inline const Kernels& kernels(Level level) { return KVSTORE_PICK(level, kKernels); }

}  // namespace kvstore::xxh3

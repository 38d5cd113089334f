// Which twin of splitzip's loops runs. Included by splitzip/splitzip.cc only.
#pragma once

#include "common/simd.h"
#include "splitzip/avx2-inl.h"
#include "splitzip/avx512-inl.h"
#include "splitzip/neon-inl.h"
#include "splitzip/scalar-inl.h"

namespace kvstore::splitzip {

template <class Head>
const Kernels<Head>& kernels(Level level) {
  return KVSTORE_PICK(level, kKernels<Head>);
}

}  // namespace kvstore::splitzip

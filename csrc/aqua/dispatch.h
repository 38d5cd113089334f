// Which twin of AQUA-KV's loops runs. Included by aqua/aqua.cc only.
#pragma once

#include "aqua/avx2-inl.h"
#include "aqua/avx512-inl.h"
#include "aqua/scalar-inl.h"

namespace kvstore::aqua {

// NEON as the compiler vectorises the plain loops, which every aarch64 runs with it.
#if defined(__aarch64__)
namespace neon {
using scalar::kKernels;
}
#endif

inline const Kernels& kernels(Level level) { return KVSTORE_PICK(level, kKernels); }

}  // namespace kvstore::aqua

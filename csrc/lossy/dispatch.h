// Which twin of the loops of the lossy mode's decoder runs. Included by lossy/values.h only.
#pragma once

#include "lossy/avx2-inl.h"
#include "lossy/avx512-inl.h"
#include "lossy/scalar-inl.h"

namespace kvstore::lossy {

// NEON as the compiler vectorises the plain loops, which every aarch64 runs with it.
#if defined(__aarch64__)
namespace neon {
using scalar::kKernels;
}
#endif

inline const Kernels& kernels(Level level) { return KVSTORE_PICK(level, kKernels); }

}  // namespace kvstore::lossy

// XXH3's inner loop on aarch64, whose compilers make vectors of the plain one. Included by xxh3/dispatch.h only.
#pragma once

#if defined(__aarch64__)
#include "xxh3/scalar-inl.h"

namespace kvstore::xxh3::neon {

inline constexpr Kernels kKernels = scalar::kKernels;

}  // namespace kvstore::xxh3::neon
#endif

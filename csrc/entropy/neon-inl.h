// stub
#pragma once

#if defined(__aarch64__)
#include "entropy/scalar-inl.h"

namespace kvstore::entropy::neon {

constexpr Kernels with_those_by_hand(Kernels k) { return k; }

}  // namespace kvstore::entropy::neon
#endif

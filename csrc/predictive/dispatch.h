// Which twin of the predictive codec's loops runs. Included by the .cc files that call them.
#pragma once

#include "predictive/avx2-inl.h"
#include "predictive/avx512-inl.h"
#include "predictive/neon-inl.h"
#include "predictive/scalar-inl.h"

namespace kvstore::predict {

inline const Kernels& kernels(Level level) {
#if defined(__x86_64__)
  if (level >= Level::avx512 && !avx512::runs()) level = Level::avx2;
#elif defined(__aarch64__)
  if (level == Level::neon && neon::has_dotprod()) return neon::kDotted;
#endif
  return KVSTORE_PICK(level, kKernels);
}

}  // namespace kvstore::predict

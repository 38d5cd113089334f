// Which twin of the loops of the levels runs. Included by the .cc files that call them.
#pragma once

#include "levels/amx-inl.h"
#include "levels/avx2-inl.h"
#include "levels/avx512-inl.h"
#include "levels/neon-inl.h"
#include "levels/scalar-inl.h"

namespace kvstore::levels {

inline const Kernels& kernels(Level level) {
#if defined(KVSTORE_AMX)
  if (level == Level::amx && amx::runs()) return amx::kKernels;
#endif
#if defined(__x86_64__)
  if (level >= Level::avx512 && !predict::avx512::runs()) level = Level::avx2;
#elif defined(__aarch64__)
  if (level == Level::neon && predict::neon::has_dotprod()) return neon::kDotted;
#endif
  return KVSTORE_PICK(level, kKernels);
}

}  // namespace kvstore::levels

// Which twin of the loops of the lossy mode's encoder runs. Included by lossy/encode/rows.h only.
#pragma once

#include "lossy/encode/avx2-inl.h"
#include "lossy/encode/avx512-inl.h"
#include "lossy/encode/scalar-inl.h"

namespace kvstore::lossy {

// NEON as the compiler vectorises the plain loops, which every aarch64 runs with it.
#if defined(__aarch64__)
namespace neon {
using scalar::kEncoding;
}
#endif

inline const Encoding& encoding(Level level) { return KVSTORE_PICK(level, kEncoding); }

}  // namespace kvstore::lossy

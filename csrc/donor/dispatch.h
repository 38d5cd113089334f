// The twins of the donor codec's own loops. Included by donor/rows.cc only, which picks one.
#pragma once

#include "donor/avx512-inl.h"
#include "donor/scalar-inl.h"

namespace kvstore::donor {

KVSTORE_DONOR_TWIN(scalar, )
#if defined(__x86_64__)
KVSTORE_DONOR_TWIN(avx2, KVSTORE_AVX2)
#endif

// NEON as the compiler vectorises the plain loops, which every aarch64 runs with it.
#if defined(__aarch64__)
namespace neon {
using scalar::kKernels;
}
#endif

}  // namespace kvstore::donor

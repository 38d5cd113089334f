// The twins of the donor codec's own loops. Included by donor/rows.cc only, which picks one.
#pragma once

#include "donor/avx2-inl.h"
#include "donor/avx512-inl.h"
#include "donor/scalar-inl.h"

namespace kvstore::donor {

KVSTORE_DONOR_TWIN(scalar, )

// NEON as the compiler vectorises the plain loops, which every aarch64 runs with it.
#if defined(__aarch64__)
namespace neon {
using scalar::kKernels;
}
#endif

}  // namespace kvstore::donor

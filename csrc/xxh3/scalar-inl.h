// XXH3's inner loop in plain C++. Included by xxh3/dispatch.h and the other twins only.
#pragma once

#include "xxh3/kernels.h"

namespace kvstore::xxh3::scalar {

inline void accumulate(uint64_t* sums, const uint8_t* data, const uint8_t* secret) {
  for (size_t i = 0; i < kSums; ++i) {
    const uint64_t value = load64(data + 8 * i), key = value ^ load64(secret + 8 * i);
    sums[i ^ 1] += value;
    sums[i] += (key & 0xffffffffu) * (key >> 32);
  }
}

inline void stripes(uint64_t* sums, const uint8_t* data, size_t count) {
  for (size_t i = 0; i < count; ++i) {
    accumulate(sums, data + kStripe * i, kSecret + 8 * (i % kStripesOfBlock));
    if (i % kStripesOfBlock != kStripesOfBlock - 1) continue;
    for (size_t k = 0; k < kSums; ++k)
      sums[k] = (sums[k] ^ (sums[k] >> 47) ^ load64(kSecret + kSecretBytes - kStripe + 8 * k)) * kPrime32_1;
  }
}

inline constexpr Kernels kKernels = {stripes};

}  // namespace kvstore::xxh3::scalar

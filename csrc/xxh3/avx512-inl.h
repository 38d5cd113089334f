// XXH3's inner loop with AVX-512: a stripe at a time. Included by xxh3/dispatch.h only.
#pragma once

#if defined(__x86_64__)
#include "common/intrinsics_begin.h"
#include "common/simd.h"
#include "xxh3/kernels.h"

namespace kvstore::xxh3::avx512 {

constexpr size_t kAhead = 8 * kStripe;  // what is fetched before its use

KVSTORE_AVX512 inline void stripes(uint64_t* sums, const uint8_t* data, size_t count) {
  __m512i sum = _mm512_loadu_si512(sums);
  const __m512i prime = _mm512_set1_epi64(kPrime32_1), mix = _mm512_loadu_si512(kSecret + kSecretBytes - kStripe);
  for (size_t i = 0; i < count;) {
    const size_t end = count - i < kStripesOfBlock ? count : i + kStripesOfBlock;
    for (size_t secret = 0; i < end; ++i, secret += 8, data += kStripe) {
      __builtin_prefetch(data + kAhead);
      const __m512i value = _mm512_loadu_si512(data);
      const __m512i key = _mm512_xor_si512(value, _mm512_loadu_si512(kSecret + secret));
      const __m512i product = _mm512_mul_epu32(key, _mm512_srli_epi64(key, 32));
      sum = _mm512_add_epi64(sum, _mm512_add_epi64(product, _mm512_shuffle_epi32(value, _MM_PERM_BADC)));
    }
    if (i % kStripesOfBlock != 0) break;
    const __m512i mixed = _mm512_xor_si512(_mm512_xor_si512(sum, _mm512_srli_epi64(sum, 47)), mix);
    sum = _mm512_mullo_epi64(mixed, prime);
  }
  _mm512_storeu_si512(sums, sum);
}

inline constexpr Kernels kKernels = {stripes};

}  // namespace kvstore::xxh3::avx512

#include "common/intrinsics_end.h"
#endif

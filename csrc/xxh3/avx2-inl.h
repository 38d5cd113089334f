// XXH3's inner loop with AVX2: half a stripe at a time. Included by xxh3/dispatch.h only.
#pragma once

#if defined(__x86_64__)
#include "common/intrinsics_begin.h"
#include "common/simd.h"
#include "xxh3/kernels.h"

namespace kvstore::xxh3::avx2 {

constexpr size_t kAhead = 8 * kStripe;  // what is fetched before its use

KVSTORE_AVX2_INLINE __m256i load(const void* at) { return _mm256_loadu_si256(static_cast<const __m256i*>(at)); }

KVSTORE_AVX2_INLINE __m256i added(__m256i sum, const uint8_t* data, const uint8_t* secret) {
  const __m256i value = load(data), key = _mm256_xor_si256(value, load(secret));
  const __m256i product = _mm256_mul_epu32(key, _mm256_srli_epi64(key, 32));
  return _mm256_add_epi64(sum, _mm256_add_epi64(product, _mm256_shuffle_epi32(value, _MM_SHUFFLE(1, 0, 3, 2))));
}

KVSTORE_AVX2_INLINE __m256i mixed(__m256i sum, const uint8_t* secret) {
  const __m256i prime = _mm256_set1_epi64x(static_cast<long long>(kPrime32_1));
  const __m256i x = _mm256_xor_si256(_mm256_xor_si256(sum, _mm256_srli_epi64(sum, 47)), load(secret));
  const __m256i high = _mm256_slli_epi64(_mm256_mul_epu32(_mm256_srli_epi64(x, 32), prime), 32);
  return _mm256_add_epi64(_mm256_mul_epu32(x, prime), high);
}

KVSTORE_AVX2 inline void stripes(uint64_t* sums, const uint8_t* data, size_t count) {
  constexpr size_t kHalf = kStripe / 2;
  __m256i low = load(sums), high = load(sums + kSums / 2);
  for (size_t i = 0; i < count;) {
    const size_t end = count - i < kStripesOfBlock ? count : i + kStripesOfBlock;
    for (const uint8_t* secret = kSecret; i < end; ++i, secret += 8, data += kStripe) {
      __builtin_prefetch(data + kAhead);
      low = added(low, data, secret);
      high = added(high, data + kHalf, secret + kHalf);
    }
    if (i % kStripesOfBlock != 0) break;
    low = mixed(low, kSecret + kSecretBytes - kStripe);
    high = mixed(high, kSecret + kSecretBytes - kHalf);
  }
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(sums), low);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(sums + kSums / 2), high);
}

inline constexpr Kernels kKernels = {stripes};

}  // namespace kvstore::xxh3::avx2

#include "common/intrinsics_end.h"
#endif

// The twins of the entropy codec's loops and which of them runs. Included by entropy/entropy.cc only.
#pragma once

#include "entropy/scalar-inl.h"

namespace kvstore::entropy {

#define KVSTORE_ENTROPY_TWIN(NAME, TARGET)                                                                             \
  namespace NAME {                                                                                                     \
  TARGET inline void count(const std::uint16_t* v, std::size_t n, std::size_t d, std::uint32_t* e, std::uint32_t* s) { \
    count_body(v, n, d, e, s);                                                                                         \
  }                                                                                                                    \
  TARGET inline void symbols(const std::uint16_t* v, std::size_t n, std::size_t d, const Channels& c,                  \
                             std::uint8_t* out) {                                                                      \
    symbols_body(v, n, d, c, out);                                                                                     \
  }                                                                                                                    \
  TARGET inline void choose(const std::uint8_t* s, std::size_t n, std::size_t d, const std::uint16_t* costs,           \
                            std::uint8_t* chosen) {                                                                    \
    choose_body(s, n, d, costs, chosen);                                                                               \
  }                                                                                                                    \
  TARGET inline std::size_t restrict_(std::uint8_t* s, std::size_t n, std::size_t d, const Ranges& known) {            \
    return restrict_body(s, n, d, known);                                                                              \
  }                                                                                                                    \
  TARGET inline void low(const std::uint16_t* v, std::size_t n, std::uint8_t* out) { low_body(v, n, out); }            \
  TARGET inline void join(const std::uint8_t* s, const std::uint8_t* low, std::size_t n, std::size_t d,                \
                          const Channels& c, std::uint16_t* v) {                                                       \
    join_body(s, low, n, d, c, v);                                                                                     \
  }                                                                                                                    \
  TARGET inline std::uint32_t any(const std::uint8_t* v, std::size_t n) { return words::any_of(v, n); }                \
  TARGET inline void words(Dtype dtype, const std::uint8_t* v, std::size_t n, std::uint16_t* w) {                      \
    words_body(dtype, v, n, w);                                                                                        \
  }                                                                                                                    \
  TARGET inline void keep(Dtype dtype, std::size_t lower, const std::uint8_t* v, std::size_t n, std::uint8_t* kept) {  \
    keep_body(dtype, lower, v, n, kept);                                                                               \
  }                                                                                                                    \
  TARGET inline void merge(Dtype dtype, std::size_t lower, const std::uint16_t* w, const std::uint8_t* kept,           \
                           std::size_t n, std::uint8_t* v) {                                                           \
    merge_body(dtype, lower, w, kept, n, v);                                                                           \
  }                                                                                                                    \
  inline constexpr Kernels kKernels = {count, symbols, choose, restrict_, low, join, any, words, keep, merge};         \
  }

KVSTORE_ENTROPY_TWIN(scalar, )
#if defined(__x86_64__)
KVSTORE_ENTROPY_TWIN(avx2, KVSTORE_AVX2)
KVSTORE_ENTROPY_TWIN(avx512, KVSTORE_AVX512_WIDE)
#endif

// NEON as the compiler vectorises the plain loops, which every aarch64 runs with it.
#if defined(__aarch64__)
namespace neon {
using scalar::kKernels;
}
#endif

inline const Kernels& kernels(Level level) { return KVSTORE_PICK(level, kKernels); }

}  // namespace kvstore::entropy

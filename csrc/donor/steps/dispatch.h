// The twins of the step mode's loops and which of them runs. Included by donor/steps/walk.cc only.
#pragma once

#include "donor/steps/scalar-inl.h"

namespace kvstore::donor::steps {

#define KVSTORE_STEPS_TWIN(NAME, TARGET)                                                                               \
  namespace NAME {                                                                                                     \
  TARGET inline void add(const std::uint16_t* mu, std::size_t width, float* totals) { add_body(mu, width, totals); }   \
  TARGET inline void tables(const std::uint8_t* scales, std::size_t width, int shift, std::uint8_t* to) {              \
    tables_body(scales, width, shift, to);                                                                             \
  }                                                                                                                    \
  TARGET inline std::int64_t measure(const std::uint8_t* symbols, std::size_t width, std::uint8_t* largest) {          \
    return measure_body(symbols, width, largest);                                                                      \
  }                                                                                                                    \
  TARGET inline void restore(const std::uint16_t* mu, const std::int8_t* numbers, const float* steps,                  \
                             std::size_t width, std::uint16_t* to) {                                                   \
    restore_body(mu, numbers, steps, width, to);                                                                       \
  }                                                                                                                    \
  TARGET inline void quantise(const std::uint16_t* x, const std::uint16_t* mu, const float* steps,                     \
                              const float* inverse, std::size_t width, std::int8_t* numbers) {                         \
    quantise_body(x, mu, steps, inverse, width, numbers);                                                              \
  }                                                                                                                    \
  TARGET inline void errors(const std::uint16_t* x, const std::uint16_t* y, std::size_t width, double* squares,        \
                            std::uint32_t* largest) {                                                                  \
    errors_body(x, y, width, squares, largest);                                                                        \
  }                                                                                                                    \
  inline constexpr Kernels kKernels = {add, tables, measure, restore, quantise, errors};                               \
  }

KVSTORE_STEPS_TWIN(scalar, )
#if defined(__x86_64__)
KVSTORE_STEPS_TWIN(avx2, KVSTORE_AVX2)
KVSTORE_STEPS_TWIN(avx512, KVSTORE_AVX512)
#endif

// NEON as the compiler vectorises the plain loops, which every aarch64 runs with it.
#if defined(__aarch64__)
namespace neon {
using scalar::kKernels;
}
#endif

inline const Kernels& kernels(Level level) { return KVSTORE_PICK(level, kKernels); }

}  // namespace kvstore::donor::steps

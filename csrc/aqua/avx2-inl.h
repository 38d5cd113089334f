// AVX2 twins of the loops of AQUA-KV, as the compiler vectorises them. Included by aqua/dispatch.h only.
#pragma once

#if defined(__x86_64__)
#include "aqua/scalar-inl.h"

namespace kvstore::aqua::avx2 {

KVSTORE_AVX2 inline void predict(const float* x, std::size_t rows, std::size_t inputs, const float* weight,
                                 std::size_t width, float* out) {
  predict_body(x, rows, inputs, weight, width, out);
}
KVSTORE_AVX2 inline void hadamard(float* tile, std::size_t columns, std::size_t group, float factor) {
  hadamard_body(tile, columns, group, factor);
}
KVSTORE_AVX2 inline void nearest(const float* tile, std::size_t columns, const float* points, std::size_t count,
                                 std::uint8_t* out) {
  nearest_body(tile, columns, points, count, out);
}
KVSTORE_AVX2 inline void place(const std::uint8_t* numbers, std::size_t columns, const float* points, float* tile) {
  place_body(numbers, columns, points, tile);
}

inline constexpr Kernels kKernels = {predict, hadamard, nearest, place};

}  // namespace kvstore::aqua::avx2
#endif

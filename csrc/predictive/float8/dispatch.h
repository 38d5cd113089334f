// The twins of float8's loops and which of them runs. Included by float8.cc only.
#pragma once

#include "predictive/float8/scalar-inl.h"

namespace kvstore::predict::float8 {

#define KVSTORE_FLOAT8_FORM(TARGET, FORM)                                                                              \
  struct For##FORM {                                                                                                   \
    TARGET static void classes(const Part& p, const std::uint16_t* mu, int offset, std::uint8_t* c) {                  \
      classes_body<FORM>(p, mu, offset, c);                                                                            \
    }                                                                                                                  \
    TARGET static std::uint32_t split(const Part& p, const std::uint16_t* x, const std::uint16_t* mu, int offset,      \
                                      std::uint8_t* s, std::uint8_t* c, BitsOut&, std::uint16_t*& escapes) {           \
      return split_body<FORM>(p, x, mu, offset, s, c, escapes);                                                        \
    }                                                                                                                  \
    TARGET static bool join(const Part& p, const std::uint8_t* s, const std::uint16_t* mu, int offset, BitsIn&,        \
                            EscapesIn& escapes, std::uint16_t* x, std::uint32_t* distances) {                          \
      return join_body<FORM>(p, s, mu, offset, escapes, x, distances);                                                 \
    }                                                                                                                  \
    TARGET static void make(const std::uint8_t* v, std::size_t n, std::uint16_t* w) { make_body<FORM>(v, n, w); }      \
    TARGET static void merge(const std::uint16_t* w, std::size_t n, std::uint8_t* v) { merge_body<FORM>(w, n, v); }    \
  };                                                                                                                   \
  inline constexpr Loops k##FORM = {For##FORM::classes, For##FORM::split, For##FORM::join, For##FORM::make,            \
                                    For##FORM::merge};

#define KVSTORE_FLOAT8_TWIN(NAME, TARGET) \
  namespace NAME {                        \
  KVSTORE_FLOAT8_FORM(TARGET, E5M2)       \
  KVSTORE_FLOAT8_FORM(TARGET, E4M3)       \
  }

KVSTORE_FLOAT8_TWIN(scalar, )
#if defined(__x86_64__)
KVSTORE_FLOAT8_TWIN(avx2, KVSTORE_AVX2)
KVSTORE_FLOAT8_TWIN(avx512, KVSTORE_AVX512_WIDE)
#endif

// NEON as the compiler vectorises the plain loops, which every aarch64 runs with it.
#if defined(__aarch64__)
namespace neon {
using scalar::kE4M3;
using scalar::kE5M2;
}
#endif

inline const Loops& loops_of_e5m2(Level level) { return KVSTORE_PICK(level, kE5M2); }
inline const Loops& loops_of_e4m3(Level level) { return KVSTORE_PICK(level, kE4M3); }

}  // namespace kvstore::predict::float8

// What the vector kernels of all parts share: the sets of instructions that a function can be compiled for, and the
// choice of the one that runs. Each part names its files alike: scalar-inl.h holds the bodies in plain C++,
// avx2-inl.h and avx512-inl.h what is written by hand, and dispatch.h makes a table of functions for every set. An
// *-inl.h file is included by its dispatch.h only.
#pragma once

#include "common/cpu.h"

#define KVSTORE_INLINE inline __attribute__((always_inline))

#if defined(__x86_64__)
#define KVSTORE_AVX2 __attribute__((target("avx2")))
#define KVSTORE_AVX2_POPCNT __attribute__((target("avx2,popcnt")))
#define KVSTORE_AVX512 __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl")))
#define KVSTORE_AVX512_POPCNT __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,popcnt")))
#define KVSTORE_VNNI __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,popcnt,bmi")))
#define KVSTORE_AVX512_WIDE __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,prefer-vector-width=512")))
#define KVSTORE_AVX2_INLINE KVSTORE_AVX2 KVSTORE_INLINE
#define KVSTORE_AVX512_INLINE KVSTORE_AVX512 KVSTORE_INLINE
#define KVSTORE_VNNI_INLINE KVSTORE_VNNI KVSTORE_INLINE

// The object NAME of the namespace scalar, avx2 or avx512.
#define KVSTORE_PICK(LEVEL, NAME) \
  ((LEVEL) == Level::avx512 ? avx512::NAME : (LEVEL) == Level::avx2 ? avx2::NAME : scalar::NAME)
#else
#define KVSTORE_PICK(LEVEL, NAME) (static_cast<void>(LEVEL), scalar::NAME)
#endif

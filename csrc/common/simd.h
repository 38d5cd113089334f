// What the vector kernels of all parts share: the sets of instructions that a function can be compiled for, and the
// choice of the one that runs. Each part names its files alike: scalar-inl.h holds the bodies in plain C++,
// avx2-inl.h, avx512-inl.h and neon-inl.h what is written by hand, and dispatch.h makes a table of functions for every
// set. An *-inl.h file is included by its dispatch.h only.
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

// Tiles of AMX, where the compiler knows them and the system gives processes their registers.
#if defined(__linux__) && (defined(__clang__) || __GNUC__ >= 11)
#define KVSTORE_AMX \
  __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,popcnt,bmi,amx-tile,amx-int8")))
#define KVSTORE_AMX_INLINE KVSTORE_AMX KVSTORE_INLINE
#endif

// The object NAME of the namespace scalar, avx2 or avx512, which is also what amx has where nothing is its own.
#define KVSTORE_PICK(LEVEL, NAME) \
  ((LEVEL) >= Level::avx512 ? avx512::NAME : (LEVEL) == Level::avx2 ? avx2::NAME : scalar::NAME)
#elif defined(__aarch64__)
// NEON is a part of every aarch64, so that nothing needs a target but what goes beyond it.
#if defined(__clang__)
#define KVSTORE_DOTPROD __attribute__((target("dotprod")))
#else
#define KVSTORE_DOTPROD __attribute__((target("arch=armv8.2-a+dotprod")))  // as arm_neon.h has it
#endif
#define KVSTORE_DOTPROD_INLINE KVSTORE_DOTPROD KVSTORE_INLINE

// The object NAME of the namespace scalar or neon.
#define KVSTORE_PICK(LEVEL, NAME) ((LEVEL) == Level::neon ? neon::NAME : scalar::NAME)
#else
#define KVSTORE_PICK(LEVEL, NAME) ((LEVEL) == Level::scalar ? scalar::NAME : scalar::NAME)
#endif

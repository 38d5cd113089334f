#include "common/cpu.h"

#include <cstdlib>
#include <cstring>
#include <initializer_list>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace kvstore {

#if defined(__x86_64__)
// Whether there are tiles of 8-bit integers, and the operating system saves them (Linux from 5.16 on).
static bool has_amx() {
  unsigned a, b, c, d;
  constexpr unsigned kTiles = 1u << 24 | 1u << 25, kOsSaves = 1u << 27, kTileState = 3u << 17;
  if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & kOsSaves)) return false;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & kTiles) != kTiles) return false;
  __asm__ volatile("xgetbv" : "=a"(a), "=d"(d) : "c"(0));
  return (a & kTileState) == kTileState;
}
#endif

Level machine_level() {
#if defined(__x86_64__) || defined(__i386__)
  // The compiler's run-time support also asks the operating system (XGETBV) whether it saves the registers.
  static const Level best = [] {
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
#if defined(__x86_64__)
      if (has_amx()) return Level::amx;
#endif
      return Level::avx512;
    }
    return __builtin_cpu_supports("avx2") ? Level::avx2 : Level::scalar;
  }();
  return best;
#elif defined(__aarch64__)
  return Level::neon;
#else
  return Level::scalar;
#endif
}

bool machine_has(Level level) {
#if defined(__aarch64__)
  return level == Level::scalar || level == Level::neon;
#else
  return level <= machine_level();  // other families stand above all of these
#endif
}

Level level() {
  Level named;
  const char* const text = std::getenv("KVSTORE_CPU");
  return text && level_named(text, &named) && machine_has(named) ? named : machine_level();
}

const char* level_name(Level level) {
  switch (level) {
    case Level::neon: return "neon";
    case Level::amx: return "amx";
    case Level::avx512: return "avx512";
    case Level::avx2: return "avx2";
    default: return "scalar";
  }
}

bool level_named(const char* name, Level* level) {
  for (const Level known : {Level::scalar, Level::avx2, Level::avx512, Level::amx, Level::neon}) {
    if (std::strcmp(name, level_name(known)) == 0) {
      *level = known;
      return true;
    }
  }
  return false;
}

}  // namespace kvstore

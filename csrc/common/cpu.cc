#include "common/cpu.h"

#include <cstdlib>
#include <cstring>
#include <initializer_list>

namespace kvstore {

Level machine_level() {
#if defined(__x86_64__) || defined(__i386__)
  // The compiler's run-time support also asks the operating system (XGETBV) whether it saves the registers.
  static const Level best = [] {
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
      return Level::avx512;
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
    case Level::avx512: return "avx512";
    case Level::avx2: return "avx2";
    default: return "scalar";
  }
}

bool level_named(const char* name, Level* level) {
  for (const Level known : {Level::scalar, Level::avx2, Level::avx512, Level::neon}) {
    if (std::strcmp(name, level_name(known)) == 0) {
      *level = known;
      return true;
    }
  }
  return false;
}

}  // namespace kvstore

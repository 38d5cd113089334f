#include "cpu.h"

#include <cstdlib>
#include <cstring>

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
#else
  return Level::scalar;
#endif
}

Level level() {
  Level cap = Level::avx512;
  if (const char* text = std::getenv("KVSTORE_CPU")) {
    if (std::strcmp(text, "scalar") == 0) cap = Level::scalar;
    if (std::strcmp(text, "avx2") == 0) cap = Level::avx2;
  }
  const Level best = machine_level();
  return best < cap ? best : cap;
}

const char* level_name(Level level) {
  switch (level) {
    case Level::avx512: return "avx512";
    case Level::avx2: return "avx2";
    default: return "scalar";
  }
}

}  // namespace kvstore

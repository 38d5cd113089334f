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
#else
  return Level::scalar;
#endif
}

Level level() {
  Level cap = Level::avx512;
  if (const char* text = std::getenv("KVSTORE_CPU")) level_named(text, &cap);
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

bool level_named(const char* name, Level* level) {
  for (const Level known : {Level::scalar, Level::avx2, Level::avx512}) {
    if (std::strcmp(name, level_name(known)) == 0) {
      *level = known;
      return true;
    }
  }
  return false;
}

}  // namespace kvstore

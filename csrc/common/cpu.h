// CPU detection: the one place that decides which twin of a function runs.
#pragma once

namespace kvstore {

// avx512 means F, BW, DQ and VL together (x86-64-v4); kernels that need more ask for it themselves.
enum class Level : int { scalar = 0, avx2 = 1, avx512 = 2 };

// The best level that this machine has, capped by the environment variable KVSTORE_CPU
// (scalar | avx2 | avx512; anything else is ignored). The variable never raises the level, so a
// capped process cannot be made to execute an instruction that it lacks. Read at every call: cheap,
// but not for inner loops; take it once per object or per large call.
Level level();

// What the machine has, whatever the environment says.
Level machine_level();

const char* level_name(Level level);

// The level of that name; false if there is none.
bool level_named(const char* name, Level* level);

}  // namespace kvstore

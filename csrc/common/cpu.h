// CPU detection: the one place that decides which twin of a function runs.
#pragma once

namespace kvstore {

// Levels are ordered within a family of processors: scalar < avx2 < avx512 < amx on x86-64, scalar < neon on aarch64.
// Ask machine_has() rather than compare. avx512 means F, BW, DQ and VL together (x86-64-v4), amx tiles of 8-bit
// integers besides, neon what every aarch64 has; kernels that need more ask for it themselves.
enum class Level : int { scalar = 0, avx2 = 1, avx512 = 2, amx = 3, neon = 4 };

// The best level that this machine has, or the one that the environment variable KVSTORE_CPU names
// (scalar | avx2 | avx512 | amx | neon) if the machine has it; anything else is ignored. The variable never raises the
// level, so a capped process cannot be made to execute an instruction that it lacks. Read at every call: cheap,
// but not for inner loops; take it once per object or per large call.
Level level();

// What the machine has, whatever the environment says.
Level machine_level();

// Whether this machine runs a level: of its own family, and not above its best.
bool machine_has(Level level);

const char* level_name(Level level);

// The level of that name; false if there is none.
bool level_named(const char* name, Level* level);

}  // namespace kvstore

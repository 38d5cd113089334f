// Which record stands before each, by the entries of a catalog.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kvstore {

constexpr size_t kEntryBytes = 80;  // of an entry before its tokens: kvstore/tiers/disk/entry.py

// For each of `count` entries, the number of the last of them whose tag is its parent's; if there is none, the number
// that it names itself; 0 if it is the first block of a sequence. seed: of a table of tags, which anybody may have
// chosen.
void find_parents(const uint8_t* entries, size_t count, uint64_t seed, uint64_t* parents);

}  // namespace kvstore

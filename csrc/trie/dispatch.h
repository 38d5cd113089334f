// Which twin of common_prefix and of common_narrow_prefix runs. Included by trie/read.cc only.
#pragma once

#include "trie/avx2-inl.h"
#include "trie/avx512-inl.h"
#include "trie/neon-inl.h"
#include "trie/scalar-inl.h"
#include "trie/trie.h"

namespace kvstore {

PrefixFn common_prefix(Level level) { return KVSTORE_PICK(level, prefix); }
NarrowPrefixFn common_narrow_prefix(Level level) { return KVSTORE_PICK(level, narrow_prefix); }

}  // namespace kvstore

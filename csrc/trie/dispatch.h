// Which twin of common_prefix runs. Included by trie/read.cc only.
#pragma once

#include "trie/avx2-inl.h"
#include "trie/avx512-inl.h"
#include "trie/scalar-inl.h"
#include "trie/trie.h"

namespace kvstore {

PrefixFn common_prefix(Level level) { return KVSTORE_PICK(level, prefix); }

}  // namespace kvstore

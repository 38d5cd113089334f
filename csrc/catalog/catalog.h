// Reads all entries of a catalog at once, from the bytes of its LMDB file (layout 0.9, 64 bits, little-endian).
//
// The file is believed only if everything about it is right: both meta pages, every page that is reachable (once, with
// its own number, no unknown flags), order and bounds of all keys, the counters of every tree, and that free pages and
// used ones make up the file. Of entries and of places, lengths and checksums are right, too. Whatever else may be in a
// sound file (duplicate keys, pages that the file lacks) is refused like damage; the caller then looks closer.
//
// Any bytes may be given: nothing is read beyond them, and memory is in proportion to them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "common/huge_pages.h"

namespace kvstore {

struct CatalogRead {
  struct Value {
    uint64_t at;  // offset in the file
    uint32_t size, head_and_tokens;
  };
  std::string problem;  // why the file was refused; empty if it was not
  uint64_t commit = 0;
  HugeVector<Value> entries;  // by rising record number
  uint64_t tokens = 0;         // of all entries
};

using CatalogEntries = decltype(CatalogRead::entries);

// threads: how many may walk a large tree at once.
CatalogRead read_catalog(const uint8_t* file, size_t size, unsigned threads);

// Copies what stands before the tokens of each entry (80 bytes), and moves the tokens to the front of the file's bytes,
// in the order in which they stand there: they take no memory beside the file. Nothing else of the file is left.
// token_at: for each entry, where its tokens begin then, counted in tokens.
void gather(uint8_t* file, const CatalogEntries& entries, uint8_t* heads, uint64_t* token_at);

}  // namespace kvstore

// Content index: which stored blocks hold the same tokens as a new sequence, under any prefix.
//
// A stored block has a record number and a *space* (a small integer; blocks of different spaces never match). What
// stands for a block are the windows that winnowing chooses (content/windows.h), each a *posting* {hash, slot, offset}
// in one table. A query's own windows are looked up; each posting found is verified token by token and extended to the
// maximal match inside its block. A match that begins at the first token of its block goes on in the block's parent.
//
// The tokens are read in a trie that has the same records, or kept here (content/cells.h) where there is none. Nothing
// here points into the trie: a block knows its record number, which is never used again, and its tokens are copied
// under the trie's lock whenever they are wanted (Trie::record_tokens). So nodes may be split, moved and dropped at any
// time; a record that has left the trie already is not found. What is erased there is in no place here: a posting is 32
// bits of a hash with a secret seed.
//
// Blocks whose tokens the trie has may be inserted without them. They *wait*, in neighbouring slots, without postings:
// these are made when donors are first looked for, a run of blocks at a time, so that others get the lock in between.
//
// A block that leaves is forgotten at once; its postings stay until a hand that walks through the table comes by, a
// little at every removal. Until then they count for nothing.
//
// Bounds: at most `postings` (P) postings for one hash, those of the newest records (and last offsets) stay; one that
// was dropped does not come back when others leave. A query compares at most 256 tokens per token of its own
// (content/find.cc).
//
// Memory at blocks of 64 random tokens: 4.9 postings of 10 B and 24 + 4 B a block, in tables that are 70 to 80 % full:
// 90 to 102 B; without a trie 4 B a token and 8 B a block more.
//
// Thread-safe: lock_ guards every field that is not const; readers share, writers exclude. The trie's lock is taken
// below it; the trie knows nothing of this index. Nothing recurses. Invalid arguments throw std::invalid_argument
// before anything changes.
#pragma once

#include <cstdint>
#include <vector>

#include "common/fair_lock.h"
#include "content/cells.h"
#include "content/table.h"
#include "content/windows.h"
#include "trie/memory.h"
#include "trie/trie.h"

namespace kvstore {

struct ContentSpans {  // columns of equal length, rising in start
  std::vector<uint32_t> start, length;
  std::vector<uint64_t> record;
  std::vector<uint32_t> donor_start, run;
};

struct ContentStats {
  uint64_t records, tokens, entries, waiting, bytes;
};

// Columns of `count` blocks for insert_many(); `tokens` holds sum(counts) tokens, block after block. nullptr: the trie
// has them, and they are read when donors are first looked for.
struct ContentRows {
  size_t count, token_count;
  const uint32_t *spaces, *counts, *tokens;
  const uint64_t *records, *parents;
};

class ContentIndex {
 public:
  static constexpr uint32_t kMaxBlock = 65536;           // tokens, as the trie's
  static constexpr size_t kMaxQuery = size_t{1} << 26;  // tokens
  static constexpr uint32_t kMaxContext = 4096;          // tokens before `first` that a query reads

  // window 2..256, winnow 1..256, postings 1..255, min_length 1..65536. `trie` outlives the index (the binding keeps it
  // alive); nullptr: none.
  ContentIndex(uint32_t window, uint32_t winnow, uint32_t postings, uint32_t min_length, uint64_t seed,
               const Trie* trie = nullptr);
  ContentIndex(const ContentIndex&) = delete;
  ContentIndex& operator=(const ContentIndex&) = delete;

  bool insert(uint32_t space, uint64_t record, uint64_t parent, const uint32_t* tokens, size_t count);
  size_t insert_many(const ContentRows& rows);
  bool remove(uint64_t record);

  bool contains(uint64_t record) const;
  size_t size() const;
  bool tokens(uint64_t record, std::vector<uint32_t>* tokens) const;  // false: unknown
  ContentStats stats() const;

  ContentSpans find(uint32_t space, const uint32_t* tokens, size_t count, size_t first, const uint64_t* exclude,
                    size_t excluded);

 private:
  struct Block {
    uint64_t record, parent;  // record 0: gone; with no postings left a free slot, `parent` names the next
    uint32_t space;
    uint16_t last, posted;    // offset of the last token; postings in the table
    uint32_t count() const { return uint32_t{last} + 1; }
  };
  static_assert(sizeof(Block) == 24, "a block takes little");
  struct Chosen {
    uint32_t hash, offset;
  };
  using Slots = HashTable<uint32_t>;
  class Search;

  static uint32_t posting_hash(const Posting& posting) { return posting.hash(); }
  uint32_t slot_of(uint64_t record) const;
  bool copy(uint32_t slot, std::vector<uint32_t>* tokens) const;
  void check(const ContentRows& rows) const;
  void make_room(const ContentRows& rows, size_t kept, size_t fresh);
  void enter(uint32_t slot, const ContentRows& rows, size_t i);
  size_t insert_waiting(const ContentRows& rows);
  void post(uint32_t hash, uint32_t slot, uint32_t offset);
  void post_all(const std::vector<Chosen>& chosen, size_t begin, size_t end, uint32_t slot);
  void post_waiting();
  bool waits(uint32_t slot) const { return slot >= waiting_ && slot < waiting_end_; }
  uint32_t take_slot();
  uint32_t new_slot();
  void free_slot(uint32_t slot);
  void lose_posting(uint32_t slot);
  void sweep();
  void rebuild_if_half_free();
  void rebuild();

  const Windows windows_;
  const uint32_t postings_, min_length_;
  const Trie* const trie_;

  TokenCells cells_;  // empty with a trie
  Buffer<Block> blocks_;  // 0: nobody's
  HashTable<Posting> table_;
  Slots records_;  // by a hash of the record number
  uint32_t free_slot_ = 0;
  uint32_t waiting_ = 0, waiting_end_ = 0;  // blocks in slots [waiting_, waiting_end_) have no postings yet
  size_t hand_ = 0;  // place in the table
  uint64_t live_records_ = 0, live_tokens_ = 0, live_entries_ = 0, dead_entries_ = 0;

  mutable FairLock lock_;
};

}  // namespace kvstore

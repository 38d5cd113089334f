// Content index: which stored blocks hold the same tokens as a new sequence, under any prefix.
//
// A stored block has a record number and a *space* (a small integer; blocks of different spaces never match). What
// stands for a block are the windows that winnowing chooses (content/windows.h), each a *posting* {hash, slot, offset}
// in one table. A query's own windows are looked up; each posting found is verified token by token and extended to the
// maximal match inside its block. A match that begins at the first token of its block goes on in the block's parent.
//
// Bounds: at most `postings` (P) postings for one hash, those of the newest records (and last offsets) stay; one that
// was dropped does not come back when others leave. A query compares at most 256 tokens per token of its own
// (content/find.cc).
//
// Memory at blocks of 64 tokens: 4 B a token for the tokens, 5 postings of 12 B and 32 + 8 B a block, each in tables
// that are 38 to 75 % full: 6 to 8 B a token in all.
//
// Thread-safe: readers share, writers exclude. Nothing recurses. Invalid arguments throw std::invalid_argument before
// anything changes.
#pragma once

#include <cstdint>
#include <vector>

#include "common/fair_lock.h"
#include "content/windows.h"
#include "trie/memory.h"

namespace kvstore {

// Open addressing, 12 bytes a posting.
class PostingTable {
 public:
  struct Posting {
    uint32_t hash, slot, offset;  // slot 0: empty
  };

  size_t home(uint32_t hash) const { return hash & mask_; }
  size_t next(size_t at) const { return (at + 1) & mask_; }
  bool empty() const { return count_ == 0; }
  size_t count() const { return count_; }
  size_t bytes() const { return postings_.bytes(); }
  const Posting& at(size_t i) const { return postings_[i]; }
  Posting& at(size_t i) { return postings_[i]; }
  void prefetch(uint32_t hash) const { __builtin_prefetch(postings_.data() + home(hash)); }

  void reserve(size_t more);  // so that put() cannot fail
  void put(size_t at, Posting posting);               // into an empty place
  void erase(size_t hole);
  void renumber(const std::vector<uint32_t>& moved);  // slot -> slot, 0: is gone; gives memory back

 private:
  void rehash(size_t size, const std::vector<uint32_t>* moved);

  Buffer<Posting> postings_;
  size_t mask_ = 0;
  size_t count_ = 0;
};

struct ContentSpans {  // columns of equal length, rising in start
  std::vector<uint32_t> start, length;
  std::vector<uint64_t> record;
  std::vector<uint32_t> donor_start, run;
};

struct ContentStats {
  uint64_t records, tokens, entries, bytes;
};

// Columns of `count` blocks for insert_many(); `tokens` holds sum(counts) tokens, block after block.
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

  // window 2..256, winnow 1..256, postings 1..255, min_length 1..65536.
  ContentIndex(uint32_t window, uint32_t winnow, uint32_t postings, uint32_t min_length, uint64_t seed);
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
                    size_t excluded) const;

 private:
  struct Block {
    uint64_t cell;  // first token in the arena
    uint64_t record, parent;
    uint32_t space, count;  // count 0: a free slot, `cell` names the next
  };
  class Search;

  uint32_t slot_of(uint64_t record) const;
  void check(const ContentRows& rows) const;
  void post(uint32_t hash, uint32_t slot, uint32_t offset);
  uint64_t take_cell(const uint32_t* tokens, uint32_t count);
  void free_cell(uint64_t cell, uint32_t count);
  uint32_t take_slot();
  void rebuild_if_half_free();
  void rebuild();

  const Windows windows_;
  const uint32_t postings_, min_length_;

  Buffer<uint32_t> arena_;
  Buffer<Block> blocks_;  // 0: nobody's
  PostingTable table_;
  ChildTable records_;             // hash of a record number -> slot
  std::vector<uint64_t> cells_;    // per count: 1 + first free cell of that size; the next is in its first two tokens
  uint32_t free_slot_ = 0;
  uint64_t live_records_ = 0, live_tokens_ = 0;

  mutable FairLock lock_;
};

}  // namespace kvstore

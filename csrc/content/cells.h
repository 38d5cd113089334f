// The tokens of blocks, where no trie has them: one arena, in which the cells of blocks that left are used again.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include "trie/memory.h"

namespace kvstore {

class TokenCells {
 public:
  // Makes room for `blocks` more of `tokens` in all, the longest of `widest`, in slots below `slots`, so that put()
  // cannot fail.
  void reserve(size_t blocks, size_t tokens, size_t widest, size_t slots) {
    const bool recycles = blocks == 1 && widest < free_.size() && free_[widest];
    if (!recycles) arena_.reserve(arena_.size() + tokens);
    if (widest >= free_.size()) free_.resize(widest + 1);
    if (slots > first_.size()) first_.append_zeros(slots - first_.size());
  }
  void put(uint32_t slot, const uint32_t* tokens, uint32_t count) {
    if (const uint64_t cell = free_[count]) {
      first_[slot] = cell - 1;
      std::memcpy(&free_[count], arena_.data() + first_[slot], sizeof(uint64_t));
      std::copy_n(tokens, count, arena_.data() + first_[slot]);
    } else {
      first_[slot] = arena_.size();
      arena_.append(tokens, count);
    }
  }
  // The tokens are overwritten. count >= 2: a free cell holds the place of the next.
  void release(uint32_t slot, uint32_t count) {
    std::fill_n(arena_.data() + first_[slot], count, 0u);
    std::memcpy(arena_.data() + first_[slot], &free_[count], sizeof(uint64_t));
    free_[count] = first_[slot] + 1;
  }
  const uint32_t* at(uint32_t slot) const { return arena_.data() + first_[slot]; }
  size_t tokens() const { return arena_.size(); }
  size_t widest() const { return free_.empty() ? 0 : free_.size() - 1; }  // of all blocks that ever came
  size_t bytes() const { return arena_.bytes() + first_.bytes() + free_.capacity() * sizeof(free_[0]); }
  void swap(TokenCells& other) {
    arena_.swap(other.arena_);
    first_.swap(other.first_);
    free_.swap(other.free_);
  }

 private:
  Buffer<uint32_t> arena_;
  Buffer<uint64_t> first_;      // by slot: first token in the arena
  std::vector<uint64_t> free_;  // by count: 1 + first free cell of that size; the next is in its first two tokens
};

}  // namespace kvstore

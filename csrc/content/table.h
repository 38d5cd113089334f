// The hash tables of the content index: open addressing in the order of 32-bit hashes.
//
// An entry's home is hash * size / 2^32. So a table may have any size: it grows by an eighth and stays 70 to 80 % full,
// and a new size keeps the order of what is in it, so that memory is read and written from one end to the other.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <stdexcept>

#include "trie/memory.h"

namespace kvstore {

// An Entry is a plain value that is true unless all of it is zero. `hash_of` gives the hash of one; it is the same for
// all calls of a table.
template <class Entry>
class HashTable {
 public:
  size_t home(uint32_t hash) const { return static_cast<size_t>(uint64_t{hash} * entries_.size() >> 32); }
  size_t next(size_t at) const { return at + 1 == entries_.size() ? 0 : at + 1; }
  bool empty() const { return count_ == 0; }
  size_t size() const { return entries_.size(); }
  size_t bytes() const { return entries_.bytes(); }
  const Entry& at(size_t i) const { return entries_[i]; }
  Entry& at(size_t i) { return entries_[i]; }
  void prefetch(uint32_t hash) const { __builtin_prefetch(entries_.data() + home(hash)); }

  bool has_room(size_t more) const { return entries_.size() && (count_ + more) * 5 <= entries_.size() * 4; }
  // Makes room for `more` further entries, so that put() and insert() cannot fail.
  template <class HashOf>
  void reserve(size_t more, const HashOf& hash_of) {
    if (has_room(more)) return;
    const size_t need = count_ + more, size = entries_.size();
    const size_t want = std::max({size_t{64}, need + need / 4 + 1, size + size / 8});
    if (want > size_t{1} << 32) throw std::length_error("the content index is full");  // hashes have 32 bits
    HashTable fresh;
    fresh.entries_.append_zeros(want);
    for (size_t i = 0; i < size; ++i)
      if (entries_[i]) fresh.insert(hash_of(entries_[i]), entries_[i]);
    swap(fresh);
  }
  void insert(uint32_t hash, Entry entry) {
    size_t i = home(hash);
    while (entries_[i]) i = next(i);
    put(i, entry);
  }
  void put(size_t at, Entry entry) {  // into an empty place
    entries_[at] = entry;
    ++count_;
  }
  template <class HashOf>
  void erase(size_t hole, const HashOf& hash_of) {  // backward shift: no tombstones to slow later probes
    for (size_t i = next(hole); entries_[i]; i = next(i)) {
      if (steps(home(hash_of(entries_[i])), i) < steps(hole, i)) continue;
      entries_[hole] = entries_[i];
      hole = i;
    }
    entries_[hole] = Entry{};
    --count_;
  }
  void swap(HashTable& other) {
    entries_.swap(other.entries_);
    std::swap(count_, other.count_);
  }

 private:
  size_t steps(size_t from, size_t to) const { return to >= from ? to - from : to + entries_.size() - from; }

  Buffer<Entry> entries_;
  size_t count_ = 0;
};

// The block in `slot` has at `offset` a window with this hash; 10 bytes. Slot 0: empty.
class Posting {
 public:
  Posting() = default;
  Posting(uint32_t hash, uint32_t slot, uint32_t offset)
      : words_{low(hash), low(hash >> 16), low(slot), low(slot >> 16), low(offset)} {}
  uint32_t hash() const { return words_[0] | uint32_t{words_[1]} << 16; }
  uint32_t slot() const { return words_[2] | uint32_t{words_[3]} << 16; }
  uint32_t offset() const { return words_[4]; }
  explicit operator bool() const { return words_[2] | words_[3]; }

 private:
  static uint16_t low(uint32_t value) { return static_cast<uint16_t>(value); }

  uint16_t words_[5];
};

}  // namespace kvstore

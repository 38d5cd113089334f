#include "catalog/parents.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <vector>

namespace kvstore {

namespace {

constexpr size_t kRecord = 8, kParent = 16, kTag = 24, kParentTag = 32, kStart = 52;  // where an entry has them
constexpr size_t kAhead = 16;  // entries whose cells are asked for before they are needed
constexpr uint32_t kNone = UINT32_MAX;

template <class T>
T load(const uint8_t* from) {
  T value;
  std::memcpy(&value, from, sizeof(T));
  return value;
}

// Entries by tag: open addressing, at most half full. A cell is the number of an entry, plus 1; the tag stands there.
class Tags {
 public:
  Tags(const uint8_t* entries, size_t count, uint64_t seed) : entries_(entries), seed_(seed) {
    size_t size = 64;
    while (size < 2 * count) {
      size *= 2;
      --shift_;
    }
    cells_.assign(size, Cell{0, 0});
  }

  // The last entry of a tag takes the place of those before it; returns whether there are such.
  bool add(uint32_t entry) {
    const uint64_t tag = load<uint64_t>(entries_ + entry * kEntryBytes + kTag);
    Cell& cell = cells_[place(tag)];
    const bool known = cell.entry;
    cell = Cell{tag, entry + 1};
    return known;
  }
  uint32_t find(uint64_t tag) const { return cells_[place(tag)].entry - 1; }  // kNone: unknown
  void ask(uint64_t tag) const { __builtin_prefetch(&cells_[first(tag)]); }

 private:
  struct Cell {
    uint64_t tag;
    uint32_t entry;
  };
  size_t first(uint64_t tag) const { return static_cast<size_t>((tag ^ seed_) * 0x9E3779B185EBCA87ull >> shift_); }
  size_t place(uint64_t tag) const {
    size_t at = first(tag);
    while (cells_[at].entry && cells_[at].tag != tag) at = (at + 1) & (cells_.size() - 1);
    return at;
  }

  const uint8_t* const entries_;
  const uint64_t seed_;
  unsigned shift_ = 58;
  std::vector<Cell> cells_;
};

}  // namespace

void find_parents(const uint8_t* entries, size_t count, uint64_t seed, uint64_t* parents) {
  if (count >= kNone) throw std::invalid_argument("entries: more of them than a catalog can hold");
  Tags tags(entries, count, seed);
  bool twins = false;
  for (size_t i = 0; i < count; ++i) {
    if (i + kAhead < count) tags.ask(load<uint64_t>(entries + (i + kAhead) * kEntryBytes + kTag));
    twins |= tags.add(static_cast<uint32_t>(i));
  }
  for (size_t i = 0; i < count; ++i) {
    const uint8_t* entry = entries + i * kEntryBytes;
    parents[i] = 0;
    if (!load<uint32_t>(entry + kStart)) continue;
    const uint64_t wanted = load<uint64_t>(entry + kParentTag);
    // Blocks of one put follow each other.
    if (!twins && i && load<uint64_t>(entry - kEntryBytes + kTag) == wanted) {
      parents[i] = load<uint64_t>(entry - kEntryBytes + kRecord);
      continue;
    }
    const uint32_t found = tags.find(wanted);
    parents[i] = load<uint64_t>(found == kNone ? entry + kParent : entries + found * kEntryBytes + kRecord);
  }
}

}  // namespace kvstore

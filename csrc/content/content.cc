#include "content/content.h"

#include <algorithm>
#include <stdexcept>
#include <string>
#include <utility>

namespace kvstore {

namespace {

uint32_t record_hash(uint64_t record) { return static_cast<uint32_t>(mix64(record)); }

template <class T>
T in_range(const char* name, T value, uint64_t low, uint64_t high) {
  if (value < low || value > high)
    throw std::invalid_argument(std::string(name) + ": " + std::to_string(value) + " is not in " + std::to_string(low) +
                                ".." + std::to_string(high));
  return value;
}

}  // namespace

// ---- the table ----

void PostingTable::reserve(size_t more) {
  size_t want = postings_.size() ? postings_.size() : 64;
  while ((count_ + more) * 4 > want * 3) want *= 2;
  if (want != postings_.size()) rehash(want, nullptr);
}

void PostingTable::put(size_t at, Posting posting) {
  postings_[at] = posting;
  ++count_;
}

void PostingTable::erase(size_t hole) {  // backward shift: no tombstones to slow later probes
  for (size_t i = next(hole); postings_[i].slot; i = next(i)) {
    if (((i - home(postings_[i].hash)) & mask_) >= ((i - hole) & mask_)) {
      postings_[hole] = postings_[i];
      hole = i;
    }
  }
  postings_[hole] = Posting{0, 0, 0};
  --count_;
}

void PostingTable::rehash(size_t size, const std::vector<uint32_t>* moved) {
  if (size > size_t{1} << 32) throw std::length_error("the content index is full");  // hashes have 32 bits
  Buffer<Posting> old;
  old.append_zeros(size);
  old.swap(postings_);
  mask_ = size - 1;
  count_ = 0;
  for (size_t i = 0; i < old.size(); ++i) {
    Posting posting = old[i];
    if (moved) posting.slot = (*moved)[posting.slot];
    if (!posting.slot) continue;
    size_t at = home(posting.hash);
    while (postings_[at].slot) at = next(at);
    put(at, posting);
  }
}

void PostingTable::renumber(const std::vector<uint32_t>& moved) {
  size_t want = 64;
  while (count_ * 2 > want) want *= 2;
  rehash(want, &moved);
}

// ---- reading ----

ContentIndex::ContentIndex(uint32_t window, uint32_t winnow, uint32_t postings, uint32_t min_length, uint64_t seed)
    : windows_(in_range("window", window, 2, Windows::kMax), in_range("winnow", winnow, 1, Windows::kMax), seed),
      postings_(in_range("postings", postings, 1, 255)),
      min_length_(in_range("min_length", min_length, 1, kMaxBlock)) {
  blocks_.append_zeros(1);
}

uint32_t ContentIndex::slot_of(uint64_t record) const {
  if (records_.empty() || record == 0) return 0;
  const uint32_t hash = record_hash(record);
  for (size_t i = records_.home(hash);; i = records_.next(i)) {
    const ChildTable::Slot& slot = records_.at(i);
    if (!slot.node) return 0;
    if (slot.hash == hash && blocks_[slot.node].record == record) return slot.node;
  }
}

bool ContentIndex::contains(uint64_t record) const {
  FairLock::Shared guard(lock_);
  return slot_of(record) != 0;
}

size_t ContentIndex::size() const {
  FairLock::Shared guard(lock_);
  return live_records_;
}

bool ContentIndex::tokens(uint64_t record, std::vector<uint32_t>* tokens) const {
  FairLock::Shared guard(lock_);
  const Block& block = blocks_[slot_of(record)];
  if (!block.count) return false;
  tokens->assign(arena_.data() + block.cell, arena_.data() + block.cell + block.count);
  return true;
}

ContentStats ContentIndex::stats() const {
  FairLock::Shared guard(lock_);
  const uint64_t bytes = sizeof(*this) + arena_.bytes() + blocks_.bytes() + table_.bytes() + records_.bytes() +
                         cells_.capacity() * sizeof(cells_[0]);
  return {live_records_, live_tokens_, table_.count(), bytes};
}

// ---- inserting ----

bool ContentIndex::insert(uint32_t space, uint64_t record, uint64_t parent, const uint32_t* tokens, size_t count) {
  in_range("tokens", count, 0, kMaxBlock);
  const uint32_t size = static_cast<uint32_t>(count);
  return insert_many(ContentRows{1, count, &space, &size, tokens, &record, &parent}) == 1;
}

void ContentIndex::check(const ContentRows& rows) const {
  uint64_t sum = 0;
  for (size_t i = 0; i < rows.count; ++i) {
    in_range("counts", rows.counts[i], 0, kMaxBlock);
    in_range("records", rows.records[i], 1, UINT64_MAX);
    if (rows.parents[i] == rows.records[i]) throw std::invalid_argument("parents: a record cannot follow itself");
    sum += rows.counts[i];
  }
  if (sum != rows.token_count)
    throw std::invalid_argument("tokens: expected " + std::to_string(sum) + " values, found " +
                                std::to_string(rows.token_count));
  if (!std::is_sorted(rows.records, rows.records + rows.count, std::less_equal<uint64_t>())) {
    std::vector<uint64_t> sorted(rows.records, rows.records + rows.count);
    std::sort(sorted.begin(), sorted.end());
    if (std::adjacent_find(sorted.begin(), sorted.end()) != sorted.end())
      throw std::invalid_argument("records: the same id occurs twice");
  }
}

size_t ContentIndex::insert_many(const ContentRows& rows) {
  check(rows);
  // Hashing needs no lock. Should a caller write into its array meanwhile, postings and tokens disagree; then a posting
  // outlives its block or lies outside of one, which every reader of a posting checks.
  struct Chosen {
    uint32_t hash, offset;
  };
  std::vector<Chosen> chosen;
  std::vector<uint32_t> stops;  // per row: the end of its part of `chosen`
  stops.reserve(rows.count);
  uint64_t added = 0, widest = 0, kept = 0;
  const uint32_t* from = rows.tokens;
  for (size_t i = 0; i < rows.count; ++i) {
    windows_.choose(rows.spaces[i], from, rows.counts[i],
                    [&](uint32_t offset, uint32_t hash) { chosen.push_back({hash, offset}); });
    if (chosen.size() > UINT32_MAX) throw std::length_error("the content index is full");
    stops.push_back(static_cast<uint32_t>(chosen.size()));
    from += rows.counts[i];
    if (rows.counts[i] < windows_.window()) continue;
    ++kept;
    added += rows.counts[i];
    widest = std::max<uint64_t>(widest, rows.counts[i]);
  }

  FairLock::Exclusive guard(lock_);
  for (size_t i = 0; i < rows.count; ++i)
    if (slot_of(rows.records[i]))
      throw std::invalid_argument("records: " + std::to_string(rows.records[i]) + " is known already");
  if (blocks_.size() + kept >= UINT32_MAX) throw std::length_error("the content index is full");
  const bool recycles = kept == 1 && widest < cells_.size() && cells_[widest];
  if (!recycles) arena_.reserve(arena_.size() + added);
  if (!free_slot_ || kept > 1) blocks_.reserve(blocks_.size() + kept);
  if (widest >= cells_.size()) cells_.resize(widest + 1);
  records_.reserve(kept);
  table_.reserve(chosen.size());

  constexpr size_t kAhead = 16;  // postings; their places lie anywhere in memory
  for (size_t i = 0; i < std::min(kAhead, chosen.size()); ++i) table_.prefetch(chosen[i].hash);
  from = rows.tokens;
  size_t at = 0;
  for (size_t i = 0; i < rows.count; from += rows.counts[i], ++i) {
    if (rows.counts[i] < windows_.window()) continue;
    const uint32_t slot = take_slot();
    const uint64_t cell = take_cell(from, rows.counts[i]);
    blocks_[slot] = Block{cell, rows.records[i], rows.parents[i], rows.spaces[i], rows.counts[i]};
    records_.insert(record_hash(rows.records[i]), slot);
    for (; at < stops[i]; ++at) {
      if (at + kAhead < chosen.size()) table_.prefetch(chosen[at + kAhead].hash);
      post(chosen[at].hash, slot, chosen[at].offset);
    }
  }
  live_records_ += kept;
  live_tokens_ += added;
  return kept;
}

// Of the postings for one hash the last in the order (record, offset) stay, so that what is kept does not depend on the
// order of insertion.
void ContentIndex::post(uint32_t hash, uint32_t slot, uint32_t offset) {
  size_t i = table_.home(hash);
  uint32_t same = 0;
  for (; table_.at(i).slot; i = table_.next(i)) same += table_.at(i).hash == hash;
  if (same < postings_) {
    table_.put(i, {hash, slot, offset});
    return;
  }
  PostingTable::Posting fresh{hash, slot, offset}, *least = &fresh;
  const auto rank = [&](const PostingTable::Posting& p) { return std::make_pair(blocks_[p.slot].record, p.offset); };
  for (i = table_.home(hash); table_.at(i).slot; i = table_.next(i))
    if (table_.at(i).hash == hash && rank(table_.at(i)) < rank(*least)) least = &table_.at(i);
  if (least != &fresh) *least = fresh;
}

uint64_t ContentIndex::take_cell(const uint32_t* tokens, uint32_t count) {
  uint64_t cell = cells_[count];
  if (!cell) {
    cell = arena_.size();
    arena_.append(tokens, count);
    return cell;
  }
  --cell;
  std::memcpy(&cells_[count], arena_.data() + cell, sizeof(uint64_t));
  std::copy_n(tokens, count, arena_.data() + cell);
  return cell;
}

void ContentIndex::free_cell(uint64_t cell, uint32_t count) {
  std::memcpy(arena_.data() + cell, &cells_[count], sizeof(uint64_t));
  cells_[count] = cell + 1;
}

uint32_t ContentIndex::take_slot() {
  const uint32_t slot = free_slot_;
  if (slot) {
    free_slot_ = static_cast<uint32_t>(blocks_[slot].cell);
    return slot;
  }
  blocks_.append_zeros(1);
  return static_cast<uint32_t>(blocks_.size() - 1);
}

// ---- removing ----

bool ContentIndex::remove(uint64_t record) {
  FairLock::Exclusive guard(lock_);
  const uint32_t slot = slot_of(record);
  if (!slot) return false;
  Block& block = blocks_[slot];
  windows_.choose(block.space, arena_.data() + block.cell, block.count, [&](uint32_t offset, uint32_t hash) {
    for (size_t i = table_.home(hash); table_.at(i).slot; i = table_.next(i)) {
      const PostingTable::Posting& p = table_.at(i);
      if (p.hash != hash || p.slot != slot || p.offset != offset) continue;
      table_.erase(i);
      return;
    }  // not found: it was dropped for a newer one
  });
  size_t at = records_.home(record_hash(record));
  while (records_.at(at).node != slot) at = records_.next(at);
  records_.erase(at);
  free_cell(block.cell, block.count);
  live_tokens_ -= block.count;
  --live_records_;
  block = Block{free_slot_, 0, 0, 0, 0};
  free_slot_ = slot;
  rebuild_if_half_free();
  return true;
}

void ContentIndex::rebuild_if_half_free() {
  constexpr size_t kTokens = 1 << 14, kBlocks = 1 << 10;  // below that a pass costs more than it frees
  if ((arena_.size() > kTokens && arena_.size() / 2 > live_tokens_) ||
      (blocks_.size() > kBlocks && blocks_.size() / 2 > live_records_))
    rebuild();
}

// Writes everything anew without gaps. Slots change their numbers, and with them postings and records.
void ContentIndex::rebuild() {
  Buffer<uint32_t> arena;
  Buffer<Block> blocks;
  arena.reserve(live_tokens_);
  blocks.reserve(live_records_ + 1);
  blocks.append_zeros(1);
  std::vector<uint32_t> moved(blocks_.size());
  for (size_t i = 1; i < blocks_.size(); ++i) {
    if (!blocks_[i].count) continue;
    moved[i] = static_cast<uint32_t>(blocks.size());
    Block block = blocks_[i];
    block.cell = arena.size();
    arena.append(arena_.data() + blocks_[i].cell, block.count);
    blocks.append(&block, 1);
  }
  table_.renumber(moved);  // the last that may fail, and it has memory of its own before it changes anything
  for (uint32_t i = 1; i < moved.size(); ++i) {
    if (!moved[i]) continue;
    // Numbers only fall, in rising order: nobody who was renumbered before has the number i.
    size_t at = records_.home(record_hash(blocks_[i].record));
    while (records_.at(at).node != i) at = records_.next(at);
    records_.at(at).node = moved[i];
  }
  arena_.swap(arena);
  blocks_.swap(blocks);
  std::fill(cells_.begin(), cells_.end(), 0);
  free_slot_ = 0;
  records_.shrink();
}

}  // namespace kvstore

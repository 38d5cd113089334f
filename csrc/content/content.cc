#include "content/content.h"

#include <algorithm>
#include <stdexcept>
#include <string>
#include <utility>

namespace kvstore {

namespace {

constexpr size_t kAhead = 16;  // postings; their places lie anywhere in memory

uint32_t record_hash(uint64_t record) { return static_cast<uint32_t>(mix64(record)); }

template <class T>
T in_range(const char* name, T value, uint64_t low, uint64_t high) {
  if (value < low || value > high)
    throw std::invalid_argument(std::string(name) + ": " + std::to_string(value) + " is not in " + std::to_string(low) +
                                ".." + std::to_string(high));
  return value;
}

}  // namespace

// ---- reading ----

ContentIndex::ContentIndex(uint32_t window, uint32_t winnow, uint32_t postings, uint32_t min_length, uint64_t seed,
                           const Trie* trie)
    : windows_(in_range("window", window, 2, Windows::kMax), in_range("winnow", winnow, 1, Windows::kMax), seed),
      postings_(in_range("postings", postings, 1, 255)),
      min_length_(in_range("min_length", min_length, 1, kMaxBlock)),
      trie_(trie) {
  blocks_.append_zeros(1);
}

uint32_t ContentIndex::slot_of(uint64_t record) const {
  if (records_.empty() || record == 0) return 0;
  for (size_t i = records_.home(record_hash(record));; i = records_.next(i)) {
    const uint32_t slot = records_.at(i);
    if (!slot || blocks_[slot].record == record) return slot;
  }
}

// Copies the tokens of a block; false if the trie does not have them any more.
bool ContentIndex::copy(uint32_t slot, std::vector<uint32_t>* tokens) const {
  const Block& block = blocks_[slot];
  if (trie_) return trie_->record_tokens(block.record, tokens) && tokens->size() == block.count();
  tokens->assign(cells_.at(slot), cells_.at(slot) + block.count());
  return true;
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
  const uint32_t slot = slot_of(record);
  return slot && copy(slot, tokens);
}

ContentStats ContentIndex::stats() const {
  FairLock::Shared guard(lock_);
  const uint64_t bytes = sizeof(*this) + cells_.bytes() + blocks_.bytes() + table_.bytes() + records_.bytes();
  return {live_records_, live_tokens_, live_entries_, uint64_t{waiting_end_} - waiting_, bytes};
}

// ---- inserting ----

bool ContentIndex::insert(uint32_t space, uint64_t record, uint64_t parent, const uint32_t* tokens, size_t count) {
  in_range("tokens", count, 0, kMaxBlock);
  const uint32_t size = static_cast<uint32_t>(count), none = 0;
  return insert_many(ContentRows{1, count, &space, &size, tokens ? tokens : &none, &record, &parent}) == 1;
}

void ContentIndex::check(const ContentRows& rows) const {
  uint64_t sum = 0;
  for (size_t i = 0; i < rows.count; ++i) {
    in_range("counts", rows.counts[i], 0, kMaxBlock);
    in_range("records", rows.records[i], 1, UINT64_MAX);
    if (rows.parents[i] == rows.records[i]) throw std::invalid_argument("parents: a record cannot follow itself");
    sum += rows.counts[i];
  }
  if (!rows.tokens && !trie_) throw std::invalid_argument("tokens: expected an array, for no trie has them");
  if (rows.tokens && sum != rows.token_count)
    throw std::invalid_argument("tokens: expected " + std::to_string(sum) + " values, found " +
                                std::to_string(rows.token_count));
  if (!std::is_sorted(rows.records, rows.records + rows.count, std::less_equal<uint64_t>())) {
    std::vector<uint64_t> sorted(rows.records, rows.records + rows.count);
    std::sort(sorted.begin(), sorted.end());
    if (std::adjacent_find(sorted.begin(), sorted.end()) != sorted.end())
      throw std::invalid_argument("records: the same id occurs twice");
  }
}

// What must hold when the lock is taken, and memory for all that follows but postings.
void ContentIndex::make_room(const ContentRows& rows, size_t kept, size_t fresh) {
  for (size_t i = 0; i < rows.count; ++i)
    if (slot_of(rows.records[i]))
      throw std::invalid_argument("records: " + std::to_string(rows.records[i]) + " is known already");
  if (blocks_.size() + kept >= UINT32_MAX) throw std::length_error("the content index is full");
  blocks_.reserve(blocks_.size() + fresh);
  records_.reserve(kept, [&](uint32_t slot) { return record_hash(blocks_[slot].record); });
}

void ContentIndex::enter(uint32_t slot, const ContentRows& rows, size_t i) {
  const uint16_t last = static_cast<uint16_t>(rows.counts[i] - 1);
  blocks_[slot] = Block{rows.records[i], rows.parents[i], rows.spaces[i], last, 0};
  records_.insert(record_hash(rows.records[i]), slot);
  ++live_records_;
  live_tokens_ += rows.counts[i];
}

size_t ContentIndex::insert_many(const ContentRows& rows) {
  check(rows);
  if (!rows.tokens) return insert_waiting(rows);
  // Hashing needs no lock. Should a caller write into its array meanwhile, postings name places with other tokens,
  // which every reader of a posting checks.
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
  make_room(rows, kept, free_slot_ && kept == 1 ? 0 : kept);
  if (!trie_) cells_.reserve(kept, added, widest, blocks_.size() + kept);
  table_.reserve(chosen.size(), posting_hash);

  for (size_t i = 0; i < std::min(kAhead, chosen.size()); ++i) table_.prefetch(chosen[i].hash);
  from = rows.tokens;
  for (size_t i = 0; i < rows.count; from += rows.counts[i], ++i) {
    if (rows.counts[i] < windows_.window()) continue;
    const uint32_t slot = take_slot();
    if (!trie_) cells_.put(slot, from, rows.counts[i]);
    enter(slot, rows, i);
    post_all(chosen, i ? stops[i - 1] : 0, stops[i], slot);
  }
  return kept;
}

size_t ContentIndex::insert_waiting(const ContentRows& rows) {
  FairLock::Exclusive guard(lock_);
  size_t kept = 0;
  for (size_t i = 0; i < rows.count; ++i) kept += rows.counts[i] >= windows_.window();
  while (waiting_ < waiting_end_) post_waiting();  // those that wait are neighbours
  make_room(rows, kept, kept);
  waiting_ = static_cast<uint32_t>(blocks_.size());
  for (size_t i = 0; i < rows.count; ++i)
    if (rows.counts[i] >= windows_.window()) enter(new_slot(), rows, i);
  waiting_end_ = static_cast<uint32_t>(blocks_.size());
  return kept;
}

// Posts a part of `chosen`; the caller has fetched the places of the first kAhead, and made room.
void ContentIndex::post_all(const std::vector<Chosen>& chosen, size_t begin, size_t end, uint32_t slot) {
  for (size_t at = begin; at < end; ++at) {
    if (at + kAhead < chosen.size()) table_.prefetch(chosen[at + kAhead].hash);
    post(chosen[at].hash, slot, chosen[at].offset);
  }
}

// Makes the postings of the next run of blocks that wait for them. One that has left the trie gets none.
void ContentIndex::post_waiting() {
  constexpr uint32_t kRun = 256;  // blocks: about a tenth of a millisecond, for which others wait
  std::vector<Chosen> chosen;
  std::vector<size_t> stops;
  std::vector<uint32_t> tokens;
  const uint32_t end = std::min(waiting_end_, waiting_ + kRun);
  for (uint32_t slot = waiting_; slot < end; ++slot) {
    const Block& block = blocks_[slot];
    if (block.record && copy(slot, &tokens))
      windows_.choose(block.space, tokens.data(), block.count(),
                      [&](uint32_t offset, uint32_t hash) { chosen.push_back({hash, offset}); });
    stops.push_back(chosen.size());
  }
  if (!table_.has_room(chosen.size())) {  // room for as many of every block that waits, and a little more
    const size_t all = chosen.size() * (waiting_end_ - waiting_) / std::max<size_t>(stops.size(), 1);
    table_.reserve(all + all / 32, posting_hash);
  }
  for (size_t i = 0; i < std::min(kAhead, chosen.size()); ++i) table_.prefetch(chosen[i].hash);
  size_t begin = 0;
  for (const size_t stop : stops) {
    if (!blocks_[waiting_].record) free_slot(waiting_);
    post_all(chosen, begin, stop, waiting_++);
    begin = stop;
  }
}

// Of the postings for one hash the last in the order (record, offset) stay, so that what is kept does not depend on the
// order of insertion.
void ContentIndex::post(uint32_t hash, uint32_t slot, uint32_t offset) {
  const Posting fresh(hash, slot, offset);
  const auto rank = [&](const Posting& p) { return std::make_pair(blocks_[p.slot()].record, p.offset()); };
  Posting *dead = nullptr, *least = nullptr;
  uint32_t same = 0;
  size_t i = table_.home(hash);
  for (; table_.at(i); i = table_.next(i)) {
    Posting& p = table_.at(i);
    if (p.hash() != hash) continue;
    if (!blocks_[p.slot()].record) {
      dead = &p;
    } else {
      ++same;
      if (!least || rank(p) < rank(*least)) least = &p;
    }
  }
  if (same == postings_) {
    if (rank(fresh) < rank(*least)) return;
    --blocks_[least->slot()].posted;
    *least = fresh;
  } else {
    ++live_entries_;
    if (dead) {
      lose_posting(dead->slot());
      *dead = fresh;
    } else {
      table_.put(i, fresh);
    }
  }
  ++blocks_[slot].posted;
}

uint32_t ContentIndex::take_slot() {
  const uint32_t slot = free_slot_;
  if (slot) {
    free_slot_ = static_cast<uint32_t>(blocks_[slot].parent);
    return slot;
  }
  return new_slot();
}

uint32_t ContentIndex::new_slot() {
  blocks_.append_zeros(1);
  return static_cast<uint32_t>(blocks_.size() - 1);
}

// ---- removing ----

bool ContentIndex::remove(uint64_t record) {
  FairLock::Exclusive guard(lock_);
  const uint32_t slot = slot_of(record);
  if (!slot) return false;
  Block& block = blocks_[slot];
  size_t at = records_.home(record_hash(record));
  while (records_.at(at) != slot) at = records_.next(at);
  records_.erase(at, [&](uint32_t other) { return record_hash(blocks_[other].record); });
  if (!trie_) cells_.release(slot, block.count());
  live_tokens_ -= block.count();
  live_entries_ -= block.posted;
  dead_entries_ += block.posted;
  --live_records_;
  block.record = 0;
  if (!block.posted && !waits(slot)) free_slot(slot);
  sweep();
  rebuild_if_half_free();
  return true;
}

void ContentIndex::free_slot(uint32_t slot) {
  blocks_[slot].parent = free_slot_;
  free_slot_ = slot;
}

// A posting of a block that left is taken out of the table.
void ContentIndex::lose_posting(uint32_t slot) {
  --dead_entries_;
  if (--blocks_[slot].posted == 0) free_slot(slot);
}

// The hand goes once around while an eighth of the blocks leave.
void ContentIndex::sweep() {
  size_t steps = std::min<size_t>(table_.size(), 8 * table_.size() / (live_records_ + 1) + 1);
  if (hand_ >= table_.size()) hand_ = 0;
  for (; steps && dead_entries_; --steps) {
    if (hand_ + kAhead < table_.size()) __builtin_prefetch(&blocks_[table_.at(hand_ + kAhead).slot()]);
    const uint32_t slot = table_.at(hand_).slot();
    if (slot && !blocks_[slot].record) {
      table_.erase(hand_, posting_hash);
      lose_posting(slot);
    } else {
      hand_ = table_.next(hand_);
    }
  }
}

void ContentIndex::rebuild_if_half_free() {
  constexpr size_t kTokens = 1 << 14, kBlocks = 1 << 10;  // below that a pass costs more than it frees
  if ((cells_.tokens() > kTokens && cells_.tokens() / 2 > live_tokens_) ||
      (blocks_.size() > kBlocks && blocks_.size() / 2 > live_records_))
    rebuild();
}

// Writes everything anew without gaps; slots change their numbers. All memory is taken before anything changes.
void ContentIndex::rebuild() {
  TokenCells cells;
  Buffer<Block> blocks;
  Slots records;
  HashTable<Posting> table;
  std::vector<uint32_t> moved(blocks_.size());
  blocks.reserve(live_records_ + 1);
  blocks.append_zeros(1);
  const auto hash_of = [&](uint32_t slot) { return record_hash(blocks[slot].record); };
  records.reserve(live_records_, hash_of);
  table.reserve(live_entries_, posting_hash);
  if (!trie_) cells.reserve(live_records_, live_tokens_, cells_.widest(), live_records_ + 1);
  uint32_t waiting = 0, waiting_end = 0;
  for (uint32_t i = 1; i < moved.size(); ++i) {
    const Block& block = blocks_[i];
    if (!block.record) continue;
    if (waits(i)) {
      waiting_end = static_cast<uint32_t>(blocks.size() + 1);
      if (!waiting) waiting = waiting_end - 1;
    }
    moved[i] = static_cast<uint32_t>(blocks.size());
    blocks.append(&block, 1);
    records.insert(record_hash(block.record), moved[i]);
    if (!trie_) cells.put(moved[i], cells_.at(i), block.count());
  }
  for (size_t i = 0; i < table_.size(); ++i) {
    const Posting& p = table_.at(i);
    if (const uint32_t slot = moved[p.slot()]) table.insert(p.hash(), Posting(p.hash(), slot, p.offset()));
  }
  cells_.swap(cells);
  blocks_.swap(blocks);
  records_.swap(records);
  table_.swap(table);
  free_slot_ = 0;
  waiting_ = waiting;
  waiting_end_ = waiting_end;
  hand_ = 0;
  dead_entries_ = 0;
}

}  // namespace kvstore

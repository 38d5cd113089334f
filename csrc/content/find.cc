// ContentIndex::find: from the windows of a query to disjoint spans of donors.
//
//  1. Each window that winnowing chooses is probed; each posting found is a *candidate*, newest record first.
//  2. A candidate is compared token by token and extended left and right to the maximal *match* inside its block. One
//     that lies in the match before it on the same diagonal of the same block is that match again.
//  3. A match that begins at its block's first token goes on in the parent's block, if that is known: this links
//     matches to chains, and finds beginnings of passages that are shorter than what winnowing guarantees.
//  4. Chains are taken by value, the best first; each gives the tokens that no better one took.
//
// Time: steps 2 and 3 compare at most kWork * tokens + kWorkLeast tokens a query, then stop: what was found until then
// is the answer. A block that is read in a trie counts as if all of it were compared. A prompt with one donor for each
// of its tokens needs 1/250 of that, one with P = 8 of them 1/30, and twice that with a trie; one token over and over
// (each of its windows finds P postings, on other diagonals) a quarter with blocks of 64 tokens.
// Candidates are at most P a window.
#include <algorithm>
#include <array>
#include <cstring>
#include <stdexcept>
#include <string>
#include <tuple>

#include "content/content.h"

namespace kvstore {

namespace {

constexpr int64_t kWork = 256, kWorkLeast = 4096;

// The predicted saving of a token whose run began d tokens before: a + (1 - a) d / (d + h), a = 0.6, h = 64, in
// 1/65536. A donor's error is largest right after a seam and fades with the distance from it; a and h are estimates,
// not fits. Beyond kFar the weight stays what it is there.
constexpr uint64_t kNear = 39322, kRise = 26214, kHalf = 64;
constexpr uint32_t kFar = 4096;

// Sum of the weights at distances 0 .. d - 1.
uint64_t weights_before(uint64_t d) {
  static const auto sums = [] {
    std::array<uint64_t, kFar + 2> made{};
    for (uint64_t i = 0; i <= kFar; ++i) made[i + 1] = made[i] + kNear + kRise * i / (i + kHalf);
    return made;
  }();
  return d <= kFar ? sums[d] : sums[kFar] + (d - kFar) * (sums[kFar + 1] - sums[kFar]);
}

// Leading tokens that a and b share.
uint32_t same_forward(const uint32_t* a, const uint32_t* b, uint32_t count) {
  uint32_t i = 0;
  for (uint64_t x, y; count - i >= 2; i += 2) {
    std::memcpy(&x, a + i, 8);
    std::memcpy(&y, b + i, 8);
    if (x != y) break;
  }
  while (i < count && a[i] == b[i]) ++i;
  return i;
}

// Tokens that a and b share directly before a[0] and b[0].
uint32_t same_backward(const uint32_t* a, const uint32_t* b, uint32_t count) {
  uint32_t i = 0;
  for (uint64_t x, y; count - i >= 2; i += 2) {
    std::memcpy(&x, a - i - 2, 8);
    std::memcpy(&y, b - i - 2, 8);
    if (x != y) break;
  }
  while (i < count && *(a - i - 1) == *(b - i - 1)) ++i;
  return i;
}

constexpr uint32_t kNone = 0xffffffffu;

}  // namespace

class ContentIndex::Search {
 public:
  struct Window {
    uint32_t at, hash;
  };

  Search(const ContentIndex& index, uint32_t space, const uint32_t* query, uint32_t count, uint32_t first)
      : index_(index), space_(space), query_(query), count_(count), first_(first), work_(kWork * count + kWorkLeast) {}

  // The records must outlive the search. Those of a long sequence usually rise, and nothing is done for each then.
  void exclude(const uint64_t* records, size_t count) {
    if (!std::is_sorted(records, records + count)) {
      sorted_.assign(records, records + count);
      std::sort(sorted_.begin(), sorted_.end());
      records = sorted_.data();
    }
    excluded_ = records;
    excluded_end_ = records + count;
  }

  void look(const std::vector<Window>& windows);
  ContentSpans choose(uint32_t shift);

 private:
  struct Candidate {
    uint64_t record;
    uint32_t at, slot, offset;
  };
  struct Match {
    uint64_t record, value;
    uint32_t begin, end;  // in the query
    uint32_t slot, from;  // from: in the block
    uint32_t before;      // the match that this one continues; kNone: a seam
    uint32_t seam;        // where its chain begins in the query
    bool serves, last, taken;
    uint32_t diagonal() const { return begin - from; }
  };

  const uint32_t* tokens_of(uint32_t slot);
  bool serves(uint32_t slot) const {
    return !std::binary_search(excluded_, excluded_end_, index_.blocks_[slot].record);
  }
  static uint32_t key_hash(uint32_t slot, uint32_t diagonal) {
    return static_cast<uint32_t>(mix64((uint64_t{slot} << 32) | diagonal));
  }
  bool find_key(uint32_t slot, uint32_t diagonal, size_t* place) const;
  uint32_t add(uint32_t slot, uint32_t begin, uint32_t end, uint32_t from);
  bool extend(const Candidate& candidate);
  void follow_parents(uint32_t match);

  const ContentIndex& index_;
  const uint32_t space_;
  const uint32_t* const query_;
  const uint32_t count_, first_;
  int64_t work_;
  std::vector<uint64_t> sorted_;
  const uint64_t *excluded_ = nullptr, *excluded_end_ = nullptr;  // records, rising
  std::vector<Match> matches_;
  ChildTable newest_;  // (slot, diagonal) -> 1 + the match that was added last

  // The blocks that were read last, copied from the trie: repetitive text goes on in the same few.
  static constexpr size_t kCopies = 16;
  std::array<uint32_t, kCopies> copied_{};  // slots; 0: none
  std::array<std::vector<uint32_t>, kCopies> copies_;  // empty: the block has left the trie
  size_t oldest_ = 0;
};

// The tokens of a block, until the next call; nullptr if it has left the trie.
const uint32_t* ContentIndex::Search::tokens_of(uint32_t slot) {
  if (!index_.trie_) return index_.cells_.at(slot);
  size_t at = static_cast<size_t>(std::find(copied_.begin(), copied_.end(), slot) - copied_.begin());
  if (at == kCopies) {
    at = oldest_;
    oldest_ = (oldest_ + 1) % kCopies;
    copied_[at] = slot;
    if (index_.copy(slot, &copies_[at]))
      work_ -= index_.blocks_[slot].count();
    else
      copies_[at].clear();
  }
  return copies_[at].empty() ? nullptr : copies_[at].data();
}

bool ContentIndex::Search::find_key(uint32_t slot, uint32_t diagonal, size_t* place) const {
  if (newest_.empty()) return false;
  const uint32_t hash = key_hash(slot, diagonal);
  for (size_t i = newest_.home(hash); newest_.at(i).node; i = newest_.next(i)) {
    const Match& match = matches_[newest_.at(i).node - 1];
    if (match.slot != slot || match.diagonal() != diagonal) continue;
    *place = i;
    return true;
  }
  return false;
}

uint32_t ContentIndex::Search::add(uint32_t slot, uint32_t begin, uint32_t end, uint32_t from) {
  work_ -= 1 + int64_t{end - begin};
  const uint32_t match = static_cast<uint32_t>(matches_.size());
  const uint64_t record = index_.blocks_[slot].record;
  matches_.push_back(Match{record, 0, begin, end, slot, from, kNone, begin, serves(slot), true, false});
  size_t place;
  if (find_key(slot, begin - from, &place)) {
    newest_.at(place).node = match + 1;
  } else {
    newest_.reserve(1);
    newest_.insert(key_hash(slot, begin - from), match + 1);
  }
  return match;
}

// False: the work is spent.
bool ContentIndex::Search::extend(const Candidate& c) {
  const uint32_t window = index_.windows_.window();
  size_t place;
  const bool known = find_key(c.slot, c.at - c.offset, &place);
  if (known && c.at + window <= matches_[newest_.at(place).node - 1].end) return true;
  if (work_ <= 0) return false;
  const uint32_t* const tokens = tokens_of(c.slot);
  if (!tokens) return true;
  const uint32_t* const here = query_ + c.at;
  const uint32_t* const there = tokens + c.offset;
  if (same_forward(here, there, window) < window) {  // other tokens, the same hash
    --work_;
    return true;
  }
  const uint32_t left = same_backward(here, there, std::min(c.at, c.offset));
  const uint32_t rest = std::min(count_ - c.at, index_.blocks_[c.slot].count() - c.offset) - window;
  const uint32_t right = window + same_forward(here + window, there + window, rest);
  follow_parents(add(c.slot, c.at - left, c.at + right, c.offset - left));
  return true;
}

void ContentIndex::Search::follow_parents(uint32_t match) {
  while (matches_[match].from == 0 && matches_[match].begin > 0) {
    const uint32_t begin = matches_[match].begin;
    const uint32_t slot = index_.slot_of(index_.blocks_[matches_[match].slot].parent);
    const Block& block = index_.blocks_[slot];
    if (!slot || block.space != space_) return;
    const uint32_t count = block.count();
    size_t place;
    if (find_key(slot, begin - count, &place) && matches_[newest_.at(place).node - 1].end == begin) {
      const uint32_t before = newest_.at(place).node - 1;
      matches_[match].before = before;
      matches_[before].last = false;
      return;
    }
    if (work_ <= 0) return;
    const uint32_t* const tokens = tokens_of(slot);
    const uint32_t same = tokens ? same_backward(query_ + begin, tokens + count, std::min(begin, count)) : 0;
    if (!same) return;
    const uint32_t before = add(slot, begin - same, begin, count - same);
    matches_[match].before = before;
    matches_[before].last = false;
    match = before;
  }
}

// In batches, so that what lies anywhere in memory (places in the table, blocks, tokens) is on its way before it is
// read.
void ContentIndex::Search::look(const std::vector<Window>& windows) {
  constexpr size_t kBatch = 32;
  const uint32_t window = index_.windows_.window();
  const HashTable<Posting>& table = index_.table_;
  std::vector<Candidate> candidates;
  std::vector<size_t> stops;  // per window of the batch
  for (size_t i = 0; i < std::min(kBatch, windows.size()); ++i) table.prefetch(windows[i].hash);
  for (size_t at = 0; at < windows.size(); at += kBatch) {
    const size_t stop = std::min(at + kBatch, windows.size());
    for (size_t i = stop; i < std::min(stop + kBatch, windows.size()); ++i) table.prefetch(windows[i].hash);
    candidates.clear();
    stops.clear();
    for (size_t i = at; i < stop; ++i) {
      for (size_t j = table.home(windows[i].hash); table.at(j); j = table.next(j)) {
        const Posting& p = table.at(j);
        if (p.hash() != windows[i].hash) continue;
        candidates.push_back({0, windows[i].at, p.slot(), p.offset()});
        __builtin_prefetch(&index_.blocks_[p.slot()]);
      }
      stops.push_back(candidates.size());
    }
    size_t begin = 0, kept = 0;
    for (const size_t end : stops) {
      const size_t group = kept;
      for (; begin < end; ++begin) {
        Candidate c = candidates[begin];
        const Block& block = index_.blocks_[c.slot];
        if (!block.record || block.space != space_ || c.offset + window > block.count() || !serves(c.slot)) continue;
        c.record = block.record;
        if (!index_.trie_) __builtin_prefetch(index_.cells_.at(c.slot) + c.offset);
        candidates[kept++] = c;
      }
      std::sort(candidates.data() + group, candidates.data() + kept, [](const Candidate& a, const Candidate& b) {
        return std::tie(b.record, b.offset) < std::tie(a.record, a.offset);
      });
    }
    for (size_t i = 0; i < kept; ++i)
      if (!extend(candidates[i])) return;
  }
}

// `shift` is added to every start.
ContentSpans ContentIndex::Search::choose(uint32_t shift) {
  std::vector<uint32_t> order(matches_.size());
  for (uint32_t i = 0; i < order.size(); ++i) order[i] = i;
  std::sort(order.begin(), order.end(), [&](uint32_t a, uint32_t b) { return matches_[a].begin < matches_[b].begin; });
  std::vector<uint32_t> ends;  // of chains; each stands for its chain
  for (const uint32_t i : order) {  // what a match continues begins before it
    Match& m = matches_[i];
    if (m.before != kNone) {
      m.seam = matches_[m.before].seam;
      m.value = matches_[m.before].value;
    }
    if (m.end <= first_) continue;
    if (m.serves) m.value += weights_before(m.end - m.seam) - weights_before(std::max(m.begin, first_) - m.seam);
    if (m.last) ends.push_back(i);
  }
  std::sort(ends.begin(), ends.end(), [&](uint32_t a, uint32_t b) {
    const Match &x = matches_[a], &y = matches_[b];
    return std::tie(y.value, y.record, x.begin, x.from) < std::tie(x.value, x.record, y.begin, y.from);
  });

  struct Span {
    uint32_t begin, end, match;
  };
  std::vector<Span> spans;
  std::vector<uint8_t> taken(count_ - first_);
  for (const uint32_t end : ends) {
    for (uint32_t i = end; i != kNone && !matches_[i].taken && matches_[i].end > first_; i = matches_[i].before) {
      Match& m = matches_[i];
      m.taken = true;
      if (!m.serves) continue;
      for (uint32_t at = std::max(m.begin, first_); at < m.end;) {
        const uint8_t* const flags = taken.data() + (at - first_);
        const uint32_t left = m.end - at;
        const void* const stop = std::memchr(flags, *flags ? 0 : 1, left);
        const uint32_t length = stop ? static_cast<uint32_t>(static_cast<const uint8_t*>(stop) - flags) : left;
        if (!*flags && length >= index_.min_length_) {
          std::memset(taken.data() + (at - first_), 1, length);
          spans.push_back({at, at + length, i});
        }
        at += length;
      }
    }
  }
  std::sort(spans.begin(), spans.end(), [](const Span& a, const Span& b) { return a.begin < b.begin; });
  ContentSpans out;
  for (const Span& s : spans) {
    const Match& m = matches_[s.match];
    out.start.push_back(s.begin + shift);
    out.length.push_back(s.end - s.begin);
    out.record.push_back(m.record);
    out.donor_start.push_back(m.from + (s.begin - m.begin));
    out.run.push_back(s.begin - m.seam);
  }
  return out;
}

ContentSpans ContentIndex::find(uint32_t space, const uint32_t* tokens, size_t count, size_t first,
                                const uint64_t* exclude, size_t excluded) {
  if (count > kMaxQuery) throw std::invalid_argument("tokens: expected at most 2^26");
  if (first > count) throw std::invalid_argument("first: " + std::to_string(first) + " is beyond the last token");
  // Context further back than kMaxContext is not read, so that the time depends on the new tokens.
  const uint32_t shift = static_cast<uint32_t>(first > kMaxContext ? first - kMaxContext : 0);
  const uint32_t n = static_cast<uint32_t>(count) - shift, from = static_cast<uint32_t>(first) - shift;
  if (from == n) return {};
  // The windows of any run that winnowing guarantees and that reaches beyond `first`.
  const uint32_t reach = windows_.window() + windows_.winnow() - 2, begin = from > reach ? from - reach : 0;
  std::vector<Search::Window> windows;
  windows.reserve((n - begin) / (windows_.winnow() / 2 + 1) + 16);
  windows_.choose(space, tokens + shift + begin, n - begin,
                  [&](uint32_t at, uint32_t hash) { windows.push_back({begin + at, hash}); });

  for (;;) {
    {
      FairLock::Shared guard(lock_);
      if (waiting_ == waiting_end_) {
        if (table_.empty()) return {};
        Search search(*this, space, tokens + shift, n, from);
        search.exclude(exclude, excluded);
        search.look(windows);
        return search.choose(shift);
      }
    }
    FairLock::Exclusive guard(lock_);
    post_waiting();
  }
}

}  // namespace kvstore

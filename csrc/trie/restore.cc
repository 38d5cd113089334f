// Trie::restore: the bulk rebuild of an empty trie from the columns of a catalog.
//
// The records of one parent are inserted together, in order of their ids; then each chain of only children is appended
// to the edge that it continues. So the result does not depend on where the records lie, and a sequence that nothing
// else shares is one node. While building, a record's id is its row + 1; the real ids come last, and until then a hole
// is built like a record. Holes come before the records that start where they do, so that a record of the same path,
// whatever its id is, takes the place of a hole.
#include <algorithm>
#include <numeric>
#include <stdexcept>
#include <vector>

#include "common/huge_pages.h"
#include "trie/trie.h"

namespace kvstore {

namespace {

// Rows by a number that each has: open addressing, at most half full.
class RowTable {
 public:
  static constexpr uint32_t kNone = 0xffffffffu;

  RowTable(size_t most, uint64_t seed) : seed_(seed) {
    size_t size = 64;
    while (size < 2 * most) size *= 2;
    cells_.append_zeros(size);
    mask_ = size - 1;
  }
  uint32_t find(uint64_t number) const { return cells_[place(number)].row - 1; }  // kNone: unknown
  void ask(uint64_t number) const { __builtin_prefetch(&cells_[mix64(number ^ seed_) & mask_]); }  // it is needed soon
  bool add(uint64_t number, uint32_t row) {  // false: the number is known
    Cell& cell = cells_[place(number)];
    if (cell.row) return false;
    cell = Cell{number, row + 1};
    return true;
  }

 private:
  struct Cell {
    uint64_t number;
    uint32_t row;  // plus 1; 0: empty
  };
  size_t place(uint64_t number) const {
    size_t at = mix64(number ^ seed_) & mask_;
    while (cells_[at].row && cells_[at].number != number) at = (at + 1) & mask_;
    return at;
  }

  const uint64_t seed_;
  Buffer<Cell> cells_;
  size_t mask_ = 0;
};

}  // namespace

class Trie::Rebuild {
 public:
  Rebuild(Trie& trie, const TrieRows& rows) : trie_(trie), rows_(rows), placed_(rows.count, kNowhere) {
    if (rows.count >= kNone) throw std::invalid_argument("ids: more records than a trie can hold");
    if (rows.token_at) {
      for (size_t i = 0; i < rows.count; ++i)
        if (rows.token_at[i] > rows.token_count || rows.counts[i] > rows.token_count - rows.token_at[i])
          throw std::invalid_argument("token_at: expected places of tokens that are there");
    } else {
      uint64_t total = 0;
      at_.reserve(rows.count);
      for (size_t i = 0; i < rows.count; total += rows.counts[i++]) at_.push_back(total);
      if (total != rows.token_count) throw std::invalid_argument("tokens: expected as many as counts add up to");
    }
    token_at_ = rows.token_at ? rows.token_at : at_.data();
  }

  void run() {
    link_rows();
    find_widths();
    for (uint32_t root = 0; root < first_of_root_.size(); ++root)
      if (first_of_root_[root] != kNone) build_group(trie_.roots_[root], 0, first_of_root_[root]);
    while (!open_.empty()) {
      const uint32_t row = open_.back();
      open_.pop_back();
      build_group(trie_.records_.get(row + 1), rows_.starts[row] + rows_.counts[row], first_[row]);
    }
    name_records();
    order_nodes();
  }

 private:
  static constexpr uint32_t kNone = RowTable::kNone;
  static constexpr uint64_t kNowhere = ~uint64_t{0};
  static constexpr size_t kAhead = 16;  // rows whose cells are asked for before they are needed

  const uint32_t* tokens(uint32_t row) const { return rows_.tokens + token_at_[row]; }

  bool hole(uint32_t row) const { return rows_.holes && rows_.holes[row]; }
  bool pinned(uint32_t row) const { return rows_.pinned[row] && !hole(row); }

  bool plausible(uint32_t row) const {
    const uint32_t count = rows_.counts[row], start = rows_.starts[row];
    return rows_.ids[row] && rows_.ids[row] < kHole && count && count <= trie_.block_ && start % trie_.block_ == 0 &&
           start <= 0x7fffffff - count && (!hole(row) || count == trie_.block_) &&
           rows_.roots[row] < trie_.roots_.size() && rows_.bits[row] >= 0 && rows_.bits[row] <= 1e30f;
  }

  // All rows in order of (start, holes first, id, row).
  std::vector<uint32_t> by_start() const {
    const size_t m = rows_.count;
    std::vector<uint32_t> order(m);
    std::vector<uint64_t> keys(m);
    uint64_t last[2] = {0, 0};  // ids of records, and of holes
    bool rising = true;
    for (size_t i = 0; i < m; ++i) {
      uint64_t& before = last[hole(static_cast<uint32_t>(i))];
      rising &= before <= rows_.ids[i] && rows_.starts[i] <= 0x7fffffff;
      before = rows_.ids[i];
      keys[i] = uint64_t{rows_.starts[i]} << 33 | uint64_t{!hole(static_cast<uint32_t>(i))} << 32 | i;
    }
    if (rising) {  // as a catalog gives them: the order of ids is that of rows
      std::sort(keys.begin(), keys.end());
      for (size_t i = 0; i < m; ++i) order[i] = static_cast<uint32_t>(keys[i]);
      return order;
    }
    std::iota(order.begin(), order.end(), 0u);
    std::sort(order.begin(), order.end(), [this](uint32_t a, uint32_t b) {
      if (rows_.starts[a] != rows_.starts[b]) return rows_.starts[a] < rows_.starts[b];
      if (hole(a) != hole(b)) return hole(a);
      return rows_.ids[a] != rows_.ids[b] ? rows_.ids[a] < rows_.ids[b] : a < b;
    });
    return order;
  }

  // Finds every row's parent, in that order, and lists the trusted rows by parent in it, without the holes that nothing
  // is behind.
  void link_rows() {
    const size_t m = rows_.count;
    first_.assign(m, kNone);
    next_.assign(m, kNone);
    first_of_root_.assign(trie_.roots_.size(), kNone);
    parents_.assign(m, kNone);
    kept_.reserve(m);
    if (!link_as_they_are()) {
      kept_.clear();
      RowTable by_tag(m, trie_.seed_), by_id(m, trie_.seed_);
      for (const uint32_t row : by_start()) {
        uint32_t parent = kNone;
        if (plausible(row) && find_parent(row, by_tag, &parent) && !contradicts(row, parent, by_tag) &&
            by_id.add(rows_.ids[row], row))
          keep(row, parent, &by_tag);
      }
    }
    for (size_t i = kept_.size(); i > 0; --i) {
      const uint32_t row = kept_[i - 1];
      if (hole(row) && first_[row] == kNone) continue;  // what would be behind it was listed before
      uint32_t& head = parents_[row] == kNone ? first_of_root_[rows_.roots[row]] : first_[parents_[row]];
      next_[row] = head;
      head = row;
    }
  }

  // The same in the order of rows, which is that of memory, and the usual one: ids rise, no row is a hole, and what
  // comes before a row stands before it. Among rows of one start, the order is the same as above then. Returns false if
  // it is not so, or rows contradict each other: which of them is trusted is a matter of that order.
  bool link_as_they_are() {
    const size_t m = rows_.count;
    for (size_t i = 0; i < m; ++i)
      if ((i && rows_.ids[i - 1] >= rows_.ids[i]) || hole(static_cast<uint32_t>(i))) return false;
    RowTable by_tag(m, trie_.seed_);
    for (size_t i = 0; i < m; ++i) {
      const uint32_t row = static_cast<uint32_t>(i);
      if (i + kAhead < m) by_tag.ask(rows_.tags[i + kAhead]);
      if (!plausible(row)) continue;
      const bool continues = rows_.starts[row] && rows_.parent_tags[row];
      uint32_t parent = kNone;
      if (continues && row && last_tagged_ == row - 1 && rows_.tags[last_tagged_] == rows_.parent_tags[row] &&
          is_parent(last_tagged_, row)) {
        parent = last_tagged_;  // the blocks of one put follow each other
      } else if (!find_parent(row, by_tag, &parent)) {
        if (continues) return false;
        continue;
      }
      if (contradicts(row, parent, by_tag)) return false;
      keep(row, parent, &by_tag);
    }
    return true;
  }

  bool is_parent(uint32_t parent, uint32_t row) const {
    return rows_.starts[parent] + rows_.counts[parent] == rows_.starts[row] && rows_.roots[parent] == rows_.roots[row];
  }

  // The row before this one, kNone before the first; false if there is none, or it does not fit.
  bool find_parent(uint32_t row, const RowTable& by_tag, uint32_t* parent) const {
    *parent = kNone;
    if (!rows_.starts[row]) return !rows_.parent_tags[row];
    if (rows_.parent_tags[row]) *parent = by_tag.find(rows_.parent_tags[row]);
    return *parent != kNone && is_parent(*parent, row);
  }

  // Whether another row of that tag is not the same block.
  bool contradicts(uint32_t row, uint32_t parent, const RowTable& by_tag) const {
    const uint32_t twin = rows_.tags[row] ? by_tag.find(rows_.tags[row]) : kNone;
    return twin != kNone && (parents_[twin] != parent || rows_.roots[twin] != rows_.roots[row] ||
                             rows_.counts[twin] != rows_.counts[row] ||
                             !std::equal(tokens(row), tokens(row) + rows_.counts[row], tokens(twin)));
  }

  void keep(uint32_t row, uint32_t parent, RowTable* by_tag) {
    if (rows_.tags[row] && by_tag->add(rows_.tags[row], row)) last_tagged_ = row;
    parents_[row] = parent;
    kept_.push_back(row);
  }

  uint32_t traffic(uint32_t row) const { return rows_.traffic ? rows_.traffic[row] : 0; }

  // An only child continues the edge of its parent, unless the parent is pinned or saw other traffic, and so needs its
  // own end.
  uint32_t only_child(uint32_t row) const {
    const uint32_t child = first_[row];
    const bool only = child != kNone && next_[child] == kNone && !pinned(row) && traffic(row) == traffic(child);
    return only ? child : kNone;
  }

  // A chain of only children becomes one edge, which is wide if one of them is. Makes room for all of them at once.
  void find_widths() {
    wide_.assign(rows_.count, 0);
    for (size_t i = kept_.size(); i > 0; --i) {  // what is behind a row stands after it
      const uint32_t row = kept_[i - 1], child = only_child(row);
      wide_[row] = TokenArena::is_wide(tokens(row), rows_.counts[row]) || (child != kNone && wide_[child]);
    }
    size_t counts[2] = {0, 0}, slots = 1;  // room is made for one more before it is known that a row needs none
    for (const uint32_t row : kept_) {
      if (const uint32_t child = only_child(row); child != kNone) wide_[child] = wide_[row];
      counts[wide_[row]] += rows_.counts[row];
      slots += rows_.counts[row] == trie_.block_;
    }
    for (const bool wide : {false, true}) trie_.room(counts[wide], wide, slots, 0);
  }

  void build_group(uint32_t node, uint32_t depth, uint32_t first) {
    group_.clear();
    for (uint32_t row = first; row != kNone; row = next_[row]) group_.push_back(row);
    for (const uint32_t row : group_) insert_row(node, depth, row);
    for (uint32_t row : group_) {
      const uint32_t leaf = trie_.records_.get(row + 1);
      if (!leaf) continue;  // replaced or superseded
      for (uint32_t child; (child = only_child(row)) != kNone; row = child) extend(leaf, child);
      if (first_[row] != kNone) open_.push_back(row);
    }
  }

  void insert_row(uint32_t node, uint32_t depth, uint32_t row) {
    const uint32_t count = rows_.counts[row], end = depth + count;
    const bool wide = wide_[row];
    trie_.room(count, wide, 1, 2);
    trie_.records_.prepare(row + 1);
    const Cursor at = trie_.walk(node, depth, tokens(row), count);
    uint32_t leaf = at.node;
    if (at.depth < end) {
      const uint32_t fresh = end - at.depth;
      leaf = trie_.hang(at, tokens(row) + (at.depth - depth), fresh, wide,
                        trie_.bits_at(at) + double{rows_.bits[row]} * fresh / count);
      // Place the chain behind it now, where it will be contiguous.
      for (uint32_t r = row, child; (child = only_child(r)) != kNone; r = child) place(child, wide);
    } else if (end % trie_.block_ && trie_.nodes_[leaf].end != end) {
      leaf = trie_.split(leaf, end);
    }
    std::vector<uint64_t> replaced;
    for (uint32_t x = leaf; trie_.nodes_[x].end > depth; x = trie_.nodes_[x].parent) {
      const Node& y = trie_.nodes_[x];
      const bool may_go = y.tail && y.end < end && !rows_.keep_tails;
      if (may_go && !pinned(static_cast<uint32_t>(y.tail - 1))) trie_.take_tail(x, &replaced);
    }
    replaced.clear();
    uint32_t holder = leaf;
    while (trie_.start(trie_.nodes_[holder]) >= end) holder = trie_.nodes_[holder].parent;
    trie_.put(holder, end, row + 1, &replaced);
    if (!replaced.empty()) adopt(row, static_cast<uint32_t>(replaced[0] - 1));
  }

  // Merges the children of `old`, which is the same path, into those of `row`, in order of their ids.
  void adopt(uint32_t row, uint32_t old) {
    uint32_t a = first_[row], b = first_[old];
    uint32_t* out = &first_[row];
    while (a != kNone && b != kNone) {
      uint32_t& lower = rows_.ids[a] < rows_.ids[b] ? a : b;
      *out = lower;
      out = &next_[lower];
      lower = *out;
    }
    *out = a != kNone ? a : b;
    first_[old] = kNone;
  }

  void place(uint32_t row, bool wide) {
    trie_.room(rows_.counts[row], wide, 1, 0);
    placed_[row] = trie_.arena_.append(tokens(row), rows_.counts[row], wide);
    trie_.slots_.append_zeros(rows_.counts[row] == trie_.block_);
  }

  // Appends a row to the edge of the leaf that its parent ends.
  void extend(uint32_t leaf, uint32_t row) {
    const uint32_t count = rows_.counts[row];
    const bool full = count == trie_.block_;
    trie_.records_.prepare(row + 1);
    Node& x = trie_.nodes_[leaf];
    if (placed_[row] != x.offset + x.length) {  // only after duplicates: move the edge to where it can grow
      const bool wide = TokenArena::is_wide(x.offset) || TokenArena::is_wide(tokens(row), count);
      trie_.room(x.length + count, wide, trie_.slot_count(x) + 1, 0);
      const uint64_t offset = trie_.arena_.append(trie_.arena_, x.offset, x.length, wide);
      const uint32_t slots = static_cast<uint32_t>(trie_.slots_.size());
      trie_.slots_.append(trie_.slots_.data() + x.slots, trie_.slot_count(x));
      trie_.arena_.append(tokens(row), count, wide);
      trie_.slots_.append_zeros(full);
      x.offset = offset;
      x.slots = slots;
    }
    x.length += count;
    x.end += count;
    x.bits += rows_.bits[row];
    trie_.live_tokens_ += count;
    trie_.live_slots_ += full;
    std::vector<uint64_t> none;
    trie_.put(leaf, x.end, row + 1, &none);
  }

  void name_records() {
    trie_.records_.clear();
    for (uint32_t node = 1; node < trie_.nodes_.size(); ++node) {
      Node& x = trie_.nodes_[node];
      if (!x.parent) continue;
      const uint32_t slots = trie_.slot_count(x);
      for (uint32_t i = 0; i < slots; ++i) name(node, &trie_.slots_[x.slots + i]);
      name(node, &x.tail);
    }
  }
  void name(uint32_t node, uint64_t* place) {
    if (!*place) return;
    const uint64_t row = *place - 1;
    *place = rows_.ids[row];
    trie_.nodes_[node].count = std::max(trie_.nodes_[node].count, traffic(static_cast<uint32_t>(row)));
    trie_.top_id_ = std::max(trie_.top_id_, *place);
    if (hole(static_cast<uint32_t>(row))) {
      trie_.holes_.insert(*place);
      *place |= kHole;
      --trie_.live_records_;
      return;
    }
    trie_.records_.prepare(*place);
    trie_.records_.set(*place, node);
    if (!pinned(static_cast<uint32_t>(row))) return;
    ++trie_.own_pins_[node];  // the record of a pinned row ends its node
    for (uint32_t x = node; trie_.nodes_[x].parent; x = trie_.nodes_[x].parent) {
      trie_.unlink(x);
      ++trie_.nodes_[x].older;
    }
  }

  // Recency by id: the stamp of a node is the largest id at or below it. And a node's count is at least the sum of its
  // children's: if no record ends there, nothing else is known of it.
  void order_nodes() {
    struct Aged {
      uint64_t stamp;
      uint32_t end, node;
    };
    std::vector<uint64_t> stamp(trie_.nodes_.size(), 0), below(trie_.nodes_.size(), 0);
    const auto settle = [&](uint32_t node) {
      Node& x = trie_.nodes_[node];
      x.count = static_cast<uint32_t>(std::max<uint64_t>(x.count, std::min<uint64_t>(below[node], UINT32_MAX)));
      below[x.parent] += x.count;
    };
    std::vector<Aged> aged;
    aged.reserve(trie_.live_nodes_);
    for (uint32_t node = 1; node < trie_.nodes_.size(); ++node) {
      const Node& x = trie_.nodes_[node];
      if (!x.parent) continue;
      aged.push_back(Aged{0, x.end, node});
      stamp[node] = x.tail;
      const uint32_t slots = trie_.slot_count(x);
      for (uint32_t i = 0; i < slots; ++i) stamp[node] = std::max(stamp[node], record_at(trie_.slots_[x.slots + i]));
      trie_.unlink(node);
    }
    std::sort(aged.begin(), aged.end(), [](const Aged& a, const Aged& b) { return a.end > b.end; });
    for (Aged& a : aged) {
      settle(a.node);
      a.stamp = stamp[a.node];
      uint64_t& above = stamp[trie_.nodes_[a.node].parent];
      above = std::max(above, a.stamp);
    }
    for (const uint32_t root : trie_.roots_) settle(root);
    std::sort(aged.begin(), aged.end(), [](const Aged& a, const Aged& b) {
      return a.stamp != b.stamp ? a.stamp < b.stamp : a.end > b.end;
    });
    for (const Aged& a : aged)
      if (!trie_.pins(trie_.nodes_[a.node])) trie_.link_after(a.node, trie_.nodes_[0].older);
  }

  Trie& trie_;
  const TrieRows& rows_;
  HugeVector<uint64_t> at_;       // row -> its first token, where the caller does not say it
  const uint64_t* token_at_;      // the same, in any case
  HugeVector<uint64_t> placed_;   // row -> where the arena already holds it
  HugeVector<uint8_t> wide_;      // row -> whether its edge takes 4 bytes a token
  HugeVector<uint32_t> first_, next_, first_of_root_;  // children of a row, siblings
  HugeVector<uint32_t> parents_, kept_;  // the row before each; the rows that are trusted, the first one first
  uint32_t last_tagged_ = kNone;          // of the rows that are found by their tags, the one that was kept last
  std::vector<uint32_t> group_, open_;
};

std::vector<uint64_t> Trie::restore(const TrieRows& rows) {
  FairLock::Exclusive guard(lock_);
  if (live_nodes_) throw std::invalid_argument("restore: the trie is not empty");
  Rebuild(*this, rows).run();
  if (arena_.size() != live_tokens_) rebuild_arena();
  std::vector<uint64_t> dropped;
  for (size_t i = 0; i < rows.count; ++i)
    if (!records_.get(rows.ids[i]) && !holes_.count(rows.ids[i])) dropped.push_back(rows.ids[i]);
  std::sort(dropped.begin(), dropped.end());
  dropped.erase(std::unique(dropped.begin(), dropped.end()), dropped.end());
  return dropped;
}

}  // namespace kvstore

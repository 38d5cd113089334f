#include "trie/trie.h"

#include <algorithm>
#include <random>
#include <stdexcept>
#include <string>

namespace kvstore {

namespace {

uint64_t random_seed() {
  std::random_device device;
  return (uint64_t{device()} << 32) | device();
}

}  // namespace

Trie::Trie(uint32_t block_tokens, double concentration)
    : block_(block_tokens), concentration_(concentration), seed_(random_seed()), arena_(level()) {
  if (block_ == 0 || block_ > 65536) throw std::invalid_argument("block_tokens: expected a number from 1 to 65536");
  if (!(concentration_ >= kLeastConcentration && concentration_ <= kMostConcentration))
    throw std::invalid_argument("concentration: expected a number from 1e-6 to 1e6");
  nodes_.append_zeros(1);
}

uint32_t Trie::new_root() {
  FairLock::Exclusive guard(lock_);
  room(0, false, 0, 1);
  roots_.reserve(roots_.size() + 1);
  const uint32_t node = take_node();
  nodes_[node].newer = kOut;
  nodes_[node].tail = roots_.size();
  roots_.push_back(node);
  return static_cast<uint32_t>(roots_.size() - 1);
}

// ---- recency ----

void Trie::unlink(uint32_t node) {
  Node& x = nodes_[node];
  if (x.newer == kOut) return;
  nodes_[x.older].newer = x.newer;
  nodes_[x.newer].older = x.older;
  x.newer = kOut;
  x.older = 0;  // pins
}

void Trie::link_after(uint32_t node, uint32_t older) {
  const uint32_t newer = nodes_[older].newer;
  nodes_[node].older = older;
  nodes_[node].newer = newer;
  nodes_[older].newer = node;
  nodes_[newer].older = node;
}

// Makes a path the most recent; traffic counts for the part of it from `counted` up (0: for nothing).
void Trie::touch_up(uint32_t node, uint32_t counted) {
  const auto count = [](Node& x) { x.count += x.count != UINT32_MAX; };
  bool counting = false;
  uint32_t x = node;
  for (; nodes_[x].parent; x = nodes_[x].parent) {
    counting |= x == counted;
    if (counting) count(nodes_[x]);
    if (pins(nodes_[x])) continue;
    unlink(x);
    link_after(x, nodes_[0].older);
  }
  if (counting) count(nodes_[x]);  // the root, unless nothing of the path is stored
}

uint32_t Trie::touch(uint32_t root, const uint32_t* tokens, size_t count) {
  const uint32_t n = checked_tokens(count);
  FairLock::Exclusive guard(lock_);
  const Cursor at = walk(root_node(root), 0, tokens, n);
  touch_up(at.node, at.node);
  return at.depth;
}

void Trie::pin(uint32_t root, const uint32_t* tokens, size_t count, int delta) {
  const uint32_t n = checked_tokens(count);
  if (delta != 1 && delta != -1) throw std::invalid_argument("delta: expected +1 or -1");
  FairLock::Exclusive guard(lock_);
  const Cursor at = walk(root_node(root), 0, tokens, n);
  if (n == 0 || at.depth < n) throw std::invalid_argument("tokens: this path is not stored");
  uint32_t node = at.node;
  if (delta > 0) {
    room(0, false, 0, 1);
    if (nodes_[node].end != n) node = split(node, n);
    ++own_pins_[node];
    for (uint32_t x = node; nodes_[x].parent; x = nodes_[x].parent) {
      unlink(x);
      ++nodes_[x].older;
    }
    return;
  }
  const auto own = own_pins_.find(node);
  if (nodes_[node].end != n || own == own_pins_.end()) throw std::invalid_argument("tokens: this path is not pinned");
  if (--own->second == 0) own_pins_.erase(own);
  for (uint32_t x = node; nodes_[x].parent; x = nodes_[x].parent) --nodes_[x].older;
  touch_up(node, 0);
}

// ---- changing the tree ----

void Trie::room(size_t tokens, bool wide, size_t slots, size_t nodes) {
  // u32 indexes: refuse before anything wraps.
  if (nodes_.size() + nodes >= kOut || slots_.size() + slots >= kOut) throw std::length_error("the trie is full");
  arena_.reserve(tokens, wide);
  slots_.reserve(slots_.size() + slots);
  nodes_.reserve(nodes_.size() + nodes);
  children_.reserve(nodes);
}

uint32_t Trie::take_node() {
  uint32_t node = free_;
  if (node) {
    free_ = nodes_[node].next;
    nodes_[node] = Node{};
  } else {
    node = static_cast<uint32_t>(nodes_.size());
    nodes_.append_zeros(1);
  }
  return node;
}

// Cuts the edge of `low` at `depth`. The new node is the upper part, so that the children and the deeper records of
// `low` need no change. Returns the upper node.
uint32_t Trie::split(uint32_t low, uint32_t depth) {
  const double bits = bits_at(Cursor{low, depth});
  const uint32_t up = take_node();
  Node& l = nodes_[low];
  Node& u = nodes_[up];
  const uint32_t cut = depth - start(l);
  const size_t hashed = find_slot(l.parent, low);
  const uint32_t above = depth / block_ - start(l) / block_;
  for (uint32_t i = 0; i < above; ++i)
    if (const uint64_t id = record_at(slots_[l.slots + i])) records_.set(id, up);
  u = l;
  u.length = cut;
  u.end = depth;
  u.bits = bits;
  u.tail = 0;
  u.child = low;
  l.offset += cut;
  l.length -= cut;
  l.slots += above;
  l.parent = up;
  l.next = l.prev = 0;
  (u.prev ? nodes_[u.prev].next : nodes_[u.parent].child) = up;
  if (u.next) nodes_[u.next].prev = up;
  children_.at(hashed).node = up;
  children_.insert(child_hash(up, arena_.at(l.offset)), low);
  if (l.newer != kOut) link_after(up, low);  // else the copy has the pins
  ++live_nodes_;
  return up;
}

// Adds a leaf with these tokens below the cursor, splitting the edge there if it must.
uint32_t Trie::hang(Cursor at, const uint32_t* tokens, uint32_t count, bool wide, double bits) {
  const uint32_t parent = at.depth < nodes_[at.node].end ? split(at.node, at.depth) : at.node;
  const uint32_t leaf = take_node();
  Node& x = nodes_[leaf];
  Node& p = nodes_[parent];
  x.offset = arena_.append(tokens, count, wide);
  x.bits = bits;
  x.length = count;
  x.end = at.depth + count;
  x.parent = parent;
  x.next = p.child;
  if (p.child) nodes_[p.child].prev = leaf;
  p.child = leaf;
  x.slots = static_cast<uint32_t>(slots_.size());
  const uint32_t slots = slot_count(x);
  slots_.append_zeros(slots);
  children_.insert(child_hash(parent, arena_.at(x.offset)), leaf);
  link_after(leaf, nodes_[0].older);
  ++live_nodes_;
  live_tokens_ += count;
  live_slots_ += slots;
  return leaf;
}

void Trie::put(uint32_t node, uint32_t end, uint64_t id, std::vector<uint64_t>* replaced) {
  uint64_t& place = end % block_ ? nodes_[node].tail : slot(nodes_[node], end);
  if (place & kHole) {
    replaced->push_back(place & ~kHole);
    holes_.erase(place & ~kHole);
  } else if (place) {
    replaced->push_back(place);
    records_.erase(place);
    --live_records_;
  }
  place = id;
  records_.set(id, node);
  top_id_ = std::max(top_id_, id);
  ++live_records_;
}

void Trie::take_tail(uint32_t node, std::vector<uint64_t>* taken) {
  taken->push_back(nodes_[node].tail);
  clear_record(node, nodes_[node].end);
}

void Trie::clear_record(uint32_t node, uint32_t end) {
  uint64_t& place = end % block_ ? nodes_[node].tail : slot(nodes_[node], end);
  records_.erase(place);
  place = 0;
  --live_records_;
}

// Clears a place without a record; if it is a hole, it is told that nothing needs it.
void Trie::release(uint64_t* place) {
  if (*place & kHole) {
    released_.push_back(*place & ~kHole);
    holes_.erase(*place & ~kHole);
  }
  *place = 0;
}

void Trie::check_insert(const float* bits, float uniform_bits, uint32_t count, const uint32_t* ends,
                        const uint64_t* ids, size_t records) const {
  for (size_t i = 0; i < records; ++i) {
    if (ends[i] == 0 || ends[i] > count || (i && ends[i] <= ends[i - 1]) || (ends[i] % block_ && ends[i] != count))
      throw std::invalid_argument("ends: expected rising multiples of the block, or the last token");
    if (ids[i] == 0 || ids[i] >= kHole) throw std::invalid_argument("ids: expected numbers from 1 to 2^63 - 1");
  }
  if (!std::is_sorted(ids, ids + records, std::less_equal<uint64_t>())) {
    std::vector<uint64_t> sorted(ids, ids + records);
    std::sort(sorted.begin(), sorted.end());
    if (std::adjacent_find(sorted.begin(), sorted.end()) != sorted.end())
      throw std::invalid_argument("ids: the same id occurs twice");
  }
  const auto valid = [](float b) { return b >= 0 && b <= 1e30f; };
  bool fine = bits || valid(uniform_bits);
  if (bits)
    for (uint32_t i = 0; i < count; ++i) fine &= valid(bits[i]);
  if (!fine) throw std::invalid_argument("bits: numbers must be finite and not negative");
}

std::vector<uint64_t> Trie::insert(uint32_t root, const uint32_t* tokens, size_t count, const float* bits,
                                   float uniform_bits, const uint32_t* ends, const uint64_t* ids, size_t records,
                                   bool keep_tails) {
  const uint32_t n = checked_tokens(count);
  if (n == 0) throw std::invalid_argument("tokens: expected at least one");
  check_insert(bits, uniform_bits, n, ends, ids, records);
  FairLock::Exclusive guard(lock_);
  const uint32_t top = root_node(root);
  for (size_t i = 0; i < records; ++i)  // rising ids beyond all that were ever used need no look
    if (ids[i] <= top_id_ && (records_.get(ids[i]) || holes_.count(ids[i])))
      throw std::invalid_argument("ids: " + std::to_string(ids[i]) + " is in use");
  const Cursor at = walk(top, 0, tokens, n);
  // What linking the leaf will write to lies anywhere; fetch it while the tokens are copied.
  const Node& reached = nodes_[at.node];
  __builtin_prefetch(&nodes_[reached.child], 1);
  if (reached.newer != kOut) {
    __builtin_prefetch(&nodes_[reached.older], 1);
    __builtin_prefetch(&nodes_[reached.newer], 1);
  }
  std::vector<uint64_t> replaced;
  const bool wide = TokenArena::is_wide(tokens + at.depth, n - at.depth);
  room(n - at.depth, wide, n / block_ - at.depth / block_, 2);
  for (size_t i = 0; i < records; ++i) records_.prepare(ids[i]);

  uint32_t leaf = at.node;
  if (at.depth < n) {
    double more = 0;
    if (bits)
      for (uint32_t i = at.depth; i < n; ++i) more += bits[i];
    else
      more = double{uniform_bits} * (n - at.depth);
    leaf = hang(at, tokens + at.depth, n - at.depth, wide, bits_at(at) + more);
  } else if (records && ends[records - 1] == n && n % block_ && nodes_[leaf].end != n) {
    leaf = split(leaf, n);
  }
  size_t left = records;
  for (uint32_t x = leaf; x != top; x = nodes_[x].parent) {
    // What is left of `ends` at or above `left` lies deeper than x; a tail here is inside the block of the next of them
    // if that ends by the end of the tail's block. A pinned tail stays: its covering record may be evicted.
    const uint32_t end = nodes_[x].end;
    if (nodes_[x].tail && left < records && ends[left] > end && ends[left] <= (end / block_ + 1) * block_ &&
        !keep_tails && !pinned_itself(x))
      take_tail(x, &replaced);
    const uint32_t from = start(nodes_[x]);
    while (left && ends[left - 1] > from) {
      --left;
      put(x, ends[left], ids[left], &replaced);
    }
  }
  touch_up(leaf, leaf);
  std::sort(replaced.begin(), replaced.end());
  compact_if_half_garbage();
  return replaced;
}

// ---- taking away ----

uint64_t Trie::last_record(uint32_t node, uint32_t* end) const {
  const Node& x = nodes_[node];
  *end = x.end;
  if (x.tail) return x.tail;
  for (uint32_t i = slot_count(x); i > 0; --i) {
    *end = (start(x) / block_ + i) * block_;
    if (const uint64_t id = record_at(slots_[x.slots + i - 1])) return id;
  }
  return 0;
}

// Frees a node without children. Its records go to `taken` (they must be gone already if that is nullptr), its holes
// are released.
void Trie::drop_node(uint32_t node, std::vector<uint64_t>* taken) {
  Node& x = nodes_[node];
  const uint32_t slots = slot_count(x);
  if (taken) {
    for (uint32_t i = 0; i < slots; ++i) {
      if (const uint64_t id = record_at(slots_[x.slots + i])) {
        taken->push_back(id);
        clear_record(node, (start(x) / block_ + 1 + i) * block_);
      }
    }
    if (x.tail) take_tail(node, taken);
  }
  for (uint32_t i = 0; i < slots; ++i) release(&slots_[x.slots + i]);
  children_.erase(find_slot(x.parent, node));
  (x.prev ? nodes_[x.prev].next : nodes_[x.parent].child) = x.next;
  if (x.next) nodes_[x.next].prev = x.prev;
  if (pins(x)) own_pins_.erase(node);
  unlink(node);
  live_tokens_ -= x.length;
  live_slots_ -= slots;
  --live_nodes_;
  x = Node{};
  x.next = free_;
  free_ = node;
}

// Cuts an unpinned leaf back to its last record, or drops it and goes on with the parent.
void Trie::trim(uint32_t node) {
  while (nodes_[node].parent && !nodes_[node].child && !pins(nodes_[node])) {
    uint32_t end;
    if (last_record(node, &end)) {
      if (end == nodes_[node].end) return;
      const double bits = bits_at(Cursor{node, end});
      Node& x = nodes_[node];
      for (uint32_t i = end / block_ - start(x) / block_; i < slot_count(x); ++i) release(&slots_[x.slots + i]);
      live_slots_ -= x.end / block_ - end / block_;
      live_tokens_ -= x.end - end;
      x.bits = bits;
      x.length -= x.end - end;
      x.end = end;
      return;
    }
    const uint32_t parent = nodes_[node].parent;
    drop_node(node, nullptr);
    node = parent;
  }
}

uint64_t Trie::evict(uint64_t below) {
  FairLock::Exclusive guard(lock_);
  for (uint32_t leaf = nodes_[0].newer; leaf;) {  // the oldest node of all is one, those after it need not be
    uint32_t end;
    const uint64_t id = last_record(leaf, &end);
    if (nodes_[leaf].child || id >= below) {
      leaf = nodes_[leaf].newer;
      continue;
    }
    if (id) clear_record(leaf, end);
    trim(leaf);
    if (id) {
      compact_if_half_garbage();
      return id;
    }
    leaf = nodes_[0].newer;
  }
  return 0;
}

bool Trie::remove(uint64_t id) {
  FairLock::Exclusive guard(lock_);
  const uint32_t node = records_.get(id);
  if (!node) return false;
  uint32_t last;
  const uint32_t end = record_end(node, id);
  const bool ends_here = !nodes_[node].child && last_record(node, &last) == id;
  const bool leaves_hole = !ends_here && end % block_ == 0;
  if (leaves_hole) holes_.insert(id);
  clear_record(node, end);
  if (leaves_hole) slot(nodes_[node], end) = id | kHole;
  trim(node);
  compact_if_half_garbage();
  return true;
}

bool Trie::is_hole(uint64_t id) const {
  FairLock::Shared guard(lock_);
  return holes_.count(id) != 0;
}

std::vector<uint64_t> Trie::take_released() {
  FairLock::Exclusive guard(lock_);
  std::vector<uint64_t> taken;
  taken.swap(released_);
  std::sort(taken.begin(), taken.end());
  return taken;
}

std::vector<uint64_t> Trie::erase(uint32_t root, const uint32_t* tokens, size_t count) {
  const uint32_t n = checked_tokens(count);
  FairLock::Exclusive guard(lock_);
  const Cursor at = walk(root_node(root), 0, tokens, n);
  std::vector<uint64_t> taken;
  if (n == 0 || at.depth < n) return taken;
  const uint32_t cut = (n - 1) / block_ * block_;
  const uint32_t freed = pins(nodes_[at.node]);
  uint32_t p = nodes_[at.node].parent;
  for (uint32_t x = at.node; x != p;) {  // the leaves of the subtree first
    while (nodes_[x].child) x = nodes_[x].child;
    const uint32_t parent = nodes_[x].parent;
    drop_node(x, &taken);
    x = parent;
  }
  while (const uint32_t parent = nodes_[p].parent) {
    Node& x = nodes_[p];
    if (freed) x.older -= freed;
    if (!x.child && !pins(x)) {
      drop_node(p, &taken);
    } else {
      if (x.tail && x.end > cut && !pinned_itself(p)) take_tail(p, &taken);
      if (freed && !pins(x)) link_after(p, nodes_[0].older);
    }
    p = parent;
  }
  std::sort(taken.begin(), taken.end());
  compact_if_half_garbage();
  return taken;
}

// ---- the arena ----

void Trie::rebuild_arena() {
  TokenArena arena(level());
  Buffer<uint64_t> slots;
  uint64_t wide = 0;
  for (size_t i = 1; i < nodes_.size(); ++i)
    if (nodes_[i].parent && TokenArena::is_wide(nodes_[i].offset)) wide += nodes_[i].length;
  arena.reserve(wide, true);
  arena.reserve(live_tokens_ - wide, false);
  slots.reserve(live_slots_);
  for (size_t i = 1; i < nodes_.size(); ++i) {
    Node& x = nodes_[i];
    if (!x.parent) continue;  // free, or a root
    const uint32_t first = static_cast<uint32_t>(slots.size());
    const uint64_t offset = arena.append(arena_, x.offset, x.length, TokenArena::is_wide(x.offset));
    slots.append(slots_.data() + x.slots, slot_count(x));
    x.offset = offset;
    x.slots = first;
  }
  arena_.swap(arena);
  slots_.swap(slots);
  children_.shrink();
}

void Trie::compact() {
  FairLock::Exclusive guard(lock_);
  rebuild_arena();
}

void Trie::compact_if_half_garbage() {
  constexpr size_t kWorthwhile = 1 << 16;  // tokens; below that the pass costs more than it frees
  if (arena_.size() > kWorthwhile && arena_.size() - live_tokens_ > arena_.size() / 2) rebuild_arena();
}

}  // namespace kvstore

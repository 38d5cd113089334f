// Look-ups in the trie: what is stored of a path, and in which records.
#include <algorithm>
#include <stdexcept>
#include <string>

#include "trie/dispatch.h"
#include "trie/trie.h"

namespace kvstore {

size_t Trie::find_slot(uint32_t parent, uint32_t node) const {
  size_t i = children_.home(child_hash(parent, arena_.at(nodes_[node].offset)));
  while (children_.at(i).node != node) i = children_.next(i);
  return i;
}

uint32_t Trie::find(uint32_t parent, uint32_t token) const {
  const uint32_t hash = child_hash(parent, token);
  for (size_t i = children_.home(hash);; i = children_.next(i)) {
    const ChildTable::Slot& slot = children_.at(i);
    if (!slot.node) return 0;
    if (slot.hash != hash) continue;
    const Node& x = nodes_[slot.node];
    if (x.parent == parent && arena_.at(x.offset) == token) return slot.node;
  }
}

uint32_t Trie::root_node(uint32_t root) const {
  if (root >= roots_.size()) throw std::invalid_argument("root: " + std::to_string(root) + " does not exist");
  return roots_[root];
}

double Trie::bits_at(Cursor at) const {
  const Node& x = nodes_[at.node];
  if (at.depth == x.end) return x.bits;
  const double below = nodes_[x.parent].bits;
  return below + (x.bits - below) * (at.depth - start(x)) / x.length;
}

// Follows tokens[0, count) down from the end of node `from`, which is at `depth`.
Trie::Cursor Trie::walk(uint32_t from, uint32_t depth, const uint32_t* tokens, uint32_t count) const {
  Cursor at{from, depth};
  if (children_.empty()) return at;
  for (uint32_t done = 0; done < count;) {
    const uint32_t child = find(at.node, tokens[done]);
    if (!child) break;
    const Node& x = nodes_[child];
    const uint32_t shared =
        1 + arena_.shared(x.offset + 1, tokens + done + 1, std::min(x.length, count - done) - 1);
    done += shared;
    at = Cursor{child, depth + done};
    if (shared < x.length) break;
  }
  return at;
}

// The records that cover the last, partial block up to at.depth at least: every record below the match point that ends
// within the block shares the tokens up to there. Pre-order, newest child first; visits at most kMaxVisits nodes.
// Calls found(node that holds it, id, end) until that is true.
template <class Found>
void Trie::covering(Cursor at, const Found& found) const {
  const uint32_t limit = (at.depth / block_ + 1) * block_;
  uint32_t x = at.node;
  for (uint32_t visits = 0; visits < kMaxVisits; ++visits) {
    const Node& node = nodes_[x];
    const uint64_t id = node.end >= limit ? record_at(slot(node, limit)) : node.tail;
    if (id && found(x, id, std::min(node.end, limit))) return;
    if (node.end < limit && node.child) {
      x = node.child;
      continue;
    }
    while (x != at.node && !nodes_[x].next) x = nodes_[x].parent;
    if (x == at.node) return;
    x = nodes_[x].next;
  }
}

uint32_t Trie::longest_prefix(uint32_t root, const uint32_t* tokens, size_t count) const {
  const uint32_t n = checked_tokens(count);
  FairLock::Shared guard(lock_);
  return walk(root_node(root), 0, tokens, n).depth;
}

TrieMatch Trie::match(uint32_t root, const uint32_t* tokens, size_t count, bool touch) {
  const uint32_t n = checked_tokens(count);
  TrieMatch out;
  uint32_t used = 0, at_node = 0;
  const auto look = [&] {
    const uint32_t top = root_node(root);
    const Cursor at = walk(top, 0, tokens, n);
    used = at_node = at.node;
    out.depth = at.depth;
    out.bits = bits_at(at);
    const size_t blocks = (size_t{at.depth} + block_ - 1) / block_;
    out.records.assign(blocks, 0);
    out.ends.assign(blocks, 0);
    for (uint32_t x = at.node; x != top; x = nodes_[x].parent) {  // upwards: the largest end of a block comes first
      const Node& node = nodes_[x];
      const uint32_t upto = std::min(node.end, at.depth);
      if (node.tail && node.end <= at.depth && !out.records[node.end / block_]) {
        out.records[node.end / block_] = node.tail;
        out.ends[node.end / block_] = node.end;
      }
      for (uint32_t i = start(node) / block_, k = node.slots; i < upto / block_; ++i, ++k) {
        if (!record_at(slots_[k])) continue;
        out.records[i] = slots_[k];
        out.ends[i] = (i + 1) * block_;
      }
    }
    if (at.depth % block_ && out.ends.back() != at.depth) {
      covering(at, [&](uint32_t holder, uint64_t id, uint32_t end) {
        out.records.back() = id;
        out.ends.back() = end;
        used = holder;
        return true;
      });
    }
  };
  if (touch) {
    FairLock::Exclusive guard(lock_);
    look();
    touch_up(used, at_node);
  } else {
    FairLock::Shared guard(lock_);
    look();
  }
  return out;
}

std::vector<std::pair<uint64_t, uint32_t>> Trie::tails(uint32_t root, const uint32_t* tokens, size_t count) const {
  const uint32_t n = checked_tokens(count);
  FairLock::Shared guard(lock_);
  const uint32_t top = root_node(root);
  const Cursor at = walk(top, 0, tokens, n);
  std::vector<std::pair<uint64_t, uint32_t>> out;
  for (uint32_t x = at.node; x != top; x = nodes_[x].parent)
    if (nodes_[x].tail && nodes_[x].end <= at.depth) out.emplace_back(nodes_[x].tail, nodes_[x].end);
  return out;
}

std::vector<std::pair<uint64_t, uint32_t>> Trie::covers(uint32_t root, const uint32_t* tokens, size_t count) const {
  const uint32_t n = checked_tokens(count);
  FairLock::Shared guard(lock_);
  const Cursor at = walk(root_node(root), 0, tokens, n);
  std::vector<std::pair<uint64_t, uint32_t>> out;
  if (at.depth % block_) {
    covering(at, [&](uint32_t, uint64_t id, uint32_t end) {
      out.emplace_back(id, end);
      return false;
    });
  }
  return out;
}

uint32_t Trie::record_end(uint32_t node, uint64_t id) const {
  const Node& x = nodes_[node];
  if (x.tail == id) return x.end;
  const uint64_t* const places = slots_.data() + x.slots;
  uint32_t i = 0, stop = slot_count(x);
  while (i < stop) {  // ids rise along an edge, unless a place was filled later
    const uint32_t middle = i + (stop - i) / 2;
    if ((places[middle] & ~kHole) < id)
      i = middle + 1;
    else
      stop = middle;
  }
  if (i == slot_count(x) || places[i] != id)
    for (i = 0; places[i] != id;) ++i;
  return (start(x) / block_ + 1 + i) * block_;
}

bool Trie::contains(uint64_t id) const {
  FairLock::Shared guard(lock_);
  return records_.get(id) != 0;
}

bool Trie::path(uint64_t id, uint32_t* root, std::vector<uint32_t>* tokens) const {
  FairLock::Shared guard(lock_);
  uint32_t x = records_.get(id);
  if (!x) return false;
  tokens->resize(record_end(x, id));
  for (uint32_t upto = static_cast<uint32_t>(tokens->size()); nodes_[x].parent; x = nodes_[x].parent) {
    const uint32_t from = start(nodes_[x]);
    arena_.copy(nodes_[x].offset, upto - from, tokens->data() + from);
    upto = from;
  }
  *root = static_cast<uint32_t>(nodes_[x].tail);
  return true;
}

bool Trie::record_tokens(uint64_t id, std::vector<uint32_t>* tokens) const {
  FairLock::Shared guard(lock_);
  uint32_t x = records_.get(id);
  if (!x) return false;
  const uint32_t end = record_end(x, id), begin = (end - 1) / block_ * block_;
  tokens->resize(end - begin);
  for (uint32_t upto = end; upto > begin; x = nodes_[x].parent) {
    const uint32_t edge = start(nodes_[x]), from = std::max(edge, begin);
    arena_.copy(nodes_[x].offset + (from - edge), upto - from, tokens->data() + (from - begin));
    upto = from;
  }
  return true;
}

TrieStats Trie::stats() const {
  FairLock::Shared guard(lock_);
  const uint64_t bytes = sizeof(*this) + arena_.bytes() + slots_.bytes() + nodes_.bytes() + children_.bytes() +
                         records_.bytes() + roots_.capacity() * 4 + own_pins_.size() * 32 + holes_.size() * 32;
  return {live_nodes_, live_tokens_, live_records_, holes_.size(), bytes, arena_.size(), arena_.size() - live_tokens_};
}

}  // namespace kvstore

// Probabilities in the trie: the Dirichlet mixture of traffic and model, and what follows from it.
//
// After a prefix that `total` operations went through, a token that `count` of them went on with has
//     P = (count + a p) / (total + a),
// a the concentration, p the model's probability. Inside an edge count and total are the edge's count c, and p is the
// geometric mean over its tokens, 2^-(mean bits), since only their sum is kept; at its first token the total is the
// parent's count. With w = log2((c + a) / (c + a p)) an edge of k tokens costs k w + log2((total + a) / (c + a)), and
// over a path the second term telescopes: one w a node and one logarithm in all. What is not stored counts as if it
// were with uniform bits and no traffic, so that inserting a path changes its bits by the traffic alone.
#include <algorithm>
#include <cmath>
#include <stdexcept>

#include "trie/trie.h"

namespace kvstore {

namespace {

// No token is certain: less would make paths of different length be at distance zero.
constexpr double kLeastBits = 1.0 / (1 << 20);
constexpr double kLn2 = 0.693147180559945309417232121458;

// w, for a count, a concentration and the model's bits of a token. The plain logarithm is the faster, and exact enough
// where its argument is well above 1.
double mixed_bits(double count, double a, double bits) {
  bits = std::max(bits, kLeastBits);
  if (count == 0) return bits;
  const double rest = bits < 1.0 / 1024 ? -std::expm1(-bits * kLn2) : 1 - std::exp2(-bits);  // 1 - p
  const double excess = a * rest / (count + a * (1 - rest));
  return excess > 1.0 / (1 << 20) ? std::log2(1 + excess) : std::log1p(excess) / kLn2;
}

}  // namespace

double Trie::token_bits(const Node& x) const {
  return mixed_bits(x.count, concentration_, (x.bits - nodes_[x.parent].bits) / x.length);
}

// Bits of the tokens [from, at.depth) of the path to the cursor.
double Trie::below_bits(Cursor at, uint32_t from) const {
  double sum = 0;
  uint32_t x = at.node;
  for (uint32_t upto = at.depth; upto > from;) {
    const Node& node = nodes_[x];
    const uint32_t first = std::max(start(node), from);
    sum += (upto - first) * token_bits(node);
    upto = first;
    if (first == start(node)) x = node.parent;
  }
  return sum + std::log2((nodes_[x].count + concentration_) / (nodes_[at.node].count + concentration_));
}

// Bits of the tokens [from, count) of any path.
double Trie::path_bits(uint32_t root, const uint32_t* tokens, uint32_t count, uint32_t from) const {
  const Cursor at = walk(root_node(root), 0, tokens, count);
  if (at.depth < from) return (count - from) * kUniformBits;
  const double stored = below_bits(at, from);
  if (at.depth == count) return stored;
  return stored + (count - at.depth) * kUniformBits + std::log2(nodes_[at.node].count / concentration_ + 1);
}

std::pair<uint32_t, double> Trie::best_match(uint32_t root, const uint32_t* tokens, size_t count) const {
  const uint32_t n = checked_tokens(count);
  FairLock::Shared guard(lock_);
  // Bits only grow with depth, so among all stored prefixes the deepest common one shares the most.
  const Cursor at = walk(root_node(root), 0, tokens, n);
  return {at.depth, below_bits(at, 0)};
}

double Trie::bits(uint32_t root, const uint32_t* tokens, size_t count) const {
  const uint32_t n = checked_tokens(count);
  FairLock::Shared guard(lock_);
  return path_bits(root, tokens, n, 0);
}

double Trie::shared_bits(uint32_t root, const uint32_t* p, size_t p_count, const uint32_t* q, size_t q_count) const {
  const uint32_t shared = arena_.shared(p, q, std::min(checked_tokens(p_count), checked_tokens(q_count)));
  FairLock::Shared guard(lock_);
  return path_bits(root, p, shared, 0);
}

double Trie::distance(uint32_t root, const uint32_t* p, size_t p_count, const uint32_t* q, size_t q_count) const {
  const uint32_t m = checked_tokens(p_count), n = checked_tokens(q_count);
  const uint32_t shared = arena_.shared(p, q, std::min(m, n));
  FairLock::Shared guard(lock_);
  return path_bits(root, p, m, shared) + path_bits(root, q, n, shared);
}

std::vector<uint64_t> Trie::prune(uint32_t root, double max_bits) {
  if (std::isnan(max_bits)) throw std::invalid_argument("max_bits: must not be NaN");
  struct Step {
    uint32_t node;
    double above;  // bits of the path to the node's start, without the term that telescopes
  };
  FairLock::Exclusive guard(lock_);
  const uint32_t top = root_node(root);
  const double total = nodes_[top].count + concentration_;
  std::vector<Step> order, open;
  if (nodes_[top].child) open.push_back(Step{nodes_[top].child, 0});
  while (!open.empty()) {
    const Step at = open.back();
    open.pop_back();
    order.push_back(at);
    const Node& x = nodes_[at.node];
    if (x.next) open.push_back(Step{x.next, at.above});
    if (x.child) open.push_back(Step{x.child, at.above + x.length * token_bits(x)});
  }
  std::vector<std::pair<uint32_t, uint64_t>> taken;
  for (size_t i = order.size(); i > 0; --i) {  // what lies below a node comes before it
    const uint32_t node = order[i - 1].node;
    if (!nodes_[node].parent || pins(nodes_[node])) continue;  // dropped with its last child, or kept
    const double each = token_bits(nodes_[node]);
    const double base = order[i - 1].above + std::log2(total / (nodes_[node].count + concentration_));
    const uint32_t from = start(nodes_[node]);
    const size_t before = taken.size();
    const auto take = [&](uint32_t end, uint64_t id) {
      if (!id || base + (end - from) * each <= max_bits) return;
      taken.emplace_back(end, id);
      clear_record(node, end);
    };
    take(nodes_[node].end, nodes_[node].tail);
    for (uint32_t k = slot_count(nodes_[node]); k > 0; --k)
      take((from / block_ + k) * block_, record_at(slots_[nodes_[node].slots + k - 1]));
    if (taken.size() > before) trim(node);
  }
  std::sort(taken.begin(), taken.end(), [](const auto& a, const auto& b) {
    return a.first != b.first ? a.first > b.first : a.second < b.second;
  });
  std::vector<uint64_t> ids;
  ids.reserve(taken.size());
  for (const auto& record : taken) ids.push_back(record.second);
  compact_if_half_garbage();
  return ids;
}

bool Trie::leaf(uint64_t id, TrieLeaf* found) const {
  FairLock::Shared guard(lock_);
  uint32_t end;
  const uint32_t node = records_.get(id);
  if (!node || nodes_[node].child || last_record(node, &end) != id) return false;
  found->bits = below_bits(Cursor{node, end}, 0);
  for (uint32_t x = node; nodes_[x].parent; x = nodes_[x].parent) {
    const Node& at = nodes_[x];
    if (at.tail && at.end < end) found->above.push_back(at.tail);
    for (uint32_t k = slot_count(at); k > 0; --k) {
      const uint64_t above = record_at(slots_[at.slots + k - 1]);
      if (above && (start(at) / block_ + k) * block_ < end) found->above.push_back(above);
    }
  }
  return true;
}

// Up from the record while the way up is short enough; at each ancestor down into its other children, newest first.
bool Trie::near(uint64_t id, double radius, uint32_t visits, TrieNear* found) const {
  struct Step {
    uint32_t node;
    double above;  // from the ancestor to the node's start, without the term that telescopes
  };
  FairLock::Shared guard(lock_);
  uint32_t end;
  const uint32_t self = records_.get(id);
  if (!self || nodes_[self].child || last_record(self, &end) != id) return false;
  const double a = concentration_;
  double climbed = 0;
  std::vector<Step> open;
  for (uint32_t x = self; nodes_[x].parent; x = nodes_[x].parent) {
    const uint32_t meet = nodes_[x].parent;
    climbed += (std::min(nodes_[x].end, end) - start(nodes_[x])) * token_bits(nodes_[x]);
    const double total = nodes_[meet].count + a;
    const double up = climbed + std::log2(total / (nodes_[self].count + a));
    if (up > radius) break;
    open.push_back(Step{nodes_[meet].child, 0});
    while (!open.empty()) {
      if (visits-- == 0) return true;
      const Step at = open.back();
      open.pop_back();
      const Node& node = nodes_[at.node];
      if (node.next) open.push_back(Step{node.next, at.above});
      if (at.node == x) continue;
      const double fork = up + at.above + std::log2(total / (node.count + a));
      uint32_t last = node.end;
      const uint64_t leaf = node.child ? 0 : last_record(at.node, &last);
      const double down = fork + (last - start(node)) * token_bits(node);
      if (down > radius) continue;
      if (node.child) open.push_back(Step{node.child, at.above + node.length * token_bits(node)});
      if (!leaf) continue;
      found->records.push_back(leaf);
      found->distances.push_back(down);
    }
  }
  return true;
}

void Trie::traffic(bool holes, std::vector<uint64_t>* ids, std::vector<uint32_t>* counts) const {
  std::vector<std::pair<uint64_t, uint32_t>> rows;
  {
    FairLock::Shared guard(lock_);
    rows.reserve(holes ? holes_.size() : live_records_);
    for (size_t i = 1; i < nodes_.size(); ++i) {
      const Node& x = nodes_[i];
      if (!x.parent) continue;  // free, or a root
      for (uint32_t k = 0, slots = slot_count(x); k < slots; ++k) {
        const uint64_t place = slots_[x.slots + k];
        if (place && holes == (record_at(place) == 0)) rows.emplace_back(place & ~kHole, x.count);
      }
      if (x.tail && !holes) rows.emplace_back(x.tail, x.count);
    }
  }
  std::sort(rows.begin(), rows.end());
  ids->reserve(rows.size());
  counts->reserve(rows.size());
  for (const auto& row : rows) {
    ids->push_back(row.first);
    counts->push_back(row.second);
  }
}

}  // namespace kvstore

// Path-compressed radix trie over uint32 tokens: the index of every stored block of a KV cache.
//
// A stored sequence is cut in blocks of `block_tokens` (B). A stored block is a *record* with a 64-bit id. A record
// that ends at depth e covers the tokens [floor((e - 1) / B) * B, e): a full block ends at a multiple of B, a tail
// anywhere else.
//
// An edge is a run of one shared token arena (trie/arena.h); a split shares the run. A node keeps the cumulative bits
// (-log2 P) at its end; inside an edge they are linear. The ids of the full blocks that end on an edge are a slice of a
// shared id arena; a tail sits in the node that ends with it. Children are found in one hash table and listed newest
// first.
//
// A full block that is removed while something continues it leaves a *hole*: its id stays in its place, marked, until a
// new record fills it or nothing is stored behind it any more. A place that never had a record is 0.
//
// Traffic: a node counts the inserts and touches that entered its edge; all tokens of an edge share the count, and the
// counts of a node's children never exceed its own. Counts and bits make the mixture probabilities (trie/bits.cc).
//
// Recency: one list of all nodes without pins at or below them. A touch moves the nodes of a path to its recent end,
// deepest first, so a node is always more recent than what is below it and the oldest node is always a leaf.
//
// Thread-safe: readers share, writers exclude. Nothing recurses. Invalid arguments throw std::invalid_argument before
// anything changes.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "common/cpu.h"
#include "common/fair_lock.h"
#include "trie/arena.h"
#include "trie/memory.h"

namespace kvstore {

// The number of tokens of a query, if it fits the trie's indexes.
inline uint32_t checked_tokens(size_t count) {
  if (count > 0x7fffffff) throw std::invalid_argument("tokens: expected at most 2^31 - 1");
  return static_cast<uint32_t>(count);
}

// What a token costs if no model said anything: that of a vocabulary of 65,536.
constexpr double kUniformBits = 16.0;

struct TrieMatch {
  uint32_t depth = 0;             // leading tokens of the query that are in the trie
  double bits = 0;                // -log2 P of that prefix by the model alone
  std::vector<uint64_t> records;  // per block that holds a token < depth: record id, 0 for a hole
  std::vector<uint32_t> ends;     // per block: where its record ends (tokens), 0 for a hole
};

struct TrieStats {
  uint64_t nodes, tokens, records, holes, bytes, arena_tokens, garbage_tokens;
};

// Columns of `count` records for restore().
struct TrieRows {
  size_t count, token_count;
  const uint32_t *roots, *starts, *counts, *tokens;
  const uint64_t *ids, *tags, *parent_tags;
  const float* bits;
  const uint8_t* pinned;
  const uint8_t* holes;     // nullptr: none
  const uint32_t* traffic;  // nullptr: none
  bool keep_tails;          // tails inside of longer records stay
  // Where in `tokens` those of each begin; nullptr: one after the other, and there are no others.
  const uint64_t* token_at;
};

// The end of a stored sequence: -log2 P of its path, and the records above it, the deepest first.
struct TrieLeaf {
  double bits = 0;
  std::vector<uint64_t> above;
};

// Ends of stored sequences and how far they are, in bits.
struct TrieNear {
  std::vector<uint64_t> records;
  std::vector<double> distances;
};

class Trie {
 public:
  explicit Trie(uint32_t block_tokens, double concentration = 4.0);
  Trie(const Trie&) = delete;
  Trie& operator=(const Trie&) = delete;

  uint32_t block_tokens() const { return block_; }
  double concentration() const { return concentration_; }
  uint32_t new_root();

  uint32_t longest_prefix(uint32_t root, const uint32_t* tokens, size_t count) const;
  TrieMatch match(uint32_t root, const uint32_t* tokens, size_t count, bool touch);
  // (id, end) of every tail on the matched path, the deepest first.
  std::vector<std::pair<uint64_t, uint32_t>> tails(uint32_t root, const uint32_t* tokens, size_t count) const;
  // (id, end) of every record that covers the last, partial block of the matched path; none if that ends with a block.
  std::vector<std::pair<uint64_t, uint32_t>> covers(uint32_t root, const uint32_t* tokens, size_t count) const;

  // `bits`: one value per token, or nullptr for `uniform_bits` each. `keep_tails`: no tail is superseded.
  std::vector<uint64_t> insert(uint32_t root, const uint32_t* tokens, size_t count, const float* bits,
                               float uniform_bits, const uint32_t* ends, const uint64_t* ids, size_t records,
                               bool keep_tails = false);
  uint32_t touch(uint32_t root, const uint32_t* tokens, size_t count);
  void pin(uint32_t root, const uint32_t* tokens, size_t count, int delta);

  uint64_t evict(uint64_t below = UINT64_MAX);  // among records below this one; 0: nothing to evict
  bool remove(uint64_t id);
  std::vector<uint64_t> erase(uint32_t root, const uint32_t* tokens, size_t count);

  bool is_hole(uint64_t id) const;
  std::vector<uint64_t> take_released();  // holes that nothing is behind any more, each told once; rising

  // ---- probabilities: trie/bits.cc ----

  std::pair<uint32_t, double> best_match(uint32_t root, const uint32_t* tokens, size_t count) const;
  double bits(uint32_t root, const uint32_t* tokens, size_t count) const;
  double shared_bits(uint32_t root, const uint32_t* p, size_t p_count, const uint32_t* q, size_t q_count) const;
  double distance(uint32_t root, const uint32_t* p, size_t p_count, const uint32_t* q, size_t q_count) const;
  std::vector<uint64_t> prune(uint32_t root, double max_bits);  // the ids removed, deepest first
  bool leaf(uint64_t id, TrieLeaf* found) const;                // false: unknown, or not the end of a sequence
  bool near(uint64_t id, double radius, uint32_t visits, TrieNear* found) const;
  void traffic(bool holes, std::vector<uint64_t>* ids, std::vector<uint32_t>* counts) const;

  // ----

  bool contains(uint64_t id) const;
  bool path(uint64_t id, uint32_t* root, std::vector<uint32_t>* tokens) const;
  bool record_tokens(uint64_t id, std::vector<uint32_t>* tokens) const;  // of the record's block; false: unknown

  std::vector<uint64_t> restore(const TrieRows& rows);
  void compact();
  TrieStats stats() const;

 private:
  struct alignas(64) Node {  // one cache line
    uint64_t offset;         // place of the edge in the token arena
    double bits;             // cumulative at `end`
    uint64_t tail;           // id of the tail record that ends here; for a root its number
    uint32_t length, end;    // of the edge in tokens; depth of its last token
    uint32_t parent, child;  // child: the newest
    uint32_t next, prev;     // siblings, newest first
    uint32_t older, newer;   // recency; newer kOut: not in the list, and `older` counts the pins at and below
    uint32_t slots;          // first full-block id in the id arena
    uint32_t count;          // traffic that entered the edge, saturating; for a root all that matched a token
  };
  static_assert(sizeof(Node) == 64, "one cache line");
  struct Cursor {
    uint32_t node, depth;  // the deepest node reached and the depth reached in its edge
  };
  class Rebuild;
  static constexpr uint32_t kOut = 0xffffffffu;
  static constexpr uint32_t kMaxVisits = 4096;  // nodes looked at for covering records

  // Marks the id of a hole in its place; ids are below it.
  static constexpr uint64_t kHole = uint64_t{1} << 63;
  static uint64_t record_at(uint64_t place) { return place & kHole ? 0 : place; }

  static constexpr double kLeastConcentration = 1e-6, kMostConcentration = 1e6;

  uint32_t start(const Node& x) const { return x.end - x.length; }
  uint32_t slot_count(const Node& x) const { return x.end / block_ - start(x) / block_; }
  uint64_t& slot(const Node& x, uint32_t end) { return slots_[x.slots + (end / block_ - 1 - start(x) / block_)]; }
  uint64_t slot(const Node& x, uint32_t end) const { return slots_[x.slots + (end / block_ - 1 - start(x) / block_)]; }
  uint32_t pins(const Node& x) const { return x.newer == kOut ? x.older : 0; }
  uint32_t child_hash(uint32_t parent, uint32_t token) const {
    return static_cast<uint32_t>(mix64(((uint64_t{parent} << 32) | token) ^ seed_));
  }
  size_t find_slot(uint32_t parent, uint32_t node) const;
  uint32_t find(uint32_t parent, uint32_t token) const;
  uint32_t root_node(uint32_t root) const;
  double bits_at(Cursor at) const;
  Cursor walk(uint32_t from, uint32_t depth, const uint32_t* tokens, uint32_t count) const;
  template <class Found>
  void covering(Cursor at, const Found& found) const;

  double token_bits(const Node& x) const;
  double below_bits(Cursor at, uint32_t from) const;
  double path_bits(uint32_t root, const uint32_t* tokens, uint32_t count, uint32_t from) const;

  void check_insert(const float* bits, float uniform_bits, uint32_t count, const uint32_t* ends, const uint64_t* ids,
                    size_t records) const;
  void room(size_t tokens, bool wide, size_t slots, size_t nodes);
  uint32_t take_node();
  uint32_t split(uint32_t node, uint32_t depth);
  uint32_t hang(Cursor at, const uint32_t* tokens, uint32_t count, bool wide, double bits);
  void put(uint32_t node, uint32_t end, uint64_t id, std::vector<uint64_t>* replaced);
  void take_tail(uint32_t node, std::vector<uint64_t>* taken);
  uint64_t last_record(uint32_t node, uint32_t* end) const;
  void clear_record(uint32_t node, uint32_t end);
  void release(uint64_t* place);
  void drop_node(uint32_t node, std::vector<uint64_t>* taken);
  void trim(uint32_t node);
  uint32_t record_end(uint32_t node, uint64_t id) const;
  bool pinned_itself(uint32_t node) const { return pins(nodes_[node]) && own_pins_.count(node); }

  void unlink(uint32_t node);
  void link_after(uint32_t node, uint32_t older);
  void touch_up(uint32_t node, uint32_t counted);
  void rebuild_arena();
  void compact_if_half_garbage();

  const uint32_t block_;
  const double concentration_;
  const uint64_t seed_;  // keeps chosen tokens from colliding in the child table on purpose

  TokenArena arena_;
  Buffer<uint64_t> slots_;
  Buffer<Node> nodes_;  // 0: head of the recency list, newer = the oldest node
  ChildTable children_;
  RecordTable records_;
  std::vector<uint32_t> roots_;
  std::unordered_map<uint32_t, uint32_t> own_pins_;  // only pinned nodes
  std::unordered_set<uint64_t> holes_;
  std::vector<uint64_t> released_;  // since take_released()
  uint32_t free_ = 0;
  uint64_t top_id_ = 0;  // no record has a higher id
  uint64_t live_nodes_ = 0, live_tokens_ = 0, live_slots_ = 0, live_records_ = 0;

  mutable FairLock lock_;
};

}  // namespace kvstore

// The trie: restored from any columns, then any calls; what it says of itself must agree all the time.
#include <stdexcept>

#include "fuzz.h"
#include "trie/trie.h"

namespace {

using namespace kvstore;

std::vector<std::uint32_t> tokens_of(fuzz::Input& input, std::size_t most) {
  std::vector<std::uint32_t> tokens(input.below(most));
  for (std::uint32_t& token : tokens) token = static_cast<std::uint32_t>(input.below(3));
  return tokens;
}

// Columns that hang together as far as the input wants it: a row continues one of those before it.
struct Columns {
  std::vector<std::uint32_t> roots, starts, counts, tokens, traffic;
  std::vector<std::uint64_t> ids, tags, parents;
  std::vector<float> bits;
  std::vector<std::uint8_t> pinned, holes;

  Columns(fuzz::Input& input, std::uint32_t block) {
    const std::size_t rows = input.below(48);
    for (std::size_t i = 0; i < rows; ++i) {
      const std::size_t before = input.below(i + 1);
      const bool continues = i > 0 && before < i;
      std::uint32_t count = static_cast<std::uint32_t>(input.below(3) ? block : input.below(block + 2));
      std::uint32_t start = continues ? starts[before] + counts[before] : 0;
      if (input.below(16) == 1) start = static_cast<std::uint32_t>(input.number(4));
      if (input.below(32) == 1) count = static_cast<std::uint32_t>(input.below(70));
      roots.push_back(static_cast<std::uint32_t>(input.below(32) == 1 ? input.below(8) : continues ? roots[before] : input.below(2)));
      starts.push_back(start);
      counts.push_back(count);
      ids.push_back(input.below(16) == 1 ? input.number(8) : i + 1);
      tags.push_back(input.below(16) == 1 ? input.below(4) : 100 + i);
      parents.push_back(input.below(16) == 1 ? input.below(60) + 60 : continues ? tags[before] : 0);
      float given = static_cast<float>(input.below(100));
      if (input.below(16) == 1) {
        const auto raw = static_cast<std::uint32_t>(input.number(4));
        std::memcpy(&given, &raw, 4);
      }
      bits.push_back(given);
      pinned.push_back(input.below(8) == 1);
      holes.push_back(input.below(6) == 1);
      traffic.push_back(static_cast<std::uint32_t>(input.below(16) == 1 ? input.number(4) : input.below(5)));
      for (std::uint32_t t = 0; t < count; ++t) tokens.push_back(static_cast<std::uint32_t>(input.below(2)));
    }
    if (input.below(64) == 1) tokens.resize(input.below(tokens.size() + 5));
  }

  TrieRows rows(bool with_traffic) const {
    return {ids.size(), tokens.size(), roots.data(), starts.data(), counts.data(), tokens.data(), ids.data(),
            tags.data(), parents.data(), bits.data(), pinned.data(), with_traffic ? holes.data() : nullptr,
            with_traffic ? traffic.data() : nullptr};
  }
};

void agree(const Trie& trie) {
  const TrieStats stats = trie.stats();
  std::vector<std::uint64_t> ids;
  std::vector<std::uint32_t> counts;
  trie.traffic(false, &ids, &counts);
  fuzz::require(ids.size() == stats.records && counts.size() == ids.size(), "records are counted wrong");
  for (const std::uint64_t id : ids) {
    std::uint32_t root = 0;
    std::vector<std::uint32_t> path;
    fuzz::require(trie.contains(id) && trie.path(id, &root, &path), "a record that is listed is not there");
    const std::uint32_t depth = trie.longest_prefix(root, path.data(), path.size());
    fuzz::require(depth == path.size(), "the path of a record is not found");
    fuzz::tell(path.data(), 4 * path.size());
  }
}

void call(Trie& trie, fuzz::Input& input, std::uint64_t& next) {
  const std::uint32_t block = trie.block_tokens();
  const auto root = static_cast<std::uint32_t>(input.below(3));
  const std::uint64_t id = 1 + input.below(64);
  const std::vector<std::uint32_t> tokens = tokens_of(input, 40), other = tokens_of(input, 40);
  switch (input.below(14)) {
    case 0: {
      std::vector<std::uint32_t> ends;
      std::vector<std::uint64_t> ids;
      for (std::uint32_t end = block; end < tokens.size(); end += block) ends.push_back(end);
      if (!tokens.empty()) ends.push_back(static_cast<std::uint32_t>(tokens.size()));
      for (std::size_t i = 0; i < ends.size(); ++i) ids.push_back(input.below(16) == 1 ? id : next++);
      trie.insert(root, tokens.data(), tokens.size(), nullptr, 16.0f, ends.data(), ids.data(), ends.size());
      break;
    }
    case 1: trie.match(root, tokens.data(), tokens.size(), input.flag()); break;
    case 2: trie.touch(root, tokens.data(), tokens.size()); break;
    case 3: trie.pin(root, tokens.data(), tokens.size(), input.flag() ? 1 : -1); break;
    case 4: trie.evict(input.flag() ? UINT64_MAX : id); break;
    case 5: trie.remove(id); break;
    case 6: trie.erase(root, tokens.data(), tokens.size()); break;
    case 7: trie.best_match(root, tokens.data(), tokens.size()); break;
    case 8: trie.bits(root, tokens.data(), tokens.size()); break;
    case 9: trie.distance(root, tokens.data(), tokens.size(), other.data(), other.size()); break;
    case 10: trie.prune(root, static_cast<double>(input.number(2))); break;
    case 11: {
      TrieLeaf leaf;
      TrieNear near;
      trie.leaf(id, &leaf);
      trie.near(id, static_cast<double>(input.number(2)), 1000, &near);
      break;
    }
    case 12: trie.compact(); break;
    default: trie.shared_bits(root, tokens.data(), tokens.size(), other.data(), other.size()); break;
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  fuzz::Input input(data, size);
  Trie trie(1 + static_cast<std::uint32_t>(input.below(5)));
  trie.new_root();
  trie.new_root();
  const Columns columns(input, trie.block_tokens());
  try {
    const std::vector<std::uint64_t> lost = trie.restore(columns.rows(input.flag()));
    fuzz::require(trie.stats().records <= columns.ids.size() && lost.size() <= columns.ids.size(), "more than there were");
  } catch (const std::invalid_argument&) {
  }
  agree(trie);
  std::uint64_t next = 1000;
  while (input.more()) {
    try {
      call(trie, input, next);
    } catch (const std::invalid_argument&) {
    }
  }
  agree(trie);
  while (trie.evict() != 0) {
  }
  agree(trie);
  return 0;
}

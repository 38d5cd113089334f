#include "catalog/catalog.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>
#include <numeric>
#include <stdexcept>
#include <utility>

#include "common/threads.h"
#include "xxh3/xxh3.h"

namespace kvstore {

namespace {

constexpr uint64_t kPage = 4096, kHeader = 16, kMetas = 2, kNoPage = ~uint64_t{0};
constexpr uint32_t kMagic = 0xBEEFC0DE, kVersion = 1;
constexpr uint16_t kBranch = 0x01, kLeaf = 0x02, kOverflow = 0x04, kMeta = 0x08;  // kinds of pages
constexpr uint16_t kBig = 0x01, kDatabase = 0x02;                                 // kinds of values
constexpr uint16_t kIntegerKey = 0x08;                                            // of a database
constexpr uint32_t kDeepest = 32;
constexpr uint32_t kParted = 3;  // what threads share are the pages of this level: hundreds, if the file is large
// An entry: kvstore/tiers/disk/entry.py.
constexpr uint32_t kEntryHead = 80, kSum = 8, kRecordAt = 8, kCountAt = 56;
constexpr uint64_t kMostRecords = uint64_t{1} << 62;

struct Refused : std::runtime_error {
  using std::runtime_error::runtime_error;
};

void require(bool holds, const char* what) {
  if (!holds) throw Refused(what);
}

template <class T>
T load(const uint8_t* from) {
  T value;
  std::memcpy(&value, from, sizeof(T));
  return value;
}

struct Bytes {
  const uint8_t* data;
  size_t size;
};

int compare(Bytes a, Bytes b) {
  const int order = std::memcmp(a.data, b.data, std::min(a.size, b.size));
  return order ? order : a.size < b.size ? -1 : a.size > b.size;
}

struct Tree {
  uint16_t flags = 0, depth = 0;
  uint32_t pad = 0;
  uint64_t branches = 0, leaves = 0, overflows = 0, entries = 0, root = kNoPage;

  Tree() = default;
  explicit Tree(const uint8_t* at)
      : flags(load<uint16_t>(at + 4)), depth(load<uint16_t>(at + 6)), pad(load<uint32_t>(at)),
        branches(load<uint64_t>(at + 8)), leaves(load<uint64_t>(at + 16)), overflows(load<uint64_t>(at + 24)),
        entries(load<uint64_t>(at + 32)), root(load<uint64_t>(at + 40)) {}
};
constexpr size_t kTreeBytes = 48;

constexpr char kNotFull[] = "a node is longer or shorter than the room it takes";

uint64_t even(uint64_t bytes) { return bytes + bytes % 2; }

enum class Kind { free, main, records, places, other };

// What all walks of one file share.
struct File {
  const uint8_t* data;
  size_t pages;                                  // up to the last that is in use
  std::unique_ptr<std::atomic<uint8_t>[]> used;  // by page: in a tree, or free
  uint64_t commit;
  Level level;
};

// Walks one tree, or a part of it.
class Walk {
 public:
  // A page with its place in the tree, to be walked by another.
  struct Subtree {
    uint64_t page;
    Bytes from, to;
  };

  Walk(File* file, Kind kind, uint32_t depth) : file_(*file), kind_(kind), depth_(depth) {}

  // All keys below are at least `from` and less than `to`; nullptr: no bound. So each is found from the root.
  void walk_page(uint64_t number, uint32_t depth, Bytes from, Bytes to) {
    if (depth == left_from_) return left_.push_back({number, from, to});
    take(number);
    const uint8_t* page = file_.data + number * kPage;
    require(load<uint64_t>(page) == number, "a page has another number");
    const uint16_t flags = load<uint16_t>(page + 10);
    const uint32_t lower = load<uint16_t>(page + 12), upper = load<uint16_t>(page + 14);
    require(flags == kBranch || flags == kLeaf, "a page of a tree is neither branch nor leaf");
    require(lower >= kHeader && lower <= upper && upper <= kPage && lower % 2 == 0, "a page has wrong bounds");
    const uint32_t count = (lower - kHeader) / 2;
    require((flags == kLeaf) == (depth == depth_), "a tree is not as deep as it says");
    if (flags == kLeaf) {
      ++counts.leaves;
      uint64_t bytes = 0;
      for (uint32_t i = 0; i < count; ++i) bytes += even(take_leaf(node(page, upper, i), page, from, to));
      require(bytes == kPage - upper, kNotFull);
      return;
    }
    ++counts.branches;
    require(count >= 1, "a branch has no children");
    Node here = node(page, upper, 0);
    Bytes first = from;
    uint64_t bytes = even(8 + here.key.size);
    for (uint32_t i = 0; i < count; ++i) {
      const uint64_t child = here.low | static_cast<uint64_t>(here.flags) << 32;
      Bytes next = to;
      if (i + 1 < count) {
        here = node(page, upper, i + 1);
        next = here.key;
        bytes += even(8 + next.size);
        require(next.size && (!first.data || order(first, next) < 0) && (!to.data || order(next, to) < 0),
                "the keys of a branch are out of order");
      }
      walk_page(child, depth + 1, first, next);
      first = next;
    }
    require(bytes == kPage - upper, kNotFull);
  }

  // Leaves the pages of this level of the tree to others; 0: none.
  std::vector<Subtree> left(uint64_t root, uint32_t level) {
    left_from_ = level;
    walk_page(root, 1, Bytes{nullptr, 0}, Bytes{nullptr, 0});
    left_from_ = 0;
    return std::move(left_);
  }

  Tree counts;  // of what was walked
  CatalogEntries entries;
  uint64_t tokens = 0;
  std::vector<std::pair<Tree, Kind>> named;

 private:
  void take(uint64_t page) {
    require(page >= kMetas && page < file_.pages && !file_.used[page].exchange(1, std::memory_order_relaxed),
            "a page is used twice, or does not exist");
  }

  int order(Bytes a, Bytes b) const {
    if (kind_ != Kind::free) return compare(a, b);
    require(a.size == 8 && b.size == 8, "a free list has a wrong key");
    const uint64_t x = load<uint64_t>(a.data), y = load<uint64_t>(b.data);
    return x < y ? -1 : x > y;
  }

  struct Node {
    const uint8_t* at;
    uint32_t low;
    uint16_t flags;
    Bytes key;
  };
  Node node(const uint8_t* page, uint32_t upper, uint32_t i) const {
    const uint32_t at = load<uint16_t>(page + kHeader + 2 * i);
    require(at >= upper && at + 8 <= kPage, "a node lies outside of its page");
    const uint16_t key = load<uint16_t>(page + at + 6);
    require(at + 8 + key <= kPage, "a key lies outside of its page");
    return {page + at, load<uint32_t>(page + at), load<uint16_t>(page + at + 4), {page + at + 8, key}};
  }

  // How many bytes of its page the node takes.
  uint64_t take_leaf(const Node& leaf, const uint8_t* page, Bytes from, Bytes to) {
    const Bytes key = leaf.key;
    require(key.size && (!last_.data || order(last_, key) < 0), "keys are out of order");
    const bool is_found = (!from.data || order(from, key) <= 0) && (!to.data || order(key, to) < 0);
    require(is_found, "a key is not where it is sought");
    last_ = key;
    ++counts.entries;
    require(!(leaf.flags & ~(kBig | kDatabase)), "a value is of an unknown kind");
    const uint8_t* data = key.data + key.size;
    const size_t left = static_cast<size_t>(page + kPage - data);
    if (leaf.flags & kBig) {
      require(left >= 8 && leaf.flags == kBig, "a long value has no pages");
      take_value(key, long_value(load<uint64_t>(data), leaf.low), false);
      return 8 + key.size + 8;
    }
    require(leaf.low <= left, "a value lies outside of its page");
    take_value(key, Bytes{data, leaf.low}, leaf.flags & kDatabase);
    return 8 + key.size + leaf.low;
  }

  Bytes long_value(uint64_t number, uint64_t size) {
    const uint64_t pages = (kHeader - 1 + size) / kPage + 1;
    require(number < file_.pages && pages <= file_.pages - number, "a long value has pages that do not exist");
    for (uint64_t i = 0; i < pages; ++i) take(number + i);
    const uint8_t* first = file_.data + number * kPage;
    require(load<uint64_t>(first) == number && load<uint16_t>(first + 10) == kOverflow &&
                load<uint32_t>(first + 12) == pages,
            "a page of a long value is not one");
    counts.overflows += pages;
    return {first + kHeader, size};
  }

  void take_value(Bytes key, Bytes value, bool is_database) {
    require(is_database == (kind_ == Kind::main), "a database is where a value should be, or the other way round");
    switch (kind_) {
      case Kind::free: return take_free(key, value);
      case Kind::main: return take_database(key, value);
      case Kind::records: return take_entry(key, value);
      case Kind::places: return require(key.size == 8 && value.size == 8, "a place is of a wrong size");
      case Kind::other: return;
    }
  }

  void take_free(Bytes key, Bytes value) {
    require(key.size == 8, "a free list has a wrong key");
    const uint64_t of = load<uint64_t>(key.data);
    require(of >= 1 && of <= file_.commit, "a free list is of no commit");
    require(value.size >= 8 && value.size % 8 == 0, "a free list is of a wrong size");
    const uint64_t count = load<uint64_t>(value.data);
    require(count == value.size / 8 - 1, "a free list is of a wrong size");
    for (uint64_t i = 1, before = kNoPage; i <= count; ++i) {
      const uint64_t page = load<uint64_t>(value.data + 8 * i);
      require(page < before, "a free list is out of order");
      before = page;
      take(page);
    }
  }

  void take_database(Bytes key, Bytes value) {
    require(value.size == kTreeBytes, "the record of a database is of a wrong size");
    const Tree tree(value.data);
    require(!tree.flags && !tree.pad, "a database has unknown flags");
    const std::string name(reinterpret_cast<const char*>(key.data), key.size);
    named.emplace_back(tree, name == "records" ? Kind::records : name == "places" ? Kind::places : Kind::other);
  }

  void take_entry(Bytes key, Bytes value) {
    require(key.size == 8 && value.size >= kEntryHead && value.size <= UINT32_MAX, "an entry is of a wrong size");
    const uint64_t end = kEntryHead + 4 * uint64_t{load<uint32_t>(value.data + kCountAt)};
    require(end <= value.size && (value.size - end) % 8 == 0, "an entry is of a wrong size");
    uint64_t number = 0;
    for (size_t i = 0; i < 8; ++i) number = number << 8 | key.data[i];
    require(number && number < kMostRecords && number == load<uint64_t>(value.data + kRecordAt),
            "an entry has another number than its key");
    require(load<uint64_t>(value.data) == xxh3_64(value.data + kSum, value.size - kSum, file_.level),
            "an entry is damaged");
    entries.push_back({static_cast<uint64_t>(value.data - file_.data), static_cast<uint32_t>(value.size),
                             static_cast<uint32_t>(end)});
    tokens += (end - kEntryHead) / 4;
  }

  File& file_;
  const Kind kind_;
  const uint32_t depth_;
  Bytes last_{nullptr, 0};
  uint32_t left_from_ = 0;
  std::vector<Subtree> left_;
};

class Reader {
 public:
  Reader(const uint8_t* file, size_t size, unsigned threads, CatalogRead* out)
      : file_(file), size_(size), threads_(threads), out_(out) {}

  void run() {
    require(size_ >= kMetas * kPage, "the file is shorter than its meta pages");
    check_meta(0);
    check_meta(1);
    const uint64_t even = commit(0), odd = commit(1);
    require(even == 0 ? odd <= 1 : even % 2 == 0 && odd % 2 == 1 && (even + 1 == odd || odd + 1 == even),
            "the meta pages are not of two commits in a row");
    const uint8_t* meta = file_ + (odd > even ? kPage : 0) + kHeader;
    out_->commit = std::max(even, odd);
    const uint64_t last = load<uint64_t>(meta + 120);
    require(last >= kMetas - 1 && last < size_ / kPage, "pages are missing at the end of the file");
    shared_ = File{file_, last + 1, std::make_unique<std::atomic<uint8_t>[]>(last + 1), out_->commit, level()};
    const Tree free(meta + 24), main(meta + 24 + kTreeBytes);
    require(!(free.flags & ~kIntegerKey) && !main.flags && !main.pad, "a database has unknown flags");
    walk(free, Kind::free);
    for (const auto& [tree, kind] : walk(main, Kind::main)) walk(tree, kind);
    for (size_t page = kMetas; page < shared_.pages; ++page)
      require(shared_.used[page].load(std::memory_order_relaxed), "a page is neither used nor free");
  }

 private:
  uint64_t commit(uint64_t meta) const { return load<uint64_t>(file_ + meta * kPage + kHeader + 128); }

  void check_meta(uint64_t number) const {
    const uint8_t* page = file_ + number * kPage;
    require(load<uint64_t>(page) == number && load<uint16_t>(page + 10) & kMeta, "a meta page is not one");
    const uint8_t* meta = page + kHeader;
    require(load<uint32_t>(meta) == kMagic && load<uint32_t>(meta + 4) == kVersion, "a meta page is of another format");
    require(load<uint32_t>(meta + 24) == kPage, "pages are of another size");
  }

  // Returns the databases that it names.
  std::vector<std::pair<Tree, Kind>> walk(const Tree& tree, Kind kind) {
    if (tree.root == kNoPage) {
      require(!(tree.branches | tree.leaves | tree.overflows | tree.entries | tree.depth), "an empty tree has counts");
      return {};
    }
    require(tree.depth >= 1 && tree.depth <= kDeepest, "a tree is too deep, or not at all");
    const bool parted = threads_ > 1 && tree.depth >= kParted && (kind == Kind::records || kind == Kind::places);
    std::vector<Walk> walks;
    walks.emplace_back(&shared_, kind, tree.depth);
    const auto parts = walks[0].left(tree.root, parted ? kParted : 0);
    for (unsigned i = 0; parted && i < threads_; ++i) walks.emplace_back(&shared_, kind, tree.depth);
    in_parts(parts.size(), parted ? threads_ : 0, [&](unsigned thread, size_t begin, size_t end) {
      Walk& here = walks[1 + thread];
      for (size_t i = begin; i < end; ++i) here.walk_page(parts[i].page, kParted, parts[i].from, parts[i].to);
    });
    Tree found;
    for (Walk& part : walks) {  // in the order of keys: a walk that left pages to others found no entries
      found.branches += part.counts.branches;
      found.leaves += part.counts.leaves;
      found.overflows += part.counts.overflows;
      found.entries += part.counts.entries;
      out_->tokens += part.tokens;
      if (out_->entries.empty())
        out_->entries = std::move(part.entries);
      else
        out_->entries.insert(out_->entries.end(), part.entries.begin(), part.entries.end());
    }
    require(found.branches == tree.branches && found.leaves == tree.leaves && found.overflows == tree.overflows &&
                found.entries == tree.entries,
            "the counts of a tree are not what it has");
    return std::move(walks[0].named);
  }

  const uint8_t* const file_;
  const size_t size_;
  const unsigned threads_;
  CatalogRead* const out_;
  File shared_{};
};

}  // namespace

CatalogRead read_catalog(const uint8_t* file, size_t size, unsigned threads) {
  CatalogRead out;
  try {
    Reader(file, size, threads, &out).run();
  } catch (const Refused& refused) {
    out = CatalogRead();
    out.problem = refused.what();
  }
  return out;
}

void gather(uint8_t* file, const CatalogEntries& entries, uint8_t* heads, uint64_t* token_at) {
  const auto stands_before = [&](size_t a, size_t b) { return entries[a].at < entries[b].at; };
  HugeVector<size_t> order(entries.size());
  std::iota(order.begin(), order.end(), size_t{0});
  if (!std::is_sorted(order.begin(), order.end(), stands_before)) std::sort(order.begin(), order.end(), stands_before);
  // Never beyond what is still to be moved: the entries of a page take no more than it has, and the first pages none.
  uint64_t end = 0;
  for (const size_t i : order) {
    const uint64_t bytes = entries[i].head_and_tokens - kEntryHead;
    token_at[i] = end / 4;
    std::memcpy(heads + i * kEntryHead, file + entries[i].at, kEntryHead);
    std::memmove(file + end, file + entries[i].at + kEntryHead, bytes);
    end += bytes;
  }
}

}  // namespace kvstore

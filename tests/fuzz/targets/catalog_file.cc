// The catalog's file, read at once: catalogs of real stores, damaged. ../catalogs.py says what an input is, and does to a
// file what is done here.
#include <array>

#include "catalog/catalog.h"
#include "xxh3/xxh3.h"
#include "fuzz.h"

namespace {

constexpr std::size_t kPage = 4096, kHeader = 16, kNode = 8, kHead = 80;
constexpr std::uint16_t kLeaf = 0x02, kBig = 0x01;

template <class T>
T load(const std::uint8_t* from) {
  T value;
  std::memcpy(&value, from, sizeof(T));
  return value;
}

fuzz::Bytes unpacked(const char* name) {
  std::ifstream in(std::string(ROOT "/tests/fuzz/catalogs/") + name, std::ios::binary);
  const fuzz::Bytes data{std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>()};
  fuzz::require(!data.empty(), "a catalog is missing");
  fuzz::Bytes out;
  for (std::size_t at = 0; at < data.size();) {
    const std::size_t count = load<std::uint16_t>(&data[at]);
    out.insert(out.end(), data.begin() + static_cast<long>(at + 2), data.begin() + static_cast<long>(at + 2 + count));
    at += 2 + count;
    out.resize(out.size() + load<std::uint16_t>(&data[at]), data[at + 2]);
    at += 3;
  }
  return out;
}

const fuzz::Bytes& catalog(std::size_t number) {
  static const std::array<fuzz::Bytes, 5> made{unpacked("empty"), unpacked("small"), unpacked("deep"), unpacked("long"),
                                               unpacked("names")};
  return made[number % made.size()];
}

std::size_t count_of(const fuzz::Bytes& file, std::size_t page) {
  const std::size_t lower = std::min<std::size_t>(load<std::uint16_t>(&file[page + 12]), kPage);
  return lower < kHeader ? 0 : (lower - kHeader) / 2;
}

std::size_t node_of(const fuzz::Bytes& file, std::size_t page, std::size_t slot) {
  return page + load<std::uint16_t>(&file[slot]) % (kPage - kNode);
}

std::size_t place(const fuzz::Bytes& file, std::size_t page, int kind, fuzz::Input& input) {
  static const std::size_t fields[] = {0, 8, 10, 12, 14};
  static const std::size_t metas[] = {0,  4,  16, 24, 28, 30, 32, 40,  48,  56, 64,
                                      72, 76, 78, 80, 88, 96, 104, 112, 120, 128};
  if (kind == 1) return page + fields[input.byte() % std::size(fields)];
  if (kind == 8) return page % (2 * kPage) + kHeader + metas[input.byte() % std::size(metas)];
  if (kind < 2 || kind > 7) return page + input.number(2) % kPage;
  const std::size_t slot = page + kHeader + 2 * (input.byte() % std::max<std::size_t>(1, count_of(file, page)));
  if (kind == 2) return slot;
  const std::size_t node = node_of(file, page, slot);
  if (kind == 3) return node;
  if (kind < 6) return node + (kind == 4 ? 4 : 6);
  const std::size_t key = kind == 7 ? load<std::uint16_t>(&file[node + 6]) % kPage : 0;
  return std::min(node + kNode + key + input.byte(), file.size());
}

void damage(fuzz::Bytes& file, fuzz::Input& input) {
  const int what = input.byte(), kind = what & 15;
  if (kind == 10) {
    const std::size_t size = input.number(3);
    if (size <= file.size()) file.resize(size);
    else file.resize(std::max<std::size_t>(file.size(), std::min<std::size_t>(size, 0xFFFFF)));
    return;
  }
  const std::size_t pages = file.size() / kPage;
  if (!pages) return;
  const std::size_t page = input.byte() % pages * kPage;
  if (kind == 9) {
    const std::size_t other = input.byte() % pages * kPage;
    const auto number = load<std::uint64_t>(&file[page]);
    std::memmove(&file[page], &file[other], kPage);
    if (what & 16) std::memcpy(&file[page], &number, 8);
    return;
  }
  const std::size_t at = place(file, page, kind, input);
  const int how = input.byte();
  const std::size_t width = std::min(std::size_t{1} << (what >> 4 & 3), file.size() - at);
  std::uint64_t value = 0;
  for (std::size_t i = 0; i < width; ++i) value |= std::uint64_t{file[at + i]} << 8 * i;
  if (how % 4 == 0) value = input.number(static_cast<int>(width));
  else if (how % 4 == 1) value += input.byte() - std::uint64_t{128};
  else if (how % 4 == 2) value = input.byte() % pages;
  else value ^= std::uint64_t{1} << input.byte() % 64;
  for (std::size_t i = 0; i < width; ++i) file[at + i] = static_cast<std::uint8_t>(value >> 8 * i);
}

// Makes the checksum of all right that may be an entry: a key of 8 bytes, a value that is long enough.
void sum(fuzz::Bytes& file) {
  for (std::size_t page = 2 * kPage; page + kPage <= file.size(); page += kPage) {
    if (load<std::uint16_t>(&file[page + 10]) != kLeaf) continue;
    for (std::size_t i = 0, count = count_of(file, page); i < count; ++i) {
      const std::size_t node = node_of(file, page, page + kHeader + 2 * i);
      const std::size_t size = load<std::uint32_t>(&file[node]);
      if (load<std::uint16_t>(&file[node + 6]) != 8 || node + kNode + 16 > page + kPage) continue;
      std::size_t at = node + kNode + 8, end = page + kPage;
      if (load<std::uint16_t>(&file[node + 4]) & kBig) {
        at = load<std::uint64_t>(&file[at]) % (file.size() / kPage) * kPage + kHeader;
        end = file.size();
      }
      if (size < kHead || size > end - at) continue;
      const std::uint64_t right = kvstore::xxh3_64(&file[at + 8], size - 8, kvstore::level());
      std::memcpy(&file[at], &right, 8);
    }
  }
}

void agree(const fuzz::Bytes& file, const kvstore::CatalogRead& found) {
  if (!found.problem.empty()) {
    fuzz::require(found.entries.empty() && !found.tokens && !found.commit, "a refused file has entries");
    return;
  }
  std::uint64_t before = 0, tokens = 0, bytes = 0;
  for (const auto& entry : found.entries) {
    fuzz::require(entry.at <= file.size() && entry.size <= file.size() - entry.at, "an entry lies beyond the file");
    fuzz::require(entry.head_and_tokens >= kHead && entry.head_and_tokens <= entry.size, "an entry is too short");
    const std::uint8_t* const value = &file[entry.at];
    const auto number = load<std::uint64_t>(value + 8);
    fuzz::require(number > before, "entries are out of order");
    const auto sum = kvstore::xxh3_64(value + 8, entry.size - 8, kvstore::level());
    fuzz::require(load<std::uint64_t>(value) == sum, "a checksum is wrong");
    before = number;
    tokens += (entry.head_and_tokens - kHead) / 4;
    bytes += entry.size;
  }
  fuzz::require(tokens == found.tokens, "tokens are counted wrong");
  fuzz::require(bytes <= file.size(), "entries lie over each other");
}

// What is gathered is what stood in the file.
void gather(const fuzz::Bytes& file, const kvstore::CatalogRead& found) {
  fuzz::Bytes gathered = file, heads(kHead * found.entries.size());
  std::vector<std::uint64_t> token_at(found.entries.size());
  kvstore::gather(gathered.data(), found.entries, heads.data(), token_at.data());
  for (std::size_t i = 0; i < found.entries.size(); ++i) {
    const auto& entry = found.entries[i];
    const std::uint8_t* const value = &file[entry.at];
    fuzz::require(!std::memcmp(&heads[i * kHead], value, kHead), "a head is another");
    const std::size_t bytes = entry.head_and_tokens - kHead;
    fuzz::require(!bytes || !std::memcmp(&gathered[4 * token_at[i]], value + kHead, bytes), "tokens are others");
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  fuzz::Input input(data, size);
  fuzz::Bytes file = catalog(input.byte());
  const bool right_sums = input.byte() & 1, is_damaged = input.more();
  while (input.more()) damage(file, input);
  if (right_sums && file.size() >= kPage) sum(file);
  file.shrink_to_fit();  // so that whoever reads beyond it is caught
  const kvstore::CatalogRead found = kvstore::read_catalog(file.data(), file.size(), 1);
  if (!is_damaged) fuzz::require(found.problem.empty(), "a sound catalog is refused");
  agree(file, found);
  gather(file, found);
  return 0;
}

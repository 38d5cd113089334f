// What fuzz targets share: an input that is read as numbers, tensors without a byte to spare, changes of a payload.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <memory>
#include <string>
#include <vector>

#include "common/cpu.h"
#include "common/rows.h"

namespace fuzz {

using Bytes = std::vector<std::uint8_t>;

[[noreturn]] inline void fail(const char* what) {
  std::fprintf(stderr, "broken promise: %s\n", what);
  std::abort();
}

inline void require(bool holds, const char* what) {
  if (!holds) fail(what);
}

// The same numbers from the same seed, on every machine.
class Random {
 public:
  explicit Random(std::uint64_t seed) : state_(seed) {}
  std::uint64_t next() {
    std::uint64_t x = state_ += 0x9E3779B97F4A7C15u;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
    return x ^ (x >> 31);
  }
  std::int64_t between(std::int64_t low, std::int64_t high) {
    return low + static_cast<std::int64_t>(next() % static_cast<std::uint64_t>(high - low + 1));
  }

 private:
  std::uint64_t state_;
};

// What a comparison of machines sets (tests/neon/machines.cc): who is told what a target made of an input, and what comes
// after the end of an input instead of zeros.
inline void (*told)(const void* data, std::size_t size) = nullptr;
inline Random* beyond = nullptr;

inline void tell(const void* data, std::size_t size) {
  if (told != nullptr) told(data, size);
}

// Zeros once it has ended.
class Input {
 public:
  Input(const std::uint8_t* data, std::size_t size) : at_(data), end_(data + size) {}

  bool more() const { return at_ != end_; }
  std::uint8_t byte() {
    if (more()) return *at_++;
    return beyond == nullptr ? std::uint8_t{0} : static_cast<std::uint8_t>(beyond->next());
  }
  std::uint64_t number(int bytes) {
    std::uint64_t value = 0;
    for (int i = 0; i < bytes; ++i) value |= std::uint64_t{byte()} << 8 * i;
    return value;
  }
  std::size_t below(std::size_t n) { return number(n > 256 ? n > 65536 ? 4 : 2 : 1) % n; }
  bool flag() { return byte() & 1; }
  Bytes rest() {
    Bytes left(at_, end_);
    at_ = end_;
    return left;
  }

 private:
  const std::uint8_t *at_, *end_;
};

// [heads, tokens, row bytes], each with its own memory, so that whoever writes beside it is caught.
class Tensors {
 public:
  // by_token: the rows of a token lie together, as transformers has them. At least one byte each.
  void add(std::size_t heads, std::size_t tokens, std::size_t row, bool by_token) {
    sizes_.push_back(heads * tokens * row);
    memory_.push_back(std::make_unique<std::uint8_t[]>(std::max<std::size_t>(1, sizes_.back())));
    const auto head = static_cast<std::int64_t>(by_token ? row : tokens * row);
    const auto token = static_cast<std::int64_t>(by_token ? heads * row : row);
    rows_.push_back({reinterpret_cast<std::uint64_t>(memory_.back().get()), head, token});
  }

  // kind: 0 any bits, 1 zeros, 2 alike values of bf16, 3 special ones among them.
  void fill(Random& random, int kind) {
    static const std::uint16_t special[] = {0, 0x8000, 1, 0x807f, 0x80, 0x7f7f, 0x7f80, 0xff80, 0x7fc1, 0xffff};
    for (std::size_t i = 0; i < sizes_.size(); ++i) {
      for (std::size_t at = 0; at < sizes_[i]; at += 2) {
        std::uint64_t bits = random.next();
        if (kind == 1) bits = 0;
        if (kind >= 2) bits = 0x3f80 | (bits & 0x80ff);
        if (kind == 3 && random.next() % 4 == 0) bits = special[random.next() % 10];
        memory_[i][at] = static_cast<std::uint8_t>(bits);
        if (at + 1 < sizes_[i]) memory_[i][at + 1] = static_cast<std::uint8_t>(bits >> 8);
      }
    }
  }

  const kvstore::Rows* rows() const { return rows_.data(); }
  void tell() const {
    for (std::size_t i = 0; i < sizes_.size(); ++i) fuzz::tell(memory_[i].get(), sizes_[i]);
  }
  bool same(const Tensors& other) const {
    for (std::size_t i = 0; i < sizes_.size(); ++i)
      if (std::memcmp(memory_[i].get(), other.memory_[i].get(), sizes_[i]) != 0) return false;
    return true;
  }

 private:
  std::vector<std::unique_ptr<std::uint8_t[]>> memory_;
  std::vector<std::size_t> sizes_;
  std::vector<kvstore::Rows> rows_;
};

// A payload and where its layers end.
struct Payload {
  enum class Origin { given, coded, nothing };  // nothing: the block could not be coded

  Bytes bytes;
  std::vector<std::uint64_t> sizes;
  Origin origin = Origin::given;

  // What is left of the input changes it; false if nothing was.
  bool edit(Input& input) {
    const bool any = input.more();
    while (input.more()) {
      const std::uint8_t what = input.byte();
      const std::size_t at = bytes.empty() ? 0 : input.below(bytes.size());
      const auto place = bytes.begin() + static_cast<long>(at);
      if (what % 8 < 3 && !bytes.empty()) {
        *place ^= input.byte();
      } else if (what % 8 < 5) {
        const std::uint64_t value = input.number(4);
        for (std::size_t i = 0; i < 4 && at + i < bytes.size(); ++i)
          bytes[at + i] = static_cast<std::uint8_t>(value >> 8 * i);
      } else if (what % 8 == 5 && !bytes.empty()) {  // shorter, and so are the layers
        const std::size_t gone = std::min<std::size_t>(1 + input.below(64), bytes.size() - at);
        bytes.erase(place, place + static_cast<long>(gone));
        if (!sizes.empty()) sizes[input.below(sizes.size())] -= gone;
      } else if (what % 8 == 6) {
        const std::size_t more = 1 + input.below(64);
        bytes.insert(place, more, input.byte());
        if (!sizes.empty()) sizes[input.below(sizes.size())] += more;
      } else if (!sizes.empty()) {
        sizes[input.below(sizes.size())] = input.flag() ? input.number(8) : input.below(bytes.size() + 2);
      }
    }
    return any;
  }

  // A flag of the input says whether `encode` (of this payload) fills `room` bytes and the sizes, and says if it did; what
  // is left of the input then changes them. Otherwise the payload is what was given.
  template <class Encode>
  static Payload made(Input& input, std::size_t layers, std::size_t room, const Encode& encode) {
    if (!input.flag()) return plain(input, layers);
    Payload made;
    made.sizes.resize(layers);
    made.bytes.resize(room);
    if (!encode(made)) return {{}, {}, Origin::nothing};
    std::size_t used = 0;
    for (const std::uint64_t layer : made.sizes) used += layer;
    made.bytes.resize(used);
    made.bytes.shrink_to_fit();
    tell(made.bytes.data(), made.bytes.size());
    tell(made.sizes.data(), made.sizes.size() * sizeof made.sizes[0]);
    made.origin = made.edit(input) ? Origin::given : Origin::coded;
    return made;
  }

  // Only what was given, cut in layers anywhere.
  static Payload plain(Input& input, std::size_t layers) {
    Payload made;
    for (std::size_t i = 0; i < layers; ++i) made.sizes.push_back(input.number(2));
    made.bytes = input.rest();
    if (layers && made.sizes[0] % 2 == 0) {  // the last layer is the rest
      std::uint64_t left = made.bytes.size();
      for (std::size_t i = 0; i < layers; ++i) {
        if (i + 1 < layers) made.sizes[i] = std::min<std::uint64_t>(made.sizes[i] / 2, left);
        else made.sizes[i] = left;
        left -= made.sizes[i];
      }
    }
    return made;
  }
};

// Two twins, by what they say and what they decoded: they must do the same, and take what was coded.
inline void require_alike(const Payload& payload, const char* one, const char* two, const Tensors& first,
                          const Tensors& second) {
  require((one == nullptr) == (two == nullptr), "two twins disagree on whether a payload is damaged");
  if (one == nullptr) require(first.same(second), "two twins decode different values");
  tell(one == nullptr ? "read" : "refused", 4);
  if (one == nullptr) second.tell();
  if (payload.origin == Payload::Origin::coded) require(one == nullptr, "what was coded is called damaged");
}

// A file of the repository as numbers of 16 bits.
inline std::vector<std::uint16_t> table(const char* name) {
  std::ifstream file(std::string(ROOT "/") + name, std::ios::binary);
  const Bytes bytes{std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
  require(!bytes.empty(), "a table is missing");
  std::vector<std::uint16_t> values(bytes.size() / 2);
  std::memcpy(values.data(), bytes.data(), 2 * values.size());
  return values;
}

}  // namespace fuzz

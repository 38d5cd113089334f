// The tokens of all edges: 2 bytes each where all tokens of an edge are below 65,536, else 4.
//
// A *run* of tokens is named by its place: the index of its first token in one of two arrays, and a bit that says
// which. So places can be added to, and a part of a run is a run.
#pragma once

#include <algorithm>
#include <cstdint>

#include "common/cpu.h"
#include "trie/memory.h"

namespace kvstore {

using PrefixFn = uint32_t (*)(const uint32_t* a, const uint32_t* b, uint32_t count);
using NarrowPrefixFn = uint32_t (*)(const uint16_t* a, const uint32_t* b, uint32_t count);

// Number of leading elements that a and b share, the twin for this level.
PrefixFn common_prefix(Level level);
NarrowPrefixFn common_narrow_prefix(Level level);

class TokenArena {
 public:
  // Whether a run of these tokens takes 4 bytes a token.
  static bool is_wide(const uint32_t* tokens, size_t count) {
    uint32_t all = 0;
    for (size_t i = 0; i < count; ++i) all |= tokens[i];
    return all > UINT16_MAX;
  }
  static bool is_wide(uint64_t place) { return place & kWide; }

  explicit TokenArena(Level level) : prefix_(common_prefix(level)), narrow_prefix_(common_narrow_prefix(level)) {}

  size_t size() const { return narrow_.size() + wide_.size(); }
  size_t bytes() const { return narrow_.bytes() + wide_.bytes(); }
  // Where the next run of this width will be.
  uint64_t end(bool wide) const { return wide ? kWide | wide_.size() : narrow_.size(); }
  // Makes room for so many more tokens, so that append() cannot fail.
  void reserve(size_t tokens, bool wide) {
    if (wide)
      wide_.reserve(wide_.size() + tokens);
    else
      narrow_.reserve(narrow_.size() + tokens);
  }

  uint64_t append(const uint32_t* tokens, size_t count, bool wide) {
    const uint64_t place = end(wide);
    if (wide) {
      wide_.append(tokens, count);
    } else {
      uint16_t* to = narrow_.extend(count);
      for (size_t i = 0; i < count; ++i) to[i] = static_cast<uint16_t>(tokens[i]);
    }
    return place;
  }
  // A copy of a run of this or of another arena; a wide run stays wide.
  uint64_t append(const TokenArena& from, uint64_t run, size_t count, bool wide) {
    const uint64_t place = end(wide);
    reserve(count, wide);  // first, for the run may be of this arena
    const uint64_t at = run & ~kWide;
    if (run & kWide) {
      wide_.append(from.wide_.data() + at, count);
    } else if (wide) {
      std::copy_n(from.narrow_.data() + at, count, wide_.extend(count));
    } else {
      narrow_.append(from.narrow_.data() + at, count);
    }
    return place;
  }

  uint32_t at(uint64_t place) const { return place & kWide ? wide_[place & ~kWide] : narrow_[place]; }
  void copy(uint64_t run, size_t count, uint32_t* to) const {
    if (run & kWide)
      std::copy_n(wide_.data() + (run & ~kWide), count, to);
    else
      std::copy_n(narrow_.data() + run, count, to);
  }
  // How many leading tokens a run of `count` has in common with others.
  uint32_t shared(uint64_t run, const uint32_t* tokens, uint32_t count) const {
    return run & kWide ? prefix_(wide_.data() + (run & ~kWide), tokens, count)
                       : narrow_prefix_(narrow_.data() + run, tokens, count);
  }
  uint32_t shared(const uint32_t* a, const uint32_t* b, uint32_t count) const { return prefix_(a, b, count); }

  void swap(TokenArena& other) {
    narrow_.swap(other.narrow_);
    wide_.swap(other.wide_);
  }

 private:
  static constexpr uint64_t kWide = uint64_t{1} << 63;

  PrefixFn prefix_;
  NarrowPrefixFn narrow_prefix_;
  Buffer<uint16_t> narrow_;
  Buffer<uint32_t> wide_;
};

}  // namespace kvstore

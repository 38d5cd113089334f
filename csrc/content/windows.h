// Which windows of a token sequence stand for it: winnowing (Schleimer, Wilkerson, Aiken, SIGMOD 2003).
//
// Every window of `window` (k) tokens has a 64-bit hash, rolled on in O(1). Of every `winnow` (w) consecutive windows
// the one with the least hash is chosen, the last of those that tie. The choice depends on these k + w - 1 tokens
// alone: two sequences that share a run of that length choose the same window in it. The tie rule is the plain one and
// not the "robust" one of the paper, whose choice depends on what came before: then periodic text would be found on
// another diagonal only.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "trie/memory.h"

namespace kvstore {

class Windows {
 public:
  static constexpr uint32_t kMax = 256;  // of window and of winnow: what the rings below hold

  Windows(uint32_t window, uint32_t winnow, uint64_t seed) : window_(window), winnow_(winnow), seed_(seed) {
    for (uint32_t i = 1; i < window; ++i) top_ *= kBase;
  }

  uint32_t window() const { return window_; }
  uint32_t winnow() const { return winnow_; }

  // Calls emit(first token, 32-bit hash) for every chosen window, rising. A sequence with fewer than w windows has one
  // choice, the least of all; one without any has none. Sequences of different spaces have different hashes.
  template <class Emit>
  void choose(uint32_t space, const uint32_t* tokens, size_t count, Emit&& emit) const {
    if (count < window_) return;
    const uint64_t key = mix64(seed_ + (uint64_t{space} + 1) * kStep);
    const size_t wide = std::min<size_t>(winnow_, count - window_ + 1);
    uint64_t mixed[kMax], hashes[kMax], sum = 0, least = 0;
    size_t best = 0, last = SIZE_MAX;
    for (size_t i = 0; i < count; ++i) {
      const uint64_t in = mix64(tokens[i] ^ seed_);
      if (i >= window_) sum -= mixed[(i - window_) % kMax] * top_;
      sum = sum * kBase + in;
      mixed[i % kMax] = in;
      if (i + 1 < window_) continue;
      const size_t at = i + 1 - window_;
      const uint64_t hash = mix64(sum ^ key);
      hashes[at % kMax] = hash;
      if (at == 0 || hash <= least) {
        least = hash;
        best = at;
      } else if (best + wide <= at) {  // the least has left
        best = at + 1 - wide;
        for (size_t j = best + 1; j <= at; ++j)
          if (hashes[j % kMax] <= hashes[best % kMax]) best = j;
        least = hashes[best % kMax];
      }
      // The low half: the least of many hashes has a small high half.
      if (at + 1 >= wide && best != last) emit(static_cast<uint32_t>(best), static_cast<uint32_t>(least));
      if (at + 1 >= wide) last = best;
    }
  }

 private:
  static constexpr uint64_t kBase = 0x9e3779b97f4a7c15ull;  // odd; any will do, tokens are mixed before
  static constexpr uint64_t kStep = 0xd1342543de82ef95ull;

  const uint32_t window_, winnow_;
  const uint64_t seed_;
  uint64_t top_ = 1;  // kBase ** (window - 1)
};

}  // namespace kvstore

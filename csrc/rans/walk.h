// What the twins of rans/rans.cc share: their signatures, and the walk over the classes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "rans/rans.h"

namespace kvstore::rans {

// Yields the classes of 32 neighbouring symbols as 32 neighbouring bytes, though the pattern repeats at any period.
class ClassWalk {
 public:
  // Starts at symbol `position`. n > 0, period > 0; `classes` must outlive the walk.
  ClassWalk(const std::uint8_t* classes, std::size_t period, std::size_t n, std::size_t position)
      : base_(classes), period_(period), limit_(period) {
    if (period < n && period <= kShort) {
      // A short pattern is written out until no 32 symbols need a second look at its beginning.
      period_ = period * ((kLanes + period - 1) / period);
      limit_ = period_ + kLanes;
      for (std::size_t i = 0; i < limit_; i += period)
        std::memcpy(copy_ + i, classes, period < limit_ - i ? period : limit_ - i);
      base_ = copy_;
    }
    place_ = position % period_;
  }
  ClassWalk(const ClassWalk&) = delete;
  ClassWalk& operator=(const ClassWalk&) = delete;

  // The classes of the next `lanes` <= 32 symbols; valid until the next call.
  const std::uint8_t* here(std::size_t lanes = kLanes) {
    if (place_ + lanes <= limit_) return base_ + place_;
    return across(lanes);
  }
  void forward() {
    place_ += kLanes;
    if (place_ >= period_) place_ -= period_;
  }
  void back() {
    if (place_ < kLanes) place_ += period_;
    place_ -= kLanes;
  }

 private:
  static constexpr std::size_t kShort = 1024;

  const std::uint8_t* across(std::size_t lanes) {
    for (std::size_t i = 0; i < lanes; ++i) across_[i] = base_[(place_ + i) % period_];
    return across_;
  }

  const std::uint8_t* base_;
  std::size_t period_;
  std::size_t limit_;  // so many bytes from base_ on may be read
  std::size_t place_;
  std::uint8_t across_[kLanes];
  std::uint8_t copy_[kShort + 2 * kLanes];
};

// Encodes `steps` times 32 symbols that end at `symbols`, backwards, while 64 bytes are free between `floor` and
// `top`; any of them may be overwritten. `walk` stands behind the last symbol. Returns the steps that are left, moves
// top down to the first word, and sets bit 31 of `seen` if a symbol has frequency 0.
using EncodeSteps = std::size_t (*)(const std::uint32_t* entries, std::uint32_t* states, const std::uint8_t* symbols,
                                    ClassWalk& walk, std::size_t steps, std::uint8_t*& top, const std::uint8_t* floor,
                                    std::uint32_t& seen);

// Decodes up to `steps` times 32 symbols to `out` while 64 bytes are left between `words` and `end`. Returns the steps
// that are left and moves words.
using DecodeSteps = std::size_t (*)(const std::uint32_t* slots, std::uint32_t* states, const std::uint8_t*& words,
                                    const std::uint8_t* end, ClassWalk& walk, std::size_t steps, std::uint8_t* out);

// A stream on its way: what steps read and move.
struct Side {
  std::uint32_t* states;
  const std::uint8_t* words;
  const std::uint8_t* end;
  ClassWalk& walk;
  std::uint8_t* out;
};

// As DecodeSteps for two streams at once, until either ends; moves `out`, too.
using DecodePair = std::size_t (*)(const std::uint32_t* slots, Side& one, Side& two, std::size_t steps);

constexpr std::ptrdiff_t kStepBytes = 2 * kLanes;  // of words that a step can write or take

}  // namespace kvstore::rans

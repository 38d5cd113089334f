// The scales of rows: which components of a row are coded, by which classes, and how a row's scale goes on from part to
// part. Included by lossy/coded.h only.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "lossy/model.h"
#include "predictive/kernels.h"

namespace kvstore::lossy {

constexpr int kFine = 16;  // states of rows are kept in so many parts of a quarter octave
constexpr int kLeastState = -32 * kFine, kMostState = 40 * kFine;
// Of a row: what it adds to the scales of its components.
constexpr int kLeastRow = kLeastState / kFine - 4 * kPlain;
constexpr int kMostRow = kMostState / kFine + 4 * (static_cast<int>(kShifts) - 1 - kPlain);
constexpr std::int64_t kPrior = std::int64_t{1} << kExpect;  // magnitudes of one that every row is taken to have had

// What rows with the same offset of scales have in common: their coded components.
struct Kind {
  std::size_t count = 0;
  std::vector<std::uint32_t> which;
  std::vector<std::uint8_t> classes;  // those of V are kClasses higher
  std::int64_t mean = 0, slope = 0;  // sums of what is expected of them
};

// Those of a part; most have few.
class Kinds {
 public:
  explicit Kinds(const Model& model, std::size_t width) : model_(model), scale_(width) {}

  void begin(std::size_t number, int quarters) {
    model_.scales(number, quarters, scale_.data());
    width_ = model_.parts()[number].sums.width;
    for (std::size_t j = 0; j < width_; ++j) scale_[j] = static_cast<std::int16_t>(scale_[j] - quarters - kLeast);
    first_ = number % 2 ? static_cast<int>(kClasses) : 0;
    std::fill(std::begin(place_), std::end(place_), kNone);
    made_ = 0;
  }

  // Good until `begin`.
  const Kind& of(int row) {
    std::size_t& place = place_[row - kLeastRow];
    if (place == kNone) {
      place = made_++;
      if (made_ > kinds_.size()) kinds_.emplace_back();
      make(kinds_[place], row);
    }
    return kinds_[place];
  }

 private:
  static constexpr std::size_t kNone = SIZE_MAX;

  void make(Kind& kind, int row) const {
    if (kind.which.size() < width_) {
      kind.which.resize(width_);
      kind.classes.resize(width_);
    }
    const Expect* const expect = model_.expect();
    std::uint32_t* const which = kind.which.data();
    std::uint8_t* const classes = kind.classes.data();
    std::int64_t mean = 0, slope = 0;
    std::size_t count = 0;
    for (std::size_t j = 0; j < width_; ++j) {
      const int found = std::min(scale_[j] + row, static_cast<int>(kClasses) - 1);
      if (found < 0) continue;
      which[count] = static_cast<std::uint32_t>(j);
      classes[count++] = static_cast<std::uint8_t>(found + first_);
      mean += expect[found + first_].mean;
      slope += expect[found + first_].slope;
    }
    kind.count = count;
    kind.mean = mean;
    kind.slope = slope;
  }

  const Model& model_;
  std::vector<std::int16_t> scale_;
  std::size_t width_ = 0, made_ = 0;
  int first_ = 0;
  std::size_t place_[kMostRow - kLeastRow + 1];
  std::vector<Kind> kinds_;
};

// About 16 * log2(v) of 1 .. 2^40; between powers of two by a straight line.
inline std::int64_t log2_sixteenths(std::int64_t v) {
  const int top = 63 - __builtin_clzll(static_cast<unsigned long long>(v));
  return 16 * top + ((v << 4) >> top) - 16;
}

// The state of a row for the next part. magnitudes: what those of its numbers add up to.
inline int following(const Part& next, int state, const Kind& kind, std::int64_t magnitudes) {
  const std::int64_t expected = kind.mean + kPrior, slope = (kind.slope + kPrior / 16) << 8;
  const std::int64_t octaves = log2_sixteenths((magnitudes << kExpect) + kPrior) - log2_sixteenths(expected);
  const std::int64_t up = octaves * expected * 177, floor = up / slope - (up < 0 && up % slope != 0);
  const auto found = static_cast<int>(std::clamp<std::int64_t>(floor, -32 * kFine, 32 * kFine));
  const int error = ((state + kFine / 2) >> 4) * kFine + found - state;
  const int sum = next.adapt[0] * state + next.adapt[1] * error + next.adapt[2] + 128;
  return predict::clamped(sum >> 8, kLeastState, kMostState);
}

}  // namespace kvstore::lossy

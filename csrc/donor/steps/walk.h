// What both directions of the step mode know of a part before its symbols: its donor's values, its steps, and how far
// off its rows are.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "donor/rows.h"
#include "donor/steps/kernels.h"
#include "donor/steps/steps.h"
#include "predictive/buffer.h"

namespace kvstore::donor::steps {

using predict::Buffer;
using predict::Part;

// Neighbouring channels of a head.
struct Group {
  std::size_t begin, size;
};

std::size_t widest(const Parts& parts);

// What both directions do: the parts of a block in order, each with its donor's values, its steps, its classes, and how
// far off its rows are.
class Walk {
 public:
  Walk(const Coder& coder, const Parts& parts, const Block& block, int quarters, Level level);

  std::size_t count() const { return count_; }
  const std::uint16_t* mu(std::size_t row) const { return mu_.get() + row * width_; }
  const float* steps() const { return steps_.get(); }
  const float* inverse() const { return inverse_.get(); }
  const std::vector<Group>& groups() const { return groups_; }
  // Of each group; to be filled in.
  std::vector<std::uint8_t>& classes() { return classes_[number_ % 2]; }
  int shift(std::size_t row) const { return shifts_[row]; }
  // Of coded channels: where they stand, their classes less one.
  std::size_t coded() const { return places_.size(); }
  const std::vector<Group>& coded_groups() const { return coded_groups_; }
  const std::uint32_t* places() const { return places_.data(); }
  const std::uint8_t* scales() const { return scales_.data(); }

  // Begins a part.
  void begin(std::size_t number);

  // The table that the part's classes are coded with; good until the next part.
  const std::uint8_t* context() const { return &context_; }

  // The classes are known.
  void take_classes();

  // What the magnitudes of a row's symbols add up to.
  void take_row(std::size_t row, std::int64_t magnitudes) {
    found_[row] += magnitudes * 4096 - (found_[row] >> 2);
  }

  // Calls visit(row among those covered, row of the block) for each.
  template <class Visit>
  void each_row(Visit visit) const {
    std::size_t t = 0;
    for (std::size_t s = 0; s < block_.number; ++s)
      for (std::size_t i = 0; i < block_.spans[s].count; ++i, ++t) visit(t, block_.spans[s].start + i);
  }

  const Kernels& run;

 private:
  void measure_steps();
  void measure_shifts();

  const Coder& coder_;
  const Parts& parts_;
  const Block& block_;
  int quarters_;
  const donor::Kernels& donor_;
  std::size_t count_, number_ = 0, width_ = 0;
  Buffer<std::uint16_t> mu_, row_;
  Buffer<float> totals_, steps_, inverse_;
  std::vector<Group> groups_, coded_groups_;
  std::vector<int> sizes_;
  std::vector<std::uint8_t> classes_[2];  // of K and of V
  std::vector<std::int64_t> found_;       // of each row, and what was expected of it: 4096 times sums of magnitudes
  std::int64_t expected_ = 0;
  std::vector<std::int8_t> shifts_;
  std::uint8_t context_ = 0;
  std::vector<std::uint32_t> places_;
  std::vector<std::uint8_t> scales_;
};

}  // namespace kvstore::donor::steps

// Which of many points in a plane may be the nearest of a place: short lists, one for each cell of a square around 0.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace kvstore::aqua {

// Points that may be the nearest somewhere in a cell, the first of all points first. The rest is far from everything.
struct alignas(32) NearPoints {
  static constexpr std::size_t kMost = 4;
  float across[kMost], up[kMost];
};

// Immutable; thread-safe.
class Candidates {
 public:
  static constexpr std::size_t kSide = 64;  // cells in a row
  using Numbers = std::array<std::uint8_t, NearPoints::kMost>;

  Candidates() = default;  // no lists
  // points: [count][2], at most 256. There are no lists if one had to be longer than it may be.
  Candidates(const float* points, std::size_t count);

  bool empty() const { return lists_.empty(); }
  // Only places whose coordinates are smaller than this, in magnitude, have a cell.
  float reach() const { return reach_; }
  float cells_per_unit() const { return cells_per_unit_; }
  // Row after row, the lowest first.
  const NearPoints* lists() const { return lists_.data(); }
  const Numbers* numbers() const { return numbers_.data(); }

 private:
  float reach_ = 0, cells_per_unit_ = 0;
  std::vector<NearPoints> lists_;
  std::vector<Numbers> numbers_;
};

}  // namespace kvstore::aqua

#include "aqua/candidates.h"

#include <algorithm>
#include <cmath>

namespace kvstore::aqua {
namespace {

constexpr double kBeyond = 1;       // places so far outside of all points still have a cell
constexpr double kRim = 1e-3;       // of a cell, by which it is taken to be larger: places are rounded to cells
constexpr double kRounding = 1e-5;  // of a squared distance; as float32 it is wrong by a twentieth of that at most
constexpr float kFar = 1e18f;

struct Point {
  double across, up;
};

double squared(Point a, Point b) {
  return (a.across - b.across) * (a.across - b.across) + (a.up - b.up) * (a.up - b.up);
}

// Whether `other` is nearer than `point` everywhere in a cell, even as float32. What is nearer at all corners is.
bool is_nearer(Point other, Point point, const std::array<Point, 4>& corners) {
  for (const Point corner : corners)
    if (squared(corner, other) >= squared(corner, point) * (1 - kRounding)) return false;
  return true;
}

}  // namespace

Candidates::Candidates(const float* points, std::size_t count) {
  std::vector<Point> all(count);
  double farthest = 0;
  for (std::size_t p = 0; p < count; ++p) {
    all[p] = {points[2 * p], points[2 * p + 1]};
    farthest = std::max({farthest, std::fabs(all[p].across), std::fabs(all[p].up)});
  }
  reach_ = static_cast<float>(farthest + kBeyond);
  cells_per_unit_ = static_cast<float>(kSide) / (2 * reach_);
  const double width = 1 / static_cast<double>(cells_per_unit_), rim = kRim * width;
  std::vector<NearPoints> lists(kSide * kSide);
  std::vector<Numbers> numbers(kSide * kSide);
  for (std::size_t cell = 0; cell < lists.size(); ++cell) {
    const double left = -reach_ + static_cast<double>(cell % kSide) * width - rim, right = left + width + 2 * rim;
    const double low = -reach_ + static_cast<double>(cell / kSide) * width - rim, high = low + width + 2 * rim;
    const std::array<Point, 4> corners = {{{left, low}, {right, low}, {left, high}, {right, high}}};
    const auto nearest = std::min_element(all.begin(), all.end(), [&](Point a, Point b) {
      const Point middle{(left + right) / 2, (low + high) / 2};
      return squared(a, middle) < squared(b, middle);
    });
    std::vector<std::size_t> left_over;
    for (std::size_t p = 0; p < count; ++p)
      if (!is_nearer(*nearest, all[p], corners)) left_over.push_back(p);
    std::fill_n(lists[cell].across, NearPoints::kMost, kFar);
    std::fill_n(lists[cell].up, NearPoints::kMost, kFar);
    std::size_t have = 0;
    for (const std::size_t p : left_over) {
      const auto beats = [&](std::size_t q) { return is_nearer(all[q], all[p], corners); };
      if (std::any_of(left_over.begin(), left_over.end(), beats)) continue;
      if (have == NearPoints::kMost) return;
      lists[cell].across[have] = points[2 * p];
      lists[cell].up[have] = points[2 * p + 1];
      numbers[cell][have++] = static_cast<std::uint8_t>(p);
    }
  }
  lists_ = std::move(lists);
  numbers_ = std::move(numbers);
}

}  // namespace kvstore::aqua

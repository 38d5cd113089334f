#include "donor/steps/walk.h"

#include <algorithm>

#include "donor/steps/dispatch.h"
#include "predictive/offsets.h"

namespace kvstore::donor::steps {
namespace {

constexpr int kMostSize = 400, kMostStep = 440, kReach = 40;
constexpr std::int64_t kPrior = 1 << 11;  // half a step, in the units of a row's state
constexpr float kSteps[] = {4096, 4871, 5793, 6889};  // 4096 * 2^(i / 4)

}  // namespace

std::size_t widest(const Parts& parts) {
  std::size_t found = 0;
  for (const Part& part : parts) found = std::max(found, part.width);
  return found;
}

Walk::Walk(const Coder& coder, const Parts& parts, const Block& block, int quarters, Level level)
    : run(kernels(level)),
      coder_(coder),
      parts_(parts),
      block_(block),
      quarters_(quarters),
      donor_(donor::kernels(level)),
      count_(covered(block)),
      mu_(count_ * widest(parts)),
      row_(widest(parts)),
      totals_(widest(parts)),
      steps_(widest(parts)),
      inverse_(widest(parts)),
      found_(count_),
      shifts_(count_) {}

void Walk::begin(std::size_t number) {
  number_ = number;
  const Part& part = parts_[number];
  width_ = part.width;
  load(donor_, block_, part.heads, part.dim, number, row_.get(), mu_.get());
  groups_.clear();
  for (std::size_t head = 0; head < part.heads; ++head)
    for (std::size_t j = 0; j < part.dim; j += kChannels)
      groups_.push_back({head * part.dim + j, std::min(kChannels, part.dim - j)});
  measure_steps();
  measure_shifts();
  context_ = 0;
  if (number >= 2) {  // classes() still holds those of two parts before
    std::size_t sum = 0;
    const std::size_t n = classes().size();
    for (const std::uint8_t c : classes()) sum += c;
    context_ = static_cast<std::uint8_t>((2 * sum + n) / (2 * n));
  }
  classes().resize(groups_.size());
}

void Walk::measure_shifts() {
  for (std::size_t t = 0; t < count_; ++t) {
    const std::int64_t found = (found_[t] + kPrior) * 65536;
    int shift = kLeastShift;
    for (const std::int64_t bound : coder_.bounds) shift += found >= bound * (expected_ + kPrior);
    shifts_[t] = static_cast<std::int8_t>(shift);
  }
}

// From the sums of absolute values: of each channel over the rows, then of each group over its channels.
void Walk::measure_steps() {
  std::fill_n(steps_.get(), width_, 1.0f);
  std::fill_n(inverse_.get(), width_, 0.0f);
  if (quarters_ == kNothing) return;
  std::fill_n(totals_.get(), width_, 0.0f);
  for (std::size_t t = 0; t < count_; ++t) run.add(mu(t), width_, totals_.get());
  sizes_.clear();
  int most = -kMostSize;
  for (const Group& group : groups_) {
    float sum = 0;
    for (std::size_t i = 0; i < group.size; ++i) sum += totals_.get()[group.begin + i];
    const int size = predict::log2_quarters(sum / static_cast<float>(count_ * group.size));
    sizes_.push_back(predict::clamped(size, -kMostSize, kMostSize));
    most = std::max(most, sizes_.back());
  }
  std::int64_t sum = 0;
  for (int& size : sizes_) {
    size = std::max(size, most - kReach);
    sum += size;
  }
  const auto all = static_cast<std::int64_t>(sizes_.size());
  const int mean = static_cast<int>(sum / all - (sum % all < 0));  // rounded down
  for (std::size_t g = 0; g < groups_.size(); ++g) {
    const int found = predict::clamped(((sizes_[g] + mean) >> 1) + quarters_, -kMostStep, kMostStep);
    const float step = kSteps[found & 3] * as_float(static_cast<std::uint32_t>((found >> 2) - 12 + 127) << 23);
    std::fill_n(steps_.get() + groups_[g].begin, groups_[g].size, step);
    std::fill_n(inverse_.get() + groups_[g].begin, groups_[g].size, 16 / step);
  }
}

void Walk::take_classes() {
  places_.clear();
  scales_.clear();
  coded_groups_.clear();
  std::int64_t sum = 0;
  for (std::size_t g = 0; g < groups_.size(); ++g) {
    const std::uint8_t c = classes()[g];
    if (c == 0) continue;
    coded_groups_.push_back(groups_[g]);
    for (std::size_t i = 0; i < groups_[g].size; ++i) {
      places_.push_back(static_cast<std::uint32_t>(groups_[g].begin + i));
      scales_.push_back(static_cast<std::uint8_t>(c - 1));
    }
    sum += coder_.expected[c - 1] * static_cast<std::int64_t>(groups_[g].size);
  }
  expected_ += sum - (expected_ >> 2);
}

}  // namespace kvstore::donor::steps

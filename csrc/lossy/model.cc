#include "lossy/model.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "common/checks.h"

namespace kvstore::lossy {
namespace {

constexpr int kMostBias = 1 << 28, kMostAdapt = 1 << 12, kMostExpect = 1 << 20;
constexpr float kMostFactor = 1e30f;  // far beyond what a fit comes to

using predict::kPanel;

constexpr Checks kChecks("lossy");

std::vector<float> factors(const float* values, std::size_t count, std::size_t padded, std::size_t part,
                           const char* array) {
  return kChecks.scales(values, count, padded, 0, Checks::name_of(part, array), kMostFactor);
}

std::int64_t floor_div(std::int64_t a, std::int64_t b) { return a / b - (a % b != 0 && (a < 0) != (b < 0)); }

}  // namespace

Model::Model(const Arrays& arrays) : base_(arrays.base) {
  if (arrays.parts.size() != base_.parts().size()) kChecks.refuse("expected an entry for K and V of every layer");
  if (arrays.levels < 1 || arrays.levels > kMostLevels) kChecks.refuse("levels: expected 1 to 16 rows");
  steps_.assign(arrays.steps, arrays.steps + 2 * arrays.levels);
  kChecks.range(arrays.steps, steps_.size(), -kMostScale, kMostScale, "levels");
  for (std::size_t i = 2; i < steps_.size(); ++i)
    if (steps_[i] <= steps_[i - 2]) kChecks.refuse("levels: numbers must rise");
  parts_.resize(arrays.parts.size());
  for (std::size_t i = 0; i < parts_.size(); ++i) take_part(arrays, i);

  constexpr std::size_t width = rans::Tables::kSymbols;
  std::vector<std::uint16_t> freqs(arrays.freqs, arrays.freqs + 2 * kClasses * width);
  freqs.resize((2 * kClasses + kShifts) * width, 0);
  for (std::size_t i = 0; i < kShifts; ++i)
    std::copy_n(arrays.row_freqs + i * kShifts, kShifts, freqs.begin() + static_cast<long>((2 * kClasses + i) * width));
  if (!tables_.build(freqs.data(), 2 * kClasses + kShifts, 12))
    kChecks.refuse("freqs, row_freqs: every row must sum to 4096");
  kChecks.range(arrays.expect, 4 * kClasses, 1, kMostExpect, "expect");
  for (std::size_t c = 0; c < 2 * kClasses; ++c) {
    expect_.push_back({arrays.expect[2 * c], arrays.expect[2 * c + 1]});
    const float* const of = arrays.centroids + c * (kLargest + 1);
    for (int i = 0; i <= kLargest; ++i)
      if (!(of[i] >= 0 && of[i] <= 2 * kLargest)) kChecks.refuse("centroids: expected numbers from 0 to 254");
    for (int s = -kLargest; s <= kLargest; ++s) values_.push_back(s < 0 ? -of[-s] : s > 0 ? of[s] : 0.0f);
    values_.push_back(0.0f);
  }
}

void Model::take_part(const Arrays& arrays, std::size_t number) {
  const PartArrays& from = arrays.parts[number];
  const predict::Part& base = base_.parts()[number];
  Part& part = parts_[number];
  const std::size_t width = base.width;
  const std::size_t padded = predict::round_up(width, predict::kColumnsBytes);
  part.sums.width = width;
  part.sums.padded = base.padded;
  part.sums.bias.assign(padded, 0);
  part.unit = factors(from.unit, width, padded, number, "unit");
  part.component = factors(from.component, width, width, number, "component");
  kChecks.range(from.scale, arrays.levels * width, -kMostScale, kMostScale, Checks::name_of(number, "scale"));
  part.scale.assign(from.scale, from.scale + arrays.levels * width);
  kChecks.range(from.adapt, 3, -kMostAdapt, kMostAdapt, Checks::name_of(number, "adapt"));
  std::memcpy(part.adapt, from.adapt, sizeof part.adapt);
  part.basis.assign(width * base.padded, 0);
  for (std::size_t k = 0; k < width; ++k) {
    for (std::size_t j = 0; j < width; ++j) {
      const std::size_t panel = j / kPanel * kPanel, wide = std::min(base.padded - panel, kPanel);
      part.basis[panel * width + k * wide + j - panel] = from.basis[k * width + j];
    }
  }
  if (number >= 2) {
    take_inputs(part, from, number);
    return;
  }
  // As in the lossless mode; what is not rotated here is not made larger for it either.
  if (from.uses != 0) kChecks.refuse(Checks::name_of(number, "uses") + ": layer 0 has no inputs");
  part.out.assign(padded, 0.0f);
  part.bias.assign(padded, 0.0f);
  for (std::size_t j = 0; j < width; ++j) {
    part.out[j] = base.rotated ? base.out_scale[j] / base.to_fixed[j] : base.out_scale[j];
    part.bias[j] = static_cast<float>(base.bias[j]);
  }
}

void Model::take_inputs(Part& part, const PartArrays& from, std::size_t number) {
  const std::size_t first = number / 2 * 2, width = part.sums.width;
  std::vector<std::size_t> widths;
  std::size_t rows = 0;
  for (std::size_t kind = 0; kind < 8 * sizeof from.uses; ++kind) {
    if (!(from.uses >> kind & 1)) continue;
    // Layer 0 is no input: its token is.
    if (kind >= kKinds || (kind >= 1 && kind <= 2 && number < 4) || (kind >= 3 && kind <= 4 && number < 6) ||
        (kind == 5 && number % 2 == 0))
      kChecks.refuse(Checks::name_of(number, "uses") + ": this layer has no inputs of kind " + std::to_string(kind));
    const std::size_t of = kind == 0   ? parts_.size()
                           : kind == 5 ? first
                                       : first - 2 * ((kind + 1) / 2) + (kind + 1) % 2;
    part.sums.inputs.push_back(of);
    widths.push_back(kind == 0 ? base_.parts()[0].width + base_.parts()[1].width : base_.parts()[of].width);
    rows += widths.back();
    if (kind != 0) parts_[of].used = true;
  }
  if (rows == 0) kChecks.refuse(Checks::name_of(number, "uses") + ": no inputs");
  if (rows > predict::kMostInputs) kChecks.refuse(Checks::name_of(number, "weight") + ": more than 65536 inputs");
  if (from.weight == nullptr || from.out_scale == nullptr || from.bias == nullptr || from.inputs != rows)
    kChecks.refuse(Checks::name_of(number, "weight") + ": expected " + std::to_string(rows) + " inputs");
  kChecks.range(from.weight, rows * width, -127, 127, Checks::name_of(number, "weight"));
  kChecks.range(from.bias, width, -kMostBias, kMostBias, Checks::name_of(number, "bias"));
  predict::pack(part.sums, widths, from.weight, lines_);
  part.out = factors(from.out_scale, width, part.unit.size(), number, "out_scale");
  part.bias.assign(from.bias, from.bias + width);
  part.bias.resize(part.unit.size(), 0.0f);
}

void Model::scales(std::size_t number, int quarters, std::int16_t* scale) const {
  const Part& part = parts_[number];
  const std::size_t width = part.sums.width, levels = steps_.size() / 2, which = number % 2;
  std::size_t above = 0;
  while (above < levels && steps_[2 * above + which] < quarters) ++above;
  if (above == 0 || above == levels) {
    std::memcpy(scale, part.scale.data() + std::min(above, levels - 1) * width, width * sizeof *scale);
    return;
  }
  const int low = steps_[2 * above - 2 + which], gap = steps_[2 * above + which] - low, at = quarters - low;
  const std::int16_t *one = part.scale.data() + (above - 1) * width, *two = one + width;
  for (std::size_t j = 0; j < width; ++j)
    scale[j] = static_cast<std::int16_t>(one[j] + floor_div((two[j] - one[j]) * at * 2 + gap, 2 * gap));
}

}  // namespace kvstore::lossy

#include "levels/model.h"

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "common/checks.h"
#include "predictive/pack.h"

namespace kvstore::levels {
namespace {

constexpr Checks kChecks("predictive");
constexpr int kMostBias = 1 << 28, kMostAdapt = 1 << 12, kLeastFix = -14, kMostFix = 30, kUnit = 1 << 14;
constexpr int kMostFactor = (1 << 15) - 1;
constexpr std::size_t kPairs = kColumns / 2;

// Which column of the cache is coded when: rotary pairs, `half` columns apart in their head, side by side.
std::vector<std::size_t> order_of(std::size_t width, std::size_t half) {
  std::vector<std::size_t> order(width);
  for (std::size_t i = 0; i < width; ++i) {
    const std::size_t pair = i / 2;
    order[i] = half == 0 ? i : pair / half * 2 * half + pair % half + (i % 2) * half;
  }
  return order;
}

// Corrects the bias for inputs that are 128 too large. sums: of the weights of each column.
void subtract(Part& part, const std::int32_t* sums) {
  for (std::size_t j = 0; j < part.width; ++j) part.groups[j / kColumns].bias[j % kColumns] -= 128 * sums[j];
}

}  // namespace

std::size_t packed_size(std::size_t width) {
  std::size_t found = 0;
  for (std::size_t begin = 0; begin < width; begin += kColumns) found += begin * std::min(kColumns, width - begin);
  return found;
}

std::vector<std::size_t> inputs_of(int level, std::size_t number) {
  std::vector<std::size_t> found;
  const std::size_t layer = number / 2;
  for (std::size_t back = 1; back < static_cast<std::size_t>(level) && back <= layer; ++back)
    for (std::size_t which = 0; which < 2; ++which) found.push_back(2 * (layer - back) + which);
  if (number % 2 && layer > 0) found.push_back(number - 1);
  return found;
}

Model::Model(const Arrays& arrays) : level_(arrays.level) {
  if (level_ < 1 || level_ > 3) kChecks.refuse("level: expected 1, 2 or 3");
  if (arrays.layers.empty() || arrays.parts.size() != 2 * arrays.layers.size())
    kChecks.refuse("expected K and V of at least one layer");
  for (const predict::LayerShape& shape : arrays.layers) {
    for (const std::size_t dim : {shape.key_dim, shape.value_dim}) {
      if (shape.heads < 1 || dim < 1 || shape.heads > kMostWidth || dim > kMostWidth || shape.heads * dim > kMostWidth)
        kChecks.refuse("a layer has no columns, or more than 16384");
    }
  }
  take_rope(arrays);
  parts_.resize(arrays.parts.size());
  for (std::size_t number = 0; number < parts_.size(); ++number) {
    take_part(arrays, number);
    width_ += parts_[number].width;
    most_groups_ = std::max(most_groups_, parts_[number].groups.size());
  }
  take_tokens(arrays);
  take_freqs(arrays);
}

void Model::take_rope(const Arrays& arrays) {
  if (!arrays.rotated) return;
  half_ = arrays.layers[0].key_dim / 2;
  for (const predict::LayerShape& shape : arrays.layers)
    if (half_ == 0 || shape.key_dim != 2 * half_)
      kChecks.refuse("keys of different or odd dimensions cannot be rotated");
  if (arrays.rope_fine == nullptr || arrays.rope_coarse == nullptr) kChecks.refuse("rope_fine, rope_coarse: missing");
  if (arrays.coarse < 1 || arrays.coarse > static_cast<std::size_t>(predict::kPositions) / predict::kFine)
    kChecks.refuse("rope_coarse: expected 1 to 2**24 rows");
  fine_.assign(arrays.rope_fine, arrays.rope_fine + 2 * predict::kFine * half_);
  coarse_.assign(arrays.rope_coarse, arrays.rope_coarse + 2 * arrays.coarse * half_);
  kChecks.range(fine_.data(), fine_.size(), -kUnit, kUnit, "rope_fine");
  kChecks.range(coarse_.data(), coarse_.size(), -kUnit, kUnit, "rope_coarse");
  positions_ = static_cast<std::int64_t>(arrays.coarse * predict::kFine);
}

void Model::take_part(const Arrays& arrays, std::size_t number) {
  const predict::LayerShape& shape = arrays.layers[number / 2];
  const PartArrays& from = arrays.parts[number];
  Part& part = parts_[number];
  part.number = number;
  part.value = number % 2;
  part.heads = shape.heads;
  part.dim = part.value ? shape.value_dim : shape.key_dim;
  part.rotated = arrays.rotated && !part.value;
  part.width = part.heads * part.dim;
  part.order = order_of(part.width, part.rotated ? half_ : 0);
  kChecks.range(from.adapt, 3, -kMostAdapt, kMostAdapt, Checks::name_of(number, "adapt"));
  std::copy_n(from.adapt, 3, part.adapt);
  take_groups(arrays, part);
  if (number < 2) {
    if (from.row == nullptr) kChecks.refuse(Checks::name_of(number, "row") + ": missing");
    part.row.assign(from.row, from.row + part.width);
    return;
  }
  take_inputs(arrays, part);
  if (from.groups == nullptr) kChecks.refuse(Checks::name_of(number, "group") + ": missing");
  add_weights(from.groups, part);
}

void Model::take_groups(const Arrays& arrays, Part& part) {
  const PartArrays& from = arrays.parts[part.number];
  const auto checked = [&](const auto* values, int least, int most, const char* name) {
    kChecks.range(values, part.width, least, most, Checks::name_of(part.number, name));
  };
  checked(from.fix, kLeastFix, kMostFix, "fix");
  checked(from.gain, 0, kMostFactor, "gain");
  checked(from.narrow, 0, kMostFactor, "narrow");
  checked(from.shift, 0, kMostShift, "shift");
  checked(from.bias, -kMostBias, kMostBias, "bias");
  checked(from.scale, -predict::kMostScale, predict::kMostScale, "scale");
  part.groups.assign(groups_of(part.width), Group{});
  for (std::size_t j = 0; j < part.width; ++j) {
    Group& group = part.groups[j / kColumns];
    const std::size_t c = j % kColumns;
    ++group.width;
    group.scale[c] = group.scale[kColumns + c] = from.scale[j];
    group.gain[c] = group.gain[kColumns + c] = from.gain[j];
    group.narrow[c] = group.narrow[kColumns + c] = from.narrow[j];
    group.shift[c] = from.shift[j];
    group.bias[c] = from.bias[j];
    if (part.rotated && from.fix[j] != from.fix[j ^ 1])
      kChecks.refuse(Checks::name_of(part.number, "fix") + ": the halves of a pair differ");
    const float to = std::ldexp(1.0f, from.fix[j]);
    const float back = std::ldexp(1.0f, -from.fix[j] - (part.rotated ? 14 : 0));
    if (!part.rotated) {
      group.to_fixed[c] = to;
      group.from_fixed[c] = back;
    } else {
      group.to_fixed[c / 2] = group.to_fixed[kPairs + c / 2] = to;
      group.from_fixed[c / 2] = group.from_fixed[kPairs + c / 2] = back;
    }
  }
}

void Model::take_inputs(const Arrays& arrays, Part& part) {
  part.inputs = inputs_of(level_, part.number);
  std::size_t rows = 0;
  for (const std::size_t input : part.inputs) {
    part.depths.push_back(parts_[input].groups.size());
    part.depth += part.depths.back();
    rows += parts_[input].width;
  }
  const std::int8_t* row = arrays.parts[part.number].weight;
  if (rows > kMostInputs) kChecks.refuse(Checks::name_of(part.number, "weight") + ": more than 32768 inputs");
  if (rows == 0) return;
  if (row == nullptr) kChecks.refuse(Checks::name_of(part.number, "weight") + ": missing");
  kChecks.range(row, rows * part.width, -127, 127, Checks::name_of(part.number, "weight"));
  part.weights = lines_.size();
  const std::size_t columns = part.groups.size();
  lines_.resize(lines_.size() + part.depth * kSteps * columns, predict::Line{});
  std::int8_t* const packed = lines_[part.weights].bytes;
  std::vector<std::int32_t> sums(columns * kColumns, 0);
  std::size_t before = 0;  // steps of the inputs before
  for (std::size_t i = 0; i < part.inputs.size(); before += kSteps * part.depths[i], ++i) {
    const std::size_t width = parts_[part.inputs[i]].width;
    for (std::size_t k = 0; k < width; k += 4) {
      const std::size_t here = std::min<std::size_t>(width - k, 4);
      for (std::size_t g = 0; g < columns; ++g) {
        const std::size_t panel = g / kMostPanel * kMostPanel, wide = std::min(kMostPanel, columns - panel);
        const std::size_t line = panel * part.depth * kSteps + (before + k / 4) * wide + g - panel;
        predict::pack_rows(row + g * kColumns, part.width, here, part.groups[g].width,
                           packed + line * predict::kColumnsBytes, sums.data() + g * kColumns);
      }
      row += here * part.width;
    }
  }
  subtract(part, sums.data());
}

void Model::add_weights(const std::int8_t* weight, Part& part) {
  kChecks.range(weight, packed_size(part.width), -127, 127, Checks::name_of(part.number, "group"));
  std::vector<std::int32_t> sums(part.groups.size() * kColumns, 0);
  for (std::size_t g = 0; g < part.groups.size(); ++g) {
    Group& group = part.groups[g];
    group.weights = lines_.size();
    lines_.resize(lines_.size() + std::max<std::size_t>(g * kSteps, 1), predict::Line{});
    std::int8_t* const packed = lines_[group.weights].bytes;
    for (std::size_t k = 0; k < kColumns * g; k += 4, weight += 4 * group.width)
      predict::pack_rows(weight, group.width, 4, group.width, packed + k / 4 * predict::kColumnsBytes,
                         sums.data() + g * kColumns);
  }
  subtract(part, sums.data());
}

void Model::take_tokens(const Arrays& arrays) {
  vocabulary_ = arrays.vocabulary;
  token_kv_.assign(arrays.token_kv, arrays.token_kv + vocabulary_ * (parts_[0].width + parts_[1].width));
}

void Model::take_freqs(const Arrays& arrays) {
  if (arrays.freqs == nullptr) kChecks.refuse("freqs: missing");
  std::vector<std::uint16_t> wide(2 * predict::kClasses * rans::Tables::kSymbols);
  for (std::size_t t = 0; t < 2 * predict::kClasses; ++t) {
    for (std::size_t s = 0; s < predict::kSymbols; ++s) {
      wide[t * rans::Tables::kSymbols + s] = arrays.freqs[t * predict::kSymbols + s];
      if (arrays.freqs[t * predict::kSymbols + s] == 0) kChecks.refuse("freqs: a frequency is 0");
    }
  }
  if (!tables_.build(wide.data(), 2 * predict::kClasses, predict::kTableBits))
    kChecks.refuse("freqs: every row must sum to 4096");
}

void Model::angles(std::int64_t position, std::int16_t* cos, std::int16_t* sin) const {
  const std::size_t rows = coarse_.size() / (half_ * 2);
  const std::int16_t* const cf = fine_.data() + static_cast<std::size_t>(position) % predict::kFine * half_;
  const std::int16_t* const sf = cf + predict::kFine * half_;
  const std::int16_t* const ch = coarse_.data() + static_cast<std::size_t>(position) / predict::kFine * half_;
  const std::int16_t* const sh = ch + rows * half_;
  for (std::size_t j = 0; j < half_; ++j) {
    cos[j] = static_cast<std::int16_t>((ch[j] * cf[j] - sh[j] * sf[j] + 8192) >> 14);
    sin[j] = static_cast<std::int16_t>((sh[j] * cf[j] + ch[j] * sf[j] + 8192) >> 14);
  }
}

}  // namespace kvstore::levels

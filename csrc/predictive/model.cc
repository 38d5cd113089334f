#include "predictive/model.h"

#include <cmath>
#include <cstring>
#include <string>

#include "predictive/checks.h"

namespace kvstore::predict {
namespace {

constexpr std::size_t kMostWidth = 1 << 20;
constexpr int kMostBias = 1 << 28, kMostAdapt = 1 << 12, kLeastFix = -14, kMostFix = 30, kUnit = 1 << 14;

constexpr ModelChecks kChecks("predictive");

}  // namespace

Model::Model(const Arrays& arrays) {
  if (arrays.layers.empty() || arrays.parts.size() != 2 * arrays.layers.size())
    kChecks.refuse("expected K and V of at least one layer");
  for (const LayerShape& shape : arrays.layers) {
    for (const std::size_t dim : {shape.key_dim, shape.value_dim}) {
      if (shape.heads < 1 || dim < 1 || shape.heads > kMostWidth || dim > kMostWidth || shape.heads * dim > kMostWidth)
        kChecks.refuse("a layer without heads or dimensions, or with too many");
    }
  }
  take_rope(arrays);
  parts_.resize(arrays.parts.size());
  for (std::size_t i = 0; i < parts_.size(); ++i) take_part(arrays, i);
  vocabulary_ = arrays.vocabulary;
  token_kv_.assign(arrays.token_kv, arrays.token_kv + vocabulary_ * (parts_[0].width + parts_[1].width));
  if (arrays.freqs == nullptr) return;
  std::vector<std::uint16_t> wide(2 * kClasses * rans::Tables::kSymbols);
  for (std::size_t t = 0; t < 2 * kClasses; ++t) {
    for (std::size_t s = 0; s < kSymbols; ++s) {
      wide[t * rans::Tables::kSymbols + s] = arrays.freqs[t * kSymbols + s];
      if (arrays.freqs[t * kSymbols + s] == 0) kChecks.refuse("freqs: a frequency of 0");
    }
  }
  if (!tables_.build(wide.data(), 2 * kClasses, 12)) kChecks.refuse("freqs: every row must sum to 4096");
}

void Model::take_rope(const Arrays& arrays) {
  bool rotated = false;
  for (std::size_t i = 0; i < arrays.parts.size(); ++i) {
    if (arrays.parts[i].fix == nullptr) continue;
    if (i % 2) kChecks.refuse(ModelChecks::name_of(i, "fix") + ": values are not rotated");
    rotated = true;
    const std::size_t dim = arrays.layers[i / 2].key_dim;
    if (dim % 2 || (half_ != 0 && dim != 2 * half_))
      kChecks.refuse("keys of different or odd dimensions cannot be rotated");
    half_ = dim / 2;
  }
  if (!rotated) return;
  if (arrays.rope_fine == nullptr || arrays.rope_coarse == nullptr) kChecks.refuse("rope_fine, rope_coarse: missing");
  if (arrays.coarse < 1 || arrays.coarse > static_cast<std::size_t>(kPositions) / kFine)
    kChecks.refuse("rope_coarse: expected 1 to 2**24 rows");
  fine_.assign(arrays.rope_fine, arrays.rope_fine + 2 * kFine * half_);
  coarse_.assign(arrays.rope_coarse, arrays.rope_coarse + 2 * arrays.coarse * half_);
  kChecks.range(fine_.data(), fine_.size(), -kUnit, kUnit, "rope_fine");
  kChecks.range(coarse_.data(), coarse_.size(), -kUnit, kUnit, "rope_coarse");
  positions_ = static_cast<std::int64_t>(arrays.coarse * kFine);
}

void Model::take_part(const Arrays& arrays, std::size_t number) {
  const LayerShape& shape = arrays.layers[number / 2];
  const PartArrays& from = arrays.parts[number];
  Part& part = parts_[number];
  part.value = number % 2;
  part.heads = shape.heads;
  part.dim = part.value ? shape.value_dim : shape.key_dim;
  part.rotated = from.fix != nullptr;
  const std::size_t width = part.width = part.heads * part.dim;
  part.padded = round_up(width, kVector);
  const std::size_t whole = round_up(width, kColumnsBytes);

  part.in_scale = kChecks.scales(from.in_scale, width, whole, 1, ModelChecks::name_of(number, "in_scale"));
  part.out_scale = kChecks.scales(from.out_scale, width, whole, 1, ModelChecks::name_of(number, "out_scale"));
  kChecks.range(from.scale, width, -kMostScale, kMostScale, ModelChecks::name_of(number, "scale"));
  part.scale.assign(from.scale, from.scale + width);
  part.scale.resize(whole, 0);
  kChecks.range(from.bias, width, -kMostBias, kMostBias, ModelChecks::name_of(number, "bias"));
  part.bias.assign(from.bias, from.bias + width);
  part.bias.resize(whole, 0);
  kChecks.range(from.adapt, 3, -kMostAdapt, kMostAdapt, ModelChecks::name_of(number, "adapt"));
  std::memcpy(part.adapt, from.adapt, sizeof part.adapt);
  if (part.rotated) {
    kChecks.range(from.fix, width, kLeastFix, kMostFix, ModelChecks::name_of(number, "fix"));
    part.to_fixed.assign(whole, 1.0f);
    part.from_fixed.assign(whole, 1.0f);
    for (std::size_t j = 0; j < width; ++j) {
      const std::size_t pair = j % part.dim < half_ ? j + half_ : j - half_;
      if (from.fix[pair] != from.fix[j])
        kChecks.refuse(ModelChecks::name_of(number, "fix") + ": the halves of a pair differ");
      part.to_fixed[j] = std::ldexp(1.0f, from.fix[j]);
      part.from_fixed[j] = std::ldexp(1.0f, -(from.fix[j] + 14));
    }
  }
  if (number < 2 || !arrays.weights) return;
  part.inputs = number % 2 ? std::vector<std::size_t>{number - 3, number - 2}
                           : std::vector<std::size_t>{number - 2, number - 1};
  if (number >= 4 && arrays.reach == 2) {
    part.inputs.push_back(part.inputs[0] - 2);
    part.inputs.push_back(part.inputs[1] - 2);
  }
  if (part.value) part.inputs.push_back(number - 1);
  if (from.weight == nullptr) kChecks.refuse(ModelChecks::name_of(number, "weight") + ": missing");
  take_weight(part, from);
}

void Model::take_weight(Part& part, const PartArrays& arrays) {
  const auto number = static_cast<std::size_t>(&part - parts_.data());
  std::vector<std::size_t> widths;
  std::size_t rows = 0;
  for (const std::size_t input : part.inputs) {
    widths.push_back(parts_[input].width);
    rows += widths.back();
  }
  if (rows > kMostInputs) kChecks.refuse(ModelChecks::name_of(number, "weight") + ": more than 65536 inputs");
  kChecks.range(arrays.weight, rows * part.width, -127, 127, ModelChecks::name_of(number, "weight"));
  pack(part, widths, arrays.weight, lines_);
}

void pack(Part& part, const std::vector<std::size_t>& widths, const std::int8_t* weight, std::vector<Line>& lines) {
  for (const std::size_t width : widths) {
    part.groups.push_back(round_up(width, kGroup) / kGroup);
    part.depth += part.groups.back();
  }
  part.weights = lines.size();
  lines.resize(lines.size() + part.depth * part.padded * kGroup / kColumnsBytes, Line{});
  std::int8_t* const packed = lines[part.weights].bytes;
  std::vector<std::int64_t> sums(part.width, 0);
  const std::int8_t* row = weight;
  for (std::size_t i = 0, group = 0; i < widths.size(); group += part.groups[i], ++i) {
    for (std::size_t k = 0; k < widths[i]; ++k, row += part.width) {
      for (std::size_t j = 0; j < part.width; ++j) {
        const std::size_t panel = j / kPanel * kPanel;
        const std::size_t wide = part.padded - panel < kPanel ? part.padded - panel : kPanel;
        const std::size_t before = panel * part.depth + (group + k / kGroup) * wide + j - panel;
        packed[before * kGroup + k % kGroup] = row[j];
        sums[j] += row[j];
      }
    }
  }
  // Inputs are handed to the kernels as 1..255.
  for (std::size_t j = 0; j < part.width; ++j)
    part.bias[j] = static_cast<std::int32_t>(part.bias[j] - 128 * sums[j]);
}

void Model::angles(std::int64_t position, std::int32_t* cos, std::int32_t* sin) const {
  const std::size_t rows = coarse_.size() / (half_ * 2);
  const std::int16_t* const cf = fine_.data() + static_cast<std::size_t>(position) % kFine * half_;
  const std::int16_t* const sf = cf + kFine * half_;
  const std::int16_t* const ch = coarse_.data() + static_cast<std::size_t>(position) / kFine * half_;
  const std::int16_t* const sh = ch + rows * half_;
  for (std::size_t j = 0; j < half_; ++j) {
    cos[j] = (ch[j] * cf[j] - sh[j] * sf[j] + 8192) >> 14;
    sin[j] = (sh[j] * cf[j] + ch[j] * sf[j] + 8192) >> 14;
  }
}

}  // namespace kvstore::predict

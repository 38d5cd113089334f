#include "predictive/model.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>

#include "common/checks.h"
#include "predictive/pack.h"

namespace kvstore::predict {
namespace {

constexpr std::size_t kMostWidth = 1 << 20;
constexpr int kMostBias = 1 << 28, kMostAdapt = 1 << 12, kLeastFix = -14, kMostFix = 30, kUnit = 1 << 14;

// A copy with every number from `least` to `most`, filled up with zeros to `padded`; null: zeros.
template <class T>
std::vector<T> ranged(const Checks& checks, const T* values, std::size_t count, std::size_t padded, int least, int most,
                      const std::string& name) {
  if (values == nullptr) return std::vector<T>(padded, 0);
  checks.range(values, count, least, most, name);
  std::vector<T> made(values, values + count);
  made.resize(padded, 0);
  return made;
}

}  // namespace

Model::Model(const Arrays& arrays) {
  const Checks checks(arrays.codec);
  if (arrays.layers.empty() || arrays.parts.size() != 2 * arrays.layers.size())
    checks.refuse("expected K and V of at least one layer");
  for (const LayerShape& shape : arrays.layers) {
    for (const std::size_t dim : {shape.key_dim, shape.value_dim}) {
      if (shape.heads < 1 || dim < 1 || shape.heads > kMostWidth || dim > kMostWidth || shape.heads * dim > kMostWidth)
        checks.refuse("a layer has no heads or dimensions, or more than 2**20");
    }
  }
  take_rope(arrays);
  parts_.resize(arrays.parts.size());
  for (std::size_t i = 0; i < parts_.size(); ++i) {
    take_part(arrays, i);
    width_ += parts_[i].width;
    widest_ = std::max(widest_, parts_[i].padded);
  }
  vocabulary_ = arrays.vocabulary;
  token_kv_.assign(arrays.token_kv, arrays.token_kv + vocabulary_ * (parts_[0].width + parts_[1].width));
  take_freqs(arrays);
}

void Model::take_freqs(const Arrays& arrays) {
  const Checks checks(arrays.codec);
  if (arrays.freqs == nullptr) return;
  std::vector<std::uint16_t> wide(2 * kClasses * rans::Tables::kSymbols);
  for (std::size_t t = 0; t < 2 * kClasses; ++t) {
    for (std::size_t s = 0; s < kSymbols; ++s) {
      wide[t * rans::Tables::kSymbols + s] = arrays.freqs[t * kSymbols + s];
      if (arrays.freqs[t * kSymbols + s] == 0) checks.refuse("freqs: a frequency is 0");
    }
  }
  if (!tables_.build(wide.data(), 2 * kClasses, kTableBits)) checks.refuse("freqs: every row must sum to 4096");
}

void Model::take_rope(const Arrays& arrays) {
  const Checks checks(arrays.codec);
  bool rotated = false;
  for (std::size_t i = 0; i < arrays.parts.size(); ++i) {
    if (arrays.parts[i].fix == nullptr) continue;
    if (i % 2) checks.refuse(Checks::name_of(i, "fix") + ": values are not rotated");
    rotated = true;
    const std::size_t dim = arrays.layers[i / 2].key_dim;
    if (dim % 2 || (half_ != 0 && dim != 2 * half_))
      checks.refuse("keys of different or odd dimensions cannot be rotated");
    half_ = dim / 2;
  }
  if (!rotated) return;
  if (arrays.rope_fine == nullptr || arrays.rope_coarse == nullptr) checks.refuse("rope_fine, rope_coarse: missing");
  if (arrays.coarse < 1 || arrays.coarse > static_cast<std::size_t>(kPositions) / kFine)
    checks.refuse("rope_coarse: expected 1 to 2**24 rows");
  fine_.assign(arrays.rope_fine, arrays.rope_fine + 2 * kFine * half_);
  coarse_.assign(arrays.rope_coarse, arrays.rope_coarse + 2 * arrays.coarse * half_);
  checks.range(fine_.data(), fine_.size(), -kUnit, kUnit, "rope_fine");
  checks.range(coarse_.data(), coarse_.size(), -kUnit, kUnit, "rope_coarse");
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
  take_scales(part, arrays, number);
  if (part.rotated) take_fix(part, arrays, number);
  if (number < 2 || !arrays.weights) return;
  part.inputs = number % 2 ? std::vector<std::size_t>{number - 3, number - 2}
                           : std::vector<std::size_t>{number - 2, number - 1};
  if (number >= 4 && arrays.reach == 2) {
    part.inputs.push_back(part.inputs[0] - 2);
    part.inputs.push_back(part.inputs[1] - 2);
  }
  if (part.value) part.inputs.push_back(number - 1);
  if (from.weight == nullptr) Checks(arrays.codec).refuse(Checks::name_of(number, "weight") + ": missing");
  take_weight(part, arrays, number);
}

void Model::take_scales(Part& part, const Arrays& arrays, std::size_t number) {
  const Checks checks(arrays.codec);
  const PartArrays& from = arrays.parts[number];
  const std::size_t width = part.width, whole = round_up(width, kColumnsBytes);
  const auto factors = [&](const float* values, const char* array) {
    if (values == nullptr) return std::vector<float>(whole, 1.0f);
    return checks.scales(values, width, whole, 1, Checks::name_of(number, array));
  };
  part.in_scale = factors(from.in_scale, "in_scale");
  part.out_scale = factors(from.out_scale, "out_scale");
  part.scale = ranged(checks, from.scale, width, whole, -kMostScale, kMostScale, Checks::name_of(number, "scale"));
  part.bias = ranged(checks, from.bias, width, whole, -kMostBias, kMostBias, Checks::name_of(number, "bias"));
  if (from.adapt == nullptr) return;
  checks.range(from.adapt, 3, -kMostAdapt, kMostAdapt, Checks::name_of(number, "adapt"));
  std::memcpy(part.adapt, from.adapt, sizeof part.adapt);
}

void Model::take_fix(Part& part, const Arrays& arrays, std::size_t number) {
  const Checks checks(arrays.codec);
  const std::int8_t* const fix = arrays.parts[number].fix;
  const std::string name = Checks::name_of(number, "fix");
  checks.range(fix, part.width, kLeastFix, kMostFix, name);
  part.to_fixed.assign(round_up(part.width, kColumnsBytes), 1.0f);
  part.from_fixed.assign(round_up(part.width, kColumnsBytes), 1.0f);
  for (std::size_t j = 0; j < part.width; ++j) {
    const std::size_t pair = j % part.dim < half_ ? j + half_ : j - half_;
    if (fix[pair] != fix[j]) checks.refuse(name + ": the two halves of a pair differ");
    part.to_fixed[j] = std::ldexp(1.0f, fix[j]);
    part.from_fixed[j] = std::ldexp(1.0f, -(fix[j] + 14));
  }
}

void Model::take_weight(Part& part, const Arrays& arrays, std::size_t number) {
  const Checks checks(arrays.codec);
  const std::int8_t* const weight = arrays.parts[number].weight;
  std::vector<std::size_t> widths;
  std::size_t rows = 0;
  for (const std::size_t input : part.inputs) {
    widths.push_back(parts_[input].width);
    rows += widths.back();
  }
  if (rows > kMostInputs) checks.refuse(Checks::name_of(number, "weight") + ": more than 65536 inputs");
  checks.range(weight, rows * part.width, -127, 127, Checks::name_of(number, "weight"));
  pack(part, widths, weight, lines_);
}

void pack(Part& part, const std::vector<std::size_t>& widths, const std::int8_t* weight, Lines& lines) {
  for (const std::size_t width : widths) {
    part.groups.push_back(round_up(width, kGroup) / kGroup);
    part.depth += part.groups.back();
  }
  part.weights = lines.size();
  lines.resize(lines.size() + part.depth * part.padded * kGroup / kColumnsBytes, Line{});
  std::int8_t* const packed = lines[part.weights].bytes;
  std::vector<std::int32_t> sums(part.width, 0);
  const std::int8_t* row = weight;
  for (std::size_t i = 0, group = 0; i < widths.size(); group += part.groups[i], ++i) {
    for (std::size_t k = 0; k < widths[i]; k += kGroup) {
      const std::size_t here = std::min(widths[i] - k, kGroup);
      for (std::size_t panel = 0; panel < part.width; panel += kPanel) {
        const std::size_t wide = std::min(part.padded - panel, kPanel), columns = std::min(part.width - panel, kPanel);
        const std::size_t before = panel * part.depth + (group + k / kGroup) * wide;
        pack_rows(row + panel, part.width, here, columns, packed + before * kGroup, sums.data() + panel);
      }
      row += here * part.width;
    }
  }
  // Inputs are handed to the kernels as 1..255.
  for (std::size_t j = 0; j < part.width; ++j)
    part.bias[j] -= 128 * sums[j];
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

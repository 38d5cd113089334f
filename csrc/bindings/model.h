// The arrays of a predictive model, which the predictive codec's two modes and the donor codec have. They must have the
// exact dtype and shape.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "bindings/arrays.h"
#include "predictive/model.h"

namespace kvstore::bindings {

using Lists = std::vector<MaybeArray>;  // an array or None for every part

constexpr std::int64_t kMostDim = 1 << 20;

// Heads, key_dim and value_dim of every layer.
inline std::vector<predict::LayerShape> layers_of(const ArrayChecks& checks, const py::array& shapes) {
  if (shapes.ndim() != 2 || shapes.shape(1) != 3 || shapes.shape(0) < 1)
    checks.refuse("shapes: expected [layers, 3]: heads, key_dim, value_dim");
  const auto count = static_cast<std::size_t>(shapes.shape(0));
  const std::int64_t* const dims = checks.needed<std::int64_t>(shapes, "shapes", {count, 3});
  checks.range(dims, 3 * count, 1, kMostDim, "shapes");
  std::vector<predict::LayerShape> layers;
  for (std::size_t i = 0; i < count; ++i) {
    const std::int64_t* const d = dims + 3 * i;
    if (d[0] * d[1] > kMostDim || d[0] * d[2] > kMostDim) checks.refuse("shapes: a row has more than 2**20 values");
    layers.push_back({static_cast<std::size_t>(d[0]), static_cast<std::size_t>(d[1]), static_cast<std::size_t>(d[2])});
  }
  return layers;
}

// An array or None for every part; null: a codec that has no such arrays.
struct ModelLists {
  const Lists* in_scale = nullptr;
  const Lists* out_scale = nullptr;
  const Lists* scale = nullptr;
  const Lists* bias = nullptr;
  const Lists* adapt = nullptr;
  const Lists* fix = nullptr;
  const Lists* weight = nullptr;

  void check(const ArrayChecks& checks, std::size_t parts) const {
    for (const Lists* list : {in_scale, out_scale, scale, bias, adapt, fix, weight})
      if (list != nullptr && list->size() != parts) checks.refuse("expected an entry for K and V of every layer");
  }
};

// Values of the inputs that a part is predicted from.
inline std::size_t inputs_of(const std::vector<std::size_t>& widths, std::size_t number, std::size_t reach) {
  std::size_t inputs = number % 2 && number >= 2 ? widths[number - 1] : 0;
  for (std::size_t p = number / 2 * 2; p-- > 0 && p + 2 * reach >= number / 2 * 2;) inputs += widths[p];
  return inputs;
}

// Fills in the parts, for the reach that `arrays` says. Returns how many angles a position has. The lists must outlive
// `arrays`.
inline std::size_t take_parts(const ArrayChecks& checks, predict::Arrays& arrays, const ModelLists& lists) {
  lists.check(checks, 2 * arrays.layers.size());
  std::vector<std::size_t> widths;
  std::size_t half = 0;
  for (std::size_t i = 0; i < 2 * arrays.layers.size(); ++i) {
    const predict::LayerShape& shape = arrays.layers[i / 2];
    const std::size_t width = shape.heads * (i % 2 ? shape.value_dim : shape.key_dim);
    widths.push_back(width);
    predict::PartArrays part;
    const auto take = [&](auto*& to, const Lists* list, const char* name, const std::vector<std::size_t>& size) {
      using T = std::remove_const_t<std::remove_pointer_t<std::remove_reference_t<decltype(to)>>>;
      if (list != nullptr) to = checks.needed<T>((*list)[i], Checks::name_of(i, name), size);
    };
    take(part.in_scale, lists.in_scale, "in_scale", {width});
    take(part.out_scale, lists.out_scale, "out_scale", {width});
    take(part.scale, lists.scale, "scale", {width});
    take(part.bias, lists.bias, "bias", {width});
    take(part.adapt, lists.adapt, "adapt", {3});
    if (lists.fix) part.fix = checks.maybe<std::int8_t>((*lists.fix)[i], Checks::name_of(i, "fix"), {width});
    if (part.fix) half = shape.key_dim / 2;
    if (lists.weight) {
      const MaybeArray& weight = (*lists.weight)[i];
      const std::string name = Checks::name_of(i, "weight");
      if (i < 2 && weight) checks.refuse(name + ": layer 0 has none");
      part.weight = checks.maybe<std::int8_t>(weight, name, {inputs_of(widths, i, arrays.reach), width});
    }
    arrays.parts.push_back(part);
  }
  arrays.weights = lists.weight != nullptr;
  return half;
}

inline void take_rope(const ArrayChecks& checks, predict::Arrays& arrays, std::size_t half, const MaybeArray& fine,
                      const MaybeArray& coarse) {
  if (half == 0) return;
  if (!coarse || coarse->ndim() != 3) checks.refuse("rope_coarse: expected [2, N, key_dim / 2]");
  arrays.coarse = static_cast<std::size_t>(coarse->shape(1));
  arrays.rope_fine = checks.needed<std::int16_t>(fine, "rope_fine", {2, predict::kFine, half});
  arrays.rope_coarse = checks.needed<std::int16_t>(coarse, "rope_coarse", {2, arrays.coarse, half});
}

// After the layers are known.
inline void take_tokens(const ArrayChecks& checks, predict::Arrays& arrays, const py::array& token_kv) {
  if (token_kv.ndim() != 2) checks.refuse("token_kv: expected [vocabulary, K and V]");
  const predict::LayerShape& first = arrays.layers[0];
  arrays.vocabulary = static_cast<std::size_t>(token_kv.shape(0));
  arrays.token_kv = checks.needed<std::int8_t>(
      token_kv, "token_kv", {arrays.vocabulary, first.heads * (first.key_dim + first.value_dim)});
}

}  // namespace kvstore::bindings

// The arrays of a level of the exact predictor, which the donor codec's mode in groups has, too. They must have the
// exact dtype and shape.
#pragma once

#include <cstdint>
#include <string>
#include <type_traits>
#include <vector>

#include "bindings/model.h"
#include "levels/model.h"

namespace kvstore::bindings {

// The arrays of a part, a dict by name.
inline levels::PartArrays level_part(const ArrayChecks& checks, const levels::Arrays& arrays, const py::dict& given,
                                     std::size_t number) {
  const auto width = [&](std::size_t i) {
    const predict::LayerShape& shape = arrays.layers[i / 2];
    return shape.heads * (i % 2 ? shape.value_dim : shape.key_dim);
  };
  levels::PartArrays part;
  const auto take = [&](auto*& to, const char* name, const std::vector<std::size_t>& size, bool needed) {
    using T = std::remove_const_t<std::remove_pointer_t<std::remove_reference_t<decltype(to)>>>;
    MaybeArray found;
    if (given.contains(name) && !given[name].is_none()) found = given[name].cast<py::array>();
    const std::string full = Checks::name_of(number, name);
    to = needed ? checks.needed<T>(found, full, size) : checks.maybe<T>(found, full, size);
  };
  const std::size_t columns = width(number);
  std::size_t inputs = 0;
  for (const std::size_t input : levels::inputs_of(arrays.level, number)) inputs += width(input);
  take(part.fix, "fix", {columns}, true);
  take(part.gain, "gain", {columns}, true);
  take(part.narrow, "narrow", {columns}, true);
  take(part.shift, "shift", {columns}, true);
  take(part.bias, "bias", {columns}, true);
  take(part.scale, "scale", {columns}, true);
  take(part.adapt, "adapt", {3}, true);
  take(part.row, "row", {columns}, number < 2);
  take(part.weight, "weight", {inputs, columns}, inputs != 0);
  take(part.groups, "groups", {levels::packed_size(columns)}, number >= 2);
  return part;
}

// A model of its arrays; parts: dicts.
inline levels::Model level_model(const ArrayChecks& checks, int level, const py::array& shapes, const py::list& parts,
                                 const py::array& token_kv, const py::array& freqs, const MaybeArray& rope_fine,
                                 const MaybeArray& rope_coarse) {
  levels::Arrays arrays;
  arrays.level = level;
  if (level < 1 || level > 3) checks.refuse("level: expected 1, 2 or 3");
  arrays.layers = layers_of(checks, shapes);
  if (parts.size() != 2 * arrays.layers.size()) checks.refuse("parts: expected K and V of every layer");
  for (std::size_t i = 0; i < parts.size(); ++i)
    arrays.parts.push_back(level_part(checks, arrays, parts[i].cast<py::dict>(), i));
  predict::Arrays shared;  // what both kinds of models have alike
  shared.layers = arrays.layers;
  take_tokens(checks, shared, token_kv);
  arrays.rotated = rope_fine.has_value();
  if (arrays.rotated) take_rope(checks, shared, arrays.layers[0].key_dim / 2, rope_fine, rope_coarse);
  arrays.token_kv = shared.token_kv;
  arrays.vocabulary = shared.vocabulary;
  arrays.rope_fine = shared.rope_fine;
  arrays.rope_coarse = shared.rope_coarse;
  arrays.coarse = shared.coarse;
  arrays.freqs = checks.needed<std::uint16_t>(freqs, "freqs", {2 * predict::kClasses, predict::kSymbols});
  return levels::Model(arrays);
}

}  // namespace kvstore::bindings

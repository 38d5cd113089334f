// Any model of a level that a profile may hold.
#pragma once

#include "levels/model.h"
#include "models.h"

namespace fuzz {

using namespace kvstore;

// In coding order, where the two columns of a rotary pair stand side by side and are alike; rarely they are not.
inline const std::int8_t* fix_of(Profile& profile, std::size_t width, bool rotated) {
  auto& made = profile.keep<std::int8_t>(width);
  const std::size_t kind = profile.input().below(6);
  for (std::size_t j = 0; j < width; ++j) {
    const auto any = static_cast<std::int8_t>(Random((rotated ? j / 2 : j) * 31 + 7).between(-14, 30));
    made[j] = kind == 1 ? -14 : kind == 2 ? 30 : kind == 3 ? any : 8;
  }
  if (kind == 4) made[profile.input().below(width)] = static_cast<std::int8_t>(profile.input().byte());
  return made.data();
}

inline levels::PartArrays level_part(Profile& profile, const levels::Arrays& arrays, std::size_t number) {
  const auto width = [&](std::size_t i) {
    const predict::LayerShape& shape = arrays.layers[i / 2];
    return shape.heads * (i % 2 ? shape.value_dim : shape.key_dim);
  };
  const std::size_t columns = width(number);
  levels::PartArrays part;
  part.fix = fix_of(profile, columns, arrays.rotated && number % 2 == 0);
  part.gain = profile.numbers<std::int16_t>(columns, 0, (1 << 15) - 1);
  part.narrow = profile.numbers<std::int16_t>(columns, 0, (1 << 15) - 1);
  part.shift = profile.numbers<std::int8_t>(columns, 0, levels::kMostShift);
  part.bias = profile.numbers<std::int32_t>(columns, -(1 << 28), 1 << 28);
  part.scale = profile.numbers<std::int16_t>(columns, -400, 400);
  part.adapt = profile.numbers<std::int32_t>(3, -(1 << 12), 1 << 12);
  if (number < 2) {
    part.row = profile.numbers<std::int16_t>(columns, -(1 << 15), (1 << 15) - 1);
    return part;
  }
  std::size_t inputs = 0;
  for (const std::size_t input : levels::inputs_of(arrays.level, number)) inputs += width(input);
  part.weight = profile.numbers<std::int8_t>(inputs * columns, -127, 127);
  part.groups = profile.numbers<std::int8_t>(levels::packed_size(columns), -127, 127);
  return part;
}

inline levels::Arrays level_arrays(Profile& profile) {
  levels::Arrays arrays;
  arrays.level = 1 + static_cast<int>(profile.input().below(3));
  arrays.rotated = profile.input().flag();
  arrays.layers = profile.shapes(arrays.rotated);
  for (std::size_t i = 0; i < 2 * arrays.layers.size(); ++i) arrays.parts.push_back(level_part(profile, arrays, i));
  if (arrays.rotated) {
    const std::size_t half = arrays.layers[0].key_dim / 2;
    arrays.coarse = 1 + profile.input().below(20);
    arrays.rope_fine = profile.angles(predict::kFine, half);
    arrays.rope_coarse = profile.angles(arrays.coarse, half);
  }
  const predict::LayerShape& first = arrays.layers[0];
  arrays.vocabulary = profile.input().below(20);
  arrays.token_kv = profile.numbers<std::int8_t>(
      arrays.vocabulary * first.heads * (first.key_dim + first.value_dim), -128, 127);
  arrays.freqs = Profile::freqs();
  return arrays;
}

}  // namespace fuzz

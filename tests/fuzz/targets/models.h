// The arrays of a calibration profile as an input chooses them: within the bounds that a reader checks and at them, and
// now and then beyond, which a model must refuse.
#pragma once

#include <deque>

#include "fuzz.h"
#include "predictive/model.h"

namespace fuzz {

class Profile {
 public:
  using Shape = kvstore::predict::LayerShape;

  explicit Profile(Input& input) : input_(input), random_(input.byte()) {}

  std::vector<Shape> shapes(bool rope) {
    std::vector<Shape> made;
    const std::size_t layers = 1 + input_.below(4), half = 1 + input_.below(input_.flag() ? 33 : 5);
    for (std::size_t i = 0; i < layers; ++i) {
      const std::size_t dim = rope ? 2 * half : 1 + input_.below(20);
      made.push_back({1 + input_.below(3), dim, 1 + input_.below(20)});
    }
    return made;
  }

  // `count` numbers: chance, one bound, the other, both in turn, small ones, zeros; or one of them is anything.
  template <class T>
  const T* numbers(std::size_t count, std::int64_t low, std::int64_t high) {
    auto& made = keep<T>(count);
    const std::size_t kind = input_.below(12);
    for (std::size_t i = 0; i < count; ++i) {
      const std::int64_t any = random_.between(low, high);
      const std::int64_t value = kind == 1   ? low
                                 : kind == 2 ? high
                                 : kind == 3 ? (i % 2 ? low : high)
                                 : kind == 4 ? 0
                                 : kind < 8  ? any
                                             : any / 16;
      made[i] = static_cast<T>(value);
    }
    if (kind == 5 && input_.below(8) == 1 && count) made[input_.below(count)] = static_cast<T>(input_.number(sizeof(T)));
    return made.data();
  }

  // Positive floats around 2^octave, of any size, or (rarely) with one that is none.
  const float* floats(std::size_t count, int octave) {
    auto& made = keep<float>(count);
    const std::size_t kind = input_.below(8);
    for (std::size_t i = 0; i < count; ++i) {
      const int power = octave + static_cast<int>(kind == 1 ? random_.between(-140, 120) : random_.between(-3, 3));
      made[i] = kind == 2 ? 3.4e38f : kind == 3 ? 1e-45f : scaled(power);
    }
    if (kind == 4 && count) {
      const auto bits = static_cast<std::uint32_t>(input_.number(4));
      std::memcpy(&made[input_.below(count)], &bits, 4);
    }
    return made.data();
  }

  // [heads, 2, half], the two halves of a pair the same; rarely not.
  const std::int8_t* fix(const Shape& shape) {
    const std::size_t width = shape.heads * shape.key_dim, half = shape.key_dim / 2;
    auto& made = keep<std::int8_t>(width);
    const std::size_t kind = input_.below(6);
    for (std::size_t j = 0; j < width; ++j) {
      const std::size_t pair = j % shape.key_dim < half ? j : j - half;
      const auto any = static_cast<std::int8_t>(Random(pair * 31 + 7).between(-14, 30));
      made[j] = kind == 1 ? -14 : kind == 2 ? 30 : kind == 3 ? any : 8;
    }
    if (kind == 4) made[input_.below(width)] = static_cast<std::int8_t>(input_.byte());
    return made.data();
  }

  // Angles of `rows` rows.
  const std::int16_t* angles(std::size_t rows, std::size_t half) {
    return numbers<std::int16_t>(2 * rows * half, -(1 << 14), 1 << 14);
  }

  // The frequencies of the donor codec, which are those of other models as well as any.
  static const std::uint16_t* freqs() {
    static const std::vector<std::uint16_t> made = table("codecs/donor/tables.bin");
    return made.data();
  }

  Input& input() { return input_; }
  Random& random() { return random_; }

  template <class T>
  std::vector<T>& keep(std::size_t count) {
    memory_.emplace_back(count * sizeof(T) + sizeof(T));
    static_assert(alignof(T) <= alignof(std::max_align_t));
    return *static_cast<std::vector<T>*>(kept_.emplace_back(new std::vector<T>(count), [](void* p) {
      delete static_cast<std::vector<T>*>(p);
    }).get());
  }

 private:
  static float scaled(int power) {
    float value = 1;
    for (; power > 0; --power) value *= 2;
    for (; power < 0; ++power) value /= 2;
    return value > 0 && value < 3e38f ? value : 1e-40f;
  }

  Input& input_;
  Random random_;
  std::deque<std::shared_ptr<void>> kept_;
  std::deque<Bytes> memory_;
};

// What the lossless and the lossy mode have in common; with reach 1 and without tokens, the donor codec.
inline kvstore::predict::Arrays arrays_of(Profile& profile, bool donor, bool weights) {
  using kvstore::predict::PartArrays;
  kvstore::predict::Arrays arrays;
  const bool rope = profile.input().flag();
  arrays.layers = profile.shapes(rope);
  arrays.reach = donor ? 1 : 2;
  arrays.weights = weights;
  std::vector<std::size_t> widths;
  for (const auto& shape : arrays.layers) {
    widths.push_back(shape.heads * shape.key_dim);
    widths.push_back(shape.heads * shape.value_dim);
  }
  for (std::size_t i = 0; i < widths.size(); ++i) {
    PartArrays part;
    const bool turned = rope && i % 2 == 0;
    if (!donor || weights) {
      part.in_scale = profile.floats(widths[i], turned ? -17 : 5);
      part.out_scale = profile.floats(widths[i], turned ? -4 : -12);
      if (turned) part.fix = profile.fix(arrays.layers[i / 2]);
    }
    if (!donor) {
      part.scale = profile.numbers<std::int16_t>(widths[i], -400, 400);
      part.bias = profile.numbers<std::int32_t>(widths[i], -(1 << 28), 1 << 28);
      part.adapt = profile.numbers<std::int32_t>(3, -(1 << 12), 1 << 12);
    }
    if (weights && i >= 2) {
      std::size_t inputs = i % 2 ? widths[i - 1] : 0;
      for (std::size_t p = i / 2 * 2; p-- > 0 && p + 2 * arrays.reach >= i / 2 * 2;) inputs += widths[p];
      part.weight = profile.numbers<std::int8_t>(inputs * widths[i], -127, 127);
    }
    arrays.parts.push_back(part);
  }
  if (rope && (!donor || weights)) {
    const std::size_t half = arrays.layers[0].key_dim / 2;
    arrays.coarse = 1 + profile.input().below(20);
    arrays.rope_fine = profile.angles(kvstore::predict::kFine, half);
    arrays.rope_coarse = profile.angles(arrays.coarse, half);
  }
  if (!donor) {
    arrays.vocabulary = profile.input().below(20);
    arrays.token_kv = profile.numbers<std::int8_t>(arrays.vocabulary * (widths[0] + widths[1]), -128, 127);
  }
  return arrays;
}

}  // namespace fuzz

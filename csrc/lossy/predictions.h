// The predictions of a block's rows: what encoder and decoder share. Included by lossy/values.h and
// lossy/encode/rows.h only.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "lossy/kernels.h"
#include "lossy/lossy.h"
#include "predictive/dispatch.h"
#include "predictive/inputs.h"
#include "predictive/rows.h"

namespace kvstore::lossy {

using predict::Buffer;
using predict::round_up;

// Of the first `wanted` tokens of a block, part after part: `predict` a part, then `take` what a decoder has of it.
class Predictions {
 public:
  Predictions(const Model& model, const Block& block, std::size_t wanted, Level level)
      : model_(model),
        block_(block),
        wanted_(wanted),
        predict_(predict::kernels(level)),
        sums_(round_up(wanted, kTile) * model.base().widest()),
        angles_(2 * wanted * model.base().half()),
        turns_(2 * wanted * model.base().half()),
        inputs_(model.base().parts(), predict::kMostParts, wanted, predict_.input_bytes),
        tokens_(wanted * inputs_.stride(token_width())) {
    std::fill_n(sums_.get(), round_up(wanted, kTile) * model.base().widest(), 0);
    take_angles();
    take_tokens();
  }

  // Makes the sums of a part's predictions.
  void predict(std::size_t number) {
    const predict::Part& part = model_.parts()[number].sums;
    if (number < 2) {
      for (std::size_t t = 0; t < wanted_; ++t) look_up(number, t);
      return;
    }
    predict::Inputs from{};
    for (std::size_t i = 0; i < part.inputs.size(); ++i) {
      const bool token = part.inputs[i] == model_.parts().size();
      from.rows[i] = token ? tokens_.get() : inputs_.rows(part.inputs[i]);
      from.stride[i] = inputs_.stride(token ? token_width() : model_.base().parts()[part.inputs[i]].width);
    }
    predict_.sums(part, model_.weight(model_.parts()[number]), from, wanted_, sums_.get());
  }

  // From row `begin` on, rows of part.sums.padded; whole tiles may be read.
  const std::int32_t* sums(const Part& part, std::size_t begin) const {
    return sums_.get() + begin * part.sums.padded;
  }

  // By how much a row of the part is rotated.
  Turn turn(std::size_t number, std::size_t row) const {
    const std::size_t half = model_.base().parts()[number].rotated ? model_.base().half() : 0;
    const float* const cos = turns_.get() + 2 * row * half;
    return {cos, cos + half, half};
  }

  // values: what was decoded of the part, bf16 [wanted][C].
  void take(std::size_t number, const std::uint16_t* values) {
    if (!model_.parts()[number].used) return;
    const predict::Part& part = model_.base().parts()[number];
    const std::size_t half = model_.base().half();
    for (std::size_t t = 0; t < wanted_; ++t) {
      const std::int32_t* const cos = angles_.get() + 2 * t * half;
      predict_.inputs(part, values + t * part.width, {cos, cos + half, half}, inputs_.row(number, t));
    }
  }

 private:
  std::size_t token_width() const { return model_.base().parts()[0].width + model_.base().parts()[1].width; }

  void take_angles() {
    const std::size_t half = model_.base().half();
    for (std::size_t t = 0; t < wanted_ && half != 0; ++t) {
      std::int32_t* const cos = angles_.get() + 2 * t * half;
      model_.base().angles(block_.start + static_cast<std::int64_t>(t) * block_.every, cos, cos + half);
      for (std::size_t j = 0; j < 2 * half; ++j)
        turns_.get()[2 * t * half + j] = static_cast<float>(cos[j]) / 16384.0f;
    }
  }

  void take_tokens() {
    const std::size_t width = token_width(), row = inputs_.stride(width);
    std::fill_n(tokens_.get(), wanted_ * row, std::uint8_t{0});
    for (std::size_t t = 0; t < wanted_; ++t) {
      const std::int8_t* const from = model_.base().token(block_.tokens[t]);
      std::uint8_t* const to = tokens_.get() + t * row;
      for (std::size_t j = 0; j < width; ++j) {
        const int in = (from == nullptr ? 0 : from[j]) + 128;
        if (predict_.input_bytes == 1)
          to[j] = static_cast<std::uint8_t>(in);
        else
          reinterpret_cast<std::uint16_t*>(to)[j] = static_cast<std::uint16_t>(in);
      }
    }
  }

  void look_up(std::size_t number, std::size_t row) {
    const predict::Part& part = model_.parts()[number].sums;
    std::int32_t* const to = sums_.get() + row * part.padded;
    const std::int8_t* from = model_.base().token(block_.tokens[row]);
    if (from == nullptr) {
      std::fill_n(to, part.width, 0);
      return;
    }
    if (number) from += model_.parts()[0].sums.width;
    for (std::size_t j = 0; j < part.width; ++j) to[j] = 256 * from[j];
  }

  const Model& model_;
  const Block& block_;
  std::size_t wanted_;
  const predict::Kernels& predict_;
  Buffer<std::int32_t> sums_;
  Buffer<std::int32_t> angles_;
  Buffer<float> turns_;  // the same in floating point
  predict::InputRows inputs_;
  Buffer<std::uint8_t> tokens_;  // the inputs of layer 0's row of each token
};

}  // namespace kvstore::lossy

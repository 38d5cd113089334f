// The values of a block: predictions, and what the components add to them. Included by lossy/lossy.cc only.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "common/endian.h"
#include "lossy/coded.h"
#include "lossy/dispatch.h"
#include "predictive/dispatch.h"
#include "predictive/inputs.h"
#include "predictive/rows.h"

namespace kvstore::lossy {

using predict::Buffer;
using predict::round_up;

// The values of the first tokens of a block, part after part.
class Values {
 public:
  Values(const Model& model, const Block& block, std::size_t exact, std::size_t wanted, Level level)
      : model_(model),
        block_(block),
        exact_(std::min(exact, wanted)),
        wanted_(wanted),
        run_(kernels(level)),
        predict_(predict::kernels(level)),
        sums_(round_up(wanted, kTile) * model.base().widest()),
        values_(round_up(wanted, kTile) * model.base().widest()),
        x_(kTile * model.base().widest()),
        tile_(kTile * model.base().widest()),
        any_(model.base().widest()),
        which_(model.base().widest()),
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

  // Before a tile's rows.
  void clear(std::size_t width) {
    std::fill_n(tile_.get(), kTile * width, 0.0f);
    std::fill_n(steps_, kTile, 0.0f);
  }

  // A row of the tile: what its symbols stand for. escapes: of this row.
  void put(const Part& part, std::size_t row, const Kind& kind, const std::uint8_t* symbols, float step,
           const Escape* escapes, const Escape* end) {
    float* const to = tile_.get() + row * part.sums.width;
    const float* const values = model_.values();
    const std::uint32_t* const which = kind.which.data();
    const std::uint8_t* const classes = kind.classes.data();
    for (std::size_t i = 0; i < kind.count; ++i) to[which[i]] = values[std::size_t{classes[i]} << 8 | symbols[i]];
    for (; escapes != end; ++escapes) to[which[escapes->place]] = static_cast<float>(escapes->number);
    steps_[row] = step;
  }

  // Makes bf16 of the tile that begins with this row.
  void finish(std::size_t number, std::size_t begin) {
    const Part& part = model_.parts()[number];
    const predict::Part& base = model_.base().parts()[number];
    run_.scale(tile_.get(), part.component.data(), part.sums.width, steps_, any_.get());
    std::size_t used = 0;
    for (std::size_t k = 0; k < part.sums.width; ++k) {
      which_.get()[used] = static_cast<std::uint32_t>(k);
      used += any_.get()[k];
    }
    run_.values(part, {tile_.get(), which_.get(), used}, sums_.get() + begin * part.sums.padded, x_.get());
    const std::size_t half = base.rotated ? model_.base().half() : 0;
    for (std::size_t t = begin; t < std::min(begin + kTile, wanted_); ++t) {
      const float* const cos = turns_.get() + 2 * t * half;
      run_.round(x_.get() + (t - begin) * part.sums.padded, part.sums.width, {cos, cos + half, half},
                 values_.get() + t * part.sums.width);
    }
  }

  // Hands over what was decoded of a part; kept: its exact rows.
  void take(std::size_t number, const std::uint8_t* kept) {
    const Part& part = model_.parts()[number];
    const predict::Part& base = model_.base().parts()[number];
    const std::size_t width = base.width, half = model_.base().half();
    for (std::size_t i = 0; i < exact_ * width; ++i)
      values_.get()[i] = static_cast<std::uint16_t>(load16(kept + 2 * i));
    for (std::size_t t = 0; part.used && t < wanted_; ++t) {
      const std::int32_t* const cos = angles_.get() + 2 * t * half;
      predict_.inputs(base, values_.get() + t * width, {cos, cos + half, half}, inputs_.row(number, t));
    }
    scatter(number);
  }

 private:
  std::size_t token_width() const { return model_.base().parts()[0].width + model_.base().parts()[1].width; }

  void take_angles() {
    const std::size_t half = model_.base().half();
    for (std::size_t t = 0; t < wanted_ && half != 0; ++t) {
      std::int32_t* const cos = angles_.get() + 2 * t * half;
      model_.base().angles(block_.start + static_cast<std::int64_t>(t), cos, cos + half);
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

  void scatter(std::size_t number) const {
    const predict::Part& part = model_.base().parts()[number];
    const Rows& place = block_.rows[number];
    for (std::size_t t = 0; t < wanted_; ++t)
      predict::copy_row<true>(part, place, t, values_.get() + t * part.width);
  }

  const Model& model_;
  const Block& block_;
  std::size_t exact_, wanted_;
  const Kernels& run_;
  const predict::Kernels& predict_;
  Buffer<std::int32_t> sums_;
  Buffer<std::uint16_t> values_;
  Buffer<float> x_, tile_;  // of a tile of rows: values; components
  float steps_[kTile] = {};
  Buffer<std::uint32_t> any_, which_;
  Buffer<std::int32_t> angles_;
  Buffer<float> turns_;  // the same in floating point
  predict::InputRows inputs_;
  Buffer<std::uint8_t> tokens_;  // the inputs of layer 0's row of each token
};

}  // namespace kvstore::lossy

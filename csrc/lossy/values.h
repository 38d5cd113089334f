// The values of a block: predictions, and what the components add to them. Included by lossy/lossy.cc only.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "common/endian.h"
#include "lossy/coded.h"
#include "lossy/dispatch.h"
#include "lossy/predictions.h"

namespace kvstore::lossy {

// The values of the first tokens of a block, part after part.
class Values {
 public:
  Values(const Model& model, const Block& block, std::size_t exact, std::size_t wanted, Level level)
      : model_(model),
        block_(block),
        exact_(std::min(exact, wanted)),
        wanted_(wanted),
        run_(kernels(level)),
        predictions_(model, block, wanted, level),
        values_(round_up(wanted, kTile) * model.base().widest()),
        x_(kTile * model.base().widest()),
        tile_(kTile * model.base().widest()),
        any_(model.base().widest()),
        which_(model.base().widest()) {}

  // Makes the sums of a part's predictions.
  void predict(std::size_t number) { predictions_.predict(number); }

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
    run_.scale(tile_.get(), part.component.data(), part.sums.width, steps_, any_.get());
    std::size_t used = 0;
    for (std::size_t k = 0; k < part.sums.width; ++k) {
      which_.get()[used] = static_cast<std::uint32_t>(k);
      used += any_.get()[k];
    }
    run_.values(part, {tile_.get(), which_.get(), used}, predictions_.sums(part, begin), x_.get());
    for (std::size_t t = begin; t < std::min(begin + kTile, wanted_); ++t)
      run_.round(x_.get() + (t - begin) * part.sums.padded, part.sums.width, predictions_.turn(number, t),
                 values_.get() + t * part.sums.width);
  }

  // Hands over what was decoded of a part; kept: its exact rows.
  void take(std::size_t number, const std::uint8_t* kept) {
    const std::size_t width = model_.parts()[number].sums.width;
    for (std::size_t i = 0; i < exact_ * width; ++i)
      values_.get()[i] = static_cast<std::uint16_t>(load16(kept + 2 * i));
    predictions_.take(number, values_.get());
    scatter(number);
  }

 private:
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
  Predictions predictions_;
  Buffer<std::uint16_t> values_;
  Buffer<float> x_, tile_;  // of a tile of rows: values; components
  float steps_[kTile] = {};
  Buffer<std::uint32_t> any_, which_;
};

}  // namespace kvstore::lossy

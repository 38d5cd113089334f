// How the groups of a block's parts are predicted, one after the other: what both directions do.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "levels/kernels.h"
#include "levels/tiles.h"
#include "predictive/offsets.h"

namespace kvstore::levels {

// Both directions: the groups of a block's parts in order, each predicted from what is known by then.
class Walk {
 public:
  // positions: of `count` rows. tokens: theirs, which must outlive this, or null if none is known.
  Walk(const Model& model, const std::int64_t* positions, const std::int64_t* tokens, std::size_t count,
       const Kernels& run)
      : model_(model),
        tokens_(tokens),
        run_(run),
        rows_{count, (count + kRows - 1) / kRows * kRows},
        turns_(model, positions, rows_),
        offsets_(count),
        sums_(model.most_groups(), rows_),
        residuals_(model.most_groups(), rows_, run.input_bytes),
        p_(1, rows_),
        u_(1, rows_),
        offset_tile_(1, rows_),
        distances_(rows_.padded / 2 * kDistances),
        row_distances_(count) {
    for (std::size_t i = 0; i < std::min<std::size_t>(slots(model), model.parts().size()); ++i)
      inputs_.emplace_back(model.most_groups(), rows_, run.input_bytes);
  }

  RowCount rows() const { return rows_; }

  // Offsets of the next part. shifts: what else each row is scaled by, in octaves; null: nothing.
  void begin(const Part& part, const std::int8_t* shifts = nullptr) {
    offsets_.predict(part.adapt);
    for (std::size_t t = 0; t < rows_.n; ++t) {
      const int more = shifts == nullptr ? 0 : 4 * shifts[t];
      std::fill_n(offset_tile_.get() + t * kColumns, kColumns, static_cast<std::int16_t>(offsets_.get()[t] - more));
    }
    std::fill_n(distances_.get(), rows_.padded / 2 * kDistances, 0);
    if (part.number < 2) look_up(part);
  }

  // What its sums are made of, see `add_up`.
  Summed summed(const Part& part) const {
    Summed found{{}, rows_, sums_.get()};
    for (std::size_t i = 0; i < part.inputs.size(); ++i) found.inputs[i] = tiles(part.inputs[i]).get();
    return found;
  }

  // Predictions of a group.
  void predict(const Part& part, std::size_t number, std::uint16_t* mu) {
    const Group& group = part.groups[number];
    const bool made = part.number < 2 || !part.inputs.empty();
    run_.group(group, part.number < 2 ? nullptr : model_.weight(group), part.number < 2 ? 0 : number,
               made ? sums_.tile(number) : group.bias, made ? kColumns : 0, residuals_.get(), rows_, p_.get());
    Turns room;
    run_.predict(group, p_.get(), turns_.of(part, number, room), rows_, mu);
  }

  // The values of the group that was predicted last are known.
  void take(const Part& part, std::size_t number, const std::uint16_t* values) {
    const Group& group = part.groups[number];
    Turns room;
    run_.fixed(group, values, turns_.of(part, number, room), rows_, u_.get());
    if (part.number >= 2) run_.residuals(group, u_.get(), p_.get(), rows_, residuals_.tile(number));
    if (part.number + 1 < model_.parts().size()) run_.inputs(group, u_.get(), rows_, tiles(part.number).tile(number));
  }

  // After the last group of a part.
  void end(const Part& part) {
    for (std::size_t t = 0; t < rows_.n; ++t) {
      const std::uint64_t* const from = distances_.get() + t / 2 * kDistances + t % 2 * 4;
      row_distances_[t] = static_cast<std::uint32_t>(from[0] + from[1] + from[2] + from[3]);
    }
    offsets_.advance(row_distances_.data(), part.width);
  }

  // By how many quarter octaves a row of this part is scaled.
  int offset(std::size_t row) const { return offset_tile_.get()[row * kColumns]; }

  Coded coded(std::uint8_t* symbols, std::uint8_t* classes) const {
    return {offset_tile_.get(), symbols, classes, distances_.get()};
  }

 private:
  // The parts that one is predicted from, and the one that becomes known.
  static std::size_t slots(const Model& model) { return 2 * static_cast<std::size_t>(model.level()); }

  const Tiles<std::uint8_t>& tiles(std::size_t part) const { return inputs_[part % inputs_.size()]; }

  void look_up(const Part& part) {
    const std::size_t before = part.value ? model_.parts()[0].width : 0;
    for (std::size_t g = 0; g < part.groups.size(); ++g) {
      const Group& group = part.groups[g];
      for (std::size_t t = 0; t < rows_.n; ++t) {
        std::int32_t* const to = sums_.tile(g) + t * kColumns;
        std::copy_n(group.bias, kColumns, to);
        const std::int8_t* const from = tokens_ == nullptr ? nullptr : model_.token(tokens_[t]);
        if (from == nullptr) continue;
        for (std::size_t c = 0; c < group.width; ++c)
          to[c] += part.row[g * kColumns + c] * from[before + part.order[g * kColumns + c]];
      }
    }
  }

  const Model& model_;
  const std::int64_t* tokens_;
  const Kernels& run_;
  RowCount rows_;
  RowTurns turns_;
  predict::Offsets offsets_;
  Tiles<std::int32_t> sums_;
  Tiles<std::uint8_t> residuals_;
  Tiles<std::int16_t> p_, u_, offset_tile_;
  predict::Buffer<std::uint64_t> distances_;
  std::vector<std::uint32_t> row_distances_;
  std::vector<Tiles<std::uint8_t>> inputs_;
};

}  // namespace kvstore::levels

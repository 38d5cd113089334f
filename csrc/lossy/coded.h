// The rows of a block that are coded: their symbols and escapes. Included by lossy/values.h and lossy/lossy.cc only.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "lossy/kinds.h"
#include "lossy/sections.h"
#include "predictive/buffer.h"

namespace kvstore::lossy {

// A number beyond what symbols say: of a row, at a place among its coded components.
struct Escape {
  std::size_t row, place;
  std::int16_t number;
};

// The rows of a block that are coded, through all parts.
class Coded {
 public:
  Coded(const Model& model, std::size_t rows, const std::uint8_t* stream, std::size_t nbytes, Level level)
      : model_(model),
        rows_(rows),
        level_(level),
        decoder_(model.tables(), stream, nbytes),
        kinds_(model, model.base().widest()),
        states_(rows, 0),
        shifts_(rows, kPlain),
        next_(rows),
        kind_(rows),
        begin_(rows + 1),
        escaped_(rows + 1),
        classes_(std::max(rows * model.base().widest(), rows)),
        symbols_(rows * model.base().widest()) {}

  // Takes a part from the stream, and its escapes from `section`.
  const char* part(std::size_t number, int quarters, Section& section) {
    for (std::size_t t = 0; t < rows_; ++t)
      classes_.get()[t] = static_cast<std::uint8_t>(2 * kClasses + shifts_[t]);
    if (decoder_.part(classes_.get(), rows_, next_.data(), rows_, level_) != 0)
      return "the stream of symbols is damaged";
    shifts_.swap(next_);
    kinds_.begin(number, quarters);
    places_.clear();
    std::size_t all = 0;
    for (std::size_t t = 0; t < rows_; ++t) {
      const int row = ((states_[t] + kFine / 2) >> 4) + 4 * (shifts_[t] - kPlain);
      kind_[t] = row;
      const Kind& kind = kinds_.of(row);
      begin_[t] = all;
      if (kind.count != 0) std::memcpy(classes_.get() + all, kind.classes.data(), kind.count);
      all += kind.count;
    }
    begin_[rows_] = all;
    if (decoder_.part(classes_.get(), all, symbols_.get(), all, level_) != 0) return "the stream of symbols is damaged";
    const bool last = number + 1 == model_.parts().size();
    for (std::size_t t = 0; t < rows_; ++t) {
      escaped_[t] = places_.size();
      std::int64_t magnitudes = 0;
      if (!take(t, section, magnitudes)) return "there are too few or too many escapes";
      if (!last) states_[t] = following(model_.parts()[number + 1], states_[t], kind(t), magnitudes);
    }
    escaped_[rows_] = places_.size();
    if (number % 2 && section.escapes != section.escapes_end) return "there are too few or too many escapes";
    return nullptr;
  }

  bool finish() const { return decoder_.finish() == 0; }

  const Kind& kind(std::size_t row) { return kinds_.of(kind_[row]); }
  const std::uint8_t* symbols(std::size_t row) const { return symbols_.get() + begin_[row]; }
  int shift(std::size_t row) const { return shifts_[row]; }
  const Escape* escapes(std::size_t row) const { return places_.data() + escaped_[row]; }

 private:
  // A row's escapes, and the sum of its magnitudes.
  bool take(std::size_t row, Section& section, std::int64_t& magnitudes) {
    const std::uint8_t* const from = symbols(row);
    const std::size_t count = begin_[row + 1] - begin_[row];
    std::uint32_t sum = 0, escapes = 0;
    for (std::size_t i = 0; i < count; ++i) {
      const int number = from[i] - kLargest;
      sum += static_cast<std::uint32_t>(number < 0 ? -number : number);
      escapes += from[i] == kEscape;
    }
    // 128 of each were counted, which is more than any symbol's.
    magnitudes = static_cast<std::int64_t>(sum) - 128 * static_cast<std::int64_t>(escapes);
    for (std::size_t i = 0; escapes != 0; ++i) {
      if (from[i] != kEscape) continue;
      if (section.escapes == section.escapes_end) return false;
      const auto number = static_cast<std::int16_t>(load16(section.escapes));
      section.escapes += 2;
      magnitudes += std::min(std::abs(static_cast<int>(number)), kLargest);
      places_.push_back({row, i, number});
      --escapes;
    }
    return true;
  }

  const Model& model_;
  std::size_t rows_;
  Level level_;
  rans::Decoder decoder_;
  Kinds kinds_;
  std::vector<int> states_;
  std::vector<std::uint8_t> shifts_, next_;
  std::vector<int> kind_;
  std::vector<std::size_t> begin_, escaped_;
  predict::Buffer<std::uint8_t> classes_, symbols_;
  std::vector<Escape> places_;
};

}  // namespace kvstore::lossy

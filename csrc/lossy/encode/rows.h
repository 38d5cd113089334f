// The rows of a block that are encoded, part after part. Included by lossy/encode/encode.cc only.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "common/floats.h"
#include "lossy/encode/choice.h"
#include "lossy/encode/dispatch.h"
#include "lossy/kinds.h"
#include "lossy/predictions.h"

namespace kvstore::lossy {

// What is coded of a part: of each coded row its shift, by the one before; then the symbols of its components.
struct CodedPart {
  std::size_t shifts, symbols, end;      // in QuantisedRows::symbols() and classes()
  std::size_t escapes_begin, escapes_end;  // in QuantisedRows::escapes()
};

class QuantisedRows {
 public:
  QuantisedRows(const Encoder& encoder, const Block& block, std::size_t exact, const Steps& steps, Level level)
      : encoder_(encoder),
        model_(encoder.model()),
        block_(block),
        steps_(steps),
        exact_(exact),
        run_(encoding(level)),
        predictions_(model_, block, block.count, level),
        kinds_(model_, model_.base().widest()),
        states_(block.count, 0),
        shifts_(block.count, kPlain),
        magnitudes_(block.count, 0),
        rows_(block.count, 0),
        decoded_(block.count * model_.base().widest()),
        room_(3 * kTile * predict::round_up(model_.base().widest(), kWide) + model_.base().widest()),
        numbers_(3 * model_.base().widest()),
        which_(model_.base().widest()),
        some_(model_.base().widest()) {
    for (std::size_t which = 0; which < 2; ++which) {
      given_.emplace_back(block.count * model_.base().widest());
      straight_.emplace_back(block.count * model_.base().widest());
    }
    std::size_t most = 0;
    for (const Part& part : model_.parts()) most += (block.count - exact) * (part.sums.width + 1);
    symbols_.resize(most);
    classes_.resize(most);
  }

  // Takes K and V of a layer from the block. False: there is a number that is not finite.
  bool load(std::size_t layer) {
    for (std::size_t which = 0; which < 2; ++which) {
      const std::size_t number = 2 * layer + which;
      const predict::Part& part = model_.base().parts()[number];
      std::uint16_t* const bits = given_[which].get();
      for (std::size_t t = 0; t < block_.count; ++t)
        predict::copy_row<false>(part, block_.rows[number], t, bits + t * part.width);
      unsigned bad = 0;
      for (std::size_t i = 0; i < block_.count * part.width; ++i) bad |= (bits[i] & 0x7f80) == 0x7f80;
      if (bad) return false;
      for (std::size_t t = 0; t < block_.count; ++t)
        run_.straighten(bits + t * part.width, part.width, predictions_.turn(number, t),
                        straight_[which].get() + t * part.width);
    }
    return true;
  }

  // Codes a part of the layer that was loaded last.
  CodedPart part(std::size_t number) {
    CodedPart made{used_, 0, 0, escapes_.size(), 0};
    take_shifts(number);
    made.symbols = used_;
    predictions_.predict(number);
    kinds_.begin(number, steps_.quarters[number % 2]);
    const std::size_t width = model_.parts()[number].sums.width;
    double lost = 0;
    for (std::size_t begin = exact_ / kTile * kTile; begin < block_.count; begin += kTile) lost += tile(number, begin);
    std::copy_n(given_[number % 2].get(), exact_ * width, decoded_.get());
    errors_[number % 2] += lost / static_cast<double>(width);
    predictions_.take(number, decoded_.get());
    if (number + 1 < model_.parts().size())
      for (std::size_t t = exact_; t < block_.count; ++t)
        states_[t] = following(model_.parts()[number + 1], states_[t], kinds_.of(rows_[t]), magnitudes_[t]);
    made.end = used_;
    made.escapes_end = escapes_.size();
    return made;
  }

  const std::uint8_t* symbols() const { return symbols_.data(); }
  const std::uint8_t* classes() const { return classes_.data(); }
  const std::int16_t* escapes() const { return escapes_.data(); }
  const std::uint16_t* given(std::size_t which) const { return given_[which].get(); }
  // Squares of errors of K (0) or V (1) in units of cost, means over parts, components and coded rows.
  float error(std::size_t which) const {
    const double layers = static_cast<double>(model_.parts().size() / 2);
    const double rows = static_cast<double>(std::max<std::size_t>(block_.count - exact_, 1));
    return static_cast<float>(errors_[which] / layers / rows);
  }
  float largest() const { return largest_; }

 private:
  float step(std::size_t number, std::size_t row) const {
    return steps_.sizes[number % 2] * std::ldexp(1.0f, kPlain - shifts_[row]);
  }

  void take_shifts(std::size_t number) {
    const std::vector<Part>& parts = model_.parts();
    const float* const focus = encoder_.part(number).focus.data();
    const std::size_t k = parts[number / 2 * 2].sums.width, v = parts[number / 2 * 2 + 1].sums.width;
    for (std::size_t t = exact_; t < block_.count; ++t) {
      const double found = run_.dot(straight_[0].get() + t * k, focus, k) +
                           run_.dot(straight_[1].get() + t * v, focus + k, v) + static_cast<double>(focus[k + v]);
      classes_[used_] = static_cast<std::uint8_t>(2 * kClasses + shifts_[t]);
      const double most = static_cast<double>(kShifts) - 1;
      const double shift = std::min(std::max(__builtin_rint(found) + kPlain, 0.0), most);
      shifts_[t] = static_cast<std::uint8_t>(shift);
      symbols_[used_++] = shifts_[t];
    }
  }

  // Codes the rows of a tile that are coded; returns what is lost, in squares.
  double tile(std::size_t number, std::size_t begin) {
    const Encoder::Part& own = encoder_.part(number);
    const Part& part = model_.parts()[number];
    const std::size_t width = part.sums.width, first = std::max(begin, exact_);
    const std::size_t end = std::min(begin + kTile, block_.count);
    double* const from = room_.get();
    double* const to = from + kTile * own.stride;
    double* const spare = to + kTile * own.stride;
    std::fill_n(from, kTile * width, 0.0);
    for (std::size_t t = first; t < end; ++t)
      run_.residual(part, straight_[number % 2].get() + t * width, predictions_.sums(part, t),
                    from + (t - begin) * width);
    run_.analyse({own.analysis.data(), own.stride, nullptr, width}, from, width, to);
    std::fill_n(from, kTile * width, 0.0);
    std::fill_n(any_.data(), width, 0u);
    double lost = 0;
    for (std::size_t t = first; t < end; ++t)
      lost += row(number, t, to + (t - begin) * own.stride, from + (t - begin) * width);
    std::size_t used = 0;
    for (std::size_t k = 0; k < width; ++k) {
      which_.get()[used] = static_cast<std::uint32_t>(k);
      used += any_[k];
    }
    run_.rebuild({own.basis.data(), own.stride, which_.get(), used}, from, width, to);
    for (std::size_t t = first; t < end; ++t) {
      std::uint16_t* const bits = decoded_.get() + t * width;
      run_.round(part, predictions_.sums(part, t), to + (t - begin) * own.stride, predictions_.turn(number, t), spare,
                 bits);
      largest_ = run_.largest(bits, given_[number % 2].get() + t * width, width, largest_);
    }
    return lost;
  }

  // Chooses the symbols of a row. a: its components; to: what their symbols stand for, with the components' factors.
  double row(std::size_t number, std::size_t t, const double* a, double* to) {
    const Part& part = model_.parts()[number];
    const std::size_t width = part.sums.width;
    const float by = step(number, t);
    float *const y = numbers_.get(), *const found = y + width;
    run_.in_steps(a, width, by, y);
    std::fill_n(found, width, 0.0f);
    rows_[t] = ((states_[t] + kFine / 2) >> 4) + 4 * (shifts_[t] - kPlain);
    const Kind& kind = kinds_.of(rows_[t]);
    std::uint8_t* const symbols = symbols_.data() + used_;
    std::fill_n(symbols, kind.count, static_cast<std::uint8_t>(kLargest));
    std::uint32_t* const some = some_.get();  // the rest, by far most, is zero in any case
    std::size_t count = 0;
    for (std::size_t i = 0; i < kind.count; ++i) {
      some[count] = static_cast<std::uint32_t>(i);
      count += std::fabs(y[kind.which[i]]) > 0.5f;
    }
    std::int64_t magnitudes = 0;
    for (std::size_t at = 0; at < count; ++at) {
      const std::size_t i = some[at], k = kind.which[i];
      const Choice best = chosen(encoder_, kind.classes[i], std::fabs(y[k]));
      if (best.magnitude == 0) continue;
      const int signed_one = y[k] < 0 ? -best.magnitude : best.magnitude;
      magnitudes += std::min(best.magnitude, kLargest);
      if (best.escaped) {
        escapes_.push_back(static_cast<std::int16_t>(signed_one));
        symbols[i] = static_cast<std::uint8_t>(kEscape);
        found[k] = static_cast<float>(signed_one);
      } else {
        symbols[i] = static_cast<std::uint8_t>(signed_one + kLargest);
        found[k] = model_.values()[kind.classes[i] * rans::Tables::kSymbols + symbols[i]];
      }
      any_[k] = 1;
      to[k] = static_cast<double>(found[k] * by) * static_cast<double>(part.component[k]);
    }
    std::copy_n(kind.classes.data(), kind.count, classes_.data() + used_);
    used_ += kind.count;
    magnitudes_[t] = magnitudes;
    return run_.lost(y, found, width, by);
  }

  const Encoder& encoder_;
  const Model& model_;
  const Block& block_;
  const Steps& steps_;
  std::size_t exact_;
  const Encoding& run_;
  Predictions predictions_;
  Kinds kinds_;
  std::vector<int> states_;
  std::vector<std::uint8_t> shifts_;
  std::vector<std::int64_t> magnitudes_;
  std::vector<int> rows_;
  std::vector<Buffer<std::uint16_t>> given_;  // K and V of the layer, as they are
  std::vector<Buffer<float>> straight_;       // the same before the rotation
  Buffer<std::uint16_t> decoded_;
  Buffer<double> room_;
  Buffer<float> numbers_;
  Buffer<std::uint32_t> which_, some_;
  std::vector<std::uint32_t> any_ = std::vector<std::uint32_t>(model_.base().widest());
  std::vector<std::uint8_t> symbols_, classes_;
  std::vector<std::int16_t> escapes_;
  std::size_t used_ = 0;
  double errors_[2] = {};
  float largest_ = 0;
};

}  // namespace kvstore::lossy

#include "predictive/predictive.h"

#include <algorithm>
#include <cstring>
#include <optional>
#include <vector>

#include "common/plain_floats.h"
#include "predictive/dispatch.h"
#include "predictive/inputs.h"
#include "predictive/offsets.h"
#include "predictive/rows.h"
#include "predictive/sections.h"

namespace kvstore::predict {
namespace {

// Both directions: the parts of a block in order, each predicted from those before.
class Walk {
 public:
  Walk(const Model& model, const Block& block, const Kernels& kernels)
      : model_(model),
        block_(block),
        kernels_(kernels),
        values_(block.count * model.widest()),
        mu_(block.count * model.widest()),
        sums_(block.count * model.widest()),
        angles_(2 * block.count * model.half()),
        offsets_(block.count),
        inputs_(model.parts(), kMostParts, block.count, kernels.input_bytes) {
    for (std::size_t t = 0; t < block.count && model.half() != 0; ++t) {
      std::int32_t* const cos = angles_.get() + 2 * t * model.half();
      model.angles(block.start + static_cast<std::int64_t>(t), cos, cos + model.half());
    }
  }

  std::size_t count() const { return block_.count; }
  std::uint16_t* values() const { return values_.get(); }  // of the part, row after row

  // The predictions of a part.
  Predicted predict(std::size_t number) {
    const Part& part = model_.parts()[number];
    offsets_.predict(part.adapt);
    if (number < 2) {
      for (std::size_t t = 0; t < count(); ++t) look_up(part, t);
    } else {
      kernels_.sums(part, model_.weight(part), inputs_.of(part), count(), sums_.get());
    }
    for (std::size_t t = 0; t < count(); ++t)
      kernels_.predict(part, sums_.get() + t * part.padded, angles(t), mu_.get() + t * part.width);
    return {part, mu_.get(), offsets_.get()};
  }

  // distances: what the residuals of each row add up to. values() are known.
  void advance(std::size_t number, const std::uint32_t* distances) {
    const Part& part = model_.parts()[number];
    offsets_.advance(distances, part.width);
    if (number + 1 == model_.parts().size()) return;
    for (std::size_t t = 0; t < count(); ++t)
      kernels_.inputs(part, values() + t * part.width, angles(t), inputs_.row(number, t));
  }

  // Copies values() from the block's rows.
  void gather(std::size_t number) { copy<false>(number, count()); }
  // And the first `rows` of them back.
  void scatter(std::size_t number, std::size_t rows) { copy<true>(number, rows); }

 private:
  Angles angles(std::size_t row) const {
    const std::int32_t* const cos = angles_.get() + 2 * row * model_.half();
    return {cos, cos + model_.half(), model_.half()};
  }

  void look_up(const Part& part, std::size_t row) {
    std::int32_t* const to = sums_.get() + row * part.padded;
    std::memcpy(to, part.bias.data(), part.width * sizeof *to);
    const std::int8_t* from = model_.token(block_.tokens[row]);
    if (from == nullptr) return;
    if (part.value) from += model_.parts()[0].width;
    for (std::size_t j = 0; j < part.width; ++j) to[j] += 256 * from[j];
  }

  template <bool OUT>
  void copy(std::size_t number, std::size_t rows) {
    const Part& part = model_.parts()[number];
    for (std::size_t t = 0; t < rows; ++t) copy_row<OUT>(part, block_.rows[number], t, values() + t * part.width);
  }

  const Model& model_;
  const Block& block_;
  const Kernels& kernels_;
  Buffer<std::uint16_t> values_, mu_;
  Buffer<std::int32_t> sums_, angles_;
  Offsets offsets_;
  InputRows inputs_;
};

Kernels kernels_of(const Axis& axis, Level level) {
  Kernels run = kernels(level);
  if (axis.classes == nullptr) return run;
  run.classes = axis.classes;
  run.split = axis.split;
  run.join = axis.join;
  run.decode = nullptr;
  return run;
}

class Reading final : public AloneInOrder {
 public:
  Reading(const Model& model, const Block& block, const std::uint8_t* payload, std::size_t nbytes,
          const std::uint64_t* sizes, std::size_t wanted, Level level, const Axis& axis)
      : parts_(model.parts().size()),
        block_(block),
        wanted_(wanted),
        level_(level),
        run_(kernels_of(axis, level)),
        sections_(model, block.count, axis.mode) {
    wrong_ = predictable(model, block) ? sections_.cut(payload, nbytes, sizes)
                                       : "the profile does not know these positions";
    if (wrong_) return;
    const PlainFloats floats;
    walk_.emplace(model, block_, run_);
    sections_.begin();
  }

 private:
  const char* part(std::size_t number) override {
    const Predicted predicted = walk_->predict(number);
    if (const char* const wrong = sections_.part(run_, number, predicted, walk_->values(), level_)) return wrong;
    walk_->scatter(number, wanted_);
    walk_->advance(number, sections_.distances());
    if (number % 2 && !sections_.matches(number / 2)) return "the decoded values are not those that were encoded";
    return number + 1 == parts_ ? sections_.finish() : nullptr;
  }

  std::size_t parts_;
  const Block block_;
  std::size_t wanted_;
  Level level_;
  const Kernels run_;
  SectionsIn sections_;
  std::optional<Walk> walk_;
};

}  // namespace

bool predictable(const Model& model, const Block& block) {
  const auto count = static_cast<std::int64_t>(block.count);
  return count > 0 && block.start >= 0 && count <= model.positions() && block.start <= model.positions() - count;
}

int encode(const Model& model, const Block& block, std::uint8_t* out, std::size_t capacity, std::size_t limit,
           std::uint64_t* sizes, Level level, const Axis& axis) {
  if (!predictable(model, block)) return kFallBack;
  const PlainFloats floats;
  const Kernels run = kernels_of(axis, level);
  Walk walk(model, block, run);
  SectionsOut sections(model, block.count, axis.mode);
  for (std::size_t number = 0; number < model.parts().size(); ++number) {
    const Predicted predicted = walk.predict(number);
    walk.gather(number);
    sections.part(run, predicted, walk.values());
    walk.advance(number, sections.distances());
  }
  if (sections.side_bytes() >= limit) return kFallBack;
  const std::int64_t length = sections.code(model.tables(), out, capacity, level);
  if (length < 0) return capacity >= limit ? kFallBack : kNoRoom;
  if (static_cast<std::size_t>(length) >= limit) return kFallBack;
  sections.place(out, sizes);
  return 0;
}

std::unique_ptr<InOrder> in_order(const Model& model, const Block& block, const std::uint8_t* payload,
                                  std::size_t nbytes, const std::uint64_t* sizes, std::size_t wanted, Level level,
                                  const Axis& axis) {
  return std::make_unique<Reading>(model, block, payload, nbytes, sizes, wanted, level, axis);
}

const char* decode(const Model& model, const Block& block, const std::uint8_t* payload, std::size_t nbytes,
                   const std::uint64_t* sizes, std::size_t wanted, Level level, const Axis& axis) {
  return Reading(model, block, payload, nbytes, sizes, wanted, level, axis).until(model.parts().size() / 2);
}

bool residuals(const Model& model, const Block& block, std::uint8_t* const* symbols, std::uint8_t* const* classes,
               std::int32_t* const* offsets, Level level) {
  if (!predictable(model, block)) return false;
  const PlainFloats floats;
  const Kernels& run = kernels(level);
  Walk walk(model, block, run);
  const Leftovers left(model.widest() * block.count);
  std::vector<std::uint32_t> distances(block.count);
  for (std::size_t number = 0; number < model.parts().size(); ++number) {
    const Predicted predicted = walk.predict(number);
    walk.gather(number);
    BitsOut bits{left.raw.get()};
    std::uint16_t* whole = left.escapes.get();
    for (std::size_t t = 0; t < block.count; ++t) {
      const std::size_t at = t * predicted.part.width;
      distances[t] = run.split(predicted.part, walk.values() + at, predicted.mu + at, predicted.offsets[t],
                               symbols[number] + at, classes[number] + at, bits, whole);
      offsets[number][t] = predicted.offsets[t];
    }
    walk.advance(number, distances.data());
  }
  return true;
}

}  // namespace kvstore::predict

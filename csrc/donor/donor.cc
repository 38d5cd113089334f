#include "donor/donor.h"

#include <algorithm>
#include <optional>
#include <vector>

#include "common/endian.h"
#include "common/plain_floats.h"
#include "donor/rows.h"
#include "predictive/dispatch.h"
#include "predictive/inputs.h"
#include "predictive/offsets.h"
#include "predictive/rows.h"
#include "predictive/sections.h"

namespace kvstore::donor {
namespace {

using predict::Buffer;
using predict::Model;
using predict::Part;

constexpr int kMostScale = predict::kMostScale;
constexpr int kLift = -1;  // quarter octaves from the mean of absolute values to the scale
constexpr std::int32_t kAdapt[3] = {110, 90, 0};  // of offsets, in 1/256
constexpr std::size_t kKept = 4;  // parts whose inputs are kept

std::size_t groups_of(const Part& part) { return part.heads * ((part.dim + kChannels - 1) / kChannels); }

// Both directions: the parts of a block in order, each predicted from its donor and the parts before.
class Walk {
 public:
  Walk(const Model& model, const Block& block, Level level)
      : run(predict::kernels(level)),
        model_(model),
        block_(block),
        more_(kernels(level)),
        count_(covered(block)),
        values_(count_ * model.widest()),
        from_(count_ * model.widest()),
        mu_(block.propagated ? count_ * model.widest() : 0),
        row_(model.widest()),
        sums_(block.propagated ? count_ * model.widest() : 0),
        angles_(block.propagated ? 2 * count_ * model.half() : 0),
        offsets_(count_),
        inputs_(model.parts(), kKept, block.propagated ? count_ : 0, run.input_bytes) {
    coded_.scale.resize(predict::round_up(model.widest(), predict::kColumnsBytes));
    if (!block.propagated) return;
    std::size_t t = 0;
    for (std::size_t s = 0; s < block.number && model.half() != 0; ++s) {
      const std::int64_t first = block.start + static_cast<std::int64_t>(block.spans[s].start);
      for (std::size_t i = 0; i < block.spans[s].count; ++i, ++t) {
        std::int32_t* const cos = angles_.get() + 2 * t * model.half();
        model.angles(first + static_cast<std::int64_t>(i), cos, cos + model.half());
      }
    }
  }

  std::size_t count() const { return count_; }
  std::uint16_t* values() const { return values_.get(); }  // of the part, row after row

  // The predictions of a part; its scales are still to come.
  predict::Predicted predict(std::size_t number) {
    const Part& part = model_.parts()[number];
    coded_.width = part.width;
    coded_.value = part.value;
    propagates_ = block_.propagated && number >= 2;
    offsets_.predict(kAdapt);
    load(more_, block_, part.heads, part.dim, number, row_.get(), from_.get());
    if (propagates_) propagate(part);
    return {coded_, mu(), offsets_.get()};
  }

  // Takes the scales of a part from its bytes: the least, 2 bytes, then what each group's is above.
  bool take_scales(std::size_t number, const std::uint8_t* bytes) {
    const auto least = static_cast<std::int16_t>(load16(bytes));
    if (least < -kMostScale || least > kMostScale) return false;
    const Part& part = model_.parts()[number];
    const std::uint8_t* above = bytes + 2;
    std::int16_t* to = coded_.scale.data();
    for (std::size_t head = 0; head < part.heads; ++head)
      for (std::size_t j = 0; j < part.dim; j += kChannels, ++above)
        for (std::size_t i = j; i < std::min(part.dim, j + kChannels); ++i)
          *to++ = static_cast<std::int16_t>(least + *above);
    return true;
  }

  // Measures the scales of a part whose values() are known, and writes their bytes, 2 + groups.
  void measure_scales(std::size_t number, std::uint8_t* bytes) {
    const Part& part = model_.parts()[number];
    totals_.assign(part.width + predict::kSlack, 0.0f);
    for (std::size_t t = 0; t < count_; ++t)
      more_.measure(values() + t * part.width, mu() + t * part.width, weight_of(offsets_.get()[t]), part.width,
                    totals_.data());
    scales_.clear();
    const float* total = totals_.data();
    for (std::size_t head = 0; head < part.heads; ++head) {
      for (std::size_t j = 0; j < part.dim; j += kChannels) {
        const std::size_t width = std::min(kChannels, part.dim - j);
        float sum = 0.0f;
        for (std::size_t i = 0; i < width; ++i) sum += *total++;
        const float mean = sum / static_cast<float>(count_ * width);
        scales_.push_back(predict::clamped(predict::log2_quarters(mean) + kLift, -kMostScale, kMostScale));
      }
    }
    const int most = *std::max_element(scales_.begin(), scales_.end());
    const int least = std::max(*std::min_element(scales_.begin(), scales_.end()), most - 255);
    store16(bytes, static_cast<std::uint16_t>(least));
    for (std::size_t i = 0; i < scales_.size(); ++i)
      bytes[2 + i] = static_cast<std::uint8_t>(std::max(scales_[i] - least, 0));
    take_scales(number, bytes);
  }

  // distances: what the residuals of each row add up to. values() are known.
  void advance(std::size_t number, const std::uint32_t* distances) {
    const Part& part = model_.parts()[number];
    offsets_.advance(distances, part.width);
    if (!block_.propagated || number + 1 == model_.parts().size()) return;
    for (std::size_t t = 0; t < count_; ++t) {
      more_.subtract(values() + t * part.width, from_.get() + t * part.width, 1.0f, part.width, row_.get());
      run.inputs(part, row_.get(), angles(t), inputs_.row(number, t));
    }
  }

  // Copies values() from the block's rows.
  void gather(std::size_t number) { copy<false>(number, SIZE_MAX); }
  // And those of rows below `wanted` back.
  void scatter(std::size_t number, std::size_t wanted) { copy<true>(number, wanted); }

  const predict::Kernels& run;

 private:
  const std::uint16_t* mu() const { return (propagates_ ? mu_ : from_).get(); }

  predict::Angles angles(std::size_t row) const {
    const std::int32_t* const cos = angles_.get() + 2 * row * model_.half();
    return {cos, cos + model_.half(), model_.half()};
  }

  // mu() of a part: its donor, and what the parts before say that it differs by.
  void propagate(const Part& part) {
    run.sums(part, model_.weight(part), inputs_.of(part), count_, sums_.get());
    for (std::size_t t = 0; t < count_; ++t) {
      std::uint16_t* const to = mu_.get() + t * part.width;
      run.predict(part, sums_.get() + t * part.padded, angles(t), row_.get());
      more_.add(row_.get(), from_.get() + t * part.width, 1.0f, part.width, to);
    }
  }

  template <bool OUT>
  void copy(std::size_t number, std::size_t wanted) {
    const Part& part = model_.parts()[number];
    std::size_t t = 0;
    for (std::size_t s = 0; s < block_.number; ++s) {
      const Span& span = block_.spans[s];
      for (std::size_t i = 0; i < span.count; ++i, ++t)
        if (span.start + i < wanted)
          predict::copy_row<OUT>(part, block_.rows[number], span.start + i, values_.get() + t * part.width);
    }
  }

  const Model& model_;
  const Block& block_;
  const Kernels& more_;
  std::size_t count_;
  Buffer<std::uint16_t> values_, from_, mu_, row_;  // from_: what the donor alone predicts
  Buffer<std::int32_t> sums_, angles_;
  predict::Offsets offsets_;
  predict::InputRows inputs_;
  std::vector<float> totals_;
  std::vector<int> scales_;
  Part coded_;  // the part as the kernels of bins take it
  bool propagates_ = false;
};

// Of all parts.
std::size_t scale_bytes(const Model& model) {
  std::size_t sum = 0;
  for (const Part& part : model.parts()) sum += 2 + groups_of(part);
  return sum;
}

class Reading final : public AloneInOrder {
 public:
  Reading(const Model& model, const Block& block, const std::uint8_t* payload, std::size_t nbytes,
          const std::uint64_t* sizes, std::size_t wanted, Level level)
      : model_(model),
        block_(block),
        scales_(payload),
        wanted_(wanted),
        level_(level),
        sections_(model, covered(block), 0) {
    const std::size_t before = scale_bytes(model);
    wrong_ = sizes[0] < before && sizes[0] <= nbytes ? "the payload ends in its scales"
                                                      : sections_.cut(payload, nbytes, sizes, before);
    if (wrong_) return;
    const PlainFloats floats;
    walk_.emplace(model, block_, level);
    sections_.begin();
  }

 private:
  const char* part(std::size_t number) override {
    const predict::Predicted predicted = walk_->predict(number);
    if (!walk_->take_scales(number, scales_)) return "scales out of bounds";
    scales_ += 2 + groups_of(model_.parts()[number]);
    if (const char* const wrong = sections_.part(walk_->run, number, predicted, walk_->values(), level_)) return wrong;
    walk_->scatter(number, wanted_);
    walk_->advance(number, sections_.distances());
    if (number % 2 && !sections_.matches(number / 2))
      return "the decoded values are not those that were encoded, or the donor is another";
    return number + 1 == model_.parts().size() ? sections_.finish() : nullptr;
  }

  const Model& model_;
  const Block block_;
  const std::uint8_t* scales_;  // of the next part
  std::size_t wanted_;
  Level level_;
  predict::SectionsIn sections_;
  std::optional<Walk> walk_;
};

}  // namespace

bool encode(const Model& model, const Block& block, std::uint8_t* out, std::size_t capacity, std::uint64_t* sizes,
            Level level) {
  const PlainFloats floats;
  Walk walk(model, block, level);
  predict::SectionsOut sections(model, walk.count(), 0, scale_bytes(model));
  std::size_t scales = 0;
  for (std::size_t number = 0; number < model.parts().size(); ++number) {
    const predict::Predicted predicted = walk.predict(number);
    walk.gather(number);
    walk.measure_scales(number, sections.before() + scales);
    scales += 2 + groups_of(model.parts()[number]);
    sections.part(walk.run, predicted, walk.values());
    walk.advance(number, sections.distances());
  }
  if (sections.code(model.tables(), out, capacity, level) < 0) return false;
  sections.place(out, sizes);
  return true;
}

std::unique_ptr<InOrder> in_order(const Model& model, const Block& block, const std::uint8_t* payload,
                                  std::size_t nbytes, const std::uint64_t* sizes, std::size_t wanted, Level level) {
  return std::make_unique<Reading>(model, block, payload, nbytes, sizes, wanted, level);
}

const char* decode(const Model& model, const Block& block, const std::uint8_t* payload, std::size_t nbytes,
                   const std::uint64_t* sizes, std::size_t wanted, Level level) {
  return Reading(model, block, payload, nbytes, sizes, wanted, level).until(model.parts().size() / 2);
}

}  // namespace kvstore::donor

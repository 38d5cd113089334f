#include "donor/groups.h"

#include <algorithm>
#include <cstring>
#include <optional>
#include <utility>
#include <vector>

#include "common/plain_floats.h"
#include "donor/rows.h"
#include "levels/coder.h"
#include "levels/walk.h"
#include "predictive/rows.h"

namespace kvstore::donor::groups {
namespace {

using levels::Group;
using levels::kColumns;
using levels::Part;
using levels::RowCount;
using levels::Tiles;
using predict::Buffer;

constexpr int kLift = -1;       // quarter octaves from the mean of absolute values to the scale
constexpr int kSize = 18;       // quarter octaves of what a row's inputs come to at most, in the mean
constexpr int kLeastShift = -32, kMostShift = 31;

std::vector<std::int64_t> positions_of(const Block& block) {
  std::vector<std::int64_t> found;
  for (std::size_t s = 0; s < block.number; ++s)
    for (std::size_t i = 0; i < block.spans[s].count; ++i)
      found.push_back(block.start + static_cast<std::int64_t>(block.spans[s].start + i));
  return found;
}

// The bytes before the first layer: a shift of each row, and how far the scales of each group are from the model's.
std::size_t bytes_before(const levels::Model& model, std::size_t count) {
  std::size_t sum = count;
  for (const Part& part : model.parts()) sum += part.groups.size();
  return sum;
}

// Quarter octaves of the steps of a part's inputs, in one unit of its values: the mean over its columns.
int unit_of(const Part& part) {
  int sum = 0;
  for (std::size_t j = 0; j < part.width; ++j) {
    const Group& group = part.groups[j / kColumns];
    const std::size_t c = j % kColumns;
    const float to_fixed = group.to_fixed[part.rotated ? c / 2 : c];
    sum += predict::log2_quarters(to_fixed) +
           predict::log2_quarters(static_cast<std::uint32_t>(std::max<int>(group.gain[c], 1))) - 60;
  }
  const int width = static_cast<int>(part.width);
  return (sum >= 0 ? sum : sum - width + 1) / width;
}

// What stands at some of a block's rows and at their donors', part after part.
class Step : public levels::Walk {
 public:
  // before: what stands before the first layer. wanted: rows that are to be written, or SIZE_MAX to encode.
  Step(const levels::Model& model, const Block& block, std::size_t wanted, std::uint8_t* before, Level level)
      : Walk(model, positions_of(block).data(), nullptr, covered(block), levels::kernels(level)),
        model_(model),
        block_(block),
        run_(kernels(level)),
        wanted_(wanted),
        encodes_(wanted == SIZE_MAX),
        from_rows_(rows().n * most_columns()),
        value_rows_(rows().n * most_columns()),
        scratch_(most_columns()),
        from_(1, rows()),
        delta_(1, rows()),
        to_(rows().n),
        back_(rows().n),
        shifts_(rows().n),
        scales_(before + rows().n) {}

  // Finds by how much rows are scaled, and writes it.
  void measure_shifts(std::uint8_t* before) {
    const std::size_t n = rows().n;
    Buffer<float> sums(n * kColumns);
    std::fill_n(sums.get(), n * kColumns, 0.0f);
    std::size_t values = 0;
    for (const Part& part : model_.parts()) {
      if (!part.value || part.number < 2) continue;
      load_rows(part);
      const float weight = weight_of(-unit_of(part));
      for (std::size_t t = 0; t < n; ++t)
        for (std::size_t j = 0; j < part.width; j += kColumns)
          run_.measure(value_rows_.get() + t * part.width + j, from_rows_.get() + t * part.width + j, weight,
                       std::min(kColumns, part.width - j), sums.get() + t * kColumns);
      values += part.width;
    }
    for (std::size_t t = 0; t < n; ++t) {
      float sum = 0.0f;
      for (std::size_t c = 0; c < kColumns; ++c) sum += sums.get()[t * kColumns + c];
      const int size = values == 0 ? kSize : predict::log2_quarters(sum / static_cast<float>(values));
      before[t] = static_cast<std::uint8_t>(predict::clamped((kSize - size) >> 2, kLeastShift, kMostShift));
    }
  }

  // Takes the shifts from their bytes; false if one is out of bounds.
  bool take_shifts(const std::uint8_t* before) {
    for (std::size_t t = 0; t < rows().n; ++t) {
      shifts_[t] = static_cast<std::int8_t>(before[t]);
      if (shifts_[t] < kLeastShift || shifts_[t] > kMostShift) return false;
      to_[t] = weight_of(-4 * shifts_[t]);
      back_[t] = weight_of(4 * shifts_[t]);
    }
    return true;
  }

  void begin(const Part& part) {
    Walk::begin(part, shifts_.data());
    load_rows(part);
  }

  void predict(const Part& part, std::size_t g, std::uint16_t* mu) {
    Walk::predict(part, g, delta_.get());
    levels::copy_tile<false>(part, place(part, from_rows_), g, rows().n, from_.get());
    for (std::size_t t = 0; t < rows().n; ++t)
      run_.add(delta_.get() + t * kColumns, from_.get() + t * kColumns, back_[t], kColumns, mu + t * kColumns);
  }

  void read(const Part& part, std::size_t g, std::uint16_t* values) const {
    levels::copy_tile<false>(part, place(part, value_rows_), g, rows().n, values);
  }
  void write(const Part& part, std::size_t g, std::uint16_t* values) const {
    levels::copy_tile<true>(part, place(part, value_rows_), g, rows().n, values);
  }

  const Group& measured(const Part& part, std::size_t g, const std::uint16_t* values, const std::uint16_t* mu) {
    const Group& group = part.groups[g];
    float totals[kColumns] = {};
    for (std::size_t t = 0; t < rows().n; ++t)
      run_.measure(values + t * kColumns, mu + t * kColumns, weight_of(offset(t)), kColumns, totals);
    float sum = 0.0f;
    for (std::size_t c = 0; c < group.width; ++c) sum += totals[c] * weight_of(group.scale[c]);
    const int size = predict::log2_quarters(sum / static_cast<float>(rows().n * group.width));
    *scales_ = static_cast<std::uint8_t>(predict::clamped(size + kLift, -128, 127));
    return given(part, g);
  }
  const Group& given(const Part& part, std::size_t g) {
    const int more = static_cast<std::int8_t>(*scales_++);
    scaled_ = part.groups[g];
    for (std::int16_t& scale : scaled_.scale) scale = static_cast<std::int16_t>(scale + more);
    return scaled_;
  }

  void take(const Part& part, std::size_t g, const std::uint16_t* values) {
    for (std::size_t t = 0; t < rows().n; ++t)
      run_.subtract(values + t * kColumns, from_.get() + t * kColumns, to_[t], kColumns, delta_.get() + t * kColumns);
    Walk::take(part, g, delta_.get());
  }

  // Copies decoded rows to the block.
  void scatter(const Part& part) { copy_rows<true>(part); }

 private:
  std::size_t most_columns() const { return model_.most_groups() * kColumns; }

  // Row after row, heads of a row after each other.
  static Rows place(const Part& part, const Buffer<std::uint16_t>& rows) {
    const auto dim = static_cast<std::int64_t>(2 * part.dim);
    return {reinterpret_cast<std::uint64_t>(rows.get()), dim, static_cast<std::int64_t>(2 * part.width)};
  }

  void load_rows(const Part& part) {
    load(run_, block_, part.heads, part.dim, part.number, scratch_.get(), from_rows_.get());
    if (encodes_) copy_rows<false>(part);
  }

  template <bool OUT>
  void copy_rows(const Part& part) {
    std::size_t t = 0;
    for (std::size_t s = 0; s < block_.number; ++s) {
      const Span& span = block_.spans[s];
      for (std::size_t i = 0; i < span.count; ++i, ++t)
        if (span.start + i < wanted_)
          predict::copy_row<OUT>(part, block_.rows[part.number], span.start + i, value_rows_.get() + t * part.width);
    }
  }

  const levels::Model& model_;
  const Block& block_;
  const Kernels& run_;
  std::size_t wanted_;
  bool encodes_;
  Buffer<std::uint16_t> from_rows_, value_rows_, scratch_;  // of a part, row after row
  Tiles<std::uint16_t> from_, delta_;
  std::vector<float> to_, back_;
  std::vector<std::int8_t> shifts_;
  std::uint8_t* scales_;  // of the next group
  Group scaled_{};
};

class Reading final : public InOrder {
 public:
  Reading(const levels::Model& model, const Block& block, const std::uint8_t* payload, std::size_t nbytes,
          const std::uint64_t* sizes, std::size_t wanted, Level level)
      : model_(model), level_(level), block_(block) {
    const std::size_t before = bytes_before(model, covered(block));
    std::vector<levels::Section> layers;
    wrong_ = levels::cut(model, covered(block), 0, before, payload, nbytes, sizes, layers);
    if (wrong_) return;
    const PlainFloats floats;
    given_.assign(payload, payload + before);
    step_.emplace(model, block_, wanted, given_.data(), level);
    if (!step_->take_shifts(given_.data())) {
      wrong_ = "a row's shift is out of bounds";
      return;
    }
    decoder_.emplace(model, *step_, std::move(layers), level);
  }

 private:
  const void* model() const override { return &model_; }
  void part(std::size_t number, InOrder* const* blocks, std::size_t count) override {
    const Part& part = model_.parts()[number];
    levels::Decoder<Step>* decoders[kTogether] = {};
    for (std::size_t i = 0; i < count; ++i) decoders[i] = &*static_cast<Reading*>(blocks[i])->decoder_;
    levels::code(model_, part, levels::kernels(level_), decoders, count);
    for (std::size_t i = 0; i < count; ++i) static_cast<Reading*>(blocks[i])->end(part);
  }
  void end(const Part& part) {
    wrong_ = decoder_->end(part);
    if (wrong_ != nullptr) return;
    step_->scatter(part);
    if (part.number + 1 == model_.parts().size()) wrong_ = decoder_->finish();
  }

  const levels::Model& model_;
  const Level level_;
  const Block block_;
  std::vector<std::uint8_t> given_;  // what stands before the first layer
  std::optional<Step> step_;
  std::optional<levels::Decoder<Step>> decoder_;
};

}  // namespace

bool encode(const levels::Model& model, const Block& block, std::uint8_t* out, std::size_t capacity,
            std::uint64_t* sizes, Level level) {
  const PlainFloats floats;
  std::vector<std::uint8_t> before(bytes_before(model, covered(block)));
  Step step(model, block, SIZE_MAX, before.data(), level);
  step.measure_shifts(before.data());
  step.take_shifts(before.data());
  levels::Encoder<Step> encoder(model, step, 0, before.size(), level);
  levels::Encoder<Step>* const encoders[] = {&encoder};
  for (const Part& part : model.parts()) {
    levels::code(model, part, levels::kernels(level), encoders, 1);
    encoder.end(part);
  }
  std::copy(before.begin(), before.end(), encoder.before());
  return encoder.finish(out, capacity, SIZE_MAX, sizes) == 0;
}

std::unique_ptr<InOrder> in_order(const levels::Model& model, const Block& block, const std::uint8_t* payload,
                                  std::size_t nbytes, const std::uint64_t* sizes, std::size_t wanted, Level level) {
  return std::make_unique<Reading>(model, block, payload, nbytes, sizes, wanted, level);
}

const char* decode(const levels::Model& model, const Block& block, const std::uint8_t* payload, std::size_t nbytes,
                   const std::uint64_t* sizes, std::size_t wanted, Level level) {
  return Reading(model, block, payload, nbytes, sizes, wanted, level).until(model.parts().size() / 2);
}

}  // namespace kvstore::donor::groups

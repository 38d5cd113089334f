// Both directions of coding in groups. A step says what is predicted of each group, and takes what it was found to be:
//
//   RowCount rows();                                  void begin(part), predict(part, group, mu), end(part);
//   void read(part, group, values)                    what is to be coded; `write` takes what was decoded
//   const Group& measured(part, group, values, mu)    the scales to code with; `given` those to decode with
//   void take(part, group, values);                   Coded coded(symbols, classes);
//
// as `Walk` has them. Included by the .cc files that have a step.
#pragma once

#include <algorithm>
#include <cstring>
#include <optional>
#include <utility>
#include <vector>

#include "common/in_order.h"
#include "levels/dispatch.h"
#include "levels/tiles.h"
#include "predictive/dispatch.h"
#include "predictive/predictive.h"
#include "predictive/sections.h"

namespace kvstore::levels {

using predict::BitsIn;
using predict::BitsOut;
using predict::EscapesIn;
using predict::kMostRaw;
using predict::kSlack;
using predict::Leftovers;
using predict::Section;

constexpr const char* kDamagedStream = "the stream of symbols is damaged";
constexpr const char* kLeftOver = "raw bits or escapes are left over";

// Takes the columns that a narrow group lacks out of a tile, or the other way round.
inline void squeeze(const Group& group, std::size_t rows, std::uint8_t* tile) {
  for (std::size_t t = 1; group.width != kColumns && t < rows; ++t)
    std::memmove(tile + t * group.width, tile + t * kColumns, group.width);
}
inline void spread(const Group& group, std::size_t rows, std::uint8_t* tile) {
  for (std::size_t t = rows; group.width != kColumns && t-- > 1;)
    std::memmove(tile + t * kColumns, tile + t * group.width, group.width);
}

// The sums over a layer's values, in the order in which they are coded.
inline void add_sums(predict::Sums& sums, const predict::Kernels& run, const Group& group, std::size_t rows,
                     const std::uint16_t* values) {
  if (group.width == kColumns) return sums.add(run, values, rows * kColumns);
  for (std::size_t t = 0; t < rows; ++t) sums.add(run, values + t * kColumns, group.width);
}

inline std::size_t most_values(const Model& model, std::size_t rows) { return model.most_groups() * kColumns * rows; }

template <class Step>
class Encoder {
 public:
  // mode: what layers begin with; 0: nothing. before: bytes that the first layer begins with, see before().
  Encoder(const Model& model, Step& step, std::uint32_t mode, std::size_t before, Level level)
      : model_(model),
        step_(step),
        mode_(mode),
        level_(level),
        run_(kernels(level)),
        check_(predict::kernels(level)),
        count_(step.rows().n),
        values_(1, step.rows()),
        mu_(1, step.rows()),
        symbols_(model.width() * count_ + kColumns * step.rows().padded),
        classes_(model.width() * count_ + kColumns * step.rows().padded),
        left_{Leftovers(most_values(model, count_)), Leftovers(most_values(model, count_))},
        side_(before) {}

  // To be filled in with what the first layer begins with.
  std::uint8_t* before() { return side_.data(); }

  // A part comes in these steps; see `code`.
  void begin(const Part& part) {
    const Leftovers& left = left_[part.number % 2];
    bits_ = BitsOut{left.raw.get()};
    whole_ = left.escapes.get();
    step_.begin(part);
  }
  Summed summed(const Part& part) const { return step_.summed(part); }
  void group(const Part& part, std::size_t g) {
    const Group& group = part.groups[g];
    std::uint8_t *const symbols = symbols_.get() + done_, *const classes = classes_.get() + done_;
    step_.predict(part, g, mu_.get());
    step_.read(part, g, values_.get());
    const Group& scaled = step_.measured(part, g, values_.get(), mu_.get());
    const Coded coded = step_.coded(symbols, classes);
    run_.split(scaled, part.value, values_.get(), mu_.get(), step_.rows(), coded, bits_, whole_);
    squeeze(group, count_, symbols);
    squeeze(group, count_, classes);
    add_sums(out_.sums, check_, group, count_, values_.get());
    step_.take(part, g, values_.get());
    parts_.push_back({symbols, count_ * group.width, classes, count_ * group.width});
    done_ += count_ * group.width;
  }
  void end(const Part& part) {
    const std::size_t which = part.number % 2;
    step_.end(part);
    out_.raw_bytes[which] = static_cast<std::size_t>(bits_.at - left_[which].raw.get()) + (bits_.fill != 0);
    out_.escaped[which] = static_cast<std::size_t>(whole_ - left_[which].escapes.get());
    if (bits_.fill != 0) *bits_.at = static_cast<std::uint8_t>(bits_.left);
    if (which == 0) return;
    out_.append(side_, mode_, left_);
    ends_of_side_.push_back(side_.size());
    last_.push_back(parts_.size() - 1);
    out_ = {};
  }

  int finish(std::uint8_t* out, std::size_t capacity, std::size_t limit, std::uint64_t* sizes) const {
    const std::size_t side = side_.size();
    if (side >= limit) return predict::kFallBack;
    if (side >= capacity) return predict::kNoRoom;
    std::vector<std::size_t> ends(parts_.size());
    const std::int64_t length =
        rans::encode(model_.tables(), parts_.data(), parts_.size(), out + side, capacity - side, ends.data(), level_);
    if (length < 0) return capacity >= limit ? predict::kFallBack : predict::kNoRoom;
    if (side + static_cast<std::size_t>(length) >= limit) return predict::kFallBack;
    std::vector<std::size_t> ends_of_words;
    for (const std::size_t last : last_) ends_of_words.push_back(ends[last]);
    predict::place_layers(side_, ends_of_side_, ends_of_words, out, sizes);
    return 0;
  }

 private:
  const Model& model_;
  Step& step_;
  std::uint32_t mode_;
  Level level_;
  const Kernels& run_;
  const predict::Kernels& check_;
  std::size_t count_;
  Tiles<std::uint16_t> values_, mu_;
  predict::Buffer<std::uint8_t> symbols_, classes_;
  Leftovers left_[2];
  BitsOut bits_{nullptr};           // of the part that was begun
  std::uint16_t* whole_ = nullptr;  // its escapes
  std::size_t done_ = 0;            // symbols
  predict::SideOut out_{};
  std::vector<std::uint8_t> side_;
  std::vector<std::size_t> ends_of_side_, last_;  // of each layer: its last group
  std::vector<rans::Part> parts_;
};

template <class Step>
class Decoder {
 public:
  Decoder(const Model& model, Step& step, std::vector<Section> layers, Level level)
      : step_(step),
        level_(level),
        run_(kernels(level)),
        check_(predict::kernels(level)),
        count_(step.rows().n),
        layers_(std::move(layers)),
        values_(1, step.rows()),
        mu_(1, step.rows()),
        symbols_(1, step.rows()),
        classes_(1, step.rows()),
        most_raw_((most_values(model, count_) * kMostRaw + 7) / 8),
        raw_(most_raw_ + (kColumns * count_ * kMostRaw + 7) / 8),
        stream_(stream_bytes()) {
    std::size_t end = 0;
    for (const Section& section : layers_) {
      if (section.words_bytes != 0) std::memcpy(stream_.get() + end, section.words, section.words_bytes);
      end += section.words_bytes;
    }
    decoder_.emplace(model.tables(), stream_.get(), end);
  }

  // A part comes in these steps; see `code`. What is damaged is told by `end`.
  void begin(const Part& part) {
    const std::size_t which = part.number % 2;
    const Section& section = layers_[part.number / 2];
    if (which == 0) sums_ = {};
    if (section.raw_bytes[which] != 0) std::memcpy(raw_.get(), section.raw[which], section.raw_bytes[which]);
    // A damaged stream may ask for more bits than there are; it finds zeros until this is noticed, a group later.
    std::memset(raw_.get() + section.raw_bytes[which], 0, (kColumns * count_ * kMostRaw + 7) / 8 + kSlack);
    bits_ = BitsIn{raw_.get(), 0};
    wrong_ = nullptr;
    step_.begin(part);
  }
  Summed summed(const Part& part) const { return step_.summed(part); }
  void group(const Part& part, std::size_t g) {
    if (wrong_ != nullptr) return;
    const std::size_t which = part.number % 2;
    Section& section = layers_[part.number / 2];
    wrong_ = group(part, g, section.escapes[which]);
    if (wrong_ == nullptr && bits_.at > 8 * section.raw_bytes[which]) wrong_ = "there are too few raw bits";
  }
  // Returns what is damaged, or null.
  const char* end(const Part& part) {
    if (wrong_ != nullptr) return wrong_;
    const std::size_t which = part.number % 2;
    const Section& section = layers_[part.number / 2];
    step_.end(part);
    if ((bits_.at + 7) / 8 != section.raw_bytes[which] || section.escapes[which].at != section.escapes[which].end)
      return kLeftOver;
    if (which == 1 && (sums_.a != section.a || sums_.b != section.b))
      return "the decoded values are not those that were encoded";
    return nullptr;
  }

  const char* finish() const { return decoder_->finish() == 0 ? nullptr : kDamagedStream; }

 private:
  std::size_t stream_bytes() const {
    std::size_t found = 0;
    for (const Section& section : layers_) found += section.words_bytes;
    return found;
  }

  const char* group(const Part& part, std::size_t g, EscapesIn& escapes) {
    const Group& group = part.groups[g];
    const Coded coded = step_.coded(symbols_.get(), classes_.get());
    step_.predict(part, g, mu_.get());
    const Group& scaled = step_.given(part, g);
    std::size_t done = 0;
    if (run_.decode != nullptr)
      done = run_.decode(scaled, part.value, mu_.get(), step_.rows(), decoder_->steps(2 * predict::kClasses), coded,
                         bits_, escapes, values_.get());
    if (done < count_) {
      const char* const wrong = rows(scaled, part.value, done, coded, escapes);
      if (wrong) return wrong;
    }
    add_sums(sums_, check_, group, count_, values_.get());
    step_.write(part, g, values_.get());
    step_.take(part, g, values_.get());
    return nullptr;
  }

  // Decodes the rows of a group from `first` on, an even number, step by step.
  const char* rows(const Group& group, bool value, std::size_t first, Coded coded, EscapesIn& escapes) {
    const RowCount left = {count_ - first, step_.rows().padded - first};
    const std::size_t at = first * kColumns, all = left.n * group.width;
    coded.offsets += at;
    coded.distances += first / 2 * kDistances;
    run_.classes(group, value, mu_.get() + at, left, coded);
    squeeze(group, left.n, coded.classes);
    if (decoder_->part(coded.classes, all, coded.symbols, all, level_) != 0) return kDamagedStream;
    spread(group, left.n, coded.symbols);
    if (!run_.join(group, mu_.get() + at, left, coded, bits_, escapes, values_.get() + at))
      return "a symbol stands for no value, or there are too few escapes";
    return nullptr;
  }

  Step& step_;
  Level level_;
  const Kernels& run_;
  const predict::Kernels& check_;
  std::size_t count_;
  std::vector<Section> layers_;
  Tiles<std::uint16_t> values_, mu_;
  Tiles<std::uint8_t> symbols_, classes_;
  std::size_t most_raw_;
  predict::Buffer<std::uint8_t> raw_, stream_;
  std::optional<rans::Decoder> decoder_;
  predict::Sums sums_;
  BitsIn bits_{nullptr, 0};       // of the part that was begun
  const char* wrong_ = nullptr;  // with it
};

// Codes a part of `count` blocks of one model, at most kTogether: the sums of all, and then group after group. What
// follows is `end` of each.
template <class Coder>
void code(const Model& model, const Part& part, const Kernels& run, Coder* const* blocks, std::size_t count) {
  Summed summed[kTogether] = {};
  for (std::size_t i = 0; i < count; ++i) {
    blocks[i]->begin(part);
    summed[i] = blocks[i]->summed(part);
  }
  if (!part.inputs.empty()) run.sums(part, model.weight(part), summed, count);
  for (std::size_t g = 0; g < part.groups.size(); ++g)
    for (std::size_t i = 0; i < count; ++i) blocks[i]->group(part, g);
}

// Cuts the layers up. before: bytes that the first one begins with. Returns what is damaged, or null.
inline const char* cut(const Model& model, std::size_t count, std::uint32_t mode, std::size_t before,
                       const std::uint8_t* payload, std::size_t nbytes, const std::uint64_t* sizes,
                       std::vector<Section>& layers) {
  std::size_t words = 0;
  layers.resize(model.parts().size() / 2);
  for (std::size_t layer = 0; layer < layers.size(); ++layer) {
    if (sizes[layer] > nbytes) return "the layers are longer than the payload";
    const auto size = static_cast<std::size_t>(sizes[layer]);
    const std::size_t begin = layer == 0 ? before : 0;
    if (size < begin) return "the payload ends in what its first layer begins with";
    const Part* const pair = model.parts().data() + 2 * layer;
    const std::size_t most[2] = {count * pair[0].width, count * pair[1].width};
    if (const char* const wrong = layers[layer].cut(payload + begin, size - begin, most, mode)) return wrong;
    words += layers[layer].words_bytes;
    payload += size;
    nbytes -= size;
  }
  if (nbytes != 0) return "bytes follow the last layer";
  return words > rans::bound(model.width() * count) ? kDamagedStream : nullptr;
}

}  // namespace kvstore::levels

#include "levels/levels.h"

#include <algorithm>
#include <cstring>
#include <optional>
#include <vector>

#include "common/plain_floats.h"
#include "levels/dispatch.h"
#include "levels/tiles.h"
#include "predictive/dispatch.h"
#include "predictive/offsets.h"
#include "predictive/sections.h"

namespace kvstore::levels {
namespace {

using predict::BitsIn;
using predict::BitsOut;
using predict::Block;
using predict::EscapesIn;
using predict::kMostRaw;
using predict::kSlack;
using predict::Leftovers;
using predict::Section;

constexpr const char* kDamagedStream = "the stream of symbols is damaged";
constexpr const char* kLeftOver = "raw bits or escapes are left over";

RowCount rows_of(const Block& block) { return {block.count, (block.count + kRows - 1) / kRows * kRows}; }

// Both directions: the groups of a block's parts in order, each predicted from what is known by then.
class Walk {
 public:
  Walk(const Model& model, const Block& block, const Kernels& run)
      : model_(model),
        block_(block),
        run_(run),
        rows_(rows_of(block)),
        turns_(model, block.start, rows_),
        offsets_(block.count),
        sums_(model.most_groups(), rows_),
        residuals_(model.most_groups(), rows_),
        p_(1, rows_),
        u_(1, rows_),
        offset_tile_(1, rows_),
        distances_(rows_.padded / 2 * kDistances),
        row_distances_(block.count) {
    for (std::size_t i = 0; i < std::min<std::size_t>(kSlots, model.parts().size()); ++i)
      inputs_.emplace_back(model.most_groups(), rows_);
  }

  RowCount rows() const { return rows_; }

  // Offsets and sums of the next part.
  void begin(const Part& part) {
    offsets_.predict(part.adapt);
    for (std::size_t t = 0; t < rows_.n; ++t)
      std::fill_n(offset_tile_.get() + t * kColumns, kColumns, static_cast<std::int16_t>(offsets_.get()[t]));
    std::fill_n(distances_.get(), rows_.padded / 2 * kDistances, 0);
    if (part.number < 2) return look_up(part);
    if (part.inputs.empty()) return;
    const std::uint8_t* inputs[kMostSlots];
    for (std::size_t i = 0; i < part.inputs.size(); ++i) inputs[i] = tiles(part.inputs[i]).get();
    run_.sums(part, model_.weight(part), inputs, rows_, sums_.get());
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

  Coded coded(std::uint8_t* symbols, std::uint8_t* classes) const {
    return {offset_tile_.get(), symbols, classes, distances_.get()};
  }

 private:
  static constexpr std::size_t kSlots = kMostSlots + 1;

  const Tiles<std::uint8_t>& tiles(std::size_t part) const { return inputs_[part % inputs_.size()]; }

  void look_up(const Part& part) {
    const std::size_t before = part.value ? model_.parts()[0].width : 0;
    for (std::size_t g = 0; g < part.groups.size(); ++g) {
      const Group& group = part.groups[g];
      for (std::size_t t = 0; t < rows_.n; ++t) {
        std::int32_t* const to = sums_.tile(g) + t * kColumns;
        std::copy_n(group.bias, kColumns, to);
        const std::int8_t* const from = model_.token(block_.tokens[t]);
        if (from == nullptr) continue;
        for (std::size_t c = 0; c < group.width; ++c)
          to[c] += part.row[g * kColumns + c] * from[before + g * kColumns + c];
      }
    }
  }

  const Model& model_;
  const Block& block_;
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

// Takes the columns that a narrow group lacks out of a tile, or the other way round.
void squeeze(const Group& group, std::size_t rows, std::uint8_t* tile) {
  for (std::size_t t = 1; group.width != kColumns && t < rows; ++t)
    std::memmove(tile + t * group.width, tile + t * kColumns, group.width);
}
void spread(const Group& group, std::size_t rows, std::uint8_t* tile) {
  for (std::size_t t = rows; group.width != kColumns && t-- > 1;)
    std::memmove(tile + t * kColumns, tile + t * group.width, group.width);
}

// The sums over a layer's values, in the order in which they are coded.
void add_sums(predict::Sums& sums, const predict::Kernels& run, const Group& group, std::size_t rows,
              const std::uint16_t* values) {
  if (group.width == kColumns) return sums.add(run, values, rows * kColumns);
  for (std::size_t t = 0; t < rows; ++t) sums.add(run, values + t * kColumns, group.width);
}

std::size_t most_values(const Model& model, std::size_t rows) { return model.most_groups() * kColumns * rows; }

}  // namespace

bool codable(const Model& model, std::size_t count) {
  return static_cast<double>(model.width() + model.parts().size() * kColumns) * static_cast<double>(count) < 1e9;
}

bool predictable(const Model& model, const Block& block) {
  const auto count = static_cast<std::int64_t>(block.count);
  return count > 0 && block.start >= 0 && count <= model.positions() && block.start <= model.positions() - count;
}

std::uint64_t multiply(std::uint64_t rounds, Level level) { return kernels(level).multiply(rounds); }

// ---- encoding -------------------------------------------------------------------------------------------------------

namespace {

class Encoder {
 public:
  Encoder(const Model& model, const Block& block, Level level)
      : model_(model),
        block_(block),
        level_(level),
        run_(kernels(level)),
        check_(predict::kernels(level)),
        walk_(model, block, run_),
        values_(1, walk_.rows()),
        mu_(1, walk_.rows()),
        symbols_(model.width() * block.count + kColumns * walk_.rows().padded),
        classes_(model.width() * block.count + kColumns * walk_.rows().padded),
        left_{Leftovers(most_values(model, block.count)), Leftovers(most_values(model, block.count))} {}

  void part(const Part& part) {
    const std::size_t which = part.number % 2;
    BitsOut bits{left_[which].raw.get()};
    std::uint16_t* whole = left_[which].escapes.get();
    walk_.begin(part);
    for (std::size_t g = 0; g < part.groups.size(); ++g) group(part, g, bits, whole);
    walk_.end(part);
    out_.raw_bytes[which] = static_cast<std::size_t>(bits.at - left_[which].raw.get()) + (bits.fill != 0);
    out_.escaped[which] = static_cast<std::size_t>(whole - left_[which].escapes.get());
    if (bits.fill != 0) *bits.at = static_cast<std::uint8_t>(bits.left);
    if (which == 0) return;
    out_.append(side_, mode_of(model_.level()), left_);
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
  void group(const Part& part, std::size_t g, BitsOut& bits, std::uint16_t*& whole) {
    const Group& group = part.groups[g];
    std::uint8_t *const symbols = symbols_.get() + done_, *const classes = classes_.get() + done_;
    walk_.predict(part, g, mu_.get());
    copy_tile<false>(part, block_.rows[part.number], g, block_.count, values_.get());
    run_.split(group, part.value, values_.get(), mu_.get(), walk_.rows(), walk_.coded(symbols, classes), bits, whole);
    squeeze(group, block_.count, symbols);
    squeeze(group, block_.count, classes);
    add_sums(out_.sums, check_, group, block_.count, values_.get());
    walk_.take(part, g, values_.get());
    parts_.push_back({symbols, block_.count * group.width, classes, block_.count * group.width});
    done_ += block_.count * group.width;
  }

  const Model& model_;
  const Block& block_;
  Level level_;
  const Kernels& run_;
  const predict::Kernels& check_;
  Walk walk_;
  Tiles<std::uint16_t> values_, mu_;
  predict::Buffer<std::uint8_t> symbols_, classes_;
  Leftovers left_[2];
  std::size_t done_ = 0;  // symbols
  predict::SideOut out_{};
  std::vector<std::uint8_t> side_;
  std::vector<std::size_t> ends_of_side_, last_;  // of each layer: its last group
  std::vector<rans::Part> parts_;
};

}  // namespace

int encode(const Model& model, const Block& block, std::uint8_t* out, std::size_t capacity, std::size_t limit,
           std::uint64_t* sizes, Level level) {
  if (!predictable(model, block)) return predict::kFallBack;
  const PlainFloats floats;
  Encoder encoder(model, block, level);
  for (const Part& part : model.parts()) encoder.part(part);
  return encoder.finish(out, capacity, limit, sizes);
}

// ---- decoding -------------------------------------------------------------------------------------------------------

namespace {

class Decoder {
 public:
  Decoder(const Model& model, const Block& block, std::vector<Section> layers, std::size_t wanted, Level level)
      : block_(block),
        wanted_(wanted),
        level_(level),
        run_(kernels(level)),
        check_(predict::kernels(level)),
        walk_(model, block, run_),
        layers_(std::move(layers)),
        values_(1, walk_.rows()),
        mu_(1, walk_.rows()),
        symbols_(1, walk_.rows()),
        classes_(1, walk_.rows()),
        most_raw_((most_values(model, block.count) * kMostRaw + 7) / 8),
        raw_(most_raw_ + (kColumns * block.count * kMostRaw + 7) / 8),
        stream_(stream_bytes()) {
    std::size_t end = 0;
    for (const Section& section : layers_) {
      if (section.words_bytes != 0) std::memcpy(stream_.get() + end, section.words, section.words_bytes);
      end += section.words_bytes;
    }
    decoder_.emplace(model.tables(), stream_.get(), end);
  }

  const char* part(const Part& part) {
    const std::size_t which = part.number % 2;
    Section& section = layers_[part.number / 2];
    if (which == 0) sums_ = {};
    if (section.raw_bytes[which] != 0) std::memcpy(raw_.get(), section.raw[which], section.raw_bytes[which]);
    // A damaged stream may ask for more bits than there are; it finds zeros until this is noticed, a group later.
    std::memset(raw_.get() + section.raw_bytes[which], 0, (kColumns * block_.count * kMostRaw + 7) / 8 + kSlack);
    BitsIn bits{raw_.get(), 0};
    walk_.begin(part);
    for (std::size_t g = 0; g < part.groups.size(); ++g) {
      if (const char* const wrong = group(part, g, bits, section.escapes[which])) return wrong;
      if (bits.at > 8 * section.raw_bytes[which]) return "there are too few raw bits";
    }
    walk_.end(part);
    if ((bits.at + 7) / 8 != section.raw_bytes[which] || section.escapes[which].at != section.escapes[which].end)
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

  const char* group(const Part& part, std::size_t g, BitsIn& bits, EscapesIn& escapes) {
    const Group& group = part.groups[g];
    const std::size_t all = block_.count * group.width;
    const Coded coded = walk_.coded(symbols_.get(), classes_.get());
    walk_.predict(part, g, mu_.get());
    run_.classes(group, part.value, mu_.get(), walk_.rows(), coded);
    squeeze(group, block_.count, classes_.get());
    if (decoder_->part(classes_.get(), all, symbols_.get(), all, level_) != 0) return kDamagedStream;
    spread(group, block_.count, symbols_.get());
    if (!run_.join(group, mu_.get(), walk_.rows(), coded, bits, escapes, values_.get()))
      return "a symbol stands for no value, or there are too few escapes";
    add_sums(sums_, check_, group, block_.count, values_.get());
    copy_tile<true>(part, block_.rows[part.number], g, wanted_, values_.get());
    walk_.take(part, g, values_.get());
    return nullptr;
  }

  const Block& block_;
  std::size_t wanted_;
  Level level_;
  const Kernels& run_;
  const predict::Kernels& check_;
  Walk walk_;
  std::vector<Section> layers_;
  Tiles<std::uint16_t> values_, mu_;
  Tiles<std::uint8_t> symbols_, classes_;
  std::size_t most_raw_;
  predict::Buffer<std::uint8_t> raw_, stream_;
  std::optional<rans::Decoder> decoder_;
  predict::Sums sums_;
};

// Cuts the layers up. Returns what is damaged, or null.
const char* cut(const Model& model, std::size_t count, const std::uint8_t* payload, std::size_t nbytes,
                const std::uint64_t* sizes, std::vector<Section>& layers) {
  std::size_t words = 0;
  layers.resize(model.parts().size() / 2);
  for (std::size_t layer = 0; layer < layers.size(); ++layer) {
    if (sizes[layer] > nbytes) return "the layers are longer than the payload";
    const auto size = static_cast<std::size_t>(sizes[layer]);
    const Part* const pair = model.parts().data() + 2 * layer;
    const std::size_t most[2] = {count * pair[0].width, count * pair[1].width};
    if (const char* const wrong = layers[layer].cut(payload, size, most, mode_of(model.level()))) return wrong;
    words += layers[layer].words_bytes;
    payload += size;
    nbytes -= size;
  }
  if (nbytes != 0) return "bytes follow the last layer";
  return words > rans::bound(model.width() * count) ? kDamagedStream : nullptr;
}

}  // namespace

const char* decode(const Model& model, const Block& block, const std::uint8_t* payload, std::size_t nbytes,
                   const std::uint64_t* sizes, std::size_t wanted, Level level) {
  if (!predictable(model, block)) return "the profile does not know these positions";
  std::vector<Section> layers;
  if (const char* const wrong = cut(model, block.count, payload, nbytes, sizes, layers)) return wrong;
  const PlainFloats floats;
  Decoder decoder(model, block, std::move(layers), wanted, level);
  for (const Part& part : model.parts())
    if (const char* const wrong = decoder.part(part)) return wrong;
  return decoder.finish();
}

}  // namespace kvstore::levels

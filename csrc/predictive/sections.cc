#include "predictive/sections.h"

#include <algorithm>
#include <cstring>

#include "common/endian.h"

namespace kvstore::predict {
namespace {

constexpr const char* kDamagedStream = "the stream of symbols is damaged";
constexpr const char* kTooShort = "a layer is shorter than its header says";
constexpr const char* kLeftOver = "raw bits or escapes are left over";

}  // namespace

void Sums::add(const Kernels& kernels, const std::uint16_t* values, std::size_t count) {
  std::uint32_t more = 0, weighted = 0;
  kernels.check(values, count, &more, &weighted);
  a += more;
  b += weighted + static_cast<std::uint32_t>(before) * more;
  before += count;
}

// ---- encoding -------------------------------------------------------------------------------------------------------

SectionsOut::SectionsOut(const Model& model, std::size_t count, std::uint32_t mode, std::size_t before)
    : count_(count),
      mode_(mode),
      symbols_(model.width() * count),
      classes_(model.width() * count),
      side_(before),
      distances_(count),
      left_{Leftovers(model.widest() * count), Leftovers(model.widest() * count)} {}

void SectionsOut::part(const Kernels& run, const Predicted& predicted, const std::uint16_t* values) {
  const std::size_t which = parts_.size() % 2, width = predicted.part.width, all = count_ * width;
  const Leftovers& left = left_[which];
  std::uint8_t *const symbols = symbols_.get() + done_, *const classes = classes_.get() + done_;
  BitsOut bits{left.raw.get()};
  std::uint16_t* whole = left.escapes.get();
  for (std::size_t t = 0; t < count_; ++t) {
    const std::size_t at = t * width;
    distances_[t] = run.split(predicted.part, values + at, predicted.mu + at, predicted.offsets[t], symbols + at,
                              classes + at, bits, whole);
  }
  out_.raw_bytes[which] = static_cast<std::size_t>(bits.at - left.raw.get()) + (bits.fill != 0);
  out_.escaped[which] = static_cast<std::size_t>(whole - left.escapes.get());
  if (bits.fill != 0) *bits.at = static_cast<std::uint8_t>(bits.left);
  out_.sums.add(run, values, all);
  parts_.push_back({symbols, all, classes, all});
  done_ += all;
  if (which == 1) end_layer();
}

void SideOut::append(std::vector<std::uint8_t>& side, std::uint32_t mode, const Leftovers (&left)[2]) const {
  const std::size_t fields[] = {mode, raw_bytes[0], raw_bytes[1], escaped[0], escaped[1], sums.a, sums.b};
  for (std::size_t i = mode == 0; i < 7; ++i) {
    side.resize(side.size() + 4);
    store32(side.data() + side.size() - 4, static_cast<std::uint32_t>(fields[i]));
  }
  for (std::size_t which = 0; which < 2; ++which)
    side.insert(side.end(), left[which].raw.get(), left[which].raw.get() + raw_bytes[which]);
  for (std::size_t which = 0; which < 2; ++which) {
    const std::size_t at = side.size();
    side.resize(at + 2 * escaped[which]);
    for (std::size_t i = 0; i < escaped[which]; ++i) store16(side.data() + at + 2 * i, left[which].escapes.get()[i]);
  }
}

void SectionsOut::end_layer() {
  out_.append(side_, mode_, left_);
  ends_of_side_.push_back(side_.size());
  out_ = {};
}

std::int64_t SectionsOut::code(const rans::Tables& tables, std::uint8_t* out, std::size_t capacity, Level level) {
  const std::size_t side = side_.size();
  if (side >= capacity) return rans::kNoRoom;
  ends_.resize(parts_.size());
  const std::int64_t length =
      rans::encode(tables, parts_.data(), parts_.size(), out + side, capacity - side, ends_.data(), level);
  return length < 0 ? std::int64_t{rans::kNoRoom} : static_cast<std::int64_t>(side) + length;
}

void SectionsOut::place(std::uint8_t* out, std::uint64_t* sizes) const {
  std::vector<std::size_t> ends;
  for (std::size_t layer = 0; layer < ends_of_side_.size(); ++layer) ends.push_back(ends_[2 * layer + 1]);
  place_layers(side_, ends_of_side_, ends, out, sizes);
}

void place_layers(const std::vector<std::uint8_t>& side, const std::vector<std::size_t>& ends_of_side,
                  const std::vector<std::size_t>& ends_of_words, std::uint8_t* out, std::uint64_t* sizes) {
  // Each layer's words move to where they belong: forwards, so that nothing is overwritten that is still to be moved.
  const std::uint8_t* const stream = out + side.size();
  std::size_t from = 0, from_side = 0;
  for (std::size_t layer = 0; layer < ends_of_side.size(); ++layer) {
    const std::size_t bytes = ends_of_side[layer] - from_side, words = ends_of_words[layer] - from;
    std::memcpy(out, side.data() + from_side, bytes);
    std::memmove(out + bytes, stream + from, words);
    from_side += bytes;
    from += words;
    sizes[layer] = bytes + words;
    out += sizes[layer];
  }
}

// ---- decoding -------------------------------------------------------------------------------------------------------

const char* Section::cut(const std::uint8_t* in, std::size_t nbytes, const std::size_t (&most)[2],
                         std::uint32_t mode) {
  if (nbytes < header_bytes(mode)) return "a layer ends in its header";
  if (mode != 0 && load32(in) != mode) return "a layer is of another mode";
  const std::uint8_t* const fields = mode == 0 ? in : in + 4;
  std::size_t left = nbytes - header_bytes(mode);
  const std::uint8_t* at = in + header_bytes(mode);
  for (std::size_t which = 0; which < 2; ++which) {
    raw[which] = at;
    raw_bytes[which] = load32(fields + 4 * which);
    if (raw_bytes[which] > left) return kTooShort;
    if (raw_bytes[which] > (most[which] * kMostRaw + 7) / 8) return kLeftOver;
    at += raw_bytes[which];
    left -= raw_bytes[which];
  }
  for (std::size_t which = 0; which < 2; ++which) {
    const std::size_t escaped = load32(fields + 8 + 4 * which);
    if (escaped > left / 2) return kTooShort;
    escapes[which] = {at, at + 2 * escaped};
    at += 2 * escaped;
    left -= 2 * escaped;
  }
  words = at;
  words_bytes = left;
  a = load32(fields + 16);
  b = load32(fields + 20);
  return nullptr;
}

const char* SectionsIn::cut(const std::uint8_t* payload, std::size_t nbytes, const std::uint64_t* sizes,
                            std::size_t before) {
  layers_.resize(model_.parts().size() / 2);
  for (std::size_t layer = 0; layer < layers_.size(); ++layer) {
    const std::size_t skip = layer == 0 ? before : 0;
    if (sizes[layer] > nbytes) return "the layers are longer than the payload";
    const auto size = static_cast<std::size_t>(sizes[layer]);
    if (size < skip) return "the payload ends before its first layer";
    const Part* const pair = model_.parts().data() + 2 * layer;
    const std::size_t most[2] = {count_ * pair[0].width, count_ * pair[1].width};
    const char* const wrong = layers_[layer].cut(payload + skip, size - skip, most, mode_);
    if (wrong) return wrong;
    words_bytes_ += layers_[layer].words_bytes;
    payload += size;
    nbytes -= size;
  }
  if (nbytes != 0) return "bytes follow the last layer";
  return words_bytes_ > rans::bound(model_.width() * count_) ? kDamagedStream : nullptr;
}

void SectionsIn::begin() {
  const std::size_t most = model_.widest() * count_;
  most_raw_ = (most * kMostRaw + 7) / 8;
  stream_.emplace(words_bytes_);
  symbols_.emplace(most);
  classes_.emplace(most);
  raw_.emplace(most_raw_);
  distances_.resize(count_);
  std::size_t end = 0;
  for (const Section& section : layers_) {
    if (section.words_bytes != 0) std::memcpy(stream_->get() + end, section.words, section.words_bytes);
    end += section.words_bytes;
  }
  decoder_.emplace(model_.tables(), stream_->get(), words_bytes_);
}

const char* SectionsIn::part(const Kernels& run, std::size_t number, const Predicted& predicted,
                             std::uint16_t* values, Level level) {
  const std::size_t which = number % 2, width = predicted.part.width, all = count_ * width;
  Section& section = layers_[number / 2];
  const std::size_t raw_bytes = section.raw_bytes[which];
  std::uint8_t* const raw = raw_->get();
  if (which == 0) sums_ = {};
  if (raw_bytes != 0) std::memcpy(raw, section.raw[which], raw_bytes);
  // A damaged stream may ask for more bits than there are; it finds zeros until this is noticed, a row later.
  const std::size_t beyond = (width * kMostRaw + 7) / 8 + kSlack;
  std::memset(raw + raw_bytes, 0, std::min(beyond, most_raw_ + kSlack - raw_bytes));
  BitsIn bits{raw, 0};
  std::size_t done = 0;
  if (run.decode != nullptr)
    done = run.decode(predicted, count_, decoder_->steps(2 * kClasses), bits, 8 * raw_bytes, section.escapes[which],
                      values, distances_.data());
  if (done < count_) {
    const char* const wrong = rows(run, done, predicted, bits, section, which, values, level);
    if (wrong) return wrong;
  }
  if ((bits.at + 7) / 8 != raw_bytes || section.escapes[which].at != section.escapes[which].end) return kLeftOver;
  sums_.add(run, values, all);
  return nullptr;
}

const char* SectionsIn::rows(const Kernels& run, std::size_t first, const Predicted& predicted, BitsIn& bits,
                             Section& section, std::size_t which, std::uint16_t* values, Level level) {
  const std::size_t width = predicted.part.width, all = (count_ - first) * width;
  std::uint8_t *const symbols = symbols_->get(), *const classes = classes_->get();
  const std::uint16_t* const mu = predicted.mu + first * width;
  for (std::size_t t = 0; first + t < count_; ++t)
    run.classes(predicted.part, mu + t * width, predicted.offsets[first + t], classes + t * width);
  if (decoder_->part(classes, all, symbols, all, level) != 0) return kDamagedStream;
  for (std::size_t t = 0; first + t < count_; ++t) {
    const bool good =
        run.join(predicted.part, symbols + t * width, mu + t * width, predicted.offsets[first + t], bits,
                 section.escapes[which], values + (first + t) * width, &distances_[first + t]);
    if (!good) return "a symbol stands for no value, or there are too few escapes";
    if (bits.at > 8 * section.raw_bytes[which]) return "there are too few raw bits";
  }
  return nullptr;
}

const char* SectionsIn::finish() const { return decoder_->finish() == 0 ? nullptr : kDamagedStream; }

}  // namespace kvstore::predict

#include "donor/donor.h"

#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include "common/endian.h"
#include "donor/dispatch.h"
#include "donor/rows.h"
#include "predictive/dispatch.h"
#include "predictive/sections.h"
#include "rans/rans.h"

#undef KVSTORE_INLINE

namespace kvstore::donor {
namespace {

using predict::Buffer;
using predict::Model;
using predict::Part;

constexpr int kLeastOffset = -32, kMostOffset = 40;
constexpr int kMostScale = predict::kMostScale;
constexpr int kLift = -1;  // quarter octaves from the mean of absolute values to the scale

std::size_t groups_of(const Part& part) { return part.heads * ((part.dim + kChannels - 1) / kChannels); }

// 2^(-offset / 4), exactly the same everywhere.
float weight_of(int offset) {
  constexpr std::uint32_t roots[] = {0x3f800000, 0x3f5744fd, 0x3f3504f3, 0x3f1837f0};
  return as_float(roots[offset & 3] - static_cast<std::uint32_t>(offset >> 2) * (1u << 23));
}

// Both directions: the parts of a block in order, each predicted from its donor and the parts before.
class Walk {
 public:
  Walk(const Model& model, const Block& block, Level level)
      : run(predict::kernels(level)),
        model_(model),
        block_(block),
        more_(kernels(level)),
        count_(covered(block)),
        widest_(widest(model)),
        values_(count_ * widest_),
        from_(count_ * widest_),
        mu_(block.propagated ? count_ * widest_ : 0),
        row_(widest_),
        sums_(block.propagated ? count_ * widest_ : 0),
        angles_(block.propagated ? 2 * count_ * model.half() : 0),
        offsets_(count_),
        fits_{Buffer<std::int32_t>(count_), Buffer<std::int32_t>(count_)} {
    std::fill_n(fits_[0].get(), count_, 0);
    std::fill_n(fits_[1].get(), count_, 0);
    coded_.scale.resize(predict::round_up(widest_, predict::kColumnsBytes));
    if (!block.propagated) return;
    for (std::size_t i = 0; i < 4; ++i) {
      std::size_t row = 0;
      for (std::size_t p = i; p < model.parts().size(); p += 4) row = std::max(row, stride(model.parts()[p]));
      inputs_.emplace_back(count_ * row);
      std::fill_n(inputs_.back().get(), count_ * row, std::uint8_t{0});  // also where no column is
    }
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
  std::size_t most_values() const { return count_ * widest_; }  // of a part
  std::uint16_t* values(std::size_t row) const { return values_.get() + row * coded_.width; }
  const std::uint16_t* mu(std::size_t row) const {
    return (propagates_ ? mu_ : from_).get() + row * coded_.width;
  }
  const std::int32_t* offsets() const { return offsets_.get(); }
  const Part& coded() const { return coded_; }  // the part as the kernels of bins take it

  // Makes offsets() and mu() of a part; its scales are still to come.
  void predict(std::size_t number) {
    const Part& part = model_.parts()[number];
    coded_.width = part.width;
    coded_.value = part.value;
    propagates_ = block_.propagated && number >= 2;
    for (std::size_t t = 0; t < count_; ++t) {
      const int sum = 110 * fits_[0].get()[t] + 90 * fits_[1].get()[t] + 128;
      offsets_.get()[t] = predict::clamped(sum >> 8, kLeastOffset, kMostOffset);
    }
    load(more_, block_, part, number, row_.get(), from_.get());
    if (propagates_) propagate(part);
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
      more_.measure(values(t), mu(t), weight_of(offsets_.get()[t]), part.width, totals_.data());
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
    std::swap(fits_[0], fits_[1]);
    for (std::size_t t = 0; t < count_; ++t) {
      const auto mean = static_cast<std::uint32_t>(std::uint64_t{distances[t]} * 64 / part.width);
      fits_[0].get()[t] = offsets_.get()[t] + predict::log2_quarters(std::max(mean, 1u)) - 34;
    }
    if (!block_.propagated || number + 1 == model_.parts().size()) return;
    for (std::size_t t = 0; t < count_; ++t) {
      more_.subtract(values(t), from_.get() + t * part.width, part.width, row_.get());
      run.inputs(part, row_.get(), angles(t), inputs_[number % 4].get() + t * stride(part));
    }
  }

  // Copies values() from the block's rows.
  void gather(std::size_t number) { copy<false>(number, SIZE_MAX); }
  // And those of rows below `wanted` back.
  void scatter(std::size_t number, std::size_t wanted) { copy<true>(number, wanted); }

  const predict::Kernels& run;

 private:
  static std::size_t widest(const Model& model) {
    std::size_t found = 0;
    for (const Part& part : model.parts()) found = std::max(found, part.padded);
    return found;
  }

  std::size_t stride(const Part& part) const {
    return predict::round_up(part.width, predict::kGroup) * run.input_bytes;
  }

  predict::Angles angles(std::size_t row) const {
    const std::int32_t* const cos = angles_.get() + 2 * row * model_.half();
    return {cos, cos + model_.half(), model_.half()};
  }

  // mu() of a part: its donor, and what the parts before say that it differs by.
  void propagate(const Part& part) {
    predict::Inputs from{};
    for (std::size_t i = 0; i < part.inputs.size(); ++i) {
      from.rows[i] = inputs_[part.inputs[i] % 4].get();
      from.stride[i] = stride(model_.parts()[part.inputs[i]]);
    }
    run.sums(part, model_.weight(part), from, count_, sums_.get());
    for (std::size_t t = 0; t < count_; ++t) {
      std::uint16_t* const to = mu_.get() + t * part.width;
      run.predict(part, sums_.get() + t * part.padded, angles(t), row_.get());
      more_.add(row_.get(), from_.get() + t * part.width, part.width, to);
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
  std::size_t count_, widest_;
  Buffer<std::uint16_t> values_, from_, mu_, row_;  // from_: what the donor alone predicts
  Buffer<std::int32_t> sums_, angles_, offsets_;
  Buffer<std::int32_t> fits_[2];              // of the part before, and of the one before that
  std::vector<Buffer<std::uint8_t>> inputs_;  // of the last four parts
  std::vector<float> totals_;
  std::vector<int> scales_;
  Part coded_;
  bool propagates_ = false;
};

std::size_t values_of(const Model& model, std::size_t count) {
  std::size_t sum = 0;
  for (const Part& part : model.parts()) sum += part.width;
  return sum * count;
}

std::size_t scale_bytes(const Model& model) {
  std::size_t sum = 0;
  for (const Part& part : model.parts()) sum += 2 + groups_of(part);
  return sum;
}

}  // namespace

bool encode(const Model& model, const Block& block, std::uint8_t* out, std::size_t capacity, std::uint64_t* sizes,
            Level level) {
  const predict::PlainFloats floats;
  Walk walk(model, block, level);
  const std::size_t count = walk.count(), all = values_of(model, count), layers = model.parts().size() / 2;
  const Buffer<std::uint8_t> symbols(all), classes(all);
  std::vector<rans::Part> parts;
  std::vector<std::uint8_t> side(scale_bytes(model));  // all that is not words; the scales come first
  std::vector<std::size_t> ends_of_side(layers);
  std::vector<std::uint32_t> distances(count);
  const predict::Leftovers left[2] = {predict::Leftovers(walk.most_values()), predict::Leftovers(walk.most_values())};
  std::size_t done = 0, scales = 0;

  for (std::size_t layer = 0; layer < layers; ++layer) {
    predict::Sums sums;
    std::size_t raw_bytes[2], escaped[2];
    for (std::size_t which = 0; which < 2; ++which) {
      const std::size_t number = 2 * layer + which, width = model.parts()[number].width;
      walk.predict(number);
      walk.gather(number);
      walk.measure_scales(number, side.data() + scales);
      scales += 2 + groups_of(model.parts()[number]);
      predict::BitsOut bits{left[which].raw.get()};
      std::uint16_t* whole = left[which].escapes.get();
      for (std::size_t t = 0; t < count; ++t) {
        const std::size_t at = done + t * width;
        distances[t] = walk.run.split(walk.coded(), walk.values(t), walk.mu(t), walk.offsets()[t], symbols.get() + at,
                                      classes.get() + at, bits, whole);
      }
      raw_bytes[which] = static_cast<std::size_t>(bits.at - left[which].raw.get()) + (bits.fill != 0);
      escaped[which] = static_cast<std::size_t>(whole - left[which].escapes.get());
      if (bits.fill != 0) *bits.at = static_cast<std::uint8_t>(bits.left);
      sums.add(walk.run, walk.values(0), count * width);
      parts.push_back({symbols.get() + done, count * width, classes.get() + done, count * width});
      done += count * width;
      walk.advance(number, distances.data());
    }
    const std::size_t fields[] = {raw_bytes[0], raw_bytes[1], escaped[0], escaped[1], sums.a, sums.b};
    std::uint8_t header[kHeader];
    for (std::size_t i = 0; i < 6; ++i) store32(header + 4 * i, static_cast<std::uint32_t>(fields[i]));
    side.insert(side.end(), header, header + kHeader);
    for (std::size_t which = 0; which < 2; ++which)
      side.insert(side.end(), left[which].raw.get(), left[which].raw.get() + raw_bytes[which]);
    for (std::size_t which = 0; which < 2; ++which) {
      const std::size_t at = side.size();
      side.resize(at + 2 * escaped[which]);
      for (std::size_t i = 0; i < escaped[which]; ++i) store16(side.data() + at + 2 * i, left[which].escapes.get()[i]);
    }
    ends_of_side[layer] = side.size();
  }

  // The stream is written behind the place of all else, then each layer's words move to where they belong: forwards,
  // so that nothing is overwritten that is still to be moved.
  const std::size_t before = side.size();
  if (before >= capacity) return false;
  std::vector<std::size_t> ends(parts.size());
  const std::int64_t length = rans::encode(model.tables(), parts.data(), parts.size(), out + before, capacity - before,
                                           ends.data(), level);
  if (length < 0) return false;
  const std::uint8_t* const stream = out + before;
  std::size_t from = 0, from_side = 0;
  for (std::size_t layer = 0; layer < layers; ++layer) {
    const std::size_t bytes = ends_of_side[layer] - from_side, words = ends[2 * layer + 1] - from;
    std::memcpy(out, side.data() + from_side, bytes);
    std::memmove(out + bytes, stream + from, words);
    from_side += bytes;
    from += words;
    sizes[layer] = bytes + words;
    out += sizes[layer];
  }
  return true;
}

namespace {

// One layer's bytes, cut up.
struct Section {
  const std::uint8_t* raw[2];
  std::size_t raw_bytes[2];
  predict::EscapesIn escapes[2];
  const std::uint8_t* words;
  std::size_t words_bytes;
  std::uint32_t a, b;

  const char* cut(const std::uint8_t* in, std::size_t nbytes, const Part* parts, std::size_t count) {
    if (nbytes < kHeader) return "donor: a layer ends in its header";
    std::size_t left = nbytes - kHeader;
    const std::uint8_t* at = in + kHeader;
    for (std::size_t which = 0; which < 2; ++which) {
      raw[which] = at;
      raw_bytes[which] = load32(in + 4 * which);
      if (raw_bytes[which] > left) return "donor: a layer is shorter than its header says";
      if (raw_bytes[which] > (count * parts[which].width * predict::kMostRaw + 7) / 8)
        return "donor: raw bits or escapes are left over";
      at += raw_bytes[which];
      left -= raw_bytes[which];
    }
    for (std::size_t which = 0; which < 2; ++which) {
      const std::size_t escaped = load32(in + 8 + 4 * which);
      if (escaped > left / 2) return "donor: a layer is shorter than its header says";
      escapes[which] = {at, at + 2 * escaped};
      at += 2 * escaped;
      left -= 2 * escaped;
    }
    words = at;
    words_bytes = left;
    a = load32(in + 16);
    b = load32(in + 20);
    return nullptr;
  }
};

}  // namespace

const char* decode(const Model& model, const Block& block, const std::uint8_t* payload, std::size_t nbytes,
                   const std::uint64_t* sizes, std::size_t wanted, Level level) {
  const std::size_t count = covered(block), layers = model.parts().size() / 2;
  const std::uint8_t* scales = payload;
  std::vector<Section> sections(layers);
  std::size_t total = 0;
  for (std::size_t layer = 0; layer < layers; ++layer) {
    if (sizes[layer] > nbytes) return "donor: layers longer than the payload";
    auto size = static_cast<std::size_t>(sizes[layer]);
    nbytes -= size;
    if (layer == 0) {
      const std::size_t first = scale_bytes(model);
      if (size < first) return "donor: a payload ends in its scales";
      payload += first;
      size -= first;
    }
    const char* const wrong = sections[layer].cut(payload, size, model.parts().data() + 2 * layer, count);
    if (wrong) return wrong;
    total += sections[layer].words_bytes;
    payload += size;
  }
  if (nbytes != 0) return "donor: bytes after the last layer";
  if (total > rans::bound(values_of(model, count))) return "donor: a damaged stream";

  const predict::PlainFloats floats;
  Walk walk(model, block, level);
  const Buffer<std::uint8_t> stream(total), symbols(walk.most_values()), classes(walk.most_values());
  const std::size_t most_raw = (walk.most_values() * predict::kMostRaw + 7) / 8;
  const Buffer<std::uint8_t> raw(most_raw);
  std::vector<std::uint32_t> distances(count);
  std::size_t end = 0;
  for (const Section& section : sections) {
    if (section.words_bytes != 0) std::memcpy(stream.get() + end, section.words, section.words_bytes);
    end += section.words_bytes;
  }
  rans::Decoder decoder(model.tables(), stream.get(), total);

  for (std::size_t layer = 0; layer < layers; ++layer) {
    Section& section = sections[layer];
    predict::Sums sums;
    for (std::size_t which = 0; which < 2; ++which) {
      const std::size_t number = 2 * layer + which, width = model.parts()[number].width;
      const std::size_t values = count * width, raw_bytes = section.raw_bytes[which];
      walk.predict(number);
      if (!walk.take_scales(number, scales)) return "donor: scales out of bounds";
      scales += 2 + groups_of(model.parts()[number]);
      for (std::size_t t = 0; t < count; ++t)
        walk.run.classes(walk.coded(), walk.mu(t), walk.offsets()[t], classes.get() + t * width);
      if (decoder.part(classes.get(), values, symbols.get(), values, level) != 0) return "donor: a damaged stream";
      if (raw_bytes != 0) std::memcpy(raw.get(), section.raw[which], raw_bytes);
      // A damaged stream may ask for more bits than there are; it finds zeros until this is noticed, a row later.
      const std::size_t beyond = (width * predict::kMostRaw + 7) / 8 + predict::kSlack;
      std::memset(raw.get() + raw_bytes, 0, std::min(beyond, most_raw + predict::kSlack - raw_bytes));
      predict::BitsIn bits{raw.get(), 0};
      for (std::size_t t = 0; t < count; ++t) {
        const bool good = walk.run.join(walk.coded(), symbols.get() + t * width, walk.mu(t), walk.offsets()[t], bits,
                                        section.escapes[which], walk.values(t), &distances[t]);
        if (!good) return "donor: a value that no number has, or too few escapes";
        if (bits.at > 8 * raw_bytes) return "donor: too few raw bits";
      }
      if ((bits.at + 7) / 8 != raw_bytes || section.escapes[which].at != section.escapes[which].end)
        return "donor: raw bits or escapes are left over";
      sums.add(walk.run, walk.values(0), values);
      walk.scatter(number, wanted);
      walk.advance(number, distances.data());
    }
    if (sums.a != section.a || sums.b != section.b)
      return "donor: what was decoded is not what was encoded, or the donor is another";
  }
  return decoder.finish() == 0 ? nullptr : "donor: a damaged stream";
}

}  // namespace kvstore::donor

#include "predictive/predictive.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "common/endian.h"
#include "predictive/dispatch.h"
#include "predictive/sections.h"
#include "rans/rans.h"

#undef KVSTORE_INLINE

namespace kvstore::predict {
namespace {

// Both directions: the parts of a block in order, each predicted from those before.
class Walk {
 public:
  Walk(const Model& model, const Block& block, const Kernels& kernels)
      : model_(model),
        block_(block),
        kernels_(kernels),
        widest_(widest(model)),
        values_(block.count * widest_),
        mu_(block.count * widest_),
        sums_(block.count * widest_),
        angles_(2 * block.count * model.half()),
        offsets_(block.count),
        fits_{Buffer<std::int32_t>(block.count), Buffer<std::int32_t>(block.count)} {
    std::fill_n(fits_[0].get(), block.count, 0);
    std::fill_n(fits_[1].get(), block.count, 0);
    for (std::size_t i = 0; i < 6; ++i) {
      std::size_t row = 0;
      for (std::size_t p = i; p < model.parts().size(); p += 6) row = std::max(row, stride(model.parts()[p]));
      inputs_.emplace_back(block.count * row);
      std::fill_n(inputs_.back().get(), block.count * row, std::uint8_t{0});  // also where no column is
    }
    for (std::size_t t = 0; t < block.count && model.half() != 0; ++t) {
      std::int32_t* const cos = angles_.get() + 2 * t * model.half();
      model.angles(block.start + static_cast<std::int64_t>(t), cos, cos + model.half());
    }
  }

  std::size_t count() const { return block_.count; }
  std::size_t most_values() const { return block_.count * widest_; }  // of a part
  std::uint16_t* values(std::size_t row, const Part& part) const { return values_.get() + row * part.width; }
  const std::uint16_t* mu(std::size_t row, const Part& part) const { return mu_.get() + row * part.width; }
  const std::int32_t* offsets() const { return offsets_.get(); }

  // Makes offsets() and mu() of a part.
  void predict(std::size_t number) {
    const Part& part = model_.parts()[number];
    for (std::size_t t = 0; t < count(); ++t) {
      const int sum = part.adapt[0] * fits_[0].get()[t] + part.adapt[1] * fits_[1].get()[t] + part.adapt[2] + 128;
      offsets_.get()[t] = clamped(sum >> 8, -32, 40);
    }
    if (number < 2) {
      for (std::size_t t = 0; t < count(); ++t) look_up(part, t);
    } else {
      Inputs from{};
      for (std::size_t i = 0; i < part.inputs.size(); ++i) {
        from.rows[i] = inputs_[part.inputs[i] % 6].get();
        from.stride[i] = stride(model_.parts()[part.inputs[i]]);
      }
      kernels_.sums(part, model_.weight(part), from, count(), sums_.get());
    }
    for (std::size_t t = 0; t < count(); ++t)
      kernels_.predict(part, sums_.get() + t * part.padded, angles(t), mu_.get() + t * part.width);
  }

  // distances: what the residuals of each row add up to. values() are known.
  void advance(std::size_t number, const std::uint32_t* distances) {
    const Part& part = model_.parts()[number];
    std::swap(fits_[0], fits_[1]);
    for (std::size_t t = 0; t < count(); ++t) {
      const auto mean = static_cast<std::uint32_t>(std::uint64_t{distances[t]} * 64 / part.width);
      fits_[0].get()[t] = offsets_.get()[t] + log2_quarters(std::max(mean, 1u)) - 34;
    }
    if (number + 1 == model_.parts().size()) return;
    for (std::size_t t = 0; t < count(); ++t)
      kernels_.inputs(part, values(t, part), angles(t), inputs_[number % 6].get() + t * stride(part));
  }

  // Copies values() from the block's rows.
  void gather(std::size_t number) { copy<false>(number, count()); }
  // And the first `rows` of them back.
  void scatter(std::size_t number, std::size_t rows) { copy<true>(number, rows); }

 private:
  static std::size_t widest(const Model& model) {
    std::size_t found = 0;
    for (const Part& part : model.parts()) found = std::max(found, part.padded);
    return found;
  }

  std::size_t stride(const Part& part) const { return round_up(part.width, kGroup) * kernels_.input_bytes; }

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
    for (std::size_t t = 0; t < rows; ++t) copy_row<OUT>(part, block_.rows[number], t, values(t, part));
  }

  const Model& model_;
  const Block& block_;
  const Kernels& kernels_;
  std::size_t widest_;
  Buffer<std::uint16_t> values_, mu_;
  Buffer<std::int32_t> sums_, angles_, offsets_;
  Buffer<std::int32_t> fits_[2];  // of the part before, and of the one before that
  std::vector<Buffer<std::uint8_t>> inputs_;  // of the last six parts
};

std::size_t values_of(const Model& model, std::size_t count) {
  std::size_t sum = 0;
  for (const Part& part : model.parts()) sum += part.width;
  return sum * count;
}

// What a layer stores besides its header and rANS words.
struct Side {
  std::uint8_t header[kHeader];
  std::size_t begin;  // in the block's side bytes
};

}  // namespace

bool predictable(const Model& model, const Block& block) {
  const auto count = static_cast<std::int64_t>(block.count);
  return count > 0 && block.start >= 0 && count <= model.positions() && block.start <= model.positions() - count;
}

int encode(const Model& model, const Block& block, std::uint8_t* out, std::size_t capacity, std::size_t limit,
           std::uint64_t* sizes, Level level) {
  if (!predictable(model, block)) return kFallBack;
  const PlainFloats floats;
  const Kernels& run = kernels(level);
  Walk walk(model, block, run);
  const std::size_t count = block.count, all = values_of(model, count), layers = model.parts().size() / 2;
  const Buffer<std::uint8_t> symbols(all), classes(all);
  std::vector<rans::Part> parts;
  std::vector<std::uint8_t> side;
  std::vector<Side> sides(layers);
  std::vector<std::uint32_t> distances(count);
  const Leftovers left[2] = {Leftovers(walk.most_values()), Leftovers(walk.most_values())};
  std::size_t done = 0;

  for (std::size_t layer = 0; layer < layers; ++layer) {
    Sums sums;
    std::size_t raw_bytes[2], escaped[2];
    for (std::size_t which = 0; which < 2; ++which) {
      const std::size_t number = 2 * layer + which;
      const Part& part = model.parts()[number];
      walk.predict(number);
      walk.gather(number);
      BitsOut bits{left[which].raw.get()};
      std::uint16_t* whole = left[which].escapes.get();
      for (std::size_t t = 0; t < count; ++t) {
        const std::size_t at = done + t * part.width;
        distances[t] = run.split(part, walk.values(t, part), walk.mu(t, part), walk.offsets()[t], symbols.get() + at,
                                 classes.get() + at, bits, whole);
      }
      raw_bytes[which] = static_cast<std::size_t>(bits.at - left[which].raw.get()) + (bits.fill != 0);
      escaped[which] = static_cast<std::size_t>(whole - left[which].escapes.get());
      if (bits.fill != 0) *bits.at = static_cast<std::uint8_t>(bits.left);
      sums.add(run, walk.values(0, part), count * part.width);
      parts.push_back({symbols.get() + done, count * part.width, classes.get() + done, count * part.width});
      done += count * part.width;
      walk.advance(number, distances.data());
    }
    Side& mine = sides[layer];
    const std::size_t fields[] = {kMode, raw_bytes[0], raw_bytes[1], escaped[0], escaped[1], sums.a, sums.b};
    for (std::size_t i = 0; i < 7; ++i) store32(mine.header + 4 * i, static_cast<std::uint32_t>(fields[i]));
    mine.begin = side.size();
    for (std::size_t which = 0; which < 2; ++which)
      side.insert(side.end(), left[which].raw.get(), left[which].raw.get() + raw_bytes[which]);
    for (std::size_t which = 0; which < 2; ++which) {
      const std::size_t at = side.size();
      side.resize(at + 2 * escaped[which]);
      for (std::size_t i = 0; i < escaped[which]; ++i) store16(side.data() + at + 2 * i, left[which].escapes.get()[i]);
    }
  }

  // The stream is written behind the place of all else, then each layer's words move to where they belong: forwards,
  // so that nothing is overwritten that is still to be moved.
  const std::size_t before = layers * kHeader + side.size();
  if (before >= limit) return kFallBack;
  std::vector<std::size_t> ends(parts.size());
  const std::int64_t length =
      before >= capacity ? rans::kNoRoom
                         : rans::encode(model.tables(), parts.data(), parts.size(), out + before,
                                        capacity - before, ends.data(), level);
  if (length < 0) return capacity >= limit ? kFallBack : kNoRoom;
  if (before + static_cast<std::size_t>(length) >= limit) return kFallBack;
  const std::uint8_t* const stream = out + before;
  std::size_t from = 0;
  for (std::size_t layer = 0; layer < layers; ++layer) {
    const std::size_t bytes = (layer + 1 < layers ? sides[layer + 1].begin : side.size()) - sides[layer].begin;
    const std::size_t words = ends[2 * layer + 1] - from;
    std::memcpy(out, sides[layer].header, kHeader);
    if (bytes != 0) std::memcpy(out + kHeader, side.data() + sides[layer].begin, bytes);
    std::memmove(out + kHeader + bytes, stream + from, words);
    from += words;
    sizes[layer] = kHeader + bytes + words;
    out += sizes[layer];
  }
  return 0;
}

namespace {

// One layer's bytes, cut up.
struct Section {
  const std::uint8_t* raw[2];
  std::size_t raw_bytes[2];
  EscapesIn escapes[2];
  const std::uint8_t* words;
  std::size_t words_bytes;
  std::uint32_t a, b;

  const char* cut(const std::uint8_t* in, std::size_t nbytes, const Part* parts, std::size_t count) {
    if (nbytes < kHeader) return "predictive: a layer ends in its header";
    if (load32(in) != kMode) return "predictive: a layer of another mode";
    std::size_t left = nbytes - kHeader;
    const std::uint8_t* at = in + kHeader;
    for (std::size_t which = 0; which < 2; ++which) {
      raw[which] = at;
      raw_bytes[which] = load32(in + 4 + 4 * which);
      if (raw_bytes[which] > left) return "predictive: a layer is shorter than its header says";
      if (raw_bytes[which] > (count * parts[which].width * kMostRaw + 7) / 8)
        return "predictive: raw bits or escapes are left over";
      at += raw_bytes[which];
      left -= raw_bytes[which];
    }
    for (std::size_t which = 0; which < 2; ++which) {
      const std::size_t escaped = load32(in + 12 + 4 * which);
      if (escaped > left / 2) return "predictive: a layer is shorter than its header says";
      escapes[which] = {at, at + 2 * escaped};
      at += 2 * escaped;
      left -= 2 * escaped;
    }
    words = at;
    words_bytes = left;
    a = load32(in + 20);
    b = load32(in + 24);
    return nullptr;
  }
};

}  // namespace

const char* decode(const Model& model, const Block& block, const std::uint8_t* payload, std::size_t nbytes,
                   const std::uint64_t* sizes, std::size_t wanted, Level level) {
  if (!predictable(model, block)) return "predictive: positions that the profile does not know";
  const std::size_t count = block.count, layers = model.parts().size() / 2;
  std::vector<Section> sections(layers);
  std::size_t total = 0;
  for (std::size_t layer = 0; layer < layers; ++layer) {
    if (sizes[layer] > nbytes) return "predictive: layers longer than the payload";
    const auto size = static_cast<std::size_t>(sizes[layer]);
    const char* const wrong = sections[layer].cut(payload, size, model.parts().data() + 2 * layer, count);
    if (wrong) return wrong;
    total += sections[layer].words_bytes;
    payload += size;
    nbytes -= size;
  }
  if (nbytes != 0) return "predictive: bytes after the last layer";
  if (total > rans::bound(values_of(model, count))) return "predictive: a damaged stream";

  const PlainFloats floats;
  const Kernels& run = kernels(level);
  Walk walk(model, block, run);
  const Buffer<std::uint8_t> stream(total), symbols(walk.most_values()), classes(walk.most_values());
  const std::size_t most_raw = (walk.most_values() * kMostRaw + 7) / 8;
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
    Sums sums;
    for (std::size_t which = 0; which < 2; ++which) {
      const std::size_t number = 2 * layer + which;
      const Part& part = model.parts()[number];
      const std::size_t values = count * part.width, raw_bytes = section.raw_bytes[which];
      walk.predict(number);
      for (std::size_t t = 0; t < count; ++t)
        run.classes(part, walk.mu(t, part), walk.offsets()[t], classes.get() + t * part.width);
      if (decoder.part(classes.get(), values, symbols.get(), values, level) != 0)
        return "predictive: a damaged stream";
      if (raw_bytes != 0) std::memcpy(raw.get(), section.raw[which], raw_bytes);
      // A damaged stream may ask for more bits than there are; it finds zeros until this is noticed, a row later.
      const std::size_t beyond = (part.width * kMostRaw + 7) / 8 + kSlack;
      std::memset(raw.get() + raw_bytes, 0, std::min(beyond, most_raw + kSlack - raw_bytes));
      BitsIn bits{raw.get(), 0};
      for (std::size_t t = 0; t < count; ++t) {
        const bool good = run.join(part, symbols.get() + t * part.width, walk.mu(t, part), walk.offsets()[t], bits,
                                   section.escapes[which], walk.values(t, part), &distances[t]);
        if (!good) return "predictive: a value that no number has, or too few escapes";
        if (bits.at > 8 * raw_bytes) return "predictive: too few raw bits";
      }
      if ((bits.at + 7) / 8 != raw_bytes || section.escapes[which].at != section.escapes[which].end)
        return "predictive: raw bits or escapes are left over";
      sums.add(run, walk.values(0, part), values);
      walk.scatter(number, wanted);
      walk.advance(number, distances.data());
    }
    if (sums.a != section.a || sums.b != section.b) return "predictive: what was decoded is not what was encoded";
  }
  return decoder.finish() == 0 ? nullptr : "predictive: a damaged stream";
}

bool residuals(const Model& model, const Block& block, std::uint8_t* const* symbols, std::uint8_t* const* classes,
               std::int32_t* const* offsets, Level level) {
  if (!predictable(model, block)) return false;
  const PlainFloats floats;
  const Kernels& run = kernels(level);
  Walk walk(model, block, run);
  const Leftovers left(walk.most_values());
  std::vector<std::uint32_t> distances(block.count);
  for (std::size_t number = 0; number < model.parts().size(); ++number) {
    const Part& part = model.parts()[number];
    walk.predict(number);
    walk.gather(number);
    BitsOut bits{left.raw.get()};
    std::uint16_t* whole = left.escapes.get();
    for (std::size_t t = 0; t < block.count; ++t) {
      const std::size_t at = t * part.width;
      distances[t] = run.split(part, walk.values(t, part), walk.mu(t, part), walk.offsets()[t], symbols[number] + at,
                               classes[number] + at, bits, whole);
      offsets[number][t] = walk.offsets()[t];
    }
    walk.advance(number, distances.data());
  }
  return true;
}

}  // namespace kvstore::predict

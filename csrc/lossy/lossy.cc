#include "lossy/lossy.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "common/endian.h"
#include "lossy/scalar-inl.h"
#include "predictive/dispatch.h"
#include "rans/rans.h"

#undef KVSTORE_INLINE

namespace kvstore::lossy {
namespace {

using predict::Buffer;
using predict::clamped;
using predict::round_up;

constexpr int kFine = 16;  // states of rows are kept in so many parts of a quarter octave
constexpr int kLeastState = -32 * kFine, kMostState = 40 * kFine;
// Of a row: what it adds to the scales of its components.
constexpr int kLeastRow = kLeastState / kFine - 4 * kPlain;
constexpr int kMostRow = kMostState / kFine + 4 * (static_cast<int>(kShifts) - 1 - kPlain);
constexpr std::int64_t kPrior = std::int64_t{1} << kExpect;  // magnitudes of one that every row is taken to have had

// ---- bytes ----------------------------------------------------------------------------------------------------------

struct Header {
  std::size_t exact;
  int quarters[2];
  float steps[2];
};

float load_float(const std::uint8_t* from) {
  const std::uint32_t bits = load32(from);
  float v;
  std::memcpy(&v, &bits, sizeof v);
  return v;
}

const char* read(Header& header, const std::uint8_t* in, std::size_t nbytes) {
  if (nbytes < kHeader) return "lossy: a layer ends in its header";
  if (load32(in) != kMode) return "lossy: a layer of another mode";
  header.exact = load16(in + 4);
  for (std::size_t which = 0; which < 2; ++which) {
    const int quarters = static_cast<std::int16_t>(load16(in + 6 + 2 * which));
    const float step = load_float(in + 10 + 4 * which);
    if (!(step > 0 && step < kMostStep) || quarters < -kMostScale || quarters > kMostScale)
      return "lossy: steps that cannot be";
    header.quarters[which] = quarters;
    header.steps[which] = step;
  }
  return nullptr;
}

// One layer's bytes, cut up.
struct Section {
  const std::uint8_t* kept[2];
  const std::uint8_t* escapes;
  const std::uint8_t* escapes_end;
  const std::uint8_t* words;
  std::size_t words_bytes;

  const char* cut(const std::uint8_t* at, std::size_t left, std::size_t exact, const Part* parts) {
    std::uint64_t listed = 0;
    bool ended = false;
    for (unsigned shift = 0; shift < 35 && left != 0 && !ended; shift += 7, ++at, --left) {
      listed |= static_cast<std::uint64_t>(*at & 127) << shift;
      ended = *at < 128;
    }
    if (!ended) return "lossy: a layer ends in its count of escapes";
    for (std::size_t which = 0; which < 2; ++which) {
      const std::size_t bytes = 2 * exact * parts[which].sums.width;
      if (bytes > left) return "lossy: a layer ends in its exact rows";
      kept[which] = at;
      at += bytes;
      left -= bytes;
    }
    if (listed > left / 2) return "lossy: a layer ends in its escapes";
    escapes = at;
    escapes_end = words = at + 2 * listed;
    words_bytes = left - 2 * static_cast<std::size_t>(listed);
    return nullptr;
  }
};

// ---- scales of rows -------------------------------------------------------------------------------------------------

// What rows with the same offset of scales have in common: their coded components.
struct Kind {
  std::size_t count = 0;
  std::vector<std::uint32_t> which;
  std::vector<std::uint8_t> classes;  // those of V are kClasses higher
  std::int64_t mean = 0, slope = 0;  // sums of what is expected of them
};

// Those of a part; most have few.
class Kinds {
 public:
  explicit Kinds(const Model& model, std::size_t width) : model_(model), scale_(width) {}

  void begin(std::size_t number, int quarters) {
    model_.scales(number, quarters, scale_.data());
    width_ = model_.parts()[number].sums.width;
    for (std::size_t j = 0; j < width_; ++j) scale_[j] = static_cast<std::int16_t>(scale_[j] - quarters - kLeast);
    first_ = number % 2 ? static_cast<int>(kClasses) : 0;
    std::fill(std::begin(place_), std::end(place_), kNone);
    made_ = 0;
  }

  // Good until `begin`.
  const Kind& of(int row) {
    std::size_t& place = place_[row - kLeastRow];
    if (place == kNone) {
      place = made_++;
      if (made_ > kinds_.size()) kinds_.emplace_back();
      make(kinds_[place], row);
    }
    return kinds_[place];
  }

 private:
  static constexpr std::size_t kNone = SIZE_MAX;

  void make(Kind& kind, int row) const {
    if (kind.which.size() < width_) {
      kind.which.resize(width_);
      kind.classes.resize(width_);
    }
    const Expect* const expect = model_.expect();
    std::uint32_t* const which = kind.which.data();
    std::uint8_t* const classes = kind.classes.data();
    std::int64_t mean = 0, slope = 0;
    std::size_t count = 0;
    for (std::size_t j = 0; j < width_; ++j) {
      const int found = std::min(scale_[j] + row, static_cast<int>(kClasses) - 1);
      if (found < 0) continue;
      which[count] = static_cast<std::uint32_t>(j);
      classes[count++] = static_cast<std::uint8_t>(found + first_);
      mean += expect[found + first_].mean;
      slope += expect[found + first_].slope;
    }
    kind.count = count;
    kind.mean = mean;
    kind.slope = slope;
  }

  const Model& model_;
  std::vector<std::int16_t> scale_;
  std::size_t width_ = 0, made_ = 0;
  int first_ = 0;
  std::size_t place_[kMostRow - kLeastRow + 1];
  std::vector<Kind> kinds_;
};

// About 16 * log2(v) of 1 .. 2^40; between powers of two by a straight line.
std::int64_t log2_sixteenths(std::int64_t v) {
  const int top = 63 - __builtin_clzll(static_cast<unsigned long long>(v));
  return 16 * top + ((v << 4) >> top) - 16;
}

// The state of a row for the next part. magnitudes: what those of its numbers add up to.
int following(const Part& next, int state, const Kind& kind, std::int64_t magnitudes) {
  const std::int64_t expected = kind.mean + kPrior, slope = (kind.slope + kPrior / 16) << 8;
  const std::int64_t octaves = log2_sixteenths((magnitudes << kExpect) + kPrior) - log2_sixteenths(expected);
  const std::int64_t up = octaves * expected * 177, floor = up / slope - (up < 0 && up % slope != 0);
  const auto found = static_cast<int>(std::clamp<std::int64_t>(floor, -32 * kFine, 32 * kFine));
  const int error = ((state + kFine / 2) >> 4) * kFine + found - state;
  return clamped((next.adapt[0] * state + next.adapt[1] * error + next.adapt[2] + 128) >> 8, kLeastState, kMostState);
}

// ---- values ---------------------------------------------------------------------------------------------------------

// A number beyond what symbols say: of a row, at a place among its coded components.
struct Escape {
  std::size_t row, place;
  std::int16_t number;
};

// The values of the first tokens of a block, part after part.
class Walk {
 public:
  Walk(const Model& model, const Block& block, std::size_t exact, std::size_t wanted, Level level)
      : model_(model),
        block_(block),
        exact_(std::min(exact, wanted)),
        wanted_(wanted),
        run_(kernels(level)),
        predict_(predict::kernels(level)),
        widest_(widest(model)),
        sums_(round_up(wanted, kTile) * widest_),
        values_(round_up(wanted, kTile) * widest_),
        x_(kTile * widest_),
        tile_(kTile * widest_),
        any_(widest_),
        which_(widest_),
        angles_(2 * wanted * model.base().half()),
        turns_(2 * wanted * model.base().half()) {
    std::fill_n(sums_.get(), round_up(wanted, kTile) * widest_, 0);
    const std::vector<predict::Part>& parts = model.base().parts();
    for (std::size_t i = 0; i < 6; ++i) {
      std::size_t row = 0;
      for (std::size_t p = i; p < parts.size(); p += 6) row = std::max(row, stride(parts[p].width));
      inputs_.emplace_back(wanted * row);
      std::fill_n(inputs_.back().get(), wanted * row, std::uint8_t{0});  // also where no column is
    }
    const std::size_t half = model.base().half();
    for (std::size_t t = 0; t < wanted && half != 0; ++t) {
      std::int32_t* const cos = angles_.get() + 2 * t * half;
      model.base().angles(block.start + static_cast<std::int64_t>(t), cos, cos + half);
      for (std::size_t j = 0; j < 2 * half; ++j)
        turns_.get()[2 * t * half + j] = static_cast<float>(cos[j]) / 16384.0f;
    }
    const std::size_t width = parts[0].width + parts[1].width, row = stride(width);
    inputs_.emplace_back(wanted * row);
    std::fill_n(inputs_.back().get(), wanted * row, std::uint8_t{0});
    for (std::size_t t = 0; t < wanted; ++t) {
      const std::int8_t* const from = model.base().token(block.tokens[t]);
      std::uint8_t* const to = inputs_.back().get() + t * row;
      for (std::size_t j = 0; j < width; ++j) {
        const int in = (from == nullptr ? 0 : from[j]) + 128;
        if (predict_.input_bytes == 1)
          to[j] = static_cast<std::uint8_t>(in);
        else
          reinterpret_cast<std::uint16_t*>(to)[j] = static_cast<std::uint16_t>(in);
      }
    }
  }

  // Makes the sums of a part's predictions.
  void predict(std::size_t number) {
    const predict::Part& part = model_.parts()[number].sums;
    if (number < 2) {
      for (std::size_t t = 0; t < wanted_; ++t) look_up(number, t);
      return;
    }
    predict::Inputs from{};
    for (std::size_t i = 0; i < part.inputs.size(); ++i) {
      const bool token = part.inputs[i] == model_.parts().size();
      from.rows[i] = inputs_[token ? 6 : part.inputs[i] % 6].get();
      from.stride[i] = stride(token ? model_.parts()[0].sums.width + model_.parts()[1].sums.width
                                    : model_.parts()[part.inputs[i]].sums.width);
    }
    predict_.sums(part, model_.weight(model_.parts()[number]), from, wanted_, sums_.get());
  }

  // Before a tile's rows.
  void clear(std::size_t width) {
    std::fill_n(tile_.get(), kTile * width, 0.0f);
    std::fill_n(steps_, kTile, 0.0f);
  }

  // A row of the tile: what its symbols stand for. escapes: of this row.
  void put(const Part& part, std::size_t row, const Kind& kind, const std::uint8_t* symbols, float step,
           const Escape* escapes, const Escape* end) {
    float* const to = tile_.get() + row * part.sums.width;
    const float* const values = model_.values();
    const std::uint32_t* const which = kind.which.data();
    const std::uint8_t* const classes = kind.classes.data();
    for (std::size_t i = 0; i < kind.count; ++i) to[which[i]] = values[std::size_t{classes[i]} << 8 | symbols[i]];
    for (; escapes != end; ++escapes) to[which[escapes->place]] = static_cast<float>(escapes->number);
    steps_[row] = step;
  }

  // Makes bf16 of the tile that begins with this row.
  void finish(std::size_t number, std::size_t begin) {
    const Part& part = model_.parts()[number];
    const predict::Part& base = model_.base().parts()[number];
    run_.scale(tile_.get(), part.component.data(), part.sums.width, steps_, any_.get());
    std::size_t used = 0;
    for (std::size_t k = 0; k < part.sums.width; ++k) {
      which_.get()[used] = static_cast<std::uint32_t>(k);
      used += any_.get()[k];
    }
    run_.values(part, {tile_.get(), which_.get(), used}, sums_.get() + begin * part.sums.padded, x_.get());
    const std::size_t half = base.rotated ? model_.base().half() : 0;
    for (std::size_t t = begin; t < std::min(begin + kTile, wanted_); ++t) {
      const float* const cos = turns_.get() + 2 * t * half;
      run_.round(x_.get() + (t - begin) * part.sums.padded, part.sums.width, {cos, cos + half, half},
                 values_.get() + t * part.sums.width);
    }
  }

  // Hands over what was decoded of a part; kept: its exact rows.
  void take(std::size_t number, const std::uint8_t* kept) {
    const Part& part = model_.parts()[number];
    const predict::Part& base = model_.base().parts()[number];
    const std::size_t width = base.width, half = model_.base().half();
    for (std::size_t i = 0; i < exact_ * width; ++i)
      values_.get()[i] = static_cast<std::uint16_t>(load16(kept + 2 * i));
    for (std::size_t t = 0; part.used && t < wanted_; ++t) {
      const std::int32_t* const cos = angles_.get() + 2 * t * half;
      predict_.inputs(base, values_.get() + t * width, {cos, cos + half, half},
                      inputs_[number % 6].get() + t * stride(width));
    }
    scatter(number);
  }

 private:
  static std::size_t widest(const Model& model) {
    std::size_t found = 0;
    for (const Part& part : model.parts()) found = std::max(found, part.sums.padded);
    return found;
  }

  std::size_t stride(std::size_t width) const { return round_up(width, predict::kGroup) * predict_.input_bytes; }

  void look_up(std::size_t number, std::size_t row) {
    const predict::Part& part = model_.parts()[number].sums;
    std::int32_t* const to = sums_.get() + row * part.padded;
    const std::int8_t* from = model_.base().token(block_.tokens[row]);
    if (from == nullptr) {
      std::fill_n(to, part.width, 0);
      return;
    }
    if (number) from += model_.parts()[0].sums.width;
    for (std::size_t j = 0; j < part.width; ++j) to[j] = 256 * from[j];
  }

  void scatter(std::size_t number) const {
    const predict::Part& part = model_.base().parts()[number];
    const Rows& place = block_.rows[number];
    const std::uint16_t* row = values_.get();
    for (std::size_t t = 0; t < wanted_; ++t) {
      const std::int64_t before = place.token_stride * static_cast<std::int64_t>(t);
      std::uint64_t address = place.address + static_cast<std::uint64_t>(before);
      for (std::size_t head = 0; head < part.heads; ++head, row += part.dim) {
        std::memcpy(reinterpret_cast<void*>(address), row, 2 * part.dim);
        address += static_cast<std::uint64_t>(place.head_stride);
      }
    }
  }

  const Model& model_;
  const Block& block_;
  std::size_t exact_, wanted_;
  const Kernels& run_;
  const predict::Kernels& predict_;
  std::size_t widest_;
  Buffer<std::int32_t> sums_;
  Buffer<std::uint16_t> values_;
  Buffer<float> x_, tile_;  // of a tile of rows: values; components
  float steps_[kTile] = {};
  Buffer<std::uint32_t> any_, which_;
  Buffer<std::int32_t> angles_;
  Buffer<float> turns_;  // the same in floating point
  std::vector<Buffer<std::uint8_t>> inputs_;  // of the last six parts, and the tokens'
};

// ---- a part ---------------------------------------------------------------------------------------------------------

// The rows of a block that are coded, through all parts.
class Coded {
 public:
  Coded(const Model& model, std::size_t rows, std::size_t widest, const std::uint8_t* stream, std::size_t nbytes,
        Level level)
      : model_(model),
        rows_(rows),
        level_(level),
        decoder_(model.tables(), stream, nbytes),
        kinds_(model, widest),
        states_(rows, 0),
        shifts_(rows, kPlain),
        next_(rows),
        kind_(rows),
        begin_(rows + 1),
        escaped_(rows + 1),
        classes_(std::max(rows * widest, rows)),
        symbols_(rows * widest) {}

  // Takes a part from the stream, and its escapes from `section`.
  const char* part(std::size_t number, int quarters, Section& section) {
    for (std::size_t t = 0; t < rows_; ++t)
      classes_.get()[t] = static_cast<std::uint8_t>(2 * kClasses + shifts_[t]);
    if (decoder_.part(classes_.get(), rows_, next_.data(), rows_, level_) != 0) return "lossy: a damaged stream";
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
    if (decoder_.part(classes_.get(), all, symbols_.get(), all, level_) != 0) return "lossy: a damaged stream";
    const bool last = number + 1 == model_.parts().size();
    for (std::size_t t = 0; t < rows_; ++t) {
      escaped_[t] = places_.size();
      std::int64_t magnitudes = 0;
      if (!take(t, section, magnitudes)) return "lossy: too few or too many escapes";
      if (!last) states_[t] = following(model_.parts()[number + 1], states_[t], kind(t), magnitudes);
    }
    escaped_[rows_] = places_.size();
    if (number % 2 && section.escapes != section.escapes_end) return "lossy: too few or too many escapes";
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
  Buffer<std::uint8_t> classes_, symbols_;
  std::vector<Escape> places_;
};

void write(const Trace& trace, std::size_t number, std::size_t width, std::size_t exact, std::size_t rows,
           Coded& coded) {
  const int first = number % 2 ? static_cast<int>(kClasses) : 0;
  std::int16_t* numbers = trace.numbers[number];
  std::int8_t* classes = trace.classes[number];
  std::fill_n(numbers, (exact + rows) * width, std::int16_t{0});
  std::fill_n(classes, (exact + rows) * width, std::int8_t{-1});
  std::fill_n(trace.shifts[number], exact, static_cast<std::uint8_t>(kPlain));
  for (std::size_t t = 0; t < rows; ++t) {
    const Kind& kind = coded.kind(t);
    const std::size_t at = (exact + t) * width;
    trace.shifts[number][exact + t] = static_cast<std::uint8_t>(coded.shift(t));
    for (std::size_t i = 0; i < kind.count; ++i) {
      numbers[at + kind.which[i]] = static_cast<std::int16_t>(coded.symbols(t)[i] - kLargest);
      classes[at + kind.which[i]] = static_cast<std::int8_t>(kind.classes[i] - first);
    }
    for (const Escape* e = coded.escapes(t); e != coded.escapes(t + 1); ++e)
      numbers[at + kind.which[e->place]] = e->number;
  }
}

}  // namespace

bool codable(const Model& model, std::size_t count) {
  double sum = 0;
  for (const Part& part : model.parts()) sum += static_cast<double>(part.sums.padded);
  return sum * static_cast<double>(count) < 1e9;
}

const char* decode(const Model& model, const Block& block, const std::uint8_t* payload, std::size_t nbytes,
                   const std::uint64_t* sizes, std::size_t wanted, Level level, const Trace* trace) {
  const std::int64_t positions = model.base().positions();
  const auto tokens = static_cast<std::int64_t>(block.count);
  if (tokens == 0 || block.start < 0 || tokens > positions || block.start > positions - tokens)
    return "lossy: positions that the profile does not know";
  const std::size_t count = block.count, layers = model.parts().size() / 2;
  Header header{};
  std::vector<Section> sections(layers);
  std::vector<std::uint8_t> stream;
  for (std::size_t layer = 0; layer < layers; ++layer) {
    if (sizes[layer] > nbytes) return "lossy: layers longer than the payload";
    const auto size = static_cast<std::size_t>(sizes[layer]);
    const std::size_t before = layer == 0 ? kHeader : 0;
    if (layer == 0) {
      if (const char* const wrong = read(header, payload, size)) return wrong;
      if (header.exact > count) return "lossy: more exact rows than rows";
    }
    Section& section = sections[layer];
    const Part* const pair = model.parts().data() + 2 * layer;
    if (const char* const wrong = section.cut(payload + before, size - before, header.exact, pair)) return wrong;
    payload += size;
    nbytes -= size;
  }
  if (nbytes != 0) return "lossy: bytes after the last layer";
  std::size_t total = 0, widest = 0;
  for (const Section& section : sections) total += section.words_bytes;
  stream.reserve(total);
  for (const Section& section : sections)
    stream.insert(stream.end(), section.words, section.words + section.words_bytes);
  for (const Part& part : model.parts()) widest = std::max(widest, part.sums.width);

  const predict::PlainFloats floats;
  const std::size_t exact = header.exact, rows = count - exact;
  Walk walk(model, block, exact, wanted, level);
  Coded coded(model, rows, widest, stream.data(), stream.size(), level);
  for (std::size_t number = 0; number < 2 * layers; ++number) {
    const Part& part = model.parts()[number];
    Section& section = sections[number / 2];
    if (const char* const wrong = coded.part(number, header.quarters[number % 2], section)) return wrong;
    walk.predict(number);
    for (std::size_t begin = 0; begin < wanted; begin += kTile) {
      walk.clear(part.sums.width);
      for (std::size_t t = std::max(begin, exact); t < std::min(begin + kTile, wanted); ++t) {
        const std::size_t row = t - exact;
        const float step = header.steps[number % 2] * std::ldexp(1.0f, kPlain - coded.shift(row));
        walk.put(part, t - begin, coded.kind(row), coded.symbols(row), step, coded.escapes(row),
                 coded.escapes(row + 1));
      }
      walk.finish(number, begin);
    }
    walk.take(number, section.kept[number % 2]);
    if (trace) write(*trace, number, part.sums.width, exact, rows, coded);
  }
  return coded.finish() ? nullptr : "lossy: a damaged stream";
}

}  // namespace kvstore::lossy

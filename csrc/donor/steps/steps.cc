#include "donor/steps/steps.h"

#include <algorithm>
#include <cfloat>
#include <cstdlib>
#include <cstring>

#include "common/endian.h"
#include "donor/dispatch.h"
#include "donor/rows.h"
#include "donor/steps/scalar-inl.h"
#include "predictive/dispatch.h"
#include "predictive/sections.h"

#undef KVSTORE_INLINE

namespace kvstore::donor::steps {
namespace {

using predict::Buffer;
using predict::Part;

constexpr int kMostSize = 400, kMostStep = 440, kReach = 40;
constexpr std::int64_t kPrior = 1 << 11;  // half a step, in the units of a row's state
constexpr float kSteps[] = {4096, 4871, 5793, 6889};  // 4096 * 2^(i / 4)

// Neighbouring channels of a head.
struct Group {
  std::size_t begin, size;
};

std::size_t widest(const Parts& parts) {
  std::size_t found = 0;
  for (const Part& part : parts) found = std::max(found, part.width);
  return found;
}

// What both directions do: the parts of a block in order, each with its donor's values, its steps, its classes, and how
// far off its rows are.
class Walk {
 public:
  Walk(const Coder& coder, const Parts& parts, const Block& block, int quarters, Level level)
      : run(kernels(level)),
        coder_(coder),
        parts_(parts),
        block_(block),
        quarters_(quarters),
        donor_(donor::kernels(level)),
        count_(covered(block)),
        mu_(count_ * widest(parts)),
        row_(widest(parts)),
        totals_(widest(parts)),
        steps_(widest(parts)),
        inverse_(widest(parts)),
        found_(count_),
        shifts_(count_) {}

  std::size_t count() const { return count_; }
  const std::uint16_t* mu(std::size_t row) const { return mu_.get() + row * width_; }
  const float* steps() const { return steps_.get(); }
  const float* inverse() const { return inverse_.get(); }
  const std::vector<Group>& groups() const { return groups_; }
  // Of each group; to be filled in.
  std::vector<std::uint8_t>& classes() { return classes_[number_ % 2]; }
  int shift(std::size_t row) const { return shifts_[row]; }
  // Of coded channels: where they stand, their classes less one.
  std::size_t coded() const { return places_.size(); }
  const std::vector<Group>& coded_groups() const { return coded_groups_; }
  const std::uint32_t* places() const { return places_.data(); }
  const std::uint8_t* scales() const { return scales_.data(); }

  // Begins a part.
  void begin(std::size_t number) {
    number_ = number;
    const Part& part = parts_[number];
    width_ = part.width;
    load(donor_, block_, part, number, row_.get(), mu_.get());
    groups_.clear();
    for (std::size_t head = 0; head < part.heads; ++head)
      for (std::size_t j = 0; j < part.dim; j += kChannels)
        groups_.push_back({head * part.dim + j, std::min(kChannels, part.dim - j)});
    measure_steps();
    for (std::size_t t = 0; t < count_; ++t) {
      const std::int64_t found = (found_[t] + kPrior) * 65536;
      int shift = kLeastShift;
      for (const std::int64_t bound : coder_.bounds) shift += found >= bound * (expected_ + kPrior);
      shifts_[t] = static_cast<std::int8_t>(shift);
    }
    context_ = 0;
    if (number >= 2) {  // classes() still holds those of two parts before
      std::size_t sum = 0;
      const std::size_t n = classes().size();
      for (const std::uint8_t c : classes()) sum += c;
      context_ = static_cast<std::uint8_t>((2 * sum + n) / (2 * n));
    }
    classes().resize(groups_.size());
  }

  // The table that the part's classes are coded with; good until the next part.
  const std::uint8_t* context() const { return &context_; }

  // The classes are known.
  void take_classes() {
    places_.clear();
    scales_.clear();
    coded_groups_.clear();
    std::int64_t sum = 0;
    for (std::size_t g = 0; g < groups_.size(); ++g) {
      const std::uint8_t c = classes()[g];
      if (c == 0) continue;
      coded_groups_.push_back(groups_[g]);
      for (std::size_t i = 0; i < groups_[g].size; ++i) {
        places_.push_back(static_cast<std::uint32_t>(groups_[g].begin + i));
        scales_.push_back(static_cast<std::uint8_t>(c - 1));
      }
      sum += coder_.expected[c - 1] * static_cast<std::int64_t>(groups_[g].size);
    }
    expected_ += sum - (expected_ >> 2);
  }

  // What the magnitudes of a row's symbols add up to.
  void take_row(std::size_t row, std::int64_t magnitudes) {
    found_[row] += magnitudes * 4096 - (found_[row] >> 2);
  }

  // Calls visit(row among those covered, row of the block) for each.
  template <class Visit>
  void each_row(Visit visit) const {
    std::size_t t = 0;
    for (std::size_t s = 0; s < block_.number; ++s)
      for (std::size_t i = 0; i < block_.spans[s].count; ++i, ++t) visit(t, block_.spans[s].start + i);
  }

  const Kernels& run;

 private:
  // From the sums of absolute values: of each channel over the rows, then of each group over its channels.
  void measure_steps() {
    std::fill_n(steps_.get(), width_, 1.0f);
    std::fill_n(inverse_.get(), width_, 0.0f);
    if (quarters_ == kNothing) return;
    std::fill_n(totals_.get(), width_, 0.0f);
    for (std::size_t t = 0; t < count_; ++t) run.add(mu(t), width_, totals_.get());
    sizes_.clear();
    int most = -kMostSize;
    for (const Group& group : groups_) {
      float sum = 0;
      for (std::size_t i = 0; i < group.size; ++i) sum += totals_.get()[group.begin + i];
      const int size = predict::log2_quarters(sum / static_cast<float>(count_ * group.size));
      sizes_.push_back(predict::clamped(size, -kMostSize, kMostSize));
      most = std::max(most, sizes_.back());
    }
    std::int64_t sum = 0;
    for (int& size : sizes_) {
      size = std::max(size, most - kReach);
      sum += size;
    }
    const auto all = static_cast<std::int64_t>(sizes_.size());
    const int mean = static_cast<int>(sum / all - (sum % all < 0));  // rounded down
    for (std::size_t g = 0; g < groups_.size(); ++g) {
      const int found = predict::clamped(((sizes_[g] + mean) >> 1) + quarters_, -kMostStep, kMostStep);
      const float step = kSteps[found & 3] * as_float(static_cast<std::uint32_t>((found >> 2) - 12 + 127) << 23);
      std::fill_n(steps_.get() + groups_[g].begin, groups_[g].size, step);
      std::fill_n(inverse_.get() + groups_[g].begin, groups_[g].size, 16 / step);
    }
  }

  const Coder& coder_;
  const Parts& parts_;
  const Block& block_;
  int quarters_;
  const donor::Kernels& donor_;
  std::size_t count_, number_ = 0, width_ = 0;
  Buffer<std::uint16_t> mu_, row_;
  Buffer<float> totals_, steps_, inverse_;
  std::vector<Group> groups_, coded_groups_;
  std::vector<int> sizes_;
  std::vector<std::uint8_t> classes_[2];  // of K and of V
  std::vector<std::int64_t> found_;       // of each row, and what was expected of it: 4096 times sums of magnitudes
  std::int64_t expected_ = 0;
  std::vector<std::int8_t> shifts_;
  std::uint8_t context_ = 0;
  std::vector<std::uint32_t> places_;
  std::vector<std::uint8_t> scales_;
};

// ---- encoding -------------------------------------------------------------------------------------------------------

// Symbols and their classes of a part of the stream.
struct Coded {
  std::vector<std::uint8_t> symbols, classes;
};

class Encoder {
 public:
  Encoder(const Coder& coder, const Parts& parts, const Block& block, int quarters, Level level)
      : coder_(coder),
        parts_(parts),
        block_(block),
        walk_(coder, parts, block, quarters, level),
        values_(walk_.count() * widest(parts)),
        numbers_(walk_.count() * widest(parts)),
        made_(widest(parts)) {}

  std::vector<Coded> coded;                        // classes and numbers of each part
  std::vector<std::vector<std::uint16_t>> escapes;  // of each layer
  bool any = false;                                // class that is not 0

  void run() {
    coded.resize(2 * parts_.size());
    escapes.resize(parts_.size() / 2);
    for (std::size_t number = 0; number < parts_.size(); ++number) part(number);
  }

  float largest() const { return largest_; }
  float mean_square() const {
    const double mean = squares_ / static_cast<double>(values_before_);
    return mean < static_cast<double>(FLT_MAX) ? static_cast<float>(mean) : FLT_MAX;
  }

 private:
  void part(std::size_t number) {
    walk_.begin(number);
    const std::size_t width = parts_[number].width;
    walk_.each_row([&](std::size_t t, std::size_t row) {
      std::uint16_t* const x = values_.get() + t * width;
      predict::copy_row<false>(parts_[number], block_.rows[number], row, x);
      walk_.run.quantise(x, walk_.mu(t), walk_.steps(), walk_.inverse(), width, numbers_.get() + t * width);
    });
    for (std::size_t g = 0; g < walk_.groups().size(); ++g) walk_.classes()[g] = class_of(walk_.groups()[g], width);
    walk_.take_classes();
    coded[2 * number] = {walk_.classes(), {*walk_.context()}};
    any = any || walk_.coded() != 0;
    Coded& to = coded[2 * number + 1];
    const std::size_t n = walk_.coded();
    to.symbols.resize(walk_.count() * n);
    to.classes.resize(walk_.count() * n);
    squares_of_.assign(width, 0.0);
    largest_of_.assign(width, 0);
    for (std::size_t t = 0; t < walk_.count(); ++t) {
      row(number, t, to.symbols.data() + t * n, to.classes.data() + t * n);
      walk_.run.errors(values_.get() + t * width, made_.get(), width, squares_of_.data(), largest_of_.data());
    }
    for (const double square : squares_of_) squares_ += square;
    for (const std::uint32_t error : largest_of_) largest_ = std::max(largest_, as_float(error));
    values_before_ += walk_.count() * width;
  }

  // Symbols and tables of a row, and what a decoder will make of it.
  void row(std::size_t number, std::size_t t, std::uint8_t* symbols, std::uint8_t* tables) {
    const std::size_t width = parts_[number].width, n = walk_.coded();
    const std::uint16_t* const x = values_.get() + t * width;
    std::int8_t* const numbers = numbers_.get() + t * width;
    walk_.run.tables(walk_.scales(), n, walk_.shift(t), tables);
    std::size_t at = 0;
    for (const Group& group : walk_.coded_groups()) {
      const std::int8_t* const from = numbers + group.begin;
      const int limit = coder_.limits[tables[at] - kClasses];  // a group has one table
      for (std::size_t i = 0; i < group.size; ++i) {
        const bool kept = std::abs(from[i]) > limit;
        symbols[at + i] = kept ? kEscape : static_cast<std::uint8_t>(from[i] + kLargest);
      }
      at += group.size;
    }
    std::uint8_t most = 0;
    walk_.take_row(t, walk_.run.measure(symbols, n, &most));
    walk_.run.restore(walk_.mu(t), numbers, walk_.steps(), width, made_.get());
    for (std::size_t i = 0; most == kEscape && i < n; ++i) {
      if (symbols[i] != kEscape) continue;
      const std::uint32_t place = walk_.places()[i];
      escapes[number / 2].push_back(x[place]);
      made_.get()[place] = x[place];
    }
  }

  // The class that takes the fewest bits; the first of several.
  std::uint8_t class_of(const Group& group, std::size_t width) const {
    std::int32_t counts[kShifts][kSizes] = {};
    bool zeros = true;
    for (std::size_t t = 0; t < walk_.count(); ++t) {
      const std::int8_t* const numbers = numbers_.get() + t * width + group.begin;
      std::int32_t* const row = counts[walk_.shift(t) - kLeastShift];
      std::uint64_t all = 0;
      std::memcpy(&all, numbers, group.size);
      if (all == 0) {  // as most rows are where little is coded
        row[0] += static_cast<std::int32_t>(group.size);
        continue;
      }
      zeros = false;
      for (std::size_t i = 0; i < group.size; ++i) ++row[std::abs(numbers[i])];
    }
    if (zeros) return 0;
    std::int64_t spent[kClasses - 1] = {};
    for (std::size_t s = 0; s < kShifts; ++s) {
      bool rows = false;
      for (const std::int32_t count : counts[s]) rows = rows || count != 0;
      for (std::size_t c = 0; rows && c < kClasses - 1; ++c) {
        const int scale = static_cast<int>(c + s) + kLeastShift;
        const std::int32_t* const costs = coder_.costs[predict::clamped(scale, 0, static_cast<int>(kScales) - 1)];
        for (std::size_t v = 0; v < kSizes; ++v) spent[c] += std::int64_t{counts[s][v]} * costs[v];
      }
    }
    return static_cast<std::uint8_t>(1 + (std::min_element(std::begin(spent), std::end(spent)) - spent));
  }

  const Coder& coder_;
  const Parts& parts_;
  const Block& block_;
  Walk walk_;
  Buffer<std::uint16_t> values_;
  Buffer<std::int8_t> numbers_;
  Buffer<std::uint16_t> made_;
  std::vector<double> squares_of_;
  std::vector<std::uint32_t> largest_of_;
  double squares_ = 0;
  float largest_ = 0;
  std::size_t values_before_ = 0;
};

// Bytes that end somewhere.
class Writer {
 public:
  Writer(std::uint8_t* out, std::size_t capacity) : at_(out), left_(capacity) {}

  bool full() const { return full_; }
  void bytes(const void* from, std::size_t count) {
    full_ = full_ || count > left_;
    if (full_ || count == 0) return;
    std::memcpy(at_, from, count);
    at_ += count;
    left_ -= count;
  }
  void byte(std::size_t value) {
    const auto one = static_cast<std::uint8_t>(value);
    bytes(&one, 1);
  }
  const std::uint8_t* at() const { return at_; }

 private:
  std::uint8_t* at_;
  std::size_t left_;
  bool full_ = false;
};

// ---- decoding -------------------------------------------------------------------------------------------------------

// One layer's bytes.
struct Section {
  const std::uint8_t* escapes;
  std::size_t listed;
  const std::uint8_t* words;
  std::size_t words_bytes;

  const char* cut(const std::uint8_t* at, std::size_t left) {
    std::uint64_t count = 0;
    bool ended = false;
    for (unsigned shift = 0; shift < 35 && left != 0 && !ended; shift += 7, ++at, --left) {
      count |= static_cast<std::uint64_t>(*at & 127) << shift;
      ended = *at < 128;
    }
    if (!ended) return "donor: a layer ends in its count of escapes";
    if (count > left / 2) return "donor: a layer ends in its escapes";
    escapes = at;
    listed = static_cast<std::size_t>(count);
    words = at + 2 * listed;
    words_bytes = left - 2 * listed;
    return nullptr;
  }
};

const char* check_header(const std::uint8_t* in, std::size_t nbytes, int* quarters, std::uint32_t* flags) {
  if (nbytes < kHeader) return "donor: a payload ends in its header";
  *quarters = static_cast<std::int16_t>(load16(in));
  *flags = load16(in + 2);
  const bool known = *quarters == kNothing || std::abs(*quarters) <= kMostQuarters;
  if (!known || (*flags & ~kStream) != 0) return "donor: a step or flags that cannot be";
  for (std::size_t i = 0; i < 2; ++i)
    if (const float error = as_float(load32(in + 4 + 4 * i)); !(error >= 0 && error <= FLT_MAX))
      return "donor: errors that cannot be";
  return nullptr;
}

class Decoder {
 public:
  Decoder(const Coder& coder, const Parts& parts, const Block& block, int quarters, std::size_t wanted, Level level)
      : parts_(parts),
        block_(block),
        wanted_(wanted),
        level_(level),
        walk_(coder, parts, block, quarters, level),
        numbers_(widest(parts)),
        made_(widest(parts)),
        symbols_(walk_.count() * widest(parts)),
        tables_(walk_.count() * widest(parts)) {}

  // The next part. stream: null where all classes are 0.
  const char* part(std::size_t number, rans::Decoder* stream, Section& section) {
    walk_.begin(number);
    std::vector<std::uint8_t>& classes = walk_.classes();
    std::fill(classes.begin(), classes.end(), std::uint8_t{0});
    if (stream != nullptr && stream->part(walk_.context(), 1, classes.data(), classes.size(), level_) != 0)
      return "donor: the stream of symbols is damaged";
    walk_.take_classes();
    const std::size_t width = parts_[number].width, n = walk_.coded();
    for (std::size_t t = 0; t < walk_.count(); ++t)
      walk_.run.tables(walk_.scales(), n, walk_.shift(t), tables_.get() + t * n);
    const std::size_t all = walk_.count() * n;
    if (all != 0 && stream->part(tables_.get(), all, symbols_.get(), all, level_) != 0)
      return "donor: the stream of symbols is damaged";
    std::fill_n(numbers_.get(), width, std::int8_t{0});
    bool enough = true;
    walk_.each_row([&](std::size_t t, std::size_t to) {
      enough = enough && row(number, t, to, symbols_.get() + t * n, section);
    });
    return enough ? nullptr : "donor: too few escapes";
  }

 private:
  bool row(std::size_t number, std::size_t t, std::size_t to, const std::uint8_t* symbols, Section& section) {
    const std::size_t width = parts_[number].width, n = walk_.coded();
    std::uint8_t most = 0;
    walk_.take_row(t, walk_.run.measure(symbols, n, &most));
    const std::uint8_t* from = symbols;
    for (const Group& group : walk_.coded_groups()) {
      std::int8_t* const numbers = numbers_.get() + group.begin;
      if (group.size == kChannels)
        for (std::size_t i = 0; i < kChannels; ++i) numbers[i] = static_cast<std::int8_t>(from[i] - kLargest);
      else
        for (std::size_t i = 0; i < group.size; ++i) numbers[i] = static_cast<std::int8_t>(from[i] - kLargest);
      from += group.size;
    }
    if (to < wanted_) walk_.run.restore(walk_.mu(t), numbers_.get(), walk_.steps(), width, made_.get());
    for (std::size_t i = 0; most == kEscape && i < n; ++i) {
      if (symbols[i] != kEscape) continue;
      if (section.listed == 0) return false;
      made_.get()[walk_.places()[i]] = static_cast<std::uint16_t>(load16(section.escapes));
      section.escapes += 2;
      --section.listed;
    }
    if (to < wanted_) predict::copy_row<true>(parts_[number], block_.rows[number], to, made_.get());
    return true;
  }

  const Parts& parts_;
  const Block& block_;
  std::size_t wanted_;
  Level level_;
  Walk walk_;
  Buffer<std::int8_t> numbers_;
  Buffer<std::uint16_t> made_;
  Buffer<std::uint8_t> symbols_, tables_;
};

}  // namespace

bool encode(const Coder& coder, const Parts& parts, const Block& block, int quarters, std::uint8_t* out,
            std::size_t capacity, std::uint64_t* sizes, Level level) {
  const predict::PlainFloats plain;
  Encoder encoder(coder, parts, block, quarters, level);
  encoder.run();
  std::vector<rans::Part> list;
  std::size_t all = 0;
  constexpr std::uint8_t none = 0;
  for (const Coded& c : encoder.coded) {
    const bool some = !c.classes.empty();
    list.push_back({c.symbols.data(), c.symbols.size(), some ? c.classes.data() : &none, some ? c.classes.size() : 1});
    all += c.symbols.size();
  }
  std::vector<std::size_t> ends(list.size(), 0);
  Buffer<std::uint8_t> stream(encoder.any ? rans::bound(all) : 0);
  if (encoder.any)
    rans::encode(coder.tables, list.data(), list.size(), stream.get(), rans::bound(all), ends.data(), level);
  std::uint8_t head[kHeader];
  store16(head, static_cast<std::uint32_t>(quarters) & 0xffff);
  store16(head + 2, encoder.any ? kStream : 0);
  store32(head + 4, bits_of(encoder.largest()));
  store32(head + 8, bits_of(encoder.mean_square()));
  Writer writer(out, capacity);
  std::size_t begin = 0;
  for (std::size_t layer = 0; layer < parts.size() / 2; ++layer) {
    const std::uint8_t* const from = writer.at();
    if (layer == 0) writer.bytes(head, kHeader);
    const std::vector<std::uint16_t>& escapes = encoder.escapes[layer];
    std::size_t count = escapes.size();
    for (; count > 127; count >>= 7) writer.byte((count & 127) | 128);
    writer.byte(count);
    for (const std::uint16_t value : escapes) {
      writer.byte(value & 255);
      writer.byte(value >> 8);
    }
    writer.bytes(stream.get() + begin, ends[4 * layer + 3] - begin);
    begin = ends[4 * layer + 3];
    sizes[layer] = static_cast<std::uint64_t>(writer.at() - from);
  }
  return !writer.full();
}

const char* decode(const Coder& coder, const Parts& parts, const Block& block, const std::uint8_t* payload,
                   std::size_t nbytes, const std::uint64_t* sizes, std::size_t wanted, Level level) {
  const predict::PlainFloats plain;
  std::vector<Section> sections(parts.size() / 2);
  std::vector<std::uint8_t> words;
  int quarters = 0;
  std::uint32_t flags = 0;
  const std::uint8_t* at = payload;
  std::size_t left = nbytes;
  for (std::size_t layer = 0; layer < sections.size(); ++layer) {
    if (sizes[layer] > left) return "donor: layers are longer than the payload";
    const auto size = static_cast<std::size_t>(sizes[layer]), skip = layer == 0 ? kHeader : 0;
    if (layer == 0)
      if (const char* const wrong = check_header(at, size, &quarters, &flags)) return wrong;
    if (const char* const wrong = sections[layer].cut(at + skip, size - skip)) return wrong;
    words.insert(words.end(), sections[layer].words, sections[layer].words + sections[layer].words_bytes);
    at += size;
    left -= size;
  }
  if (left != 0) return "donor: the payload is longer than its layers";
  rans::Decoder stream(coder.tables, words.data(), words.size());
  Decoder decoder(coder, parts, block, quarters, wanted, level);
  std::size_t read = 0;
  for (std::size_t number = 0; number < parts.size(); ++number) {
    Section& section = sections[number / 2];
    if (const char* const wrong = decoder.part(number, flags & kStream ? &stream : nullptr, section)) return wrong;
    if (number % 2 == 0) continue;
    read += section.words_bytes;
    if (section.listed != 0 || (flags & kStream && stream.position() != static_cast<std::int64_t>(read)))
      return "donor: a layer's bytes are left over";
  }
  return stream.finish() == 0 ? nullptr : "donor: the stream of symbols is damaged";
}

}  // namespace kvstore::donor::steps

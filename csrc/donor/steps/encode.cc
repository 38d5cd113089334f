#include <algorithm>
#include <cfloat>
#include <cstdlib>
#include <cstring>

#include "common/endian.h"
#include "common/plain_floats.h"
#include "common/varint.h"
#include "donor/steps/walk.h"
#include "predictive/rows.h"

namespace kvstore::donor::steps {
namespace {

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
      if (all == 0) {  // as most rows are if little is coded
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

// Writes bytes until they no longer fit.
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

}  // namespace

bool encode(const Coder& coder, const Parts& parts, const Block& block, int quarters, std::uint8_t* out,
            std::size_t capacity, std::uint64_t* sizes, Level level) {
  const PlainFloats plain;
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
    put_varint(escapes.size(), [&](std::uint8_t byte) { writer.byte(byte); });
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

}  // namespace kvstore::donor::steps

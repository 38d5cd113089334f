#include <algorithm>
#include <cfloat>
#include <cstdlib>

#include "common/endian.h"
#include "common/plain_floats.h"
#include "common/varint.h"
#include "donor/steps/walk.h"
#include "predictive/rows.h"

namespace kvstore::donor::steps {
namespace {

// One layer's bytes.
struct Section {
  const std::uint8_t* escapes;
  std::size_t listed;
  const std::uint8_t* words;
  std::size_t words_bytes;

  const char* cut(const std::uint8_t* at, std::size_t left) {
    std::uint64_t count = 0;
    if (!take_varint(at, left, count)) return "a layer ends in its number of escapes";
    if (count > left / 2) return "a layer ends in its escapes";
    escapes = at;
    listed = static_cast<std::size_t>(count);
    words = at + 2 * listed;
    words_bytes = left - 2 * listed;
    return nullptr;
  }
};

const char* check_header(const std::uint8_t* in, std::size_t nbytes, int* quarters, std::uint32_t* flags) {
  if (nbytes < kHeader) return "the payload ends in its header";
  *quarters = static_cast<std::int16_t>(load16(in));
  *flags = load16(in + 2);
  const bool known = *quarters == kNothing || std::abs(*quarters) <= kMostQuarters;
  if (!known || (*flags & ~kStream) != 0) return "the step is out of range, or a flag is unknown";
  for (std::size_t i = 0; i < 2; ++i)
    if (const float error = as_float(load32(in + 4 + 4 * i)); !(error >= 0 && error <= FLT_MAX))
      return "the errors in the header must be finite and not negative";
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

  // The next part. stream: null if all classes are 0.
  const char* part(std::size_t number, rans::Decoder* stream, Section& section) {
    walk_.begin(number);
    std::vector<std::uint8_t>& classes = walk_.classes();
    std::fill(classes.begin(), classes.end(), std::uint8_t{0});
    if (stream != nullptr && stream->part(walk_.context(), 1, classes.data(), classes.size(), level_) != 0)
      return "the stream of symbols is damaged";
    walk_.take_classes();
    const std::size_t width = parts_[number].width, n = walk_.coded();
    for (std::size_t t = 0; t < walk_.count(); ++t)
      walk_.run.tables(walk_.scales(), n, walk_.shift(t), tables_.get() + t * n);
    const std::size_t all = walk_.count() * n;
    if (all != 0 && stream->part(tables_.get(), all, symbols_.get(), all, level_) != 0)
      return "the stream of symbols is damaged";
    std::fill_n(numbers_.get(), width, std::int8_t{0});
    bool enough = true;
    walk_.each_row([&](std::size_t t, std::size_t to) {
      enough = enough && row(number, t, to, symbols_.get() + t * n, section);
    });
    return enough ? nullptr : "there are too few escapes";
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

const char* decode(const Coder& coder, const Parts& parts, const Block& block, const std::uint8_t* payload,
                   std::size_t nbytes, const std::uint64_t* sizes, std::size_t wanted, Level level) {
  const PlainFloats plain;
  std::vector<Section> sections(parts.size() / 2);
  std::vector<std::uint8_t> words;
  int quarters = 0;
  std::uint32_t flags = 0;
  const std::uint8_t* at = payload;
  std::size_t left = nbytes;
  for (std::size_t layer = 0; layer < sections.size(); ++layer) {
    if (sizes[layer] > left) return "the layers are longer than the payload";
    const auto size = static_cast<std::size_t>(sizes[layer]), skip = layer == 0 ? kHeader : 0;
    if (layer == 0)
      if (const char* const wrong = check_header(at, size, &quarters, &flags)) return wrong;
    if (const char* const wrong = sections[layer].cut(at + skip, size - skip)) return wrong;
    words.insert(words.end(), sections[layer].words, sections[layer].words + sections[layer].words_bytes);
    at += size;
    left -= size;
  }
  if (left != 0) return "bytes follow the last layer";
  rans::Decoder stream(coder.tables, words.data(), words.size());
  Decoder decoder(coder, parts, block, quarters, wanted, level);
  std::size_t read = 0;
  for (std::size_t number = 0; number < parts.size(); ++number) {
    Section& section = sections[number / 2];
    if (const char* const wrong = decoder.part(number, flags & kStream ? &stream : nullptr, section)) return wrong;
    if (number % 2 == 0) continue;
    read += section.words_bytes;
    if (section.listed != 0 || (flags & kStream && stream.position() != static_cast<std::int64_t>(read)))
      return "bytes of a layer are left over";
  }
  return stream.finish() == 0 ? nullptr : "the stream of symbols is damaged";
}

}  // namespace kvstore::donor::steps

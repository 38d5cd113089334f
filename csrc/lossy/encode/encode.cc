#include <algorithm>
#include <cstring>
#include <vector>

#include "common/endian.h"
#include "common/plain_floats.h"
#include "common/varint.h"
#include "lossy/encode/rows.h"

namespace kvstore::lossy {
namespace {

constexpr std::int64_t kSinks = 4;  // kvstore.core.layout.SINKS: positions that are kept as they are

using Bytes = std::vector<std::uint8_t>;

void put16(Bytes& to, std::uint32_t value) {
  to.push_back(static_cast<std::uint8_t>(value));
  to.push_back(static_cast<std::uint8_t>(value >> 8));
}

void put32(Bytes& to, std::uint32_t value) {
  put16(to, value & 0xffff);
  put16(to, value >> 16);
}

Bytes header_of(const QuantisedRows& rows, const Steps& steps, std::size_t exact) {
  Bytes made;
  put32(made, kMode);
  put16(made, static_cast<std::uint32_t>(exact));
  for (const int quarters : steps.quarters) put16(made, static_cast<std::uint16_t>(quarters));
  for (const float size : steps.sizes) put32(made, bits_of(size));
  for (const float number : {rows.error(0), rows.error(1), rows.largest()}) put32(made, bits_of(number));
  return made;
}

// A layer's bytes before its words: how many escapes, exact rows, escapes.
Bytes kept_of(const QuantisedRows& rows, const Model& model, std::size_t layer, std::size_t exact,
              const CodedPart* pair) {
  Bytes made;
  put_varint(pair[1].escapes_end - pair[0].escapes_begin, [&](std::uint8_t byte) { made.push_back(byte); });
  for (std::size_t which = 0; which < 2; ++which)
    for (std::size_t i = 0; i < exact * model.parts()[2 * layer + which].sums.width; ++i)
      put16(made, rows.given(which)[i]);
  for (std::size_t i = pair[0].escapes_begin; i < pair[1].escapes_end; ++i)
    put16(made, static_cast<std::uint16_t>(rows.escapes()[i]));
  return made;
}

// The symbols of all parts as one stream; ends: of the words of each layer.
Bytes stream_of(const QuantisedRows& rows, const Model& model, const std::vector<CodedPart>& coded,
                std::vector<std::size_t>& ends, Level level) {
  std::vector<rans::Part> parts;
  for (const CodedPart& part : coded) {
    const auto add = [&](std::size_t begin, std::size_t end) {
      parts.push_back({rows.symbols() + begin, end - begin, rows.classes() + begin,
                       std::max<std::size_t>(end - begin, 1)});
    };
    add(part.shifts, part.symbols);
    add(part.symbols, part.end);
  }
  Bytes stream(rans::bound(coded.back().end));
  std::vector<std::size_t> all(parts.size());
  const std::int64_t size =
      rans::encode(model.tables(), parts.data(), parts.size(), stream.data(), stream.size(), all.data(), level);
  stream.resize(size < 0 ? 0 : static_cast<std::size_t>(size));
  for (std::size_t i = 3; i < all.size(); i += 4) ends.push_back(all[i]);
  return stream;
}

}  // namespace

int encode(const Encoder& encoder, const Block& block, const Steps& steps, std::uint8_t* out, std::size_t capacity,
           std::size_t limit, std::uint64_t* sizes, Level level) {
  const Model& model = encoder.model();
  const std::int64_t positions = model.base().positions();
  const auto tokens = static_cast<std::int64_t>(block.count);
  if (tokens == 0 || block.start < 0 || block.start >= positions) return kFallBack;
  if (tokens - 1 > (positions - 1 - block.start) / block.every) return kFallBack;
  const PlainFloats floats;
  const std::int64_t sinks = (kSinks - block.start + block.every - 1) / block.every;
  const auto exact = static_cast<std::size_t>(std::clamp<std::int64_t>(sinks, 0, tokens));
  QuantisedRows rows(encoder, block, exact, steps, level);
  const std::size_t layers = model.parts().size() / 2;
  std::vector<CodedPart> coded;
  std::vector<Bytes> kept;
  for (std::size_t layer = 0; layer < layers; ++layer) {
    if (!rows.load(layer)) return kFallBack;
    coded.push_back(rows.part(2 * layer));
    coded.push_back(rows.part(2 * layer + 1));
    kept.push_back(kept_of(rows, model, layer, exact, coded.data() + 2 * layer));
  }
  std::vector<std::size_t> ends;
  const Bytes stream = stream_of(rows, model, coded, ends, level), header = header_of(rows, steps, exact);
  std::size_t total = header.size() + stream.size();
  for (const Bytes& layer : kept) total += layer.size();
  if (total > limit) return kFallBack;
  if (total > capacity) return kNoRoom;
  std::size_t begin = 0;
  for (std::size_t layer = 0; layer < layers; ++layer) {
    const std::uint8_t* const from = out;
    if (layer == 0) out = std::copy(header.begin(), header.end(), out);
    out = std::copy(kept[layer].begin(), kept[layer].end(), out);
    out = std::copy_n(stream.data() + begin, ends[layer] - begin, out);
    begin = ends[layer];
    sizes[layer] = static_cast<std::uint64_t>(out - from);
  }
  return 0;
}

}  // namespace kvstore::lossy

// The bytes of a block's layers (FORMAT.md, "predictive"): what comes before the first layer, and of every layer exact
// rows, escapes and words of the rANS stream.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "common/endian.h"
#include "common/floats.h"
#include "common/varint.h"
#include "lossy/lossy.h"

namespace kvstore::lossy {

struct Header {
  std::size_t exact;
  int quarters[2];
  float steps[2];
};

// Null, or what is damaged.
inline const char* read(Header& header, const std::uint8_t* in, std::size_t nbytes) {
  if (nbytes < kHeader) return "the payload ends in its header";
  if (load32(in) != kMode) return "the payload is of another mode";
  header.exact = load16(in + 4);
  for (std::size_t which = 0; which < 2; ++which) {
    const int quarters = static_cast<std::int16_t>(load16(in + 6 + 2 * which));
    const float step = as_float(load32(in + 10 + 4 * which));
    if (!(step > 0 && step < kMostStep)) return "step sizes must be finite, positive and below 1e6";
    if (quarters < -kMostScale || quarters > kMostScale) return "quarter octaves of steps must be from -400 to 400";
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
    if (!take_varint(at, left, listed)) return "a layer ends in its number of escapes";
    for (std::size_t which = 0; which < 2; ++which) {
      const std::size_t bytes = 2 * exact * parts[which].sums.width;
      if (bytes > left) return "a layer ends in its exact rows";
      kept[which] = at;
      at += bytes;
      left -= bytes;
    }
    if (listed > left / 2) return "a layer ends in its escapes";
    escapes = at;
    escapes_end = words = at + 2 * listed;
    words_bytes = left - 2 * static_cast<std::size_t>(listed);
    return nullptr;
  }
};

// A payload cut up.
struct Layers {
  Header header{};
  std::vector<Section> sections;
  std::vector<std::uint8_t> stream;  // the words of all layers

  const char* cut(const Model& model, std::size_t count, const std::uint8_t* payload, std::size_t nbytes,
                  const std::uint64_t* sizes) {
    sections.resize(model.parts().size() / 2);
    std::size_t total = 0;
    for (std::size_t layer = 0; layer < sections.size(); ++layer) {
      if (sizes[layer] > nbytes) return "the layers are longer than the payload";
      const auto size = static_cast<std::size_t>(sizes[layer]);
      const std::size_t before = layer == 0 ? kHeader : 0;
      if (layer == 0) {
        if (const char* const wrong = read(header, payload, size)) return wrong;
        if (header.exact > count) return "the header lists more exact rows than the block has";
      }
      const Part* const pair = model.parts().data() + 2 * layer;
      if (const char* const wrong = sections[layer].cut(payload + before, size - before, header.exact, pair))
        return wrong;
      total += sections[layer].words_bytes;
      payload += size;
      nbytes -= size;
    }
    if (nbytes != 0) return "bytes follow the last layer";
    stream.reserve(total);
    for (const Section& section : sections)
      stream.insert(stream.end(), section.words, section.words + section.words_bytes);
    return nullptr;
  }
};

}  // namespace kvstore::lossy

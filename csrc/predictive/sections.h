// The bytes of a block's layers, as the predictive codec and the donor codec's exact core store them (FORMAT.md): a
// header, raw bits of K and V, escapes of K and V, and the layer's words of one rANS stream over all layers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "predictive/buffer.h"
#include "rans/rans.h"

namespace kvstore::predict {

// What the values of a part leave besides their symbols, in a buffer for the widest part of a block.
struct Leftovers {
  explicit Leftovers(std::size_t values) : raw((values * kMostRaw + 7) / 8), escapes(values) {}

  Buffer<std::uint8_t> raw;
  Buffer<std::uint16_t> escapes;
};

// The two sums over a layer's values.
struct Sums {
  std::uint32_t a = 0, b = 0;
  std::size_t before = 0;

  void add(const Kernels& kernels, const std::uint16_t* values, std::size_t count);
};

// Headers begin with the mode if there is one.
constexpr std::size_t header_bytes(std::uint32_t mode) { return mode == 0 ? 24 : 28; }

// What a layer has besides its words.
struct SideOut {
  std::size_t raw_bytes[2], escaped[2];  // of K, of V
  Sums sums;

  // Appends header, raw bits and escapes.
  void append(std::vector<std::uint8_t>& side, std::uint32_t mode, const Leftovers (&left)[2]) const;
};

// A layer, taken apart.
struct Section {
  const std::uint8_t* raw[2];
  std::size_t raw_bytes[2];
  EscapesIn escapes[2];
  const std::uint8_t* words;
  std::size_t words_bytes;
  std::uint32_t a, b;

  // most: values of K and of V. Returns what is damaged, or null.
  const char* cut(const std::uint8_t* in, std::size_t nbytes, const std::size_t (&most)[2], std::uint32_t mode);
};

// The bytes of a layer that are not words, before the words of all layers: puts them together, and the sizes. ends: of
// each layer, in `side` and in the stream; the stream stands at out + side.size().
void place_layers(const std::vector<std::uint8_t>& side, const std::vector<std::size_t>& ends_of_side,
                  const std::vector<std::size_t>& ends_of_words, std::uint8_t* out, std::uint64_t* sizes);

// Codes the parts of a block of `count` rows, in order.
class SectionsOut {
 public:
  // before: bytes that the first layer begins with, see before().
  SectionsOut(const Model& model, std::size_t count, std::uint32_t mode, std::size_t before = 0);

  // To be filled in with what the first layer begins with.
  std::uint8_t* before() { return side_.data(); }

  void part(const Kernels& run, const Predicted& predicted, const std::uint16_t* values);

  // Of each row of the last part: what its residuals add up to.
  const std::uint32_t* distances() const { return distances_.data(); }
  // Of all that is not words.
  std::size_t side_bytes() const { return side_.size(); }

  // Writes the rANS stream behind the place of all else. Returns the bytes of all layers, or rans::kNoRoom.
  std::int64_t code(const rans::Tables& tables, std::uint8_t* out, std::size_t capacity, Level level);
  // After `code`: writes the layers one after the other, and their sizes.
  void place(std::uint8_t* out, std::uint64_t* sizes) const;

 private:
  void end_layer();

  std::size_t count_;
  std::uint32_t mode_;
  Buffer<std::uint8_t> symbols_, classes_;
  std::size_t done_ = 0;  // symbols
  std::vector<rans::Part> parts_;
  std::vector<std::size_t> ends_;  // of each part in the stream
  std::vector<std::uint8_t> side_;
  std::vector<std::size_t> ends_of_side_;  // of each layer
  std::vector<std::uint32_t> distances_;
  // Of the layer that is being coded.
  Leftovers left_[2];
  SideOut out_{};
};

// The inverse. Returns what is damaged as a text, null if nothing is.
class SectionsIn {
 public:
  SectionsIn(const Model& model, std::size_t count, std::uint32_t mode) : model_(model), count_(count), mode_(mode) {}

  // Cuts the layers up. before: bytes that the first one begins with.
  const char* cut(const std::uint8_t* payload, std::size_t nbytes, const std::uint64_t* sizes, std::size_t before = 0);

  // Takes memory to work in; after `cut`.
  void begin();

  // Decodes part `number` to `values`; parts come in order.
  const char* part(const Kernels& run, std::size_t number, const Predicted& predicted, std::uint16_t* values,
                   Level level);
  const std::uint32_t* distances() const { return distances_.data(); }

  // After the parts of a layer: whether its values are those that were encoded.
  bool matches(std::size_t layer) const { return sums_.a == layers_[layer].a && sums_.b == layers_[layer].b; }
  // After the last part.
  const char* finish() const;

 private:
  // Decodes the rows of a part from `first` on, step by step.
  const char* rows(const Kernels& run, std::size_t first, const Predicted& predicted, BitsIn& bits, Section& section,
                   std::size_t which, std::uint16_t* values, Level level);

  const Model& model_;
  std::size_t count_;
  std::uint32_t mode_;
  std::vector<Section> layers_;
  std::size_t words_bytes_ = 0, most_raw_ = 0;
  std::optional<Buffer<std::uint8_t>> stream_, symbols_, classes_, raw_;
  std::optional<rans::Decoder> decoder_;
  std::vector<std::uint32_t> distances_;
  Sums sums_;
};

}  // namespace kvstore::predict

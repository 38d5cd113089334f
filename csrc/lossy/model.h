// What both sides of the lossy mode of the predictive codec know (FORMAT.md, "predictive"): the arrays of a calibration
// profile, checked and laid out for decoding. codecs/predictive/lossy_model.py says what each of them is.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "predictive/model.h"
#include "rans/rans.h"

namespace kvstore::lossy {

constexpr int kLeast = -24;           // quarter octaves of sigma / step of the first class
constexpr std::size_t kClasses = 48;  // of K, and as many of V
constexpr int kLargest = 127;         // a symbol is a magnitude with its sign and this
constexpr std::size_t kEscape = 255;
constexpr std::size_t kShifts = 8;    // of a row's step
constexpr int kPlain = 2;             // the one that leaves it as it is
constexpr int kExpect = 12;           // binary places of Expect
constexpr int kMostScale = 400;       // quarter octaves
constexpr std::size_t kMostLevels = 16;
constexpr std::size_t kKinds = 6;     // of inputs

// The arrays of one part as the profile has them. [C] each, unless something else is said.
struct PartArrays {
  unsigned uses;              // bit i: has inputs of the i-th kind; 0 in layer 0
  std::size_t inputs;
  const std::int8_t* weight;  // [inputs, C]; null in layer 0, as are the next two
  const float* out_scale;
  const std::int32_t* bias;
  const std::int8_t* basis;  // [C (component), C (value)]
  const float* component;
  const float* unit;
  const std::int16_t* scale;  // [levels, C]
  const std::int32_t* adapt;  // [3]
};

struct Arrays {
  predict::Arrays base;  // without weights and freqs
  std::vector<PartArrays> parts;
  std::size_t levels;
  const std::int16_t* steps;        // [levels, 2]: quarter octaves of the steps of K and V
  const std::uint16_t* freqs;       // [2 * kClasses, 256]
  const std::uint16_t* row_freqs;   // [kShifts, kShifts]
  const float* centroids;           // [2 * kClasses, kLargest + 1]
  const std::int32_t* expect;       // [2 * kClasses, 2]
};

// K or V of one layer.
struct Part {
  predict::Part sums;              // what sums are made with: the token's row has the number of parts as an input
  std::vector<float> out, bias;    // [padded]: a prediction is (sum + bias) * out
  std::vector<float> component;    // [C]
  std::vector<float> unit;         // [padded]
  std::vector<std::int8_t> basis;  // for every panel of columns, for every component, a row of the panel
  std::vector<std::int16_t> scale;
  std::int32_t adapt[3] = {};
  bool used = false;  // as an input of later parts
};

// The mean magnitude of a class, and by how much a quarter octave more raises it.
struct Expect {
  std::int32_t mean, slope;
};

// Immutable once built; any number of threads may use one.
class Model {
 public:
  // Copies everything. Throws std::invalid_argument that says which array is wrong and how.
  explicit Model(const Arrays& arrays);

  const predict::Model& base() const { return base_; }
  const std::vector<Part>& parts() const { return parts_; }
  const std::int8_t* weight(const Part& part) const { return lines_[part.sums.weights].bytes; }

  // Of classes of K, of classes of V, and of what codes the shift of a row after each other one.
  const rans::Tables& tables() const { return tables_; }

  // [2 * kClasses][256]: what symbols stand for, in steps; 0 for an escape.
  const float* values() const { return values_.data(); }
  const Expect* expect() const { return expect_.data(); }  // [2 * kClasses]

  // Quarter octaves of the components' standard deviations at a step (see lossy_rows.scale_at), to scale [C].
  void scales(std::size_t number, int quarters, std::int16_t* scale) const;

 private:
  void take_part(const Arrays& arrays, std::size_t number);
  void take_inputs(Part& part, const PartArrays& arrays, std::size_t number);

  predict::Model base_;
  std::vector<Part> parts_;
  predict::Lines lines_;
  rans::Tables tables_;
  std::vector<float> values_;
  std::vector<Expect> expect_;
  std::vector<std::int16_t> steps_;
};

}  // namespace kvstore::lossy

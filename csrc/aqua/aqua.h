// AQUA-KV's layers (codec 5): HIGGS on rows of a cache, and the predictions of rows. codecs/aqua/ says what the bytes
// are; every twin makes the same ones as the plain program there.
//
// A side is the keys or the values of a layer, bf16 [heads][tokens][dim], of which the first `sinks` tokens are left as
// they are and the others are rows of heads * dim numbers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "aqua/candidates.h"
#include "common/cpu.h"

namespace kvstore::aqua {

// How rows of a width are coded with so many bits a number. Immutable; thread-safe.
class Higgs {
 public:
  // signs: [width], 1 or -1. points: [4^bits][2]. Throws std::invalid_argument.
  Higgs(unsigned bits, std::vector<float> signs, std::vector<float> points);

  unsigned bits() const { return bits_; }
  std::size_t width() const { return signs_.size(); }
  std::size_t pairs() const { return (signs_.size() + 1) / 2; }
  std::size_t bytes(std::size_t rows) const { return 2 * rows + (rows * pairs() * 2 * bits_ + 7) / 8; }

  const float* signs() const { return signs_.data(); }
  const float* points() const { return points_.data(); }
  std::size_t count() const { return points_.size() / 2; }
  const Candidates& candidates() const { return candidates_; }  // of few points there are none: they are looked at
  std::size_t group() const { return group_; }
  float factor() const { return factor_; }

 private:
  unsigned bits_;
  std::vector<float> signs_, points_;
  std::size_t group_;
  float factor_;
  Candidates candidates_;
};

// A linear map with a constant. Immutable; thread-safe.
class Predictor {
 public:
  // weight: [inputs + 1][outputs], what is added last. Throws std::invalid_argument.
  Predictor(const float* weight, std::size_t inputs, std::size_t outputs);

  std::size_t inputs() const { return inputs_; }
  std::size_t outputs() const { return outputs_; }
  const float* panels() const { return panels_.data(); }

 private:
  std::size_t inputs_, outputs_;
  std::vector<float> panels_;
};

// Rotations of rows: of each `pairs` cosines and as many sines. None where pairs is 0.
struct Turns {
  const float* cos;
  const float* sin;
  std::size_t pairs;
};

struct Side {
  std::uint16_t* cache;
  std::size_t heads, tokens, dim, sinks;
  Turns turns;

  std::size_t rows() const { return tokens - sinks; }
  std::size_t width() const { return heads * dim; }
};

// Of `rows` rows of bf16 numbers, one part after the other, the predictions: [rows][outputs]. Inputs whose magnitude is
// below 2^-80 count as 0, so that all products are exact; of a row with one beyond 2^101 there is none, but NaN.
void predict(const Predictor& predictor, const float* const* parts, const std::size_t* widths, std::size_t count,
             std::size_t rows, float* out, Level twin);

// Codes what is left of a side's rows, rotated back, after `guess` ([rows][width]; null: nothing). Writes the coded
// rows to `out` and what a decoder has of them, rounded to bf16, to `found`. False: a number or scale is not finite.
bool encode(const Higgs& higgs, const Side& side, const float* guess, std::uint8_t* out, float* found, Level twin);

// The inverse: writes the rows of the side, and `found`. Null, or what is damaged.
const char* decode(const Higgs& higgs, const Side& side, const float* guess, const std::uint8_t* data, float* found,
                   Level twin);

// Rows by themselves, [rows][width]: the same without predictions and rotations.
bool encode_rows(const Higgs& higgs, const float* values, std::size_t rows, std::uint8_t* out, Level twin);
const char* decode_rows(const Higgs& higgs, const std::uint8_t* data, std::size_t rows, float* out, Level twin);

}  // namespace kvstore::aqua

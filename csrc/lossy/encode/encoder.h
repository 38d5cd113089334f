// The lossy mode of the predictive codec (FORMAT.md, "predictive"): encoding. The definition, with the same bytes, is
// codecs/predictive/lossy_reference.py.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "lossy/lossy.h"

namespace kvstore::lossy {

// What only the encoder has of one part. [C] is its width, [W] the values of its layer: K and V.
struct EncoderPartArrays {
  const float* analysis;     // [C (value), C (component)]: the inverse of the synthesis
  const float* focus;        // [W + 1]: see LossyPart.focus
  const std::int8_t* basis;  // [C (component), C (value)]
};

struct EncoderArrays {
  std::vector<EncoderPartArrays> parts;
  const float* price;   // [2 * kClasses, kLargest + 1]: of a magnitude, in squares of the step; infinite: none has it
  const float* escape;  // [2 * kClasses]: of an escape
  const float* centroids;  // [2 * kClasses, kLargest + 1]
};

// A model ready for encoding. Immutable once built; any number of threads may use one.
class Encoder {
 public:
  struct Part {
    std::size_t stride;  // of analysis and basis
    std::vector<float> analysis;
    std::vector<float> focus;
    std::vector<std::int8_t> basis;
  };

  // Copies the arrays. Throws std::invalid_argument that says which array is wrong and how.
  Encoder(std::shared_ptr<const Model> model, const EncoderArrays& arrays);

  const Model& model() const { return *model_; }
  const Part& part(std::size_t number) const { return parts_[number]; }
  const float* price(std::size_t of) const { return price_.data() + of * (kLargest + 1); }
  float escape(std::size_t of) const { return escape_[of]; }
  const float* centroids(std::size_t of) const { return centroids_.data() + of * (kLargest + 1); }

 private:
  std::shared_ptr<const Model> model_;
  std::vector<Part> parts_;
  std::vector<float> price_, escape_, centroids_;
};

// Of K and of V: sizes, and their quarter octaves.
struct Steps {
  float sizes[2];
  int quarters[2];
};

enum EncodeError : int {
  kNoRoom = -1,    // the layers are longer than `capacity`
  kFallBack = -2,  // they are longer than `limit`, a value is not finite, or the model does not know the positions
};

// Writes the layers of a block, one after the other, to out and their lengths to sizes [layers]. Returns 0 or an
// EncodeError; out is not touched then. Only what has `every` 1 can be decoded. Throws std::bad_alloc only.
int encode(const Encoder& encoder, const Block& block, const Steps& steps, std::uint8_t* out, std::size_t capacity,
           std::size_t limit, std::uint64_t* sizes, Level level);

}  // namespace kvstore::lossy

// What both sides of the predictive codec know (FORMAT.md, "predictive"): the arrays of a calibration profile, checked
// and laid out for the kernels.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "common/huge_pages.h"
#include "rans/rans.h"

namespace kvstore::predict {

constexpr std::size_t kClasses = 36;   // of K, and as many of V
constexpr std::size_t kSymbols = 193;  // distances -96..95, and the escape
constexpr int kOffset = 96;
constexpr int kEscape = 192;
constexpr int kTableBits = 12;   // of the tables of rANS
constexpr int kMostScale = 400;  // quarter octaves
constexpr std::size_t kFine = 128;           // positions of the fine table of angles
constexpr std::size_t kMostInputs = 1 << 16;  // so that sums of products fit 32 bits
constexpr std::size_t kMostParts = 6;          // that one is predicted from
constexpr std::int64_t kPositions = std::int64_t{1} << 31;  // without a rotation

constexpr std::size_t kVector = 16;             // columns of one vector of sums
constexpr std::size_t kPanel = 3 * kVector;     // columns that are summed together: their sums stay in registers
constexpr std::size_t kColumnsBytes = 64;       // alignment of weights and of arrays by column
constexpr std::size_t kGroup = 4;               // inputs whose weights lie together

constexpr std::size_t round_up(std::size_t n, std::size_t to) { return (n + to - 1) / to * to; }

struct alignas(kColumnsBytes) Line {
  std::int8_t bytes[kColumnsBytes];
};
using Lines = HugeVector<Line>;

// The dimensions of one layer.
struct LayerShape {
  std::size_t heads, key_dim, value_dim;
};

// The arrays of one part as the profile has them. [C] each, unless something else is said; null if a codec has none.
struct PartArrays {
  const float* in_scale = nullptr;      // null: ones
  const float* out_scale = nullptr;     // null: ones
  const std::int16_t* scale = nullptr;  // null: zeros, as the next two
  const std::int32_t* bias = nullptr;
  const std::int32_t* adapt = nullptr;  // [3]
  const std::int8_t* fix = nullptr;     // null: no rotation
  const std::int8_t* weight = nullptr;  // [inputs, C]; null for layer 0
};

struct Arrays {
  const char* codec = "predictive";  // named by errors
  std::vector<LayerShape> layers;
  std::vector<PartArrays> parts;              // K_0, V_0, K_1, ...
  const std::int8_t* token_kv = nullptr;      // [vocabulary, C of K_0 + C of V_0]
  std::size_t vocabulary = 0;
  const std::uint16_t* freqs = nullptr;       // [2 * kClasses, kSymbols]; null: no coding, only residuals
  const std::int16_t* rope_fine = nullptr;    // [2, kFine, half], null if nothing is rotated
  const std::int16_t* rope_coarse = nullptr;  // [2, coarse, half]
  std::size_t coarse = 0;
  bool weights = true;  // false: no part has any, and only layer 0 can be predicted
  std::size_t reach = 2;  // layers before, 1 or 2, that a part is predicted from
};

// K or V of one layer. Arrays by column are padded to whole lines.
struct Part {
  std::size_t width = 0;   // C
  std::size_t padded = 0;  // C in whole vectors: how long a row of sums is
  std::size_t heads = 0;
  std::size_t dim = 0;
  bool value = false;
  bool rotated = false;
  std::int32_t adapt[3] = {};
  std::vector<float> in_scale, out_scale;
  std::vector<float> to_fixed, from_fixed;  // 2^fix, 2^-(fix + 14)
  std::vector<std::int16_t> scale;
  std::vector<std::int32_t> bias;    // of inputs that are 128 too large, if there are weights
  std::vector<std::size_t> inputs;   // the parts that this one is predicted from
  std::vector<std::size_t> groups;   // of each of `inputs`: how many times four columns
  std::size_t depth = 0;             // sum of groups
  std::size_t weights = 0;           // where the weights begin in Model::lines(), see weight()
};

// Lays out weights, [sum of widths, C], for the kernels (see Model::weight): appends them to `lines`, makes `groups`,
// `depth` and `weights` of a part, and corrects its bias for inputs that are 128 too large. widths: of each of
// part.inputs.
void pack(Part& part, const std::vector<std::size_t>& widths, const std::int8_t* weight, Lines& lines);

// Immutable once built; any number of threads may use one.
class Model {
 public:
  // Copies everything. Throws std::invalid_argument that says which array is wrong and how.
  explicit Model(const Arrays& arrays);

  const std::vector<Part>& parts() const { return parts_; }
  std::size_t width() const { return width_; }    // of all parts
  std::size_t widest() const { return widest_; }  // the most columns of a part's sums

  // The weights of a part: for every panel of up to kPanel columns, for every group of four inputs, for every column
  // of the panel, four weights. Columns are padded to whole vectors, the inputs of each part to whole groups.
  const std::int8_t* weight(const Part& part) const { return lines_[part.weights].bytes; }

  // The row of a token in the table of layer 0; null for tokens that are not in it.
  const std::int8_t* token(std::int64_t token) const {
    if (token < 0 || static_cast<std::uint64_t>(token) >= vocabulary_) return nullptr;
    return token_kv_.data() + static_cast<std::size_t>(token) * (parts_[0].width + parts_[1].width);
  }

  bool codes() const { return tables_.count() != 0; }
  const rans::Tables& tables() const { return tables_; }

  // Blocks whose tokens do not all lie in 0 .. positions - 1 cannot be predicted.
  std::int64_t positions() const { return positions_; }
  std::size_t half() const { return half_; }  // angles of a position; 0 if nothing is rotated
  // cos and sin of a position, `half` each, in 1/16384.
  void angles(std::int64_t position, std::int32_t* cos, std::int32_t* sin) const;

 private:
  void take_part(const Arrays& arrays, std::size_t number);
  void take_scales(Part& part, const Arrays& arrays, std::size_t number);
  void take_fix(Part& part, const Arrays& arrays, std::size_t number);
  void take_weight(Part& part, const Arrays& arrays, std::size_t number);
  void take_rope(const Arrays& arrays);
  void take_freqs(const Arrays& arrays);

  std::vector<Part> parts_;
  std::size_t width_ = 0, widest_ = 0;
  Lines lines_;
  std::vector<std::int8_t> token_kv_;
  std::size_t vocabulary_ = 0;
  rans::Tables tables_;
  std::vector<std::int16_t> fine_, coarse_;
  std::size_t half_ = 0;
  std::int64_t positions_ = kPositions;
};

// Whether so many tokens of the model's widths are few enough to be coded at once.
inline bool codable(const Model& model, std::size_t count) {
  double sum = 0;
  for (const Part& part : model.parts()) sum += static_cast<double>(part.padded);
  return sum * static_cast<double>(count) < 1e9;
}

}  // namespace kvstore::predict

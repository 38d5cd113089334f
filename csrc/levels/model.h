// What both sides of a level of the exact predictor know (FORMAT.md, "Levels"): the arrays of a profile, checked and
// laid out for the kernels. Columns stand in the order in which they are coded.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "predictive/model.h"
#include "rans/rans.h"

namespace kvstore::levels {

constexpr std::size_t kColumns = 16;              // of a group
constexpr std::size_t kSteps = kColumns / 4;      // of four inputs that the kernels multiply at once
constexpr std::size_t kMostPanel = 3;             // groups whose sums are made together
constexpr std::size_t kMostWidth = 1 << 14;       // with the next, so that sums of products fit 32 bits
constexpr std::size_t kMostInputs = 1 << 15;
constexpr std::size_t kMostSlots = 5;             // parts that one is predicted from
constexpr int kMostShift = 24;

// The arrays of one part, in coding order; [C] each, unless something else is said.
struct PartArrays {
  const std::int8_t* fix = nullptr;
  const std::int16_t* gain = nullptr;
  const std::int16_t* narrow = nullptr;
  const std::int8_t* shift = nullptr;
  const std::int32_t* bias = nullptr;
  const std::int16_t* scale = nullptr;
  const std::int32_t* adapt = nullptr;  // [3]
  const std::int16_t* row = nullptr;    // layer 0 alone
  const std::int8_t* weight = nullptr;  // [inputs, C]; null if there are none
  const std::int8_t* groups = nullptr;  // [packed_size(C)]; null in layer 0
};

struct Arrays {
  int level = 0;
  bool rotated = false;  // K
  std::vector<predict::LayerShape> layers;
  std::vector<PartArrays> parts;          // K_0, V_0, K_1, ...
  const std::int8_t* token_kv = nullptr;  // [vocabulary, C of K_0 + C of V_0], as in the cache
  std::size_t vocabulary = 0;
  const std::uint16_t* freqs = nullptr;  // [2 * predict::kClasses, predict::kSymbols]
  const std::int16_t* rope_fine = nullptr;
  const std::int16_t* rope_coarse = nullptr;
  std::size_t coarse = 0;
};

constexpr std::size_t groups_of(std::size_t width) { return (width + kColumns - 1) / kColumns; }
// The weights from group to group.
std::size_t packed_size(std::size_t width);
// The parts that part `number` is predicted from, in the order of its weights.
std::vector<std::size_t> inputs_of(int level, std::size_t number);

// The numbers of one group's columns, as kernels take them: a line for two rows, or for one of 32 bits. Columns that
// there are not have zeros.
struct alignas(64) Group {
  std::int16_t scale[2 * kColumns];
  std::int16_t gain[2 * kColumns], narrow[2 * kColumns];
  std::int32_t shift[kColumns];
  std::int32_t bias[kColumns];  // of inputs that are 128 too large
  float to_fixed[kColumns];     // 2^fix: of its columns, or of eight pairs, twice
  float from_fixed[kColumns];   // 2^-fix, or 2^-(fix + 14)
  std::size_t width;            // columns
  std::size_t weights;          // where those from the groups before begin in Model::lines
};

struct Part {
  std::size_t number = 0, width = 0, heads = 0, dim = 0;
  bool value = false, rotated = false;
  std::int32_t adapt[3] = {};
  std::vector<Group> groups;
  std::vector<std::size_t> order;   // the column of the cache that each is
  std::vector<std::int16_t> row;    // layer 0
  std::vector<std::size_t> inputs;  // the parts that this one is predicted from
  std::vector<std::size_t> depths;  // groups of each of them
  std::size_t depth = 0;            // their sum
  std::size_t weights = 0;          // where those of the inputs begin, see Model::weight
};

// Immutable once built; any number of threads may use one.
class Model {
 public:
  // Copies everything. Throws std::invalid_argument that says which array is wrong and how.
  explicit Model(const Arrays& arrays);

  int level() const { return level_; }
  const std::vector<Part>& parts() const { return parts_; }
  std::size_t width() const { return width_; }          // of all parts
  std::size_t most_groups() const { return most_groups_; }  // of a part

  // For every panel of up to kMostPanel groups, for every group of the inputs, for every four of its columns, for every
  // column of the panel: four weights.
  const std::int8_t* weight(const Part& part) const { return lines_[part.weights].bytes; }
  // For every four columns of the groups before, for every column: four weights.
  const std::int8_t* weight(const Group& group) const { return lines_[group.weights].bytes; }

  // The numbers of a token as in the cache, K's, then V's; null for tokens that are not in the table.
  const std::int8_t* token(std::int64_t token) const {
    if (token < 0 || static_cast<std::uint64_t>(token) >= vocabulary_) return nullptr;
    return token_kv_.data() + static_cast<std::size_t>(token) * (parts_[0].width + parts_[1].width);
  }

  const rans::Tables& tables() const { return tables_; }
  // Blocks whose tokens do not all lie in 0 .. positions - 1 cannot be predicted.
  std::int64_t positions() const { return positions_; }
  std::size_t half() const { return half_; }  // angles of a position; 0 if nothing is rotated
  // cos and sin of a position, `half` each, in 1/16384.
  void angles(std::int64_t position, std::int16_t* cos, std::int16_t* sin) const;

 private:
  void take_rope(const Arrays& arrays);
  void take_part(const Arrays& arrays, std::size_t number);
  void take_groups(const Arrays& arrays, Part& part);
  void take_inputs(const Arrays& arrays, Part& part);
  void take_tokens(const Arrays& arrays);
  void add_weights(const std::int8_t* weight, Part& part);
  void take_freqs(const Arrays& arrays);

  int level_;
  std::vector<Part> parts_;
  std::size_t width_ = 0, most_groups_ = 0;
  predict::Lines lines_;
  std::vector<std::int8_t> token_kv_;
  std::size_t vocabulary_ = 0;
  rans::Tables tables_;
  std::vector<std::int16_t> fine_, coarse_;
  std::size_t half_ = 0;
  std::int64_t positions_ = predict::kPositions;
};

// Whether so many tokens are few enough to be coded at once.
inline bool codable(const Model& model, std::size_t count) {
  return static_cast<double>(model.width() + model.parts().size() * kColumns) * static_cast<double>(count) < 1e9;
}

}  // namespace kvstore::levels

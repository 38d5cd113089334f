// The entropy codec (FORMAT.md, "entropy"): values less the mean exponent and sign of their channel, by rANS. A layer
// that this makes no smaller is coded by splitzip.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "common/rows.h"
#include "rans/rans.h"
#include "splitzip/splitzip.h"

namespace kvstore::entropy {

inline constexpr std::size_t kClasses = 16;  // of keys, and as many of values
inline constexpr std::size_t kRelative = 24;
inline constexpr std::size_t kEscape = 2 * kRelative << 2;
inline constexpr std::size_t kSymbols = kEscape + 1;

// The tables, made ready. Immutable once built; any number of threads may use one.
class Model {
 public:
  // freqs, costs: [2][kClasses][kSymbols], keys first. False if the frequencies do not add up, or the symbols of a
  // sign that a class knows are not neighbours.
  bool build(const std::uint16_t* freqs, const std::uint16_t* costs);

  const rans::Tables& tables() const { return tables_; }
  // [kSymbols][kClasses] costs of keys (0) or values (1).
  const std::uint16_t* costs(std::size_t kind) const { return costs_[kind]; }
  // The first symbol that a class knows with a sign, and how many more; kEscape and 0 if there is none.
  std::uint8_t begin(std::size_t kind, std::size_t k, std::size_t sign) const { return begin_[kind][k][sign]; }
  std::uint8_t width(std::size_t kind, std::size_t k, std::size_t sign) const { return width_[kind][k][sign]; }

 private:
  rans::Tables tables_;
  alignas(64) std::uint16_t costs_[2][kSymbols * kClasses];  // a symbol's costs are one aligned load
  std::uint8_t begin_[2][kClasses][2];
  std::uint8_t width_[2][kClasses][2];
};

// As splitzip's functions of these names.
std::size_t usual(const splitzip::Shape& shape, std::size_t layer);
std::size_t encode(const Model& model, const splitzip::Shape& shape, const Rows* source, std::uint8_t* out,
                   std::size_t capacity, std::uint64_t* sizes, Level level);
const char* decode(const Model& model, const splitzip::Shape& shape, const std::uint8_t* payload, std::size_t nbytes,
                   const std::uint64_t* sizes, const Rows* target, std::size_t wanted, Level level);

}  // namespace kvstore::entropy

// The donor codec's step mode (FORMAT.md, "donor"): bf16 rows as those of the same tokens in other blocks plus
// whole numbers of steps, coded by rANS; lossy. codecs/donor/steps_reference.py is this as a program.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "common/cpu.h"
#include "donor/donor.h"
#include "predictive/model.h"
#include "rans/rans.h"

namespace kvstore::donor::steps {

constexpr std::size_t kHeader = 12;
constexpr int kNothing = 0x7fff;  // for quarter octaves: no step
constexpr int kMostQuarters = 200;
constexpr std::uint32_t kStream = 1;  // flag

constexpr std::size_t kClasses = 16, kScales = 18, kSymbols = 32;
constexpr int kLargest = 15;
constexpr std::uint8_t kEscape = 2 * kLargest + 1;
constexpr int kLeastShift = -6, kMostShift = 8;
constexpr std::size_t kShifts = kMostShift - kLeastShift + 1;
constexpr std::size_t kSizes = kLargest + 2;  // magnitudes of numbers, and escapes

// The tables of the format (codecs/donor/steps_tables.py), which only Python makes. Immutable once built; any number
// of threads may use one.
struct Coder {
  rans::Tables tables;  // kClasses of classes, then kScales of numbers
  std::int32_t costs[kScales][kSizes];
  std::uint8_t limits[kScales];
  std::int64_t expected[kClasses - 1];
  std::int64_t bounds[kShifts - 1];
};

// K and V of every layer: heads, dim and width.
using Parts = std::vector<predict::Part>;

// Writes the layers one after the other to out and their sizes to sizes [layers]; false if they are longer than
// capacity. All of out may be overwritten. quarters: of the step, up to kMostQuarters or kNothing. Throws
// std::bad_alloc only.
bool encode(const Coder& coder, const Parts& parts, const Block& block, int quarters, std::uint8_t* out,
            std::size_t capacity, std::uint64_t* sizes, Level level);

// Writes the covered rows below `wanted` to block.rows; null, or what is damaged. Any payload is safe to give; what
// rows hold after damage is undefined. sizes: [layers].
const char* decode(const Coder& coder, const Parts& parts, const Block& block, const std::uint8_t* payload,
                   std::size_t nbytes, const std::uint64_t* sizes, std::size_t wanted, Level level);

}  // namespace kvstore::donor::steps

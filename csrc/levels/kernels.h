// The inner loops of the levels as a table of functions, and what they are called with. kernels() in levels/dispatch.h
// gives the table of a machine.
//
// They work on tiles: 16 columns of a group for all rows, row after row. Rows are padded to whole kRows; what stands in
// padding is never used for anything else.
#pragma once

#include <cstddef>
#include <cstdint>

#include "common/simd.h"
#include "levels/model.h"
#include "predictive/kernels.h"

namespace kvstore::levels {

constexpr std::size_t kRows = 8;
constexpr std::size_t kDistances = 8;  // numbers of a pair of rows whose sums over four are the rows' distances

// Rows of a tile. n: those that there are. padded: whole kRows.
struct RowCount {
  std::size_t n, padded;
};

// Rotations of rows: of each `stride` pairs (cos, -sin), (sin, cos); from `begin` on those of a group's eight pairs.
struct Turns {
  const std::int32_t* forward;
  const std::int32_t* across;
  std::size_t stride;
};

// What a group adds to its part's stream, or is read from it.
struct Coded {
  const std::int16_t* offsets;  // [padded][16]: of rows, each 16 times
  std::uint8_t* symbols;        // [padded][16]
  std::uint8_t* classes;        // [padded][16]
  std::uint64_t* distances;     // [padded / 2][kDistances]: is added to
};

// The rows of a block whose sums are made.
struct Summed {
  const std::uint8_t* inputs[kMostSlots];  // of each of the part's inputs, its tiles
  RowCount rows;
  std::int32_t* sums;  // where they go: [groups][padded][16]
};

struct Kernels {
  std::size_t input_bytes;  // of one input, and one residual: it is 128 too large, 0..255
  // Sums of a part without groups, bias included, of `count` blocks: what is read of the weights serves all of them.
  void (*sums)(const Part& part, const std::int8_t* weight, const Summed* blocks, std::size_t count);
  // Predictions of group `number` in fixed point. sums: rows `stride` apart. residuals: tiles of the groups before.
  void (*group)(const Group& group, const std::int8_t* weight, std::size_t number, const std::int32_t* sums,
                std::size_t stride, const std::uint8_t* residuals, RowCount rows, std::int16_t* p);
  // Their upper 16 bits as fp32; turns: null if nothing is rotated.
  void (*predict)(const Group& group, const std::int16_t* p, const Turns* turns, RowCount rows, std::uint16_t* mu);
  // Values in fixed point.
  void (*fixed)(const Group& group, const std::uint16_t* x, const Turns* turns, RowCount rows, std::int16_t* u);
  // Inputs for later parts, and residuals for later groups, 128 too large.
  void (*inputs)(const Group& group, const std::int16_t* u, RowCount rows, std::uint8_t* inputs);
  void (*residuals)(const Group& group, const std::int16_t* u, const std::int16_t* p, RowCount rows,
                    std::uint8_t* residuals);
  void (*classes)(const Group& group, bool value, const std::uint16_t* mu, RowCount rows, const Coded& coded);
  // Writes symbols, classes, raw bits and escapes.
  void (*split)(const Group& group, bool value, const std::uint16_t* x, const std::uint16_t* mu, RowCount rows,
                const Coded& coded, predict::BitsOut& raw, std::uint16_t*& escapes);
  // The inverse. False: damaged. Raw bits beyond `most` read as they are in memory, which must reach kMostRaw bits a
  // value further.
  bool (*join)(const Group& group, const std::uint16_t* mu, RowCount rows, const Coded& coded, predict::BitsIn& raw,
               predict::EscapesIn& escapes, std::uint16_t* x);
  // `classes`, the symbols and `join` at once, of as many pairs of rows of a group of kColumns as the stream has words
  // for whatever they are. Returns how many rows; 0, and nothing but distances is changed, if one is damaged. Null
  // where it would be no faster.
  std::size_t (*decode)(const Group& group, bool value, const std::uint16_t* mu, RowCount rows,
                        const rans::Steps& stream, const Coded& coded, predict::BitsIn& raw,
                        predict::EscapesIn& escapes, std::uint16_t* x);
  // Multiplies and adds 8-bit numbers in registers, as fast as can be; returns how many. For benchmarks.
  std::uint64_t (*multiply)(std::uint64_t rounds);
};

}  // namespace kvstore::levels

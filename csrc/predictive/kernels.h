// The inner loops of the predictive codec as a table of functions, and what they are called with. kernels() in
// predictive/dispatch.h gives the table of a machine.
#pragma once

#include <cstddef>
#include <cstdint>

#include "common/endian.h"
#include "common/simd.h"
#include "predictive/model.h"
#include "rans/rans.h"

namespace kvstore::predict {

constexpr std::size_t kSlack = 64;  // bytes that kernels may read and write beyond a buffer's content
constexpr int kMostRaw = 10;        // raw bits of a value

// What the sums of a part are made of: for each of Part::inputs, the first row and the bytes from row to row.
struct Inputs {
  const std::uint8_t* rows[kMostParts];
  std::size_t stride[kMostParts];
};

struct BitsOut {
  std::uint8_t* at;         // whole bytes end here; kSlack bytes more are ours
  std::uint64_t left = 0;   // what follows them
  unsigned fill = 0;        // 0..7 bits

  // bits < 2^count, count <= 57 - fill
  KVSTORE_INLINE void put(std::uint64_t bits, unsigned count) {
    left |= bits << fill;
    fill += count;
    store32(at, static_cast<std::uint32_t>(left));
    store32(at + 4, static_cast<std::uint32_t>(left >> 32));
    at += fill >> 3;
    left >>= fill & ~7u;
    fill &= 7;
  }
};

struct BitsIn {
  const std::uint8_t* bytes;  // kSlack bytes more may be read
  std::size_t at;             // bits
};

// Values, predictions and offsets of the rows of a part, row after row. part: its width, scales, and whether of V.
struct Predicted {
  const Part& part;
  const std::uint16_t* mu;
  const std::int32_t* offsets;
};

struct EscapesIn {
  const std::uint8_t* at;
  const std::uint8_t* end;
};

// cos and sin of a row's position; unused if nothing is rotated.
struct Angles {
  const std::int32_t* cos;
  const std::int32_t* sin;
  std::size_t half;
};

// All but `sums` and `check` do one row of a part.
struct Kernels {
  std::size_t input_bytes;  // of one input of `sums`: it is 128 too large, 1..255
  // Predictions before scaling. sums: [n][part.padded]
  void (*sums)(const Part& part, const std::int8_t* weight, const Inputs& inputs, std::size_t n, std::int32_t* sums);
  // Their upper 16 bits as fp32.
  void (*predict)(const Part& part, const std::int32_t* sums, const Angles& angles, std::uint16_t* mu);
  void (*classes)(const Part& part, const std::uint16_t* mu, int offset, std::uint8_t* classes);
  // Writes symbols, classes, raw bits and escapes; returns the sum of the distances, each at most 255.
  std::uint32_t (*split)(const Part& part, const std::uint16_t* x, const std::uint16_t* mu, int offset,
                         std::uint8_t* symbols, std::uint8_t* classes, BitsOut& raw, std::uint16_t*& escapes);
  // The inverse. False: damaged. Reads at most kMostRaw bits a value, wherever they may end.
  bool (*join)(const Part& part, const std::uint8_t* symbols, const std::uint16_t* mu, int offset, BitsIn& raw,
               EscapesIn& escapes, std::uint16_t* x, std::uint32_t* distances);
  // `classes`, the symbols and `join` at once, of as many rows as the stream has words for whatever they are. Returns
  // how many; 0, and nothing is taken, if any of them is damaged or ends behind `most` raw bits. Null where it would be
  // no faster.
  std::size_t (*decode)(const Predicted& predicted, std::size_t count, const rans::Steps& stream, BitsIn& raw,
                        std::size_t most, EscapesIn& escapes, std::uint16_t* x, std::uint32_t* distances);
  void (*inputs)(const Part& part, const std::uint16_t* x, const Angles& angles, std::uint8_t* inputs);
  // a = sum of x[i], b = sum of (i + 1) * x[i]
  void (*check)(const std::uint16_t* x, std::size_t count, std::uint32_t* a, std::uint32_t* b);
};

KVSTORE_INLINE int clamped(int v, int least, int most) { return v < least ? least : v > most ? most : v; }

}  // namespace kvstore::predict

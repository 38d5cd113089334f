#include "aqua/aqua.h"

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstring>

#include "aqua/dispatch.h"
#include "common/checks.h"
#include "common/floats.h"
#include "common/plain_floats.h"

namespace kvstore::aqua {
namespace {

constexpr Checks kChecks("aqua");
constexpr std::size_t kMostGroup = 1024;  // values that are rotated together
constexpr std::uint16_t kNoScale = 0x7F80;  // as bf16: infinite; beyond are those that are no numbers, or negative

constexpr std::size_t kMany = 64;  // points; fewer are looked at faster than a list of some is found
constexpr std::uint32_t kNoNumber = 0x7FC00000;

// The sum of squares in the order in which numpy adds along the last axis, so that scales are the same.
double squares(const float* values, std::size_t count) {
  const auto square = [&](std::size_t i) { return static_cast<double>(values[i]) * static_cast<double>(values[i]); };
  if (count > 128) {
    const std::size_t half = count / 2 - count / 2 % 8;
    return squares(values, half) + squares(values + half, count - half);
  }
  if (count < 8) {
    double sum = -0.0;
    for (std::size_t i = 0; i < count; ++i) sum += square(i);
    return sum;
  }
  double part[8];
  for (std::size_t k = 0; k < 8; ++k) part[k] = square(k);
  std::size_t i = 8;
  for (; i + 8 <= count; i += 8)
    for (std::size_t k = 0; k < 8; ++k) part[k] += square(i + k);
  double sum = ((part[0] + part[1]) + (part[2] + part[3])) + ((part[4] + part[5]) + (part[6] + part[7]));
  for (; i < count; ++i) sum += square(i);
  return sum;
}

// Numbers of `bits` bits without gaps, first bits lowest.
void pack(const std::uint8_t* numbers, std::size_t count, unsigned bits, std::uint8_t* out) {
  if (bits == 8) {
    std::memcpy(out, numbers, count);
    return;
  }
  std::uint32_t word = 0;
  unsigned have = 0;
  for (std::size_t i = 0; i < count; ++i) {
    word |= static_cast<std::uint32_t>(numbers[i]) << have;
    for (have += bits; have >= 8; have -= 8, word >>= 8) *out++ = static_cast<std::uint8_t>(word);
  }
  if (have) *out = static_cast<std::uint8_t>(word);
}

void unpack(const std::uint8_t* data, std::size_t count, unsigned bits, std::uint8_t* numbers) {
  if (bits == 8) {
    std::memcpy(numbers, data, count);
    return;
  }
  std::uint32_t word = 0;
  unsigned have = 0;
  for (std::size_t i = 0; i < count; ++i, word >>= bits, have -= bits) {
    if (have < bits) {
      word |= static_cast<std::uint32_t>(*data++) << have;
      have += 8;
    }
    numbers[i] = static_cast<std::uint8_t>(word & ((1u << bits) - 1));
  }
}

void turn(float* row, std::size_t heads, std::size_t dim, const Turns& turns, std::size_t number, float sign) {
  const float* const cos = turns.cos + number * turns.pairs;
  const float* const sin = turns.sin + number * turns.pairs;
  for (std::size_t head = 0; head < heads; ++head, row += dim) {
    for (std::size_t i = 0; i < turns.pairs; ++i) {
      const float first = row[i], second = row[turns.pairs + i], c = cos[i], s = sign * sin[i];
      row[i] = first * c - second * s;
      row[turns.pairs + i] = second * c + first * s;
    }
  }
}

// What works on tiles: rows in, rows out.
class Tiles {
 public:
  Tiles(const Higgs& higgs, Level twin)
      : higgs_(higgs),
        kernels_(kernels(twin)),
        columns_(2 * higgs.pairs()),
        tile_(columns_ * kLanes),
        numbers_(higgs.pairs() * kLanes) {}

  // Codes `rows` rows, at most kLanes. numbers: [rows][pairs]. False: not finite.
  bool encode(const float* values, std::size_t rows, std::uint16_t* scales, std::uint8_t* numbers) {
    const std::size_t width = higgs_.width();
    float divisor[kLanes];
    for (std::size_t row = 0; row < rows; ++row) {
      const double mean = squares(values + row * width, width) / static_cast<double>(width);
      scales[row] = rounded_bits(static_cast<float>(std::sqrt(mean)));
      if (scales[row] >= kNoScale) return false;
      divisor[row] = scales[row] ? widened(scales[row]) : INFINITY;
    }
    const float* const signs = higgs_.signs();
    std::fill(tile_.begin(), tile_.end(), 0.0f);
    for (std::size_t row = 0; row < rows; ++row)
      for (std::size_t c = 0; c < width; ++c)
        tile_[c * kLanes + row] = values[row * width + c] / divisor[row] * signs[c];
    kernels_.hadamard(tile_.data(), width, higgs_.group(), higgs_.factor());
    nearest();
    for (std::size_t row = 0; row < rows; ++row)
      for (std::size_t pair = 0; pair < higgs_.pairs(); ++pair)
        numbers[row * higgs_.pairs() + pair] = numbers_[pair * kLanes + row];
    return true;
  }

  // Of the same numbers the rows, less their scales' rounding. Scales are finite and not negative.
  void decode(const std::uint16_t* scales, const std::uint8_t* numbers, std::size_t rows, float* values) {
    const std::size_t width = higgs_.width();
    for (std::size_t pair = 0; pair < higgs_.pairs(); ++pair)
      for (std::size_t row = 0; row < kLanes; ++row)
        numbers_[pair * kLanes + row] = row < rows ? numbers[row * higgs_.pairs() + pair] : std::uint8_t{0};
    kernels_.place(numbers_.data(), columns_, higgs_.points(), tile_.data());
    kernels_.hadamard(tile_.data(), width, higgs_.group(), higgs_.factor());
    const float* const signs = higgs_.signs();
    for (std::size_t row = 0; row < rows; ++row) {
      const float scale = widened(scales[row]);
      for (std::size_t c = 0; c < width; ++c) values[row * width + c] = tile_[c * kLanes + row] * signs[c] * scale;
    }
  }

 private:
  void nearest() {
    if (higgs_.candidates().empty())
      kernels_.nearest(tile_.data(), columns_, higgs_.points(), higgs_.count(), numbers_.data());
    else
      kernels_.nearest_of_many(tile_.data(), columns_, higgs_.points(), higgs_.count(), higgs_.candidates(),
                               numbers_.data());
  }

  const Higgs& higgs_;
  const Kernels& kernels_;
  std::size_t columns_;
  std::vector<float> tile_;
  std::vector<std::uint8_t> numbers_;
};

// The scales and numbers of coded rows; null, or what is damaged.
const char* read(const Higgs& higgs, const std::uint8_t* data, std::size_t rows, std::vector<std::uint16_t>& scales,
                 std::vector<std::uint8_t>& numbers) {
  scales.resize(rows);
  std::memcpy(scales.data(), data, 2 * rows);
  for (const std::uint16_t scale : scales)
    if (scale >= kNoScale) return "aqua: the scale of a row is negative or not finite";
  numbers.resize(rows * higgs.pairs());
  unpack(data + 2 * rows, numbers.size(), 2 * higgs.bits(), numbers.data());
  return nullptr;
}

// Rows of a side, at most kLanes from `begin`, rotated back, less `guess`.
void gather(const Side& side, const float* guess, std::size_t begin, std::size_t rows, float* out) {
  const std::size_t width = side.width();
  for (std::size_t row = 0; row < rows; ++row) {
    float* const to = out + row * width;
    for (std::size_t head = 0; head < side.heads; ++head) {
      const std::uint16_t* from = side.cache + (head * side.tokens + side.sinks + begin + row) * side.dim;
      for (std::size_t i = 0; i < side.dim; ++i) to[head * side.dim + i] = widened(from[i]);
    }
    if (side.turns.pairs) turn(to, side.heads, side.dim, side.turns, begin + row, -1.0f);
    for (std::size_t c = 0; c < width; ++c) to[c] -= guess ? guess[(begin + row) * width + c] : 0.0f;
  }
}

// The inverse, of rows with their guess; what is too large becomes the largest number.
void scatter(const Side& side, std::size_t begin, std::size_t rows, float* values) {
  const float largest = widened(0x7F7F);
  for (std::size_t row = 0; row < rows; ++row) {
    float* const from = values + row * side.width();
    if (side.turns.pairs) turn(from, side.heads, side.dim, side.turns, begin + row, 1.0f);
    for (std::size_t head = 0; head < side.heads; ++head) {
      std::uint16_t* to = side.cache + (head * side.tokens + side.sinks + begin + row) * side.dim;
      for (std::size_t i = 0; i < side.dim; ++i) {
        const float v = from[head * side.dim + i];
        to[i] = rounded_bits(v > largest ? largest : v < -largest ? -largest : v);
      }
    }
  }
}

// Adds `guess` to decoded rows, and rounds what comes out to `found`.
void complete(const float* guess, std::size_t count, float* values, float* found) {
  for (std::size_t i = 0; i < count; ++i) {
    values[i] = (guess ? guess[i] : 0.0f) + values[i];
    found[i] = widened(rounded_bits(values[i]));
  }
}

}  // namespace

Higgs::Higgs(unsigned bits, std::vector<float> signs, std::vector<float> points)
    : bits_(bits), signs_(std::move(signs)), points_(std::move(points)) {
  if (bits < 2 || bits > 4) kChecks.refuse("bits: expected 2, 3 or 4, found " + std::to_string(bits));
  if (signs_.empty()) kChecks.refuse("signs: a row has no numbers");
  for (const float sign : signs_)
    if (sign != 1.0f && sign != -1.0f) kChecks.refuse("signs: expected 1 and -1");
  if (points_.size() != std::size_t{2} << (2 * bits)) kChecks.refuse("points: another number than the bits have");
  for (const float point : points_)
    if (!std::isfinite(point)) kChecks.refuse("points: numbers must be finite");
  group_ = std::min(signs_.size() & (~signs_.size() + 1), kMostGroup);
  factor_ = static_cast<float>(std::pow(static_cast<double>(group_), -0.5));
  if (count() >= kMany) candidates_ = Candidates(points_.data(), count());
}

Predictor::Predictor(const float* weight, std::size_t inputs, std::size_t outputs)
    : inputs_(inputs), outputs_(outputs), panels_((outputs + kLanes - 1) / kLanes * kLanes * (inputs + 1)) {
  for (std::size_t i = 0; i < (inputs + 1) * outputs; ++i)
    if (!(std::fabs(weight[i]) <= 65504)) kChecks.refuse("weights: expected finite fp16 numbers");
  for (std::size_t i = 0; i <= inputs; ++i)
    for (std::size_t c = 0; c < outputs; ++c)
      panels_[c / kLanes * kLanes * (inputs + 1) + i * kLanes + c % kLanes] = weight[i * outputs + c];
}

void predict(const Predictor& predictor, const float* const* parts, const std::size_t* widths, std::size_t count,
             std::size_t rows, float* out, Level twin) {
  const PlainFloats plain;
  std::vector<float> x(rows * predictor.inputs());
  for (std::size_t part = 0, at = 0; part < count; at += widths[part++]) {
    for (std::size_t row = 0; row < rows; ++row) {
      for (std::size_t i = 0; i < widths[part]; ++i) {
        const std::uint32_t bits = bits_of(parts[part][row * widths[part] + i]), exponent = bits >> 23 & 0xFF;
        const std::uint32_t known = exponent < 127 - 80 ? 0u : bits & 0xFFFF0000u;
        x[row * predictor.inputs() + at + i] = as_float(exponent > 127 + 100 ? kNoNumber : known);
      }
    }
  }
  kernels(twin).predict(x.data(), rows, predictor.inputs(), predictor.panels(), predictor.outputs(), out);
}

bool encode(const Higgs& higgs, const Side& side, const float* guess, std::uint8_t* out, float* found, Level twin) {
  const PlainFloats plain;
  const std::size_t rows = side.rows(), width = higgs.width();
  if (rows == 0) return true;
  Tiles tiles(higgs, twin);
  std::vector<float> values(kLanes * width);
  std::vector<std::uint16_t> scales(rows);
  std::vector<std::uint8_t> numbers(rows * higgs.pairs());
  for (std::size_t begin = 0; begin < rows; begin += kLanes) {
    const std::size_t part = std::min(kLanes, rows - begin);
    std::uint8_t* const coded = numbers.data() + begin * higgs.pairs();
    gather(side, guess, begin, part, values.data());
    if (!tiles.encode(values.data(), part, scales.data() + begin, coded)) return false;
    tiles.decode(scales.data() + begin, coded, part, values.data());
    complete(guess ? guess + begin * width : nullptr, part * width, values.data(), found + begin * width);
  }
  std::memcpy(out, scales.data(), 2 * rows);
  pack(numbers.data(), numbers.size(), 2 * higgs.bits(), out + 2 * rows);
  return true;
}

const char* decode(const Higgs& higgs, const Side& side, const float* guess, const std::uint8_t* data, float* found,
                   Level twin) {
  const PlainFloats plain;
  const std::size_t rows = side.rows(), width = higgs.width();
  if (rows == 0) return nullptr;
  std::vector<std::uint16_t> scales;
  std::vector<std::uint8_t> numbers;
  if (const char* const damaged = read(higgs, data, rows, scales, numbers)) return damaged;
  Tiles tiles(higgs, twin);
  std::vector<float> values(kLanes * width);
  for (std::size_t begin = 0; begin < rows; begin += kLanes) {
    const std::size_t part = std::min(kLanes, rows - begin);
    tiles.decode(scales.data() + begin, numbers.data() + begin * higgs.pairs(), part, values.data());
    complete(guess ? guess + begin * width : nullptr, part * width, values.data(), found + begin * width);
    scatter(side, begin, part, values.data());
  }
  return nullptr;
}

bool encode_rows(const Higgs& higgs, const float* values, std::size_t rows, std::uint8_t* out, Level twin) {
  if (rows == 0) return true;
  const PlainFloats plain;
  Tiles tiles(higgs, twin);
  std::vector<std::uint16_t> scales(rows);
  std::vector<std::uint8_t> numbers(rows * higgs.pairs());
  for (std::size_t begin = 0; begin < rows; begin += kLanes) {
    if (!tiles.encode(values + begin * higgs.width(), std::min(kLanes, rows - begin), scales.data() + begin,
                      numbers.data() + begin * higgs.pairs()))
      return false;
  }
  std::memcpy(out, scales.data(), 2 * rows);
  pack(numbers.data(), numbers.size(), 2 * higgs.bits(), out + 2 * rows);
  return true;
}

const char* decode_rows(const Higgs& higgs, const std::uint8_t* data, std::size_t rows, float* out, Level twin) {
  if (rows == 0) return nullptr;
  const PlainFloats plain;
  std::vector<std::uint16_t> scales;
  std::vector<std::uint8_t> numbers;
  if (const char* const damaged = read(higgs, data, rows, scales, numbers)) return damaged;
  Tiles tiles(higgs, twin);
  for (std::size_t begin = 0; begin < rows; begin += kLanes)
    tiles.decode(scales.data() + begin, numbers.data() + begin * higgs.pairs(), std::min(kLanes, rows - begin),
                 out + begin * higgs.width());
  return nullptr;
}

}  // namespace kvstore::aqua

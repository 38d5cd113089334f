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

// What works on tiles: rows in, rows out.
class Tiles {
 public:
  Tiles(const Higgs& higgs, Level twin)
      : higgs_(higgs),
        kernels_(kernels(twin)),
        columns_(2 * higgs.pairs()),
        tile_(columns_ * kLanes),
        numbers_(higgs.pairs() * kLanes) {}

  // Codes `rows` rows, at most kLanes; there is room for kLanes. numbers: [rows][pairs]. False: not finite.
  bool encode(float* values, std::size_t rows, std::uint16_t* scales, std::uint8_t* numbers) {
    const std::size_t width = higgs_.width();
    float divisors[kLanes];
    std::fill(divisors + rows, divisors + kLanes, 1.0f);
    std::fill(values + rows * width, values + kLanes * width, 0.0f);
    for (std::size_t row = 0; row < rows; ++row) {
      const double mean = kernels_.squares(values + row * width, width) / static_cast<double>(width);
      scales[row] = rounded_bits(static_cast<float>(std::sqrt(mean)));
      if (scales[row] >= kNoScale) return false;
      divisors[row] = scales[row] ? widened(scales[row]) : INFINITY;
    }
    kernels_.to_tile(values, width, divisors, higgs_.signs(), tile_.data());
    std::fill(tile_.begin() + static_cast<std::ptrdiff_t>(width * kLanes), tile_.end(), 0.0f);
    kernels_.hadamard(tile_.data(), width, higgs_.group(), higgs_.factor());
    nearest();
    for (std::size_t row = 0; row < rows; ++row)
      for (std::size_t pair = 0; pair < higgs_.pairs(); ++pair)
        numbers[row * higgs_.pairs() + pair] = numbers_[pair * kLanes + row];
    return true;
  }

  // The rows of numbers, less their scales' rounding; room for kLanes is mutated. Scales are finite and not negative.
  void decode(const std::uint16_t* scales, const std::uint8_t* numbers, std::size_t rows, float* values) {
    for (std::size_t pair = 0; pair < higgs_.pairs(); ++pair)
      for (std::size_t row = 0; row < kLanes; ++row)
        numbers_[pair * kLanes + row] = row < rows ? numbers[row * higgs_.pairs() + pair] : std::uint8_t{0};
    decode_again(scales, rows, values);
  }

  // The same of the rows that were coded last.
  void decode_again(const std::uint16_t* scales, std::size_t rows, float* values) {
    kernels_.place(numbers_.data(), columns_, higgs_.points(), tile_.data());
    kernels_.hadamard(tile_.data(), higgs_.width(), higgs_.group(), higgs_.factor());
    float factors[kLanes] = {};
    for (std::size_t row = 0; row < rows; ++row) factors[row] = widened(scales[row]);
    kernels_.from_tile(tile_.data(), higgs_.width(), factors, higgs_.signs(), values);
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
  const Kernels& loops = kernels(twin);
  std::vector<float> x(rows * predictor.inputs());
  for (std::size_t part = 0, at = 0; part < count; at += widths[part++])
    loops.take_inputs(parts[part], rows, widths[part], predictor.inputs(), x.data() + at);
  loops.predict(x.data(), rows, predictor.inputs(), predictor.panels(), predictor.outputs(), out);
}

bool encode(const Higgs& higgs, const Side& side, const float* guess, std::uint8_t* out, float* found, Level twin) {
  const PlainFloats plain;
  const std::size_t rows = side.rows(), width = higgs.width();
  if (rows == 0) return true;
  const Kernels& loops = kernels(twin);
  Tiles tiles(higgs, twin);
  std::vector<float> values(kLanes * width);
  std::vector<std::uint16_t> scales(rows);
  std::vector<std::uint8_t> numbers(rows * higgs.pairs());
  for (std::size_t begin = 0; begin < rows; begin += kLanes) {
    const std::size_t part = std::min(kLanes, rows - begin);
    std::uint8_t* const coded = numbers.data() + begin * higgs.pairs();
    loops.gather(side, guess, begin, part, values.data());
    if (!tiles.encode(values.data(), part, scales.data() + begin, coded)) return false;
    tiles.decode_again(scales.data() + begin, part, values.data());
    loops.complete(guess ? guess + begin * width : nullptr, part * width, values.data(), found + begin * width);
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
  const Kernels& loops = kernels(twin);
  Tiles tiles(higgs, twin);
  std::vector<float> values(kLanes * width);
  for (std::size_t begin = 0; begin < rows; begin += kLanes) {
    const std::size_t part = std::min(kLanes, rows - begin);
    tiles.decode(scales.data() + begin, numbers.data() + begin * higgs.pairs(), part, values.data());
    loops.complete(guess ? guess + begin * width : nullptr, part * width, values.data(), found + begin * width);
    loops.scatter(side, begin, part, values.data());
  }
  return nullptr;
}

bool encode_rows(const Higgs& higgs, const float* values, std::size_t rows, std::uint8_t* out, Level twin) {
  if (rows == 0) return true;
  const PlainFloats plain;
  const std::size_t width = higgs.width();
  Tiles tiles(higgs, twin);
  std::vector<float> some(kLanes * width);
  std::vector<std::uint16_t> scales(rows);
  std::vector<std::uint8_t> numbers(rows * higgs.pairs());
  for (std::size_t begin = 0; begin < rows; begin += kLanes) {
    const std::size_t part = std::min(kLanes, rows - begin);
    std::copy_n(values + begin * width, part * width, some.data());
    if (!tiles.encode(some.data(), part, scales.data() + begin, numbers.data() + begin * higgs.pairs())) return false;
  }
  std::memcpy(out, scales.data(), 2 * rows);
  pack(numbers.data(), numbers.size(), 2 * higgs.bits(), out + 2 * rows);
  return true;
}

const char* decode_rows(const Higgs& higgs, const std::uint8_t* data, std::size_t rows, float* out, Level twin) {
  if (rows == 0) return nullptr;
  const PlainFloats plain;
  const std::size_t width = higgs.width();
  std::vector<std::uint16_t> scales;
  std::vector<std::uint8_t> numbers;
  if (const char* const damaged = read(higgs, data, rows, scales, numbers)) return damaged;
  Tiles tiles(higgs, twin);
  std::vector<float> some(kLanes * width);
  for (std::size_t begin = 0; begin < rows; begin += kLanes) {
    const std::size_t part = std::min(kLanes, rows - begin);
    tiles.decode(scales.data() + begin, numbers.data() + begin * higgs.pairs(), part, some.data());
    std::copy_n(some.data(), part * width, out + begin * width);
  }
  return nullptr;
}

}  // namespace kvstore::aqua

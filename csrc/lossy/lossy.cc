#include "lossy/lossy.h"

#include <algorithm>
#include <cmath>

#include "common/plain_floats.h"
#include "lossy/coded.h"
#include "lossy/sections.h"
#include "lossy/values.h"

namespace kvstore::lossy {
namespace {

void write(const Trace& trace, std::size_t number, std::size_t width, std::size_t exact, std::size_t rows,
           Coded& coded) {
  const int first = number % 2 ? static_cast<int>(kClasses) : 0;
  std::int16_t* numbers = trace.numbers[number];
  std::int8_t* classes = trace.classes[number];
  std::fill_n(numbers, (exact + rows) * width, std::int16_t{0});
  std::fill_n(classes, (exact + rows) * width, std::int8_t{-1});
  std::fill_n(trace.shifts[number], exact, static_cast<std::uint8_t>(kPlain));
  for (std::size_t t = 0; t < rows; ++t) {
    const Kind& kind = coded.kind(t);
    const std::size_t at = (exact + t) * width;
    trace.shifts[number][exact + t] = static_cast<std::uint8_t>(coded.shift(t));
    for (std::size_t i = 0; i < kind.count; ++i) {
      numbers[at + kind.which[i]] = static_cast<std::int16_t>(coded.symbols(t)[i] - kLargest);
      classes[at + kind.which[i]] = static_cast<std::int8_t>(kind.classes[i] - first);
    }
    for (const Escape* e = coded.escapes(t); e != coded.escapes(t + 1); ++e)
      numbers[at + kind.which[e->place]] = e->number;
  }
}

}  // namespace

bool codable(const Model& model, std::size_t count) {
  double sum = 0;
  for (const Part& part : model.parts()) sum += static_cast<double>(part.sums.padded);
  return sum * static_cast<double>(count) < 1e9;
}

const char* decode(const Model& model, const Block& block, const std::uint8_t* payload, std::size_t nbytes,
                   const std::uint64_t* sizes, std::size_t wanted, Level level, const Trace* trace) {
  const std::int64_t positions = model.base().positions();
  const auto tokens = static_cast<std::int64_t>(block.count);
  if (tokens == 0 || block.start < 0 || tokens > positions || block.start > positions - tokens)
    return "the profile does not know these positions";
  Layers layers;
  if (const char* const wrong = layers.cut(model, block.count, payload, nbytes, sizes)) return wrong;
  const PlainFloats floats;
  const std::size_t exact = layers.header.exact, rows = block.count - exact;
  Values values(model, block, exact, wanted, level);
  Coded coded(model, rows, layers.stream.data(), layers.stream.size(), level);
  for (std::size_t number = 0; number < model.parts().size(); ++number) {
    const Part& part = model.parts()[number];
    Section& section = layers.sections[number / 2];
    if (const char* const wrong = coded.part(number, layers.header.quarters[number % 2], section)) return wrong;
    values.predict(number);
    for (std::size_t begin = 0; begin < wanted; begin += kTile) {
      values.clear(part.sums.width);
      for (std::size_t t = std::max(begin, exact); t < std::min(begin + kTile, wanted); ++t) {
        const std::size_t row = t - exact;
        const float step = layers.header.steps[number % 2] * std::ldexp(1.0f, kPlain - coded.shift(row));
        values.put(part, t - begin, coded.kind(row), coded.symbols(row), step, coded.escapes(row),
                   coded.escapes(row + 1));
      }
      values.finish(number, begin);
    }
    values.take(number, section.kept[number % 2]);
    if (trace) write(*trace, number, part.sums.width, exact, rows, coded);
  }
  return coded.finish() ? nullptr : "the stream of symbols is damaged";
}

}  // namespace kvstore::lossy

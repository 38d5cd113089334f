#include "predictive/float8/float8.h"

#include "predictive/float8/dispatch.h"
#include "predictive/word_rows.h"

namespace kvstore::predict {
namespace {

const float8::Loops& loops(Float8 dtype, Level level) {
  return dtype == Float8::e5m2 ? float8::loops_of_e5m2(level) : float8::loops_of_e4m3(level);
}

Axis axis_of(Float8 dtype, const float8::Loops& run) {
  return {dtype == Float8::e5m2 ? 14u : 15u, run.classes, run.split, run.join};
}

}  // namespace

int encode_float8(const Model& model, const Block& block, Float8 dtype, std::uint8_t* out, std::size_t capacity,
                  std::size_t limit, std::uint64_t* sizes, Level level) {
  if (!predictable(model, block)) return kFallBack;
  const float8::Loops& run = loops(dtype, level);
  const WordRows words(model, block.count);
  for (std::size_t number = 0; number < model.parts().size(); ++number) {
    const Part& part = model.parts()[number];
    each_head(part, block.rows[number], block.count, [&](const std::uint8_t* values, std::size_t place) {
      run.make(values, part.dim, words.part(number) + place);
    });
  }
  const Block inner{block.tokens, block.count, block.start, words.rows()};
  return encode(model, inner, out, capacity, limit, sizes, level, axis_of(dtype, run));
}

const char* decode_float8(const Model& model, const Block& block, Float8 dtype, const std::uint8_t* payload,
                          std::size_t nbytes, const std::uint64_t* sizes, std::size_t wanted, Level level) {
  if (!predictable(model, block)) return "the profile does not know these positions";
  const float8::Loops& run = loops(dtype, level);
  const WordRows words(model, block.count);
  const Block inner{block.tokens, block.count, block.start, words.rows()};
  if (const char* const wrong =
          decode(model, inner, payload, nbytes, sizes, wanted, level, axis_of(dtype, run)))
    return wrong;
  for (std::size_t number = 0; number < model.parts().size(); ++number) {
    const Part& part = model.parts()[number];
    each_head(part, block.rows[number], wanted, [&](std::uint8_t* values, std::size_t place) {
      run.merge(words.part(number) + place, part.dim, values);
    });
  }
  return nullptr;
}

}  // namespace kvstore::predict

// Blocks through an exact coder of a model: what it made and an input changed, or any payload, decoded by two twins: the
// scalar one, and AVX2's or the best that KVSTORE_CPU leaves.
#pragma once

#include "models.h"
#include "predictive/predictive.h"

namespace fuzz {

// encode(block, payload, twin) fills bytes and sizes, which are large enough, and is 0 if it did; decode(block, payload,
// wanted, twin) says what is damaged. item: bytes of a value.
template <class Model, class Encode, class Decode>
void check_exact(Profile& profile, const Model& model, const Encode& encode, const Decode& decode,
                 std::size_t item = 2) {
  using namespace kvstore;
  Input& input = profile.input();
  const std::size_t count = 1 + input.below(70), wanted = input.below(count + 1);
  const std::int64_t start = static_cast<std::int64_t>(input.below(4) ? input.below(3000) : input.number(8));
  std::vector<std::int64_t> tokens(count);
  for (std::int64_t& token : tokens) token = profile.random().between(-1, 24);
  const bool lower = profile.random().next() % 2 != 0;
  const Level fast = lower && level() == Level::avx512 ? Level::avx2 : level();
  Tensors source, scalar, best;
  const bool by_token = input.flag();
  for (const auto& part : model.parts()) {
    source.add(part.heads, count, item * part.dim, by_token);
    scalar.add(part.heads, wanted, item * part.dim, by_token);
    best.add(part.heads, wanted, item * part.dim, by_token);
  }
  const std::size_t layers = model.parts().size() / 2, room = 8 * count * model.width() + 1000 * layers + 1000;
  const Payload payload = Payload::made(input, layers, room, [&](Payload& to) {
    source.fill(profile.random(), static_cast<int>(input.below(4)));
    return encode(predict::Block{tokens.data(), count, start, source.rows()}, to, fast) == 0;
  });
  if (payload.origin == Payload::Origin::nothing) return;
  const auto decoded = [&](const Tensors& target, Level twin) {
    return decode(predict::Block{tokens.data(), count, start, target.rows()}, payload, wanted, twin);
  };
  const char* const one = decoded(scalar, Level::scalar);
  const char* const two = decoded(best, fast);
  require_alike(payload, one, two, scalar, best);
  if (payload.origin == Payload::Origin::coded && wanted == count)
    require(source.same(scalar), "what was coded comes back different");
}

}  // namespace fuzz

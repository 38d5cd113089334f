// Blocks through a coder against donors: any spans and rotations; what it made and an input changed, or any payload,
// decoded by two twins: the scalar one, and the machine's best.
#pragma once

#include "donor/donor.h"
#include "models.h"

namespace fuzz {

struct Spans {
  std::vector<Tensors> donors;
  std::vector<kvstore::donor::Span> runs;
};

// encode(block, payload, twin) fills bytes and sizes, which are large enough, and says whether it did; decode(block,
// payload, wanted, twin) says what is damaged. weights: whether differences may be predicted. must: they are, or there
// is nothing to do.
template <class Model, class Encode, class Decode>
void check_spans(Profile& profile, const Model& model, bool weights, bool must, const Encode& encode,
                 const Decode& decode) {
  using namespace kvstore;
  Input& input = profile.input();
  const std::size_t count = 1 + input.below(70), wanted = input.below(count + 1), turns = input.below(3);
  const std::size_t half = model.parts()[0].dim / 2;
  bool turnable = half > 0 && turns > 0;
  for (std::size_t p = 0; p < model.parts().size(); p += 2) turnable = turnable && model.parts()[p].dim == 2 * half;
  const std::int16_t* const angles = profile.angles(turns, half);
  Tensors source, scalar, best;
  const bool by_token = input.flag();
  Spans spans;
  std::size_t at = 0;
  while (at < count && spans.runs.size() < 4) {
    const std::size_t first = at + input.below(count - at), length = 1 + input.below(count - first);
    spans.donors.emplace_back();
    for (const auto& part : model.parts()) spans.donors.back().add(part.heads, length, 2 * part.dim, !by_token);
    spans.donors.back().fill(profile.random(), static_cast<int>(input.below(4)));
    const std::int64_t turn = turnable ? static_cast<std::int64_t>(input.below(turns + 1)) - 1 : -1;
    spans.runs.push_back({first, length, turn, nullptr});
    at = first + length;
  }
  for (std::size_t i = 0; i < spans.runs.size(); ++i) spans.runs[i].donor = spans.donors[i].rows();
  for (const auto& part : model.parts()) {
    source.add(part.heads, count, 2 * part.dim, by_token);
    scalar.add(part.heads, count, 2 * part.dim, by_token);
    best.add(part.heads, count, 2 * part.dim, by_token);
  }
  const std::int64_t start = static_cast<std::int64_t>(input.below(2000));
  const auto length = static_cast<std::int64_t>(count);
  const bool known = length <= model.positions() && start <= model.positions() - length;
  const bool propagated = weights && known && (must || input.flag());
  if (must && !propagated) return;
  const auto block_of = [&](const Tensors& rows) {
    return donor::Block{spans.runs.data(), spans.runs.size(), angles, half, rows.rows(), start, propagated};
  };
  const std::size_t layers = model.parts().size() / 2, room = 16 * count * model.width() + 2000 * layers + 1000;
  const Payload payload = Payload::made(input, layers, room, [&](Payload& to) {
    source.fill(profile.random(), static_cast<int>(input.below(4)));
    return encode(block_of(source), to, level());
  });
  if (payload.origin == Payload::Origin::nothing) return;
  const char* const one = decode(block_of(scalar), payload, wanted, Level::scalar);
  const char* const two = decode(block_of(best), payload, wanted, level());
  require_alike(payload, one, two, scalar, best);
}

}  // namespace fuzz

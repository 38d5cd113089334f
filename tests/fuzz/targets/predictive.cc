// The predictive codec, lossless: any model that a profile may hold, a block coded with it and changed, or any payload.
#include <stdexcept>

#include "models.h"
#include "predictive/predictive.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) try {
  using namespace kvstore;
  fuzz::Input input(data, size);
  fuzz::Profile profile(input);
  predict::Arrays arrays = fuzz::arrays_of(profile, false, true);
  arrays.freqs = fuzz::Profile::freqs();
  const predict::Model model(arrays);
  const std::size_t count = 1 + input.below(70), wanted = input.below(count + 1);
  const std::int64_t start = static_cast<std::int64_t>(input.below(4) ? input.below(3000) : input.number(8));
  std::vector<std::int64_t> tokens(count);
  for (std::int64_t& token : tokens) token = profile.random().between(-1, 24);
  fuzz::Tensors source, scalar, best;
  const bool by_token = input.flag();
  for (const predict::Part& part : model.parts()) {
    source.add(part.heads, count, 2 * part.dim, by_token);
    scalar.add(part.heads, wanted, 2 * part.dim, by_token);
    best.add(part.heads, wanted, 2 * part.dim, by_token);
  }
  fuzz::Payload payload;
  const std::size_t layers = arrays.layers.size();
  const bool coded = input.flag();
  bool edited = true;
  if (coded) {
    source.fill(profile.random(), static_cast<int>(input.below(4)));
    payload.sizes.resize(layers);
    payload.bytes.resize(8 * count * model.width() + 1000 * layers + 1000);
    const predict::Block block{tokens.data(), count, start, source.rows()};
    const int made = predict::encode(model, block, payload.bytes.data(), payload.bytes.size(), SIZE_MAX,
                                     payload.sizes.data(), machine_level());
    if (made != 0) return 0;
    std::size_t used = 0;
    for (const std::uint64_t layer : payload.sizes) used += layer;
    payload.bytes.resize(used);
    payload.bytes.shrink_to_fit();
    edited = payload.edit(input);
  } else {
    payload = fuzz::Payload::plain(input, layers);
  }
  const auto decode = [&](const fuzz::Tensors& target, Level level) {
    const predict::Block block{tokens.data(), count, start, target.rows()};
    return predict::decode(model, block, payload.bytes.data(), payload.bytes.size(), payload.sizes.data(), wanted, level);
  };
  const char* const one = decode(scalar, Level::scalar);
  const char* const two = decode(best, machine_level());
  fuzz::require((one == nullptr) == (two == nullptr), "two twins disagree on whether a payload is damaged");
  if (one == nullptr) fuzz::require(scalar.same(best), "two twins decode different values");
  if (coded && !edited) {
    fuzz::require(one == nullptr, "what was coded is called damaged");
    if (wanted == count) fuzz::require(source.same(scalar), "what was coded comes back different");
  }
  return 0;
} catch (const std::invalid_argument&) {
  return 0;  // the model refuses the arrays
}

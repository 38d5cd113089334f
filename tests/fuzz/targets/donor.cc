// The donor codec: any spans, rotations and models of the exact core, or with -DSTEPS the step mode; a block coded
// against donors and changed, or any payload.
#include <stdexcept>

#include "donor/donor.h"
#include "donor/steps/steps.h"
#include "models.h"

namespace {

using namespace kvstore;

#ifdef STEPS
namespace steps = donor::steps;

const steps::Coder& coder() {
  static steps::Coder* const made = [] {
    auto* const coder = new steps::Coder{};
    constexpr std::size_t tables = steps::kClasses + steps::kScales;
    std::vector<std::uint16_t> freqs(tables * rans::Tables::kSymbols, 0);
    for (std::size_t t = 0; t < tables; ++t)
      for (std::size_t s = 0; s < (t < steps::kClasses ? steps::kClasses : steps::kSymbols); ++s)
        freqs[t * rans::Tables::kSymbols + s] = t < steps::kClasses ? 256 : 128;
    fuzz::require(coder->tables.build(freqs.data(), tables, 12), "the tables do not fit");
    for (std::size_t i = 0; i < steps::kScales; ++i) {
      coder->limits[i] = steps::kLargest;
      for (std::size_t n = 0; n < steps::kSizes; ++n) coder->costs[i][n] = static_cast<std::int32_t>(100 + 37 * n * (18 - i));
    }
    for (std::size_t i = 0; i + 1 < steps::kClasses; ++i) coder->expected[i] = static_cast<std::int64_t>(100 * (i + 1));
    for (std::size_t i = 0; i + 1 < steps::kShifts; ++i) coder->bounds[i] = static_cast<std::int64_t>(1000 * (i + 1));
    return coder;
  }();
  return *made;
}
#endif

struct Spans {
  std::vector<fuzz::Tensors> donors;
  std::vector<donor::Span> runs;
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) try {
  fuzz::Input input(data, size);
  fuzz::Profile profile(input);
  const bool weights = input.flag();
  predict::Arrays arrays = fuzz::arrays_of(profile, true, weights);
  arrays.freqs = fuzz::Profile::freqs();
  const predict::Model model(arrays);
  const std::size_t count = 1 + input.below(70), wanted = input.below(count + 1), turns = input.below(3);
  const std::size_t half = model.parts()[0].dim / 2;
  bool turnable = half > 0 && turns > 0;
  for (std::size_t p = 0; p < model.parts().size(); p += 2) turnable = turnable && model.parts()[p].dim == 2 * half;
  const std::int16_t* const angles = profile.angles(turns, half);
  fuzz::Tensors source, scalar, best;
  const bool by_token = input.flag();
  Spans spans;
  std::size_t at = 0;
  while (at < count && spans.runs.size() < 4) {
    const std::size_t first = at + input.below(count - at), length = 1 + input.below(count - first);
    spans.donors.emplace_back();
    for (const predict::Part& part : model.parts()) spans.donors.back().add(part.heads, length, 2 * part.dim, !by_token);
    spans.donors.back().fill(profile.random(), static_cast<int>(input.below(4)));
    const std::int64_t turn = turnable ? static_cast<std::int64_t>(input.below(turns + 1)) - 1 : -1;
    spans.runs.push_back({first, length, turn, nullptr});
    at = first + length;
  }
  for (std::size_t i = 0; i < spans.runs.size(); ++i) spans.runs[i].donor = spans.donors[i].rows();
  for (const predict::Part& part : model.parts()) {
    source.add(part.heads, count, 2 * part.dim, by_token);
    scalar.add(part.heads, count, 2 * part.dim, by_token);
    best.add(part.heads, count, 2 * part.dim, by_token);
  }
  const std::int64_t start = static_cast<std::int64_t>(input.below(2000));
  const auto length = static_cast<std::int64_t>(count);
  const bool propagated = weights && length <= model.positions() && start <= model.positions() - length && input.flag();
  const auto block_of = [&](const fuzz::Tensors& rows) {
    return donor::Block{spans.runs.data(), spans.runs.size(), angles, half, rows.rows(), start, propagated};
  };
#ifdef STEPS
  const auto decode = [&](const fuzz::Payload& payload, const fuzz::Tensors& target, Level level) {
    return steps::decode(coder(), model.parts(), block_of(target), payload.bytes.data(), payload.bytes.size(),
                         payload.sizes.data(), wanted, level);
  };
#else
  const auto decode = [&](const fuzz::Payload& payload, const fuzz::Tensors& target, Level level) {
    return donor::decode(model, block_of(target), payload.bytes.data(), payload.bytes.size(), payload.sizes.data(),
                         wanted, level);
  };
#endif
  fuzz::Payload payload;
  const std::size_t layers = arrays.layers.size();
  const bool coded = input.flag();
  bool edited = true;
  if (coded) {
    source.fill(profile.random(), static_cast<int>(input.below(4)));
    payload.sizes.resize(layers);
    payload.bytes.resize(16 * count * model.width() + 2000 * layers + 1000);
#ifdef STEPS
    const int quarters = input.flag() ? static_cast<int>(input.below(401)) - 200 : steps::kNothing;
    const bool fits = steps::encode(coder(), model.parts(), block_of(source), quarters, payload.bytes.data(),
                                    payload.bytes.size(), payload.sizes.data(), machine_level());
#else
    const bool fits = donor::encode(model, block_of(source), payload.bytes.data(), payload.bytes.size(),
                                    payload.sizes.data(), machine_level());
#endif
    if (!fits) return 0;
    std::size_t used = 0;
    for (const std::uint64_t layer : payload.sizes) used += layer;
    payload.bytes.resize(used);
    payload.bytes.shrink_to_fit();
    edited = payload.edit(input);
  } else {
    payload = fuzz::Payload::plain(input, layers);
  }
  const char* const one = decode(payload, scalar, Level::scalar);
  const char* const two = decode(payload, best, machine_level());
  fuzz::require((one == nullptr) == (two == nullptr), "two twins disagree on whether a payload is damaged");
  if (one == nullptr) fuzz::require(scalar.same(best), "two twins decode different values");
  if (coded && !edited) fuzz::require(one == nullptr, "what was coded is called damaged");
  return 0;
} catch (const std::invalid_argument&) {
  return 0;  // the model refuses the arrays
}

// The donor codec: any spans, rotations and models of the exact core, or with -DSTEPS the step mode; a block coded
// against donors and changed, or any payload.
#include <stdexcept>

#include "donor/steps/steps.h"
#include "spans.h"

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

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) try {
  fuzz::Input input(data, size);
  fuzz::Profile profile(input);
  const bool weights = input.flag();
  predict::Arrays arrays = fuzz::arrays_of(profile, true, weights);
  arrays.freqs = fuzz::Profile::freqs();
  const predict::Model model(arrays);
  const auto encode = [&](const donor::Block& block, fuzz::Payload& to, Level twin) {
#ifdef STEPS
    const int quarters = input.flag() ? static_cast<int>(input.below(401)) - 200 : steps::kNothing;
    return steps::encode(coder(), model.parts(), block, quarters, to.bytes.data(), to.bytes.size(), to.sizes.data(),
                         twin);
#else
    return donor::encode(model, block, to.bytes.data(), to.bytes.size(), to.sizes.data(), twin);
#endif
  };
  const auto decode = [&](const donor::Block& block, const fuzz::Payload& from, std::size_t wanted, Level twin) {
#ifdef STEPS
    return steps::decode(coder(), model.parts(), block, from.bytes.data(), from.bytes.size(), from.sizes.data(),
                         wanted, twin);
#else
    return donor::decode(model, block, from.bytes.data(), from.bytes.size(), from.sizes.data(), wanted, twin);
#endif
  };
  fuzz::check_spans(profile, model, weights, false, encode, decode);
  return 0;
} catch (const std::invalid_argument&) {
  return 0;  // the model refuses the arrays
}

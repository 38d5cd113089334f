// The levels of the exact predictor: any model that a profile may hold, a block coded with it and changed, or any payload.
#include <stdexcept>

#include "exact.h"
#include "level_models.h"
#include "levels/levels.h"

using namespace kvstore;

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) try {
  fuzz::Input input(data, size);
  fuzz::Profile profile(input);
  const levels::Model model(fuzz::level_arrays(profile));
  fuzz::check_exact(
      profile, model,
      [&](const predict::Block& block, fuzz::Payload& to, Level twin) {
        return levels::encode(model, block, to.bytes.data(), to.bytes.size(), SIZE_MAX, to.sizes.data(), twin);
      },
      [&](const predict::Block& block, const fuzz::Payload& from, std::size_t wanted, Level twin) {
        return levels::decode(model, block, from.bytes.data(), from.bytes.size(), from.sizes.data(), wanted, twin);
      });
  return 0;
} catch (const std::invalid_argument&) {
  return 0;  // the model refuses the arrays
}

// The donor codec's mode in groups: any spans, rotations and models of differences; a block coded against donors and
// changed, or any payload.
#include <stdexcept>

#include "donor/groups.h"
#include "level_models.h"
#include "spans.h"

using namespace kvstore;

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) try {
  fuzz::Input input(data, size);
  fuzz::Profile profile(input);
  const levels::Model model(fuzz::level_arrays(profile));
  fuzz::check_spans(
      profile, model, true, true,
      [&](const donor::Block& block, fuzz::Payload& to, Level twin) {
        return donor::groups::encode(model, block, to.bytes.data(), to.bytes.size(), to.sizes.data(), twin);
      },
      [&](const donor::Block& block, const fuzz::Payload& from, std::size_t wanted, Level twin) {
        return donor::groups::decode(model, block, from.bytes.data(), from.bytes.size(), from.sizes.data(), wanted,
                                     twin);
      });
  return 0;
} catch (const std::invalid_argument&) {
  return 0;  // the model refuses the arrays
}

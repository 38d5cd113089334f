// The predictive codec, lossless: any model that a profile may hold, a block of bf16 or float8 coded with it and changed,
// or any payload.
#include <stdexcept>

#include "exact.h"
#include "predictive/float8/float8.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) try {
  using namespace kvstore;
  fuzz::Input input(data, size);
  fuzz::Profile profile(input);
  predict::Arrays arrays = fuzz::arrays_of(profile, false, true);
  arrays.freqs = fuzz::Profile::freqs();
  const predict::Model model(arrays);
  const std::uint64_t kind = profile.random().next() % 4;
  if (kind < 2) {
    const auto dtype = static_cast<predict::Float8>(kind);
    fuzz::check_exact(
        profile, model,
        [&](const predict::Block& block, fuzz::Payload& to, Level twin) {
          return predict::encode_float8(model, block, dtype, to.bytes.data(), to.bytes.size(), SIZE_MAX,
                                        to.sizes.data(), twin);
        },
        [&](const predict::Block& block, const fuzz::Payload& from, std::size_t wanted, Level twin) {
          return predict::decode_float8(model, block, dtype, from.bytes.data(), from.bytes.size(), from.sizes.data(),
                                        wanted, twin);
        },
        1);
    return 0;
  }
  fuzz::check_exact(
      profile, model,
      [&](const predict::Block& block, fuzz::Payload& to, Level twin) {
        return predict::encode(model, block, to.bytes.data(), to.bytes.size(), SIZE_MAX, to.sizes.data(), twin);
      },
      [&](const predict::Block& block, const fuzz::Payload& from, std::size_t wanted, Level twin) {
        return predict::decode(model, block, from.bytes.data(), from.bytes.size(), from.sizes.data(), wanted, twin);
      });
  return 0;
} catch (const std::invalid_argument&) {
  return 0;  // the model refuses the arrays
}

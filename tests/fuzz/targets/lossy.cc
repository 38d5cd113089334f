// The lossy mode of the predictive codec, decoding: any model that a profile may hold, and payloads whose header and
// sections are in order as far as the input wants it.
#include <cmath>
#include <stdexcept>

#include "lossy/lossy.h"
#include "models.h"

namespace {

using namespace kvstore;

lossy::PartArrays part_of(fuzz::Profile& profile, const std::vector<std::size_t>& widths, std::size_t number,
                          std::size_t levels) {
  const std::size_t width = widths[number], first = number / 2 * 2;
  lossy::PartArrays part{};
  part.basis = profile.numbers<std::int8_t>(width * width, -128, 127);
  part.component = profile.floats(width, -8);
  part.unit = profile.floats(width, 0);
  part.scale = profile.numbers<std::int16_t>(levels * width, -400, 400);
  part.adapt = profile.numbers<std::int32_t>(3, -(1 << 12), 1 << 12);
  if (number < 2) return part;
  part.uses = profile.input().byte();
  if (profile.input().below(8) != 0) {  // only kinds that this layer has
    if (number < 4) part.uses &= ~6u;
    if (number < 6) part.uses &= ~24u;
    if (number % 2 == 0) part.uses &= ~32u;
    part.uses = (part.uses & 63u) | 1u;
  }
  for (std::size_t kind = 0; kind < 6; ++kind) {
    if (!(part.uses >> kind & 1)) continue;
    const std::size_t of = kind == 5 ? first : first - 2 * ((kind + 1) / 2) + (kind + 1) % 2;
    part.inputs += kind == 0 ? widths[0] + widths[1] : of < widths.size() ? widths[of] : 0;
  }
  part.weight = profile.numbers<std::int8_t>(part.inputs * width, -127, 127);
  part.out_scale = profile.floats(width, -14);
  part.bias = profile.numbers<std::int32_t>(width, -(1 << 28), 1 << 28);
  return part;
}

void put(fuzz::Bytes& to, std::uint64_t value, std::size_t bytes) {
  for (std::size_t i = 0; i < bytes; ++i) to.push_back(static_cast<std::uint8_t>(value >> 8 * i));
}

// A payload in order: header, and of every layer exact rows, escapes and words.
fuzz::Payload payload_of(fuzz::Profile& profile, const lossy::Model& model, std::size_t count) {
  fuzz::Input& input = profile.input();
  fuzz::Payload made;
  const std::size_t exact = input.below(count + 1);
  put(made.bytes, lossy::kMode, 4);
  put(made.bytes, exact, 2);
  for (int i = 0; i < 2; ++i) put(made.bytes, static_cast<std::uint64_t>(static_cast<int>(input.below(801)) - 400), 2);
  for (int i = 0; i < 2; ++i) {
    const float step = std::ldexp(1.0f, static_cast<int>(input.below(160)) - 140);
    std::uint32_t bits;
    std::memcpy(&bits, &step, 4);
    put(made.bytes, bits, 4);
  }
  made.bytes.resize(lossy::kHeader);
  for (std::size_t layer = 0; layer < model.parts().size() / 2; ++layer) {
    const std::size_t begin = layer == 0 ? 0 : made.bytes.size();
    const std::size_t escapes = input.below(6);
    put(made.bytes, escapes, 1);
    const std::size_t width = model.parts()[2 * layer].sums.width + model.parts()[2 * layer + 1].sums.width;
    for (std::size_t i = 0; i < exact * width; ++i) put(made.bytes, profile.random().next() | 0x3f80, 2);
    for (std::size_t i = 0; i < escapes; ++i) put(made.bytes, profile.random().next(), 2);
    if (layer == 0)
      for (std::size_t i = 0; i < rans::kLanes; ++i) put(made.bytes, 0x8000 + profile.random().next() % 0x7fff8000u, 4);
    const std::size_t words = input.below((count - exact) * width + 9);
    for (std::size_t i = 0; i < words; ++i) put(made.bytes, profile.random().next(), 2);
    made.sizes.push_back(made.bytes.size() - begin);
  }
  made.bytes.shrink_to_fit();
  return made;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) try {
  fuzz::Input input(data, size);
  fuzz::Profile profile(input);
  lossy::Arrays arrays{};
  arrays.base = fuzz::arrays_of(profile, false, false);
  std::vector<std::size_t> widths;
  for (const auto& shape : arrays.base.layers) {
    widths.push_back(shape.heads * shape.key_dim);
    widths.push_back(shape.heads * shape.value_dim);
  }
  arrays.levels = 1 + input.below(3);
  auto& steps = profile.keep<std::int16_t>(2 * arrays.levels);
  for (std::size_t i = 0; i < steps.size(); ++i)
    steps[i] = static_cast<std::int16_t>(i < 2 ? -400 + static_cast<int>(input.below(700)) : std::min(400, steps[i - 2] + 1 + input.byte()));
  arrays.steps = steps.data();
  for (std::size_t i = 0; i < widths.size(); ++i) arrays.parts.push_back(part_of(profile, widths, i, arrays.levels));
  constexpr std::size_t classes = 2 * lossy::kClasses;
  auto& freqs = profile.keep<std::uint16_t>(classes * 256);
  std::fill(freqs.begin(), freqs.end(), std::uint16_t{16});
  auto& row_freqs = profile.keep<std::uint16_t>(lossy::kShifts * lossy::kShifts);
  std::fill(row_freqs.begin(), row_freqs.end(), std::uint16_t{512});
  auto& centroids = profile.keep<float>(classes * (lossy::kLargest + 1));
  for (std::size_t i = 0; i < centroids.size(); ++i) centroids[i] = static_cast<float>(i % 128);
  arrays.freqs = freqs.data();
  arrays.row_freqs = row_freqs.data();
  arrays.centroids = centroids.data();
  arrays.expect = profile.numbers<std::int32_t>(2 * classes, 1, 1 << 20);
  const lossy::Model model(arrays);
  const std::size_t count = 1 + input.below(40), wanted = input.below(count + 1);
  const std::int64_t start = static_cast<std::int64_t>(input.below(4) ? input.below(3000) : input.number(8));
  std::vector<std::int64_t> tokens(count);
  for (std::int64_t& token : tokens) token = profile.random().between(-1, 24);
  fuzz::Tensors scalar, best;
  const bool by_token = input.flag();
  for (const predict::Part& part : model.base().parts()) {
    scalar.add(part.heads, wanted, 2 * part.dim, by_token);
    best.add(part.heads, wanted, 2 * part.dim, by_token);
  }
  fuzz::Payload payload;
  if (input.flag()) {
    payload = payload_of(profile, model, count);
    payload.edit(input);
  } else {
    payload = fuzz::Payload::plain(input, widths.size() / 2);
  }
  const auto decode = [&](const fuzz::Tensors& target, Level level) {
    const lossy::Block block{tokens.data(), count, start, target.rows()};
    return lossy::decode(model, block, payload.bytes.data(), payload.bytes.size(), payload.sizes.data(), wanted, level);
  };
  const char* const one = decode(scalar, Level::scalar);
  const char* const two = decode(best, level());
  // Values may differ by a rounding, and with them the exact rows of later layers do not.
  fuzz::require((one == nullptr) == (two == nullptr), "two twins disagree on whether a payload is damaged");
  fuzz::tell(one == nullptr ? "read" : "refused", 4);
  if (one == nullptr) scalar.tell();
  return 0;
} catch (const std::invalid_argument&) {
  return 0;  // the model refuses the arrays
}

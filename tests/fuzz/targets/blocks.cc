// splitzip, or with -DENTROPY the entropy codec: a block of any shape, coded and changed, or any payload.
#include "entropy/entropy.h"
#include "fuzz.h"
#include "splitzip/splitzip.h"

namespace {

using namespace kvstore;

#ifdef ENTROPY
const entropy::Model& model() {
  static entropy::Model* const made = [] {
    static const std::vector<std::uint16_t> both = fuzz::table("codecs/entropy/tables.bin");
    auto* const model = new entropy::Model;
    fuzz::require(model->build(both.data(), both.data() + both.size() / 2), "the tables do not fit");
    return model;
  }();
  return *made;
}
#endif

const char* decode(const splitzip::Shape& shape, const fuzz::Payload& payload, const Rows* target, std::size_t wanted,
                   Level level) {
  const std::uint8_t* const bytes = payload.bytes.data();
#ifdef ENTROPY
  return entropy::decode(model(), shape, bytes, payload.bytes.size(), payload.sizes.data(), target, wanted, level);
#else
  return splitzip::decode(shape, bytes, payload.bytes.size(), payload.sizes.data(), target, wanted, level);
#endif
}

std::size_t encode(const splitzip::Shape& shape, const Rows* rows, fuzz::Payload& payload, Level level) {
  std::uint8_t* const out = payload.bytes.data();
#ifdef ENTROPY
  return entropy::encode(model(), shape, rows, out, payload.bytes.size(), payload.sizes.data(), level);
#else
  return splitzip::encode(shape, rows, out, payload.bytes.size(), payload.sizes.data(), level);
#endif
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  fuzz::Input input(data, size);
  const std::size_t dtype = input.below(5), item = dtype == 2 ? 4 : dtype >= 3 ? 1 : 2;
  const bool by_token = input.flag(), large = input.below(16) == 1;
  const std::size_t layers = 1 + input.below(3), tokens = 1 + input.below(large ? 300 : 20);
  const std::size_t wanted = input.below(tokens + 1);
  std::vector<std::uint32_t> heads, row_bytes;
  for (std::size_t i = 0; i < 2 * layers; ++i) {
    heads.push_back(static_cast<std::uint32_t>(1 + input.below(3)));
    row_bytes.push_back(static_cast<std::uint32_t>(item * (1 + input.below(large && i == 0 ? 160 : 10))));
  }
  const splitzip::Shape shape{static_cast<splitzip::Dtype>(dtype), layers, heads.data(), row_bytes.data(), tokens};
  fuzz::Tensors source, scalar, best;
  for (std::size_t i = 0; i < 2 * layers; ++i) {
    source.add(heads[i], tokens, row_bytes[i], by_token);
    scalar.add(heads[i], wanted, row_bytes[i], by_token);
    best.add(heads[i], wanted, row_bytes[i], by_token);
  }
  std::size_t most = 0;
  for (std::size_t i = 0; i < layers; ++i) most += splitzip::bound(shape, i);
  const fuzz::Payload payload = fuzz::Payload::made(input, layers, most, [&](fuzz::Payload& to) {
    fuzz::Random random(input.byte());
    source.fill(random, static_cast<int>(input.below(4)));
    fuzz::require(encode(shape, source.rows(), to, kvstore::level()) != splitzip::kTooShort, "the bound is wrong");
    return true;
  });
  const char* const one = decode(shape, payload, scalar.rows(), wanted, Level::scalar);
  const char* const two = decode(shape, payload, best.rows(), wanted, kvstore::level());
  fuzz::require_alike(payload, one, two, scalar, best);
  if (payload.origin == fuzz::Payload::Origin::coded && wanted == tokens)
    fuzz::require(source.same(scalar), "what was coded comes back different");
  return 0;
}

// Layers of AQUA-KV: rows of any numbers, coded and changed, or any bytes, with or without predictions and rotations.
#include <cmath>

#include "aqua/aqua.h"
#include "fuzz.h"

namespace {

using kvstore::Level;

// What a side needs, all of its size to the byte.
struct Memory {
  std::vector<std::uint16_t> cache;
  std::vector<float> cos, sin, guess, found;

  kvstore::aqua::Side side(std::size_t heads, std::size_t tokens, std::size_t dim, std::size_t sinks,
                           std::size_t pairs) {
    return {cache.data(), heads, tokens, dim, sinks, {cos.data(), sin.data(), pairs}};
  }
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace kvstore;
  fuzz::Input input(data, size);
  fuzz::Random random(input.byte());
  const auto real = [&] { return static_cast<float>(static_cast<int>(random.next() % 2001) - 1000) / 300.0f; };
  const auto bits = static_cast<unsigned>(2 + input.below(3));
  const std::size_t heads = 1 + input.below(3), dim = 1 + input.below(40), tokens = 1 + input.below(40);
  const std::size_t sinks = input.below(tokens + 1), rows = tokens - sinks, width = heads * dim;
  const std::size_t pairs = rows && input.flag() ? dim / 2 : 0;
  std::vector<float> signs(width), points(std::size_t{2} << (2 * bits));
  for (float& sign : signs) sign = random.next() & 1 ? 1.0f : -1.0f;
  for (float& point : points) point = real();
  const aqua::Higgs higgs(bits, signs, points);
  Memory memory;
  memory.cache.resize(tokens * width);
  for (std::uint16_t& word : memory.cache) word = static_cast<std::uint16_t>(random.next() & 0xBFFF);  // below 2
  if (input.flag()) memory.cache[input.below(memory.cache.size())] = static_cast<std::uint16_t>(input.number(2));
  for (std::size_t i = 0; i < rows * pairs; ++i) {
    memory.cos.push_back(real() / 4);  // no cosine, which machines may round each in their way
    memory.sin.push_back(real() / 4);
  }
  memory.guess.resize(rows * width);
  memory.found.resize(rows * width);
  const bool predicted = input.flag();
  if (predicted && rows) {
    const std::size_t inputs = 1 + input.below(20);
    std::vector<float> weight((inputs + 1) * width), x(rows * inputs), plain(rows * width);
    for (float& w : weight) w = real();
    for (float& v : x) v = std::ldexp(std::floor(real() * 64), static_cast<int>(input.byte()) - 128);
    const aqua::Predictor predictor(weight.data(), inputs, width);
    const float* parts[] = {x.data()};
    aqua::predict(predictor, parts, &inputs, 1, rows, memory.guess.data(), level());
    // Weights that are no fp16 numbers make products that are rounded: numbers may differ, what is in memory may not.
    aqua::predict(predictor, parts, &inputs, 1, rows, plain.data(), Level::scalar);
    for (float& v : memory.guess)
      if (!(std::fabs(v) < 1e6f)) v = 0;
  }
  const float* const guess = predicted ? memory.guess.data() : nullptr;
  const aqua::Side side = memory.side(heads, tokens, dim, sinks, pairs);
  fuzz::Bytes coded(higgs.bytes(rows)), plain(coded.size());
  std::vector<float> found(memory.found.size());
  const bool done = aqua::encode(higgs, side, guess, coded.data(), memory.found.data(), level());
  fuzz::require(done == aqua::encode(higgs, side, guess, plain.data(), found.data(), Level::scalar), "twins agree");
  fuzz::require(!done || (coded == plain && found == memory.found), "twins write the same");
  if (done) fuzz::tell(coded.data(), coded.size());
  for (std::uint8_t& byte : coded)
    if (!done || input.below(40) == 1) byte = input.byte();
  const char* const wrong = aqua::decode(higgs, side, guess, coded.data(), memory.found.data(), level());
  const std::vector<std::uint16_t> first = memory.cache;
  const char* const other = aqua::decode(higgs, side, guess, coded.data(), found.data(), Level::scalar);
  fuzz::require((wrong == nullptr) == (other == nullptr), "twins refuse the same");
  fuzz::require(wrong != nullptr || first == memory.cache, "twins read the same");
  fuzz::tell(wrong == nullptr ? "read" : "refused", 4);
  if (wrong == nullptr) fuzz::tell(first.data(), 2 * first.size());
  return 0;
}

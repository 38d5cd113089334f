// The coder of symbols: any tables that can be built, any stream, in one part or several.
#include "fuzz.h"
#include "rans/rans.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace kvstore;
  fuzz::Input input(data, size);
  const int bits = 11 + static_cast<int>(input.below(2));
  const std::size_t tables = 1 + input.below(4), parts = 1 + input.below(4);
  fuzz::Random random(input.byte());
  std::vector<std::uint16_t> freqs(tables * rans::Tables::kSymbols, 0);
  for (std::size_t t = 0; t < tables; ++t) {  // few symbols or many, and in some tables a sum that is wrong
    int left = 1 << bits;
    while (left > 0) {
      const int part = static_cast<int>(random.between(1, left));
      freqs[t * 256 + random.next() % 256] += static_cast<std::uint16_t>(part);
      left -= part;
    }
  }
  if (input.below(16) == 1) ++freqs[input.below(freqs.size())];
  rans::Tables made;
  if (!made.build(freqs.data(), tables, bits)) return 0;
  struct Part {
    fuzz::Bytes classes, scalar, best;
  };
  std::vector<Part> all(parts);
  for (Part& part : all) {
    const std::size_t n = input.below(400);
    part.classes.resize(input.below(40));
    for (std::uint8_t& c : part.classes) c = static_cast<std::uint8_t>(random.next() % (tables + (input.below(64) == 1)));
    part.scalar.resize(n);
    part.best.resize(n);
  }
  fuzz::Payload payload;
  std::vector<rans::Part> sources;
  std::vector<fuzz::Bytes> symbols;
  bool edited = true;
  if (input.flag()) {
    for (Part& part : all) {
      symbols.emplace_back(part.scalar.size());
      for (std::size_t i = 0; i < symbols.back().size(); ++i) {
        const std::size_t table = part.classes.empty() ? 0 : part.classes[i % part.classes.size()] % tables;
        do symbols.back()[i] = static_cast<std::uint8_t>(random.next()), random.next();
        while (random.next() % 4096 != 0 && freqs[table * 256 + symbols.back()[i]] == 0);
      }
    }
    std::size_t most = 0;
    for (std::size_t i = 0; i < parts; ++i) {
      sources.push_back({symbols[i].data(), symbols[i].size(), all[i].classes.data(), all[i].classes.size()});
      most += symbols[i].size();
    }
    payload.bytes.resize(rans::bound(most));
    const std::int64_t length = rans::encode(made, sources.data(), parts, payload.bytes.data(), payload.bytes.size(),
                                             nullptr, kvstore::level());
    fuzz::require(length != rans::kNoRoom, "the bound is wrong");
    if (length < 0) return 0;
    payload.bytes.resize(static_cast<std::size_t>(length));
    payload.bytes.shrink_to_fit();
    fuzz::tell(payload.bytes.data(), payload.bytes.size());
    edited = payload.edit(input);
  } else {
    payload.bytes = input.rest();
  }
  rans::Decoder one(made, payload.bytes.data(), payload.bytes.size());
  rans::Decoder two(made, payload.bytes.data(), payload.bytes.size());
  bool good = true;
  for (std::size_t i = 0; i < parts && good; ++i) {
    Part& part = all[i];
    const auto a = one.part(part.classes.data(), part.classes.size(), part.scalar.data(), part.scalar.size(), Level::scalar);
    const auto b = two.part(part.classes.data(), part.classes.size(), part.best.data(), part.best.size(), kvstore::level());
    fuzz::require(a == b, "two twins disagree on whether a stream is damaged");
    good = a == 0;
    if (good) fuzz::require(part.scalar == part.best, "two twins decode different symbols");
    fuzz::tell(good ? "read" : "refused", 4);
    if (good) fuzz::tell(part.best.data(), part.best.size());
  }
  const bool whole = good && one.finish() == 0;
  if (good) fuzz::require(one.finish() == two.finish(), "two twins disagree on the end of a stream");
  if (!edited) {
    fuzz::require(whole, "what was coded is called damaged");
    for (std::size_t i = 0; i < parts; ++i) fuzz::require(all[i].scalar == symbols[i], "other symbols come back");
  }
  return 0;
}

// Kernels by themselves, of any size, on any memory that their callers may give: what the scalar twin makes, and what
// that of the level does that KVSTORE_CPU names, or of the machine's best.
#include "entropy/dispatch.h"
#include "fuzz.h"
#include "rans/rans.h"
#include "splitzip/dispatch.h"
#include "trie/trie.h"

namespace {

using namespace kvstore;

template <class T>
using Numbers = std::vector<T>;

template <class T>
Numbers<T> numbers(fuzz::Random& random, std::size_t count, std::int64_t low, std::int64_t high) {
  Numbers<T> made(count);
  for (T& number : made) number = static_cast<T>(random.between(low, high));
  return made;
}

// What both twins made.
template <class T>
void same(const Numbers<T>& one, const Numbers<T>& two, const char* what) {
  fuzz::require(one == two, what);
  fuzz::tell(two.data(), two.size() * sizeof(T));
}

// Any bits, values that are alike, or alike but for a few.
template <class T>
Numbers<T> values(fuzz::Random& random, std::size_t count) {
  const auto kind = random.next() % 3;
  const int mantissa = sizeof(T) == 2 ? 7 : 2, around = sizeof(T) == 2 ? 120 : 14;
  Numbers<T> made(count);
  for (T& value : made) {
    const auto exponent = static_cast<int>(around + random.between(-9, kind == 1 ? 6 : 5));
    const auto sign = (random.next() & 1) << (8 * sizeof(T) - 1);
    const auto alike = static_cast<T>((random.next() & ((1u << mantissa) - 1)) | sign |
                                      static_cast<unsigned>(exponent) << mantissa);
    value = kind == 0 || (kind == 2 && random.next() % 8 == 0) ? static_cast<T>(random.next()) : alike;
    if (kind == 2 && random.next() % 16 == 0) value = static_cast<T>(value & ((1u << mantissa) - 1));
  }
  return made;
}

template <class Head>
void try_splitzip(fuzz::Random& random) {
  using namespace splitzip;
  const splitzip::Kernels<Head>&one = splitzip::kernels<Head>(Level::scalar), &two = splitzip::kernels<Head>(level());
  const auto count = static_cast<std::size_t>(random.next() % 4 ? random.between(0, 300) : random.between(4000, 4096));
  const auto whole = (count + kGroup - 1) / kGroup * kGroup;
  const Numbers<Head> from = values<Head>(random, count);
  const Range a = one.scan(from.data(), count), b = two.scan(from.data(), count);
  fuzz::require(a.top == b.top && a.zero == b.zero, "scan");
  const auto most = static_cast<unsigned>(random.between(0, 260));
  fuzz::require(one.above(from.data(), count, most) == two.above(from.data(), count, most), "above");
  const auto any = static_cast<unsigned>(random.next() % (sizeof(Head) == 2 ? 241 : 17));
  const unsigned fitting = a.top > 15 ? a.top - 15 : 0;
  const Window window{random.next() % 4 ? fitting : any, random.next() % 2 != 0};
  Numbers<std::uint8_t> codes[2], rest[2];
  Numbers<std::uint64_t> escaped[2];
  for (int i = 0; i < 2; ++i) {
    codes[i].assign(whole / 2, 0xAB);
    rest[i].assign(rest_bytes<Head>(whole), 0xAB);
    escaped[i].assign((count + 63) / 64, 7);
    (i ? two : one).pack(from.data(), count, window, codes[i].data(), rest[i].data(), escaped[i].data(), 0);
  }
  same(codes[0], codes[1], "codes");
  same(rest[0], rest[1], "rest");
  same(escaped[0], escaped[1], "escapes");
  if (random.next() % 2) {
    codes[0] = numbers<std::uint8_t>(random, codes[0].size(), 0, 255);
    rest[0] = numbers<std::uint8_t>(random, rest[0].size(), 0, 255);
  }
  Numbers<Head> to[2];
  for (int i = 0; i < 2; ++i) {
    to[i].assign(count, 0x5A);
    (i ? two : one).unpack(codes[0].data(), rest[0].data(), count, window, to[i].data(), false);
  }
  same(to[0], to[1], "values");
}

void try_entropy(fuzz::Random& random) {
  using namespace entropy;
  const entropy::Kernels &one = entropy::kernels(Level::scalar), &two = entropy::kernels(level());
  const auto tokens = static_cast<std::size_t>(random.next() % 8 ? random.between(1, 40) : random.between(250, 300));
  const auto dim = static_cast<std::size_t>(random.next() % 8 ? random.between(1, 90) : random.between(250, 300));
  const Numbers<std::uint16_t> from = values<std::uint16_t>(random, tokens * dim);
  auto base = numbers<std::uint16_t>(random, dim, 120, 140), flip = numbers<std::uint16_t>(random, dim, 0, 1);
  Numbers<std::uint8_t> chosen = numbers<std::uint8_t>(random, dim, 0, entropy::kClasses - 1);
  const entropy::Channels channels{base.data(), flip.data(), chosen.data()};
  Numbers<std::uint8_t> edges[4];
  for (auto& edge : edges) edge = numbers<std::uint8_t>(random, dim, 0, random.next() % 2 ? 40 : 255);
  const Ranges ranges{{edges[0].data(), edges[1].data()}, {edges[2].data(), edges[3].data()}};
  const auto costs = numbers<std::uint16_t>(random, entropy::kSymbols * entropy::kClasses, 0, 1000);
  const auto any = numbers<std::uint8_t>(random, tokens * dim, 0, entropy::kSymbols - 1);
  const std::size_t low_bytes = (tokens * dim + 1) / 2 + (tokens * dim + 7) / 8;
  Numbers<std::uint32_t> sums[2];
  Numbers<std::uint8_t> symbols[2], best[2], known[2], low[2];
  Numbers<std::uint16_t> joined[2], plain[2];
  std::size_t escapes[2];
  for (int i = 0; i < 2; ++i) {
    const entropy::Kernels& run = i ? two : one;
    sums[i].resize(2 * dim);
    run.count(from.data(), tokens, dim, sums[i].data(), sums[i].data() + dim);
    symbols[i].resize(tokens * dim);
    run.symbols(from.data(), tokens, dim, channels, symbols[i].data());
    best[i].resize(dim);
    run.choose(any.data(), tokens, dim, costs.data(), best[i].data());
    known[i] = any;
    escapes[i] = run.restrict_(known[i].data(), tokens, dim, ranges);
    low[i].resize(low_bytes);
    run.low(from.data(), tokens * dim, low[i].data());
    joined[i].resize(tokens * dim);
    run.join(any.data(), low[i].data(), tokens, dim, channels, joined[i].data());
    plain[i].resize(tokens * dim);
    run.join(any.data(), nullptr, tokens, dim, channels, plain[i].data());
  }
  same(sums[0], sums[1], "sums of channels");
  same(symbols[0], symbols[1], "symbols");
  same(best[0], best[1], "classes of channels");
  same(known[0], known[1], "symbols that are known");
  fuzz::require(escapes[0] == escapes[1], "numbers of escapes");
  same(low[0], low[1], "lowest bits");
  same(joined[0], joined[1], "words");
  same(plain[0], plain[1], "words without lowest bits");
}

// Streams of every twin, with less room than they need, too, and what comes of one that ends early.
void try_rans(fuzz::Random& random) {
  const int bits = 11 + static_cast<int>(random.next() % 2);
  const auto tables = static_cast<std::size_t>(random.between(1, 5));
  Numbers<std::uint16_t> freqs(tables * rans::Tables::kSymbols, 0);
  for (std::size_t t = 0; t < tables; ++t) {
    const std::int64_t most = random.next() % 3 ? 60 : 1 << bits;
    for (int left = 1 << bits; left > 0;) {
      const auto part = static_cast<int>(random.between(1, std::min<std::int64_t>(left, most)));
      freqs[t * 256 + random.next() % 256] += static_cast<std::uint16_t>(part);
      left -= part;
    }
  }
  rans::Tables made;
  fuzz::require(made.build(freqs.data(), tables, bits), "tables");
  const auto n = static_cast<std::size_t>(random.next() % 4 ? random.between(0, 200) : random.between(2000, 5000));
  const auto period = static_cast<std::size_t>(random.between(1, random.next() % 2 ? 70 : 2000));
  const auto classes = numbers<std::uint8_t>(random, period, 0, static_cast<std::int64_t>(tables) - 1);
  const bool unused = random.next() % 8 == 0;  // a symbol may have frequency 0
  Numbers<std::uint8_t> symbols(n);
  for (std::size_t i = 0; i < n; ++i)
    do symbols[i] = static_cast<std::uint8_t>(random.next());
    while (freqs[classes[i % period] * std::size_t{256} + symbols[i]] == 0 && !(unused && random.next() % 64 == 0));
  const std::size_t most = rans::bound(n);
  for (const std::size_t room : {most, most - most / 8, most / 2}) {
    Numbers<std::uint8_t> out[2];
    std::int64_t length[2];
    for (int i = 0; i < 2; ++i) {
      out[i].resize(room);
      length[i] = rans::encode(made, symbols.data(), n, classes.data(), period, out[i].data(), room,
                               i ? level() : Level::scalar);
      out[i].resize(length[i] < 0 ? 0 : static_cast<std::size_t>(length[i]));
    }
    fuzz::require(length[0] == length[1], "lengths of streams");
    same(out[0], out[1], "streams");
    if (out[0].empty()) continue;
    if (random.next() % 2) out[0].resize(out[0].size() - std::min<std::size_t>(out[0].size(), random.next() % 70));
    Numbers<std::uint8_t> back[2];
    std::int64_t status[2];
    for (int i = 0; i < 2; ++i) {
      back[i].resize(n);
      status[i] = rans::decode(made, out[0].data(), out[0].size(), classes.data(), period, back[i].data(), n,
                               i ? level() : Level::scalar);
    }
    fuzz::require(status[0] == status[1], "what is said of a stream");
    if (status[0] == 0) same(back[0], back[1], "decoded symbols");
  }
}

void try_prefix(fuzz::Random& random) {
  const auto count = static_cast<std::size_t>(random.between(0, 150));
  const auto offset = static_cast<std::size_t>(random.next() % 5);
  auto a = numbers<std::uint32_t>(random, count + offset, 0, 65535);
  const Numbers<std::uint16_t> narrow(a.begin(), a.end());
  auto b = a;
  for (auto left = random.next() % 3; count != 0 && left != 0; --left)
    b[offset + random.next() % count] ^= 1u << random.next() % 32;
  const auto size = static_cast<std::uint32_t>(count);
  const std::uint32_t found[] = {common_prefix(Level::scalar)(a.data() + offset, b.data() + offset, size),
                                 common_prefix(level())(a.data() + offset, b.data() + offset, size),
                                 common_narrow_prefix(Level::scalar)(narrow.data() + offset, b.data() + offset, size),
                                 common_narrow_prefix(level())(narrow.data() + offset, b.data() + offset, size)};
  fuzz::require(found[0] == found[1] && found[2] == found[3] && found[0] == found[2], "prefixes");
  fuzz::tell(found, sizeof found);
}

}  // namespace

extern "C" int try_kernels(const std::uint8_t* data, std::size_t size) {
  fuzz::Input input(data, size);
  fuzz::Random random(input.number(8));
  try_splitzip<std::uint16_t>(random);
  try_splitzip<std::uint8_t>(random);
  try_entropy(random);
  try_rans(random);
  try_prefix(random);
  return 0;
}

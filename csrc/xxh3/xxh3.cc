#include "xxh3/xxh3.h"

#include "xxh3/dispatch.h"

namespace kvstore {

namespace {

using namespace xxh3;

uint64_t fold(uint64_t a, uint64_t b) {
  __extension__ using Wide = unsigned __int128;
  const Wide product = static_cast<Wide>(a) * b;
  return static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
}

uint64_t mix16(const uint8_t* data, size_t secret) {
  return fold(load64(data) ^ load64(kSecret + secret), load64(data + 8) ^ load64(kSecret + secret + 8));
}

uint64_t avalanche(uint64_t hash) {
  hash ^= hash >> 37;
  hash *= 0x165667919E3779F9ull;
  return hash ^ (hash >> 32);
}

uint64_t to_128(const uint8_t* data, size_t size) {
  uint64_t sum = size * kPrime64_1;
  for (size_t i = (size - 1) / 32 + 1; i > 0; --i)
    sum += mix16(data + 16 * (i - 1), 32 * (i - 1)) + mix16(data + size - 16 * i, 32 * (i - 1) + 16);
  return avalanche(sum);
}

uint64_t to_240(const uint8_t* data, size_t size) {
  uint64_t sum = size * kPrime64_1;
  for (size_t i = 0; i < 8; ++i) sum += mix16(data + 16 * i, 16 * i);
  sum = avalanche(sum);
  for (size_t i = 8; i < size / 16; ++i) sum += mix16(data + 16 * i, 16 * (i - 8) + 3);
  return avalanche(sum + mix16(data + size - 16, 136 - 17));
}

// The sums of more than 240 bytes.
struct Sums {
  alignas(64) uint64_t sums[kSums] = {kPrime32_3, kPrime64_1, kPrime64_2, kPrime64_3,
                                      kPrime64_4, kPrime32_2, kPrime64_5, kPrime32_1};

  Sums(const uint8_t* data, size_t size, Level level) {
    kernels(level).stripes(sums, data, (size - 1) / kStripe);
    scalar::accumulate(sums, data + size - kStripe, kSecret + kSecretBytes - kStripe - 7);
  }

  uint64_t merged(uint64_t sum, size_t secret) const {
    for (size_t i = 0; i < kSums / 2; ++i)
      sum += fold(sums[2 * i] ^ load64(kSecret + secret + 16 * i),
                  sums[2 * i + 1] ^ load64(kSecret + secret + 8 + 16 * i));
    return avalanche(sum);
  }
};

void store_big_endian(uint8_t* to, uint64_t value) {
  for (int i = 7; i >= 0; --i, value >>= 8) to[i] = static_cast<uint8_t>(value);
}

constexpr size_t kFirst = 11;  // where the sums' part of the secret begins

}  // namespace

uint64_t xxh3_64(const uint8_t* data, size_t size, Level level) {
  if (size <= 128) return to_128(data, size);
  if (size <= 240) return to_240(data, size);
  return Sums(data, size, level).merged(size * kPrime64_1, kFirst);
}

std::array<uint8_t, 16> xxh3_128(const uint8_t* data, size_t size, Level level) {
  const Sums sums(data, size, level);
  std::array<uint8_t, 16> found;
  store_big_endian(found.data(), sums.merged(~(size * kPrime64_2), kSecretBytes - kStripe - kFirst));
  store_big_endian(found.data() + 8, sums.merged(size * kPrime64_1, kFirst));
  return found;
}

}  // namespace kvstore

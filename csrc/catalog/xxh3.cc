#include "catalog/xxh3.h"

#include <cstring>

namespace kvstore {

namespace {

constexpr uint64_t kPrime32_1 = 0x9E3779B1u, kPrime32_2 = 0x85EBCA77u, kPrime32_3 = 0xC2B2AE3Du;
constexpr uint64_t kPrime64_1 = 0x9E3779B185EBCA87ull, kPrime64_2 = 0xC2B2AE3D27D4EB4Full,
                   kPrime64_3 = 0x165667B19E3779F9ull, kPrime64_4 = 0x85EBCA77C2B2AE63ull,
                   kPrime64_5 = 0x27D4EB2F165667C5ull;
constexpr size_t kStripe = 64, kSecretBytes = 192, kStripesOfBlock = (kSecretBytes - kStripe) / 8;

constexpr uint8_t kSecret[kSecretBytes] = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c, 0xde, 0xd4, 0x6d,
    0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f, 0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0,
    0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21, 0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0,
    0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c, 0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b,
    0x1b, 0x53, 0x2e, 0xa3, 0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac,
    0xd8, 0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d, 0x8a, 0x51,
    0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64, 0xea, 0xc5, 0xac, 0x83, 0x34,
    0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb, 0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49,
    0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e, 0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8,
    0xd1, 0x7a, 0xd0, 0x31, 0xce, 0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b,
    0x40, 0x7e,
};

uint64_t load64(const uint8_t* from) {
  uint64_t value;
  std::memcpy(&value, from, sizeof(value));
  return value;
}

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

void accumulate(uint64_t* sums, const uint8_t* data, const uint8_t* secret) {
  for (size_t i = 0; i < 8; ++i) {
    const uint64_t value = load64(data + 8 * i), key = value ^ load64(secret + 8 * i);
    sums[i ^ 1] += value;
    sums[i] += (key & 0xffffffffu) * (key >> 32);
  }
}

uint64_t beyond_240(const uint8_t* data, size_t size) {
  uint64_t sums[8] = {kPrime32_3, kPrime64_1, kPrime64_2, kPrime64_3, kPrime64_4, kPrime32_2, kPrime64_5, kPrime32_1};
  const size_t stripes = (size - 1) / kStripe;
  for (size_t i = 0; i < stripes; ++i) {
    accumulate(sums, data + kStripe * i, kSecret + 8 * (i % kStripesOfBlock));
    if (i % kStripesOfBlock != kStripesOfBlock - 1) continue;
    for (size_t k = 0; k < 8; ++k)
      sums[k] = (sums[k] ^ (sums[k] >> 47) ^ load64(kSecret + kSecretBytes - kStripe + 8 * k)) * kPrime32_1;
  }
  accumulate(sums, data + size - kStripe, kSecret + kSecretBytes - kStripe - 7);
  uint64_t sum = size * kPrime64_1;
  for (size_t i = 0; i < 4; ++i)
    sum += fold(sums[2 * i] ^ load64(kSecret + 11 + 16 * i), sums[2 * i + 1] ^ load64(kSecret + 19 + 16 * i));
  return avalanche(sum);
}

}  // namespace

uint64_t xxh3_64(const uint8_t* data, size_t size) {
  return size > 240 ? beyond_240(data, size) : size > 128 ? to_240(data, size) : to_128(data, size);
}

}  // namespace kvstore

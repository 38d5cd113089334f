// The inner loops of the entropy codec as a table of functions, and what they are called with.
#pragma once

#include <cstddef>
#include <cstdint>

#include "entropy/entropy.h"
#include "entropy/forms.h"

namespace kvstore::entropy {

inline constexpr unsigned kAbove = 8;
inline constexpr unsigned kMostDelta = 7;  // steps that a channel's mean exponent may be below its head's largest
inline constexpr unsigned kMostUnit = 4;   // exponents of a step

// What a head's channels are like. Arrays of `dim`.
struct Channels {
  std::uint16_t* base;   // 8 above the mean exponent
  std::uint16_t* flip;   // 1: the sign is mostly negative
  std::uint8_t* chosen;  // class
};

// The symbols that the class of a channel knows, of either sign: begin <= symbol <= begin + width. Arrays of `dim`.
struct Ranges {
  std::uint8_t* begin[2];
  std::uint8_t* width[2];
};

// The loops up to `join` work on words: bf16 values, or what stands for values of other dtypes (entropy/forms.h).
struct Kernels {
  // Sums of exponents and of signs per channel.
  void (*count)(const std::uint16_t* values, std::size_t tokens, std::size_t dim, std::uint32_t* exponents,
                std::uint32_t* signs);
  void (*symbols)(const std::uint16_t* values, std::size_t tokens, std::size_t dim, const Channels& channels,
                  std::uint8_t* out);
  // The class of every channel that costs least for a sample of its symbols.
  void (*choose)(const std::uint8_t* symbols, std::size_t tokens, std::size_t dim, const std::uint16_t* costs,
                 std::uint8_t* chosen);
  // Replaces symbols that their class does not know; returns how many escapes there are.
  std::size_t (*restrict_)(std::uint8_t* symbols, std::size_t tokens, std::size_t dim, const Ranges& known);
  void (*low)(const std::uint16_t* values, std::size_t count, std::uint8_t* out);
  // Words of symbols that are no escapes. low: the two planes of `tokens` * dim words; null: their lowest bits are 0.
  void (*join)(const std::uint8_t* symbols, const std::uint8_t* low, std::size_t tokens, std::size_t dim,
               const Channels& channels, std::uint16_t* values);
  // The bits that are set in any of the values, 4 bytes each.
  std::uint32_t (*any)(const std::uint8_t* values, std::size_t count);
  // The words of values of a dtype other than bf16, and back; and what words leave out of values. lower: bytes of an
  // fp32's lower half that are kept.
  void (*words)(Dtype dtype, const std::uint8_t* values, std::size_t count, std::uint16_t* words);
  void (*keep)(Dtype dtype, std::size_t lower, const std::uint8_t* values, std::size_t count, std::uint8_t* kept);
  void (*merge)(Dtype dtype, std::size_t lower, const std::uint16_t* words, const std::uint8_t* kept,
                std::size_t count, std::uint8_t* values);
};

}  // namespace kvstore::entropy

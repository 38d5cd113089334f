// Interleaved rANS: bytes coded with one of up to 256 tables each, decoded 32 at a time.
//
// Stream of n symbols in one or several parts (all integers little endian):
//
//   n == 0: no bytes.
//   n > 0:  u32 state[32], then the u16 words of the first part, of the second and so on, nothing after them.
//
// Let M = 2^bits (bits 11 or 12). Table t gives symbol s the frequency f(t, s) in 0..M and the offset
// c(t, s) = f(t, 0) + ... + f(t, s - 1); the frequencies of a table sum to M. Symbol i of a part is coded with table
// classes[i % period], the part's own, by lane i % 32; the lanes keep their states from part to part. So the classes
// of a part may follow from the symbols of those before it. How many symbols a part has is for the reader to know. A
// lane's state x is always in [2^15, 2^31). To decode symbol i its lane takes
//
//   slot = x % M;   s = the symbol with c(s) <= slot < c(s) + f(s);   x = f(s) * (x / M) + slot - c(s)
//
// and then, if x < 2^15, x = x * 2^16 + the next word. Lanes take their words in the order of the symbols. After the
// last part every state is 2^15 (also those of lanes that had no symbol) and every word has been taken; a decoder must
// check both. The encoder is the inverse, from the last symbol to the first, starting with all states 2^15.
//
// The header's 32 states carry about 16 bits each of the message; a stream is 64 bytes longer than its code length,
// however many parts it has.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "common/cpu.h"

namespace kvstore::rans {

constexpr std::size_t kLanes = 32;
constexpr std::size_t kHeaderBytes = 4 * kLanes;
constexpr std::uint32_t kLow = 1u << 15;  // states are at least this, and exactly this before the first symbol

// Results of encode and decode below zero.
enum Error : std::int64_t {
  kUnknownClass = -1,   // a class is not the number of a table, or period is 0
  kUnusedSymbol = -2,   // a symbol has frequency 0 in its table
  kNoRoom = -3,         // the stream is longer than capacity
  kDamaged = -4,        // the stream is not one that encode made with these tables, classes and lengths
};

class ClassWalk;
struct Stream;

// Immutable once built; any number of threads may use one.
class Tables {
 public:
  static constexpr std::size_t kSymbols = 256;

  // freqs: [tables, 256]. False, and unusable, unless 1 <= tables <= 256, bits is 11 or 12 and every row sums to
  // 2^bits. Allocates 1 KiB + 4 * 2^bits bytes a table.
  bool build(const std::uint16_t* freqs, std::size_t tables, int bits);

  int bits() const { return bits_; }
  std::size_t count() const { return count_; }

  // [tables][256] for encoding: bits 0..11 frequency - 1, 12..23 offset, bit 31 set if the frequency is 0. Four
  // bytes hold all because the division is done in floating point and corrected (see rans/avx512-inl.h).
  const std::uint32_t* entries() const { return entries_.data(); }

  // [tables][2^bits] for decoding: bits 0..7 symbol, 8..19 its frequency - 1, 20..31 slot - offset.
  const std::uint32_t* slots() const { return slots_.data(); }

 private:
  int bits_ = 0;
  std::size_t count_ = 0;
  std::vector<std::uint32_t> entries_;
  std::vector<std::uint32_t> slots_;
};

// The most bytes that a stream of n symbols in all takes, whatever the tables are.
constexpr std::size_t bound(std::size_t n) { return n == 0 ? 0 : kHeaderBytes + 2 * n; }

// What is coded with classes of its own. min(period, n) bytes of classes are read.
struct Part {
  const std::uint8_t* symbols;
  std::size_t n;
  const std::uint8_t* classes;
  std::size_t period;
};

// Writes the stream of `count` parts to out and returns its length, or an Error. ends, [count] or null: the bytes of
// the stream up to the end of each part's words; defined only when there is no error. All of out, capacity bytes, may
// be overwritten, whatever the result; it must not overlap the inputs, nor may these change during the call. capacity
// may be less than bound(n) if the stream is expected to be shorter.
std::int64_t encode(const Tables& tables, const Part* parts, std::size_t count, std::uint8_t* out,
                    std::size_t capacity, std::size_t* ends, Level level);

// Of one part.
std::int64_t encode(const Tables& tables, const std::uint8_t* symbols, std::size_t n, const std::uint8_t* classes,
                    std::size_t period, std::uint8_t* out, std::size_t capacity, Level level);

// A stream that is being decoded, for kernels that take its symbols themselves.
struct Steps {
  const std::uint32_t* slots;  // of Tables
  std::uint32_t* states;       // [kLanes]
  const std::uint8_t*& words;  // the next one
  const std::uint8_t* end;     // of the words
};

// Decodes a stream part by part. Cheap to make; allocates nothing. The tables and the stream must outlive it, and the
// stream must not change. Any stream is safe to give; damage is found unless all final states are right by chance, so
// callers that must know keep a checksum. Not for two threads at once.
class Decoder {
 public:
  Decoder(const Tables& tables, const std::uint8_t* stream, std::size_t nbytes);

  // Writes the n symbols of the next part to out and returns 0, or an Error; out's content is undefined then.
  // kDamaged is for ever; after kUnknownClass the part may be asked for again. min(period, n) bytes of classes are
  // read; they and the stream must not overlap out.
  std::int64_t part(const std::uint8_t* classes, std::size_t period, std::uint8_t* out, std::size_t n, Level level);

  // For a kernel that decodes whole steps of 32 symbols, none of a class from `classes` on, as long as there are
  // kStepBytes of words for each. There are none if the stream is damaged or there are fewer tables. A part of which
  // the kernel took nothing must go on with `part`.
  Steps steps(std::size_t classes) {
    const bool usable = !damaged_ && words_ != stream_ && classes <= tables_->count();
    any_ |= usable;
    return {tables_->slots(), states_, words_, usable ? end_ : words_};
  }

  // Bytes of the stream that the parts so far, and the states, have taken.
  std::int64_t position() const { return words_ - stream_; }

  // 0 if the stream ends here as it should, otherwise kDamaged.
  std::int64_t finish() const;

 private:
  friend std::int64_t decode(const Tables& tables, const Stream& one, const Stream& two, Level level);

  std::int64_t begin(const std::uint8_t* classes, std::size_t period, std::size_t n);
  template <int BITS>
  bool part_bits(ClassWalk& walk, std::uint8_t* out, std::size_t n, Level level);

  const Tables* tables_;
  const std::uint8_t* stream_;
  const std::uint8_t* words_;  // the next word
  const std::uint8_t* end_;
  bool damaged_ = false;
  bool any_ = false;  // symbols so far
  std::uint32_t states_[kLanes];
};

// A stream of one part of n symbols, and where they are written to. min(period, n) bytes of classes are read.
struct Stream {
  const std::uint8_t* bytes;
  std::size_t nbytes;
  const std::uint8_t* classes;
  std::size_t period;
  std::uint8_t* out;
  std::size_t n;
};

// Decodes both streams at once, which is faster than one after the other. Returns 0 or an Error of either.
std::int64_t decode(const Tables& tables, const Stream& one, const Stream& two, Level level);

// Writes the n symbols of a stream of one part to out and returns 0, or an Error, as the Decoder does.
std::int64_t decode(const Tables& tables, const std::uint8_t* stream, std::size_t nbytes, const std::uint8_t* classes,
                    std::size_t period, std::uint8_t* out, std::size_t n, Level level);

}  // namespace kvstore::rans

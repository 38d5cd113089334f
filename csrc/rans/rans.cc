#include "rans/rans.h"

#include <algorithm>
#include <cstring>

#include "common/endian.h"
#include "rans/dispatch.h"
#include "rans/walk.h"

namespace kvstore::rans {
namespace {

bool known(const std::uint8_t* classes, std::size_t period, std::size_t n, std::size_t tables) {
  const std::size_t count = period < n ? period : n;
  std::uint8_t most = 0;
  for (std::size_t i = 0; i < count; ++i) most = classes[i] > most ? classes[i] : most;
  return count != 0 && most < tables;
}

// Codes `lanes` symbols, the last first, counting the room for every word; may write the 2 bytes below floor. False:
// no room.
template <int BITS>
bool encode_carefully(const std::uint32_t* entries, std::uint32_t* states, const std::uint8_t* symbols,
                      const std::uint8_t* classes, std::size_t lanes, std::uint8_t*& top, const std::uint8_t* floor,
                      std::uint32_t& seen) {
  while (lanes-- > 0) {
    const std::uint32_t e = entries[std::size_t{classes[lanes]} * Tables::kSymbols + symbols[lanes]];
    seen |= e;
    states[lanes] = scalar::encode_lane<BITS>(e, states[lanes], top);
    if (top < floor) return false;  // the word lies in the header's place, which is ours to write
  }
  return true;
}

// Codes a part, the last symbol first. False: no room.
template <int BITS>
bool encode_part(const std::uint32_t* entries, std::uint32_t* states, const Part& part, std::uint8_t*& top,
                 const std::uint8_t* floor, std::uint32_t& seen, Level level) {
  const std::size_t tail = part.n % kLanes;
  const std::uint8_t* const whole = part.symbols + (part.n - tail);
  std::size_t steps = part.n / kLanes;
  ClassWalk walk(part.classes, part.period, part.n, part.n - tail);
  if (!encode_carefully<BITS>(entries, states, whole, walk.here(tail), tail, top, floor, seen)) return false;
  steps = encode_steps<BITS>(level)(entries, states, whole, walk, steps, top, floor, seen);
  while (steps-- > 0) {  // less than a step's room is left, which may still be enough
    walk.back();
    if (!encode_carefully<BITS>(entries, states, part.symbols + steps * kLanes, walk.here(), kLanes, top, floor, seen))
      return false;
  }
  return true;
}

template <int BITS>
std::int64_t encode_bits(const Tables& tables, const Part* parts, std::size_t count, std::uint8_t* out,
                         std::size_t capacity, std::size_t* ends, Level level) {
  std::uint32_t states[kLanes];
  for (std::uint32_t& x : states) x = kLow;
  std::uint8_t* const end = out + capacity;
  std::uint8_t* const floor = out + kHeaderBytes;
  std::uint8_t* top = end;
  std::uint32_t seen = 0;
  for (std::size_t i = count; i-- > 0;) {
    if (ends != nullptr) ends[i] = static_cast<std::size_t>(end - top);  // what follows the part, for now
    if (parts[i].n != 0 && !encode_part<BITS>(tables.entries(), states, parts[i], top, floor, seen, level))
      return kNoRoom;
  }
  if (seen >> 31) return kUnusedSymbol;
  for (std::size_t lane = 0; lane < kLanes; ++lane) store32(out + 4 * lane, states[lane]);
  const auto bytes = static_cast<std::size_t>(end - top);
  std::memmove(floor, top, bytes);
  for (std::size_t i = 0; ends != nullptr && i < count; ++i) ends[i] = kHeaderBytes + bytes - ends[i];
  return static_cast<std::int64_t>(kHeaderBytes + bytes);
}

}  // namespace

bool Tables::build(const std::uint16_t* freqs, std::size_t tables, int bits) {
  if (tables < 1 || tables > 256 || (bits != 11 && bits != 12)) return false;
  const std::uint32_t all = 1u << bits;
  for (std::size_t t = 0; t < tables; ++t) {
    std::uint32_t sum = 0;
    for (std::size_t s = 0; s < kSymbols; ++s) sum += freqs[t * kSymbols + s];
    if (sum != all) return false;
  }
  bits_ = bits;
  count_ = tables;
  entries_.assign(tables * kSymbols, 1u << 31);
  slots_.resize(tables << bits);
  for (std::size_t t = 0; t < tables; ++t) {
    std::uint32_t* slot = slots_.data() + (t << bits);
    std::uint32_t offset = 0;
    for (std::uint32_t s = 0; s < kSymbols; ++s) {
      const std::uint32_t f = freqs[t * kSymbols + s];
      if (f == 0) continue;
      entries_[t * kSymbols + s] = (f - 1) | offset << 12;
      for (std::uint32_t i = 0; i < f; ++i) *slot++ = s | (f - 1) << 8 | i << 20;
      offset += f;
    }
  }
  return true;
}

std::int64_t encode(const Tables& tables, const Part* parts, std::size_t count, std::uint8_t* out,
                    std::size_t capacity, std::size_t* ends, Level level) {
  bool any = false;
  for (std::size_t i = 0; i < count; ++i) {
    if (parts[i].n == 0) continue;
    any = true;
    if (!known(parts[i].classes, parts[i].period, parts[i].n, tables.count())) return kUnknownClass;
  }
  if (!any) {
    for (std::size_t i = 0; ends != nullptr && i < count; ++i) ends[i] = 0;
    return 0;
  }
  if (capacity < kHeaderBytes) return kNoRoom;
  return tables.bits() == 11 ? encode_bits<11>(tables, parts, count, out, capacity, ends, level)
                             : encode_bits<12>(tables, parts, count, out, capacity, ends, level);
}

std::int64_t encode(const Tables& tables, const std::uint8_t* symbols, std::size_t n, const std::uint8_t* classes,
                    std::size_t period, std::uint8_t* out, std::size_t capacity, Level level) {
  const Part part = {symbols, n, classes, period};
  return encode(tables, &part, 1, out, capacity, nullptr, level);
}

Decoder::Decoder(const Tables& tables, const std::uint8_t* stream, std::size_t nbytes)
    : tables_(&tables), stream_(stream), words_(stream), end_(stream + nbytes) {
  // An odd byte at the end would be half a word.
  damaged_ = nbytes != 0 && (nbytes < kHeaderBytes || nbytes % 2 != 0);
  for (std::size_t lane = 0; lane < kLanes; ++lane) {
    states_[lane] = nbytes == 0 || damaged_ ? kLow : load32(stream + 4 * lane);
    if (states_[lane] < kLow || states_[lane] >> 31) damaged_ = true;
  }
  if (nbytes >= kHeaderBytes) words_ += kHeaderBytes;
}

// walk: stands at the first of the n symbols.
template <int BITS>
bool Decoder::part_bits(ClassWalk& walk, std::uint8_t* out, std::size_t n, Level level) {
  const std::uint32_t* slots = tables_->slots();
  const std::size_t tail = n % kLanes;
  const std::size_t steps = n / kLanes;
  const DecodeSteps decode = decode_steps<BITS>(level);
  std::size_t left = decode(slots, states_, words_, end_, walk, steps, out);
  if (left == 0 && tail == 0) return true;

  // What is left of the words, followed by zeros: no step reads beyond, and one that takes zeros is found out below.
  std::uint8_t last[2 * kStepBytes] = {};
  const std::ptrdiff_t have = end_ - words_;
  std::memcpy(last, words_, static_cast<std::size_t>(have < kStepBytes ? have : kStepBytes));
  const std::uint8_t* at = last;
  left = decode(slots, states_, at, last + sizeof last, walk, left, out + (steps - left) * kLanes);
  if (left != 0 || at - last > have) return false;
  const std::uint8_t* lanes = walk.here(tail);
  for (std::size_t lane = 0; lane < tail; ++lane) {
    const std::uint32_t x = states_[lane];
    const std::uint32_t e = slots[(std::size_t{lanes[lane]} << BITS) + (x & ((1u << BITS) - 1))];
    out[n - tail + lane] = static_cast<std::uint8_t>(e);
    states_[lane] = scalar::decode_lane<BITS>(e, x, at);
  }
  if (at - last > have) return false;
  words_ += at - last;
  return true;
}

// Before symbols are taken, at least one.
std::int64_t Decoder::begin(const std::uint8_t* classes, std::size_t period, std::size_t n) {
  if (!known(classes, period, n, tables_->count())) return kUnknownClass;
  if (words_ == stream_) damaged_ = true;  // a stream without states is one without symbols
  if (damaged_) return kDamaged;
  any_ = true;
  return 0;
}

std::int64_t Decoder::part(const std::uint8_t* classes, std::size_t period, std::uint8_t* out, std::size_t n,
                           Level level) {
  if (n == 0) return damaged_ ? kDamaged : std::int64_t{0};
  if (const std::int64_t status = begin(classes, period, n)) return status;
  ClassWalk walk(classes, period, n, 0);
  damaged_ = !(tables_->bits() == 11 ? part_bits<11>(walk, out, n, level) : part_bits<12>(walk, out, n, level));
  return damaged_ ? kDamaged : std::int64_t{0};
}

std::int64_t Decoder::finish() const {
  if (damaged_ || words_ != end_ || any_ != (words_ != stream_)) return kDamaged;
  for (const std::uint32_t x : states_)
    if (x != kLow) return kDamaged;
  return 0;
}

std::int64_t decode(const Tables& tables, const Stream& one, const Stream& two, Level level) {
  const auto alone = [&](const Stream& s) {
    return decode(tables, s.bytes, s.nbytes, s.classes, s.period, s.out, s.n, level);
  };
  const DecodePair pair = tables.bits() == 11 ? decode_pair<11>(level) : decode_pair<12>(level);
  if (pair == nullptr || one.n == 0 || two.n == 0) {
    const std::int64_t status = alone(one);
    return status != 0 ? status : alone(two);
  }
  const Stream* const streams[] = {&one, &two};
  Decoder decoders[] = {{tables, one.bytes, one.nbytes}, {tables, two.bytes, two.nbytes}};
  for (std::size_t i = 0; i < 2; ++i)
    if (const std::int64_t status = decoders[i].begin(streams[i]->classes, streams[i]->period, streams[i]->n))
      return status;
  ClassWalk walks[] = {{one.classes, one.period, one.n, 0}, {two.classes, two.period, two.n, 0}};
  Side sides[] = {{decoders[0].states_, decoders[0].words_, decoders[0].end_, walks[0], one.out},
                  {decoders[1].states_, decoders[1].words_, decoders[1].end_, walks[1], two.out}};
  pair(tables.slots(), sides[0], sides[1], std::min(one.n, two.n) / kLanes);
  for (std::size_t i = 0; i < 2; ++i) {
    decoders[i].words_ = sides[i].words;
    std::uint8_t* const out = sides[i].out;
    const std::size_t left = streams[i]->n - static_cast<std::size_t>(out - streams[i]->out);
    const bool good = tables.bits() == 11 ? decoders[i].part_bits<11>(walks[i], out, left, level)
                                          : decoders[i].part_bits<12>(walks[i], out, left, level);
    if (!good || decoders[i].finish() != 0) return kDamaged;
  }
  return 0;
}

std::int64_t decode(const Tables& tables, const std::uint8_t* stream, std::size_t nbytes, const std::uint8_t* classes,
                    std::size_t period, std::uint8_t* out, std::size_t n, Level level) {
  Decoder decoder(tables, stream, nbytes);
  const std::int64_t status = decoder.part(classes, period, out, n, level);
  return status != 0 ? status : decoder.finish();
}

}  // namespace kvstore::rans

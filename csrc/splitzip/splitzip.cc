#include "splitzip/splitzip.h"

#include <cstring>
#include <type_traits>

#include "common/rows.h"
#include "common/stream.h"
#include "splitzip/dispatch.h"

namespace kvstore::splitzip {
namespace {

constexpr std::size_t kHeader = 16;
constexpr std::uint8_t kFixed = 1;  // the modes: 4-bit codes, or all values as they are
constexpr std::uint8_t kPlain = 3;
constexpr std::uint32_t kZeroFlag = 1u << 31;
constexpr std::size_t kPad = 16;            // layers take a multiple of it
constexpr std::size_t kEscape = 3;          // a position (2 bytes) and an exponent
constexpr std::size_t kLowShift = 6;        // more than 1/64 of a chunk below the window of its largest exponent...
constexpr std::size_t kHighShift = 5;       // ...and the window moves down until 1/32 is above it
constexpr std::size_t kStreamBytes = 1 << 22;  // results from this size on are written past the caches

std::size_t item_bytes(Dtype dtype) {
  return dtype == Dtype::float32 ? 4 : dtype == Dtype::bfloat16 || dtype == Dtype::float16 ? 2 : 1;
}
bool is_wide(Dtype dtype) { return dtype == Dtype::bfloat16 || dtype == Dtype::float32; }
std::size_t low_bytes(Dtype dtype) {
  return dtype == Dtype::float32 ? 2 : dtype == Dtype::float16 ? 1 : 0;
}

std::size_t round_up(std::size_t value, std::size_t step) { return (value + step - 1) / step * step; }
std::size_t chunks_of(std::size_t run) { return (run + kChunk - 1) / kChunk; }
std::size_t half(std::size_t values) { return (values + 1) / 2; }
// What the high bits of the exponents take in a chunk that is stored raw: 4 bits each, or 1.
template <class Head>
std::size_t raw_bytes(std::size_t values) {
  return sizeof(Head) == 2 ? half(values) : (values + 7) / 8;
}

// Where the parts of a layer are.
struct Layout {
  std::size_t run[2], padded[2];  // values of a head of K and of V, and the room they have in the planes
  std::uint32_t heads[2];
  std::size_t values, chunks;     // of the whole layer; padded values
  std::size_t codes, rest, low, ends, bases, escapes;

  Layout(const Shape& shape, std::size_t layer) {
    const std::size_t item = item_bytes(shape.dtype);
    values = chunks = 0;
    for (std::size_t i = 0; i < 2; ++i) {
      heads[i] = shape.heads[2 * layer + i];
      run[i] = shape.row_bytes[2 * layer + i] / item * shape.tokens;
      padded[i] = round_up(run[i], kGroup);
      values += heads[i] * padded[i];
      chunks += heads[i] * chunks_of(run[i]);
    }
    codes = kHeader;
    rest = codes + values / 2;
    low = rest + (is_wide(shape.dtype) ? values : values / 8 * 3);
    ends = low + values * low_bytes(shape.dtype);
    bases = ends + 4 * chunks;
    escapes = bases + chunks;
  }
};

// Heads without the low part that a value of a wider dtype has, and that part.
void cut(const std::uint32_t* values, std::size_t count, std::uint16_t* heads, std::uint8_t* low) {
  for (std::size_t i = 0; i < count; ++i) {
    heads[i] = static_cast<std::uint16_t>(values[i] >> 16);
    const auto part = static_cast<std::uint16_t>(values[i]);
    std::memcpy(low + 2 * i, &part, 2);
  }
}
void cut(const std::uint16_t* values, std::size_t count, std::uint8_t* heads, std::uint8_t* low) {
  for (std::size_t i = 0; i < count; ++i) {
    heads[i] = static_cast<std::uint8_t>(values[i] >> 8);
    low[i] = static_cast<std::uint8_t>(values[i]);
  }
}
void paste(const std::uint16_t* heads, const std::uint8_t* low, std::size_t count, std::uint32_t* values) {
  for (std::size_t i = 0; i < count; ++i) {
    std::uint16_t part;
    std::memcpy(&part, low + 2 * i, 2);
    values[i] = static_cast<std::uint32_t>(heads[i]) << 16 | part;
  }
}
void paste(const std::uint8_t* heads, const std::uint8_t* low, std::size_t count, std::uint16_t* values) {
  for (std::size_t i = 0; i < count; ++i) values[i] = static_cast<std::uint16_t>(heads[i] << 8 | low[i]);
}

template <class Head>
struct Wider;  // the value that has this head and a low part
template <>
struct Wider<std::uint16_t> { using Value = std::uint32_t; };
template <>
struct Wider<std::uint8_t> { using Value = std::uint16_t; };

// ---- encoding -------------------------------------------------------------------------------------------------------

Window below(Range range) {
  const unsigned base = range.top > 15 ? range.top - 15 : 0;
  return {base, base > 0 && range.zero};
}

std::size_t count_bits(const std::uint64_t* words, std::size_t bits) {
  std::size_t found = 0;
  for (std::size_t i = 0; i < (bits + 63) / 64; ++i)
    if (words[i] != 0) found += static_cast<std::size_t>(__builtin_popcountll(words[i]));  // few are not: a call
  return found;
}

// The smallest exponent that at most 1/32 of the chunk is above. guess: where to look first.
template <class Head>
unsigned robust_top(const Kernels<Head>& kernel, const Head* values, std::size_t count, unsigned top, unsigned guess) {
  const std::size_t most = count >> kHighShift;
  unsigned low = 0, middle = guess;  // the answer is in [low, top]
  for (unsigned step = 1; low < top; step *= 2) {
    if (middle >= top) middle = top - 1;
    if (middle < low) middle = low;
    if (kernel.above(values, count, middle) <= most) {
      top = middle;
      middle = middle > step ? middle - step : 0;
    } else {
      low = middle + 1;
      middle += step;
    }
  }
  return top;
}

// How many values a window that ends at the largest exponent leaves out.
template <class Head>
std::size_t outside(const Kernels<Head>& kernel, const Head* values, std::size_t count, Window window) {
  const unsigned first = window.base + (window.zero ? 1 : 0);  // the least exponent that has a code; 0 excepted
  const std::size_t inside = first == 0 ? count : kernel.above(values, count, first - 1);
  const std::size_t zeros = window.zero ? count - kernel.above(values, count, 0) : 0;
  return count - inside - zeros;
}

// Writes the escapes of a chunk, `found` of them; returns their bytes.
template <class Head>
std::size_t write_escapes(const Head* values, std::size_t count, const std::uint64_t* escaped, std::size_t found,
                          std::uint8_t* out) {
  if (found == 0) return 0;
  // Positions first, some of them in vain: how many a word has cannot be guessed, and is not asked up to four.
  std::uint16_t positions[kChunk + 64];
  std::uint16_t* to = positions;
  for (std::size_t word = 0; word < (count + 63) / 64; ++word) {
    std::uint64_t bits = escaped[word];
    const auto ones = static_cast<std::size_t>(__builtin_popcountll(bits));
    for (std::size_t i = 0; i < 4 || i < ones; ++i, bits &= bits - 1)
      to[i] = static_cast<std::uint16_t>(64 * word + static_cast<std::size_t>(__builtin_ctzll(bits | 1ull << 63)));
    to += ones;
  }
  for (std::size_t i = 0; i < found; ++i, out += kEscape) {
    const std::uint16_t at = positions[i];
    out[0] = static_cast<std::uint8_t>(at);
    out[1] = static_cast<std::uint8_t>(at >> 8);
    out[2] = static_cast<std::uint8_t>(exponent_of(values[at]));
  }
  return kEscape * found;
}

// Exponents as they are: their low 4 bits among the codes, the high ones where escapes would be.
template <class Head>
std::size_t write_raw(const Head* values, std::size_t count, std::uint8_t* codes, std::uint8_t* out) {
  const std::size_t size = raw_bytes<Head>(count);
  constexpr std::size_t kPerByte = sizeof(Head) == 2 ? 2 : 8;
  std::memset(codes, 0, half(count));
  std::memset(out, 0, size);
  for (std::size_t i = 0; i < count; ++i) {
    const unsigned e = exponent_of(values[i]);
    codes[i / 2] = static_cast<std::uint8_t>(codes[i / 2] | (e & 15u) << (i % 2 * 4));
    out[i / kPerByte] = static_cast<std::uint8_t>(out[i / kPerByte] | (e >> 4) << (i % kPerByte * (8 / kPerByte)));
  }
  return size;
}

struct Coded {
  Window window;
  std::size_t escape_bytes;
  bool raw;
};

// What the chunk before was like: only a guess, the result does not depend on it.
struct Hint {
  bool robust = false;
  unsigned top = 0;
};

// next: where the chunk that follows is; 0 if nowhere, or somewhere else.
template <class Head>
Coded encode_chunk(const Kernels<Head>& kernel, const Head* values, std::size_t count, std::uintptr_t next,
                   std::uint8_t* codes, std::uint8_t* rest, std::uint8_t* escapes, Hint* hint) {
  std::uint64_t escaped[kMasks];
  if (next == 0) next = reinterpret_cast<std::uintptr_t>(values);  // which are here: to look up a page 0 takes long
  const Range range = kernel.scan(values, count);
  const std::size_t most = count >> kLowShift;
  Window window = below(range);
  std::size_t found = 0;
  if (!hint->robust || (found = outside(kernel, values, count, window)) <= most) {
    kernel.pack(values, count, window, codes, rest, escaped, next);
    found = count_bits(escaped, count);
  }
  hint->robust = found > most;
  if (hint->robust) {
    hint->top = robust_top(kernel, values, count, range.top, hint->top);
    window = below({hint->top, range.zero});
    kernel.pack(values, count, window, codes, rest, escaped, next);
    found = count_bits(escaped, count);
  }
  if (kEscape * found >= raw_bytes<Head>(count)) return {{0, false}, write_raw(values, count, codes, escapes), true};
  return {window, write_escapes(values, count, escaped, found, escapes), false};
}

// The address of value `first` of head `h` of K or V, or of what follows in the layer if that head is shorter. Where a
// head ends, in blocks of 64 tokens often after one chunk, the processor cannot guess what comes next.
std::uintptr_t after(const Shape& shape, std::size_t layer, const Rows* source, const Layout& layout, std::size_t i,
                     std::uint32_t h, std::size_t first, std::size_t item) {
  if (first >= layout.run[i]) {
    first = 0;
    if (++h >= layout.heads[i]) {
      h = 0;
      if (++i == 2) return 0;
    }
  }
  return Run(source[2 * layer + i], h, shape.row_bytes[2 * layer + i]).address + first * item;
}

// Returns how many chunks are stored raw, kTooShort if `capacity` may be too small.
template <class Head, bool kHasLow>
std::size_t encode_layer(const Shape& shape, std::size_t layer, const Rows* source, std::uint8_t* out,
                         std::size_t capacity, std::uint64_t* size, Level level) {
  using Value = std::conditional_t<kHasLow, typename Wider<Head>::Value, Head>;
  alignas(64) std::uint8_t room[kChunk * sizeof(Value)];
  alignas(64) Head heads[kChunk];
  const Kernels<Head>& kernel = kernels<Head>(level);
  const Layout layout(shape, layer);
  if (layout.escapes + kPad > capacity) return kTooShort;
  std::size_t value = 0, chunk = 0, used = 0, raw = 0;
  Hint hint;
  for (std::size_t i = 0; i < 2; ++i) {
    for (std::uint32_t h = 0; h < layout.heads[i]; ++h, value += layout.padded[i]) {
      const Run run(source[2 * layer + i], h, shape.row_bytes[2 * layer + i]);
      for (std::size_t first = 0; first < layout.run[i]; first += kChunk, ++chunk) {
        const std::size_t count = layout.run[i] - first < kChunk ? layout.run[i] - first : kChunk;
        if (layout.escapes + used + raw_bytes<Head>(count) + kPad > capacity) return kTooShort;
        const std::size_t at = value + first;
        const std::uint8_t* bytes = run.gather(first * sizeof(Value), count * sizeof(Value), room);
        const auto* values = reinterpret_cast<const Value*>(bytes);
        const Head* part;
        if constexpr (kHasLow) {
          constexpr std::size_t kLow = sizeof(Value) - sizeof(Head);
          std::uint8_t* low = out + layout.low + at * kLow;
          cut(values, count, heads, low);
          std::memset(low + count * kLow, 0, (round_up(count, kGroup) - count) * kLow);
          part = heads;
        } else {
          part = values;
        }
        const std::uintptr_t next =
            kHasLow ? 0 : after(shape, layer, source, layout, i, h, first + kChunk, sizeof(Value));
        const Coded coded = encode_chunk(kernel, part, count, next, out + layout.codes + at / 2,
                                         out + layout.rest + rest_bytes<Head>(at), out + layout.escapes + used, &hint);
        used += coded.escape_bytes;
        raw += coded.raw;
        store32(out + layout.ends + 4 * chunk, static_cast<std::uint32_t>(used) | (coded.window.zero ? kZeroFlag : 0));
        out[layout.bases + chunk] = static_cast<std::uint8_t>(coded.window.base);
      }
    }
  }
  store32(out, kFixed);
  store32(out + 4, static_cast<std::uint32_t>(layout.chunks));
  store32(out + 8, static_cast<std::uint32_t>(used));
  store32(out + 12, static_cast<std::uint32_t>(raw));
  const std::size_t end = layout.escapes + used;
  *size = round_up(end, kPad);
  std::memset(out + end, 0, *size - end);
  return raw;
}

// ---- decoding -------------------------------------------------------------------------------------------------------

struct Stored {
  Window window;
  const std::uint8_t* escapes;
  std::size_t escape_bytes;
  bool raw;
};

// What the tables say of a chunk of `count` values whose escapes begin at `before`; false if they cannot be right.
template <class Head>
bool look_up(const Layout& layout, const std::uint8_t* layer, std::size_t chunk, std::size_t count, std::size_t before,
             std::size_t escape_bytes, Stored* stored) {
  const std::uint32_t word = load32(layer + layout.ends + 4 * chunk);
  const std::size_t end = word & ~kZeroFlag;
  if (end < before || end > escape_bytes) return false;
  stored->escape_bytes = end - before;
  stored->escapes = layer + layout.escapes + before;
  stored->raw = stored->escape_bytes == raw_bytes<Head>(count);
  stored->window = {layer[layout.bases + chunk], (word & kZeroFlag) != 0};
  return stored->raw || (stored->escape_bytes % kEscape == 0 && stored->escape_bytes < raw_bytes<Head>(count));
}

// Puts the exponents of escaped values in; false if one is not of this chunk.
template <class Head>
bool patch(const Stored& stored, const std::uint8_t* codes, std::size_t count, std::size_t wanted, Head* values) {
  if (stored.raw) {
    constexpr std::size_t kPerByte = sizeof(Head) == 2 ? 2 : 8;
    for (std::size_t i = 0; i < wanted; ++i) {
      const unsigned low = codes[i / 2] >> (i % 2 * 4) & 15u;
      const unsigned byte = stored.escapes[i / kPerByte];
      const unsigned high = byte >> (i % kPerByte * (8 / kPerByte)) & (sizeof(Head) == 2 ? 15u : 1u);
      values[i] = with_exponent(values[i], low | high << 4);
    }
    return true;
  }
  for (const std::uint8_t* at = stored.escapes; at < stored.escapes + stored.escape_bytes; at += kEscape) {
    const std::size_t position = at[0] | static_cast<std::size_t>(at[1]) << 8;
    if (position >= count) return false;
    if (position < wanted) values[position] = with_exponent(values[position], at[2]);
  }
  return true;
}

template <class Head, bool kHasLow>
const char* decode_layer(const Shape& shape, std::size_t layer, const std::uint8_t* in, std::size_t nbytes,
                         const Rows* target, std::size_t wanted_tokens, bool large, Level level) {
  using Value = std::conditional_t<kHasLow, typename Wider<Head>::Value, Head>;
  alignas(64) std::uint8_t room[kChunk * sizeof(Value)];
  alignas(64) Head heads[kChunk];
  const Kernels<Head>& kernel = kernels<Head>(level);
  const Layout layout(shape, layer);
  if (nbytes < layout.escapes) return "a layer is too short for its values";
  const std::size_t escape_bytes = load32(in + 8);
  if (load32(in) != kFixed || load32(in + 4) != layout.chunks || escape_bytes >= kZeroFlag ||
      nbytes != round_up(layout.escapes + escape_bytes, kPad))
    return "the header of a layer does not match its size or dtype";
  std::size_t value = 0, chunk = 0, before = 0;
  for (std::size_t i = 0; i < 2; ++i) {
    const std::size_t row = shape.row_bytes[2 * layer + i];
    const std::size_t wanted_run = row / sizeof(Value) * wanted_tokens;
    for (std::uint32_t h = 0; h < layout.heads[i]; ++h, value += layout.padded[i]) {
      const Run run(target[2 * layer + i], h, row);
      for (std::size_t first = 0; first < layout.run[i]; first += kChunk, ++chunk) {
        const std::size_t count = layout.run[i] - first < kChunk ? layout.run[i] - first : kChunk;
        Stored stored;
        if (!look_up<Head>(layout, in, chunk, count, before, escape_bytes, &stored))
          return "the escapes of a chunk have an impossible size";
        before += stored.escape_bytes;
        if (first >= wanted_run) continue;
        const std::size_t wanted = wanted_run - first < count ? wanted_run - first : count;
        const std::size_t at = value + first;
        const std::uint8_t* codes = in + layout.codes + at / 2;
        auto* direct = reinterpret_cast<Value*>(run.address + first * sizeof(Value));
        const bool together = run.contiguous();
        // What was written past the caches cannot be patched: such a chunk is decoded to the first cache, then copied.
        const bool clean = stored.escape_bytes == 0 && !kHasLow && reinterpret_cast<std::uintptr_t>(direct) % 64 == 0;
        const bool in_place = together && (!large || clean);
        Value* to = in_place ? direct : reinterpret_cast<Value*>(room);
        Head* part;
        if constexpr (kHasLow)
          part = heads;
        else
          part = to;
        kernel.unpack(codes, in + layout.rest + rest_bytes<Head>(at), wanted, stored.window, part,
                      large && in_place);
        if (!patch(stored, codes, count, wanted, part)) return "an escape lies outside of its chunk";
        if constexpr (kHasLow) paste(heads, in + layout.low + at * (sizeof(Value) - sizeof(Head)), wanted, to);
        if (in_place) continue;
        if (large && together)
          stream(direct, room, wanted * sizeof(Value));
        else
          run.scatter(first * sizeof(Value), wanted * sizeof(Value), room);
      }
    }
  }
  return before == escape_bytes ? nullptr : "some escapes belong to no chunk";
}

// ---- layers stored as they are --------------------------------------------------------------------------------------

std::size_t plain_bytes(const Shape& shape, std::size_t layer) {
  std::size_t sum = kHeader;
  for (std::size_t i = 0; i < 2; ++i) sum += shape.tokens * shape.heads[2 * layer + i] * shape.row_bytes[2 * layer + i];
  return sum;
}

std::size_t encode_plain(const Shape& shape, std::size_t layer, const Rows* source, std::uint8_t* out,
                         std::size_t capacity, std::uint64_t* size, Level) {
  *size = plain_bytes(shape, layer);
  if (*size > capacity) return kTooShort;
  const std::size_t chunks = Layout(shape, layer).chunks;
  store32(out, kPlain);
  store32(out + 4, 0);
  store32(out + 8, 0);
  store32(out + 12, static_cast<std::uint32_t>(chunks));
  out += kHeader;
  for (std::size_t i = 0; i < 2; ++i) {
    const std::size_t row = shape.row_bytes[2 * layer + i];
    for (std::uint32_t h = 0; h < shape.heads[2 * layer + i]; ++h, out += row * shape.tokens) {
      const Run run(source[2 * layer + i], h, row);
      run.each(0, row * shape.tokens, [&](std::uint64_t at, std::size_t done, std::size_t piece) {
        std::memcpy(out + done, reinterpret_cast<const void*>(at), piece);
      });
    }
  }
  return chunks;
}

const char* decode_plain(const Shape& shape, std::size_t layer, const std::uint8_t* in, std::size_t nbytes,
                         const Rows* target, std::size_t wanted, bool, Level) {
  if (nbytes != plain_bytes(shape, layer) || load32(in) != kPlain)
    return "the header of a layer does not match its size or dtype";
  in += kHeader;
  for (std::size_t i = 0; i < 2; ++i) {
    const std::size_t row = shape.row_bytes[2 * layer + i];
    for (std::uint32_t h = 0; h < shape.heads[2 * layer + i]; ++h, in += row * shape.tokens)
      Run(target[2 * layer + i], h, row).scatter(0, row * wanted, in);
  }
  return nullptr;
}

}  // namespace

std::size_t bound(const Shape& shape, std::size_t layer) {
  const Layout layout(shape, layer);
  if (layout.values / 2 + layout.chunks >= kZeroFlag) return 0;
  if (shape.dtype == Dtype::float8_e4m3fn) return plain_bytes(shape, layer);
  return layout.escapes + layout.values / 2 + layout.chunks + kPad;
}

std::size_t least(const Shape& shape, std::size_t layer) {
  return shape.dtype == Dtype::float8_e4m3fn ? plain_bytes(shape, layer) : Layout(shape, layer).escapes;
}

std::size_t usual(const Shape& shape, std::size_t layer) {
  if (shape.dtype == Dtype::float8_e4m3fn) return plain_bytes(shape, layer);
  const Layout layout(shape, layer);
  return layout.escapes + layout.values / 128 + kPad;  // a third of a percent of escapes
}

std::size_t encode(const Shape& shape, const Rows* source, std::uint8_t* out, std::size_t capacity,
                   std::uint64_t* sizes, Level level) {
  const auto code = shape.dtype == Dtype::float32       ? encode_layer<std::uint16_t, true>
                    : shape.dtype == Dtype::float16     ? encode_layer<std::uint8_t, true>
                    : shape.dtype == Dtype::float8_e5m2 ? encode_layer<std::uint8_t, false>
                    : shape.dtype == Dtype::float8_e4m3fn ? encode_plain
                                                        : encode_layer<std::uint16_t, false>;
  std::size_t raw = 0;
  for (std::size_t layer = 0; layer < shape.layers; ++layer) {
    const std::size_t found = code(shape, layer, source, out, capacity, sizes + layer, level);
    if (found == kTooShort) return kTooShort;
    raw += found;
    out += sizes[layer];
    capacity -= sizes[layer];
  }
  return raw;
}

const char* decode(const Shape& shape, const std::uint8_t* payload, std::size_t nbytes, const std::uint64_t* sizes,
                   const Rows* target, std::size_t wanted, Level level, bool large) {
  large = large || nbytes >= kStreamBytes;
  const auto code = shape.dtype == Dtype::float32       ? decode_layer<std::uint16_t, true>
                    : shape.dtype == Dtype::float16     ? decode_layer<std::uint8_t, true>
                    : shape.dtype == Dtype::float8_e5m2 ? decode_layer<std::uint8_t, false>
                    : shape.dtype == Dtype::float8_e4m3fn ? decode_plain
                                                        : decode_layer<std::uint16_t, false>;
  for (std::size_t layer = 0; layer < shape.layers; ++layer) {
    const std::size_t size = sizes[layer];
    if (size > nbytes) return "the layers are longer than the payload";
    const char* wrong = code(shape, layer, payload, size, target, wanted, large, level);
    if (wrong) return wrong;
    payload += size;
    nbytes -= size;
  }
  if (large) stream_end();
  return nbytes == 0 ? nullptr : "bytes follow the last layer";
}

}  // namespace kvstore::splitzip

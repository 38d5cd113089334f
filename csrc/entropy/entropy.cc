#include "entropy/entropy.h"

#include <cstring>
#include <optional>
#include <utility>

#include "common/endian.h"
#include "common/rows.h"
#include "entropy/dispatch.h"

namespace kvstore::entropy {
namespace {

using splitzip::Shape;

constexpr std::size_t kHeader = 16;
constexpr std::size_t kLine = 64;      // bytes that come from memory together
constexpr std::size_t kMostLower = 2;  // bytes of an fp32's lower half

Shape single(const Shape& shape, std::size_t layer) {
  return {shape.dtype, 1, shape.heads + 2 * layer, shape.row_bytes + 2 * layer, shape.tokens};
}

// Memory to work in, kept from layer to layer.
struct Room {
  std::vector<std::uint8_t> symbols, classes, chosen, ranges, values;
  std::vector<std::uint16_t> base, flip, words;
  std::vector<std::uint32_t> sums;
};

// A layer and its parts. lower: bytes that are kept of the lower halves of fp32.
struct Layer {
  const Shape& shape;
  Room& room;
  const Form form;
  const std::size_t lower;
  std::uint32_t heads[2];
  std::size_t dim[2];
  std::size_t channels = 0;  // of all heads
  std::size_t widest = 0;
  std::size_t tops, per_channel, low, escapes;

  Layer(const Shape& all, std::size_t number, std::size_t kept_lower, Room& memory)
      : shape(all), room(memory), form(form_of(all.dtype)), lower(kept_lower) {
    std::size_t kept_size = 0, count = 0;
    for (std::size_t kind = 0; kind < 2; ++kind) {
      heads[kind] = shape.heads[2 * number + kind];
      dim[kind] = shape.row_bytes[2 * number + kind] / form.item;
      channels += heads[kind] * dim[kind];
      count += heads[kind];
      kept_size += heads[kind] * kept(dim[kind]);
      if (heads[kind] && dim[kind] > widest) widest = dim[kind];
    }
    tops = kHeader;
    per_channel = tops + 2 * count;
    low = per_channel + channels;
    escapes = low + kept_size;
  }

  // Makes the memory large enough; a reader calls it once the sizes are right.
  void take_room() const {
    room.symbols.resize(values());
    room.classes.resize(values());
    room.chosen.resize(widest);
    room.ranges.resize(4 * widest);
    room.base.resize(widest);
    room.flip.resize(widest);
    room.sums.resize(2 * widest);
    room.words.resize(widest * shape.tokens);
    room.values.resize(form.item * widest * shape.tokens);
  }

  std::size_t values() const { return channels * shape.tokens; }
  // Of the low bits of a head.
  std::size_t kept(std::size_t width) const { return form.kept(shape.dtype, lower, shape.tokens * width); }
  Channels of_head() { return {room.base.data(), room.flip.data(), room.chosen.data()}; }

  // Calls visit(kind, head, dim, first value, first channel, number of the head) for every head, until that is false.
  template <class Visit>
  bool each(Visit visit) {
    std::size_t value = 0, channel = 0, number = 0;
    for (std::size_t kind = 0; kind < 2; ++kind) {
      for (std::uint32_t head = 0; head < heads[kind]; ++head) {
        if (!visit(kind, head, dim[kind], value, channel, number++)) return false;
        value += dim[kind] * shape.tokens;
        channel += dim[kind];
      }
    }
    return true;
  }

  Ranges known_to(const Model& model, std::size_t kind, std::size_t width) {
    std::uint8_t* at = room.ranges.data();
    const Ranges known = {{at, at + width}, {at + 2 * width, at + 3 * width}};
    for (std::size_t sign = 0; sign < 2; ++sign) {
      for (std::size_t c = 0; c < width; ++c) {
        known.begin[sign][c] = model.begin(kind, room.chosen[c], sign);
        known.width[sign][c] = model.width(kind, room.chosen[c], sign);
      }
    }
    return known;
  }

  void fill_classes(std::size_t kind, std::size_t width, std::size_t value) {
    std::uint8_t* row = room.classes.data() + value;
    for (std::size_t c = 0; c < width; ++c) row[c] = static_cast<std::uint8_t>(room.chosen[c] + kClasses * kind);
    for (std::size_t t = 1; t < shape.tokens; ++t) std::memcpy(row + t * width, row, width);
  }
};

// ---- encoding -------------------------------------------------------------------------------------------------------

// Fills what is known of a head (2 bytes) and of its channels.
void describe(const Kernels& loop, const std::uint16_t* values, std::size_t tokens, std::size_t dim,
              std::uint32_t* exponents, const Channels& channels, std::uint8_t* of_head, std::uint8_t* per_channel) {
  std::uint32_t* signs = exponents + dim;
  loop.count(values, tokens, dim, exponents, signs);
  std::uint32_t top = 0, most = 0;
  for (std::size_t c = 0; c < dim; ++c) {
    exponents[c] = static_cast<std::uint32_t>((exponents[c] + tokens / 2) / tokens);
    top = exponents[c] > top ? exponents[c] : top;
  }
  for (std::size_t c = 0; c < dim; ++c) {
    const std::uint32_t below = top - exponents[c];
    if (below <= kMostDelta * kMostUnit && below > most) most = below;
  }
  const std::uint32_t unit = most > kMostDelta ? (most + kMostDelta - 1) / kMostDelta : 1;
  for (std::size_t c = 0; c < dim; ++c) {
    const std::uint32_t steps = (top - exponents[c] + unit / 2) / unit;
    const std::uint32_t delta = steps < kMostDelta ? steps : kMostDelta;
    channels.base[c] = static_cast<std::uint16_t>(top - delta * unit + kAbove);
    channels.flip[c] = 2 * static_cast<std::size_t>(signs[c]) > tokens;
    per_channel[c] = static_cast<std::uint8_t>(channels.flip[c] << 7 | delta << 4);
  }
  of_head[0] = static_cast<std::uint8_t>(top);
  of_head[1] = static_cast<std::uint8_t>(unit);
}

// How many bytes of the lower halves of fp32 are not 0 throughout, from the top.
std::size_t lower_of(const Shape& shape, std::size_t number, const Rows* source, Room& room, const Kernels& loop) {
  if (shape.dtype != Dtype::float32) return 0;
  std::uint32_t any = 0;
  for (std::size_t kind = 0; kind < 2; ++kind) {
    const std::size_t row = shape.row_bytes[2 * number + kind];
    room.values.resize(row * shape.tokens);
    for (std::uint32_t head = 0; head < shape.heads[2 * number + kind]; ++head) {
      const Run run(source[2 * number + kind], head, row);
      any |= loop.any(run.gather(0, row * shape.tokens, room.values.data()), row / 4 * shape.tokens);
      if (any & 0xFFu) return kMostLower;
    }
  }
  return any & 0xFF00u ? 1 : 0;
}

// The words of a head: its values, if they are bf16, else made into room.
const std::uint16_t* words_of(const Layer& layer, const Kernels& loop, const std::uint8_t* values, std::size_t count) {
  if (layer.shape.dtype == Dtype::bfloat16) return reinterpret_cast<const std::uint16_t*>(values);
  loop.words(layer.shape.dtype, values, count, layer.room.words.data());
  return layer.room.words.data();
}

void keep_low(const Layer& layer, const Kernels& loop, const std::uint8_t* values, const std::uint16_t* words,
              std::size_t count, std::uint8_t* out) {
  if (layer.form.planes) {
    loop.low(words, count, out);
    out += planes_bytes(count);
  }
  loop.keep(layer.shape.dtype, layer.lower, values, count, out);
}

// The size of the layer; 0 if it does not fit `capacity`.
std::size_t encode_layer(const Model& model, const Shape& shape, std::size_t number, const Rows* source,
                         std::uint8_t* out, std::size_t capacity, Room& room, Level level) {
  const Kernels& loop = kernels(level);
  Layer layer(shape, number, lower_of(shape, number, source, room, loop), room);
  if (layer.escapes > capacity) return 0;
  layer.take_room();
  const Form& form = layer.form;
  const std::size_t tokens = shape.tokens;
  std::size_t low = layer.low, escapes = 0;
  const bool fits = layer.each([&](std::size_t kind, std::uint32_t head, std::size_t dim, std::size_t value,
                                   std::size_t channel, std::size_t which) {
    const Run run(source[2 * number + kind], head, form.item * dim);
    const std::uint8_t* const values = run.gather(0, form.item * dim * tokens, room.values.data());
    const std::uint16_t* const words = words_of(layer, loop, values, dim * tokens);
    const Channels channels = layer.of_head();
    std::uint8_t* symbols = room.symbols.data() + value;
    std::uint8_t* per_channel = out + layer.per_channel + channel;
    describe(loop, words, tokens, dim, room.sums.data(), channels, out + layer.tops + 2 * which, per_channel);
    loop.symbols(words, tokens, dim, channels, symbols);
    loop.choose(symbols, tokens, dim, model.costs(kind), channels.chosen);
    for (std::size_t c = 0; c < dim; ++c)
      per_channel[c] = static_cast<std::uint8_t>(per_channel[c] | channels.chosen[c]);
    const Ranges known = layer.known_to(model, kind, dim);
    const std::size_t found = loop.restrict_(symbols, tokens, dim, known);
    layer.fill_classes(kind, dim, value);
    keep_low(layer, loop, values, words, tokens * dim, out + low);
    low += layer.kept(dim);
    if (layer.escapes + form.escape * (escapes + found) > capacity) return false;
    const std::uint8_t* at = symbols;
    const std::uint8_t* const end = symbols + tokens * dim;
    const std::uint8_t* const upper = values + form.item - form.escape;
    for (std::size_t i = 0; i < found; ++i, ++at, ++escapes) {
      at = static_cast<const std::uint8_t*>(std::memchr(at, kEscape, static_cast<std::size_t>(end - at)));
      const auto place = static_cast<std::size_t>(at - symbols);
      std::memcpy(out + layer.escapes + form.escape * escapes, upper + form.item * place, form.escape);
    }
    return true;
  });
  if (!fits) return 0;
  const std::size_t begin = layer.escapes + form.escape * escapes;
  const std::int64_t stream = rans::encode(model.tables(), room.symbols.data(), layer.values(), room.classes.data(),
                                           layer.values(), out + begin, capacity - begin, level);
  if (stream < 0) return 0;
  store32(out, form.mode | static_cast<std::uint32_t>(layer.lower) << 8);
  store32(out + 4, static_cast<std::uint32_t>(stream));
  store32(out + 8, static_cast<std::uint32_t>(escapes));
  store32(out + 12, 0);
  return begin + static_cast<std::size_t>(stream);
}

// ---- decoding -------------------------------------------------------------------------------------------------------

// Writes a head's values, escapes excepted. kept: its low bits.
void join_head(const Layer& layer, const Kernels& loop, const std::uint8_t* symbols, const std::uint8_t* kept,
               std::size_t dim, std::uint8_t* values) {
  const std::size_t tokens = layer.shape.tokens;
  const Channels channels = {layer.room.base.data(), layer.room.flip.data(), layer.room.chosen.data()};
  const std::uint8_t* const planes = layer.form.planes ? kept : nullptr;
  if (layer.shape.dtype == Dtype::bfloat16) {
    loop.join(symbols, planes, tokens, dim, channels, reinterpret_cast<std::uint16_t*>(values));
    return;
  }
  std::uint16_t* const words = layer.room.words.data();
  loop.join(symbols, planes, tokens, dim, channels, words);
  if (planes) kept += planes_bytes(tokens * dim);
  loop.merge(layer.shape.dtype, layer.lower, words, kept, tokens * dim, values);
}

// A coded layer on its way back: `open`, then its symbols by rANS, then `close`.
class Coded {
 public:
  // Checks the sizes and reads the classes. Returns what is damaged, or null.
  const char* open(const Shape& shape, std::size_t number, const std::uint8_t* in, std::size_t nbytes) {
    in_ = in;
    number_ = number;
    const std::size_t lower = in[1];
    if (lower > (shape.dtype == Dtype::float32 ? kMostLower : 0))
      return "a layer keeps more bytes than its values have";
    layer_.emplace(shape, number, lower, room_);
    Layer& layer = *layer_;
    stream_bytes_ = load32(in + 4);
    escapes_ = load32(in + 8);
    if (nbytes < layer.escapes) return "a layer is too short for its values";
    if (load32(in + 12) != 0 || nbytes != layer.escapes + layer.form.escape * escapes_ + stream_bytes_)
      return "the header of a layer does not match its size";
    layer.take_room();
    // All of it at once, or each head would wait for its first lines of every plane.
    for (std::size_t i = layer.low; i < nbytes; i += kLine) __builtin_prefetch(in + i, 0, 2);
    layer.each([&](std::size_t kind, std::uint32_t, std::size_t dim, std::size_t value, std::size_t channel,
                   std::size_t) {
      for (std::size_t c = 0; c < dim; ++c) room_.chosen[c] = in[layer.per_channel + channel + c] & 15u;
      layer.fill_classes(kind, dim, value);
      return true;
    });
    return nullptr;
  }

  rans::Stream stream() {
    return {in_ + layer_->escapes + layer_->form.escape * escapes_, stream_bytes_, room_.classes.data(),
            layer_->values(), room_.symbols.data(), layer_->values()};
  }

  // Writes the values of the first `wanted` tokens. Returns what is damaged, or null.
  const char* close(const Kernels& loop, const Rows* target, std::size_t wanted) {
    Layer& layer = *layer_;
    const Form& form = layer.form;
    const std::size_t tokens = layer.shape.tokens;
    std::size_t low = layer.low, used = 0;
    const bool good = layer.each([&](std::size_t kind, std::uint32_t head, std::size_t dim, std::size_t value,
                                     std::size_t channel, std::size_t which) {
      const Channels channels = layer.of_head();
      const unsigned top = in_[layer.tops + 2 * which], unit = in_[layer.tops + 2 * which + 1];
      for (std::size_t c = 0; c < dim; ++c) {
        const std::uint8_t known = in_[layer.per_channel + channel + c];
        channels.base[c] = static_cast<std::uint16_t>(top - (known >> 4 & 7u) * unit + kAbove);
        channels.flip[c] = known >> 7;
      }
      const Run run(target[2 * number_ + kind], head, form.item * dim);
      const bool direct = run.contiguous() && wanted == tokens;
      std::uint8_t* const values = direct ? reinterpret_cast<std::uint8_t*>(run.address) : room_.values.data();
      const std::uint8_t* symbols = room_.symbols.data() + value;
      join_head(layer, loop, symbols, in_ + low, dim, values);
      low += layer.kept(dim);
      const std::uint8_t* const end = symbols + tokens * dim;
      std::uint8_t* const upper = values + form.item - form.escape;
      for (const std::uint8_t* at = symbols;; ++at, ++used) {
        at = static_cast<const std::uint8_t*>(std::memchr(at, kEscape, static_cast<std::size_t>(end - at)));
        if (at == nullptr) break;
        if (used == escapes_) return false;
        std::memcpy(upper + form.item * static_cast<std::size_t>(at - symbols),
                    in_ + layer.escapes + form.escape * used, form.escape);
      }
      if (!direct) run.scatter(0, form.item * dim * wanted, values);
      return true;
    });
    return good && used == escapes_ ? nullptr : "some escapes belong to no symbol";
  }

 private:
  Room room_;
  std::optional<Layer> layer_;
  const std::uint8_t* in_ = nullptr;
  std::size_t number_ = 0, stream_bytes_ = 0, escapes_ = 0;
};

}  // namespace

bool Model::build(const std::uint16_t* freqs, const std::uint16_t* costs) {
  std::vector<std::uint16_t> wide(2 * kClasses * rans::Tables::kSymbols);
  for (std::size_t kind = 0; kind < 2; ++kind) {
    for (std::size_t k = 0; k < kClasses; ++k) {
      const std::uint16_t* row = freqs + (kind * kClasses + k) * kSymbols;
      for (std::size_t s = 0; s < kSymbols; ++s) {
        wide[(kind * kClasses + k) * rans::Tables::kSymbols + s] = row[s];
        costs_[kind][s * kClasses + k] = costs[(kind * kClasses + k) * kSymbols + s];
      }
      if (row[kEscape] == 0) return false;
      for (std::size_t sign = 0; sign < 2; ++sign) {
        std::size_t first = sign * kEscape / 2, end = first + kEscape / 2;
        while (first < end && row[first] == 0) ++first;
        while (first < end && row[end - 1] == 0) --end;
        for (std::size_t s = first; s < end; ++s)
          if (row[s] == 0) return false;
        begin_[kind][k][sign] = static_cast<std::uint8_t>(first < end ? first : kEscape);
        width_[kind][k][sign] = static_cast<std::uint8_t>(first < end ? end - first - 1 : 0);
      }
    }
  }
  return tables_.build(wide.data(), 2 * kClasses, 12);
}

std::size_t usual(const Shape& shape, std::size_t layer) {
  const std::size_t fixed = splitzip::usual(shape, layer);
  switch (shape.dtype) {  // what is saved of 12, 28, 15, 7 and 8 bits a value, rather less than more
    case Dtype::bfloat16: return fixed - fixed / 9;
    case Dtype::float32: return fixed - fixed / 22;
    case Dtype::float16: return fixed - fixed / 12;
    case Dtype::float8_e5m2:
    case Dtype::float8_e4m3fn: return fixed - fixed / 6;
  }
  return fixed;
}

std::size_t encode(const Model& model, const Shape& shape, const Rows* source, std::uint8_t* out, std::size_t capacity,
                   std::uint64_t* sizes, Level level) {
  std::size_t raw = 0;
  Room room;
  for (std::size_t layer = 0; layer < shape.layers; ++layer) {
    const std::size_t fixed = splitzip::least(shape, layer);
    std::size_t size = 0;
    if (shape.tokens > 0)
      size = encode_layer(model, shape, layer, source, out, fixed < capacity ? fixed : capacity, room, level);
    if (size == 0) {
      std::uint64_t taken = 0;
      const std::size_t found =
          splitzip::encode(single(shape, layer), source + 2 * layer, out, capacity, &taken, level);
      if (found == splitzip::kTooShort) return found;
      raw += found;
      size = taken;
    }
    sizes[layer] = size;
    out += size;
    capacity -= size;
  }
  return raw;
}

const char* decode(const Model& model, const Shape& shape, const std::uint8_t* payload, std::size_t nbytes,
                   const std::uint64_t* sizes, const Rows* target, std::size_t wanted, Level level) {
  const std::uint32_t mode = form_of(shape.dtype).mode;
  const Kernels& loop = kernels(level);
  Coded layers[2];
  std::size_t open = 0;  // of them
  // The streams of two layers are decoded at once.
  const auto close = [&]() -> const char* {
    const std::size_t count = std::exchange(open, 0);
    if (count == 0) return nullptr;
    const rans::Stream none = {};
    if (rans::decode(model.tables(), layers[0].stream(), count == 2 ? layers[1].stream() : none, level) != 0)
      return "the stream of symbols is damaged";
    for (std::size_t i = 0; i < count; ++i)
      if (const char* const wrong = layers[i].close(loop, target, wanted)) return wrong;
    return nullptr;
  };
  for (std::size_t layer = 0; layer < shape.layers; ++layer) {
    const std::size_t size = sizes[layer];
    if (size > nbytes) return "the layers are longer than the payload";
    // Behind the mode stands how much a layer keeps, then zeros.
    const bool coded = shape.tokens > 0 && size >= kHeader && (load32(payload) & ~0xFF00u) == mode;
    const char* wrong = nullptr;
    if (!coded) {
      wrong = splitzip::decode(single(shape, layer), payload, size, sizes + layer, target + 2 * layer, wanted, level);
    } else {
      wrong = layers[open++].open(shape, layer, payload, size);
      if (!wrong && open == 2) wrong = close();
    }
    if (wrong) return wrong;
    payload += size;
    nbytes -= size;
  }
  if (const char* const wrong = close()) return wrong;
  return nbytes == 0 ? nullptr : "bytes follow the last layer";
}

}  // namespace kvstore::entropy

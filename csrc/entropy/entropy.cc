#include "entropy/entropy.h"

#include <cstring>

#include "common/endian.h"
#include "common/rows.h"
#include "entropy/dispatch.h"

namespace kvstore::entropy {
namespace {

using splitzip::Dtype;
using splitzip::Shape;

constexpr std::size_t kHeader = 16;
constexpr std::uint32_t kMode = 2;

std::size_t planes_bytes(std::size_t count) { return (count + 1) / 2 + (count + 7) / 8; }

Shape single(const Shape& shape, std::size_t layer) {
  return {shape.dtype, 1, shape.heads + 2 * layer, shape.row_bytes + 2 * layer, shape.tokens};
}

// Memory to work in, kept from layer to layer.
struct Room {
  std::vector<std::uint8_t> symbols, classes, chosen, ranges;
  std::vector<std::uint16_t> base, flip, values;
  std::vector<std::uint32_t> sums;
};

// A layer of bf16 and its parts.
struct Layer {
  const Shape& shape;
  Room& room;
  std::uint32_t heads[2];
  std::size_t dim[2];
  std::size_t channels = 0;  // of all heads
  std::size_t tops, per_channel, planes, escapes;

  Layer(const Shape& all, std::size_t number, Room& memory) : shape(all), room(memory) {
    std::size_t planes_size = 0, widest = 0, count = 0;
    for (std::size_t kind = 0; kind < 2; ++kind) {
      heads[kind] = shape.heads[2 * number + kind];
      dim[kind] = shape.row_bytes[2 * number + kind] / 2;
      channels += heads[kind] * dim[kind];
      count += heads[kind];
      planes_size += heads[kind] * planes_bytes(shape.tokens * dim[kind]);
      if (heads[kind] && dim[kind] > widest) widest = dim[kind];
    }
    tops = kHeader;
    per_channel = tops + 2 * count;
    planes = per_channel + channels;
    escapes = planes + planes_size;
    room.symbols.resize(values());
    room.classes.resize(values());
    room.chosen.resize(widest);
    room.ranges.resize(4 * widest);
    room.base.resize(widest);
    room.flip.resize(widest);
    room.sums.resize(2 * widest);
    room.values.resize(widest * shape.tokens);
  }

  std::size_t values() const { return channels * shape.tokens; }
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

// The size of the layer; 0 if it does not fit `capacity`.
std::size_t encode_layer(const Model& model, const Shape& shape, std::size_t number, const Rows* source,
                         std::uint8_t* out, std::size_t capacity, Room& room, Level level) {
  Layer layer(shape, number, room);
  if (layer.escapes > capacity) return 0;
  const Kernels& loop = kernels(level);
  const std::size_t tokens = shape.tokens;
  std::size_t plane = layer.planes, escapes = 0;
  const bool fits = layer.each([&](std::size_t kind, std::uint32_t head, std::size_t dim, std::size_t value,
                                   std::size_t channel, std::size_t which) {
    const Run run(source[2 * number + kind], head, 2 * dim);
    const auto* values = reinterpret_cast<const std::uint16_t*>(
        run.gather(0, 2 * dim * tokens, reinterpret_cast<std::uint8_t*>(room.values.data())));
    const Channels channels = layer.of_head();
    std::uint8_t* symbols = room.symbols.data() + value;
    std::uint8_t* per_channel = out + layer.per_channel + channel;
    describe(loop, values, tokens, dim, room.sums.data(), channels, out + layer.tops + 2 * which, per_channel);
    loop.symbols(values, tokens, dim, channels, symbols);
    loop.choose(symbols, tokens, dim, model.costs(kind), channels.chosen);
    for (std::size_t c = 0; c < dim; ++c)
      per_channel[c] = static_cast<std::uint8_t>(per_channel[c] | channels.chosen[c]);
    const Ranges known = layer.known_to(model, kind, dim);
    const std::size_t found = loop.restrict_(symbols, tokens, dim, known);
    layer.fill_classes(kind, dim, value);
    loop.low(values, tokens * dim, out + plane);
    plane += planes_bytes(tokens * dim);
    if (layer.escapes + 2 * (escapes + found) > capacity) return false;
    const std::uint8_t* at = symbols;
    const std::uint8_t* const end = symbols + tokens * dim;
    for (std::size_t i = 0; i < found; ++i, ++at, ++escapes) {
      at = static_cast<const std::uint8_t*>(std::memchr(at, kEscape, static_cast<std::size_t>(end - at)));
      std::memcpy(out + layer.escapes + 2 * escapes, values + (at - symbols), 2);
    }
    return true;
  });
  if (!fits) return 0;
  const std::size_t begin = layer.escapes + 2 * escapes;
  const std::int64_t stream = rans::encode(model.tables(), room.symbols.data(), layer.values(), room.classes.data(),
                                           layer.values(), out + begin, capacity - begin, level);
  if (stream < 0) return 0;
  store32(out, kMode);
  store32(out + 4, static_cast<std::uint32_t>(stream));
  store32(out + 8, static_cast<std::uint32_t>(escapes));
  store32(out + 12, 0);
  return begin + static_cast<std::size_t>(stream);
}

// ---- decoding -------------------------------------------------------------------------------------------------------

const char* decode_layer(const Model& model, const Shape& shape, std::size_t number, const std::uint8_t* in,
                         std::size_t nbytes, const Rows* target, std::size_t wanted, Room& room, Level level) {
  // The low bits of a value alone take 5: sizes are bounded by what was read before memory is taken.
  std::size_t least = 0;
  for (std::size_t kind = 0; kind < 2; ++kind)
    least += shape.heads[2 * number + kind] * planes_bytes(shape.row_bytes[2 * number + kind] / 2 * shape.tokens);
  if (nbytes < kHeader + least) return "a layer is too short for its values";
  Layer layer(shape, number, room);
  const std::size_t stream = load32(in + 4), escapes = load32(in + 8);
  if (nbytes < layer.escapes) return "a layer is too short for its values";
  if (load32(in + 12) != 0 || nbytes != layer.escapes + 2 * escapes + stream)
    return "the header of a layer does not match its size";
  layer.each([&](std::size_t kind, std::uint32_t, std::size_t dim, std::size_t value, std::size_t channel,
                 std::size_t) {
    for (std::size_t c = 0; c < dim; ++c) room.chosen[c] = in[layer.per_channel + channel + c] & 15u;
    layer.fill_classes(kind, dim, value);
    return true;
  });
  if (rans::decode(model.tables(), in + layer.escapes + 2 * escapes, stream, room.classes.data(), layer.values(),
                   room.symbols.data(), layer.values(), level) != 0)
    return "the stream of symbols is damaged";
  const Kernels& loop = kernels(level);
  const std::size_t tokens = shape.tokens;
  std::size_t plane = layer.planes, used = 0;
  const bool good = layer.each([&](std::size_t kind, std::uint32_t head, std::size_t dim, std::size_t value,
                                   std::size_t channel, std::size_t which) {
    const Channels channels = layer.of_head();
    const unsigned top = in[layer.tops + 2 * which], unit = in[layer.tops + 2 * which + 1];
    for (std::size_t c = 0; c < dim; ++c) {
      const std::uint8_t known = in[layer.per_channel + channel + c];
      channels.base[c] = static_cast<std::uint16_t>(top - (known >> 4 & 7u) * unit + kAbove);
      channels.flip[c] = known >> 7;
    }
    const Run run(target[2 * number + kind], head, 2 * dim);
    const bool direct = run.contiguous() && wanted == tokens;
    std::uint16_t* values = direct ? reinterpret_cast<std::uint16_t*>(run.address) : room.values.data();
    const std::uint8_t* symbols = room.symbols.data() + value;
    loop.join(symbols, in + plane, tokens, dim, channels, values);
    plane += planes_bytes(tokens * dim);
    const std::uint8_t* const end = symbols + tokens * dim;
    for (const std::uint8_t* at = symbols;; ++at, ++used) {
      at = static_cast<const std::uint8_t*>(std::memchr(at, kEscape, static_cast<std::size_t>(end - at)));
      if (at == nullptr) break;
      if (used == escapes) return false;
      std::memcpy(values + (at - symbols), in + layer.escapes + 2 * used, 2);
    }
    if (!direct) run.scatter(0, 2 * dim * wanted, reinterpret_cast<const std::uint8_t*>(values));
    return true;
  });
  return good && used == escapes ? nullptr : "some escapes belong to no symbol";
}

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
  return shape.dtype == Dtype::bfloat16 ? fixed - fixed / 9 : fixed;
}

std::size_t encode(const Model& model, const Shape& shape, const Rows* source, std::uint8_t* out, std::size_t capacity,
                   std::uint64_t* sizes, Level level) {
  std::size_t raw = 0;
  Room room;
  for (std::size_t layer = 0; layer < shape.layers; ++layer) {
    const std::size_t fixed = splitzip::least(shape, layer);
    std::size_t size = 0;
    if (shape.dtype == Dtype::bfloat16 && shape.tokens > 0)
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
  Room room;
  for (std::size_t layer = 0; layer < shape.layers; ++layer) {
    const std::size_t size = sizes[layer];
    if (size > nbytes) return "the layers are longer than the payload";
    const bool ours = shape.dtype == Dtype::bfloat16 && shape.tokens > 0;
    const bool coded = ours && size >= kHeader && load32(payload) == kMode;
    const char* wrong = coded ? decode_layer(model, shape, layer, payload, size, target, wanted, room, level)
                              : splitzip::decode(single(shape, layer), payload, size, sizes + layer, target + 2 * layer,
                                                 wanted, level);
    if (wrong) return wrong;
    payload += size;
    nbytes -= size;
  }
  return nbytes == 0 ? nullptr : "bytes follow the last layer";
}

}  // namespace kvstore::entropy

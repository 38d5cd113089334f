#include "predictive/wide.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "common/words.h"
#include "predictive/buffer.h"
#include "predictive/word_rows.h"

namespace kvstore::predict {
namespace {

constexpr std::size_t kHead = 4;  // mode, bytes of lower halves that are kept, two zeros
constexpr std::size_t kPlanes = 3;  // bits of an fp16 that its word leaves out

std::uint8_t mode_of(Wide dtype) { return dtype == Wide::float32 ? 12 : 13; }
std::size_t plane_bytes(std::size_t count) { return (count + 7) / 8; }

std::size_t kept_bytes(Wide dtype, std::size_t lower, std::size_t count) {
  return dtype == Wide::float32 ? lower * count : kPlanes * plane_bytes(count);
}

// Of a layer, before its words.
std::size_t bytes_before(const Model& model, std::size_t layer, std::size_t count, Wide dtype, std::size_t lower) {
  std::size_t found = kHead;
  for (std::size_t number = 2 * layer; number < 2 * layer + 2; ++number)
    found += kept_bytes(dtype, lower, count * model.parts()[number].width);
  return found;
}

// ---- encoding -------------------------------------------------------------------------------------------------------

// Makes the words of a part. Returns the bits that are set in any value of an fp32.
std::uint32_t make_words(const Part& part, const Rows& rows, std::size_t count, Wide dtype, std::uint16_t* words) {
  std::uint32_t any = 0;
  each_head(part, rows, count, [&](const std::uint8_t* values, std::size_t place) {
    if (dtype == Wide::float32) {
      any |= words::any_of(values, part.dim);
      words::make_upper(values, part.dim, words + place);
    } else {
      words::Half::make(values, part.dim, words + place);
    }
  });
  return any;
}

// Writes what words leave out of the values of a part; low: memory for a byte a value.
void keep(const Part& part, const Rows& rows, std::size_t count, Wide dtype, std::size_t lower, std::uint8_t* low,
          std::uint8_t* out) {
  if (dtype == Wide::float32) {
    each_head(part, rows, count, [&](const std::uint8_t* values, std::size_t place) {
      words::keep_lower(values, lower, part.dim, out + lower * place);
    });
    return;
  }
  each_head(part, rows, count, [&](const std::uint8_t* values, std::size_t place) {
    for (std::size_t i = 0; i < part.dim; ++i) low[place + i] = values[2 * i];
  });
  const std::size_t values = count * part.width, eighth = plane_bytes(values);
  std::memset(out, 0, kPlanes * eighth);
  for (std::size_t plane = 0; plane < kPlanes; ++plane, out += eighth) {
    for (std::size_t bit = 0; bit < 8 && bit * eighth < values; ++bit) {
      const std::uint8_t* const from = low + bit * eighth;
      const std::size_t here = std::min(eighth, values - bit * eighth);
      for (std::size_t i = 0; i < here; ++i)
        out[i] = static_cast<std::uint8_t>(out[i] | (from[i] >> plane & 1u) << bit);
    }
  }
}

// ---- decoding -------------------------------------------------------------------------------------------------------

// The three lowest bits of every fp16 of a part, a byte each.
void spread(const std::uint8_t* kept, std::size_t values, std::uint8_t* low) {
  const std::size_t eighth = plane_bytes(values);
  std::memset(low, 0, values);
  for (std::size_t plane = 0; plane < kPlanes; ++plane, kept += eighth) {
    for (std::size_t bit = 0; bit < 8 && bit * eighth < values; ++bit) {
      std::uint8_t* const to = low + bit * eighth;
      const std::size_t here = std::min(eighth, values - bit * eighth);
      for (std::size_t i = 0; i < here; ++i)
        to[i] = static_cast<std::uint8_t>(to[i] | (kept[i] >> bit & 1u) << plane);
    }
  }
}

// Writes the values of the first `wanted` tokens of a part.
void merge(const Part& part, const Rows& rows, std::size_t wanted, Wide dtype, std::size_t lower,
           const std::uint16_t* words, const std::uint8_t* kept) {
  each_head(part, rows, wanted, [&](std::uint8_t* values, std::size_t place) {
    const std::uint16_t* const from = words + place;
    if (dtype == Wide::float32) {
      words::merge_lower(from, kept + lower * place, lower, part.dim, values);
    } else {
      const std::uint8_t* const low = kept + place;
      words::Half::merge(from, part.dim, values, [&](std::size_t i) { return (from[i] & 31u) << 3 | low[i]; });
    }
  });
}

// Where the kept bytes of each layer begin, and how many bytes of lower halves it keeps.
struct Kept {
  std::vector<const std::uint8_t*> begin;
  std::vector<std::size_t> lower;
};

// Takes the layers apart: what is kept, and in `inner` the layers of words, whose sizes become `inner_sizes`.
const char* cut(const Model& model, const Block& block, Wide dtype, const std::uint8_t* payload, std::size_t nbytes,
                const std::uint64_t* sizes, Kept& kept, std::vector<std::uint8_t>& inner,
                std::vector<std::uint64_t>& inner_sizes) {
  for (std::size_t layer = 0; layer < model.parts().size() / 2; ++layer) {
    const std::size_t size = sizes[layer];
    if (size > nbytes) return "the layers are longer than the payload";
    if (size < kHead || payload[0] != mode_of(dtype) || payload[2] != 0 || payload[3] != 0 ||
        payload[1] > (dtype == Wide::float32 ? 2 : 0))
      return "the header of a layer does not fit its dtype";
    const std::size_t before = bytes_before(model, layer, block.count, dtype, payload[1]);
    if (size < before) return "a layer is too short for its values";
    kept.begin.push_back(payload + kHead);
    kept.lower.push_back(payload[1]);
    inner.insert(inner.end(), payload + before, payload + size);
    inner_sizes.push_back(size - before);
    payload += size;
    nbytes -= size;
  }
  return nbytes == 0 ? nullptr : "bytes follow the last layer";
}

}  // namespace

int encode_wide(const Model& model, const Block& block, Wide dtype, std::uint8_t* out, std::size_t capacity,
                std::size_t limit, std::uint64_t* sizes, Level level) {
  if (!predictable(model, block)) return kFallBack;
  const WordRows words(model, block.count);
  const std::size_t layers = model.parts().size() / 2;
  std::vector<std::size_t> lower(layers), before(layers);  // bytes of lower halves; of all that is before words
  std::size_t total = 0;
  for (std::size_t layer = 0; layer < layers; ++layer) {
    std::uint32_t any = 0;
    for (std::size_t number = 2 * layer; number < 2 * layer + 2; ++number)
      any |= make_words(model.parts()[number], block.rows[number], block.count, dtype, words.part(number));
    lower[layer] = any & 0xFFu ? 2 : any & 0xFF00u ? 1 : 0;
    before[layer] = bytes_before(model, layer, block.count, dtype, lower[layer]);
    total += before[layer];
  }
  if (total >= limit) return kFallBack;
  if (total > capacity) return kNoRoom;
  const Block inner{block.tokens, block.count, block.start, words.rows()};
  const int result = encode(model, inner, out + total, capacity - total, limit - total, sizes, level);
  if (result != 0) return result;
  // Layers move towards the front, each behind what it keeps.
  Buffer<std::uint8_t> low(block.count * model.widest());
  const std::uint8_t* from = out + total;
  for (std::size_t layer = 0; layer < layers; ++layer) {
    std::memmove(out + before[layer], from, sizes[layer]);
    from += sizes[layer];
    out[0] = mode_of(dtype);
    out[1] = static_cast<std::uint8_t>(lower[layer]);
    out[2] = out[3] = 0;
    std::uint8_t* to = out + kHead;
    for (std::size_t number = 2 * layer; number < 2 * layer + 2; ++number) {
      const Part& part = model.parts()[number];
      keep(part, block.rows[number], block.count, dtype, lower[layer], low.get(), to);
      to += kept_bytes(dtype, lower[layer], block.count * part.width);
    }
    sizes[layer] += before[layer];
    out += sizes[layer];
  }
  return 0;
}

const char* decode_wide(const Model& model, const Block& block, Wide dtype, const std::uint8_t* payload,
                        std::size_t nbytes, const std::uint64_t* sizes, std::size_t wanted, Level level) {
  if (!predictable(model, block)) return "the profile does not know these positions";
  Kept kept;
  std::vector<std::uint8_t> inner;
  std::vector<std::uint64_t> inner_sizes;
  if (const char* const wrong = cut(model, block, dtype, payload, nbytes, sizes, kept, inner, inner_sizes))
    return wrong;
  const WordRows words(model, block.count);
  const Block target{block.tokens, block.count, block.start, words.rows()};
  if (const char* const wrong = decode(model, target, inner.data(), inner.size(), inner_sizes.data(), wanted, level))
    return wrong;
  Buffer<std::uint8_t> low(block.count * model.widest());
  for (std::size_t number = 0; number < model.parts().size(); ++number) {
    const Part& part = model.parts()[number];
    const std::size_t layer = number / 2, values = block.count * part.width;
    const std::uint8_t* const own = kept.begin[layer];
    kept.begin[layer] += kept_bytes(dtype, kept.lower[layer], values);
    if (dtype == Wide::float16) spread(own, values, low.get());
    merge(part, block.rows[number], wanted, dtype, kept.lower[layer], words.part(number),
          dtype == Wide::float16 ? low.get() : own);
  }
  return nullptr;
}

}  // namespace kvstore::predict

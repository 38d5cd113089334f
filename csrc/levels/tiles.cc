#include "levels/tiles.h"

namespace kvstore::levels {
namespace {

constexpr std::size_t kPairs = kColumns / 2;

std::uint16_t* address(const Part& part, const Rows& place, std::size_t column, std::size_t row) {
  const auto head = static_cast<std::int64_t>(column / part.dim);
  const std::int64_t before = head * place.head_stride + place.token_stride * static_cast<std::int64_t>(row);
  return reinterpret_cast<std::uint16_t*>(place.address + static_cast<std::uint64_t>(before)) + column % part.dim;
}

template <bool OUT>
void copy_any(const Part& part, const Rows& place, std::size_t number, std::size_t end, std::uint16_t* tile) {
  const std::size_t width = part.groups[number].width;
  for (std::size_t c = 0; c < width; ++c) {
    const std::size_t column = part.order[number * kColumns + c];
    for (std::size_t t = 0; t < end; ++t) {
      std::uint16_t* const value = address(part, place, column, t);
      if (OUT)
        std::memcpy(value, tile + t * kColumns + c, sizeof *value);
      else
        std::memcpy(tile + t * kColumns + c, value, sizeof *value);
    }
  }
}

// Eight values that a compiler keeps in a register: it makes single ones of them from arrays.
typedef std::uint16_t Eight __attribute__((vector_size(2 * kPairs)));

Eight load_eight(const void* at) {
  Eight found;
  std::memcpy(&found, at, sizeof found);
  return found;
}
// The values of these numbers, of `one` and then `two`.
#if defined(__clang__)
#define KVSTORE_MIX(ONE, TWO, ...) __builtin_shufflevector(ONE, TWO, __VA_ARGS__)
#else
#define KVSTORE_MIX(ONE, TWO, ...) __builtin_shuffle(ONE, TWO, Eight{__VA_ARGS__})
#endif
void store_eight(void* at, Eight values) { std::memcpy(at, &values, sizeof values); }

// A group whose columns lie in two runs of eight, `apart` values from each other, and take turns.
template <bool OUT>
void copy_pairs(std::uint8_t* at, std::int64_t stride, std::size_t apart, std::size_t end, std::uint16_t* tile) {
  for (std::size_t t = 0; t < end; ++t, at += stride, tile += kColumns) {
    std::uint8_t* const other = at + 2 * apart;
    const Eight one = load_eight(OUT ? static_cast<void*>(tile) : at);
    const Eight two = load_eight(OUT ? static_cast<void*>(tile + kPairs) : other);
    if (OUT) {
      store_eight(at, KVSTORE_MIX(one, two, 0, 2, 4, 6, 8, 10, 12, 14));
      store_eight(other, KVSTORE_MIX(one, two, 1, 3, 5, 7, 9, 11, 13, 15));
    } else {
      store_eight(tile, KVSTORE_MIX(one, two, 0, 8, 1, 9, 2, 10, 3, 11));
      store_eight(tile + kPairs, KVSTORE_MIX(one, two, 4, 12, 5, 13, 6, 14, 7, 15));
    }
  }
}

template <bool OUT>
void copy_run(std::uint8_t* at, std::int64_t stride, std::size_t end, std::uint16_t* tile) {
  for (std::size_t t = 0; t < end; ++t, at += stride, tile += kColumns) {
    if (OUT)
      std::memcpy(at, tile, kColumns * sizeof *tile);
    else
      std::memcpy(tile, at, kColumns * sizeof *tile);
  }
}

}  // namespace

template <bool OUT>
void copy_tile(const Part& part, const Rows& place, std::size_t number, std::size_t end, std::uint16_t* tile) {
  const std::size_t first = part.order[number * kColumns], half = part.dim / 2;
  const bool whole = part.groups[number].width == kColumns;
  const auto at = reinterpret_cast<std::uint8_t*>(address(part, place, first, 0));
  if (whole && part.rotated && half % kPairs == 0)
    copy_pairs<OUT>(at, place.token_stride, half, end, tile);
  else if (whole && !part.rotated && part.dim % kColumns == 0)
    copy_run<OUT>(at, place.token_stride, end, tile);
  else
    copy_any<OUT>(part, place, number, end, tile);
}

template void copy_tile<false>(const Part&, const Rows&, std::size_t, std::size_t, std::uint16_t*);
template void copy_tile<true>(const Part&, const Rows&, std::size_t, std::size_t, std::uint16_t*);

RowTurns::RowTurns(const Model& model, const std::int64_t* positions, RowCount rows)
    : half_(model.half()),
      stride_(half_ == 0 ? 0 : half_ + kPairs),
      forward_(rows.padded * stride_),
      across_(rows.padded * stride_) {
  if (half_ == 0) return;
  std::vector<std::int16_t> cos(half_), sin(half_);
  const auto both = [](int low, int high) {
    const std::uint32_t upper = static_cast<std::uint32_t>(high) << 16;
    return static_cast<std::int32_t>((static_cast<std::uint32_t>(low) & 0xffff) | upper);
  };
  for (std::size_t t = 0; t < rows.padded; ++t) {
    if (t < rows.n) model.angles(positions[t], cos.data(), sin.data());
    std::int32_t *const forward = forward_.get() + t * stride_, *const across = across_.get() + t * stride_;
    for (std::size_t j = 0; j < half_; ++j) {
      forward[j] = both(cos[j], -sin[j]);
      across[j] = both(sin[j], cos[j]);
    }
    for (std::size_t j = half_; j < stride_; ++j) {  // groups may begin anywhere in a head
      forward[j] = forward[j - half_];
      across[j] = across[j - half_];
    }
  }
}

const Turns* RowTurns::of(const Part& part, std::size_t number, Turns& room) const {
  if (!part.rotated) return nullptr;
  const std::size_t begin = number * kPairs % half_;
  room = {forward_.get() + begin, across_.get() + begin, stride_};
  return &room;
}

}  // namespace kvstore::levels

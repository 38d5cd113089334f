// Tiles: 16 columns of a group for all rows of a block, between tensors and kernels.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include "common/rows.h"
#include "levels/kernels.h"
#include "predictive/buffer.h"

namespace kvstore::levels {

// A buffer of tiles, zero where nothing was written.
template <class T>
class Tiles {
 public:
  // each: elements of a column.
  Tiles(std::size_t groups, RowCount rows, std::size_t each = 1)
      : tile_(rows.padded * kColumns * each), data_(groups * tile_) {
    std::fill_n(data_.get(), groups * tile_, T{});
  }
  T* tile(std::size_t group) const { return data_.get() + group * tile_; }
  T* get() const { return data_.get(); }

 private:
  std::size_t tile_;
  predict::Buffer<T> data_;
};

// Copies the columns of group `number` of the rows `first` to `end` from a tensor to a tile, or back.
template <bool OUT>
void copy_tile(const Part& part, const Rows& place, std::size_t number, std::size_t end, std::uint16_t* tile);

// Rotations of the rows of a block, as `Turns` has them.
class RowTurns {
 public:
  // positions: of the rows that there are.
  RowTurns(const Model& model, const std::int64_t* positions, RowCount rows);

  // Those of a group of a part; null if it is not rotated.
  const Turns* of(const Part& part, std::size_t number, Turns& room) const;

 private:
  std::size_t half_, stride_;
  predict::Buffer<std::int32_t> forward_, across_;
};

}  // namespace kvstore::levels

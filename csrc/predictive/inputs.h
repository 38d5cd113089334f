// The rows that parts are predicted from.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "predictive/buffer.h"

namespace kvstore::predict {

// Of the last `kept` parts of a block, the inputs of `rows` rows.
class InputRows {
 public:
  InputRows(const std::vector<Part>& parts, std::size_t kept, std::size_t rows, std::size_t input_bytes)
      : parts_(parts), input_bytes_(input_bytes) {
    for (std::size_t i = 0; i < kept; ++i) {
      std::size_t row = 0;
      for (std::size_t p = i; p < parts.size(); p += kept) row = std::max(row, stride(parts[p].width));
      buffers_.emplace_back(rows * row);
      std::fill_n(buffers_.back().get(), rows * row, std::uint8_t{0});  // also where no column is
    }
  }

  std::size_t stride(std::size_t width) const { return round_up(width, kGroup) * input_bytes_; }
  std::uint8_t* rows(std::size_t number) const { return buffers_[number % buffers_.size()].get(); }
  std::uint8_t* row(std::size_t number, std::size_t t) const {
    return rows(number) + t * stride(parts_[number].width);
  }

  // Those of the parts that `part` is predicted from.
  Inputs of(const Part& part) const {
    Inputs from{};
    for (std::size_t i = 0; i < part.inputs.size(); ++i) {
      from.rows[i] = rows(part.inputs[i]);
      from.stride[i] = stride(parts_[part.inputs[i]].width);
    }
    return from;
  }

 private:
  const std::vector<Part>& parts_;
  std::size_t input_bytes_;
  std::vector<Buffer<std::uint8_t>> buffers_;
};

}  // namespace kvstore::predict

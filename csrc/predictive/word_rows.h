// Words of a block whose values are not bf16, as rows that the codec for bf16 takes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "common/rows.h"
#include "predictive/buffer.h"
#include "predictive/model.h"

namespace kvstore::predict {

// Memory for the words of `count` tokens, each part as rows of its heads one after the other.
class WordRows {
 public:
  WordRows(const Model& model, std::size_t count) : words_(model.width() * count), rows_(model.parts().size()) {
    std::size_t at = 0;
    for (std::size_t number = 0; number < rows_.size(); ++number) {
      const Part& part = model.parts()[number];
      rows_[number] = {reinterpret_cast<std::uint64_t>(words_.get() + at), static_cast<std::int64_t>(2 * part.dim),
                       static_cast<std::int64_t>(2 * part.width)};
      at += count * part.width;
    }
  }

  std::uint16_t* part(std::size_t number) const { return reinterpret_cast<std::uint16_t*>(rows_[number].address); }
  const Rows* rows() const { return rows_.data(); }

 private:
  Buffer<std::uint16_t> words_;
  std::vector<Rows> rows_;
};

// Calls visit(a head's values of one token in memory, their place in the part) for `count` tokens of a part.
template <class Visit>
void each_head(const Part& part, const Rows& rows, std::size_t count, Visit visit) {
  for (std::size_t t = 0; t < count; ++t) {
    std::uint64_t address = rows.address + static_cast<std::uint64_t>(rows.token_stride * static_cast<std::int64_t>(t));
    for (std::size_t head = 0; head < part.heads; ++head) {
      visit(reinterpret_cast<std::uint8_t*>(address), t * part.width + head * part.dim);
      address += static_cast<std::uint64_t>(rows.head_stride);
    }
  }
}

}  // namespace kvstore::predict

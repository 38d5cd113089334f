// Blocks of float8 by the predictive codec (FORMAT.md, "float8"): the numbers that they hold are coded as those of a
// bf16 block are, but that the bins are the codes of the dtype.
#pragma once

#include <cstddef>
#include <cstdint>

#include "predictive/predictive.h"

namespace kvstore::predict {

enum class Float8 : int { e5m2, e4m3 };

// As `encode` and `decode` of predictive.h; block.rows are of float8.
int encode_float8(const Model& model, const Block& block, Float8 dtype, std::uint8_t* out, std::size_t capacity,
                  std::size_t limit, std::uint64_t* sizes, Level level);
const char* decode_float8(const Model& model, const Block& block, Float8 dtype, const std::uint8_t* payload,
                          std::size_t nbytes, const std::uint64_t* sizes, std::size_t wanted, Level level);

}  // namespace kvstore::predict

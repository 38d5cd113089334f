// Blocks of fp32 and fp16 by the predictive codec (FORMAT.md, "predictive"): their words (common/words.h) are coded as
// the values of a bf16 block are, and what words leave out of values stands before each layer.
#pragma once

#include <cstddef>
#include <cstdint>

#include "predictive/predictive.h"

namespace kvstore::predict {

enum class Wide : int { float32, float16 };

// As `encode` and `decode` of predictive.h; block.rows are of fp32 or fp16.
int encode_wide(const Model& model, const Block& block, Wide dtype, std::uint8_t* out, std::size_t capacity,
                std::size_t limit, std::uint64_t* sizes, Level level);
const char* decode_wide(const Model& model, const Block& block, Wide dtype, const std::uint8_t* payload,
                        std::size_t nbytes, const std::uint64_t* sizes, std::size_t wanted, Level level);

}  // namespace kvstore::predict

#include "levels/levels.h"

#include <numeric>
#include <optional>
#include <utility>
#include <vector>

#include "common/plain_floats.h"
#include "levels/coder.h"
#include "levels/walk.h"

namespace kvstore::levels {
namespace {

using predict::Block;

std::vector<std::int64_t> positions_of(const Block& block) {
  std::vector<std::int64_t> found(block.count);
  std::iota(found.begin(), found.end(), block.start);
  return found;
}

// Blocks that are predicted from what is known of them alone.
class Step : public Walk {
 public:
  Step(const Model& model, const Block& block, std::size_t wanted, Level level)
      : Walk(model, positions_of(block).data(), block.tokens, block.count, kernels(level)),
        block_(block),
        wanted_(wanted) {}

  void read(const Part& part, std::size_t g, std::uint16_t* values) const {
    copy_tile<false>(part, block_.rows[part.number], g, block_.count, values);
  }
  void write(const Part& part, std::size_t g, std::uint16_t* values) const {
    copy_tile<true>(part, block_.rows[part.number], g, wanted_, values);
  }
  static const Group& measured(const Part& part, std::size_t g, const std::uint16_t*, const std::uint16_t*) {
    return part.groups[g];
  }
  static const Group& given(const Part& part, std::size_t g) { return part.groups[g]; }

 private:
  const Block& block_;
  std::size_t wanted_;
};

class Reading final : public InOrder {
 public:
  Reading(const Model& model, const Block& block, const std::uint8_t* payload, std::size_t nbytes,
          const std::uint64_t* sizes, std::size_t wanted, Level level)
      : model_(model), level_(level), block_(block) {
    if (!predictable(model, block)) {
      wrong_ = "the profile does not know these positions";
      return;
    }
    std::vector<Section> layers;
    wrong_ = cut(model, block.count, mode_of(model.level()), 0, payload, nbytes, sizes, layers);
    if (wrong_) return;
    const PlainFloats floats;
    step_.emplace(model, block_, wanted, level);
    decoder_.emplace(model, *step_, std::move(layers), level);
  }

 private:
  const void* model() const override { return &model_; }
  void part(std::size_t number, InOrder* const* blocks, std::size_t count) override {
    const Part& part = model_.parts()[number];
    Decoder<Step>* decoders[kTogether] = {};
    for (std::size_t i = 0; i < count; ++i) decoders[i] = &*static_cast<Reading*>(blocks[i])->decoder_;
    code(model_, part, kernels(level_), decoders, count);
    for (std::size_t i = 0; i < count; ++i) static_cast<Reading*>(blocks[i])->end(part);
  }
  void end(const Part& part) {
    wrong_ = decoder_->end(part);
    if (wrong_ == nullptr && part.number + 1 == model_.parts().size()) wrong_ = decoder_->finish();
  }

  const Model& model_;
  const Level level_;
  const Block block_;
  std::optional<Step> step_;
  std::optional<Decoder<Step>> decoder_;
};

}  // namespace

bool predictable(const Model& model, const Block& block) {
  const auto count = static_cast<std::int64_t>(block.count);
  return count > 0 && block.start >= 0 && count <= model.positions() && block.start <= model.positions() - count;
}

std::uint64_t multiply(std::uint64_t rounds, Level level) { return kernels(level).multiply(rounds); }

int encode(const Model& model, const Block& block, std::uint8_t* out, std::size_t capacity, std::size_t limit,
           std::uint64_t* sizes, Level level) {
  if (!predictable(model, block)) return predict::kFallBack;
  const PlainFloats floats;
  Step step(model, block, block.count, level);
  Encoder<Step> encoder(model, step, mode_of(model.level()), 0, level);
  Encoder<Step>* const encoders[] = {&encoder};
  for (const Part& part : model.parts()) {
    code(model, part, kernels(level), encoders, 1);
    encoder.end(part);
  }
  return encoder.finish(out, capacity, limit, sizes);
}

std::unique_ptr<InOrder> in_order(const Model& model, const Block& block, const std::uint8_t* payload,
                                  std::size_t nbytes, const std::uint64_t* sizes, std::size_t wanted, Level level) {
  return std::make_unique<Reading>(model, block, payload, nbytes, sizes, wanted, level);
}

const char* decode(const Model& model, const Block& block, const std::uint8_t* payload, std::size_t nbytes,
                   const std::uint64_t* sizes, std::size_t wanted, Level level) {
  return Reading(model, block, payload, nbytes, sizes, wanted, level).until(model.parts().size() / 2);
}

}  // namespace kvstore::levels

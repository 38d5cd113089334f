// Python binding of blocks whose layers are decoded in order (common/in_order.h).
#pragma once

#include <cstddef>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "bindings/arrays.h"
#include "common/in_order.h"

namespace kvstore::bindings {

// The layers of one block, with all that they are decoded from. One thread at a time may decode some of them.
class HeldInOrder {
 public:
  using Kept = std::vector<std::shared_ptr<const void>>;

  HeldInOrder(const char* codec, std::size_t layers, Kept kept, std::unique_ptr<InOrder> block)
      : codec_(codec), layers_(layers), kept_(std::move(kept)), block_(std::move(block)) {}

  // Decodes the layers below `end` of several blocks; what is damaged of each.
  static std::vector<std::optional<std::string>> until(const std::vector<HeldInOrder*>& blocks, std::size_t end) {
    std::vector<InOrder*> each;
    for (const HeldInOrder* const held : blocks) {
      if (held == nullptr) throw py::value_error("blocks: expected blocks, found None");
      if (end > held->layers_) throw py::value_error("end: there are no such layers");
      each.push_back(held->block_.get());
    }
    unlocked([&] { InOrder::until(each.data(), each.size(), end); });
    std::vector<std::optional<std::string>> found;
    for (const HeldInOrder* const held : blocks) found.push_back(damage(held->codec_, held->block_->wrong(end)));
    return found;
  }

 private:
  const char* codec_;
  std::size_t layers_;
  Kept kept_;
  std::unique_ptr<InOrder> block_;
};

// Makes one. model, call: what `in_order` of the codec takes; memory: the payload.
template <class Model, class Call, class Begin>
std::unique_ptr<HeldInOrder> held(const char* codec, std::size_t layers, std::shared_ptr<const Model> model,
                                  std::shared_ptr<const Call> call, const py::buffer& payload,
                                  const std::vector<std::uint64_t>& sizes, const Begin& begin) {
  check_layers(sizes, layers);
  const auto memory = std::make_shared<const Memory>(payload, false);
  auto block = unlocked([&] { return begin(*call, memory->data(), memory->size(), sizes.data()); });
  return std::make_unique<HeldInOrder>(codec, layers, HeldInOrder::Kept{std::move(model), std::move(call), memory},
                                       std::move(block));
}

// Every module has the class for itself.
inline void add_in_order(py::module_& m) {
  py::class_<HeldInOrder>(m, "InOrder", py::module_local())
      .def_static("until", &HeldInOrder::until, py::arg("blocks"), py::arg("end"));
}

}  // namespace kvstore::bindings

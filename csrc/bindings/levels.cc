// Python bindings of the levels of the exact predictor. Arrays of a model must have the exact dtype and shape,
// otherwise a ValueError names the one that has not; they are copied. Coding releases the GIL.
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "bindings/model.h"
#include "levels/levels.h"

namespace py = pybind11;
using namespace kvstore;
using namespace kvstore::bindings;

namespace {

const ArrayChecks kChecks("predictive");

// The arrays of a part, a dict by name.
levels::PartArrays part_of(const levels::Arrays& arrays, const py::dict& given, std::size_t number) {
  const auto width = [&](std::size_t i) {
    const predict::LayerShape& shape = arrays.layers[i / 2];
    return shape.heads * (i % 2 ? shape.value_dim : shape.key_dim);
  };
  levels::PartArrays part;
  const auto take = [&](auto*& to, const char* name, const std::vector<std::size_t>& size, bool needed) {
    using T = std::remove_const_t<std::remove_pointer_t<std::remove_reference_t<decltype(to)>>>;
    MaybeArray found;
    if (given.contains(name) && !given[name].is_none()) found = given[name].cast<py::array>();
    const std::string full = Checks::name_of(number, name);
    to = needed ? kChecks.needed<T>(found, full, size) : kChecks.maybe<T>(found, full, size);
  };
  const std::size_t columns = width(number);
  std::size_t inputs = 0;
  for (const std::size_t input : levels::inputs_of(arrays.level, number)) inputs += width(input);
  take(part.fix, "fix", {columns}, true);
  take(part.gain, "gain", {columns}, true);
  take(part.narrow, "narrow", {columns}, true);
  take(part.shift, "shift", {columns}, true);
  take(part.bias, "bias", {columns}, true);
  take(part.scale, "scale", {columns}, true);
  take(part.adapt, "adapt", {3}, true);
  take(part.row, "row", {columns}, number < 2);
  take(part.weight, "weight", {inputs, columns}, inputs != 0);
  take(part.groups, "groups", {levels::packed_size(columns)}, number >= 2);
  return part;
}

std::shared_ptr<levels::Model> build(int level, const py::array& shapes, const py::list& parts,
                                     const py::array& token_kv, const py::array& freqs, const MaybeArray& rope_fine,
                                     const MaybeArray& rope_coarse) {
  levels::Arrays arrays;
  arrays.level = level;
  if (level < 1 || level > 3) kChecks.refuse("level: expected 1, 2 or 3");
  arrays.layers = layers_of(kChecks, shapes);
  if (parts.size() != 2 * arrays.layers.size()) kChecks.refuse("parts: expected K and V of every layer");
  for (std::size_t i = 0; i < parts.size(); ++i) arrays.parts.push_back(part_of(arrays, parts[i].cast<py::dict>(), i));
  predict::Arrays shared;  // what both kinds of models have alike
  shared.layers = arrays.layers;
  take_tokens(kChecks, shared, token_kv);
  arrays.rotated = rope_fine.has_value();
  if (arrays.rotated) take_rope(kChecks, shared, arrays.layers[0].key_dim / 2, rope_fine, rope_coarse);
  arrays.token_kv = shared.token_kv;
  arrays.vocabulary = shared.vocabulary;
  arrays.rope_fine = shared.rope_fine;
  arrays.rope_coarse = shared.rope_coarse;
  arrays.coarse = shared.coarse;
  arrays.freqs = kChecks.needed<std::uint16_t>(freqs, "freqs", {2 * predict::kClasses, predict::kSymbols});
  return std::make_shared<levels::Model>(arrays);
}

// The arguments that all functions below share, checked.
struct Call {
  Longs tokens;
  std::vector<Rows> rows;
  predict::Block block;
  Level twin;

  Call(const levels::Model& model, const py::array& ids, std::int64_t start, const py::array& table,
       const MaybeLevel& cpu)
      : twin(level_of(cpu)) {
    tokens = tokens_of(ids);
    rows = rows_of(table, model.parts().size());
    block = {tokens.data(), static_cast<std::size_t>(tokens.size()), start, rows.data()};
    if (!levels::codable(model, block.count)) kChecks.refuse("a block has more values than can be coded at once");
  }
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;
};

// The bytes of each layer; None if `out` is too short; FALL_BACK.
py::object encode(const levels::Model& model, const py::array& tokens, std::int64_t start, const py::array& rows,
                  const py::buffer& out, const std::optional<std::size_t>& limit, const MaybeLevel& cpu) {
  const Call call(model, tokens, start, rows, cpu);
  const Memory memory(out, true);
  std::vector<std::uint64_t> sizes(model.parts().size() / 2);
  const int result = unlocked([&] {
    return levels::encode(model, call.block, memory.data(), memory.size(), limit.value_or(SIZE_MAX), sizes.data(),
                          call.twin);
  });
  if (result == predict::kFallBack) return py::int_(static_cast<int>(predict::kFallBack));
  return sizes_if(result == 0, sizes);
}

// What is damaged, or None.
std::optional<std::string> decode(const levels::Model& model, const py::array& tokens, std::int64_t start,
                                  const py::buffer& payload, const std::vector<std::uint64_t>& sizes,
                                  const py::array& rows, std::size_t wanted, const MaybeLevel& cpu) {
  const Call call(model, tokens, start, rows, cpu);
  check_layers(sizes, model.parts().size() / 2);
  if (wanted > call.block.count) throw py::value_error("wanted: more tokens than there are");
  const Memory memory(payload, false);
  return damage("predictive", unlocked([&] {
    return levels::decode(model, call.block, memory.data(), memory.size(), sizes.data(), wanted, call.twin);
  }));
}

}  // namespace

PYBIND11_MODULE(_levels, m) {
  m.doc() = "The levels of the exact predictor; see csrc/levels/levels.h.";
  py::class_<levels::Model, std::shared_ptr<levels::Model>>(m, "Model")
      .def(py::init(&build), py::kw_only(), py::arg("level"), py::arg("shapes"), py::arg("parts"), py::arg("token_kv"),
           py::arg("freqs"), py::arg("rope_fine") = py::none(), py::arg("rope_coarse") = py::none())
      .def_property_readonly("level", &levels::Model::level)
      .def_property_readonly("positions", &levels::Model::positions);
  m.def("encode", &encode, py::arg("model"), py::arg("tokens"), py::arg("start"), py::arg("rows"), py::arg("out"),
        py::arg("limit") = py::none(), py::arg("level") = py::none());
  m.def("decode", &decode, py::arg("model"), py::arg("tokens"), py::arg("start"), py::arg("payload"),
        py::arg("sizes"), py::arg("rows"), py::arg("wanted"), py::arg("level") = py::none());
  m.def("multiply", [](std::uint64_t rounds, const MaybeLevel& cpu) {
    const Level twin = level_of(cpu);
    return unlocked([&] { return levels::multiply(rounds, twin); });
  }, py::arg("rounds"), py::arg("level") = py::none());
  m.attr("FALL_BACK") = static_cast<int>(predict::kFallBack);
}

// Python bindings of the levels of the exact predictor. Arrays of a model must have the exact dtype and shape,
// otherwise a ValueError names the one that has not; they are copied. Coding releases the GIL.
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "bindings/in_order.h"
#include "bindings/level_model.h"
#include "levels/levels.h"

namespace py = pybind11;
using namespace kvstore;
using namespace kvstore::bindings;

namespace {

const ArrayChecks kChecks("predictive");

std::shared_ptr<levels::Model> build(int level, const py::array& shapes, const py::list& parts,
                                     const py::array& token_kv, const py::array& freqs, const MaybeArray& rope_fine,
                                     const MaybeArray& rope_coarse) {
  return std::make_shared<levels::Model>(
      level_model(kChecks, level, shapes, parts, token_kv, freqs, rope_fine, rope_coarse));
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

std::unique_ptr<HeldInOrder> in_order(const std::shared_ptr<levels::Model>& model, const py::array& tokens,
                                      std::int64_t start, const py::buffer& payload,
                                      const std::vector<std::uint64_t>& sizes, const py::array& rows,
                                      std::size_t wanted, const MaybeLevel& cpu) {
  const auto call = std::make_shared<const Call>(*model, tokens, start, rows, cpu);
  if (wanted > call->block.count) throw py::value_error("wanted: more tokens than there are");
  const auto begin = [&](const Call& of, const std::uint8_t* data, std::size_t nbytes, const std::uint64_t* layers) {
    return levels::in_order(*model, of.block, data, nbytes, layers, wanted, of.twin);
  };
  return held<levels::Model, Call>("predictive", model->parts().size() / 2, model, call, payload, sizes, begin);
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
  add_in_order(m);
  m.def("in_order", &in_order, py::arg("model"), py::arg("tokens"), py::arg("start"), py::arg("payload"),
        py::arg("sizes"), py::arg("rows"), py::arg("wanted"), py::arg("level") = py::none());
  m.def("multiply", [](std::uint64_t rounds, const MaybeLevel& cpu) {
    const Level twin = level_of(cpu);
    return unlocked([&] { return levels::multiply(rounds, twin); });
  }, py::arg("rounds"), py::arg("level") = py::none());
  m.attr("FALL_BACK") = static_cast<int>(predict::kFallBack);
}

// Python bindings of the predictive codec. Arrays of a model must have the exact dtype and shape, otherwise a
// ValueError names the one that has not; they are copied. Coding releases the GIL.
#include <pybind11/stl.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "bindings/model.h"
#include "predictive/predictive.h"

namespace py = pybind11;
using namespace kvstore;
using namespace kvstore::bindings;

namespace {

std::shared_ptr<predict::Model> build(const py::array& shapes, const Lists& in_scale, const Lists& out_scale,
                                      const Lists& scale, const Lists& bias, const Lists& adapt, const Lists& fix,
                                      const Lists& weight, const py::array& token_kv,
                                      const std::optional<py::array>& freqs, const std::optional<py::array>& rope_fine,
                                      const std::optional<py::array>& rope_coarse) {
  predict::Arrays arrays{};
  take_base(arrays, shapes, in_scale, out_scale, scale, bias, adapt, fix, &weight, token_kv, rope_fine, rope_coarse);
  arrays.freqs = data_of<std::uint16_t>(freqs, "freqs", {2 * predict::kClasses, predict::kSymbols});
  return std::make_shared<predict::Model>(arrays);
}

// The arguments that all functions below share, checked.
struct Call {
  Longs tokens;
  std::vector<Rows> rows;
  predict::Block block;
  Level twin;

  Call(const predict::Model& model, const py::array& ids, std::int64_t start, const py::array& table, bool coding,
       const std::optional<std::string>& level)
      : twin(level_of(level)) {
    tokens = tokens_of(ids);
    rows = rows_of(table, model.parts().size());
    block = {tokens.data(), static_cast<std::size_t>(tokens.size()), start, rows.data()};
    if (!predict::codable(model, block.count))
      throw std::invalid_argument("predictive: a block has more values than can be coded at once");
    if (coding && !model.codes()) throw std::invalid_argument("predictive: the model has no frequencies");
  }
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;
};

// The bytes of each layer; None where `out` is too short; FALL_BACK.
py::object encode(const predict::Model& model, const py::array& tokens, std::int64_t start, const py::array& rows,
                  const py::buffer& out, const std::optional<std::size_t>& limit,
                  const std::optional<std::string>& level) {
  const Call call(model, tokens, start, rows, true, level);
  const py::buffer_info memory = contiguous(out, true);
  auto* const begin = static_cast<std::uint8_t*>(memory.ptr);
  const auto capacity = static_cast<std::size_t>(memory.size * memory.itemsize);
  std::vector<std::uint64_t> sizes(model.parts().size() / 2);
  int result = 0;
  {
    py::gil_scoped_release release;
    result = predict::encode(model, call.block, begin, capacity, limit.value_or(SIZE_MAX), sizes.data(), call.twin);
  }
  if (result == predict::kNoRoom) return py::none();
  if (result == predict::kFallBack) return py::int_(static_cast<int>(predict::kFallBack));
  return py::tuple(py::cast(sizes));
}

// What is damaged, or None.
std::optional<std::string> decode(const predict::Model& model, const py::array& tokens, std::int64_t start,
                                  std::size_t count, const py::buffer& payload,
                                  const std::vector<std::uint64_t>& sizes, const py::array& rows, std::size_t wanted,
                                  const std::optional<std::string>& level) {
  const Call call(model, tokens, start, rows, true, level);
  if (call.block.count != count) throw std::invalid_argument("tokens: expected as many as the block has");
  if (sizes.size() * 2 != model.parts().size()) throw std::invalid_argument("sizes: expected one a layer");
  if (wanted > count) throw std::invalid_argument("wanted: more tokens than there are");
  const py::buffer_info memory = contiguous(payload, false);
  const auto* const begin = static_cast<const std::uint8_t*>(memory.ptr);
  const auto nbytes = static_cast<std::size_t>(memory.size * memory.itemsize);
  const char* wrong = nullptr;
  {
    py::gil_scoped_release release;
    wrong = predict::decode(model, call.block, begin, nbytes, sizes.data(), wanted, call.twin);
  }
  return wrong ? std::optional<std::string>(wrong) : std::nullopt;
}

// Per part (symbols, classes, offsets); None where the block cannot be predicted.
py::object residuals(const predict::Model& model, const py::array& tokens, std::int64_t start, const py::array& rows,
                     const std::optional<std::string>& level) {
  const Call call(model, tokens, start, rows, false, level);
  std::vector<std::uint8_t*> symbols, classes;
  std::vector<std::int32_t*> offsets;
  py::list made;
  for (const predict::Part& part : model.parts()) {
    const std::vector<py::ssize_t> shape = {static_cast<py::ssize_t>(call.block.count),
                                            static_cast<py::ssize_t>(part.width)};
    py::array_t<std::uint8_t> s(shape), c(shape);
    py::array_t<std::int32_t> o(shape[0]);
    symbols.push_back(s.mutable_data());
    classes.push_back(c.mutable_data());
    offsets.push_back(o.mutable_data());
    made.append(py::make_tuple(s, c, o));
  }
  bool good = false;
  {
    py::gil_scoped_release release;
    good = predict::residuals(model, call.block, symbols.data(), classes.data(), offsets.data(), call.twin);
  }
  if (!good) return py::none();
  return py::object(std::move(made));
}

}  // namespace

PYBIND11_MODULE(_predict, m) {
  m.doc() = "The predictive codec, lossless; see csrc/predictive/predictive.h.";
  py::class_<predict::Model, std::shared_ptr<predict::Model>>(m, "Model")
      .def(py::init(&build), py::kw_only(), py::arg("shapes"), py::arg("in_scale"), py::arg("out_scale"),
           py::arg("scale"), py::arg("bias"), py::arg("adapt"), py::arg("fix"), py::arg("weight"),
           py::arg("token_kv"), py::arg("freqs") = py::none(), py::arg("rope_fine") = py::none(),
           py::arg("rope_coarse") = py::none())
      .def_property_readonly("positions", &predict::Model::positions);
  m.def("encode", &encode, py::arg("model"), py::arg("tokens"), py::arg("start"), py::arg("rows"), py::arg("out"),
        py::arg("limit") = py::none(), py::arg("level") = py::none());
  m.def("decode", &decode, py::arg("model"), py::arg("tokens"), py::arg("start"), py::arg("count"),
        py::arg("payload"), py::arg("sizes"), py::arg("rows"), py::arg("wanted"), py::arg("level") = py::none());
  m.def("residuals", &residuals, py::arg("model"), py::arg("tokens"), py::arg("start"), py::arg("rows"),
        py::arg("level") = py::none());
  m.attr("FALL_BACK") = static_cast<int>(predict::kFallBack);
}

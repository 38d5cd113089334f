// Python bindings of the lossy mode of the predictive codec. Arrays of a model are copied. Decoding releases the GIL.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "bindings/model.h"
#include "lossy/lossy.h"

namespace py = pybind11;
using namespace kvstore;
using namespace kvstore::bindings;

namespace {

// An entry of a dictionary as T.
template <class T>
T taken(const py::dict& from, const char* name) {
  if (!from.contains(name)) throw std::invalid_argument(std::string("lossy: ") + name + ": missing");
  return from[name].cast<T>();
}

std::shared_ptr<lossy::Model> build(const py::dict& base, const py::dict& own) {
  using Maybe = std::optional<py::array>;
  lossy::Arrays arrays{};
  take_base(arrays.base, taken<py::array>(base, "shapes"), taken<Lists>(base, "in_scale"),
            taken<Lists>(base, "out_scale"), taken<Lists>(base, "scale"), taken<Lists>(base, "bias"),
            taken<Lists>(base, "adapt"), taken<Lists>(base, "fix"), nullptr, taken<py::array>(base, "token_kv"),
            taken<Maybe>(base, "rope_fine"), taken<Maybe>(base, "rope_coarse"));
  const std::size_t parts = arrays.base.parts.size();
  const auto levels = taken<py::array>(own, "levels");
  if (levels.ndim() != 2 || levels.shape(0) < 1 || levels.shape(0) > static_cast<py::ssize_t>(lossy::kMostLevels))
    throw std::invalid_argument("lossy: levels: expected 1 to 16 rows");
  arrays.levels = static_cast<std::size_t>(levels.shape(0));
  arrays.steps = needed<std::int16_t>(levels, "levels", {arrays.levels, 2});
  const auto uses = taken<py::array>(own, "uses");
  const auto* const kinds = needed<std::uint8_t>(uses, "uses", {parts / 2, 2});
  const auto weight = taken<Lists>(own, "weight"), out_scale = taken<Lists>(own, "out_scale"),
             bias = taken<Lists>(own, "bias"), basis = taken<Lists>(own, "basis"),
             component = taken<Lists>(own, "component"), unit = taken<Lists>(own, "unit"),
             scale = taken<Lists>(own, "scale"), adapt = taken<Lists>(own, "adapt");
  for (const Lists* list : {&weight, &out_scale, &bias, &basis, &component, &unit, &scale, &adapt})
    if (list->size() != parts) throw std::invalid_argument("lossy: expected an entry for K and V of every layer");
  for (std::size_t i = 0; i < parts; ++i) {
    const predict::LayerShape& shape = arrays.base.layers[i / 2];
    const std::size_t width = shape.heads * (i % 2 ? shape.value_dim : shape.key_dim);
    const std::string name = std::to_string(i / 2) + (i % 2 ? ".v." : ".k.");
    const std::size_t inputs = weight[i] && weight[i]->ndim() == 2 ? static_cast<std::size_t>(weight[i]->shape(0)) : 0;
    arrays.parts.push_back({kinds[i], inputs, data_of<std::int8_t>(weight[i], name + "weight", {inputs, width}),
                            data_of<float>(out_scale[i], name + "out_scale", {width}),
                            data_of<std::int32_t>(bias[i], name + "bias", {width}),
                            needed<std::int8_t>(basis[i], name + "basis", {width, width}),
                            needed<float>(component[i], name + "component", {width}),
                            needed<float>(unit[i], name + "unit", {width}),
                            needed<std::int16_t>(scale[i], name + "scale", {arrays.levels, width}),
                            needed<std::int32_t>(adapt[i], name + "adapt", {3})});
  }
  const auto freqs = taken<Maybe>(own, "freqs"), row_freqs = taken<Maybe>(own, "row_freqs"),
             centroids = taken<Maybe>(own, "centroids"), expect = taken<Maybe>(own, "expect");
  constexpr std::size_t classes = 2 * lossy::kClasses;
  arrays.freqs = needed<std::uint16_t>(freqs, "freqs", {classes, rans::Tables::kSymbols});
  arrays.row_freqs = needed<std::uint16_t>(row_freqs, "row_freqs", {lossy::kShifts, lossy::kShifts});
  arrays.centroids = needed<float>(centroids, "centroids", {classes, lossy::kLargest + 1});
  arrays.expect = needed<std::int32_t>(expect, "expect", {classes, 2});
  return std::make_shared<lossy::Model>(arrays);
}

// The arguments of a call, checked.
struct Call {
  Longs tokens;
  std::vector<Rows> rows;
  std::vector<std::uint64_t> sizes;
  lossy::Block block;
  py::buffer_info memory;
  Level twin;

  Call(const lossy::Model& model, const py::array& ids, std::int64_t start, const py::buffer& payload,
       const std::vector<std::uint64_t>& layers, const py::array& table, std::size_t wanted,
       const std::optional<std::string>& level)
      : tokens(tokens_of(ids)),
        rows(rows_of(table, model.parts().size())),
        sizes(layers),
        memory(contiguous(payload, false)),
        twin(level_of(level)) {
    block = {tokens.data(), static_cast<std::size_t>(tokens.size()), start, rows.data()};
    if (!lossy::codable(model, block.count))
      throw std::invalid_argument("lossy: a block has more values than can be decoded at once");
    if (sizes.size() != model.parts().size() / 2) throw std::invalid_argument("sizes: expected one for every layer");
    if (wanted > block.count) throw std::invalid_argument("wanted: more tokens than the block has");
  }
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;

  const char* decode(const lossy::Model& model, std::size_t wanted, const lossy::Trace* trace) const {
    const py::gil_scoped_release release;
    return lossy::decode(model, block, static_cast<const std::uint8_t*>(memory.ptr),
                         static_cast<std::size_t>(memory.size * memory.itemsize), sizes.data(), wanted, twin, trace);
  }
};

// What is damaged, or None.
std::optional<std::string> decode(const lossy::Model& model, const py::array& tokens, std::int64_t start,
                                  const py::buffer& payload, const std::vector<std::uint64_t>& sizes,
                                  const py::array& rows, std::size_t wanted, const std::optional<std::string>& level) {
  const Call call(model, tokens, start, payload, sizes, rows, wanted, level);
  const char* const wrong = call.decode(model, wanted, nullptr);
  return wrong ? std::optional<std::string>(wrong) : std::nullopt;
}

// Per part (numbers, classes, shifts), besides decoding all rows; or what is damaged.
py::object trace(const lossy::Model& model, const py::array& tokens, std::int64_t start, const py::buffer& payload,
                 const std::vector<std::uint64_t>& sizes, const py::array& rows,
                 const std::optional<std::string>& level) {
  const auto count = static_cast<std::size_t>(tokens.size());
  const Call call(model, tokens, start, payload, sizes, rows, count, level);
  std::vector<std::int16_t*> numbers;
  std::vector<std::int8_t*> classes;
  std::vector<std::uint8_t*> shifts;
  py::list made;
  for (const lossy::Part& part : model.parts()) {
    const std::vector<py::ssize_t> shape = {static_cast<py::ssize_t>(count),
                                            static_cast<py::ssize_t>(part.sums.width)};
    py::array_t<std::int16_t> n(shape);
    py::array_t<std::int8_t> c(shape);
    py::array_t<std::uint8_t> s(shape[0]);
    numbers.push_back(n.mutable_data());
    classes.push_back(c.mutable_data());
    shifts.push_back(s.mutable_data());
    made.append(py::make_tuple(n, c, s));
  }
  const lossy::Trace to{numbers.data(), classes.data(), shifts.data()};
  if (const char* const wrong = call.decode(model, count, &to)) return py::str(wrong);
  return py::object(std::move(made));
}

}  // namespace

PYBIND11_MODULE(_lossy, m) {
  m.doc() = "The predictive codec's lossy mode, decoding; see csrc/lossy/lossy.h.";
  py::class_<lossy::Model, std::shared_ptr<lossy::Model>>(m, "Model")
      .def(py::init(&build), py::arg("base"), py::arg("own"))
      .def_property_readonly("positions", [](const lossy::Model& model) { return model.base().positions(); });
  m.def("decode", &decode, py::arg("model"), py::arg("tokens"), py::arg("start"), py::arg("payload"), py::arg("sizes"),
        py::arg("rows"), py::arg("wanted"), py::arg("level") = py::none());
  m.def("trace", &trace, py::arg("model"), py::arg("tokens"), py::arg("start"), py::arg("payload"), py::arg("sizes"),
        py::arg("rows"), py::arg("level") = py::none());
}

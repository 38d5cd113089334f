// Python bindings of the lossy mode of the predictive codec. Arrays of a model are copied. Decoding releases the GIL.
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "bindings/lossy_encode.h"
#include "bindings/model.h"
#include "lossy/lossy.h"

namespace py = pybind11;
using namespace kvstore;
using namespace kvstore::bindings;

namespace {

const ArrayChecks kChecks("lossy");

// An entry of a dictionary as T.
template <class T>
T taken(const py::dict& from, const char* name) {
  if (!from.contains(name)) kChecks.refuse(std::string(name) + ": missing");
  return from[name].cast<T>();
}

// What lossless and lossy profiles have in common.
struct Base {
  Lists in_scale, out_scale, scale, bias, adapt, fix;

  explicit Base(const py::dict& from)
      : in_scale(taken<Lists>(from, "in_scale")),
        out_scale(taken<Lists>(from, "out_scale")),
        scale(taken<Lists>(from, "scale")),
        bias(taken<Lists>(from, "bias")),
        adapt(taken<Lists>(from, "adapt")),
        fix(taken<Lists>(from, "fix")) {}
  ModelLists lists() const { return {&in_scale, &out_scale, &scale, &bias, &adapt, &fix, nullptr}; }
};

// What only lossy profiles have: an array or None for every part.
struct Own {
  Lists weight, out_scale, bias, basis, component, unit, scale, adapt;

  Own(const py::dict& from, std::size_t parts)
      : weight(taken<Lists>(from, "weight")),
        out_scale(taken<Lists>(from, "out_scale")),
        bias(taken<Lists>(from, "bias")),
        basis(taken<Lists>(from, "basis")),
        component(taken<Lists>(from, "component")),
        unit(taken<Lists>(from, "unit")),
        scale(taken<Lists>(from, "scale")),
        adapt(taken<Lists>(from, "adapt")) {
    for (const Lists* list : {&weight, &out_scale, &bias, &basis, &component, &unit, &scale, &adapt})
      if (list->size() != parts) kChecks.refuse("expected an entry for K and V of every layer");
  }
};

void take_parts(lossy::Arrays& arrays, const Own& own, const std::uint8_t* uses) {
  for (std::size_t i = 0; i < arrays.base.parts.size(); ++i) {
    const predict::LayerShape& shape = arrays.base.layers[i / 2];
    const std::size_t width = shape.heads * (i % 2 ? shape.value_dim : shape.key_dim);
    const auto name = [i](const char* array) { return Checks::name_of(i, array); };
    const MaybeArray& weight = own.weight[i];
    const std::size_t inputs = weight && weight->ndim() == 2 ? static_cast<std::size_t>(weight->shape(0)) : 0;
    arrays.parts.push_back({uses[i], inputs, kChecks.maybe<std::int8_t>(weight, name("weight"), {inputs, width}),
                            kChecks.maybe<float>(own.out_scale[i], name("out_scale"), {width}),
                            kChecks.maybe<std::int32_t>(own.bias[i], name("bias"), {width}),
                            kChecks.needed<std::int8_t>(own.basis[i], name("basis"), {width, width}),
                            kChecks.needed<float>(own.component[i], name("component"), {width}),
                            kChecks.needed<float>(own.unit[i], name("unit"), {width}),
                            kChecks.needed<std::int16_t>(own.scale[i], name("scale"), {arrays.levels, width}),
                            kChecks.needed<std::int32_t>(own.adapt[i], name("adapt"), {3})});
  }
}

std::shared_ptr<lossy::Model> build(const py::dict& base, const py::dict& own) {
  lossy::Arrays arrays{};
  arrays.base.codec = "lossy";
  arrays.base.layers = layers_of(kChecks, taken<py::array>(base, "shapes"));
  const auto rope_fine = taken<MaybeArray>(base, "rope_fine"), rope_coarse = taken<MaybeArray>(base, "rope_coarse");
  const Base lists(base);
  take_rope(kChecks, arrays.base, bindings::take_parts(kChecks, arrays.base, lists.lists()), rope_fine, rope_coarse);
  const auto token_kv = taken<py::array>(base, "token_kv");
  take_tokens(kChecks, arrays.base, token_kv);
  const std::size_t parts = arrays.base.parts.size();
  const auto levels = taken<py::array>(own, "levels"), uses = taken<py::array>(own, "uses");
  if (levels.ndim() != 2 || levels.shape(0) < 1 || levels.shape(0) > static_cast<py::ssize_t>(lossy::kMostLevels))
    kChecks.refuse("levels: expected 1 to 16 rows");
  arrays.levels = static_cast<std::size_t>(levels.shape(0));
  arrays.steps = kChecks.needed<std::int16_t>(levels, "levels", {arrays.levels, 2});
  const Own mine(own, parts);
  take_parts(arrays, mine, kChecks.needed<std::uint8_t>(uses, "uses", {parts / 2, 2}));
  const auto freqs = taken<MaybeArray>(own, "freqs"), row_freqs = taken<MaybeArray>(own, "row_freqs"),
             centroids = taken<MaybeArray>(own, "centroids"), expect = taken<MaybeArray>(own, "expect");
  constexpr std::size_t classes = 2 * lossy::kClasses;
  arrays.freqs = kChecks.needed<std::uint16_t>(freqs, "freqs", {classes, rans::Tables::kSymbols});
  arrays.row_freqs = kChecks.needed<std::uint16_t>(row_freqs, "row_freqs", {lossy::kShifts, lossy::kShifts});
  arrays.centroids = kChecks.needed<float>(centroids, "centroids", {classes, lossy::kLargest + 1});
  arrays.expect = kChecks.needed<std::int32_t>(expect, "expect", {classes, 2});
  return std::make_shared<lossy::Model>(arrays);
}

// The arguments of a call, checked.
struct Call {
  Longs tokens;
  std::vector<Rows> rows;
  std::vector<std::uint64_t> sizes;
  lossy::Block block;
  Memory memory;
  Level twin;

  Call(const lossy::Model& model, const py::array& ids, std::int64_t start, const py::buffer& payload,
       const std::vector<std::uint64_t>& layers, const py::array& table, std::size_t wanted,
       const MaybeLevel& level)
      : tokens(tokens_of(ids)),
        rows(rows_of(table, model.parts().size())),
        sizes(layers),
        memory(payload, false),
        twin(level_of(level)) {
    block = {tokens.data(), static_cast<std::size_t>(tokens.size()), start, rows.data()};
    if (!lossy::codable(model, block.count))
      kChecks.refuse("a block has more values than can be decoded at once");
    check_layers(sizes, model.parts().size() / 2);
    if (wanted > block.count) throw py::value_error("wanted: more tokens than the block has");
  }
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;

  const char* decode(const lossy::Model& model, std::size_t wanted, const lossy::Trace* trace) const {
    const py::gil_scoped_release release;
    return lossy::decode(model, block, memory.data(), memory.size(), sizes.data(), wanted, twin, trace);
  }
};

// What is damaged, or None.
std::optional<std::string> decode(const lossy::Model& model, const py::array& tokens, std::int64_t start,
                                  const py::buffer& payload, const std::vector<std::uint64_t>& sizes,
                                  const py::array& rows, std::size_t wanted, const MaybeLevel& level) {
  const Call call(model, tokens, start, payload, sizes, rows, wanted, level);
  return damage("lossy", call.decode(model, wanted, nullptr));
}

// Per part (numbers, classes, shifts), besides decoding all rows; or what is damaged.
py::object trace(const lossy::Model& model, const py::array& tokens, std::int64_t start, const py::buffer& payload,
                 const std::vector<std::uint64_t>& sizes, const py::array& rows,
                 const MaybeLevel& level) {
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
  if (const auto wrong = damage("lossy", call.decode(model, count, &to))) return py::str(*wrong);
  return py::object(std::move(made));
}

}  // namespace

PYBIND11_MODULE(_lossy, m) {
  m.doc() = "The predictive codec's lossy mode; see csrc/lossy/lossy.h and csrc/lossy/encode/encoder.h.";
  py::class_<lossy::Model, std::shared_ptr<lossy::Model>>(m, "Model")
      .def(py::init(&build), py::arg("base"), py::arg("own"))
      .def_property_readonly("positions", [](const lossy::Model& model) { return model.base().positions(); });
  m.def("decode", &decode, py::arg("model"), py::arg("tokens"), py::arg("start"), py::arg("payload"), py::arg("sizes"),
        py::arg("rows"), py::arg("wanted"), py::arg("level") = py::none());
  m.def("trace", &trace, py::arg("model"), py::arg("tokens"), py::arg("start"), py::arg("payload"), py::arg("sizes"),
        py::arg("rows"), py::arg("level") = py::none());
  bind_lossy_encoder(m);
}

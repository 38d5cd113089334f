// Python bindings of the predictive codec. Arrays of a model must have the exact dtype and shape, otherwise a
// ValueError names the one that has not; they are copied. Coding releases the GIL.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "cpu.h"
#include "kvcopy.h"
#include "predict.h"

namespace py = pybind11;
using namespace kvstore;

namespace {

using Longs = py::array_t<std::int64_t, py::array::c_style>;
using Lists = std::vector<std::optional<py::array>>;  // an array or None for every part

std::string shape_text(const std::vector<std::size_t>& shape) {
  std::string text = "[";
  for (std::size_t i = 0; i < shape.size(); ++i) text += (i ? ", " : "") + std::to_string(shape[i]);
  return text + "]";
}

// The data of an array of this dtype and shape; null for None.
template <class T>
const T* data_of(const std::optional<py::array>& array, const std::string& name,
                 const std::vector<std::size_t>& shape) {
  if (!array) return nullptr;
  bool same = py::isinstance<py::array_t<T>>(*array) && (array->flags() & py::array::c_style) &&
              static_cast<std::size_t>(array->ndim()) == shape.size();
  for (std::size_t i = 0; same && i < shape.size(); ++i)
    same = static_cast<std::size_t>(array->shape(static_cast<py::ssize_t>(i))) == shape[i];
  if (!same)
    throw std::invalid_argument("predictive: " + name + ": expected a contiguous array of " +
                                std::string(py::str(py::dtype::of<T>())) + " " + shape_text(shape));
  return static_cast<const T*>(array->data());
}

template <class T>
const T* needed(const std::optional<py::array>& array, const std::string& name,
                const std::vector<std::size_t>& shape) {
  const T* const data = data_of<T>(array, name, shape);
  if (data == nullptr) throw std::invalid_argument("predictive: " + name + ": missing");
  return data;
}

std::shared_ptr<predict::Model> build(const py::array& shapes, const Lists& in_scale, const Lists& out_scale,
                                      const Lists& scale, const Lists& bias, const Lists& adapt, const Lists& fix,
                                      const Lists& weight, const py::array& token_kv,
                                      const std::optional<py::array>& freqs, const std::optional<py::array>& rope_fine,
                                      const std::optional<py::array>& rope_coarse) {
  predict::Arrays arrays{};
  if (shapes.ndim() != 2 || shapes.shape(1) != 3 || shapes.shape(0) < 1)
    throw std::invalid_argument("predictive: shapes: expected [layers, 3]: heads, key_dim, value_dim");
  const auto layers = static_cast<std::size_t>(shapes.shape(0)), parts = 2 * layers;
  const std::int64_t* dims = needed<std::int64_t>(shapes, "shapes", {layers, 3});
  for (std::size_t i = 0; i < 3 * layers; ++i)
    if (dims[i] < 1 || dims[i] > 1 << 20) throw std::invalid_argument("predictive: shapes: expected 1..2**20");
  for (const Lists* list : {&in_scale, &out_scale, &scale, &bias, &adapt, &fix, &weight})
    if (list->size() != parts) throw std::invalid_argument("predictive: expected an entry for K and V of every layer");
  std::vector<std::size_t> widths;
  std::size_t half = 0;
  for (std::size_t i = 0; i < parts; ++i) {
    const std::int64_t* const d = dims + i / 2 * 3;
    if (i % 2 == 0)
      arrays.layers.push_back({static_cast<std::size_t>(d[0]), static_cast<std::size_t>(d[1]),
                               static_cast<std::size_t>(d[2])});
    const std::size_t width = static_cast<std::size_t>(d[0]) * static_cast<std::size_t>(d[1 + i % 2]);
    widths.push_back(width);
    const std::string name = std::to_string(i / 2) + (i % 2 ? ".v." : ".k.");
    std::size_t inputs = i % 2 && i >= 2 ? widths[i - 1] : 0;
    for (std::size_t p = i / 2 * 2; p-- > 0 && p + 4 >= i / 2 * 2;) inputs += widths[p];
    if (i < 2 && weight[i]) throw std::invalid_argument("predictive: " + name + "weight: layer 0 has none");
    arrays.parts.push_back({needed<float>(in_scale[i], name + "in_scale", {width}),
                            needed<float>(out_scale[i], name + "out_scale", {width}),
                            needed<std::int16_t>(scale[i], name + "scale", {width}),
                            needed<std::int32_t>(bias[i], name + "bias", {width}),
                            needed<std::int32_t>(adapt[i], name + "adapt", {3}),
                            data_of<std::int8_t>(fix[i], name + "fix", {width}),
                            data_of<std::int8_t>(weight[i], name + "weight", {inputs, width})});
    if (fix[i]) half = arrays.layers.back().key_dim / 2;
  }
  if (token_kv.ndim() != 2) throw std::invalid_argument("predictive: token_kv: expected [vocabulary, K and V]");
  arrays.vocabulary = static_cast<std::size_t>(token_kv.shape(0));
  arrays.token_kv = needed<std::int8_t>(token_kv, "token_kv", {arrays.vocabulary, widths[0] + widths[1]});
  arrays.freqs = data_of<std::uint16_t>(freqs, "freqs", {2 * predict::kClasses, predict::kSymbols});
  if (half != 0) {
    if (!rope_coarse || rope_coarse->ndim() != 3)
      throw std::invalid_argument("predictive: rope_coarse: expected [2, N, key_dim / 2]");
    arrays.coarse = static_cast<std::size_t>(rope_coarse->shape(1));
    arrays.rope_fine = needed<std::int16_t>(rope_fine, "rope_fine", {2, predict::kFine, half});
    arrays.rope_coarse = needed<std::int16_t>(rope_coarse, "rope_coarse", {2, arrays.coarse, half});
  }
  return std::make_shared<predict::Model>(arrays);
}

Level level_of(const std::optional<std::string>& name) {
  const Level best = level();
  if (!name) return best;
  Level wanted;
  if (level_named(name->c_str(), &wanted) && wanted <= best) return wanted;
  throw std::invalid_argument("level: " + *name + " is not one that this machine has");
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
    const char kind = ids.dtype().kind();
    if (ids.ndim() != 1 || (kind != 'i' && kind != 'u'))
      throw std::invalid_argument("tokens: expected integers of one dimension");
    tokens = Longs::ensure(ids.attr("astype")("int64"));
    const auto parts = static_cast<py::ssize_t>(model.parts().size());
    if (!py::isinstance<Longs>(table) || table.ndim() != 2 || table.shape(0) != 3 || table.shape(1) != parts ||
        !(table.flags() & py::array::c_style))
      throw std::invalid_argument("rows: expected an int64 array [3, tensors] of address, head and token stride");
    const auto* const data = static_cast<const std::int64_t*>(table.data());
    for (py::ssize_t i = 0; i < parts; ++i)
      rows.push_back({static_cast<std::uint64_t>(data[i]), data[parts + i], data[2 * parts + i]});
    block = {tokens.data(), static_cast<std::size_t>(tokens.size()), start, rows.data()};
    if (!predict::codable(model, block.count))
      throw std::invalid_argument("predictive: a block has more values than can be coded at once");
    if (coding && !model.codes()) throw std::invalid_argument("predictive: the model has no frequencies");
  }
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;
};

py::buffer_info contiguous(const py::buffer& buffer, bool writable) {
  py::buffer_info memory = buffer.request(writable);
  if (memory.ndim != 1 || (memory.size > 1 && memory.strides[0] != memory.itemsize))
    throw std::invalid_argument("buffer: expected one dimension without gaps");
  return memory;
}

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
  m.doc() = "The predictive codec, lossless; see csrc/predict.h.";
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

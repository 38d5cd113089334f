// What the bindings of the predictive codec's two modes share: the arrays of a model, each of the exact dtype and
// shape, otherwise a ValueError names the one that has not; and the arguments of a call. For bindings_*.cc only.
#pragma once

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "common/cpu.h"
#include "common/rows.h"
#include "predictive/model.h"

namespace kvstore::bindings {

namespace py = pybind11;

using Longs = py::array_t<std::int64_t, py::array::c_style>;
using Lists = std::vector<std::optional<py::array>>;  // an array or None for every part

inline std::string shape_text(const std::vector<std::size_t>& shape) {
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

// Fills in what all have, for the reach that `arrays` says. weight: null: of none. The arrays must outlive `arrays`.
inline void take_base(predict::Arrays& arrays, const py::array& shapes, const Lists& in_scale, const Lists& out_scale,
                      const Lists& scale, const Lists& bias, const Lists& adapt, const Lists& fix, const Lists* weight,
                      const py::array& token_kv, const std::optional<py::array>& rope_fine,
                      const std::optional<py::array>& rope_coarse) {
  if (shapes.ndim() != 2 || shapes.shape(1) != 3 || shapes.shape(0) < 1)
    throw std::invalid_argument("predictive: shapes: expected [layers, 3]: heads, key_dim, value_dim");
  const auto layers = static_cast<std::size_t>(shapes.shape(0)), parts = 2 * layers;
  const std::int64_t* dims = needed<std::int64_t>(shapes, "shapes", {layers, 3});
  for (std::size_t i = 0; i < 3 * layers; ++i)
    if (dims[i] < 1 || dims[i] > 1 << 20) throw std::invalid_argument("predictive: shapes: expected 1..2**20");
  for (const Lists* list : {&in_scale, &out_scale, &scale, &bias, &adapt, &fix, weight})
    if (list != nullptr && list->size() != parts)
      throw std::invalid_argument("predictive: expected an entry for K and V of every layer");
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
    for (std::size_t p = i / 2 * 2; p-- > 0 && p + 2 * arrays.reach >= i / 2 * 2;) inputs += widths[p];
    if (weight && i < 2 && (*weight)[i])
      throw std::invalid_argument("predictive: " + name + "weight: layer 0 has none");
    arrays.parts.push_back({needed<float>(in_scale[i], name + "in_scale", {width}),
                            needed<float>(out_scale[i], name + "out_scale", {width}),
                            needed<std::int16_t>(scale[i], name + "scale", {width}),
                            needed<std::int32_t>(bias[i], name + "bias", {width}),
                            needed<std::int32_t>(adapt[i], name + "adapt", {3}),
                            data_of<std::int8_t>(fix[i], name + "fix", {width}),
                            weight ? data_of<std::int8_t>((*weight)[i], name + "weight", {inputs, width}) : nullptr});
    if (fix[i]) half = arrays.layers.back().key_dim / 2;
  }
  if (token_kv.ndim() != 2) throw std::invalid_argument("predictive: token_kv: expected [vocabulary, K and V]");
  arrays.vocabulary = static_cast<std::size_t>(token_kv.shape(0));
  arrays.token_kv = needed<std::int8_t>(token_kv, "token_kv", {arrays.vocabulary, widths[0] + widths[1]});
  if (half != 0) {
    if (!rope_coarse || rope_coarse->ndim() != 3)
      throw std::invalid_argument("predictive: rope_coarse: expected [2, N, key_dim / 2]");
    arrays.coarse = static_cast<std::size_t>(rope_coarse->shape(1));
    arrays.rope_fine = needed<std::int16_t>(rope_fine, "rope_fine", {2, predict::kFine, half});
    arrays.rope_coarse = needed<std::int16_t>(rope_coarse, "rope_coarse", {2, arrays.coarse, half});
  }
  arrays.weights = weight != nullptr;
}

inline Level level_of(const std::optional<std::string>& name) {
  const Level best = level();
  if (!name) return best;
  Level wanted;
  if (level_named(name->c_str(), &wanted) && wanted <= best) return wanted;
  throw std::invalid_argument("level: " + *name + " is not one that this machine has");
}

// One-dimensional integers of any dtype.
inline Longs tokens_of(const py::array& ids) {
  const char kind = ids.dtype().kind();
  if (ids.ndim() != 1 || (kind != 'i' && kind != 'u'))
    throw std::invalid_argument("tokens: expected integers of one dimension");
  return Longs::ensure(ids.attr("astype")("int64"));
}

inline std::vector<Rows> rows_of(const py::array& table, std::size_t tensors) {
  const auto parts = static_cast<py::ssize_t>(tensors);
  if (!py::isinstance<Longs>(table) || table.ndim() != 2 || table.shape(0) != 3 || table.shape(1) != parts ||
      !(table.flags() & py::array::c_style))
    throw std::invalid_argument("rows: expected an int64 array [3, tensors] of address, head and token stride");
  const auto* const data = static_cast<const std::int64_t*>(table.data());
  std::vector<Rows> rows;
  for (py::ssize_t i = 0; i < parts; ++i)
    rows.push_back({static_cast<std::uint64_t>(data[i]), data[parts + i], data[2 * parts + i]});
  return rows;
}

inline py::buffer_info contiguous(const py::buffer& buffer, bool writable) {
  py::buffer_info memory = buffer.request(writable);
  if (memory.ndim != 1 || (memory.size > 1 && memory.strides[0] != memory.itemsize))
    throw std::invalid_argument("buffer: expected one dimension without gaps");
  return memory;
}

}  // namespace kvstore::bindings

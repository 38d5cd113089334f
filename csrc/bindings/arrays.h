// What the bindings of all parts share: arguments from Python, checked, and results for it. What is wrong with an
// argument is a ValueError that begins with its name, or with the codec's and its name.
#pragma once

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "common/checks.h"
#include "common/cpu.h"
#include "common/rows.h"

namespace kvstore::bindings {

namespace py = pybind11;

using Longs = py::array_t<std::int64_t, py::array::c_style>;
using Ints = py::array_t<std::uint32_t, py::array::c_style>;
using MaybeArray = std::optional<py::array>;
using MaybeLevel = std::optional<std::string>;

// Runs `work` without the GIL.
template <class Work>
auto unlocked(Work&& work) {
  const py::gil_scoped_release release;
  return work();
}

// The CPU level of that name, or the one that the environment leaves.
inline Level level_of(const MaybeLevel& name) {
  if (!name) return level();
  Level known;
  if (!level_named(name->c_str(), &known))
    throw py::value_error("level: expected scalar, avx2, avx512, amx or neon, found '" + *name + "'");
  if (!machine_has(known)) {
    std::string found = "scalar";
    for (const Level other : {Level::avx2, Level::avx512, Level::amx, Level::neon})
      if (machine_has(other)) found += (other == machine_level() ? " or " : ", ") + std::string(level_name(other));
    throw py::value_error("level: this machine has no " + *name + "; choose " + found);
  }
  return known;
}

// ---- arrays that are taken as they are ------------------------------------------------------------------------------

template <class T>
struct View {
  T* data;
  std::size_t size;
};

// Why a value is not an aligned C-contiguous array of T of one dimension; null if it is one.
template <class T>
const char* unfit(py::handle value) {
  if (!py::isinstance<py::array>(value)) return "something else";
  const auto array = py::reinterpret_borrow<py::array>(value);
  if (!py::isinstance<py::array_t<T>>(array)) return "another dtype";
  if (array.ndim() != 1) return "another number of dimensions";
  const bool aligned = reinterpret_cast<std::uintptr_t>(array.data()) % alignof(T) == 0;
  return (array.flags() & py::array::c_style) && aligned ? nullptr : "strided or unaligned memory";
}

template <class T>
View<const T> view(py::handle value, const char* name) {
  if (const char* const found = unfit<T>(value))
    throw py::value_error(std::string(name) + ": expected a 1-D C-contiguous numpy array of " +
                          std::string(py::str(py::dtype::of<T>())) + ", found " + found);
  const auto array = py::reinterpret_borrow<py::array>(value);
  return {static_cast<const T*>(array.data()), static_cast<std::size_t>(array.size())};
}

template <class T>
View<T> writable_view(py::handle value, const char* name) {
  const View<const T> made = view<T>(value, name);
  if (!py::reinterpret_borrow<py::array>(value).writeable())
    throw py::value_error(std::string(name) + ": the array is read-only");
  return {const_cast<T*>(made.data), made.size};
}

inline std::size_t same_size(std::size_t found, std::size_t wanted, const char* name) {
  if (found != wanted)
    throw py::value_error(std::string(name) + ": expected " + std::to_string(wanted) + " values, found " +
                          std::to_string(found));
  return found;
}

// The data of a column with as many values as there are rows.
template <class T>
const T* column(py::handle values, std::size_t rows, const char* name) {
  const View<const T> made = view<T>(values, name);
  same_size(made.size, rows, name);
  return made.data;
}

// Hands the vector's memory to numpy without a copy.
template <class T>
py::array_t<T> to_numpy(std::vector<T>&& values) {
  if (values.empty()) return py::array_t<T>(0);
  auto* owned = new std::vector<T>(std::move(values));
  py::capsule owner(owned, [](void* p) { delete static_cast<std::vector<T>*>(p); });
  return py::array_t<T>(static_cast<py::ssize_t>(owned->size()), owned->data(), owner);
}

// A buffer of bytes; lives while this does.
class Memory {
 public:
  Memory(const py::buffer& buffer, bool writable) : memory_(buffer.request(writable)) {
    if (memory_.ndim != 1 || (memory_.size > 1 && memory_.strides[0] != memory_.itemsize))
      throw py::value_error("buffer: expected one dimension without gaps");
  }

  std::uint8_t* data() const { return static_cast<std::uint8_t*>(memory_.ptr); }
  std::size_t size() const { return static_cast<std::size_t>(memory_.size * memory_.itemsize); }

 private:
  py::buffer_info memory_;
};

// ---- blocks ---------------------------------------------------------------------------------------------------------

// One-dimensional integers of any dtype.
inline Longs tokens_of(const py::array& ids) {
  const char kind = ids.dtype().kind();
  if (ids.ndim() != 1 || (kind != 'i' && kind != 'u'))
    throw py::value_error("tokens: expected integers of one dimension");
  return Longs::ensure(ids.attr("astype")("int64"));
}

inline std::vector<Rows> rows_of(const py::array& table, std::size_t tensors) {
  const auto count = static_cast<py::ssize_t>(tensors);
  if (!py::isinstance<Longs>(table) || table.ndim() != 2 || table.shape(0) != 3 || table.shape(1) != count ||
      !(table.flags() & py::array::c_style))
    throw py::value_error("rows: expected an int64 array [3, tensors] of address, head and token stride");
  const auto* const data = static_cast<const std::int64_t*>(table.data());
  std::vector<Rows> rows;
  for (py::ssize_t i = 0; i < count; ++i)
    rows.push_back({static_cast<std::uint64_t>(data[i]), data[count + i], data[2 * count + i]});
  return rows;
}

inline void check_layers(const std::vector<std::uint64_t>& sizes, std::size_t layers) {
  if (sizes.size() != layers) throw py::value_error("sizes: expected one a layer");
}

// The sizes of a block's layers, or None if they did not fit.
inline py::object sizes_if(bool fits, const std::vector<std::uint64_t>& sizes) {
  if (!fits) return py::none();
  return py::tuple(py::cast(sizes));
}

// What is damaged, after the codec's name; None if nothing is.
inline std::optional<std::string> damage(const char* codec, const char* wrong) {
  if (wrong == nullptr) return std::nullopt;
  return std::string(codec) + ": " + wrong;
}

// ---- arrays of a model ----------------------------------------------------------------------------------------------

inline std::string shape_text(const std::vector<std::size_t>& shape) {
  std::string text = "[";
  for (std::size_t i = 0; i < shape.size(); ++i) text += (i ? ", " : "") + std::to_string(shape[i]);
  return text + "]";
}

// Arrays of exact dtype and shape, for the codec that errors name.
class ArrayChecks : public Checks {
 public:
  using Checks::Checks;

  // Null for None.
  template <class T>
  const T* maybe(const MaybeArray& array, const std::string& name, const std::vector<std::size_t>& shape) const {
    if (!array) return nullptr;
    bool same = py::isinstance<py::array_t<T>>(*array) && (array->flags() & py::array::c_style) &&
                static_cast<std::size_t>(array->ndim()) == shape.size();
    for (std::size_t i = 0; same && i < shape.size(); ++i)
      same = static_cast<std::size_t>(array->shape(static_cast<py::ssize_t>(i))) == shape[i];
    if (!same)
      refuse(name + ": expected a contiguous array of " + std::string(py::str(py::dtype::of<T>())) + " " +
             shape_text(shape));
    return static_cast<const T*>(array->data());
  }

  template <class T>
  const T* needed(const MaybeArray& array, const std::string& name, const std::vector<std::size_t>& shape) const {
    const T* const data = maybe<T>(array, name, shape);
    if (data == nullptr) refuse(name + ": missing");
    return data;
  }
};

}  // namespace kvstore::bindings

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <stdexcept>
#include <vector>

#include "kvcopy.h"

namespace py = pybind11;

namespace {

using Longs = py::array_t<std::int64_t, py::array::c_style>;
using Ints = py::array_t<std::uint32_t, py::array::c_style>;

std::vector<kvstore::Rows> rows_of(const Longs& table, py::ssize_t count) {
  if (table.ndim() != 2 || table.shape(0) != 3 || table.shape(1) != count)
    throw std::invalid_argument("rows: expected an int64 array [3, tensors] of address, head and token stride");
  std::vector<kvstore::Rows> rows(static_cast<std::size_t>(count));
  const std::int64_t* data = table.data();
  for (py::ssize_t i = 0; i < count; ++i)
    rows[static_cast<std::size_t>(i)] = {static_cast<std::uint64_t>(data[i]), data[count + i], data[2 * count + i]};
  return rows;
}

void copy_rows(const Longs& target, const Longs& source, const Ints& heads, const Ints& row_bytes,
               std::size_t tokens) {
  const py::ssize_t count = heads.size();
  if (row_bytes.size() != count) throw std::invalid_argument("heads and row_bytes: expected the same length");
  const auto to = rows_of(target, count);
  const auto from = rows_of(source, count);
  py::gil_scoped_release release;
  kvstore::copy_rows(to.data(), from.data(), heads.data(), row_bytes.data(), static_cast<std::size_t>(count), tokens);
}

}  // namespace

PYBIND11_MODULE(_native, m) {
  m.doc() = "C++ core of kvstore.codecs.";
  m.def("copy_rows", &copy_rows, py::arg("target"), py::arg("source"), py::arg("heads"), py::arg("row_bytes"),
        py::arg("tokens"));
}

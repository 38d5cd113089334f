// Python bindings of XXH3, for checksums of what is in memory already.
#include "bindings/arrays.h"
#include "xxh3/xxh3.h"

namespace py = pybind11;
using namespace kvstore;
using namespace kvstore::bindings;

namespace {

py::bytes xxh3_128_of(const py::buffer& data, const MaybeLevel& cpu) {
  const Memory memory(data, false);
  if (memory.size() < kLeast128) throw py::value_error("data: expected at least 241 bytes");
  const auto found = xxh3_128(memory.data(), memory.size(), level_of(cpu));
  return py::bytes(reinterpret_cast<const char*>(found.data()), found.size());
}

}  // namespace

PYBIND11_MODULE(_sums, m) {
  m.doc() = "XXH3 with Python's lock kept; see kvstore.core.record.";
  m.def("xxh3_128", &xxh3_128_of, py::arg("data"), py::arg("level") = py::none());
  m.attr("LEAST_BYTES") = kLeast128;
}

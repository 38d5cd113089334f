// Python bindings of XXH3, for checksums of what is in memory already.
#include "bindings/arrays.h"
#include "common/endian.h"
#include "xxh3/xxh3.h"

namespace py = pybind11;
using namespace kvstore;
using namespace kvstore::bindings;

namespace {

constexpr std::size_t kBrief = 1 << 20;

py::bytes xxh3_128_of(const py::buffer& data, const MaybeLevel& cpu) {
  const Memory memory(data, false);
  if (memory.size() < kLeast128) throw py::value_error("data: expected at least 241 bytes");
  const auto found = xxh3_128(memory.data(), memory.size(), level_of(cpu));
  return py::bytes(reinterpret_cast<const char*>(found.data()), found.size());
}

// xxh3-64 of parts that follow each other, little-endian. More than 1 MiB without Python's lock.
py::bytes xxh3_64_each(const py::buffer& data, const std::vector<std::uint64_t>& sizes, const MaybeLevel& cpu) {
  const Memory memory(data, false);
  std::size_t left = memory.size();
  for (const std::uint64_t size : sizes) {
    if (size > left) throw py::value_error("sizes: more than there is");
    if (size < kLeast64) throw py::value_error("sizes: expected at least 17 bytes each");
    left -= static_cast<std::size_t>(size);
  }
  if (left) throw py::value_error("sizes: less than there is");
  const Level level = level_of(cpu);
  std::vector<std::uint8_t> sums(8 * sizes.size());
  const auto work = [&] {
    const std::uint8_t* at = memory.data();
    for (std::size_t i = 0; i < sizes.size(); at += sizes[i++])
      store64(&sums[8 * i], xxh3_64(at, static_cast<std::size_t>(sizes[i]), level));
  };
  if (memory.size() > kBrief)
    unlocked(work);
  else
    work();
  return py::bytes(reinterpret_cast<const char*>(sums.data()), sums.size());
}

}  // namespace

PYBIND11_MODULE(_sums, m) {
  m.doc() = "XXH3 with Python's lock kept for what is brief; see kvstore.core.record.";
  m.def("xxh3_128", &xxh3_128_of, py::arg("data"), py::arg("level") = py::none());
  m.def("xxh3_64_each", &xxh3_64_each, py::arg("data"), py::arg("sizes"), py::arg("level") = py::none());
  m.attr("LEAST_BYTES") = kLeast128;
  m.attr("LEAST_BYTES_64") = kLeast64;
}

// Python bindings of what reads a catalog's file.
#include <cstring>
#include <random>

#include "bindings/arrays.h"
#include "catalog/catalog.h"
#include "catalog/parents.h"
#include "xxh3/xxh3.h"

namespace py = pybind11;
using namespace kvstore;
using namespace kvstore::bindings;

namespace {

constexpr std::size_t kHead = kEntryBytes;

py::object read_file(py::handle file, unsigned threads) {
  const auto bytes = writable_view<uint8_t>(file, "file");
  if (reinterpret_cast<std::uintptr_t>(bytes.data) % alignof(uint32_t)) throw py::value_error("file: it is unaligned");
  if (threads < 1 || threads > 64) throw py::value_error("threads: expected 1 to 64");
  const CatalogRead found = unlocked([&] { return read_catalog(bytes.data, bytes.size, threads); });
  if (!found.problem.empty()) return py::str(found.problem);
  const std::size_t count = found.entries.size();
  py::array_t<uint8_t> heads(static_cast<py::ssize_t>(kHead * count));
  py::array_t<uint64_t> token_at(static_cast<py::ssize_t>(count));
  uint8_t* const to_heads = heads.mutable_data();
  uint64_t* const to_token_at = token_at.mutable_data();
  py::list longer;
  for (const auto& entry : found.entries)
    if (entry.size > entry.head_and_tokens)
      longer.append(py::bytes(reinterpret_cast<const char*>(bytes.data) + entry.at, entry.size));
  unlocked([&] { gather(bytes.data, found.entries, to_heads, to_token_at); });
  return py::make_tuple(found.commit, heads, found.tokens, token_at, longer);
}

py::array_t<uint64_t> parents(py::handle entries) {
  const auto bytes = view<uint8_t>(entries, "entries");
  if (bytes.size % kEntryBytes) throw py::value_error("entries: expected whole entries of 80 bytes");
  const std::size_t count = bytes.size / kEntryBytes;
  py::array_t<uint64_t> found(static_cast<py::ssize_t>(count));
  uint64_t* const out = found.mutable_data();
  std::random_device random;
  const uint64_t seed = static_cast<uint64_t>(random()) << 32 | random();
  unlocked([&] { find_parents(bytes.data, count, seed, out); });
  return found;
}

}  // namespace

PYBIND11_MODULE(_catalog, m) {
  m.doc() = "Reads the entries of a catalog from the bytes of its file; see kvstore.tiers.disk.whole_file.";
  m.def("read", &read_file, py::arg("file"), py::arg("threads") = 1);
  m.def("parents", &parents, py::arg("entries"));
  m.def("xxh3_64",
        [](py::handle data) {
          const auto bytes = view<uint8_t>(data, "data");
          if (bytes.size < 17) throw py::value_error("data: expected at least 17 bytes");
          return xxh3_64(bytes.data, bytes.size, level());
        },
        py::arg("data"));
}

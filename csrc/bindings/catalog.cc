// Python bindings of what reads a catalog's file.
#include <cstring>
#include <random>

#include "bindings/arrays.h"
#include "catalog/catalog.h"
#include "catalog/parents.h"
#include "common/threads.h"
#include "xxh3/xxh3.h"

namespace py = pybind11;
using namespace kvstore;
using namespace kvstore::bindings;

namespace {

constexpr std::size_t kHead = kEntryBytes;

py::object read_file(py::handle file, unsigned threads) {
  const auto bytes = view<uint8_t>(file, "file");
  if (threads < 1 || threads > 64) throw py::value_error("threads: expected 1 to 64");
  const CatalogRead found = unlocked([&] { return read_catalog(bytes.data, bytes.size, threads); });
  if (!found.problem.empty()) return py::str(found.problem);
  py::array_t<uint8_t> heads(static_cast<py::ssize_t>(kHead * found.entries.size()));
  py::array_t<uint32_t> tokens(static_cast<py::ssize_t>(found.tokens));
  uint8_t* const to_heads = heads.mutable_data();
  uint32_t* const to_tokens = tokens.mutable_data();
  unlocked([&] {
    const std::size_t count = found.entries.size();
    std::vector<uint64_t> firsts;  // the first token of each part
    uint64_t total = 0;
    std::size_t at = 0;
    for (unsigned i = 0; i < threads; ++i) {
      firsts.push_back(total);
      for (; at < count * (i + 1) / threads; ++at) total += (found.entries[at].head_and_tokens - kHead) / 4;
    }
    in_parts(count, threads, [&](unsigned thread, std::size_t begin, std::size_t end) {
      uint8_t* to_head = to_heads + begin * kHead;
      uint32_t* to = to_tokens + firsts[thread];
      for (std::size_t i = begin; i < end; ++i) {
        const auto& entry = found.entries[i];
        const std::size_t size = entry.head_and_tokens - kHead;
        std::memcpy(to_head, bytes.data + entry.at, kHead);
        if (size) std::memcpy(to, bytes.data + entry.at + kHead, size);
        to_head += kHead;
        to += size / 4;
      }
    });
  });
  py::list longer;
  for (const auto& entry : found.entries)
    if (entry.size > entry.head_and_tokens)
      longer.append(py::bytes(reinterpret_cast<const char*>(bytes.data) + entry.at, entry.size));
  return py::make_tuple(found.commit, heads, tokens, longer);
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
          return xxh3_64(bytes.data, bytes.size);
        },
        py::arg("data"));
}

// Python bindings of the content index. Arrays are taken as they are (1-D, C-contiguous, the exact dtype) or refused
// with a ValueError that names them; every call releases the GIL while it works.
#include <string>
#include <utility>
#include <vector>

#include "bindings/arrays.h"
#include "content/content.h"

namespace py = pybind11;
using namespace kvstore;
using namespace kvstore::bindings;

namespace {

bool insert(ContentIndex& index, uint32_t space, uint64_t record, uint64_t parent, py::handle tokens) {
  const auto t = view<uint32_t>(tokens, "tokens");
  return unlocked([&] { return index.insert(space, record, parent, t.data, t.size); });
}

size_t insert_many(ContentIndex& index, py::handle spaces, py::handle records, py::handle parents, py::handle counts,
                   py::handle tokens) {
  const auto r = view<uint64_t>(records, "records");
  ContentRows rows{};
  rows.count = r.size;
  if (!tokens.is_none()) {
    const auto t = view<uint32_t>(tokens, "tokens");
    static constexpr uint32_t kNone = 0;  // nullptr says that the trie has them
    rows.token_count = t.size;
    rows.tokens = t.size ? t.data : &kNone;
  }
  rows.records = r.data;
  rows.spaces = column<uint32_t>(spaces, r.size, "spaces");
  rows.parents = column<uint64_t>(parents, r.size, "parents");
  rows.counts = column<uint32_t>(counts, r.size, "counts");
  return unlocked([&] { return index.insert_many(rows); });
}

py::array_t<uint32_t> tokens(const ContentIndex& index, uint64_t record) {
  std::vector<uint32_t> out;
  if (!unlocked([&] { return index.tokens(record, &out); }))
    throw py::key_error("record: " + std::to_string(record) + " is not indexed");
  return to_numpy(std::move(out));
}

py::tuple find(ContentIndex& index, uint32_t space, py::handle tokens, size_t first, py::handle exclude) {
  const auto t = view<uint32_t>(tokens, "tokens");
  const auto e = view<uint64_t>(exclude, "exclude");
  ContentSpans found = unlocked([&] { return index.find(space, t.data, t.size, first, e.data, e.size); });
  return py::make_tuple(to_numpy(std::move(found.start)), to_numpy(std::move(found.length)),
                        to_numpy(std::move(found.record)), to_numpy(std::move(found.donor_start)),
                        to_numpy(std::move(found.run)));
}

py::dict stats(const ContentIndex& index) {
  const ContentStats s = unlocked([&] { return index.stats(); });
  py::dict out;
  out["records"] = s.records;
  out["tokens"] = s.tokens;
  out["entries"] = s.entries;
  out["waiting"] = s.waiting;
  out["bytes"] = s.bytes;
  return out;
}

}  // namespace

PYBIND11_MODULE(_content, m) {
  m.doc() = "Content index over uint32 tokens; see kvstore.trie.content for the facade.";
  py::module_::import("kvstore.trie._trie");  // knows the type of `trie`
  m.attr("MAX_CONTEXT") = ContentIndex::kMaxContext;
  py::class_<ContentIndex>(m, "ContentIndex")
      .def(py::init<uint32_t, uint32_t, uint32_t, uint32_t, uint64_t, const Trie*>(), py::arg("window"),
           py::arg("winnow"), py::arg("postings"), py::arg("min_length"), py::arg("seed"), py::arg("trie") = nullptr,
           py::keep_alive<1, 7>())
      .def("insert", &insert, py::arg("space"), py::arg("record"), py::arg("parent"), py::arg("tokens"))
      .def("insert_many", &insert_many, py::arg("spaces"), py::arg("records"), py::arg("parents"), py::arg("counts"),
           py::arg("tokens"))
      .def("remove",
           [](ContentIndex& index, uint64_t record) { return unlocked([&] { return index.remove(record); }); },
           py::arg("record"))
      .def("__contains__",
           [](const ContentIndex& index, uint64_t record) { return unlocked([&] { return index.contains(record); }); },
           py::arg("record"))
      .def("__len__", [](const ContentIndex& index) { return unlocked([&] { return index.size(); }); })
      .def("tokens", &tokens, py::arg("record"))
      .def("find", &find, py::arg("space"), py::arg("tokens"), py::arg("first"), py::arg("exclude"))
      .def("stats", &stats);
}

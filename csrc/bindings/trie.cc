// Python bindings of the trie. Arrays are taken as they are (1-D, C-contiguous, the exact dtype) or refused with a
// ValueError that names them; every call releases the GIL while it works.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <string>
#include <utility>
#include <vector>

#include "common/cpu.h"
#include "trie/trie.h"

namespace py = pybind11;
using namespace kvstore;

namespace {

template <class T>
struct Kind;
template <>
struct Kind<uint8_t> {
  static constexpr char code = 'u';
  static constexpr const char* name = "uint8";
};
template <>
struct Kind<uint32_t> {
  static constexpr char code = 'u';
  static constexpr const char* name = "uint32";
};
template <>
struct Kind<uint64_t> {
  static constexpr char code = 'u';
  static constexpr const char* name = "uint64";
};
template <>
struct Kind<float> {
  static constexpr char code = 'f';
  static constexpr const char* name = "float32";
};

template <class T>
struct View {
  const T* data;
  size_t size;
};

template <class T>
View<T> view(py::handle value, const char* name) {
  const char* found = nullptr;
  if (!py::isinstance<py::array>(value)) {
    found = "no numpy array";
  } else {
    const auto array = py::reinterpret_borrow<py::array>(value);
    const py::dtype type = array.dtype();
    const char order = type.byteorder();
    if (type.kind() != Kind<T>::code || type.itemsize() != static_cast<py::ssize_t>(sizeof(T)) || (order != '=' && order != '|'))
      found = "another dtype";
    else if (array.ndim() != 1)
      found = "another number of dimensions";
    else if (!(array.flags() & py::array::c_style) || reinterpret_cast<uintptr_t>(array.data()) % alignof(T))
      found = "strided or unaligned memory";
    else
      return {static_cast<const T*>(array.data()), static_cast<size_t>(array.size())};
  }
  throw py::value_error(std::string(name) + ": expected a 1-D C-contiguous " + Kind<T>::name + " array, found " + found);
}

// Hands the vector's memory to numpy without a copy.
template <class T>
py::array_t<T> to_numpy(std::vector<T>&& values) {
  if (values.empty()) return py::array_t<T>(0);
  auto* owned = new std::vector<T>(std::move(values));
  py::capsule owner(owned, [](void* p) { delete static_cast<std::vector<T>*>(p); });
  return py::array_t<T>(static_cast<py::ssize_t>(owned->size()), owned->data(), owner);
}

template <class F>
auto unlocked(F&& work) {
  py::gil_scoped_release release;
  return work();
}

size_t same_size(size_t found, size_t wanted, const char* name) {
  if (found != wanted)
    throw py::value_error(std::string(name) + ": " + std::to_string(found) + " values where " + std::to_string(wanted) + " are due");
  return found;
}

Level parse_level(const std::string& name) {
  for (const Level known : {Level::scalar, Level::avx2, Level::avx512})
    if (name == level_name(known)) {
      if (known > machine_level()) throw py::value_error("level: this machine has no " + name);
      return known;
    }
  throw py::value_error("level: not scalar, avx2 or avx512");
}

py::array_t<uint64_t> insert(Trie& trie, uint32_t root, py::handle tokens, py::handle bits, py::handle ends, py::handle ids) {
  const auto t = view<uint32_t>(tokens, "tokens");
  const auto e = view<uint32_t>(ends, "ends");
  const auto i = view<uint64_t>(ids, "ids");
  same_size(i.size, e.size, "ids");
  const float* each = nullptr;
  float uniform = 0;
  if (PyFloat_Check(bits.ptr()) || PyLong_Check(bits.ptr())) {
    const double value = PyFloat_AsDouble(bits.ptr());
    if (value == -1.0 && PyErr_Occurred()) throw py::error_already_set();
    uniform = value > 1e38 ? 1e38f : static_cast<float>(value);  // out of range for float; refused below
  } else {
    const auto b = view<float>(bits, "bits");
    same_size(b.size, t.size, "bits");
    each = b.data;
  }
  return to_numpy(unlocked([&] { return trie.insert(root, t.data, t.size, each, uniform, e.data, i.data, e.size); }));
}

py::array_t<uint64_t> restore(Trie& trie, py::handle roots, py::handle ids, py::handle starts, py::handle counts,
                              py::handle tags, py::handle parent_tags, py::handle bits, py::handle tokens,
                              py::handle pinned, py::handle traffic) {
  const auto i = view<uint64_t>(ids, "ids");
  const auto column = [&](auto values, const char* name) {
    same_size(values.size, i.size, name);
    return values.data;
  };
  const auto t = view<uint32_t>(tokens, "tokens");
  TrieRows rows{};
  rows.count = i.size;
  rows.token_count = t.size;
  rows.tokens = t.data;
  rows.ids = i.data;
  rows.roots = column(view<uint32_t>(roots, "roots"), "roots");
  rows.starts = column(view<uint32_t>(starts, "starts"), "starts");
  rows.counts = column(view<uint32_t>(counts, "counts"), "counts");
  rows.tags = column(view<uint64_t>(tags, "tags"), "tags");
  rows.parent_tags = column(view<uint64_t>(parent_tags, "parent_tags"), "parent_tags");
  rows.bits = column(view<float>(bits, "bits"), "bits");
  rows.pinned = column(view<uint8_t>(pinned, "pinned"), "pinned");
  rows.traffic = traffic.is_none() ? nullptr : column(view<uint32_t>(traffic, "traffic"), "traffic");
  return to_numpy(unlocked([&] { return trie.restore(rows); }));
}

py::tuple path(const Trie& trie, uint64_t id) {
  uint32_t root = 0;
  std::vector<uint32_t> tokens;
  if (!unlocked([&] { return trie.path(id, &root, &tokens); })) throw py::key_error("record_id: " + std::to_string(id) + " is not stored");
  return py::make_tuple(root, to_numpy(std::move(tokens)));
}

py::object leaf(const Trie& trie, uint64_t id) {
  TrieLeaf found;
  if (!unlocked([&] { return trie.leaf(id, &found); })) return py::none();
  return py::make_tuple(found.bits, to_numpy(std::move(found.above)));
}

py::object near(const Trie& trie, uint64_t id, double radius, uint32_t visits) {
  TrieNear found;
  if (!unlocked([&] { return trie.near(id, radius, visits, &found); })) return py::none();
  return py::make_tuple(to_numpy(std::move(found.records)), to_numpy(std::move(found.distances)));
}

py::tuple traffic(const Trie& trie) {
  std::vector<uint64_t> ids;
  std::vector<uint32_t> counts;
  unlocked([&] {
    trie.traffic(&ids, &counts);
    return 0;
  });
  return py::make_tuple(to_numpy(std::move(ids)), to_numpy(std::move(counts)));
}

// A query about two paths.
template <double (Trie::*Query)(uint32_t, const uint32_t*, size_t, const uint32_t*, size_t) const>
double of_two(const Trie& trie, uint32_t root, py::handle p, py::handle q) {
  const auto a = view<uint32_t>(p, "p");
  const auto b = view<uint32_t>(q, "q");
  return unlocked([&] { return (trie.*Query)(root, a.data, a.size, b.data, b.size); });
}

py::dict stats(const Trie& trie) {
  const TrieStats s = unlocked([&] { return trie.stats(); });
  py::dict out;
  out["nodes"] = s.nodes;
  out["tokens"] = s.tokens;
  out["records"] = s.records;
  out["bytes"] = s.bytes;
  out["arena_tokens"] = s.arena_tokens;
  out["garbage_tokens"] = s.garbage_tokens;
  return out;
}

}  // namespace

PYBIND11_MODULE(_trie, m) {
  m.doc() = "Radix trie over uint32 tokens; see kvstore.trie.index for the facade.";
  py::class_<Trie>(m, "Trie")
      .def(py::init<uint32_t, double>(), py::arg("block_tokens"), py::arg("concentration") = 4.0)
      .def_property_readonly("block_tokens", &Trie::block_tokens)
      .def_property_readonly("concentration", &Trie::concentration)
      .def("new_root", [](Trie& trie) { return unlocked([&] { return trie.new_root(); }); })
      .def("longest_prefix",
           [](const Trie& trie, uint32_t root, py::handle tokens) {
             const auto t = view<uint32_t>(tokens, "tokens");
             return unlocked([&] { return trie.longest_prefix(root, t.data, t.size); });
           },
           py::arg("root"), py::arg("tokens"))
      .def("best_match",
           [](const Trie& trie, uint32_t root, py::handle tokens) {
             const auto t = view<uint32_t>(tokens, "tokens");
             const auto found = unlocked([&] { return trie.best_match(root, t.data, t.size); });
             return py::make_tuple(found.first, found.second);
           },
           py::arg("root"), py::arg("tokens"))
      .def("bits",
           [](const Trie& trie, uint32_t root, py::handle tokens) {
             const auto t = view<uint32_t>(tokens, "tokens");
             return unlocked([&] { return trie.bits(root, t.data, t.size); });
           },
           py::arg("root"), py::arg("tokens"))
      .def("shared_bits", &of_two<&Trie::shared_bits>, py::arg("root"), py::arg("p"), py::arg("q"))
      .def("distance", &of_two<&Trie::distance>, py::arg("root"), py::arg("p"), py::arg("q"))
      .def("match",
           [](Trie& trie, uint32_t root, py::handle tokens, bool touch) {
             const auto t = view<uint32_t>(tokens, "tokens");
             TrieMatch found = unlocked([&] { return trie.match(root, t.data, t.size, touch); });
             return py::make_tuple(found.depth, found.bits, to_numpy(std::move(found.records)), to_numpy(std::move(found.ends)));
           },
           py::arg("root"), py::arg("tokens"), py::arg("touch"))
      .def("insert", &insert, py::arg("root"), py::arg("tokens"), py::arg("bits"), py::arg("ends"), py::arg("ids"))
      .def("touch",
           [](Trie& trie, uint32_t root, py::handle tokens) {
             const auto t = view<uint32_t>(tokens, "tokens");
             return unlocked([&] { return trie.touch(root, t.data, t.size); });
           },
           py::arg("root"), py::arg("tokens"))
      .def("pin",
           [](Trie& trie, uint32_t root, py::handle tokens, int delta) {
             const auto t = view<uint32_t>(tokens, "tokens");
             unlocked([&] { trie.pin(root, t.data, t.size, delta); });
           },
           py::arg("root"), py::arg("tokens"), py::arg("delta"))
      .def("evict",
           [](Trie& trie, uint64_t below) -> py::object {
             const uint64_t id = unlocked([&] { return trie.evict(below); });
             if (!id) return py::none();
             return py::int_(id);
           },
           py::arg("below") = UINT64_MAX)
      .def("remove", [](Trie& trie, uint64_t id) { return unlocked([&] { return trie.remove(id); }); }, py::arg("record_id"))
      .def("erase",
           [](Trie& trie, uint32_t root, py::handle tokens) {
             const auto t = view<uint32_t>(tokens, "tokens");
             return to_numpy(unlocked([&] { return trie.erase(root, t.data, t.size); }));
           },
           py::arg("root"), py::arg("tokens"))
      .def("prune",
           [](Trie& trie, uint32_t root, double max_bits) {
             return to_numpy(unlocked([&] { return trie.prune(root, max_bits); }));
           },
           py::arg("root"), py::arg("max_bits"))
      .def("leaf", &leaf, py::arg("record_id"))
      .def("near", &near, py::arg("record_id"), py::arg("radius_bits"), py::arg("visits"))
      .def("counts", &traffic)
      .def("contains", [](const Trie& trie, uint64_t id) { return unlocked([&] { return trie.contains(id); }); }, py::arg("record_id"))
      .def("path", &path, py::arg("record_id"))
      .def("restore", &restore, py::arg("roots"), py::arg("ids"), py::arg("starts"), py::arg("counts"), py::arg("tags"),
           py::arg("parent_tags"), py::arg("bits"), py::arg("tokens"), py::arg("pinned"),
           py::arg("traffic") = py::none())
      .def("compact", [](Trie& trie) { unlocked([&] { trie.compact(); }); })
      .def("stats", &stats);

  m.attr("UNIFORM_BITS") = kUniformBits;
  m.def("level", [] { return level_name(level()); });
  m.def("machine_level", [] { return level_name(machine_level()); });
  m.def("common_prefix",
        [](py::handle a, py::handle b, const std::string& name) {
          const auto x = view<uint32_t>(a, "a");
          const auto y = view<uint32_t>(b, "b");
          same_size(y.size, x.size, "b");
          if (x.size > 0x7fffffff) throw py::value_error("a: more than 2^31 - 1 tokens");
          const PrefixFn run = common_prefix(parse_level(name));
          return unlocked([&] { return run(x.data, y.data, static_cast<uint32_t>(x.size)); });
        },
        py::arg("a"), py::arg("b"), py::arg("level"));
}

// Python bindings of the trie. Arrays are taken as they are (1-D, C-contiguous, the exact dtype) or refused with a
// ValueError that names them. Calls that may take long release the GIL. Brief ones keep it: whoever gives it away waits
// for it up to 5 ms (sys.getswitchinterval) where another thread computes in Python, a thousand times what they take.
#include <atomic>
#include <string>
#include <utility>
#include <vector>

#include "bindings/arrays.h"
#include "trie/trie.h"

namespace py = pybind11;
using namespace kvstore;
using namespace kvstore::bindings;

namespace {

// How many calls work without the GIL. Changed by who holds it.
std::atomic<int> working{0};

// Runs `work` without the GIL.
template <class Work>
auto at_length(Work&& work) {
  struct Working {
    Working() { working.fetch_add(1); }
    ~Working() { working.fetch_sub(1); }
  } const counted;
  const py::gil_scoped_release release;
  return work();
}

// Runs `work`, which takes microseconds, with the GIL, unless it might wait for a call that takes long.
template <class Work>
auto briefly(Work&& work) {
  return working.load() ? at_length(work) : work();
}

// The same of a path of so many tokens.
constexpr std::size_t kBriefTokens = std::size_t{1} << 16;
template <class Work>
auto briefly_for(std::size_t tokens, Work&& work) {
  return tokens > kBriefTokens ? at_length(work) : briefly(work);
}

py::array_t<uint64_t> insert(Trie& trie, uint32_t root, py::handle tokens, py::handle bits, py::handle ends,
                             py::handle ids, bool keep_tails) {
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
  return to_numpy(at_length(
      [&] { return trie.insert(root, t.data, t.size, each, uniform, e.data, i.data, e.size, keep_tails); }));
}

py::array_t<uint64_t> restore(Trie& trie, py::handle roots, py::handle ids, py::handle starts, py::handle counts,
                              py::handle tags, py::handle parent_tags, py::handle bits, py::handle tokens,
                              py::handle pinned, py::handle traffic, py::handle holes, bool keep_tails,
                              py::handle token_at) {
  const auto i = view<uint64_t>(ids, "ids");
  const auto t = view<uint32_t>(tokens, "tokens");
  TrieRows rows{};
  rows.count = i.size;
  rows.token_count = t.size;
  rows.tokens = t.data;
  rows.ids = i.data;
  rows.roots = column<uint32_t>(roots, i.size, "roots");
  rows.starts = column<uint32_t>(starts, i.size, "starts");
  rows.counts = column<uint32_t>(counts, i.size, "counts");
  rows.tags = column<uint64_t>(tags, i.size, "tags");
  rows.parent_tags = column<uint64_t>(parent_tags, i.size, "parent_tags");
  rows.bits = column<float>(bits, i.size, "bits");
  rows.pinned = column<uint8_t>(pinned, i.size, "pinned");
  rows.holes = holes.is_none() ? nullptr : column<uint8_t>(holes, i.size, "holes");
  rows.traffic = traffic.is_none() ? nullptr : column<uint32_t>(traffic, i.size, "traffic");
  rows.keep_tails = keep_tails;
  rows.token_at = token_at.is_none() ? nullptr : column<uint64_t>(token_at, i.size, "token_at");
  return to_numpy(at_length([&] { return trie.restore(rows); }));
}

py::tuple path(const Trie& trie, uint64_t id) {
  uint32_t root = 0;
  std::vector<uint32_t> tokens;
  if (!briefly([&] { return trie.path(id, &root, &tokens); }))
    throw py::key_error("record_id: " + std::to_string(id) + " is not stored");
  return py::make_tuple(root, to_numpy(std::move(tokens)));
}

py::object leaf(const Trie& trie, uint64_t id) {
  TrieLeaf found;
  if (!briefly([&] { return trie.leaf(id, &found); })) return py::none();
  return py::make_tuple(found.bits, to_numpy(std::move(found.above)));
}

py::object near(const Trie& trie, uint64_t id, double radius, uint32_t visits) {
  TrieNear found;
  if (!at_length([&] { return trie.near(id, radius, visits, &found); })) return py::none();
  return py::make_tuple(to_numpy(std::move(found.records)), to_numpy(std::move(found.distances)));
}

template <bool holes>
py::tuple traffic(const Trie& trie) {
  std::vector<uint64_t> ids;
  std::vector<uint32_t> counts;
  at_length([&] { trie.traffic(holes, &ids, &counts); });
  return py::make_tuple(to_numpy(std::move(ids)), to_numpy(std::move(counts)));
}

// A query about one path, or a change of it.
template <auto Query>
auto of_one(Trie& trie, uint32_t root, py::handle tokens) {
  const auto t = view<uint32_t>(tokens, "tokens");
  return briefly_for(t.size, [&] { return (trie.*Query)(root, t.data, t.size); });
}

// A query about two paths.
template <auto Query>
double of_two(const Trie& trie, uint32_t root, py::handle p, py::handle q) {
  const auto a = view<uint32_t>(p, "p");
  const auto b = view<uint32_t>(q, "q");
  const auto work = [&] { return (trie.*Query)(root, a.data, a.size, b.data, b.size); };
  return briefly_for(a.size + b.size, work);
}

// (id, end) of records on a path.
template <auto Query>
py::list ends_of(const Trie& trie, uint32_t root, py::handle tokens) {
  const auto t = view<uint32_t>(tokens, "tokens");
  const auto found = briefly_for(t.size, [&] { return (trie.*Query)(root, t.data, t.size); });
  py::list out;
  for (const auto& [id, end] : found) out.append(py::make_tuple(id, end));
  return out;
}

py::dict stats(const Trie& trie) {
  const TrieStats s = briefly([&] { return trie.stats(); });
  py::dict out;
  out["nodes"] = s.nodes;
  out["tokens"] = s.tokens;
  out["records"] = s.records;
  out["holes"] = s.holes;
  out["bytes"] = s.bytes;
  out["arena_tokens"] = s.arena_tokens;
  out["garbage_tokens"] = s.garbage_tokens;
  return out;
}

// Methods that change nothing but recency.
void def_queries(py::class_<Trie>& trie) {
  trie.def("longest_prefix", &of_one<&Trie::longest_prefix>, py::arg("root"), py::arg("tokens"))
      .def("best_match",
           [](const Trie& trie, uint32_t root, py::handle tokens) {
             const auto t = view<uint32_t>(tokens, "tokens");
             const auto found = briefly_for(t.size, [&] { return trie.best_match(root, t.data, t.size); });
             return py::make_tuple(found.first, found.second);
           },
           py::arg("root"), py::arg("tokens"))
      .def("bits", &of_one<&Trie::bits>, py::arg("root"), py::arg("tokens"))
      .def("shared_bits", &of_two<&Trie::shared_bits>, py::arg("root"), py::arg("p"), py::arg("q"))
      .def("distance", &of_two<&Trie::distance>, py::arg("root"), py::arg("p"), py::arg("q"))
      .def("match",
           [](Trie& trie, uint32_t root, py::handle tokens, bool touch) {
             const auto t = view<uint32_t>(tokens, "tokens");
             TrieMatch found = briefly_for(t.size, [&] { return trie.match(root, t.data, t.size, touch); });
             return py::make_tuple(found.depth, found.bits, to_numpy(std::move(found.records)),
                                   to_numpy(std::move(found.ends)));
           },
           py::arg("root"), py::arg("tokens"), py::arg("touch"))
      .def("tails", &ends_of<&Trie::tails>, py::arg("root"), py::arg("tokens"))
      .def("covers", &ends_of<&Trie::covers>, py::arg("root"), py::arg("tokens"))
      .def("leaf", &leaf, py::arg("record_id"))
      .def("near", &near, py::arg("record_id"), py::arg("radius_bits"), py::arg("visits"))
      .def("counts", &traffic<false>)
      .def("holes", &traffic<true>)
      .def("is_hole", [](const Trie& trie, uint64_t id) { return briefly([&] { return trie.is_hole(id); }); },
           py::arg("record_id"))
      .def("contains", [](const Trie& trie, uint64_t id) { return briefly([&] { return trie.contains(id); }); },
           py::arg("record_id"))
      .def("path", &path, py::arg("record_id"))
      .def("stats", &stats);
}

// Methods that change what is stored.
void def_changes(py::class_<Trie>& trie) {
  trie.def("insert", &insert, py::arg("root"), py::arg("tokens"), py::arg("bits"), py::arg("ends"), py::arg("ids"),
           py::arg("keep_tails") = false)
      .def("touch", &of_one<&Trie::touch>, py::arg("root"), py::arg("tokens"))
      .def("pin",
           [](Trie& trie, uint32_t root, py::handle tokens, int delta) {
             const auto t = view<uint32_t>(tokens, "tokens");
             briefly_for(t.size, [&] { trie.pin(root, t.data, t.size, delta); });
           },
           py::arg("root"), py::arg("tokens"), py::arg("delta"))
      .def("evict",
           [](Trie& trie, uint64_t below) -> py::object {
             const uint64_t id = briefly([&] { return trie.evict(below); });
             if (!id) return py::none();
             return py::int_(id);
           },
           py::arg("below") = UINT64_MAX)
      .def("remove", [](Trie& trie, uint64_t id) { return briefly([&] { return trie.remove(id); }); },
           py::arg("record_id"))
      .def("erase",
           [](Trie& trie, uint32_t root, py::handle tokens) {
             const auto t = view<uint32_t>(tokens, "tokens");
             return to_numpy(at_length([&] { return trie.erase(root, t.data, t.size); }));
           },
           py::arg("root"), py::arg("tokens"))
      .def("prune",
           [](Trie& trie, uint32_t root, double max_bits) {
             return to_numpy(at_length([&] { return trie.prune(root, max_bits); }));
           },
           py::arg("root"), py::arg("max_bits"))
      .def("restore", &restore, py::arg("roots"), py::arg("ids"), py::arg("starts"), py::arg("counts"), py::arg("tags"),
           py::arg("parent_tags"), py::arg("bits"), py::arg("tokens"), py::arg("pinned"),
           py::arg("traffic") = py::none(), py::arg("holes") = py::none(), py::arg("keep_tails") = false,
           py::arg("token_at") = py::none())
      .def("take_released", [](Trie& trie) { return to_numpy(briefly([&] { return trie.take_released(); })); })
      .def("compact", [](Trie& trie) { at_length([&] { trie.compact(); }); });
}

template <class T, auto twin>
uint32_t count_shared(py::handle a, py::handle b, const std::string& name) {
  const auto x = view<T>(a, "a");
  const auto y = view<uint32_t>(b, "b");
  same_size(y.size, x.size, "b");
  if (x.size > 0x7fffffff) throw py::value_error("a: more than 2^31 - 1 tokens");
  const auto run = twin(level_of(name));
  return unlocked([&] { return run(x.data, y.data, static_cast<uint32_t>(x.size)); });
}

}  // namespace

PYBIND11_MODULE(_trie, m) {
  m.doc() = "Radix trie over uint32 tokens; see kvstore.trie.index for the facade.";
  py::class_<Trie> trie(m, "Trie");
  trie.def(py::init<uint32_t, double>(), py::arg("block_tokens"), py::arg("concentration") = 4.0)
      .def_property_readonly("block_tokens", &Trie::block_tokens)
      .def_property_readonly("concentration", &Trie::concentration)
      .def("new_root", [](Trie& trie) { return unlocked([&] { return trie.new_root(); }); });
  def_queries(trie);
  def_changes(trie);

  m.attr("UNIFORM_BITS") = kUniformBits;
  m.def("level", [] { return level_name(level()); });
  m.def("machine_level", [] { return level_name(machine_level()); });
  m.def("common_prefix", &count_shared<uint32_t, common_prefix>, py::arg("a"), py::arg("b"), py::arg("level"));
  m.def("common_narrow_prefix", &count_shared<uint16_t, common_narrow_prefix>, py::arg("a"), py::arg("b"),
        py::arg("level"));
}

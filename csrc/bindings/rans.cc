// Python bindings of the entropy coder. Arrays are taken as they are (C-contiguous, the exact dtype) or refused with a
// ValueError that names them; coding releases the GIL.
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "bindings/arrays.h"
#include "rans/rans.h"

namespace py = pybind11;
using namespace kvstore;
using namespace kvstore::bindings;

namespace {

using Bytes = View<const std::uint8_t>;

void refuse_overlap(const View<std::uint8_t>& out, const Bytes& other) {
  const auto a = reinterpret_cast<std::uintptr_t>(out.data), b = reinterpret_cast<std::uintptr_t>(other.data);
  if (a < b + other.size && b < a + out.size) throw py::value_error("out: overlaps an input");
}

std::shared_ptr<rans::Tables> build(const py::array& freqs, int bits) {
  if (!py::isinstance<py::array_t<std::uint16_t>>(freqs) || freqs.ndim() != 2 ||
      !(freqs.flags() & py::array::c_style) ||
      freqs.shape(1) != static_cast<py::ssize_t>(rans::Tables::kSymbols))
    throw py::value_error("freqs: expected a contiguous uint16 array [tables, 256]");
  auto tables = std::make_shared<rans::Tables>();
  if (!tables->build(static_cast<const std::uint16_t*>(freqs.data()), static_cast<std::size_t>(freqs.shape(0)), bits))
    throw py::value_error("freqs: expected 1 to 256 tables, 11 or 12 bits, and rows that sum to 2**bits");
  return tables;
}

using Code = std::int64_t(const rans::Tables&, const std::uint8_t*, std::size_t, const std::uint8_t*, std::size_t,
                          std::uint8_t*, std::size_t, Level);

// Both directions of a single part: `from` by `classes` into `out`.
std::int64_t code(Code* function, const char* what, const rans::Tables& tables, const py::array& from,
                  const py::array& classes, const py::array& out, const MaybeLevel& name) {
  const Bytes source = view<std::uint8_t>(from, what), by = view<std::uint8_t>(classes, "classes");
  const View<std::uint8_t> to = writable_view<std::uint8_t>(out, "out");
  refuse_overlap(to, source);
  refuse_overlap(to, by);
  const Level twin = level_of(name);
  return unlocked([&] {
    return function(tables, source.data, source.size, by.data, by.size, to.data, to.size, twin);
  });
}

std::int64_t encode(const rans::Tables& tables, const py::array& symbols, const py::array& classes,
                    const py::array& out, const MaybeLevel& name) {
  return code(rans::encode, "symbols", tables, symbols, classes, out, name);
}

std::int64_t decode(const rans::Tables& tables, const py::array& stream, const py::array& classes,
                    const py::array& out, const MaybeLevel& name) {
  return code(rans::decode, "stream", tables, stream, classes, out, name);
}

std::int64_t decode_pair(const rans::Tables& tables, const std::vector<py::array>& streams,
                         const std::vector<py::array>& classes, const std::vector<py::array>& outs,
                         const MaybeLevel& name) {
  if (streams.size() != 2 || classes.size() != 2 || outs.size() != 2)
    throw py::value_error("expected two streams, and classes and out of both");
  rans::Stream pair[2];
  for (std::size_t i = 0; i < 2; ++i) {
    const Bytes stream = view<std::uint8_t>(streams[i], "streams"), by = view<std::uint8_t>(classes[i], "classes");
    const View<std::uint8_t> to = writable_view<std::uint8_t>(outs[i], "outs");
    pair[i] = {stream.data, stream.size, by.data, by.size, to.data, to.size};
  }
  for (const rans::Stream& one : pair) {
    for (const rans::Stream& other : pair) {
      refuse_overlap({one.out, one.n}, {other.bytes, other.nbytes});
      refuse_overlap({one.out, one.n}, {other.classes, other.period});
    }
  }
  const Level twin = level_of(name);
  return unlocked([&] { return rans::decode(tables, pair[0], pair[1], twin); });
}

// (length or error, the end of each part)
std::pair<std::int64_t, std::vector<std::size_t>> encode_parts(const rans::Tables& tables,
                                                               const std::vector<py::array>& symbols,
                                                               const std::vector<py::array>& classes,
                                                               const py::array& out,
                                                               const MaybeLevel& name) {
  if (symbols.size() != classes.size()) throw py::value_error("classes: expected as many arrays as of symbols");
  const View<std::uint8_t> to = writable_view<std::uint8_t>(out, "out");
  std::vector<rans::Part> parts;
  for (std::size_t i = 0; i < symbols.size(); ++i) {
    const Bytes from = view<std::uint8_t>(symbols[i], "symbols"), by = view<std::uint8_t>(classes[i], "classes");
    refuse_overlap(to, from);
    refuse_overlap(to, by);
    parts.push_back({from.data, from.size, by.data, by.size});
  }
  const Level twin = level_of(name);
  std::vector<std::size_t> ends(parts.size());
  const std::int64_t size = unlocked([&] {
    return rans::encode(tables, parts.data(), parts.size(), to.data, to.size, ends.data(), twin);
  });
  return {size, std::move(ends)};
}

// Keeps what the decoder looks at.
class Decoder {
 public:
  Decoder(std::shared_ptr<const rans::Tables> tables, py::array stream)
      : tables_(std::move(tables)),
        array_(std::move(stream)),
        stream_(view<std::uint8_t>(array_, "stream")),
        decoder_(*tables_, stream_.data, stream_.size) {}

  std::int64_t part(const py::array& classes, const py::array& out, const MaybeLevel& name) {
    const Bytes by = view<std::uint8_t>(classes, "classes");
    const View<std::uint8_t> to = writable_view<std::uint8_t>(out, "out");
    refuse_overlap(to, stream_);
    refuse_overlap(to, by);
    const Level twin = level_of(name);
    return unlocked([&] { return decoder_.part(by.data, by.size, to.data, to.size, twin); });
  }
  std::int64_t position() const { return decoder_.position(); }
  std::int64_t finish() const { return decoder_.finish(); }

 private:
  std::shared_ptr<const rans::Tables> tables_;
  py::array array_;
  Bytes stream_;
  rans::Decoder decoder_;
};

}  // namespace

PYBIND11_MODULE(_rans, m) {
  m.doc() = "Interleaved rANS; see csrc/rans/rans.h for the format.";
  py::class_<rans::Tables, std::shared_ptr<rans::Tables>>(m, "Tables")
      .def(py::init(&build), py::arg("freqs"), py::arg("prob_bits"));
  m.def("bound", &rans::bound, py::arg("count"));
  m.def("encode", &encode, py::arg("tables"), py::arg("symbols"), py::arg("classes"), py::arg("out"),
        py::arg("level") = py::none());
  m.def("decode", &decode, py::arg("tables"), py::arg("stream"), py::arg("classes"), py::arg("out"),
        py::arg("level") = py::none());
  m.def("decode_pair", &decode_pair, py::arg("tables"), py::arg("streams"), py::arg("classes"), py::arg("outs"),
        py::arg("level") = py::none());
  m.def("encode_parts", &encode_parts, py::arg("tables"), py::arg("symbols"), py::arg("classes"), py::arg("out"),
        py::arg("level") = py::none());
  py::class_<Decoder>(m, "Decoder")
      .def(py::init<std::shared_ptr<rans::Tables>, py::array>(), py::arg("tables"), py::arg("stream"))
      .def("part", &Decoder::part, py::arg("classes"), py::arg("out"), py::arg("level") = py::none())
      .def("finish", &Decoder::finish)
      .def_property_readonly("position", &Decoder::position);
  m.def("machine_level", [] { return level_name(machine_level()); });
  m.attr("UNKNOWN_CLASS") = static_cast<int>(rans::kUnknownClass);
  m.attr("UNUSED_SYMBOL") = static_cast<int>(rans::kUnusedSymbol);
  m.attr("NO_ROOM") = static_cast<int>(rans::kNoRoom);
  m.attr("DAMAGED") = static_cast<int>(rans::kDamaged);
}
